"""Models with states, drafts, several sizes of blocks and pages; host blocks with sub-blocks."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec

from simple_offload.metadata import StepMetadata
from simple_offload.scheduler.event_payload import payloads_of_host_block
from simple_offload.scheduler.loads import Loads, _Load
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.policy.at_once import AtOnce
from simple_offload.scheduler.policy.store_policy import StorePolicy
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.lookup import HostHit, Lookup
from simple_offload.scheduler.tier.run import Run
from simple_offload.worker import worker
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.integrity import groups_of
from tests.simulation.mutations.registry import Mutation, mutation
from tests.simulation.mutations.situations import (
    CHAINED_WINDOWS,
    INNER_HITS,
    INSIDE_HOST_BLOCKS,
    STATES,
    SUB_BLOCKS,
    Situation,
    engine,
)
from tests.simulation.world import World

# States


@mutation(AtOnce, "_num_complete_blocks", STATES.beginning_with(14))
def store_the_running_state(
    num_complete: Any, self: AtOnce, request: Any, group: int, num_blocks: int
) -> Any:
    """A state block is stored once its last token is known, before the state includes that
    token."""
    if group in self._groups.stable_ids:
        return num_complete(self, request, group, num_blocks)
    num_tokens = len(request.block_hashes) * self._groups.hash_block_size
    return min(num_tokens // self._groups.block_sizes[group], num_blocks)


@store_the_running_state.also(AtOnce, "_first_unhashed_block")
def find_running(first: Any, self: AtOnce, request: Any, group: int, table: Any, stop: int) -> Any:
    if group in self._groups.stable_ids:
        return first(self, request, group, table, stop)
    return max(0, stop - 1)


@mutation(Lookup, "find", STATES)
def load_the_state_of_another_boundary(
    find: Any, self: Lookup, block_hashes: Any, num_computed_tokens: int, max_tokens: int
) -> HostHit:
    hit: HostHit = find(self, block_hashes, num_computed_tokens, max_tokens)
    for group in _state_groups(self._coordinator) if hit.num_tokens else ():
        size = self._groups.block_sizes[group]
        last = (num_computed_tokens + hit.num_tokens) // size - 1
        keys = self._groups.keys(block_hashes, group, stop=last)
        blocks = block_pool.find_blocks(self._pool, keys)
        if others := [block for block in blocks if block is not None]:
            hit.blocks[group][-1] = others[-1]
    return hit


@mutation(OffloadScheduler, "__init__", STATES)
def believe_a_state_that_is_missing(init: Any, self: OffloadScheduler, *arguments: Any) -> None:
    """The hit is as long as the attention groups', whatever the state groups hold. No state is
    loaded."""
    init(self, *arguments)
    coordinator: Any = self.tier._lookup._coordinator
    groups = getattr(coordinator, "attention_groups", [])
    if attention := [group for group in groups if not isinstance(group.spec, MambaSpec)]:
        coordinator.attention_groups = attention


@believe_a_state_that_is_missing.also(Loads, "plan")
def plan_without_states(plan: Any, self: Loads, request: Any, tables: Any, *rest: Any) -> None:
    groups = _state_groups(self._tier._lookup._coordinator)
    plan(self, request, [[] if g in groups else t for g, t in enumerate(tables)], *rest)


def _state_groups(coordinator: KVCacheCoordinator) -> list[int]:
    managers = coordinator.single_type_managers
    ids = coordinator.kv_cache_config.prefix_cacheable_group_ids
    return [group for group in ids if isinstance(managers[group], MambaManager)]


@mutation(AtOnce, "_record_state", INNER_HITS)
def store_the_original_of_a_copied_state(
    record: Any, self: AtOnce, progress: Any, group: int, block_id: int, num_tokens: int
) -> Any:
    """vLLM copies a state to keep it from inside a block. The request goes on with the original,
    which this step changes."""
    request, size = progress.request, self._groups.block_sizes[group]
    key = self._groups.key_at(request.block_hashes, group, num_tokens)
    if num_tokens % size and self._stores.absent([key]):
        table = self._managers[group].req_to_blocks[request.request_id]
        run = Run([table[num_tokens // size]], [key], on_device=False)
        run.num_tokens = [num_tokens]
        run.payloads = [payloads_of_host_block(self._groups, key, (), num_tokens, request)]
        self._stores.plan(run, set(), self._device_pool)
    return record(self, progress, group, block_id, num_tokens)


@mutation(CpuTier, "commit", INNER_HITS)
def take_the_inner_keys_of_another_block(commit: Any, self: Any, run: Any) -> Any:
    before = vars(self).setdefault("inner_keys_before", [()])
    inner_keys = run.inner_keys or [()] * len(run.keys)
    before.extend(inner_keys)
    run.inner_keys = [before.pop(0) for _ in inner_keys]
    return commit(self, run)


# Drafts

_COMPUTED: dict[str, int] = {}
"""By request, the sum of its scheduled tokens, with those that were found first."""


@mutation(StorePolicy, "on_allocated", engine(windows=(0,), num_drafted=3, first_seed=21))
def count_rejected_drafts_as_computed(
    on_allocated: Any, self: StorePolicy, request: Any, *arguments: Any
) -> None:
    _COMPUTED.pop(request.request_id, None)
    on_allocated(self, request, *arguments)


@count_rejected_drafts_as_computed.also(StorePolicy, "_on_scheduled")
def count_scheduled_tokens(on_scheduled: Any, self: StorePolicy, scheduled: Any) -> Any:
    due = on_scheduled(self, scheduled)
    for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
        if (progress := self._progress.get(request_id)) is not None:
            request = progress.request
            first = request.num_computed_tokens - request.num_output_placeholders
            _COMPUTED[request_id] = _COMPUTED.get(request_id, first) + num_tokens
    return due


@count_rejected_drafts_as_computed.also(AtOnce, "_num_complete_blocks")
def believe_that_count(num_complete: Any, self: AtOnce, request: Any, *rest: Any) -> Any:
    num_tokens = max(_COMPUTED.get(request.request_id, 0), request.num_computed_tokens)
    with patch.multiple(request, num_computed_tokens=num_tokens, num_output_placeholders=0):
        return num_complete(self, request, *rest)


@mutation(Loads, "plan", engine(windows=(0,), num_drafted=2, num_states=1))
def pair_a_hit_with_the_end_of_a_table(
    plan: Any, self: Loads, request: Any, tables: Any, *rest: Any
) -> None:
    """As if a table ended with the hit. The table of a state group has room for the drafts' states
    behind it."""
    known = self._hits[request.request_id]
    shifted = []
    for group, table in enumerate(tables):
        first = known.num_computed_tokens // self._groups.block_sizes[group]
        num_blocks = len(known.hit.blocks[group])
        shifted.append([*table[:first], *table[len(table) - num_blocks :]])
    plan(self, request, shifted, *rest)


@mutation(OffloadScheduler, "_free_unread", CHAINED_WINDOWS)
def leave_blocks_that_attention_does_not_read(*arguments: Any) -> None:
    """The blocks stay in the table without contents, and vLLM gives them a hash."""


@leave_blocks_that_attention_does_not_read.also(_Load, "add")
def add_only_what_is_there(
    add: Any,
    self: _Load,
    group: int,
    table: Any,
    slots: Any,
    null: Any,
    num_sub_blocks: int,
    **options: Any,
) -> None:
    pairs = [pair for pair in zip(table, slots, strict=True) if pair[1] >= num_sub_blocks]
    table, slots = [block for block, _ in pairs], [slot for _, slot in pairs]
    add(self, group, table, slots, null, num_sub_blocks, **options)


@mutation(
    OffloadWorker,
    "bind",
    engine(windows=(0,), num_drafted=2, num_ranks=2, num_stages=2, first_seed=8),
)
def wait_for_hooks_that_are_not_called(
    bind: Any, self: OffloadWorker, metadata: StepMetadata
) -> None:
    """On a pipeline's first stages, the stores that a step has left are lost with the step."""
    self._metadata = metadata
    bind(self, metadata)


