"""check_tier notices each way in which a tier can contradict itself."""

from collections.abc import Callable

import pytest

from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import begin, block, blocks, commit_as, key, make_tier, store
from tests.simulation.integrity import check_tier, pool_of

Corruption = Callable[[CpuTier], None]


@pytest.fixture
def tier() -> CpuTier:
    """ "abc" is free, "xy" is pinned, one block is in a store, and two are empty."""
    tier = make_tier(8)
    store(tier, "abc", "xy")
    pool_of(tier).touch(blocks(tier, "xy"))
    begin(tier, "p")
    check_tier(tier)
    return tier


def _reference_a_free_block(tier: CpuTier) -> None:
    block(tier, "abc").ref_cnt += 1


def _queue_a_pinned_block(tier: CpuTier) -> None:
    pool_of(tier).free_block_queue.append(block(tier, "xy"))


def _miscount(tier: CpuTier) -> None:
    pool_of(tier).free_block_queue.num_free_blocks += 1


def _empty_a_block_with_a_parent(tier: CpuTier) -> None:
    pool_of(tier).evict_blocks({block(tier, "abc").block_id})


def _lose_a_key(tier: CpuTier) -> None:
    lost = block(tier, "abc")
    pool_of(tier).cached_block_hash_to_block.pop(key("abc"), lost.block_id)


def _lose_an_inner_key(tier: CpuTier) -> None:
    filled = begin(tier, "q")
    commit_as(tier, filled, key("q"), None, 4, [key("inside")])
    pool_of(tier).cached_block_hash_to_block.pop(key("inside"), filled.block_id)


def _miscount_used(tier: CpuTier) -> None:
    tier.num_used -= 1


def _miscount_children(tier: CpuTier) -> None:
    tier._order.num_children[key("ab")] += 1


def _demote_a_pinned_block(tier: CpuTier) -> None:
    tier._queue.demoted.add(block(tier, "xy").block_id)


def _misplace_the_boundary(tier: CpuTier) -> None:
    tier._queue.boundary = block(tier, "abc")


def _protect_a_free_block(tier: CpuTier) -> None:
    tier.unpin(blocks(tier, "xy"))
    tier._queue.protect([block(tier, "a")])


def _protect_without_the_head(tier: CpuTier) -> None:
    tier._queue.protect([block(tier, "xy")])


def _protect_an_empty_block(tier: CpuTier) -> None:
    tier._queue.protect([begin(tier, "q")])


def _miscount_protected(tier: CpuTier) -> None:
    tier._queue.num_protected += 1


def _protect_too_many(tier: CpuTier) -> None:
    held = blocks(tier, "xy")
    tier.pin(held)
    for _ in range(2):
        tier.unpin(held)
    tier._queue.limit = 1


def _store_a_key_twice(tier: CpuTier) -> None:
    pool_of(tier)._insert_block_hash(key("a"), pool_of(tier).blocks[-1], num_tokens=4)


def _lose_a_head(tier: CpuTier) -> None:
    head = block(tier, "a")
    pool_of(tier).evict_blocks({head.block_id})


def _queue_a_head_first(tier: CpuTier) -> None:
    queue, head = pool_of(tier).free_block_queue, block(tier, "a")
    queue.remove(head)
    queue.prepend_n([head])


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        (_reference_a_free_block, "free and pinned, or neither"),
        (_queue_a_pinned_block, "free and pinned, or neither"),
        (_miscount, "miscounted"),
        (_empty_a_block_with_a_parent, "empty, yet has a parent"),
        (_lose_an_inner_key, "has lost an inner key"),
        (_miscount_used, "blocks have contents, not"),
        (_miscount_children, "children miscounted"),
        (_demote_a_pinned_block, "is demoted"),
        (_misplace_the_boundary, "should be the boundary"),
        (_protect_a_free_block, "stands on probation"),
        (_protect_without_the_head, "protected, but not its parent"),
        (_protect_an_empty_block, "empty, yet protected"),
        (_miscount_protected, "protected blocks miscounted"),
        (_protect_too_many, "too many blocks are protected"),
        (_lose_a_key, "not found by its own key"),
        (_store_a_key_twice, "not found by its own key"),
        (_lose_a_head, "head has left"),
        (_queue_a_head_first, "outlives"),
    ],
)
def test_corruption_is_noticed(tier: CpuTier, corrupt: Corruption, complaint: str) -> None:
    corrupt(tier)
    with pytest.raises(AssertionError, match=complaint):
        check_tier(tier)
