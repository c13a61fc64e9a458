"""The inside of a scheduler side, for tests: its invariants at any moment.

All checks raise AssertionError. Their cost is proportional to the size of the tier.
"""

from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)

from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.parked import Parked
from simple_offload.scheduler.policy.before_eviction import BeforeEviction
from simple_offload.scheduler.policy.boundaries import Boundaries
from simple_offload.scheduler.policy.protections import PROTECTIONS_SHARE
from simple_offload.scheduler.policy.residency import Residency
from simple_offload.scheduler.policy.reuse import Reuse
from simple_offload.scheduler.prompt_records import PromptRecord, PromptRecords
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.eviction_order import (
    _DUPLICATE,
    _DUPLICATES,
    _EMPTY,
    _LOST,
    _PROTECTED,
    _RESERVED,
)
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.run import Run
from simple_offload.second_tier.second_tier import SecondTier
from tests.simulation.watch import watch


def pool_of(tier: CpuTier) -> BlockPool:
    """The tier's blocks."""
    return tier._pool


def free_queues_of(tier: CpuTier) -> list[FreeKVCacheBlockQueue]:
    """The tier's free blocks: on probation, protected, reserved, empty, and duplicates."""
    return tier._order._queues


def is_protected(tier: CpuTier, block: KVCacheBlock) -> bool:
    """Whether a block, free or pinned, is protected, and no duplicate."""
    return tier._order._codes[block.block_id] == _PROTECTED


def is_duplicate(tier: CpuTier, block: KVCacheBlock) -> bool:
    """Whether a block, free or pinned, is a duplicate."""
    return tier._order._codes[block.block_id] & _DUPLICATE > 0


def num_places_of(tier: CpuTier) -> int:
    """The most ranks that share the tier's memory."""
    return tier._num_places


def device_pool_of(scheduler: OffloadScheduler) -> BlockPool:
    """The device's blocks."""
    return scheduler._device_pool


def stores_of(scheduler: OffloadScheduler) -> Stores:
    """Stores that are planned or in flight."""
    return scheduler._stores


def loads_of(scheduler: OffloadScheduler) -> Loads:
    """Loads that are planned or in flight."""
    return scheduler._loads


def parked_of(scheduler: OffloadScheduler) -> Parked:
    """Requests that have device blocks for a load."""
    return scheduler._parked


def reuse_of(scheduler: OffloadScheduler) -> Reuse:
    """What notices an overload."""
    return scheduler._policy._reuse


def num_in_flight(part: Loads | Stores) -> int:
    """How many loads or stores some rank has not reported."""
    return len(part._in_flight)


def num_parked(scheduler: OffloadScheduler) -> int:
    """How many requests have device blocks for a load."""
    return len(scheduler._parked._requests)


def keys_to_come(scheduler: OffloadScheduler) -> set[BlockHashWithGroupId]:
    """Keys on their way to the tier."""
    stores = scheduler._stores
    return set().union(*(store.keys for store in (stores._planned, *stores._in_flight.values())))


def ids_to_come(scheduler: OffloadScheduler) -> set[int]:
    """Ids of the host blocks whose contents vLLM will find on the device when loads end."""
    loads = scheduler._loads
    return {
        block.block_id
        for load in (*loads._planned, *loads._in_flight.values())
        if not load.admitted and not load.orphaned
        for block in load.pins
    }


def ids_of_hit(scheduler: OffloadScheduler, request_id: str) -> list[int]:
    """Ids of the host blocks of the hit that a request was offered."""
    return [block.block_id for block in scheduler._loads._hits[request_id].hit.pins]


def has_key(pool: BlockPool, key: BlockHashWithGroupId) -> bool:
    """Whether a block of vLLM's ``pool`` is found by ``key``."""
    return pool.cached_block_hash_to_block.get_one_block(key) is not None


def groups_of(tier: CpuTier) -> Groups:
    """The tier's groups."""
    return tier._groups


def others_of(tier: CpuTier) -> set[int]:
    """Ids of the blocks of private groups that another block stands for."""
    at_place = tier._at_place
    others: set[int] = set(at_place[at_place != at_place[:1]].tolist())
    return others


def ids_in_flight(scheduler: OffloadScheduler) -> set[int]:
    """Ids of the transfers that the scheduler side waits for."""
    return set(scheduler._ledger._num_ranks_left)


