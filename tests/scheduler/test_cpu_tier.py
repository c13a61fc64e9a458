"""CpuTier: one scene for each promise. ``test_cpu_tier_machine.py`` has all orders of calls."""

import gc
from string import ascii_uppercase

import numpy as np
import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import (
    BLOCK_SIZE,
    block,
    blocks,
    contents,
    duplicates,
    get,
    hashes,
    ids,
    key,
    leave,
    make_tier,
    make_tier_of_vllm,
    names,
    prefixes,
    protected,
    queues,
    reserved,
    settle,
    store,
)
from tests.simulation.integrity import check_tier, groups_of


def hit(tier: CpuTier, *chains: str) -> None:
    """Requests hit the chains, and end at once."""
    for chain in chains:
        pins = tier.lookup(hashes(chain), 0, 100).pins
        tier.pin(pins)
        tier.unpin(pins)
        check_tier(tier)


def device_gets(tier: CpuTier, chain: str) -> list[str]:
    """The device gets a chain. Returns what the tier has of it."""
    keys = [key(name) for name in prefixes(chain)]
    found = tier.device_got(keys)
    assert found in ([], [get(tier, each) for each in keys])
    check_tier(tier)
    return names(filter(None, found))


def device_loses(tier: CpuTier, chain: str, *hits: str) -> None:
    """The device loses a chain, tail first. Requests have hit ``hits`` there."""
    lost = [name for name in reversed(prefixes(chain)) if name in contents(tier)]
    before = queues(tier)
    tier.device_lost(ids(tier, *lost), np.array([name in hits for name in lost], np.bool_))
    assert queues(tier) == before  # the order does not matter yet
    check_tier(tier)


def reserve(tier: CpuTier, chain: str) -> None:
    tier.reserve([key(name) for name in prefixes(chain)])
    check_tier(tier)


def release(tier: CpuTier, chain: str) -> None:
    tier.release([key(name) for name in prefixes(chain)])
    check_tier(tier)


# The order of eviction. Of 16 blocks, 3 may be duplicates although others need room.


@pytest.mark.proves("I9")
def test_the_tail_of_a_prefix_leaves_before_its_head() -> None:
    """However its blocks come: stored together, loaded, or lost by the device."""
    tier = make_tier(16)
    store(tier, "abc", "xyz")
    assert leave(tier) == ["abc", "ab", "a", "xyz", "xy", "x"]
    on_device = make_tier(16)
    store(on_device, "abc", "xyz", on_device=True)
    assert device_gets(on_device, "abc") == ["a", "ab", "abc"]
    assert leave(on_device) == ["abc", "ab", "a", "xyz", "xy", "x"]
    other = make_tier(16)
    store(other, "abc")
    store(other, "xyz", on_device=True)
    hit(other, "abc")
    device_loses(other, "xyz")
    assert leave(other) == ["xyz", "xy", "x", "abc", "ab", "a"]


def test_duplicates_beyond_their_share_leave_first() -> None:
    """But not before empty blocks. The others stay while contents leave that nothing else has. Then
    they leave too, but before reserved ones."""
    tier = make_tier(16)
    store(tier, "abcdefgh", "xy")
    store(tier, "pqrst", on_device=True)
    hit(tier, "ab")
    reserve(tier, "xy")
    assert tier.num_empty == len(tier.allocate(1)) == 1
    assert len(contents(tier)) == 15
    others = [*prefixes("abcdefgh")[:1:-1], "ab", "a"]
    assert leave(tier) == ["pqrst", *others, "pqrs", "pqr", "pq", "p", "xy", "x"]


@pytest.mark.parametrize("is_hit", [False, True])
def test_what_the_device_loses_becomes_the_most_recently_used(is_hit: bool) -> None:
    """Protected if requests have hit it."""
    tier = make_tier(8)
    store(tier, "ab", on_device=True)
    store(tier, "xy", "pq")
    hit(tier, "xy")
    device_loses(tier, "abcd", *(["a", "ab"] if is_hit else []))
    device_loses(tier, "pq", "p", "pq")  # were no duplicates
    assert duplicates(tier) == set()
    assert protected(tier) == {"x", "xy", *(["a", "ab"] if is_hit else [])}
    last = ["xy", "x", "ab", "a"] if is_hit else ["ab", "a", "xy", "x"]
    assert leave(tier) == ["pq", "p", *last]


def test_a_reset_of_the_device_ends_all_duplicates() -> None:
    """In the order in which they would have left. It may have got some again before the tier knows
    what it has lost."""
    tier = make_tier(9)
    store(tier, "ab", "xy", "rs", on_device=True)
    reserve(tier, "rs")
    device_loses(tier, "ab")
    tier.on_device_reset()
    check_tier(tier)
    assert queues(tier) == [["", "", "", "ab", "a", "xy", "x"], [], []]
    assert reserved(tier) == ["rs", "r"]
    device_gets(tier, "ab")
    settle(tier)
    assert duplicates(tier) == {"a", "ab"}


def test_losses_move_at_last_although_nothing_is_evicted() -> None:
    """Else their list would grow for ever."""
    tier = make_tier(8)
    store(tier, "abc", "xyz", on_device=True)
    tier.device_lost(ids(tier, "abc", "ab", "a"), np.zeros(3, np.bool_))
    for _ in range(3):
        device_gets(tier, "xyz")
        tier.device_lost(ids(tier, "xyz", "xy", "x"), np.zeros(3, np.bool_))
        check_tier(tier)
    assert queues(tier) == [["", "", "abc", "ab", "a"], ["xyz", "xy", "x"], []]


