"""CpuTier: one scene for each promise. ``test_cpu_tier_machine.py`` has all orders of calls."""

import gc
from collections.abc import Iterator
from string import ascii_uppercase

import numpy as np
import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.scheduler.tier import block_pool, segments
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import (
    BLOCK_SIZE,
    block,
    blocks,
    commit,
    contents,
    copies,
    get,
    hashes,
    ids,
    key,
    leave,
    make_tier,
    names,
    prefixes,
    protected,
    queues,
    segments_of,
    settle,
    special,
    store,
)
from tests.simulation.integrity import check_tier, groups_of, pool_of


def find(tier: CpuTier, *chains: str) -> None:
    """Load the chains for requests that end at once."""
    for chain in chains:
        pins = tier.lookup(hashes(chain), 0, 100).pins
        tier.pin(pins)
        tier.unpin(pins)
        check_tier(tier)


def get_on_device(tier: CpuTier, chain: str) -> int:
    """The device gets a chain. Returns how many of its blocks the tier has too."""
    keys = [key(name) for name in prefixes(chain)]
    found = tier.add_copies(keys)
    assert found in ([], [get(tier, each) for each in keys])
    check_tier(tier)
    assert any(found) == bool(found)
    return len(keys) - found.count(None) if found else 0


def let_go(tier: CpuTier, chain: str) -> None:
    """The device lets go of a chain, tail first."""
    kept = [name for name in reversed(prefixes(chain)) if name in contents(tier)]
    before = queues(tier), segments_of(tier)
    tier.on_let_go(ids(tier, *kept))
    assert before == (queues(tier), segments_of(tier))  # the order does not matter yet
    check_tier(tier)


