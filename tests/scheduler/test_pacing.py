"""Pacer: the policy visits a request that may have completed a block, and few others."""

from hypothesis import given
from hypothesis import strategies as st

from simple_offload.scheduler.policies.pacing import Pacer

SIZE = 16


def test_a_request_is_due_until_it_is_postponed() -> None:
    pacer = Pacer()
    pacer.add("a")
    assert pacer.on_step({"a": 1, "b": 1}) == ["a"]
    assert pacer.on_step({"a": 1}) == ["a"]
    pacer.postpone("a", 2)
    assert pacer.on_step({"a": 1}) == []
    assert pacer.on_step({"a": 1}) == ["a"]


def test_a_request_that_does_not_run_stays_due() -> None:
    pacer = Pacer()
    pacer.add("a")
    pacer.add("b")
    assert pacer.on_step({"a": 1}) == ["a"]
    assert pacer.on_step({"b": 1}) == ["b"]


def test_a_request_that_lacks_nothing_stays_due() -> None:
    pacer = Pacer()
    pacer.add("a")
    pacer.on_step({"a": 1})
    pacer.postpone("a", 0)
    assert pacer.on_step({"a": 1}) == ["a"]


def test_the_most_tokens_of_a_step_count_for_all_requests() -> None:
    pacer = Pacer()
    for name in "ab":
        pacer.add(name)
    pacer.on_step({"a": 1, "b": 4})
    for name in "ab":
        pacer.postpone(name, 4)
    assert pacer.on_step({"a": 1, "b": 1}) == ["a", "b"]


def test_a_request_in_a_big_step_is_due_at_once_without_the_others() -> None:
    pacer = Pacer()
    for name in "ab":
        pacer.add(name)
    pacer.on_step({"a": 1, "b": 1})
    for name in "ab":
        pacer.postpone(name, 10)
    assert pacer.on_step({"a": 1, "b": 512}) == ["b"]
    pacer.postpone("b", 10)  # no effect: the number of tokens of this step is not known yet
    assert pacer.on_step({"a": 1, "b": 1}) == ["b"]


def test_a_removed_request_is_not_due() -> None:
    pacer = Pacer()
    for name in "ab":
        pacer.add(name)
    pacer.remove("a")
    assert pacer.on_step({"a": 1, "b": 1}) == ["b"]
    pacer.postpone("b", 1)
    pacer.remove("b")
    assert pacer.on_step({"a": 1, "b": 1}) == []
    pacer.add("a")
    pacer.clear()
    assert pacer.on_step({"a": 1, "b": 1}) == []


def test_a_request_that_is_added_again_is_due() -> None:
    pacer = Pacer()
    pacer.add("a")
    pacer.on_step({"a": 1})
    pacer.postpone("a", 5)
    pacer.add("a")
    assert pacer.on_step({"a": 1}) == ["a"]


def test_without_requests() -> None:
    assert Pacer().on_step({}) == []


STEPS = st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 40)), max_size=60)


@given(STEPS)
def test_a_request_that_has_completed_a_block_is_due(steps: list[dict[str, int]]) -> None:
    """Each block is processed as soon as its request is due."""
    pacer = Pacer()
    computed = dict.fromkeys("abc", 0)
    dealt_with = dict.fromkeys("abc", 0)
    for name in computed:
        pacer.add(name)
    for scheduled in steps:
        due = pacer.on_step(scheduled)
        for name in scheduled:
            complete = computed[name] // SIZE
            assert name in due or complete == dealt_with[name]
        for name in due:
            dealt_with[name] = computed[name] // SIZE
            pacer.postpone(name, (dealt_with[name] + 1) * SIZE - computed[name])
        for name, count in scheduled.items():
            computed[name] += count


@given(STEPS)
def test_ahead_a_request_that_completes_a_block_in_this_step_is_due(
    steps: list[dict[str, int]],
) -> None:
    pacer = Pacer(ahead=True)
    computed = dict.fromkeys("abc", 0)
    dealt_with = dict.fromkeys("abc", 0)
    for name in computed:
        pacer.add(name)
    for scheduled in steps:
        due = pacer.on_step(scheduled)
        for name, count in scheduled.items():
            complete = (computed[name] + count) // SIZE
            assert name in due or complete == dealt_with[name]
        for name in due:
            dealt_with[name] = (computed[name] + scheduled[name]) // SIZE
            pacer.postpone(name, (dealt_with[name] + 1) * SIZE - computed[name])
        for name, count in scheduled.items():
            computed[name] += count


def test_most_requests_are_spared() -> None:
    """256 decoding requests are visited when they complete a block."""
    pacer = Pacer()
    computed = {str(i): i for i in range(256)}
    for name in computed:
        pacer.add(name)
    num_due = 0
    for _ in range(10 * SIZE):
        for name in pacer.on_step(dict.fromkeys(computed, 1)):
            num_due += 1
            pacer.postpone(name, SIZE - computed[name] % SIZE)
        for name in computed:
            computed[name] += 1
    assert num_due <= 256 * 11
