"""Chains: which blocks of a prompt are there, wherever they stand."""

import pytest

from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.lookup import Chains
from simple_offload.scheduler.tier.run import Run
from tests.scheduler.tiers import (
    BLOCK_SIZE,
    block,
    hashes,
    key,
    make_tier,
    names,
    prefixes,
    store,
)


def longest(tier: CpuTier, chain: str) -> list[str]:
    asked = hashes(chain)
    return names(Chains(tier.order).longest(asked, tier.groups.key_ends[0], len(asked)))


@pytest.mark.parametrize("num_asked", [0, 1, 3, 5, 9])
def test_the_longest_chain_is_what_vllm_finds(num_asked: int) -> None:
    tier = make_tier(12)
    store(tier, "abcde", "abx")
    for chain in ("abcdefghi", "abxyz", "zabcd"):
        asked = hashes(chain)
        limit = min(num_asked, len(asked))
        found = Chains(tier.order).longest(asked, tier.groups.key_ends[0], limit)
        (expected,) = tier.coordinator.find_longest_cache_hit(asked, num_asked * BLOCK_SIZE)[0]
        assert found == expected


def test_a_chain_is_followed_wherever_its_blocks_are() -> None:
    """Held, or with others between them in the free queue."""
    tier = make_tier(12)
    store(tier, "a", "q", "ab", "abc", "abx", "abcd")
    for held in ([], ["abc"], ["abcd"]):
        tier.pin([block(tier, name) for name in held])
        assert longest(tier, "abcde") == prefixes("abcd")
    ancestors = tier.lookup.lineage(hashes("abcde"), 3 * BLOCK_SIZE)
    assert names(ancestors) == prefixes("abc")


def test_blocks_that_do_not_say_what_precedes_them_are_looked_up() -> None:
    tier = make_tier(2)
    for name in ("a", "ab"):
        (filled,) = tier.allocate(1)
        tier.commit_all([(Run((), (key(name),), None, len(name) * BLOCK_SIZE), [filled])])
    assert longest(tier, "ab") == ["a", "ab"]


@pytest.mark.parametrize("length", [70, 400])
def test_a_chain_with_a_gap_ends_there(length: int) -> None:
    """Longer ones are looked for in several batches."""
    tier = make_tier(length + 2)
    chain = "".join(chr(0x4E00 + i) for i in range(length))
    store(tier, chain)
    assert longest(tier, chain) == prefixes(chain)
    for missing in (length - 1, 66, 3, 0):
        tier.pool.evict_blocks({block(tier, chain[: missing + 1]).block_id})
        assert longest(tier, chain) == prefixes(chain[:missing])
        assert tier.lookup.lineage(hashes(chain), length * BLOCK_SIZE) == [
            found for name in prefixes(chain) if (found := tier.lookup.get(key(name))) is not None
        ]


@pytest.mark.parametrize(("num_there", "guess"), [(20, 20), (37, 37), (1, 1), (0, None), (0, 0)])
def test_two_looks_tell_that_a_guess_is_right_or_that_nothing_is_there(
    num_there: int, guess: int | None
) -> None:
    chain = "".join(chr(0x4E00 + i) for i in range(40))
    looked: list[bytes] = []

    def is_coming(found: bytes) -> bool:
        looked.append(found)
        return found in there

    tier = make_tier(4)
    there = {key(name) for name in prefixes(chain)[:num_there]}
    end = tier.groups.key_ends[0]
    assert Chains(tier.order).count(hashes(chain), end, 40, guess, is_coming) == num_there
    assert len(looked) <= 2


def test_how_many_are_there_or_coming() -> None:
    tier = make_tier(8)
    store(tier, "abc")
    chains, end = Chains(tier.order), tier.groups.key_ends[0]
    asked = hashes("abcdefg")
    for limit, expected in ((0, 0), (2, 2), (3, 3), (7, 3)):
        for guess in (None, *range(9)):
            assert chains.count(asked, end, limit, guess) == expected
    coming = {key("abcd"), key("abcde")}
    for guess in (None, 0, 3, 5, 9):
        assert chains.count(asked, end, 7, guess, coming.__contains__) == 5
    assert chains.count(hashes("xbc"), end, 3) == 0
