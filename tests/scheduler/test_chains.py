"""CpuTier: finds the first blocks of a chain, wherever they stand in the free queue."""

import pytest

from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import (
    BLOCK_SIZE,
    block,
    commit_as,
    get,
    hashes,
    hold,
    key,
    make_tier,
    names,
    prefixes,
    store,
)
from tests.simulation.integrity import pool_of


def found(tier: CpuTier, chain: str) -> list[str]:
    (blocks,) = tier.lookup(hashes(chain), 0, len(chain) * BLOCK_SIZE).blocks
    return names(blocks)


def long_chain(length: int) -> str:
    return "".join(chr(0x4E00 + i) for i in range(length))


def test_a_chain_is_found_wherever_its_blocks_are() -> None:
    """The blocks have references, or other blocks stand between them in the free queue."""
    tier = make_tier(12)
    store(tier, "a", "q", "ab", "abc", "abx", "abcd")
    for held in ([], ["abc"], ["abcd"]):
        hold(tier, [block(tier, name) for name in held])
        assert found(tier, "abcde") == prefixes("abcd")
    hit = tier.lookup(hashes("abcde"), 3 * BLOCK_SIZE, 100)
    assert (names(hit.blocks[0]), names(hit.pins)) == (["abcd"], prefixes("abcd"))


def test_blocks_without_a_known_parent_are_found() -> None:
    tier = make_tier(2)
    for name in ("a", "ab"):
        (filled,) = tier.allocate(1)
        assert commit_as(tier, filled, key(name), None, len(name) * BLOCK_SIZE)
    assert found(tier, "ab") == ["a", "ab"]


@pytest.mark.parametrize("length", [70, 400])
def test_a_chain_with_a_gap_ends_there(length: int) -> None:
    """A hit behind the gap pins those of its ancestors that are in the tier."""
    tier = make_tier(length + 2)
    chain = long_chain(length)
    store(tier, chain)
    assert found(tier, chain) == prefixes(chain)
    for missing in (66, 3, 0):
        pool_of(tier).evict_blocks({block(tier, chain[: missing + 1]).block_id})
        assert found(tier, chain) == prefixes(chain[:missing])
        hit = tier.lookup(hashes(chain), (length - 1) * BLOCK_SIZE, BLOCK_SIZE)
        assert hit.pins == [
            there for name in prefixes(chain) if (there := get(tier, key(name))) is not None
        ]


@pytest.mark.parametrize(("num_coming", "guess"), [(20, 20), (37, 37), (1, 1), (0, None), (0, 0)])
def test_two_keys_confirm_a_right_guess_or_an_absent_chain(
    num_coming: int, guess: int | None
) -> None:
    chain = long_chain(40)
    asked: list[bytes] = []
    coming = {key(name) for name in prefixes(chain)[:num_coming]}

    def is_coming(key: bytes) -> bool:
        asked.append(key)
        return key in coming

    assert make_tier(4).count_first(hashes(chain), 0, 40, guess, is_coming) == num_coming
    assert len(asked) <= 2


def test_blocks_in_the_tier_or_in_a_store_are_counted() -> None:
    tier = make_tier(8)
    store(tier, "abc")
    asked = hashes("abcdefg")
    for limit, expected in ((0, 0), (2, 2), (3, 3), (7, 3)):
        for guess in (None, *range(9)):
            assert tier.count_first(asked, 0, limit, guess) == expected
    coming = {key("abcd"), key("abcde")}
    for guess in (None, 0, 3, 5, 9):
        assert tier.count_first(asked, 0, 7, guess, coming.__contains__) == 5
    assert tier.count_first(hashes("xbc"), 0, 3) == 0
