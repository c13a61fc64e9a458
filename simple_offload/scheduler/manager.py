"""OffloadScheduler: the scheduler side of one engine, step by step."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.request import RequestStatus

from simple_offload import metrics
from simple_offload.config import OffloadConfig
from simple_offload.logs import get_logger
from simple_offload.metadata import RankCapacity, StepMetadata, WorkerReport
from simple_offload.miss_reason import MissReason
from simple_offload.scheduler.gate import is_prefilled_elsewhere
from simple_offload.scheduler.policy.store_policy import Progress
from simple_offload.scheduler.prompt_records import report
from simple_offload.scheduler.setup import Setup
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.wishes import KEY, Wishbook

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)


class _Allocation(NamedTuple):
    """Device blocks that vLLM has given to a request."""

    request: "Request"
    num_on_device: int
    """Tokens that the device had."""
    num_loaded: int
    """Tokens after them that the tier loads."""
    is_new: bool
    """False if the request has had these blocks since its load, which has ended."""


class OffloadScheduler:
    """Lives as long as vLLM's scheduler, which calls it from one thread."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        config: OffloadConfig,
    ) -> None:
        """Raises ConfigError for what this version cannot serve."""
        self.config = config
        self._setup = setup = Setup(vllm_config, kv_cache_config, config)
        self.tier, self.groups, self._meter = setup.tier, setup.groups, setup.meter
        self._ledger, self._loads, self._stores = setup.ledger, setup.loads, setup.stores
        self._events, self._second_tier = setup.events, setup.second_tier
        self._num_on_device: dict[str, int] = {}
        """By request without blocks, its tokens that the device had at the last lookup."""
        self._allocated: dict[str, _Allocation] = {}
        """By request, since the last step."""
        self._wishes = Wishbook(allow_reports=config.allow_reports)

    # Before the first request

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Learn the device's blocks and block tables."""
        self._device_pool = kv_cache_manager.block_pool
        block_pool.on_reset(self._device_pool, self._before_device_reset, self._on_device_reset)
        self._device_managers = kv_cache_manager.coordinator.single_type_managers
        setup = self._setup
        setup.bind_kv_cache_manager(kv_cache_manager)
        self._policy, self._parked = setup.policy, setup.parked
        self._gate, self._hazards, self._records = setup.gate, setup.hazards, setup.records

    def agree_on_capacity(self, capacities: Iterable[RankCapacity]) -> None:
        """Learn how much memory the ranks have. vLLM calls this when every rank has registered its
        KV caches and before any request, and vLLM 0.33 after each sleep. Beside another connector
        (MultiConnector) it does not: then the ranks' first reports contain the same."""
        self._setup.on_capacities(capacities)
        self._second_tier = self._setup.second_tier

    # One step

    def on_new_request(self, request: "Request") -> None:
        """vLLM has put a request into its queue."""
        self._wishes.of(request)  # a warning comes at once
        if self._gate.is_closed or is_prefilled_elsewhere(request):
            return
        self._policy.on_new_request(request)
        self._second_tier.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that the tier has beyond those on the device, and whether they are loaded
        between steps. Pins their blocks. None: vLLM should ask again in the next step."""
        self._num_on_device[request.request_id] = num_computed_tokens
        num_tokens = self._gate.ask(request, num_computed_tokens, self._second_tier)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plan the load of an accepted hit into the request's new device blocks. The step tells
        the policy and the records, on which vLLM's next allocation does not depend."""
        request_id = request.request_id
        num_on_device = self._num_on_device.pop(request_id, 0)
        # A request comes here again when its load has ended.
        is_new = num_external_tokens > 0 or request.num_computed_tokens == 0
        self._allocated[request_id] = _Allocation(
            request, num_on_device, num_external_tokens, is_new
        )
        self._gate.on_allocated(request_id)
        if num_external_tokens > 0:
            self._free_unread(request, num_on_device + num_external_tokens)
            self._loads.plan(request, blocks.blocks, num_external_tokens, self._device_pool)
            self._parked.add(request)
        else:
            self._loads.unpin_hit(request_id)
            self._parked.remove(request_id)

    def hit_sources(self, request: "Request", num_tokens: int) -> dict[str, int]:
        """Of the ``num_tokens`` tokens that a request with new blocks loads: by source, "host" or
        "second_tier", how many."""
        num_fetched = self._num_fetched(self._allocated[request.request_id])
        return {"host": num_tokens - num_fetched, "second_tier": num_fetched}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """The transfers that start with this step."""
        num_tokens = scheduler_output.total_num_scheduled_tokens
        computes = num_tokens > 0
        # vLLM may be paused, and make this step for an ended request or for pending work alone.
        goes_on = computes or bool(scheduler_output.finished_req_ids) or self.has_pending_work()
        self._loads.on_step(scheduler_output.num_scheduled_tokens)
        if self._allocated:
            self._on_allocated()
        self._policy.on_step(scheduler_output)
        # Zeroing of new blocks is queued with this step: loads come after it.
        zeroed = scheduler_output.new_block_ids_to_zero or ()
        loads = self._loads.submit(
            lambda block_ids: bool(zeroed) or self._hazards.may_touch(block_ids)
        )
        step = self._second_tier.on_step(num_tokens)
        self._hazards.on_step(zeroed, computes=computes)
        if self._parked.on_step(goes_on=goes_on):
            self._gate.on_standstill()
        self._gate.on_step()
        return StepMetadata(
            loads=loads,
            stores=self._stores.submit(),
            admitted=self._loads.drain_admitted(),
            num_tokens=num_tokens,
            num_host_blocks=self._setup.send_capacity(),
            step=step,
        )

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        """Commit or release transfers that have ended on every rank; admit loads that every rank
        has announced."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._on_report(report)
        if output.finished_recving:
            self._loads.admit(output.finished_recving, self._device_pool)
            self._parked.on_ready(output.finished_recving)

    def _on_report(self, report: WorkerReport) -> None:
        if report.capacities:
            self.agree_on_capacity(report.capacities.values())
        if report.step is not None:
            self._second_tier.on_step_ended(report.step)
        for request_id in self._loads.on_failed(report.failed):
            self._records.on_lost(request_id, MissReason.LOAD_FAILED)
        for ended in self._ledger.on_report(report):
            kind, consequence = "Store", "its blocks are not kept"
            if (load := self._loads.on_ended(ended, self._device_pool)) is not None:
                kind = "Load"
                consequence = "its request recomputes or fails, as kv_load_failure_policy says"
                if ended.ok:
                    self._policy.on_load_ended(load)
            elif (store := self._stores.on_ended(ended)) is not None:
                self._policy.on_store_ended(*store, ok=ended.ok)
            if not ended.ok:
                logger.error("%s %d failed on a rank: %s", kind, ended.id, consequence)
        if report.broken and not self._gate.is_closed:
            self._gate.is_closed = True
            self.reset_cache()
            logger.error(
                "A rank has lost a copy thread: the host tier is switched off. The server "
                "continues without it; restart the server to switch it on again."
            )

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Store the rest of a request that ends. vLLM may free its blocks right away: transfers
        have references to the blocks that they need; until vLLM knows of a load, it keeps them.
        Returns whether vLLM should keep the blocks, and what the reply says."""
        self._num_on_device.pop(request.request_id, None)
        self._allocated.pop(request.request_id, None)
        self._parked.remove(request.request_id)
        self._gate.on_request_finished(request.request_id)
        self._second_tier.on_request_finished(request.request_id)
        self._loads.on_request_finished(request.request_id)
        loading = self._loads.is_loading(request.request_id)
        if loading and request.status is RequestStatus.FINISHED_ERROR:
            # As ``kv_load_failure_policy`` says. The ranks' reports reach this class after vLLM.
            self._records.on_lost(request.request_id, MissReason.LOAD_FAILED)
        self._policy.on_request_finished(request, loading=loading)
        record = self._records.on_finished(request)
        wants_report = self._wishes.of(request).report
        self._wishes.forget(request.request_id)
        return False, {KEY: report(record)} if record is not None and wants_report else None

    # Between steps

    def drain_events(self) -> "Sequence[KVCacheEvent]":
        """KV events of the tier since the last call; none unless vLLM is configured for them."""
        return self._events.drain() if self._events is not None else ()

    def drain_stats(self) -> metrics.OffloadStats | None:
        """Counts since the last call, and how full the tier is if that has changed; None if
        neither."""
        tier = self.tier
        gauges: dict[str, float] = {
            metrics.CAPACITY: tier.max_contents,
            metrics.USED: tier.num_used,
            metrics.PINNED: tier.max_contents - tier.num_free,
        }
        return self._meter.drain(gauges | self._second_tier.gauges())

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping although no request needs it."""
        if self._setup.must_send_capacity or self._second_tier.has_pending_work:
            return True
        return not (self._policy.idle and self._stores.idle and self._loads.idle)

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for a transfer would free a device block, so that no request needs to be
        preempted for one."""
        return self._stores.frees_device_blocks() or self._loads.frees_device_blocks()

    def reset_cache(self) -> bool:
        """Drop all contents of the tier, and those on their way there. Transfers in flight go on;
        their blocks stay pinned until then."""
        self._drop_stores()
        # What the device still has, it will lose without a store.
        self.tier.history.note(MissReason.RESET, list(block_pool.cached(self._device_pool)))
        self.tier.reset()
        self._second_tier.reset()
        return True

    def _before_device_reset(self) -> None:
        """vLLM is about to reset the device's cache, which needs all blocks free. If nothing but
        this connector has some, give them up: those of requests that are parked and ready, and,
        unless the tier keeps its contents, those of stores. Running requests, and loads that were
        announced early, may have references to the same blocks."""
        held = [] if self.config.keep_on_device_reset else self._stores.device_blocks
        ours = Counter(block.block_id for block in (*self._parked.device_blocks, *held))
        pool = self._device_pool
        num_used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if len(ours) == num_used and all(pool.blocks[i].ref_cnt == ours[i] for i in ours):
            self._gate.give_back()
            if held:
                self._drop_stores()

    def _on_device_reset(self, lost: list[bytes]) -> None:
        """The device's cache has been reset: the model's weights may be others from now on.
        ``lost``: the keys that it had."""
        self._policy.on_device_reset()
        self.tier.history.note(MissReason.RESET, lost)
        if self.config.keep_on_device_reset:
            return
        if num_blocks := self.tier.num_used:
            logger.info(
                "The device's prefix cache was reset, and %d host blocks with it: their KV may be "
                "of other weights. keep_on_device_reset would keep them",
                num_blocks,
            )
        self.reset_cache()

    def _drop_stores(self) -> None:
        self._policy.on_reset()
        self._policy.on_store_ended(self._stores.reset(), None, ok=True)

    def shutdown(self) -> None:
        """Finish what is on its way to the second tier."""
        self._second_tier.shutdown()

    # Details

    def _on_allocated(self) -> None:
        """Tell the policy and the records which requests have got blocks since the last step."""
        allocated, self._allocated = self._allocated, {}
        for each in allocated.values():
            request, num_on_device, num_loaded, is_new = each
            if is_new and not self._gate.is_closed:
                wishes = self._wishes.of(request)
                self._policy.on_allocated(Progress(request, num_on_device, num_loaded, wishes))
            self._records.on_allocated(
                request,
                num_loaded,
                self._num_fetched(each),
                is_asked=self._gate.asks_caches(request),
            )

    def _num_fetched(self, allocation: _Allocation) -> int:
        """How many of the tokens that are loaded the second tier had."""
        request, num_on_device, num_loaded, _ = allocation
        num_tokens = num_on_device + num_loaded
        return min(self._second_tier.num_fetched_tokens(request.request_id, num_tokens), num_loaded)

    def _free_unread(self, request: "Request", num_tokens: int) -> None:
        """Free those of the request's new device blocks that attention will not read.
        ``num_tokens``: those that device and tier have.

        For a chain of MTP modules, vLLM's sliding windows retain more tokens
        (``extra_retained_tokens``), and vLLM allocates blocks for those too. Lookups, on the device
        as in the tier, ask for the window only: the tier has no contents for such a block. If it
        stayed in the table empty, vLLM would hash it and find it. After a hit on the device, too,
        a null block stands there.
        """
        for group, manager in enumerate(self._device_managers):
            num_unread = self.groups.num_unread_tokens(num_tokens, group)
            if num_unread > manager.get_num_skipped_tokens(num_tokens):
                count = num_unread // manager.block_size
                block_pool.free_first_blocks(manager, request.request_id, count)