@pytest.fixture(autouse=True)
def _few_copies_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where requests want back some of what has left: ``test_ghosts.py``."""
    monkeypatch.setattr(segments, "FEW_WANTED", 0)


# The order of eviction. Of 16 blocks, 3 may be copies although others need room.


@pytest.mark.proves("I9")
def test_the_tail_of_a_prefix_leaves_before_its_head() -> None:
    """However its blocks come: stored together, loaded, or let go by the device."""
    tier = make_tier(16)
    store(tier, "abc", "xyz")
    assert leave(tier) == ["abc", "ab", "a", "xyz", "xy", "x"]
    on_device = make_tier(16)
    store(on_device, "abc", "xyz", on_device=True)
    assert get_on_device(on_device, "abc") == 3
    assert leave(on_device) == ["abc", "ab", "a", "xyz", "xy", "x"]
    other = make_tier(16)
    store(other, "abc")
    find(other, "abc")
    store(other, "xyz", on_device=True)
    let_go(other, "xyz")
    assert leave(other) == ["xyz", "xy", "x", "abc", "ab", "a"]


def test_copies_beyond_their_share_leave_first() -> None:
    """The others stay while contents leave that nothing else has. Then they leave too."""
    tier = make_tier(16)
    store(tier, "abcdefgh")
    store(tier, "pqrst", on_device=True)
    find(tier, "ab")
    assert leave(tier) == [
        "pqrst",
        "pqrs",
        *prefixes("abcdefgh")[:1:-1],
        "ab",
        "a",
        "pqr",
        "pq",
        "p",
    ]


def test_copies_stay_while_empty_blocks_are_there() -> None:
    tier = make_tier(16)
    store(tier, "abcdefgh", on_device=True)
    store(tier, "pqrstuvw")
    assert contents(tier) == {*prefixes("abcdefgh"), *prefixes("pqrstuvw")}
    assert len(tier.allocate(2)) == 2
    assert contents(tier) == {*prefixes("abcdef"), *prefixes("pqrstuvw")}


def test_the_copy_that_was_found_last_leaves_first() -> None:
    """The device evicts it last. The tail of a chain leaves before its head."""
    tier = make_tier(8)
    store(tier, "ab", "xy", on_device=True)
    store(tier, "pq")
    assert get_on_device(tier, "pqrs") == get_on_device(tier, "ab") == 2
    assert get_on_device(tier, "mn") == 0
    assert leave(tier) == ["ab", "a", "pq", "p", "xy", "x"]


@pytest.mark.parametrize("found", [False, True])
def test_what_the_device_lets_go_of_becomes_the_most_recently_used(found: bool) -> None:
    """Protected if requests had found it."""
    tier = make_tier(8)
    store(tier, "ab", on_device=True)
    store(tier, "xy", "pq")
    find(tier, "xy")
    if found:
        tier.on_copies_found(ids(tier, "a", "ab", "p"))
    let_go(tier, "abcd")
    let_go(tier, "pq")  # was no copy
    assert copies(tier) == set()
    assert protected(tier) == {"x", "xy", *(["a", "ab"] if found else [])}
    last = ["xy", "x", "ab", "a"] if found else ["ab", "a", "xy", "x"]
    assert leave(tier) == ["pq", "p", *last]


def test_what_the_device_lets_go_of_twice_is_as_recent_as_the_second_time() -> None:
    """It has got it again meanwhile, and so a request has found it."""
    tier = make_tier(8)
    store(tier, "ab", "xy", "pq", on_device=True)
    for chain in ("ab", "xy"):
        let_go(tier, chain)
    assert get_on_device(tier, "a") == 1
    for chain in ("pq", "a"):
        let_go(tier, chain)
    assert copies(tier) == set()
    assert queues(tier)[:2] == [["", "", "ab", "xy", "x", "pq", "p"], ["a"]]


def test_what_the_device_still_has_in_another_block_stays_a_copy() -> None:
    tier, on_device = make_tier(8), {key("a"), key("xy")}
    tier.watch_device(lambda: on_device)
    store(tier, "ab", "xy", on_device=True)
    let_go(tier, "ab")
    let_go(tier, "xy")
    for _ in range(2):
        assert copies(tier) == {"a", "xy"}
    # It lets go of the second block, too: unnoticed, if that one's request was preempted at once.
    on_device.remove(key("a"))
    assert copies(tier) == {"xy"}
    assert queues(tier) == [["", "", "", "", "ab", "x", "a"], [], ["xy"]]
    let_go(tier, "xy")
    assert copies(tier) == {"xy"}
    on_device.clear()
    assert copies(tier) == set()


def test_what_the_device_has_got_again_stays_a_copy() -> None:
    tier, on_device = make_tier(8), {key("a")}
    tier.watch_device(lambda: on_device)
    store(tier, "ab", on_device=True)
    let_go(tier, "ab")
    assert get_on_device(tier, "a") == 1
    assert copies(tier) == {"a"}


def test_copies_that_have_other_contents_now_do_not_move() -> None:
    tier, on_device = make_tier(2), {key("x")}
    tier.watch_device(lambda: on_device)
    store(tier, "ab", on_device=True)
    let_go(tier, "ab")
    tier.drop(blocks(tier, "ab"))
    check_tier(tier)
    store(tier, "x", on_device=True)
    assert copies(tier) == {"x"}
    assert queues(tier) == [[""], [], ["x"]]


def test_what_the_device_has_got_after_a_reset_stays_a_copy() -> None:
    tier = make_tier(8)
    store(tier, "ab", "xy", on_device=True)
    let_go(tier, "ab")
    tier.remove_all_copies()
    check_tier(tier)
    assert queues(tier)[0] == ["", "", "", "", "ab", "a", "xy", "x"]
    assert get_on_device(tier, "ab") == 2
    assert copies(tier) == {"a", "ab"}


def test_the_device_lets_go_of_more_blocks_than_the_tier_has() -> None:
    """The oldest are moved."""
    tier = make_tier(8)
    store(tier, "abc", "xyz", on_device=True)
    tier.on_let_go(ids(tier, "abc", "ab", "a"))
    for _ in range(3):
        tier.on_let_go(ids(tier, "xyz", "xy", "x"))
        assert segments_of(tier)["x"] == 2
        check_tier(tier)
    assert queues(tier) == [["", "", "abc", "ab", "a"], [], ["xyz", "xy", "x"]]
    assert copies(tier) == set()


def test_the_order_is_settled_when_a_block_must_leave() -> None:
    """Not while blocks are empty."""
    tier = make_tier(16)
    store(tier, "abcdefghijkl", on_device=True)
    tier.on_let_go(ids(tier, *prefixes("abcdefghijkl")[3:][::-1]))
    filled = tier.allocate(4)
    assert set(segments_of(tier).values()) == {2}
    assert len(tier.allocate(1)) == 1
    assert contents(tier) == {*prefixes("abcdefghijk")}
    assert copies(tier) == {*prefixes("abc")}
    tier.unpin(filled)
    check_tier(tier)


def test_a_pinned_block_changes_its_segment_too() -> None:
    tier = make_tier(8)
    store(tier, "ab", "xy", "pq")
    pins = [*blocks(tier, "ab"), *blocks(tier, "xy"), *blocks(tier, "pq")]
    tier.pin(pins)
    assert get_on_device(tier, "ab") == get_on_device(tier, "xy") == 2
    let_go(tier, "ab")
    assert (protected(tier), copies(tier)) == ({"a", "ab", "p", "pq"}, {"x", "xy"})
    tier.unpin(pins)
    check_tier(tier)
    assert (protected(tier), copies(tier)) == ({"a", "ab", "p", "pq"}, {"x", "xy"})
    assert leave(tier) == ["xy", "pq", "p", "ab", "a", "x"]


# Wishes


@pytest.mark.proves("I9")
def test_kept_blocks_leave_last_and_released_ones_first_each_tail_first() -> None:
    tier = make_tier(16)
    store(tier, "abc", "rst", "xy", "pq")
    store(tier, "mn", on_device=True)
    tier.lease(ids(tier, *prefixes("abc")), tier.make_lease(60, b"r"))
    tier.lease(ids(tier, *prefixes("rst")), tier.make_lease(None, b"r"))
    check_tier(tier)
    find(tier, "xy")
    assert leave(tier) == ["rst", "rs", "r", "pq", "p", "xy", "x", "abc", "ab", "a", "mn", "m"]


def test_expected_blocks_leave_last_and_those_of_the_first_request_after_the_others() -> None:
    tier = make_tier(5)
    store(tier, "xy", "ab", "r")
    tier.expect([key(name) for name in prefixes("xy")])
    tier.expect([key(name) for name in prefixes("ab")])
    assert leave(tier) == ["r", "ab", "a", "xy", "x"]


def test_what_a_request_finds_is_released_no_more_and_kept_still() -> None:
    tier = make_tier(16)
    store(tier, "abc", "rst")
    store(tier, "xy", on_device=True)
    tier.lease(ids(tier, *prefixes("abc")), tier.make_lease(60, b"r"))
    tier.lease(ids(tier, *prefixes("rst"), "x", "xy"), tier.make_lease(None, b"r"))
    find(tier, "ab", "rs", "x")
    assert special(tier)[:2] == [["abc", "ab", "a"], ["rst"]]
    assert protected(tier) == {"r", "rs", "x"}
    let_go(tier, "xy")
    assert special(tier)[1] == ["rst"]
    settle(tier)
    assert special(tier)[1] == ["rst", "xy"]


def test_a_release_leaves_what_is_used_and_what_others_want_kept() -> None:
    tier = make_tier(24)
    store(tier, "abc", "xyz")
    tier.lease(ids(tier, *prefixes("xyz")), tier.make_lease(60, b"one"))
    tier.lease(ids(tier, "x", "xy"), tier.make_lease(90, b"two"))
    pins = blocks(tier, "a")
    tier.pin(pins)
    tier.lease(ids(tier, *prefixes("abc"), *prefixes("xyz")), tier.make_lease(None, b"one"))
    check_tier(tier)
    assert special(tier)[:2] == [["xy", "x"], ["xyz", "abc", "ab"]]
    tier.unpin(pins)
    assert protected(tier) == {"a"}


# What the device has loaded


def test_a_hit_is_no_copy_until_it_is_loaded() -> None:
    """Then it is the first copy to leave, the tail before the head."""
    tier = make_tier(16)
    store(tier, "abcde", "xyz", on_device=True)
    pins = blocks(tier, "abc")
    tier.pin(pins)
    check_tier(tier)
    assert (protected(tier), copies(tier)) == (
        {*prefixes("abc")},
        {"abcd", "abcde", "x", "xy", "xyz"},
    )
    assert queues(tier)[1:] == [[], ["abcde", "abcd", "xyz", "xy", "x"]]
    tier.unpin_loaded(pins)
    check_tier(tier)
    assert protected(tier) == set()
    assert queues(tier)[2] == ["abc", "ab", "a", "abcde", "abcd", "xyz", "xy", "x"]
    assert [segments_of(tier)[name] for name in prefixes("abcde")] == [3, 3, 3, 2, 2]


def test_a_hit_of_two_requests_is_free_when_both_have_loaded_it() -> None:
    tier = make_tier(8)
    store(tier, "ab", "x", on_device=True)
    pins = blocks(tier, "ab")
    for _ in range(2):
        tier.pin(pins)
    for free in ([], ["ab", "a"]):
        tier.unpin_loaded(pins)
        check_tier(tier)
        assert copies(tier) == {"a", "ab", "x"}
        assert queues(tier)[2] == [*free, "x"]


def test_a_hit_that_was_not_loaded_is_protected() -> None:
    """Even if it was a copy, as the device had lost it before."""
    tier = make_tier(8)
    store(tier, "ab", "x", on_device=True)
    pins = blocks(tier, "ab")
    tier.pin(pins)
    tier.unpin(pins)
    check_tier(tier)
    assert (protected(tier), copies(tier)) == ({"a", "ab"}, {"x"})
    assert leave(tier) == ["ab", "a", "x"]


@pytest.mark.parametrize("windows", [(0, 0), (8,)], ids=str)
def test_a_tier_without_copies_protects_what_the_device_has_loaded(
    windows: tuple[int, ...],
) -> None:
    tier = make_tier(8, windows)
    store(tier, "ab", "x")
    pins = blocks(tier, "ab")
    tier.pin(pins)
    tier.unpin_loaded(pins)
    check_tier(tier)
    assert leave(tier) == ["x", "ab", "a"]


def test_host_blocks_of_several_device_blocks_are_protected_when_loaded() -> None:
    """The device may have a part of one only."""
    tier = make_tier(8)
    store(tier, "ab", "x", on_device=True)
    pins = blocks(tier, "ab")
    tier.pin(pins)
    groups_of(tier).num_sub_blocks = 2
    tier.unpin_loaded(pins)
    assert (protected(tier), copies(tier)) == ({"a", "ab"}, {"x"})


def test_a_loaded_hit_that_was_dropped_meanwhile_is_empty() -> None:
    tier = make_tier(8)
    store(tier, "ab", "x", on_device=True)
    pins = blocks(tier, "ab")
    tier.pin(pins)
    tier.drop(pins[1:])
    tier.unpin_loaded(pins)
    check_tier(tier)
    assert copies(tier) == {"x"}
    assert queues(tier)[:2] == [[""] * 6, ["a"]]


def test_copies_that_a_request_has_found_stay_where_they_are() -> None:
    tier = make_tier(8)
    store(tier, "ab", "xy", on_device=True)
    store(tier, "p")
    tier.on_copies_found(ids(tier, "xy", "ab", "p"))
    check_tier(tier)
    assert queues(tier)[2] == ["ab", "a", "xy", "x"]
    assert segments_of(tier) == {"a": 2, "ab": 3, "x": 2, "xy": 3, "p": 0}


def test_what_was_found() -> None:
    """By a load, on the device, or not."""
    tier = make_tier(8)
    store(tier, "ab", "xy", on_device=True)
    store(tier, "pq", "m")
    find(tier, "p")
    tier.on_copies_found(ids(tier, "xy"))
    found = {name for name in contents(tier) if tier.was_found(block(tier, name).block_id)}
    assert found == {"p", "xy"}
    [empty] = tier.allocate(1)
    assert not tier.was_found(empty.block_id)
    asked = ids(tier, "m", "ab", "p", "xy", "pq")
    assert tier.unfound(np.append(asked, empty.block_id)) == [key("m"), key("ab"), key("pq")]


@pytest.mark.parametrize("windows", [(0, 0), (0, 8), (8,)], ids=str)
def test_with_several_groups_or_windows_nothing_is_a_copy(windows: tuple[int, ...]) -> None:
    """If the device has lost the blocks of one group, those of the others are of no use to it.
    Blocks that a request finds there are used here, too."""
    tier = make_tier(8, windows)
    assert not tier.has_copies
    store(tier, "ab", "xy", "pq", on_device=True)
    assert get_on_device(tier, "abc") == 2
    let_go(tier, "xy")
    assert copies(tier) == set()
    assert protected(tier) == {"a", "ab"}
    assert leave(tier) == ["xy", "x", "pq", "p", "ab", "a"]


def test_found_blocks_outlive_others_but_not_for_ever() -> None:
    """Of both, the tail leaves before the head."""
    tier = make_tier(12)
    store(tier, "xyz", "abc")
    find(tier, "abc")
    leaving: list[str] = []
    for name in ascii_uppercase:
        store(tier, name)
        leaving += [
            each
            for each in (*prefixes("xyz"), *prefixes("abc"))
            if each not in contents(tier) and each not in leaving
        ]
    assert leaving == ["xyz", "xy", "x", "abc", "ab", "a"]


# Making room


def test_allocation_evicts_as_many_as_needed_without_a_block_to_keep() -> None:
    """Such a block also keeps those behind it in its segment. If it is a copy, it leaves last."""
    tier = make_tier(16)
    store(tier, "abcdefgh", "xyz")
    find(tier, "xyz")
    store(tier, "pqrst", on_device=True)
    keep = {key("abcdef"), key("xy"), key("pqr")}
    assert len(tier.allocate(3, keep)) == 3
    assert contents(tier) == {*prefixes("abcdefgh"), *prefixes("xyz"), "p", "pq", "pqr"} - {
        "abcdefgh"
    }
    assert len(tier.allocate(9, keep)) == 4
    assert contents(tier) == {*prefixes("abcdef"), "x", "xy", "pqr"}
    check_tier(tier)
    assert tier.allocate(1, keep) == []


def test_new_blocks_are_the_next_to_be_allocated_lowest_first() -> None:
    tier = make_tier(0)
    assert (tier.num_blocks, tier.allocate(1)) == (1, [])
    assert tier.lookup(hashes("abc"), 0, 100).num_tokens == 0
    tier.grow(4)
    store(tier, "a")
    tier.grow(6)
    tier.grow(5)  # a tier does not shrink
    check_tier(tier)
    assert [new.block_id for new in tier.allocate(9)] == [4, 5, 2, 3, 1]


@pytest.fixture(params=[True, False], ids=["collector on", "collector off"])
def was_enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the garbage collector is on during the test."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_no_garbage_is_collected_while_blocks_are_made(
    monkeypatch: pytest.MonkeyPatch, was_enabled: bool
) -> None:
    """Afterwards the collector is as before, even when memory has run out."""
    seen: list[bool] = []

    def make_block(block_id: int) -> KVCacheBlock:
        seen.append(gc.isenabled())
        if block_id == 9:
            raise MemoryError
        return KVCacheBlock(block_id)

    tier = make_tier(2)
    monkeypatch.setattr(block_pool, "KVCacheBlock", make_block)
    with pytest.raises(MemoryError):
        tier.grow(10)
    assert not any(seen)
    assert (gc.isenabled(), tier.num_blocks) == (was_enabled, 3)


# Finding


@pytest.mark.parametrize("windows", [(0,), (0, 8), (8,), (0, 0)], ids=str)
def test_a_lookup_finds_the_same_as_vllm(windows: tuple[int, ...]) -> None:
    """Also for a single chain, where vLLM's lookup is not used."""
    tier = make_tier(24, windows)
    coordinator = tier._lookup._coordinator
    for group in range(len(windows)):
        store(tier, "abcde", "abx", group=group)
    assert groups_of(tier).is_one_chain == (windows == (0,))
    for chain in ("abcdefghi", "abxyz", "zabcd", "bcd"):
        asked = hashes(chain)
        assert tier.lookup(asked, 0, -1).num_tokens == tier.lookup(asked, 0, 0).num_tokens == 0
        for max_tokens in range(1, (len(chain) + 1) * BLOCK_SIZE):
            expected = coordinator.find_longest_cache_hit(asked, max_tokens)[:2]
            assert tier.lookup(asked, 0, max_tokens)[:2] == expected