def cancelled_stores(scheduler: OffloadScheduler) -> set[int]:
    """Ids of the stores in flight that a reset has cancelled: what they copy is never found."""
    return {i for i, store in scheduler._stores._in_flight.items() if not store.keys}


def check_protections(scheduler: OffloadScheduler) -> None:
    """No more is protected than the share of all blocks. Of contents it may be more for a while:
    those of private groups, which come later, take several blocks each."""
    protections = scheduler._policy._protections
    count = sum(len(each.keys) for each in protections._by_session.values())
    assert count == protections._num_keys, "protected keys miscounted"
    num_blocks = scheduler.tier.num_blocks - 1
    assert count <= int(PROTECTIONS_SHARE * num_blocks), "too much is protected"


def check_scheduler(scheduler: OffloadScheduler) -> None:
    """Tier and bookkeeping agree. Without pending work, only hits pin host blocks, and requests
    whose load has ended, until they run."""
    check_tier(scheduler.tier)
    check_protections(scheduler)
    check_loads(scheduler._loads)
    check_stores(scheduler._stores, scheduler.groups)
    second_tier = second_tier_of(scheduler)
    if second_tier is not None:
        check_second_tier(second_tier)
    if not scheduler.has_pending_work() and (second_tier is None or not second_tier._reading):
        assert not ids_in_flight(scheduler), "transfers are in flight, and nothing waits for them"
        if not scheduler._loads._hits and not scheduler._loads._arrived:
            tier = scheduler.tier
            num_pinned = tier.max_contents - tier.num_free
            assert num_pinned == 0, f"{num_pinned} host blocks are pinned by nothing"


def check_at_rest(scheduler: OffloadScheduler) -> None:
    """Nothing is in flight, and every map of requests is empty."""
    check_scheduler(scheduler)
    assert not ids_in_flight(scheduler), "transfers in flight at rest"
    policy, loads = scheduler._policy, scheduler._loads
    maps = {"_progress", "_begun", "_allocated", "_waiting", "_behind", "_unlucky", "_arrived"}
    maps |= {"_num_on_device", "_not_run", "_released", "_hits", "_requests", "_num_blocks"}
    maps |= {"_ready", "_before_reset", "_by_request", "_refused", "_later", "_keys", "_served"}
    owners: list[Any] = [policy, loads, scheduler, scheduler._parked]
    owners += [scheduler._wishes, policy._reservations, scheduler._records]
    if isinstance(policy, BeforeEviction):
        owners.append(policy._residency)
        maps |= {"_num_withheld"}
    num_protected = len({k for p in policy._protections._by_session.values() for k in p.keys})
    assert scheduler.tier.num_reserved == num_protected, "contents are reserved at rest"
    if (second_tier := second_tier_of(scheduler)) is not None:
        owners.append(second_tier)
        maps |= {"_waits", "_over"}
        if second_tier.is_on:
            maps |= {"_fetches", "_coming", "_reading"}
    for owner in owners:
        for name in vars(owner).keys() & maps:
            assert not vars(owner)[name], f"{name} of {owner} at rest: {vars(owner)[name]}"


def second_tier_of(scheduler: OffloadScheduler) -> SecondTier | None:
    """The second tier, if there is one."""
    second_tier = scheduler._second_tier
    return second_tier if isinstance(second_tier, SecondTier) else None


def check_second_tier(second_tier: SecondTier) -> None:
    """Every block of a read has a reference, and its key is not found there."""
    for read in second_tier._reading.values():
        for block in read.blocks:
            assert block.ref_cnt > 0, f"{block}: free during a read"
            assert block.block_hash is None, f"{block}: can be found too soon"


def records_of(scheduler: OffloadScheduler) -> PromptRecords:
    """Where the prompts of requests came from."""
    return scheduler._records


def record_of(scheduler: OffloadScheduler, request_id: str) -> PromptRecord | None:
    """The record of a request that has had blocks, and has not ended."""
    return scheduler._records._by_request.get(request_id)


def residency_of(scheduler: OffloadScheduler) -> Residency | None:
    """What the policy knows of the device's blocks, if it needs to know."""
    policy = scheduler._policy
    return policy._residency if isinstance(policy, BeforeEviction) else None


def num_safe_of(scheduler: OffloadScheduler) -> int:
    """Blocks at the front of the device's free queue that the policy knows as safe."""
    policy = scheduler._policy
    return policy._scan.num_safe if isinstance(policy, BeforeEviction) else 0


