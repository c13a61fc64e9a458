"""The inside of a scheduler side, for tests: its invariants at any moment.

All checks raise AssertionError. Their cost is proportional to the size of the tier.
"""

from collections import Counter

from vllm.v1.core.block_pool import BlockPool

from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups


def pool_of(tier: CpuTier) -> BlockPool:
    """The tier's blocks."""
    return tier._pool


def groups_of(tier: CpuTier) -> Groups:
    """The tier's groups."""
    return tier._groups


def ids_in_flight(scheduler: OffloadScheduler) -> set[int]:
    """Ids of the transfers that the scheduler side waits for."""
    return set(scheduler._ledger._num_ranks_left)


def check_scheduler(scheduler: OffloadScheduler) -> None:
    """Tier and bookkeeping agree. Without pending work, only hits pin host blocks."""
    check_tier(scheduler.tier)
    check_loads(scheduler._loads)
    check_stores(scheduler._stores, scheduler.groups)
    if not scheduler.has_pending_work():
        assert not ids_in_flight(scheduler), "transfers are in flight, and nothing waits for them"
        if not scheduler._loads._hits:
            num_pinned = scheduler.tier.num_blocks - 1 - scheduler.tier.num_free
            assert num_pinned == 0, f"{num_pinned} host blocks are pinned by nothing"


def check_at_rest(scheduler: OffloadScheduler) -> None:
    """Nothing is in flight, and every map of requests is empty."""
    check_scheduler(scheduler)
    assert not ids_in_flight(scheduler), "transfers in flight at rest"
    policy, loads = scheduler._policy, scheduler._loads
    maps = {"_requests", "_progress", "_ended", "_hits", "_unlucky"}
    for owner in (policy, loads):
        for name in vars(owner).keys() & maps:
            assert not vars(owner)[name], f"{name} of {owner} at rest: {vars(owner)[name]}"


def check_loads(loads: Loads) -> None:
    """Every block of a load or a hit has a reference."""
    for known in loads._hits.values():
        assert all(block.ref_cnt > 0 for block in known.hit.pins), "a pinned hit is free"
    for load in (*loads._planned, *loads._in_flight.values()):
        blocks = (*load.pins, *load.held, *load.trusted)
        assert all(block.ref_cnt > 0 for block in blocks), f"{load.request_id}: block is free"


def check_stores(stores: Stores, groups: Groups) -> None:
    """Every block of a store has a reference, and its key is not found."""
    for store in (stores._planned, *stores._in_flight.values()):
        for run in store.runs:
            num_device_blocks = groups.num_sub_blocks * len(run)
            assert len(run.device_blocks) == num_device_blocks, f"{run}: incomplete"
            assert len(run) == len(run.host_blocks), f"{run}: not paired"
            pinned = (*run.device_blocks, *run.host_blocks)
            assert all(block.ref_cnt > 0 for block in pinned), f"{pinned}: free during a store"
            assert all(block.block_hash is None for block in run.host_blocks), (
                f"{run.host_blocks}: can be found too soon"
            )
        keys = {key for run in store.runs for key in run.keys}
        assert store.keys == (set() if store.cancelled else keys), "keys on their way differ"


def check_tier(tier: CpuTier) -> None:
    """The free queue, the hash map and the parents agree."""
    pool, order, queue = tier._pool, tier._order, tier._queue
    by_key = pool.cached_block_hash_to_block
    position = {
        block.block_id: place
        for place, block in enumerate(pool.free_block_queue.get_all_free_blocks())
    }
    assert len(position) == pool.get_num_free_blocks(), "free queue miscounted"
    for block in pool.blocks:
        if block.is_null:
            continue
        free = block.block_id in position
        assert free == (block.ref_cnt == 0), f"{block}: free and pinned, or neither"
        for inner_key in pool.cached_block_hashes_by_block.get(block.block_id, ()):
            assert block.block_hash is not None, f"{block}: empty, yet has an inner key"
            assert by_key.get_one_block(inner_key) is not None, f"{block}: has lost an inner key"
        parent_key = order.parents[block.block_id]
        if block.block_hash is None:
            assert parent_key is None, f"{block}: empty, yet has a parent"
            continue
        found = by_key.get_one_block(block.block_hash)
        assert found is block, f"{block}: not found by its own key"
        if parent_key is not None and tier._groups.is_chained(block.block_hash):
            parent = by_key.get_one_block(parent_key)
            if parent is None:
                if block.block_id in order.early.get(parent_key, ()):
                    continue
                raise AssertionError(f"{block}: its chain's head has left the tier")
            later = position.get(parent.block_id, len(position))
            assert position.get(block.block_id, -1) < later, f"{block}: outlives {parent}"
            # A parent stored while its child was pinned is protected once the child is free.
            came_late = block.ref_cnt > 0 and parent.ref_cnt == 0
            flags = queue.is_protected
            alike = flags[parent.block_id] or not flags[block.block_id]
            assert alike or came_late, f"{block}: protected, but not its parent {parent}"
    if order.counts_children:
        children = Counter(parent for parent in order.parents if parent is not None)
        assert order.num_children == children, "children miscounted"
    for block_id in tier._doubted:
        block = pool.blocks[block_id]
        assert block.block_hash is not None, f"{block}: empty, yet a load of it has failed"
    for block_id in queue.demoted:
        block = pool.blocks[block_id]
        assert block.ref_cnt == 0, f"{block}: pinned, yet is demoted"
        assert block.block_hash is not None, f"{block}: empty, yet is demoted"
    check_segments(tier)
    num_used = sum(block.block_hash is not None for block in pool.blocks)
    assert num_used == tier.num_used, f"{num_used} blocks have contents, not {tier.num_used}"


def check_segments(tier: CpuTier) -> None:
    """The boundary stands before the protected blocks, and their number is right."""
    pool, queue = tier._pool, tier._queue
    free = pool.free_block_queue.get_all_free_blocks()
    flags = queue.is_protected
    count = sum(flags[block.block_id] for block in free)
    assert not any(flags[block.block_id] for block in free[: len(free) - count]), (
        "a protected block stands on probation"
    )
    boundary = free[-count] if count else pool.free_block_queue.fake_free_list_tail
    assert queue.boundary is boundary, f"{boundary}: should be the boundary"
    assert len(flags) == len(pool.blocks), "a block has no protected flag"
    assert sum(flags) == queue.num_protected, "protected blocks miscounted"
    assert count <= queue.limit, "too many blocks are protected"
    for block in pool.blocks:
        assert block.block_hash is not None or not flags[block.block_id], (
            f"{block}: empty, yet protected"
        )
