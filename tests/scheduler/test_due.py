"""Whoever may have come so far is looked at, and few others."""

from hypothesis import given
from hypothesis import strategies as st

from simple_offload.scheduler.policies.pacing import Due

SIZE = 16


def test_who_is_followed_is_due_until_put_off() -> None:
    due = Due()
    due.follow("a")
    assert due.step({"a": 1, "b": 1}) == ["a"]
    assert due.step({"a": 1}) == ["a"]
    due.put_off("a", 2)
    assert due.step({"a": 1}) == []
    assert due.step({"a": 1}) == ["a"]


def test_who_does_not_run_stays_due() -> None:
    due = Due()
    due.follow("a")
    due.follow("b")
    assert due.step({"a": 1}) == ["a"]
    assert due.step({"b": 1}) == ["b"]


def test_nothing_lacking_puts_nobody_off() -> None:
    due = Due()
    due.follow("a")
    due.step({"a": 1})
    due.put_off("a", 0)
    assert due.step({"a": 1}) == ["a"]


def test_the_fastest_counts_for_all() -> None:
    due = Due()
    for name in "ab":
        due.follow(name)
    due.step({"a": 1, "b": 4})
    for name in "ab":
        due.put_off(name, 4)
    assert due.step({"a": 1, "b": 1}) == ["a", "b"]


def test_who_computes_much_is_due_and_hastens_nobody() -> None:
    due = Due()
    for name in "ab":
        due.follow(name)
    due.step({"a": 1, "b": 1})
    for name in "ab":
        due.put_off(name, 10)
    assert due.step({"a": 1, "b": 512}) == ["b"]
    due.put_off("b", 10)  # not before it is known what it has computed in this step
    assert due.step({"a": 1, "b": 1}) == ["b"]


def test_who_is_forgotten_is_not_due() -> None:
    due = Due()
    for name in "ab":
        due.follow(name)
    due.forget("a")
    assert due.step({"a": 1, "b": 1}) == ["b"]
    due.put_off("b", 1)
    due.forget("b")
    assert due.step({"a": 1, "b": 1}) == []
    due.follow("a")
    due.clear()
    assert due.step({"a": 1, "b": 1}) == []


def test_who_comes_again_is_due() -> None:
    due = Due()
    due.follow("a")
    due.step({"a": 1})
    due.put_off("a", 5)
    due.follow("a")
    assert due.step({"a": 1}) == ["a"]


def test_without_requests() -> None:
    assert Due().step({}) == []


STEPS = st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 40)), max_size=60)


@given(STEPS)
def test_nobody_who_has_completed_a_block_is_passed_over(steps: list[dict[str, int]]) -> None:
    """Requests of which each block is dealt with as soon as it is seen."""
    due = Due()
    computed = dict.fromkeys("abc", 0)
    dealt_with = dict.fromkeys("abc", 0)
    for name in computed:
        due.follow(name)
    for scheduled in steps:
        seen = due.step(scheduled)
        for name in scheduled:
            complete = computed[name] // SIZE
            assert name in seen or complete == dealt_with[name]
        for name in seen:
            dealt_with[name] = computed[name] // SIZE
            due.put_off(name, (dealt_with[name] + 1) * SIZE - computed[name])
        for name, count in scheduled.items():
            computed[name] += count


@given(STEPS)
def test_nobody_who_completes_a_block_in_this_step_is_passed_over(
    steps: list[dict[str, int]],
) -> None:
    due = Due(ahead=True)
    computed = dict.fromkeys("abc", 0)
    dealt_with = dict.fromkeys("abc", 0)
    for name in computed:
        due.follow(name)
    for scheduled in steps:
        seen = due.step(scheduled)
        for name, count in scheduled.items():
            complete = (computed[name] + count) // SIZE
            assert name in seen or complete == dealt_with[name]
        for name in seen:
            dealt_with[name] = (computed[name] + scheduled[name]) // SIZE
            due.put_off(name, (dealt_with[name] + 1) * SIZE - computed[name])
        for name, count in scheduled.items():
            computed[name] += count


def test_most_are_spared() -> None:
    """256 requests that decode are looked at when they complete a block."""
    due = Due()
    computed = {str(i): i for i in range(256)}
    for name in computed:
        due.follow(name)
    num_seen = 0
    for _ in range(10 * SIZE):
        for name in due.step(dict.fromkeys(computed, 1)):
            num_seen += 1
            due.put_off(name, SIZE - computed[name] % SIZE)
        for name in computed:
            computed[name] += 1
    assert num_seen <= 256 * 11