def test_hit_blocks_outlive_others_but_not_for_ever() -> None:
    """Of both, the tail leaves before the head."""
    tier = make_tier(12)
    store(tier, "xyz", "abc")
    hit(tier, "abc")
    leaving: list[str] = []
    for name in ascii_uppercase:
        store(tier, name)
        leaving += [
            each
            for each in (*prefixes("xyz"), *prefixes("abc"))
            if each not in contents(tier) and each not in leaving
        ]
    assert leaving == ["xyz", "xy", "x", "abc", "ab", "a"]


def test_new_contents_outlive_old_ones_that_were_hit() -> None:
    """Although all came while the tier had room, and many leave at once."""
    tier = make_tier(12)
    store(tier, "abcdef")
    hit(tier, "abcdef")
    store(tier, *"UVWXYZ")
    tier.allocate(4)
    assert queues(tier)[:2] == [["V", "W", "X", "Y", "Z"], ["abc", "ab", "a"]]


# What leaves last, and what leaves first


@pytest.mark.proves("I9")
def test_reserved_blocks_leave_last_and_released_ones_first_each_tail_first() -> None:
    """Of reserved ones, those that were reserved last leave first. A release leaves alone what is
    reserved, in use, or on the device."""
    tier = make_tier(16)
    store(tier, "rst", "abc", "pq", "ef", "xy")
    store(tier, "mn", on_device=True)
    reserve(tier, "abc")
    reserve(tier, "ef")
    release(tier, "xy")
    release(tier, "rst")
    pins = blocks(tier, "pq")
    tier.pin(pins)
    for chain in ("abc", "mn", "pq"):
        release(tier, chain)
    tier.unpin(pins)
    left = ["rst", "rs", "r", "xy", "x", "pq", "p", "mn", "m", "ef", "e", "abc", "ab", "a"]
    assert leave(tier) == left


def test_what_is_released_leaves_before_what_was_just_hit() -> None:
    """However late it was used itself."""
    tier = make_tier(8)
    store(tier, *"abcdefghij")
    hit(tier, "h")
    store(tier, "xyz")
    release(tier, "xyz")
    assert leave(tier) == ["xyz", "xy", "x", "f", "g", "i", "j", "h"]


# What the device has loaded


def test_a_hit_is_no_duplicate_until_it_is_loaded() -> None:
    """Then it is the first duplicate to leave, the tail before the head."""
    tier = make_tier(16)
    store(tier, "abcde", "xyz", on_device=True)
    pins = blocks(tier, "abc")
    tier.pin(pins)
    check_tier(tier)
    assert protected(tier) == {*prefixes("abc")}
    assert duplicates(tier) == {"abcd", "abcde", "x", "xy", "xyz"}
    assert queues(tier)[1:] == [[], ["abcde", "abcd", "xyz", "xy", "x"]]
    tier.unpin_loaded(pins)
    check_tier(tier)
    assert protected(tier) == set()
    assert queues(tier)[2] == ["abc", "ab", "a", "abcde", "abcd", "xyz", "xy", "x"]
    for chain in ("abcde", "xyz"):
        device_loses(tier, chain)
    assert protected(tier) == {*prefixes("abc")}  # requests have hit no others


# Making room


def test_allocation_evicts_as_many_as_needed_without_a_block_to_keep() -> None:
    """Such a block also keeps those behind it in its queue."""
    tier = make_tier(16)
    store(tier, "abcdefgh", "xyz")
    hit(tier, "xyz")
    store(tier, "pqrst", on_device=True)
    keep = set(ids(tier, "abcdef", "xy", "pqr").tolist())
    assert len(tier.allocate(3, keep)) == 3
    assert contents(tier) == {*prefixes("abcdef"), *prefixes("xyz"), *prefixes("pqrs")}
    assert len(tier.allocate(9, keep)) == 2
    assert contents(tier) == {*prefixes("abcdef"), "x", "xy", "p", "pq", "pqr"}
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


@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_while_blocks_are_made(
    monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    """Afterwards the collector is as before, even when memory has run out."""
    seen: list[bool] = []

    def make_block(block_id: int) -> KVCacheBlock:
        seen.append(gc.isenabled())
        raise MemoryError

    tier, before = make_tier(2), gc.isenabled()
    monkeypatch.setattr(block_pool, "KVCacheBlock", make_block)
    (gc.enable if is_on else gc.disable)()
    with pytest.raises(MemoryError):
        tier.grow(10)
    is_on_afterwards = gc.isenabled()
    (gc.enable if before else gc.disable)()
    assert (seen, is_on_afterwards) == ([False], is_on)


# Finding


@pytest.mark.parametrize("windows", [(0,), (0, 8), (8,), (0, 0)], ids=str)
def test_a_lookup_finds_the_same_as_vllm(windows: tuple[int, ...]) -> None:
    """Also for a single chain, where vLLM's lookup is not used."""
    tier, coordinator = make_tier_of_vllm(24, windows)
    for group in range(len(windows)):
        store(tier, "abcde", "abx", group=group)
    assert groups_of(tier).is_one_chain == (windows == (0,))
    for chain in ("abcdefghi", "abxyz", "zabcd", "bcd"):
        asked = hashes(chain)
        assert tier.lookup(asked, 0, -1).num_tokens == tier.lookup(asked, 0, 0).num_tokens == 0
        for max_tokens in range(1, (len(chain) + 1) * BLOCK_SIZE):
            expected = coordinator.find_longest_cache_hit(asked, max_tokens)[:2]
            assert tier.lookup(asked, 0, max_tokens)[:2] == expected


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
