"""What must be true of a tier at any moment, for tests."""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simple_offload.scheduler.tier.cpu_tier import CpuTier


def check_integrity(tier: "CpuTier") -> None:
    """Raise AssertionError when the free queue, the hash map and the parents disagree. Costs
    time in proportion to the tier."""
    position = {
        block.block_id: place
        for place, block in enumerate(tier.pool.free_block_queue.get_all_free_blocks())
    }
    assert len(position) == tier.pool.get_num_free_blocks(), "free queue miscounted"
    for block in tier.pool.blocks:
        if block.is_null:
            continue
        free = block.block_id in position
        assert free == (block.ref_cnt == 0), f"{block}: free and referred to, or neither"
        for inner_key in tier.pool.cached_block_hashes_by_block.get(block.block_id, ()):
            assert block.block_hash is not None and tier.lookup.get(inner_key) is not None, (
                f"{block}: has lost a key of a part of it"
            )
        parent_key = tier.order.parents[block.block_id]
        if block.block_hash is None:
            assert parent_key is None, f"{block}: empty, yet has a parent"
            continue
        found = tier.lookup.get(block.block_hash)
        assert found is not None and found.block_id == block.block_id, (
            f"{block}: not found by its own key"
        )
        if parent_key is not None and tier.groups.is_chained(block.block_hash):
            parent = tier.lookup.get(parent_key)
            if parent is None:
                if block.block_id in tier.order.early.get(parent_key, ()):
                    continue
                raise AssertionError(f"{block}: its chain's head has left the tier")
            later = position.get(parent.block_id, len(position))
            assert position.get(block.block_id, -1) < later, f"{block}: outlives {parent}"
            # One that came when what follows it was pinned is protected when that is not any more.
            came_late = block.ref_cnt > 0 and parent.ref_cnt == 0
            alike = tier.order.is_protected(parent) or not tier.order.is_protected(block)
            assert alike or came_late, f"{block}: protected, which {parent} is not"
    if tier.demotes:
        followers = Counter(parent for parent in tier.order.parents if parent is not None)
        assert tier.order.num_followers == followers, "followers miscounted"
    for block_id in tier.doubted:
        block = tier.pool.blocks[block_id]
        assert block.block_hash is not None, f"{block}: empty, yet a load of it has failed"
    for block_id in tier.order.demoted:
        block = tier.pool.blocks[block_id]
        assert block.ref_cnt == 0 and block.block_hash is not None, f"{block}: is demoted"
    tier.order.segments.check_integrity()
    num_used = sum(block.block_hash is not None for block in tier.pool.blocks)
    assert num_used == tier.num_used, f"{num_used} blocks hold something, not {tier.num_used}"
