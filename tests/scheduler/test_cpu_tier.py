"""CpuTier: one scene for each promise. ``test_cpu_tier_machine.py`` has all orders of calls."""

import gc
from collections.abc import Iterator

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import (
    BLOCK_SIZE,
    begin,
    block,
    blocks,
    commit,
    commit_as,
    contents,
    finish,
    get,
    hashes,
    key,
    leave,
    make_tier,
    names,
    parent_of,
    prefixes,
    protected,
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


def store_early(tier: CpuTier, *stored: str) -> None:
    """Store blocks before their parents."""
    for name in stored:
        (filled,) = tier.allocate(1)
        num_tokens = len(name) * BLOCK_SIZE
        assert commit_as(tier, filled, key(name), parent_of(name), num_tokens, early=True)
        check_tier(tier)


# The order of eviction


@pytest.mark.proves("I9")
def test_the_tail_of_a_prefix_leaves_before_its_head() -> None:
    """Branches of a prefix leave before it, and chains stored between do not matter."""
    tier = make_tier(9)
    store(tier, "ab", "xy", "abcd", "xyz", "abce")
    assert leave(tier) == ["abcd", "abce", "abc", "ab", "a", "xyz", "xy", "x"]


@pytest.mark.proves("I9")
def test_a_chain_stored_tail_first_leaves_tail_first() -> None:
    """A parent that comes late stays as long as its own parent."""
    tier = make_tier(4)
    store_early(tier, "abcd", "abc", "ab", "a")
    assert leave(tier) == ["abcd", "abc", "ab", "a"]
    other = make_tier(6)
    store_early(other, "a", "ab", "xy", "abcd", "x", "abc")
    assert leave(other) == ["xy", "abcd", "x", "abc", "ab", "a"]


@pytest.mark.proves("I9")
def test_a_demoted_block_with_another_child_stays() -> None:
    tier = make_tier(6)
    store(tier, "abx", "pq", "aby")
    tier.demote(blocks(tier, "aby"))
    assert tier.lookup(hashes("aby"), 0, 100).num_tokens == 3 * BLOCK_SIZE
    assert leave(tier) == ["aby", "abx", "ab", "a", "pq", "p"]


def test_a_promoted_chain_is_the_most_recently_used() -> None:
    tier = make_tier(8)
    store(tier, "abc", "xyz", "pq")
    tier.demote(blocks(tier, "abc"))
    tier.promote([key("abc"), key("not there"), key("xyz")])  # "xyz" was not demoted
    check_tier(tier)
    assert leave(tier) == ["xyz", "xy", "x", "pq", "p", "abc", "ab", "a"]


def test_a_request_that_ends_renews_its_chain() -> None:
    tier = make_tier(6)
    store(tier, "abc", "xyz")
    finish(tier, "abpq", 4)
    assert leave(tier) == ["abc", "xyz", "xy", "x", "ab", "a"]


def test_a_renewed_chain_leaves_its_demoted_tail_where_it_is() -> None:
    tier = make_tier(6)
    store(tier, "abx", "aby", "pq")
    tier.demote(blocks(tier, "aby"))
    finish(tier, "aby", 3)
    assert leave(tier) == ["aby", "abx", "pq", "p", "ab", "a"]


def test_a_block_whose_parent_was_stored_and_evicted_is_early_again() -> None:
    """A load pinned it meanwhile, without its parent."""
    tier = make_tier(2)
    store_early(tier, "ab")
    pinned = [block(tier, "ab")]
    pool_of(tier).touch(pinned)
    store_early(tier, "a", "x")  # "x" evicts the parent
    assert contents(tier) == {"ab", "x"}
    tier.unpin(pinned)
    check_tier(tier)
    store_early(tier, "a")  # evicts "x", the least recently used
    assert leave(tier) == ["ab", "a"]


@pytest.mark.parametrize("while_pinned", [False, True])
def test_a_parent_stored_after_its_child_was_found_is_protected(while_pinned: bool) -> None:
    tier = make_tier(6)
    store_early(tier, "abcd", "abc", "ab")
    pinned = [block(tier, name) for name in ("ab", "abc", "abcd")]
    tier.pin(pinned)
    if not while_pinned:
        tier.unpin(pinned)
    store_early(tier, "a", "x")
    if while_pinned:
        tier.unpin(pinned)
    check_tier(tier)
    assert "a" in protected(tier)
    assert leave(tier)[-2:] == ["ab", "a"]


def test_a_chain_with_a_gap_is_renewed() -> None:
    """Another chain stands where the missing block should be."""
    tier = make_tier(8)
    store_early(tier, "abcd", "abc")
    store(tier, "pq", "a")
    moved = [block(tier, "p")]
    pool_of(tier).touch(moved)
    tier.unpin(moved)
    finish(tier, "abcd", 4)
    check_tier(tier)
    assert leave(tier)[:2] == ["pq", "p"]


def test_blocks_used_once_do_not_displace_found_ones() -> None:
    tier = make_tier(6)
    store(tier, "abc")
    find(tier, "abc")
    store(tier, "kl", "mn", "op", "xy")
    assert contents(tier) == {"a", "ab", "abc", "x", "xy", "o"}
    store(tier, "pqrst")  # evicts protected blocks only when no others are there
    assert contents(tier) == {*prefixes("pqrst"), "a"}


def test_half_of_the_tier_is_protected_and_less_with_every_ten_evictions() -> None:
    """Blocks beyond the limit are the most recently used on probation."""
    tier = make_tier(8)
    store(tier, "abcde", "xyz")
    find(tier, "abcde")
    assert protected(tier) == {"a", "ab", "abc", "abcd"}
    find(tier, "a", "ab")
    store(tier, *"klmnopqrs")
    assert protected(tier) == {"a", "ab", "abc", "abcd"}
    store(tier, "t")
    assert protected(tier) == {"a", "ab", "abc"}
    tier.grow(17)
    find(tier, "abcd", "t")
    assert protected(tier) == {"a", "ab", "abc", "abcd", "t"}


# Making room


def test_allocation_evicts_as_many_as_needed_up_to_a_block_to_keep() -> None:
    """It asks for the blocks to keep only when no empty block is left."""
    tier = make_tier(6)
    store(tier, "xy", "abc")
    assert names(tier.allocate(1, pytest.fail)) == [""]
    assert len(tier.allocate(5, lambda: {key("ab"), key("abc")})) == 2
    assert contents(tier) == {"a", "ab", "abc"}
    assert tier.allocate(1, lambda: {key("abc")}) == []
    assert len(tier.allocate(6, lambda: {key("ab")})) == 1
    assert contents(tier) == {"a", "ab"}
    check_tier(tier)


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


def test_a_hit_pins_its_blocks_and_their_ancestors() -> None:
    """Ancestors only in chained groups, parents before children."""
    tier = make_tier(16, windows=(8, 0))
    for group in (0, 1):
        store(tier, "abc", group=group)
    assert tier.lookup(hashes("abc"), 0, 100).blocks[0][0].is_null  # the window is of two blocks
    hit = tier.lookup(hashes("abcd"), 2 * BLOCK_SIZE, 100)
    assert names(hit.pins) == ["", "", "abc", ""]
    assert names(hit.pins, group=1) == ["a", "ab", "", "abc"]
    hit = tier.lookup(hashes("abcd"), 0, 100)
    assert names(hit.pins) == ["ab", "abc", "", "", ""]
    assert names(hit.pins, group=1) == ["", "", "a", "ab", "abc"]
    assert tier.lookup(hashes("abcd"), 4 * BLOCK_SIZE, 100).pins == []
    assert tier.lookup(hashes("xbcd"), 0, 100).pins == []


@pytest.mark.parametrize("missing", [66, 3, 0])
def test_a_long_chain_with_a_gap_ends_there(missing: int) -> None:
    """A hit behind the gap pins those of its ancestors that are in the tier."""
    chain = "".join(chr(0x4E00 + index) for index in range(400))
    tier = make_tier(400)
    store(tier, chain)
    pool_of(tier).evict_blocks({block(tier, chain[: missing + 1]).block_id})
    (found,) = tier.lookup(hashes(chain), 0, 400 * BLOCK_SIZE).blocks
    assert names(found) == prefixes(chain[:missing])
    hit = tier.lookup(hashes(chain), 399 * BLOCK_SIZE, BLOCK_SIZE)
    others = [name for name in prefixes(chain) if get(tier, key(name)) is not None]
    assert names(hit.pins) == others
    assert len(others) == 399


def test_has_none() -> None:
    """A chain's first block decides. Window blocks may be in the tier without earlier ones."""
    tier = make_tier(8, windows=(0, 8))
    store(tier, "ab")
    assert tier.has_none([key("abc"), key("abcd")])
    assert not tier.has_none([key("ab"), key("abc")])
    assert commit(tier, begin(tier, "xyz", 1), "xyz", 1)
    assert not tier.has_none([key("xy", 1), key("xyz", 1)])
    early = make_tier(8)
    store_early(early, "abc")
    assert not early.has_none([key("ab"), key("abc")])


@pytest.mark.parametrize("guess", [None, *range(9)])
def test_first_blocks_in_the_tier_or_coming_are_counted(guess: int | None) -> None:
    tier = make_tier(8)
    store(tier, "abc")
    asked = hashes("abcdefg")
    counts = [tier.count_first(asked, 0, limit, guess) for limit in (0, 2, 3, 7)]
    assert counts == [0, 2, 3, 3]
    coming = {key("abcd"), key("abcde")}
    assert tier.count_first(asked, 0, 7, guess, coming.__contains__) == 5
    assert tier.count_first(hashes("xbc"), 0, 3, guess) == 0


# Contents


def test_a_window_needs_no_head() -> None:
    tier = make_tier(8, windows=(0, 8))
    store(tier, "ab", group=1)
    filled = begin(tier, "abc", group=1)
    tier.drop([block(tier, "ab", group=1)])
    assert commit(tier, filled, "abc", group=1)
    assert contents(tier, group=1) == {"a", "abc"}
    assert contents(tier, group=0) == set()
    check_tier(tier)


def test_dropping_empty_blocks() -> None:
    tier = make_tier(4)
    store(tier, "a")
    held = begin(tier, "x")
    tier.drop([held, pool_of(tier).blocks[-1]])
    assert contents(tier) == {"a"}
    assert held.ref_cnt == 1
    check_tier(tier)


def test_doubt_ends_with_the_contents_of_a_block() -> None:
    tier = make_tier(2)
    for name in ("a", "x"):
        store(tier, name, f"{name}y")
        tier.doubt(blocks(tier, f"{name}y"), load_id=1, next_load_id=2)
        check_tier(tier)
    tier.reset()
    store(tier, "ab")
    tier.doubt(blocks(tier, "ab"), load_id=2, next_load_id=3)
    assert contents(tier) == {"a", "ab"}
    tier.doubt([block(tier, "ab")], load_id=3, next_load_id=4)
    assert contents(tier) == {"a"}
    check_tier(tier)
