"""Runs of blocks, and their commit to the tier."""

import pytest
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.eviction import EvictionOrder
from simple_offload.scheduler.tier.run import Run
from tests.scheduler.tiers import (
    BLOCK_SIZE,
    block,
    blocks,
    contents,
    hashes,
    hold,
    key,
    leave,
    make_tier,
    names,
    parent_of,
    prefixes,
    protect_first,
    refresh,
    store,
)
from tests.simulation.integrity import check_tier, pool_of


def run_of(first: str, last: str) -> Run:
    """The blocks of chain ``last``, from ``first`` on."""
    keys = [key(name) for name in prefixes(last) if len(name) >= len(first)]
    return Run((), keys, parent_of(first), len(first) * BLOCK_SIZE, BLOCK_SIZE)


def commit(tier: CpuTier, run: Run) -> list[int]:
    run.host_blocks = tier.allocate(len(run))
    (useless,) = tier.commit([run])
    check_tier(tier)
    return useless


@pytest.mark.parametrize("num_sub_blocks", [1, 3])
def test_a_slice_of_a_run(num_sub_blocks: int) -> None:
    run = run_of("ab", "abcd")
    run.device_blocks = [KVCacheBlock(i) for i in range(3 * num_sub_blocks)]
    first = run.slice(0, 2)
    assert list(first.keys) == [key("ab"), key("abc")]
    assert [each.block_id for each in first.device_blocks] == list(range(2 * num_sub_blocks))
    assert (first.parent, first.num_tokens, first.size) == (key("a"), 2 * BLOCK_SIZE, BLOCK_SIZE)
    last = run.slice(1, 3)
    assert list(last.keys) == [key("abc"), key("abcd")]
    ids = [each.block_id for each in last.device_blocks]
    assert ids == list(range(num_sub_blocks, 3 * num_sub_blocks))
    assert (last.parent, last.num_tokens, last.size) == (key("ab"), 3 * BLOCK_SIZE, BLOCK_SIZE)


def test_a_run_is_committed_at_once() -> None:
    tier = make_tier(8)
    assert commit(tier, run_of("a", "abcd")) == []
    assert contents(tier) == {"a", "ab", "abc", "abcd"}
    assert tier.num_used == 4
    assert leave(tier) == ["abcd", "abc", "ab", "a"]


def test_a_run_joins_a_parent_that_is_free() -> None:
    tier = make_tier(8)
    store(tier, "ab", "pq")
    assert commit(tier, run_of("abc", "abcd")) == []
    assert leave(tier) == ["abcd", "abc", "ab", "a", "pq", "p"]


def test_a_run_whose_parent_is_held_comes_last() -> None:
    tier = make_tier(8)
    store(tier, "ab", "pq")
    held = blocks(tier, "ab")
    hold(tier, held)
    assert commit(tier, run_of("abc", "abcd")) == []
    tier.unpin(held)
    check_tier(tier)
    assert leave(tier) == ["pq", "p", "abcd", "abc", "ab", "a"]


def test_an_orphaned_run_is_dropped() -> None:
    tier = make_tier(8)
    assert commit(tier, run_of("abc", "abcd")) == [0, 1]
    assert contents(tier) == set()
    assert pool_of(tier).get_num_free_blocks() == 8


def test_blocks_of_a_run_already_in_the_tier_are_dropped() -> None:
    tier = make_tier(8)
    store(tier, "ab")
    assert commit(tier, run_of("a", "abcd")) == [0, 1]
    assert contents(tier) == {"a", "ab", "abc", "abcd"}
    assert tier.num_used == 4


def test_an_early_run_waits_for_its_parent() -> None:
    tier = make_tier(8)
    run = run_of("abc", "abcd")
    run.early = True
    assert commit(tier, run) == []
    assert contents(tier) == {"abc", "abcd"}
    assert commit(tier, run_of("a", "ab")) == []
    assert leave(tier) == ["abcd", "abc", "ab", "a"]