def min_ahead_of(scheduler: OffloadScheduler) -> int:
    """Blocks at the front of the device's free queue that the policy keeps safe."""
    policy = scheduler._policy
    return policy._scan.min_ahead if isinstance(policy, BeforeEviction) else 0


def duplicates(scheduler: OffloadScheduler) -> list[BlockHashWithGroupId]:
    """Keys of what the tier calls duplicates. After a reset of the device's cache, the next step
    will know: none until then."""
    order, residency = scheduler.tier._order, residency_of(scheduler)
    on_device = scheduler._device_pool.cached_block_hash_to_block
    if residency is None or residency._cached is not on_device._cache:
        return []
    found = [b for b in pool_of(scheduler.tier).blocks if order._codes[b.block_id] & _DUPLICATE]
    lost = set(residency._host_of[list(residency._allocated)].tolist())
    return [b.block_hash for b in found if b.block_hash is not None and b.block_id not in lost]


def watch_withheld(scheduler: OffloadScheduler) -> set[int]:
    """Ids of the device blocks that are withheld from requests from now on. The caller may clear
    it."""
    found: set[int] = set()
    policy = scheduler._policy
    if isinstance(policy, BeforeEviction):
        scan = policy._scan

        def note(withhold: Any, *arguments: Any) -> Any:
            count = withhold(*arguments)
            found.update(block.block_id for block in scan._withheld)
            return count

        watch(scan, "withhold", note)
    return found


def watch_duplicates(
    scheduler: OffloadScheduler, on_evicted: Callable[[list[BlockHashWithGroupId]], None]
) -> None:
    """Call ``on_evicted`` with the keys of duplicates that the tier evicts, at once."""

    def tell(evict: Any, *arguments: Any) -> Any:
        blocks, evicted, others = evict(*arguments)
        on_evicted(evicted)
        return blocks, evicted, others

    watch(scheduler.tier._order, "evict", tell)


