"""Lookup: the blocks of a request that the tier holds."""

import pytest

from tests.scheduler.tiers import (
    BLOCK_SIZE,
    begin,
    blocks,
    commit,
    get,
    hashes,
    hold,
    key,
    make_tier,
    names,
    snapshot,
    store,
)
from tests.simulation.integrity import groups_of


@pytest.mark.parametrize(
    ("num_computed_blocks", "max_tokens", "expected"),
    [
        (0, 100, ["a", "ab", "abc"]),
        (1, 100, ["ab", "abc"]),
        (3, 100, []),
        (5, 100, []),
        (0, 2 * BLOCK_SIZE, ["a", "ab"]),
        (0, 3 * BLOCK_SIZE - 1, ["a", "ab"]),
        (1, BLOCK_SIZE - 1, []),
        (0, 0, []),
        (0, -1, []),
    ],
)
def test_lookup_finds_the_longest_prefix_that_the_device_lacks(
    num_computed_blocks: int, max_tokens: int, expected: list[str]
) -> None:
    tier = make_tier(8)
    store(tier, "abc", "xyz")
    hit = tier.lookup(hashes("abcde"), num_computed_blocks * BLOCK_SIZE, max_tokens)
    assert hit.num_tokens == len(expected) * BLOCK_SIZE
    assert [name for group in hit.blocks for name in names(group)] == expected


def test_lookup_needs_the_head() -> None:
    tier = make_tier(8)
    store(tier, "abc")
    assert tier.lookup(hashes("xbc"), 0, 100).num_tokens == 0
    assert tier.lookup(hashes("bc"), 0, 100).num_tokens == 0


def test_a_lookup_changes_nothing() -> None:
    tier = make_tier(8, windows=(0, 8))
    for group in (0, 1):
        store(tier, "abc", group=group)
    hold(tier, blocks(tier, "a"))
    before = snapshot(tier)
    for chain in ("abcd", "ab", "axy", "xyz"):
        for num_computed_tokens in (0, BLOCK_SIZE, 2 * BLOCK_SIZE):
            tier.lookup(hashes(chain), num_computed_tokens, 100)
        get(tier, key(chain))
    assert snapshot(tier) == before


def test_null_blocks_stand_where_the_window_does_not_reach() -> None:
    tier = make_tier(16, windows=(0, 8))
    store(tier, "abcde")
    store(tier, "abcde", group=1)
    hit = tier.lookup(hashes("abcde"), 0, 100)
    full, window = hit.blocks
    assert names(full) == ["a", "ab", "abc", "abcd", "abcde"]
    assert [found.is_null for found in window] == [True, True, True, False, False]
    assert names(window[3:], group=1) == ["abcd", "abcde"]


def test_a_hit_pins_its_blocks_and_their_ancestors() -> None:
    """Ancestors only in chained groups, parents before children."""
    tier = make_tier(16, windows=(8, 0))
    for group in (0, 1):
        store(tier, "abc", group=group)
    hit = tier.lookup(hashes("abcd"), 2 * BLOCK_SIZE, 100)
    assert names(hit.pins) == ["", "", "abc", ""]
    assert names(hit.pins, group=1) == ["a", "ab", "", "abc"]
    hit = tier.lookup(hashes("abcd"), 0, 100)
    assert names(hit.pins) == ["ab", "abc", "", "", ""]
    assert names(hit.pins, group=1) == ["", "", "a", "ab", "abc"]
    assert tier.lookup(hashes("abcd"), 4 * BLOCK_SIZE, 100).pins == []
    assert tier.lookup(hashes("xbcd"), 0, 100).pins == []


@pytest.mark.parametrize("windows", [(0,), (0, 8), (8,), (0, 0)], ids=str)
def test_a_lookup_finds_the_same_as_vllm(windows: tuple[int, ...]) -> None:
    """Also for a single chain, where vLLM's lookup is not used."""
    tier = make_tier(24, windows)
    coordinator = tier._lookup._coordinator
    for group in range(len(windows)):
        store(tier, "abcde", "abx", group=group)
    assert groups_of(tier).is_one_chain == (windows == (0,))
    for chain in ("abcdefghi", "abxyz", "zabcd"):
        asked = hashes(chain)
        for max_tokens in range(1, (len(chain) + 1) * BLOCK_SIZE):
            expected = coordinator.find_longest_cache_hit(asked, max_tokens)[:2]
            assert tier.lookup(asked, 0, max_tokens)[:2] == expected


def test_has_none() -> None:
    """A chain's first block decides. Window blocks may be in the tier without earlier ones."""
    tier = make_tier(8, windows=(0, 8))
    store(tier, "ab")
    assert tier.has_none([key("abc"), key("abcd")])
    assert not tier.has_none([key("ab"), key("abc")])
    assert commit(tier, begin(tier, "xyz", 1), "xyz", 1)
    assert not tier.has_none([key("xy", 1), key("xyz", 1)])