def test_a_hit_pins_its_blocks() -> None:
    """By group, parents before children; no blocks that the device has or attention skips."""
    tier = make_tier(16, windows=(8, 0))
    for group in (0, 1):
        store(tier, "abc", group=group)
    assert tier.lookup(hashes("abc"), 0, 100).blocks[0][0].is_null  # the window is of two blocks
    hit = tier.lookup(hashes("abcd"), 2 * BLOCK_SIZE, 100)
    assert names(hit.pins) == ["abc", ""]
    assert names(hit.pins, group=1) == ["", "abc"]
    hit = tier.lookup(hashes("abcd"), 0, 100)
    assert names(hit.pins) == ["ab", "abc", "", "", ""]
    assert names(hit.pins, group=1) == ["", "", "a", "ab", "abc"]
    assert tier.lookup(hashes("abcd"), 4 * BLOCK_SIZE, 100).pins == []
    assert tier.lookup(hashes("xbcd"), 0, 100).pins == []


@pytest.mark.parametrize("missing", [66, 3, 0])
def test_a_long_chain_with_a_gap_ends_there(missing: int) -> None:
    """Behind the gap it goes on for a device that has the blocks before."""
    chain = "".join(chr(0x4E00 + index) for index in range(400))
    tier = make_tier(400)
    store(tier, chain)
    tier.drop([block(tier, chain[: missing + 1])])
    assert names(tier.lookup(hashes(chain), 0, 400 * BLOCK_SIZE).pins) == prefixes(chain[:missing])
    hit = tier.lookup(hashes(chain), (missing + 1) * BLOCK_SIZE, 400 * BLOCK_SIZE)
    assert names(hit.pins) == prefixes(chain)[missing + 1 :]


