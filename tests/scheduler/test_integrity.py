"""check_integrity notices each way in which a tier can contradict itself."""

from collections.abc import Callable

import pytest

from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import begin, block, blocks, key, make_tier, store

Corruption = Callable[[CpuTier], None]


@pytest.fixture
def tier() -> CpuTier:
    """ "abc" free, "xy" pinned, one block under way, two empty."""
    tier = make_tier(8)
    store(tier, "abc", "xy")
    tier.pin(blocks(tier, "xy"))
    begin(tier, "p")
    tier.check_integrity()
    return tier


def _refer_to_a_free_block(tier: CpuTier) -> None:
    block(tier, "abc").ref_cnt += 1


def _lose_a_reference(tier: CpuTier) -> None:
    block(tier, "xy").ref_cnt -= 1


def _queue_a_pinned_block(tier: CpuTier) -> None:
    tier.pool.free_block_queue.append(block(tier, "xy"))


def _lose_a_free_block(tier: CpuTier) -> None:
    tier.pool.free_block_queue.remove(block(tier, "abc"))


def _miscount(tier: CpuTier) -> None:
    tier.pool.free_block_queue.num_free_blocks += 1


def _remember_the_parent_of_an_empty_block(tier: CpuTier) -> None:
    tier.order.parents[tier.pool.blocks[-1].block_id] = key("a")


def _remember_the_parent_of_a_lost_block(tier: CpuTier) -> None:
    tier.pool.evict_blocks({block(tier, "abc").block_id})


def _lose_a_key(tier: CpuTier) -> None:
    lost = block(tier, "abc")
    tier.pool.cached_block_hash_to_block.pop(key("abc"), lost.block_id)


def _miscount_used(tier: CpuTier) -> None:
    tier.num_used -= 1


def _miscount_followers(tier: CpuTier) -> None:
    tier.order.num_followers[key("ab")] += 1


def _demote_a_pinned_block(tier: CpuTier) -> None:
    tier.order.demoted.add(block(tier, "xy").block_id)


def _misplace_the_boundary(tier: CpuTier) -> None:
    tier.order.segments.boundary = block(tier, "abc")


def _protect_a_free_block(tier: CpuTier) -> None:
    tier.unpin(blocks(tier, "xy"))
    tier.order.segments.protect([block(tier, "a")])


def _protect_without_the_head(tier: CpuTier) -> None:
    tier.order.segments.protect([block(tier, "xy")])


def _protect_an_empty_block(tier: CpuTier) -> None:
    tier.order.segments.protect([begin(tier, "q")])


def _miscount_protected(tier: CpuTier) -> None:
    tier.order.segments.num_protected += 1


def _protect_too_many(tier: CpuTier) -> None:
    held = blocks(tier, "xy")
    tier.protect(held)
    tier.unpin(held)
    tier.order.segments.limit = 1


def _hold_a_key_twice(tier: CpuTier) -> None:
    tier.pool._insert_block_hash(key("a"), tier.pool.blocks[-1], num_tokens=4)


def _lose_a_head(tier: CpuTier) -> None:
    head = block(tier, "a")
    tier.pool.evict_blocks({head.block_id})


def _lose_a_pinned_head(tier: CpuTier) -> None:
    head = block(tier, "x")
    tier.pool.evict_blocks({head.block_id})


def _let_a_head_leave_first(tier: CpuTier) -> None:
    queue, head = tier.pool.free_block_queue, block(tier, "a")
    queue.remove(head)
    queue.prepend_n([head])


def _let_a_tail_leave_last(tier: CpuTier) -> None:
    queue, tail = tier.pool.free_block_queue, block(tier, "abc")
    queue.remove(tail)
    queue.append(tail)


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        (_refer_to_a_free_block, "free and referred to, or neither"),
        (_lose_a_reference, "free and referred to, or neither"),
        (_queue_a_pinned_block, "free and referred to, or neither"),
        (_lose_a_free_block, "free and referred to, or neither"),
        (_miscount, "miscounted"),
        (_remember_the_parent_of_an_empty_block, "empty, yet has a parent"),
        (_remember_the_parent_of_a_lost_block, "empty, yet has a parent"),
        (_miscount_used, "blocks hold something, not"),
        (_miscount_followers, "followers miscounted"),
        (_demote_a_pinned_block, "is demoted"),
        (_misplace_the_boundary, "should be the boundary"),
        (_protect_a_free_block, "stands on probation"),
        (_protect_without_the_head, "protected, which"),
        (_protect_an_empty_block, "empty, yet protected"),
        (_miscount_protected, "protected blocks miscounted"),
        (_protect_too_many, "too many blocks are protected"),
        (_lose_a_key, "not found by its own key"),
        (_hold_a_key_twice, "not found by its own key"),
        (_lose_a_head, "head has left"),
        (_lose_a_pinned_head, "head has left"),
        (_let_a_head_leave_first, "outlives"),
        (_let_a_tail_leave_last, "outlives"),
    ],
)
def test_corruption_is_noticed(tier: CpuTier, corrupt: Corruption, complaint: str) -> None:
    corrupt(tier)
    with pytest.raises(AssertionError, match=complaint):
        tier.check_integrity()


def test_a_free_parent_of_a_pinned_block_is_no_contradiction(tier: CpuTier) -> None:
    tier.pin([block(tier, "abc")])
    tier.check_integrity()


def test_windows_may_lose_their_head() -> None:
    tier = make_tier(8, windows=(0, 8))
    store(tier, "abc", group=1)
    tier.pool.evict_blocks({block(tier, "a", group=1).block_id})
    tier.num_used -= 1
    tier.check_integrity()