def test_a_chain_of_several_runs_moves_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The move neither splits the chain nor walks from parent to parent."""
    tier = make_tier(8)
    store(tier, "ab", "pq")
    commit(tier, run_of("abc", "abcd"))
    monkeypatch.delattr(block_pool, "last_ancestor_behind")
    monkeypatch.delattr(EvictionOrder, "renew_chain")
    refresh(tier, hashes("abcd"), 0, 4)
    check_tier(tier)
    assert leave(tier) == ["pq", "p", "abcd", "abc", "ab", "a"]


def test_a_chain_whose_parents_are_named_by_equal_keys() -> None:
    """Not by the same objects as their blocks' keys: a block was stored before its parent."""
    tier = make_tier(8)
    run = run_of("abc", "abcd")
    run.early = True
    run.parent = BlockHashWithGroupId(bytes(bytearray(key("ab"))))
    commit(tier, run)
    commit(tier, run_of("a", "ab"))
    store(tier, "pq")
    refresh(tier, hashes("abcd"), 0, 4)
    check_tier(tier)
    assert leave(tier) == ["pq", "p", "abcd", "abc", "ab", "a"]


def test_a_held_chain_of_one_block() -> None:
    tier = make_tier(8)
    store(tier, "a", "p")
    pinned = [block(tier, "a")]
    hold(tier, pinned)
    refresh(tier, hashes("a"), 0, 1)
    tier.unpin(pinned)
    check_tier(tier)
    assert leave(tier) == ["p", "a"]


def test_a_chain_with_a_gap_that_another_block_fills() -> None:
    """Where a block is missing, the expected number of blocks may include others."""
    tier = make_tier(8)
    run = run_of("abc", "abcd")
    run.early = True
    commit(tier, run)
    store(tier, "pq", "a")
    moved = [block(tier, "p")]
    hold(tier, moved)
    tier.unpin(moved)
    queued = [name for name in names(pool_of(tier).free_block_queue.get_all_free_blocks()) if name]
    assert queued == ["abcd", "abc", "pq", "a", "p"]
    refresh(tier, hashes("abcd"), 0, 4)
    check_tier(tier)
    assert leave(tier)[:2] == ["pq", "p"]


@pytest.mark.parametrize("protected", [0, 2, 4])
def test_a_chain_moves_within_its_segments(protected: int) -> None:
    tier = make_tier(20)
    store(tier, "abcd", "pq")
    protect_first(tier, hashes("pq"), 0, 2)
    protect_first(tier, hashes("abcd"), 0, protected)
    store(tier, "xy")
    refresh(tier, hashes("pq"), 0, 2)
    refresh(tier, hashes("abcd"), 0, 4)
    check_tier(tier)
    queued = [name for name in names(pool_of(tier).free_block_queue.get_all_free_blocks()) if name]
    chain = ["abcd", "abc", "ab", "a"]
    split = 4 - protected
    assert queued == ["xy", "x", *chain[:split], "pq", "p", *chain[split:]]


@pytest.mark.parametrize("held", ["a", "ab", "abc", "abcd"])
def test_a_chain_that_is_partly_held(held: str) -> None:
    tier = make_tier(8)
    store(tier, "abcd", "pq")
    pinned = [block(tier, held)]
    hold(tier, pinned)
    refresh(tier, hashes("abcd"), 0, 4)
    tier.unpin(pinned)
    check_tier(tier)
    assert names(pool_of(tier).free_block_queue.get_all_free_blocks()[:4])[2:] == ["pq", "p"]


def test_a_chain_with_another_branch_between_its_blocks() -> None:
    tier = make_tier(8)
    store(tier, "ab", "abxy", "abcd")
    refresh(tier, hashes("abxy"), 0, 4)
    check_tier(tier)
    assert leave(tier) == ["abcd", "abc", "abxy", "abx", "ab", "a"]


def test_a_chain_whose_end_is_missing() -> None:
    tier = make_tier(8)
    store(tier, "ab", "pq")
    refresh(tier, hashes("abcd"), 0, 4)
    assert leave(tier) == ["pq", "p", "ab", "a"]
