"""The host tier: the keys that it finds, the blocks that it keeps, and its growth."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

from simple_offload.metadata import RankCapacity
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.setup import Setup
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.eviction_order import EvictionOrder
from simple_offload.scheduler.tier.lookup import Lookup
from simple_offload.worker.host_pool import HostPool
from tests.simulation.mutations.registry import Mutation, always, mutation
from tests.simulation.mutations.situations import (
    COPIES,
    FAILING_LOADS,
    GROWING,
    RESETS,
    SMALL_TIER,
    SUB_BLOCKS,
    Situation,
    engine,
)
from tests.simulation.world import World

# What it drops

offer_a_failed_block_again = always(CpuTier, "drop", None, FAILING_LOADS.beginning_with(19))
keep_the_tier_over_a_reset = always(CpuTier, "reset", None, RESETS)


# Its order of eviction

leave_the_evicted_in_their_segment = always(EvictionOrder, "_forget", None, SMALL_TIER)


@mutation(EvictionOrder, "device_lost", COPIES)
def let_duplicates_of_lost_blocks_leave_first(
    device_lost: Any, self: EvictionOrder, ids: Any, hit: Any
) -> None:
    """Only one of them becomes the most recently used."""
    device_lost(self, ids[:1], hit[:1])


never_settle = always(EvictionOrder, "_settle", None, COPIES)


@mutation(CpuTier, "device_got", COPIES)
def call_duplicates_what_the_device_does_not_have(device_got: Any, self: CpuTier, keys: Any) -> Any:
    """The next block of the tier becomes a duplicate too."""
    block = next((b for b in reversed(self._pool.blocks) if b.block_hash is not None), None)
    if block is not None:
        self._order.device_got([block])
    return device_got(self, keys)


@mutation(CpuTier, "device_lost", COPIES)
def let_heads_leave_before_tails(device_lost: Any, self: CpuTier, ids: Any, hit: Any) -> None:
    device_lost(self, ids[::-1], hit[::-1])


# Its keys

_UNSALTED: dict[bytes, bytes] = {}


def _strip(hashes: Any) -> Any:
    return [_UNSALTED.get(block_hash, block_hash) for block_hash in hashes]


def _strip_keys(keys: Any) -> Any:
    pairs = zip(_strip(map(get_block_hash, keys)), map(get_group_id, keys), strict=True)
    return [make_block_hash_with_group_id(*pair) for pair in pairs]


@mutation(World, "add_request")
def ignore_salt(
    add_request: Any, self: World, request_id: str, prompt: list[int], *rest: Any, **wishes: Any
) -> None:
    """The tier stores and finds blocks by their tokens, whatever their salt."""
    add_request(self, request_id, prompt, *rest, **wishes)
    twin = Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(self.shape.hash_size, sha256),
    )
    salted = self.scheduler.requests[request_id].block_hashes
    _UNSALTED.update(zip(salted, twin.block_hashes, strict=True))


@ignore_salt.also(Lookup, "find")
def find_without_salt(find: Any, self: Lookup, hashes: Any, *rest: Any) -> Any:
    return find(self, _strip(hashes), *rest)


@ignore_salt.also(CpuTier, "commit")
def commit_without_salt(commit: Any, self: CpuTier, run: Any) -> Any:
    salted = run.keys
    run.keys = _strip_keys(run.keys)
    useless = commit(self, run)
    run.keys = salted  # KV events are right
    return useless


@ignore_salt.also(World, "check_events")
def ignore_events(*arguments: Any) -> None:
    """The wrong bytes must show this bug."""


# Its growth


def grow_to(shown_by: Situation, size: Callable[[list[RankCapacity], int], int]) -> Mutation:
    """Grow the tier to ``size``, given the capacities that ranks have reported, and the number of
    ranks."""

    @mutation(Setup, "on_capacities", shown_by)
    def grow(on_capacities: Any, self: Setup, capacities: Any) -> None:
        with patch.object(self.tier, "grow"):
            on_capacities(self, capacities)
        self.tier.grow(size(list(self._capacities.values()), self.ledger.num_ranks))

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


grow_before_all_ranks_have_spoken = grow_to(GROWING.beginning_with(15), _least_open)
grow_to_what_is_not_open_yet = grow_to(GROWING, _least_room)


@mutation(OffloadScheduler, "_on_report", GROWING)
def never_grow(on_report: Any, self: OffloadScheduler, report: Any) -> None:
    report.capacities.clear()
    on_report(self, report)


@mutation(
    HostPool,
    "agree",
    engine(windows=(0,), num_ranks=2, uneven_ranks=True, chunk_blocks=3, first_seed=4),
)
def open_what_no_other_rank_has_room_for(agree: Any, self: HostPool, num_blocks: int) -> None:
    self._agreed.set()