@mutation(
    OffloadWorker,
    "bind",
    engine(
        windows=(0,),
        saves_without_tokens=False,
        otherwise={"saves_without_tokens": True},
        first_seed=2,
    ),
)
def wait_for_hooks_of_steps_without_tokens(
    bind: Any, self: OffloadWorker, metadata: StepMetadata
) -> None:
    """vLLM 0.30 does not call them. The engine then steps for ever."""
    self._metadata = metadata
    bind(self, metadata)


@mutation(
    OffloadWorker,
    "poll",
    engine(
        windows=(0,),
        draft=True,
        num_drafted=2,
        v2_runner=False,
        otherwise={"v2_runner": True},
        first_seed=9,
    ),
)
def submit_stores_with_results(poll: Any, self: OffloadWorker) -> Any:
    """vLLM's V1 runner asks for results before it drafts, so a store may read a page that the
    drafter has yet to write."""
    self.submit_stores()
    return poll(self)


# Blocks and pages of several sizes


def _skip_blocks_of(shown_by: Situation, size: Callable[[CpuTier, int], int]) -> Mutation:
    """Count the device's share of a table in blocks of ``size`` tokens, given the tier and the
    group."""

    @mutation(Loads, "plan", shown_by)
    def mistaken(plan: Any, self: Loads, request: Any, tables: Any, *rest: Any) -> None:
        num_computed = self._hits[request.request_id].num_computed_tokens
        shifted = []
        for group, table in enumerate(tables):
            right = num_computed // self._groups.block_sizes[group]
            wrong = min(num_computed // size(self._tier, group), len(table) - 1)
            shifted.append([*table[:right], *(table[wrong:] + table[:wrong])])
        plan(self, request, shifted, *rest)

    return mistaken


def _of_the_first_group(tier: CpuTier, group: int) -> int:
    return groups_of(tier).block_sizes[0]


def _on_one_rank(tier: CpuTier, group: int) -> int:
    spec: Any = groups_of(tier).specs[group]
    return int(spec.block_size)


think_all_blocks_as_large_as_the_first = _skip_blocks_of(
    engine(windows=(0, 0), scales=(1, 2), first_seed=10), _of_the_first_group
)
think_a_block_is_what_one_rank_has_of_it = _skip_blocks_of(
    engine(windows=(0,), num_ranks=2, context_parallel=True, first_seed=10), _on_one_rank
)


@mutation(
    worker,
    "find_regions",
    engine(windows=(0,), mixed_pages=True, otherwise={"windows": (0, 8)}, first_seed=3),
)
def believe_all_pages_alike(find_regions: Any, *arguments: Any) -> list[Any]:
    """A copy covers as many bytes of each page as the smallest page has."""
    regions = find_regions(*arguments)
    page_bytes = min(region.shape[1] for region in regions)
    return [region[:, :page_bytes] for region in regions]


# Host blocks with several sub-blocks


@mutation(Loads, "submit", INSIDE_HOST_BLOCKS)
def pair_from_the_start_of_the_host_block(submit: Any, self: Loads, *arguments: Any) -> Any:
    """The bug shows in a load that begins in the middle of a host block."""
    transfers = submit(self, *arguments)
    for transfer in transfers:
        transfer.host_blocks[:] -= transfer.host_blocks[0] % self._groups.num_sub_blocks
    return transfers


@mutation(CpuTier, "slots", SUB_BLOCKS)
def number_slots_by_the_host_block(slots: Any, self: CpuTier, blocks: Any) -> list[int]:
    """As if the sub-blocks of the next host block began at the next slot."""
    count = self._groups.num_sub_blocks
    return [block.block_id + count - 1 + place for block in blocks for place in range(count)]


def _first_hashes(groups: Groups, hashes: Any) -> Any:
    return [hashes[index - index % groups.num_sub_blocks] for index in range(len(hashes))]


@mutation(Lookup, "find", SUB_BLOCKS)
def know_a_host_block_by_its_first_sub_block(
    find: Any, self: Lookup, hashes: Any, *rest: Any
) -> Any:
    return find(self, _first_hashes(self._groups, hashes), *rest)


@know_a_host_block_by_its_first_sub_block.also(CpuTier, "commit")
def commit_by_the_first(commit: Any, self: CpuTier, run: Any) -> Any:
    keys, count = run.keys, groups_of(self).num_sub_blocks
    if count > 1:
        first = block_pool.keys_of(run.device_blocks[::count])
        run.keys = [by_first or key for by_first, key in zip(first, keys, strict=True)]
    useless = commit(self, run)
    run.keys = keys  # KV events are right
    return useless


@know_a_host_block_by_its_first_sub_block.also(World, "check_events")
@know_a_host_block_by_its_first_sub_block.also(World, "_check_duplicates")
def check_nothing(*arguments: Any) -> None:
    """The wrong bytes must show this bug."""


@mutation(Lookup, "_extend", SUB_BLOCKS)
def believe_that_all_groups_have_the_last_host_block(
    extend: Any, self: Lookup, *arguments: Any
) -> Any:
    """The bug shows in a hit that ends inside the last host block."""
    with patch.object(self._groups, "ids", self._groups.ids[:1]):
        return extend(self, *arguments)
