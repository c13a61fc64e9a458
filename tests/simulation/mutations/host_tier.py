"""The host tier: the keys that it finds, the blocks that it keeps, and its growth."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from simple_offload.metadata import RankCapacity
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.policies.request_walk import DeviceBlocks
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.eviction import EvictionOrder
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.lookup import Lookup
from simple_offload.scheduler.tier.segmented_lru import SegmentedQueue
from simple_offload.worker.host_pool import HostPool
from tests.simulation.mutations.registry import Mutation, always, mutation
from tests.simulation.mutations.situations import (
    FAILING_LOADS,
    GROWING,
    SMALL_LAZY_TIER,
    SMALL_TIER,
    SUB_BLOCKS,
    TWO_CHAINS,
    Situation,
    engine,
)
from tests.simulation.world import World

# What it drops

offer_a_failed_block_again = always(CpuTier, "drop", None, FAILING_LOADS)
keep_the_tier_over_a_reset = always(CpuTier, "reset", None)


@mutation(CpuTier, "doubt", FAILING_LOADS)
def drop_at_the_first_failure(doubt: Any, self: CpuTier, blocks: Any, *_: Any) -> None:
    self.drop(blocks)


@mutation(EvictionOrder, "_with_descendants", FAILING_LOADS)
def keep_descendants_of_the_dropped(original: Any, self: EvictionOrder, ids: Any) -> list[int]:
    return list(ids)


# Its order of eviction


@mutation(EvictionOrder, "free")
def evict_head_first(free: Any, self: EvictionOrder, chain: Any, parent: Any) -> None:
    self._pool.free_blocks(chain)


@mutation(block_pool, "chain_up_to")
def take_what_stands_behind_for_the_parent(
    chain_up_to: Any, pool: Any, parents: Any, key: Any, count: int
) -> Any:
    """Where chains lie mostly in one piece in the free queue."""
    chain: list[Any] = []
    block: Any = block_pool.get_block(pool, key)
    while block is not None and block is not block_pool.queue_end(pool):
        chain.append(block)
        if len(chain) == count:
            return chain[::-1]
        block = block.next_free_block
    return None


@mutation(EvictionOrder, "demote", SMALL_LAZY_TIER)
def demote_a_parent(demote: Any, self: EvictionOrder, blocks: Any) -> None:
    parents = [self.parents[block.block_id] for block in blocks]
    with patch.object(
        self, "num_children", {parent: 1 for parent in parents if parent is not None}
    ):
        demote(self, blocks)


@mutation(EvictionOrder, "demote", SMALL_LAZY_TIER)
def demote_the_head_first(demote: Any, self: EvictionOrder, blocks: Any) -> None:
    demote(self, blocks)
    queue = self._pool.free_block_queue
    for block in reversed(blocks):
        if block.block_id in self._queue.demoted:
            queue.remove(block)
            queue.prepend_n([block])


@mutation(SegmentedQueue, "pin", SMALL_TIER)
def lose_the_boundary(pin: Any, self: SegmentedQueue, blocks: Sequence[Any]) -> None:
    """The boundary stays in place when its block is pinned."""
    block_pool.touch(self._pool, blocks)
    if self.boundary.ref_cnt > 0:
        self.boundary = block_pool.queue_end(self._pool)


@mutation(SegmentedQueue, "protect", SMALL_TIER)
def protect_the_end_only(protect: Any, self: SegmentedQueue, blocks: Any) -> None:
    protect(self, blocks[-1:])


@protect_the_end_only.also(SegmentedQueue, "protect_chain")
def protect_the_end_of_a_chain(protect: Any, self: SegmentedQueue, blocks: Any) -> None:
    protect(self, blocks[-1:])


@mutation(EvictionOrder, "_free_chain", TWO_CHAINS)
def go_back_before_the_rest_is_free(free_chain: Any, self: EvictionOrder, chain: Any) -> None:
    free_chain(self, chain)
    self._queue.enforce_limit()


# Its keys

_UNSALTED: dict[bytes, bytes] = {}


def _strip(hashes: Any) -> Any:
    return [_UNSALTED.get(block_hash, block_hash) for block_hash in hashes]


@mutation(World, "add_request")
def ignore_salt(
    add_request: Any, self: World, request_id: str, prompt: list[int], *rest: Any
) -> None:
    """The policy stores only blocks that vLLM has hashed under the same key. Here it stores any
    block of the right tokens, whatever its salt."""
    add_request(self, request_id, prompt, *rest)
    twin = Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(self.shape.hash_size, sha256),
    )
    salted = self.scheduler.requests[request_id].block_hashes
    _UNSALTED.update(zip(salted, twin.block_hashes, strict=True))


@ignore_salt.also(Groups, "keys")
@ignore_salt.also(Lookup, "find")
@ignore_salt.also(DeviceBlocks, "match")
def call_without_salt(original: Any, self: Any, hashes: Any, *rest: Any, **options: Any) -> Any:
    return original(self, _strip(hashes), *rest, **options)


@ignore_salt.also(DeviceBlocks, "_find")
def find_any(find: Any, self: DeviceBlocks, block: Any, key: Any, group: int, *_: Any) -> Any:
    return None if block.is_null or group not in self._groups.stable_ids else block


# Its growth


def grow_to(shown_by: Situation, size: Callable[[list[RankCapacity], int], int]) -> Mutation:
    """Grow the tier to ``size``, given the capacities that ranks have reported, and the number of
    ranks."""

    @mutation(OffloadScheduler, "_on_capacities", shown_by)
    def grow(on_capacities: Any, self: OffloadScheduler, capacities: Any) -> None:
        with patch.object(self.tier, "grow"):
            on_capacities(self, capacities)
        self.tier.grow(size(list(self._capacities.values()), self._ledger.num_ranks))

    return grow


def _if_all_have_spoken(choose: Callable[[list[int]], int]) -> Any:
    def size(known: list[RankCapacity], num_ranks: int) -> int:
        return choose([each.num_open for each in known]) if len(known) == num_ranks else 0

    return size


grow_to_the_largest_rank = grow_to(GROWING, _if_all_have_spoken(max))
grow_by_slots = grow_to(SUB_BLOCKS, _if_all_have_spoken(min))


def _least_open(known: list[RankCapacity], num_ranks: int) -> int:
    return min((each.num_open for each in known), default=0)


def _least_room(known: list[RankCapacity], num_ranks: int) -> int:
    return min((each.num_host_blocks for each in known), default=0)


grow_before_all_ranks_have_spoken = grow_to(GROWING, _least_open)
grow_to_what_is_not_open_yet = grow_to(GROWING, _least_room)


@mutation(OffloadScheduler, "_on_report", GROWING)
def never_grow(on_report: Any, self: OffloadScheduler, report: Any) -> None:
    report.capacities.clear()
    on_report(self, report)


@mutation(HostPool, "agree", engine(windows=(0,), num_ranks=2, uneven_ranks=True, chunk_blocks=3))
def open_what_no_other_rank_has_room_for(agree: Any, self: HostPool, num_blocks: int) -> None:
    self._agreed.set()
