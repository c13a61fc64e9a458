"""BeforeEviction: stores blocks that the device is about to lose."""

from collections.abc import Sequence

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from simple_offload.scheduler.policy.free_queue_scan import FreeQueueScan
from simple_offload.scheduler.policy.residency import Residency, StoreRule
from simple_offload.scheduler.policy.store_policy import (
    Completed,
    PolicyParts,
    Progress,
    StorePolicy,
)
from simple_offload.transfer import Transfer

MAX_WITHHELD = 8
"""How often blocks are withheld from a request, which may then lack room. A store takes three steps
(``FreeQueueScan``), and a load may need several stores."""

_MAX_POSTPONED = 8
"""Steps in a row for which early stores are postponed. One store of many blocks takes the scheduler
and the worker about as long as one of few."""


class BeforeEviction(StorePolicy):
    """For models with one chained KV cache group. Keeps the front of the device's free queue, which
    is evicted first, free of blocks that only the device has.

    A scan along the queue stores those (``free_queue_scan.py``). While the tier has empty blocks,
    they are stored early, as they fill up, beside their request's compute. The same happens while
    the queue is short. Otherwise the next request would wait for stores of the blocks that another
    leaves. A load may take more blocks in one step than are safe: blocks that only the device has
    are withheld from its request.
    """

    def __init__(self, parts: PolicyParts) -> None:
        super().__init__(parts, records_hits=parts.wants_events)
        self._stores_early = not parts.config.lazy_offload
        self._max_step_tokens = parts.vllm_config.scheduler_config.max_num_batched_tokens
        self._residency = Residency(parts, self._admission, self._reuse)
        self._scan = FreeQueueScan(
            self._tier,
            self._residency,
            self._device_pool,
            parts.vllm_config,
            self._groups.block_sizes,
        )
        self._behind: dict[str, Progress] = {}
        """Requests with blocks recorded since they were last stored ahead of time."""
        self._has_news = False
        """Whether blocks have joined the free queue that may be stored early."""
        self._num_postponed = 0
        """Steps for which early stores have been postponed by now."""
        self._num_withheld: dict[str, int] = {}
        """By request without blocks, how often some were withheld from it."""

    @property
    def idle(self) -> bool:
        return not (self._has_news or self._scan.is_behind)

    def before_allocation(
        self, request: Request, num_load_blocks: int, num_computed_tokens: int, /
    ) -> bool:
        """Contents that only the device has are withheld from the request, and stored with this
        step. If too few blocks are left, vLLM lets no request pass this one."""
        num_tokens = min(request.num_tokens - num_computed_tokens, self._max_step_tokens)
        num_needed = num_load_blocks or sum(
            cdiv(num_tokens, manager.block_size) for manager in self._managers
        )
        if num_needed > self._device_pool.get_num_free_blocks():
            return False
        num_times = self._num_withheld.get(request.request_id, 0)
        if num_times == MAX_WITHHELD or not self._residency.may_lack_free():
            return False
        # vLLM takes the blocks that the request hits out of the queue before it gives it others.
        (group,) = self._groups.ids
        num_hits = num_computed_tokens // self._groups.block_sizes[group] - num_load_blocks
        hits = set(self._groups.keys(request.block_hashes, group, 0, num_hits))
        if not self._scan.withhold(num_needed, hits):
            return False
        # vLLM may want room for more than these blocks, so each time counts.
        self._num_withheld[request.request_id] = num_times + 1
        return True

    def on_allocated(self, progress: Progress) -> None:
        super().on_allocated(progress)
        request_id = progress.request.request_id
        self._residency.on_allocated(request_id, progress.num_hit_tokens)
        self._behind.pop(request_id, None)
        (group,) = self._groups.ids
        progress.num_ahead = progress.num_recorded[group]

    def on_step(self, scheduled: SchedulerOutput) -> None:
        due = self._on_scheduled(scheduled)
        postponed = self._postpone(scheduled, due)
        stores_early = self._stores_early and not postponed
        self._record_due(due)
        # Running requests go before the free queue: their blocks may join it in any step.
        budget = max(self._tier.num_empty if stores_early else 0, self._scan.num_short)
        if budget and not postponed:
            self._store_running(budget)
        self._scan.on_step(stores_early)
        self._has_news = False

    def on_request_finished(self, request: Request, loading: bool) -> None:
        super().on_request_finished(request, loading)
        self._behind.pop(request.request_id, None)

    def on_load_ended(self, transfer: Transfer) -> None:
        if not self._wants_events:  # else each loaded block is recorded
            self._residency.on_loaded(transfer)

    def on_store_ended(
        self, blocks: Sequence[KVCacheBlock], transfer: Transfer | None, *, ok: bool
    ) -> None:
        self._residency.on_store_ended(blocks, transfer, ok=ok)
        self._scan.free_blocks(blocks)

    def on_device_reset(self) -> None:
        if dropped := self._residency.on_device_reset():
            self._residency.count_dropped(dropped, self._scan.drop_reason)

    def on_reset(self) -> None:
        super().on_reset()
        self._behind.clear()
        self._residency.clear()

    # Recording

    def _on_complete(self, progress: Progress, completed: Sequence[Completed]) -> None:
        for group, _, blocks, keys in completed:
            lacking = self._residency.on_computed(blocks, keys, progress.request, progress.rule)
            self._own(progress, group, keys, lacking)
        if progress.rule is not StoreRule.NONE:
            self._behind[progress.request.request_id] = progress

    def _on_ended(self, progress: Progress, /) -> Sequence[BlockHashWithGroupId]:
        self._has_news = self._stores_early
        if self._stores_early:
            self._plan(self._unstored(progress))
        return ()

    def _on_released(self, released: Sequence[tuple[KVCacheBlock, BlockHashWithGroupId]]) -> None:
        self._tier.release([key for _, key in released])
        self._residency.release(released)

    def _leave_queue(self, request_id: str) -> None:
        super()._leave_queue(request_id)
        self._num_withheld.pop(request_id, None)

    def _follow_device(self) -> None:
        lost, hits = self._residency.drain_used()
        if lost:
            self._scan.on_used(lost)
            self._on_lost(lost)
        for request_id, block_ids in hits.items():
            progress = self._progress.get(request_id)
            rule = progress.rule if progress is not None else StoreRule.ALL
            self._scan.on_used(block_ids)
            if block_ids and self._residency.on_hit(block_ids, rule) and progress is not None:
                progress.num_ahead = 0

    def _on_lost(self, block_ids: Sequence[int]) -> None:
        if dropped := self._residency.on_lost(block_ids):
            self._residency.count_dropped(dropped, self._scan.drop_reason)

    # Storing

    def _postpone(self, scheduled: SchedulerOutput, due: Sequence[str]) -> bool:
        """Count the step. Returns whether it leaves early stores to later steps. A step without
        tokens does not: no other may follow. Nor does one that goes on with the prompt of a request
        that is ``due``: long prompts are stored as they are computed."""
        begun = {request.req_id for request in scheduled.scheduled_new_reqs}
        prompts = [request_id for request_id in due if self._progress[request_id].in_prompt]
        can_wait = (
            scheduled.total_num_scheduled_tokens > 0
            and self._num_postponed < _MAX_POSTPONED
            and begun.issuperset(prompts)
        )
        self._num_postponed = self._num_postponed + 1 if can_wait else 0
        return can_wait

    def _store_running(self, budget: int) -> None:
        """Store up to ``budget`` recorded device blocks of running requests."""
        (group,) = self._groups.ids
        blocks: list[KVCacheBlock] = []
        for request_id, progress in list(self._behind.items()):
            first = progress.num_ahead
            stop = min(progress.num_recorded[group], first + budget - len(blocks))
            if first < stop:
                table = self._managers[group].req_to_blocks.get(request_id, [])
                blocks += reversed(table[first:stop])
                progress.num_ahead = stop
            if len(blocks) >= budget:
                break
            del self._behind[request_id]
        self._plan(blocks)

    def _plan(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Plan stores of ``blocks``, children before parents, as far as the tier lacks them."""
        if chosen := self._residency.choose(blocks):
            self._residency.plan(chosen)

    def _unstored(self, progress: Progress) -> list[KVCacheBlock]:
        """Recorded blocks of a request that have not been stored early, children before parents, as
        far as the tier has room."""
        (group,) = self._groups.ids
        table = self._managers[group].req_to_blocks.get(progress.request.request_id, [])
        unstored = table[progress.num_ahead : progress.num_recorded[group]]
        return [each for each in reversed(unstored) if each.block_hash][: self._tier.num_empty]