def releasable(tier: CpuTier, keys: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
    """Those of ``keys`` whose blocks leave first if they are released now."""
    blocks = [tier._pool.blocks[block_id] for block_id in tier.ids_of(keys)]
    free = [block for block in blocks if block.ref_cnt == 0]
    plain = [block for block in free if tier._order._codes[block.block_id] < _RESERVED]
    return [block.block_hash for block in plain if block.block_hash is not None]


def boundaries_of(scheduler: OffloadScheduler) -> Boundaries | None:
    """Where requests have ended, if the policy remembers it."""
    return getattr(scheduler._policy, "_boundaries", None)


def bypassed(scheduler: OffloadScheduler) -> dict[int, BlockHashWithGroupId]:
    """By id of a device block, the key of contents that are stored only if a request hits them."""
    residency = residency_of(scheduler)
    return dict(residency._bypassed) if residency is not None else {}


def pretend_overload(scheduler: OffloadScheduler, *, admits_none: bool = False) -> None:
    """Let the policy believe that requests want new contents only after the tier has lost them.
    ``admits_none``: chance admits no request then."""
    reuse: Any = scheduler._policy._reuse
    reuse._is_worth_keeping = lambda: True
    if admits_none:
        reuse._random.random = lambda: 1.0


def set_clock(scheduler: OffloadScheduler, now: Callable[[], float]) -> None:
    """Let protections end by this clock."""
    protections: Any = scheduler._policy._protections
    protections.clock = now


def has_to_wait(second_tier: SecondTier, request_id: str) -> bool:
    """Whether a request waits for objects."""
    return request_id in second_tier._waits


def is_second_tier_idle(scheduler: OffloadScheduler) -> bool:
    """Whether the second tier, if there is one, has nothing to do."""
    second_tier = second_tier_of(scheduler)
    return second_tier is None or not second_tier.is_on or second_tier.idle


def blocks_of_reads(scheduler: OffloadScheduler) -> set[int]:
    """Ids of the host blocks that a second tier which has failed may still write to."""
    second_tier = second_tier_of(scheduler)
    if second_tier is None or second_tier.is_on:
        return set()
    return {block.block_id for read in second_tier._reading.values() for block in read.blocks}


def check_second_tier_is_on(scheduler: OffloadScheduler) -> None:
    """The second tier, if there is one, was not switched off."""
    # A rank that has lost a copy thread switches off both tiers.
    if not scheduler._gate.is_closed:
        second_tier = second_tier_of(scheduler)
        assert second_tier is None or second_tier.is_on, "the second tier is off without a reason"


def set_compute_speed(scheduler: OffloadScheduler, speed: float) -> None:
    """Tell the second tier the speed of compute, in tokens per second."""
    if (second_tier := second_tier_of(scheduler)) is not None:
        second_tier.speeds.compute = speed


def runs_of(scheduler: OffloadScheduler, store_id: int) -> list[Run]:
    """The runs of a store in flight."""
    return scheduler._stores._in_flight[store_id].runs


def keys_being_stored(
    scheduler: OffloadScheduler, block: KVCacheBlock
) -> set[BlockHashWithGroupId]:
    """The keys under which a device block is being stored."""
    stores = scheduler._stores
    return {
        run.keys[place // scheduler.groups.num_sub_blocks]
        for store in (stores._planned, *stores._in_flight.values())
        for run in store.runs
        for place, each in enumerate(run.device_blocks)
        if each is block and store.keys
    }


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
            num_device_blocks = groups.num_sub_blocks * len(run.keys)
            device_blocks = run.device_blocks if store.keys else ()
            assert len(run.device_blocks) == num_device_blocks, f"{run}: incomplete"
            assert len(run.keys) == len(run.host_blocks), f"{run}: not paired"
            pinned = (*device_blocks, *run.host_blocks)
            assert all(block.ref_cnt > 0 for block in pinned), f"{pinned}: free during a store"
            assert all(block.block_hash is None for block in run.host_blocks), (
                f"{run.host_blocks}: can be found too soon"
            )
        keys = {key for run in store.runs for key in run.keys}
        assert not store.keys or store.keys == keys, "keys on their way differ"


def check_tier(tier: CpuTier) -> None:
    """The free queues, the hash map and the segments agree."""
    pool, order = tier._pool, tier._order
    by_key = pool.cached_block_hash_to_block
    queue_of: dict[int, int] = {}
    for index, queue in enumerate(order._queues):
        free_blocks = queue.get_all_free_blocks()
        assert queue.num_free_blocks == len(free_blocks), f"queue {index} miscounted"
        queue_of |= dict.fromkeys([block.block_id for block in free_blocks], index)
    # Each free block is in one queue only.
    num_free = sum(queue.num_free_blocks for queue in order._queues)
    assert len(queue_of) == num_free == tier.num_free, "free queues miscounted"
    inner_keys = pool.cached_block_hashes_by_block
    for block, code in zip(pool.blocks, order._codes, strict=True):
        if block.is_null:
            continue
        place = queue_of.get(block.block_id)
        free = place is not None
        assert free == (block.ref_cnt == 0), f"{block}: free and pinned, or neither"
        assert not free or place == min(code, _DUPLICATES), f"{block}: in another queue"
        for inner_key in inner_keys.get(block.block_id, ()):
            assert block.block_hash is not None, f"{block}: empty, yet has an inner key"
            assert by_key.get_one_block(inner_key) is not None, f"{block}: has lost an inner key"
        if block.block_hash is None:
            assert code == _EMPTY, f"{block}: empty, yet has code {code}"
            continue
        found = by_key.get_one_block(block.block_hash)
        assert found is block, f"{block}: not found by its own key"
        is_reserved = code & _EMPTY == 2
        assert is_reserved == (block.block_hash in tier._reserved), f"{block}: wrongly reserved"
    # Counts, which are kept up to date one by one.
    num_duplicates = sum(code & _DUPLICATE > 0 for code in order._codes)
    assert num_duplicates == order.num_duplicates, "duplicates miscounted"
    assert tier.is_exclusive or max(order._codes) < _DUPLICATE, "a duplicate in an inclusive tier"
    assert not any(code & _LOST and code & _DUPLICATE for code in order._codes), "lost, yet there"
    # Blocks of private groups: one of them stands for the others, which nothing else may touch.
    others = others_of(tier)
    assert len(others) == tier.num_blocks - 1 - tier.max_contents, (
        f"{others} have others that stand for them"
    )
    for block_id in others:
        block = pool.blocks[block_id]
        alone = block.ref_cnt == 1 and block.block_hash is None
        assert alone, f"{block}: used by itself, yet another one stands for it"
        assert (tier._at_place[:, block_id] == block_id).all(), f"{block}: stands for others"
    num_used = sum(block.block_hash is not None for block in pool.blocks)
    assert num_used == tier.num_used, f"{num_used} blocks have contents, not {tier.num_used}"
