"""OffloadScheduler: the scheduler side, one engine step told as a story."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from simple_offload import metrics, vllm_compat
from simple_offload.config import ConfigError, OffloadConfig
from simple_offload.logs import get_logger
from simple_offload.metadata import RankCapacity, StepMetadata, WorkerReport
from simple_offload.ranks import Ranks
from simple_offload.scheduler.event_payload import Origins
from simple_offload.scheduler.kv_events import KVEvents
from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.policies.base import BoundaryState, StorePolicy
from simple_offload.scheduler.policies.select import describe_policy, make_policy
from simple_offload.scheduler.rank_reports import InFlight
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.supported import (
    chunk_sizes,
    require_parts_possible,
    require_supported_groups,
)
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import host_groups
from simple_offload.scheduler.write_hazards import RecentTables

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)


class OffloadScheduler:
    """Lives as long as vLLM's scheduler, and is called from its thread only."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        config: OffloadConfig,
    ) -> None:
        self.config = config
        self._vllm_config = vllm_config
        self._device_config = kv_cache_config
        require_supported_groups(kv_cache_config)
        self.block_size, self._hash_block_size = resolve_kv_cache_block_sizes(
            kv_cache_config, vllm_config
        )
        self._num_parts = config.num_sub_blocks(self.block_size)
        if self._num_parts > 1:
            require_parts_possible(config, kv_cache_config, self.block_size)
        self._chunk_sizes = chunk_sizes(kv_cache_config)
        self.switched_off = False
        self._ranks = Ranks.from_config(vllm_config.parallel_config)
        self._capacities: dict[str, RankCapacity] = {}
        """By rank, what it has said last."""
        self._agreed: int | None = None
        """Host blocks, of a device block's size, that all ranks have room for."""
        self._is_agreed_told = self._ranks.are_alike
        """Whether the ranks know that number. Those that are alike need not be told."""
        self._make_tier()

    # Before the first request

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Learn the device's blocks and block tables."""
        self._device_pool = kv_cache_manager.block_pool
        self._device_managers = kv_cache_manager.coordinator.single_type_managers
        self._policy: StorePolicy = make_policy(
            self.config, self._vllm_config, self.tier, self._stores, kv_cache_manager
        )
        self._recent = RecentTables(kv_cache_manager, self._vllm_config.max_concurrent_batches)
        if self._events is not None:
            self._stores.origins = Origins(self.tier.groups, kv_cache_manager)

    def agree_on_capacity(self, capacities: Iterable[RankCapacity]) -> None:
        """Learn what the ranks have memory for. Called once by vLLM, when every rank has
        registered its KV caches and before any request; beside another connector
        (MultiConnector) maybe not at all, and then the ranks' first reports say the same."""
        capacities = list(capacities)
        if not capacities:
            return
        room = min(capacity.num_host_blocks for capacity in capacities) // self._num_parts
        if self._num_parts > 1 and room < 2:
            block_size = self.block_size * self._num_parts
            raise ConfigError(
                f"cpu_block_size={block_size}: a rank has room for {room} host blocks of "
                f"{block_size} tokens. Allowed: room for at least 2, that is a smaller block or "
                "more host memory"
            )
        self._learn({capacity.rank: capacity for capacity in capacities})

    # One step

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens that the tier has beyond those on the device, and whether they are loaded
        between steps. Pins what it offers."""
        skip = self.switched_off or request.skip_reading_prefix_cache
        if skip or not self._can_extend(num_computed_tokens):
            self._loads.forget(request.request_id)
            return 0, False
        num_tokens = self._loads.lookup(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plan the load of an accepted hit into the request's new device blocks."""
        # A request comes here again when its load has ended, with the blocks that it has had.
        if self._stores.origins is not None:
            self._stores.origins.follow(request)
        starts = num_external_tokens > 0 or request.num_computed_tokens == 0
        if starts and not self.switched_off:
            if not request.skip_reading_prefix_cache:
                self._meter.add(metrics.LOOKUPS, 1, "hit" if num_external_tokens > 0 else "miss")
            self._policy.on_allocated(request, loads=num_external_tokens > 0)
        if num_external_tokens > 0:
            self._give_back_unread(request, num_external_tokens)
            self._loads.plan(request, blocks.blocks, num_external_tokens, self._device_pool)
        else:
            self._loads.forget(request.request_id)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """The transfers that start with this step."""
        states = _boundary_states(scheduler_output)
        if self._stores.origins is not None:
            self._stores.origins.on_step(
                scheduler_output.num_scheduled_tokens,
                {request_id: [s.block_id for s in of] for request_id, of in states.items()},
            )
        self._policy.on_states(states)
        self._policy.on_step(scheduler_output)
        # Zeroing of new blocks is queued with this step: loads come after it.
        zeroed = scheduler_output.new_block_ids_to_zero or ()
        loads = self._loads.submit(
            lambda block_ids: bool(zeroed) or self._recent.may_touch(block_ids)
        )
        computes = bool(scheduler_output.num_scheduled_tokens)
        self._recent.end_step(zeroed, computes=computes)
        self._is_agreed_told |= self._agreed is not None
        return StepMetadata(
            loads=loads,
            stores=self._stores.submit(),
            admitted=self._loads.take_admitted(),
            computes=computes,
            num_host_blocks=None if self._ranks.are_alike else self._agreed,
        )

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        """Commit, release or drop what has ended on every rank; admit what every rank has
        announced."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._take(report)
        if output.finished_recving:
            self._loads.admit(output.finished_recving, self._device_pool)

    def _take(self, report: WorkerReport) -> None:
        if report.capacities:
            self._learn(report.capacities)
        self._loads.on_failed(report.failed)
        for ended in self._in_flight.end(report):
            is_load = self._loads.finish(ended, self._device_pool)
            if not is_load:
                self._stores.finish(ended, self._device_pool)
            if not ended.ok:
                consequence = (
                    "its request recomputes or fails, as kv_load_failure_policy says"
                    if is_load
                    else "its blocks are not kept"
                )
                kind = "Load" if is_load else "Store"
                logger.error("%s %d failed on a rank: %s", kind, ended.id, consequence)
        if report.broken and not self.switched_off:
            self.switched_off = True
            self.reset_cache()
            logger.error(
                "A rank has lost its copy threads: the host tier is switched off. The server "
                "goes on without it; restart the server to have it back."
            )

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Store what is left of a request that ends. vLLM may free its blocks right away: what a
        transfer still needs, the transfer holds, or vLLM itself until it has heard of the load."""
        if self._stores.origins is not None:
            self._stores.origins.forget(request.request_id)
        self._loads.end(request.request_id)
        self._policy.on_finished(request, loading=self._loads.is_loading(request.request_id))
        return False, None

    # Between steps

    def take_events(self) -> "Sequence[KVCacheEvent]":
        """KV events of the tier since the last call; none unless vLLM is configured for them."""
        return self._events.take() if self._events is not None else ()

    def take_stats(self) -> metrics.OffloadStats | None:
        """What has been counted since the last call, and how full the tier is if that has
        changed; None when nothing."""
        tier = self.tier
        capacity = tier.num_blocks - 1  # vLLM's null block is none
        pinned = capacity - tier.pool.get_num_free_blocks()
        gauges = {metrics.CAPACITY: capacity, metrics.USED: tier.num_used, metrics.PINNED: pinned}
        return self._meter.drain(gauges)

    @property
    def ids_in_flight(self) -> frozenset[int]:
        """Transfers that some rank has not reported yet."""
        return self._in_flight.ids

    @property
    def num_in_flight(self) -> int:
        """How many those are."""
        return len(self._in_flight)

    @property
    def num_followed(self) -> int:
        """Requests whose blocks are being stored, and requests with a pinned hit or a load that
        has failed."""
        return self._policy.num_requests + self._loads.num_requests

    def has_pending_work(self) -> bool:
        """Whether the engine has to go on stepping although no request needs it."""
        untold = self._agreed is not None and not self._is_agreed_told
        return untold or not (self._policy.idle and self._stores.idle and self._loads.idle)

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for a transfer would yield a device block, so that nobody needs to
        be preempted for one."""
        return (
            self._policy.num_held_blocks > 0
            or self._stores.frees_device_blocks()
            or self._loads.frees_device_blocks()
        )

    def reset_cache(self) -> bool:
        """Forget all that the tier holds or is being given. Transfers in flight run to their
        end; their blocks are held until then."""
        self._policy.on_reset()
        self._stores.abandon(self._device_pool)
        self.tier.reset()
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError when tier and bookkeeping contradict each other; at rest, when
        anything is still held. For tests: takes time in proportion to the tier."""
        self.tier.check_integrity()
        self._loads.check_integrity()
        self._stores.check_integrity()
        if not self.has_pending_work():
            assert self.num_in_flight == 0, f"{self.num_in_flight} transfers nobody waits for"
            if self._loads.num_hits == 0:
                free = self.tier.pool.get_num_free_blocks()
                assert free == self.tier.num_blocks - 1, (
                    f"{self.tier.num_blocks - 1 - free} host blocks are held by nobody"
                )

    # Details

    def _make_tier(self) -> None:
        """A tier with no host blocks (but vLLM's null block): the ranks open them."""
        num_parts = self._num_parts
        coordinator = vllm_compat.make_host_coordinator(
            replace(host_groups(self._device_config, num_parts), num_blocks=1),
            self._vllm_config,
            self.block_size * num_parts,
            self._hash_block_size * num_parts,
        )
        self._meter = metrics.Meter()
        # Lazy stores see to it that what has been loaded is not lost.
        lazy = self.config.lazy_offload
        self.tier = CpuTier(coordinator, self._hash_block_size, num_parts, self._meter, lazy)
        self._in_flight = InFlight(self._ranks.num)
        self._loads = Loads(self.tier, self._in_flight)
        self._stores = Stores(self.tier, self._in_flight)
        events_config = self._vllm_config.kv_events_config
        self._events: KVEvents | None = None
        if events_config is not None and events_config.enable_kv_cache_events:
            self._stores.events = self._events = KVEvents(self.tier)

    def _give_back_unread(self, request: "Request", num_external_tokens: int) -> None:
        """Return those of the request's new device blocks that attention will not read.

        For a chain of MTP modules, vLLM's sliding windows retain some tokens more
        (``extra_retained_tokens``), and blocks are allocated for those too. Lookups, on the device
        as in the tier, ask for the window only: the tier has nothing to fill such a block with.
        Left empty in the table, it would get a hash and be found. After a hit on the device its
        place is the null block's as well.
        """
        num_tokens = self._loads.num_found(request.request_id) + num_external_tokens
        for group, manager in enumerate(self._device_managers):
            num_unread = self.tier.groups.num_unread_tokens(num_tokens, group)
            if num_unread > manager.get_num_skipped_tokens(num_tokens):
                count = num_unread // manager.block_size
                manager._remove_blocks_in_range(request.request_id, 0, count)

    def _learn(self, capacities: Mapping[str, RankCapacity]) -> None:
        """Use the host blocks that every rank has opened: each must have room for each block."""
        self._capacities.update(capacities)
        if len(self._capacities) == self._ranks.num:
            if self._agreed is None:
                self._agree()
            num_open = min(capacity.num_open for capacity in self._capacities.values())
            self.tier.grow(num_open // self._num_parts)

    def _agree(self) -> None:
        """Every rank has said what it has room for: the smallest decides."""
        rooms = [capacity.num_host_blocks for capacity in self._capacities.values()]
        self._agreed = min(rooms)
        by_rank = [room // self._num_parts for room in rooms]
        if len(set(by_rank)) > 1:
            logger.info("Ranks have room for %s host blocks; all use %d", by_rank, min(by_rank))
        logger.info(
            "Host tier: %d blocks of %d tokens, %s",
            min(by_rank),
            self.block_size * self._num_parts,
            describe_policy(self.config),
        )

    def _can_extend(self, num_computed_tokens: int) -> bool:
        """Whether host blocks may follow a device prefix of this length: it ends on a scheduler
        block boundary, and where attention is local to a chunk, the lookup starts with a chunk."""
        if num_computed_tokens % self.block_size:
            return False
        start = self.tier.groups.start_of(num_computed_tokens)
        return not any(start % chunk_size for chunk_size in self._chunk_sizes)


def _boundary_states(scheduled: "SchedulerOutput") -> dict[str, list[BoundaryState]]:
    """The state blocks that vLLM hands over with this step. Requests that are giving their
    blocks up in it are left out: the step does not complete those."""
    handed_over = scheduled.kv_connector_block_state
    if handed_over is None:
        return {}
    gone = scheduled.finished_req_ids | (scheduled.preempted_req_ids or set())
    return {
        request_id: [BoundaryState(*state) for state in states]
        for request_id, states in handed_over.boundary_state_offloads.items()
        if request_id not in gone
    }