# Contents


@pytest.mark.parametrize("on_device", [False, True])
def test_only_keys_that_no_block_holds_are_committed(on_device: bool) -> None:
    """Blocks need no parent in the tier."""
    tier = make_tier(8)
    store(tier, "abc")
    tier.drop(blocks(tier, "ab"))
    filled = tier.allocate(4)
    stored = ["abc", "abcd", "xy", "a"]
    assert commit(tier, filled, stored, on_device=on_device) == [0]
    check_tier(tier)
    assert contents(tier) == {"abc", "abcd", "xy", "a"}
    assert copies(tier) == ({"abcd", "xy", "a"} if on_device else set())
    assert filled[0].block_hash is None
    assert tier.allocate(1) == filled[:1]


def test_dropping_empty_blocks() -> None:
    tier = make_tier(4)
    store(tier, "a")
    [held] = tier.allocate(1)
    tier.drop([held, pool_of(tier).blocks[-1]])
    assert contents(tier) == {"a"}
    assert held.ref_cnt == 1
    check_tier(tier)


def test_doubt_ends_with_the_contents_of_a_block() -> None:
    tier = make_tier(2)
    for load_id, name in enumerate(("a", "x")):
        store(tier, name, f"{name}y")
        tier.doubt(blocks(tier, f"{name}y"), load_id, next_load_id=load_id + 1)
        assert contents(tier) == {name, f"{name}y"}
        check_tier(tier)
    tier.reset()
    store(tier, "ab")
    tier.doubt(blocks(tier, "ab"), load_id=2, next_load_id=3)
    assert contents(tier) == {"a", "ab"}
    tier.doubt([block(tier, "ab")], load_id=3, next_load_id=4)
    assert contents(tier) == {"a"}
    check_tier(tier)
