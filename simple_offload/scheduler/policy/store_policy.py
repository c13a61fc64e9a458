"""StorePolicy: what both policies know of requests."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.config import OffloadConfig
from simple_offload.miss_reason import MissReason
from simple_offload.scheduler.policy.admission import MIN_COUNTED, Admission
from simple_offload.scheduler.policy.boundaries import Boundary
from simple_offload.scheduler.policy.owners import Owners, session_of
from simple_offload.scheduler.policy.pacing import Batches, Pacer
from simple_offload.scheduler.policy.protections import Protections
from simple_offload.scheduler.policy.queue_reservations import QueueReservations
from simple_offload.scheduler.policy.residency import StoreRule
from simple_offload.scheduler.policy.reuse import Reuse
from simple_offload.scheduler.prompt_records import PromptRecords
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.wishes import NO_WISHES, Wishes
from simple_offload.transfer import Transfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(eq=False)
class Progress:
    """A request with device blocks. Lists are by group, and count host blocks."""

    request: "Request"
    num_hit_tokens: int
    """Tokens that the device had."""
    num_loaded_tokens: int
    """Tokens behind them that the tier fills in before it runs."""
    wishes: Wishes
    rule: StoreRule = StoreRule.NONE
    num_recorded: list[int] = field(default_factory=list)
    num_ahead: int = 0
    """Recorded blocks that have been stored early, or need not be."""
    left_before: Sequence[Boundary] = ()
    """The ends of the request that has ended where this one went on."""
    own: set[int] = field(default_factory=set)
    """Host blocks that must not make room for its rest, in a tier that is not exclusive."""

    @property
    def num_found_tokens(self) -> int:
        """Tokens that it need not compute."""
        return self.num_hit_tokens + self.num_loaded_tokens

    @property
    def may_release(self) -> bool:
        """Whether it, or a later request of its session, may release what it leaves."""
        return self.wishes.release or bool(self.request.session_id)

    @cached_property
    def session(self) -> bytes:
        """The request's session, or one by itself."""
        return session_of(self.request)

    @property
    def in_prompt(self) -> bool:
        """Whether the step that is being scheduled computes tokens of its prompt."""
        return self.request.num_computed_tokens < self.request.num_prompt_tokens


class Completed(NamedTuple):
    """Blocks of a request that vLLM finds, all sub-blocks of whole host blocks."""

    group: int
    first: int
    """The host block that they begin with."""
    blocks: Sequence[KVCacheBlock]
    keys: Sequence[BlockHashWithGroupId]
    """By block."""


class PolicyParts(NamedTuple):
    """The objects that a policy works with."""

    config: OffloadConfig
    vllm_config: "VllmConfig"
    tier: CpuTier
    groups: Groups
    stores: Stores
    kv_cache_manager: "KVCacheManager"
    records: PromptRecords
    meter: metrics.Meter
    wants_events: bool


class StorePolicy(ABC):
    """Decides which device blocks are stored, and when. This base class records which blocks of a
    request are complete, follows its wishes, and reserves what waiting requests will hit."""

    def __init__(self, parts: PolicyParts, *, records_hits: bool) -> None:
        """``records_hits``: whether a request records blocks that it hits, like those it
        computes."""
        self._records_hits = records_hits
        self._tier, self._groups, self._stores = parts.tier, parts.groups, parts.stores
        self._records, self._meter = parts.records, parts.meter
        self._wants_events = parts.wants_events
        self._managers = parts.kv_cache_manager.coordinator.single_type_managers
        self._device_pool = parts.kv_cache_manager.block_pool
        num_device_blocks = len(self._device_pool.blocks)
        self._admission = Admission(
            parts.config.store_threshold, max(MIN_COUNTED, 2 * num_device_blocks)
        )
        self._reuse = Reuse(self._tier)
        self._progress: dict[str, Progress] = {}
        self._before_reset: dict[str, Progress] = {}
        """Of requests that go on after a reset. They are not stored."""
        self._not_run: set[str] = set()
        """Requests that no step has run since they got their first blocks."""
        self._pacer = Pacer()
        self._batches = Batches(self._groups)
        self._owners = Owners(num_device_blocks)
        self._protections = Protections(self._tier)
        self._by_priority = parts.vllm_config.scheduler_config.policy == "priority"
        self._reservations = QueueReservations(
            self._tier, self._groups, self._device_pool, by_priority=self._by_priority
        )

    # What vLLM and the ranks tell

    @property
    def idle(self) -> bool:
        """Whether nothing is postponed to the next step."""
        return True

    def on_new_request(self, request: "Request") -> None:
        self._reservations.add(request)

    @abstractmethod
    def before_allocation(
        self, request: "Request", num_load_blocks: int, num_computed_tokens: int, /
    ) -> bool:
        """vLLM is about to give a request ``num_load_blocks`` device blocks for a load, or else
        those for the tokens that a step computes after the first ``num_computed_tokens``.
        Returns whether blocks are withheld from it."""

    def on_allocated(self, progress: Progress) -> None:
        """A request has got (new) device blocks in the step that is being scheduled. If the tier
        loads nothing, another connector (MultiConnector) may fill blocks until the request
        runs."""
        request, wishes = progress.request, progress.wishes
        request_id, num_tokens = request.request_id, progress.num_found_tokens
        self._reuse.on_request(request.block_hashes)
        self._reservations.on_allocated(request)
        self._leave_queue(request_id)
        if wishes.store:
            stores = self._reuse.admits_next() or wishes.protect > 0
            progress.rule = StoreRule.ALL if stores else StoreRule.HITS
        num_known = 0 if self._records_hits else num_tokens
        progress.num_recorded = [num_known // size for size in self._groups.block_sizes]
        self._progress[request_id] = progress
        for group in self._groups.ids if len(self._owners) else ():
            stop = num_tokens // self._groups.block_sizes[group]
            self._owners.share(
                progress.session, self._groups.keys(request.block_hashes, group, 0, stop)
            )
        if progress.may_release:
            self._claim_prompt(progress, num_tokens)
        self._count(progress)
        self._not_run.add(request_id)
        self._pacer.add(request_id)

    @abstractmethod
    def on_step(self, scheduled: "SchedulerOutput") -> None:
        """A step has been scheduled. Tokens of earlier steps are computed by the time that this
        step's stores start."""

    def on_request_finished(self, request: "Request", loading: bool) -> None:
        """``request`` gives up its device blocks right after this call; ``loading``: they were
        still waiting for a load."""
        request_id = request.request_id
        self._leave_queue(request_id)
        self._before_reset.pop(request_id, None)
        progress = self._progress.pop(request_id, None)
        has_run = request_id not in self._not_run
        self._not_run.discard(request_id)
        if progress is not None:
            self._pacer.remove(request_id)
            self._count(progress)
        self._admission.on_request_finished(request_id)
        # Until a step has run it, another connector (MultiConnector) may still be filling its
        # blocks, unless the tier does.
        if progress is None and request.num_computed_tokens and not loading:
            # ``on_reset`` has come between.
            for group in self._groups.ids:
                stop = confirmed_tokens(request) // self._groups.block_sizes[group]
                keys = self._groups.keys(request.block_hashes, group, 0, stop)
                self._tier.history.note(MissReason.RESET, keys)
        if progress is None or loading or not (has_run or progress.num_loaded_tokens):
            return
        self._record(progress)  # the last step's output may have given a block its hash
        if progress.wishes.release and not self._tier.num_empty:
            progress.rule = StoreRule.NONE
        further = self._on_ended(progress)
        if progress.wishes is not NO_WISHES:
            self._follow_wishes(progress, further)

    def on_load_ended(self, transfer: Transfer) -> None:  # noqa: B027 - most record what they hit
        """A load has filled its device blocks."""

    @abstractmethod
    def on_store_ended(
        self, blocks: Sequence[KVCacheBlock], transfer: Transfer | None, /, *, ok: bool
    ) -> None:
        """A store of these device blocks, in order, has ended: drop its references, and with the
        last one put each block where it belongs in the free queue. ``transfer``: if the tier has
        got them."""

    def on_device_reset(self) -> None:  # noqa: B027 - unless the tier is exclusive, it keeps all
        """The device's prefix cache has been reset."""

    def on_reset(self) -> None:
        """Contents of the device's blocks must not be stored any more."""
        self._before_reset |= self._progress
        self._progress.clear()  # those that wait for a load will still get blocks
        self._pacer.clear()
        self._protections.clear()

    # What each policy does

    def _follow_device(self) -> None:  # noqa: B027 - most models need no more
        """Note what vLLM has done with the device's blocks since the last step."""

    def _on_lost(self, block_ids: Sequence[int]) -> None:  # noqa: B027 - most models need no more
        """The device has lost the contents of these blocks, in this order."""

    @abstractmethod
    def _on_complete(self, progress: Progress, completed: Sequence[Completed]) -> None:
        """A request has completed blocks, parents before children in each group."""

    @abstractmethod
    def _on_ended(self, progress: Progress, /) -> Sequence[BlockHashWithGroupId]:
        """A request gives up its blocks. Blocks that vLLM finds are recorded. Returns the keys of
        further blocks that are stored."""

    @abstractmethod
    def _on_released(self, released: Sequence[tuple[KVCacheBlock, BlockHashWithGroupId]]) -> None:
        """A request releases contents, which it has in these blocks."""

    def _leave_queue(self, request_id: str) -> None:
        """A request is not in vLLM's queue any more."""
        self._reservations.remove(request_id)

    # Requests

    def _on_scheduled(self, scheduled: "SchedulerOutput") -> list[str]:
        """Note which requests run, and what the device has lost. Returns the requests that are
        due."""
        self._reservations.on_step()
        self._protections.on_step()
        self._not_run.difference_update(scheduled.num_scheduled_tokens)
        if self._by_priority and scheduled.preempted_req_ids:
            self._evict_uncomputed(scheduled.preempted_req_ids)
        # First what the device has lost: a store must not evict it from the tier as a duplicate.
        self._follow_device()
        # Before this step's blocks count as computed.
        self._records.on_step()
        return self._pacer.on_step(scheduled.num_scheduled_tokens)

    def _evict_uncomputed(self, preempted: Iterable[str]) -> None:
        """Requests have been preempted. With priorities, one may have been scheduled before in the
        same step: vLLM finds blocks of it that nothing computes (vllm#57580), and stores would
        spread them. No request has hit them yet. Evict all of its blocks that are not recorded."""
        for request_id in preempted:
            progress = self._progress.get(request_id) or self._before_reset.get(request_id)
            if progress is None:
                continue
            for group in self._groups.ids:
                hashes, first = progress.request.block_hashes, progress.num_recorded[group]
                keys = self._groups.sub_block_keys(hashes, group, first, len(hashes))
                blocks = block_pool.blocks_with(self._device_pool, keys)
                lost = [block.block_id for block in reversed(blocks) if block.ref_cnt == 0]
                self._device_pool.evict_blocks(set(lost))
                self._on_lost(lost)  # tail first

    # Recording

    def _record_due(self, due: Iterable[str]) -> None:
        """Record what requests that are due have completed."""
        for request_id in due:
            progress = self._progress[request_id]
            request = progress.request
            self._count(progress)
            self._record(progress)
            next_at = self._batches.next_at(progress.num_recorded, request.num_prompt_tokens)
            self._pacer.postpone(request_id, next_at - confirmed_tokens(request))

    def _count(self, progress: Progress) -> None:
        """Count the prefixes of a request, unless it wants nothing stored."""
        if progress.rule is not StoreRule.NONE:
            self._admission.count(progress.request)

    def _record(self, progress: Progress) -> None:
        """Record the blocks that have got a hash. Their bytes are complete by the end of the step
        that is being scheduled, if the request is part of it."""
        request, num_sub_blocks = progress.request, self._groups.num_sub_blocks
        completed = []
        for group in self._groups.ids:
            manager, first = self._managers[group], progress.num_recorded[group]
            stop = manager.num_cached_block.get(request.request_id, 0) // num_sub_blocks
            if first < stop:
                table = manager.req_to_blocks[request.request_id]
                found = self._groups.sub_blocks(table, first, stop)
                blocks, keys = self._complete(request, group, found, first, stop)
                completed.append(Completed(group, first, blocks, keys))
                progress.num_recorded[group] = stop
        if completed:
            self._on_complete(progress, completed)

    def _complete(
        self, request: "Request", group: int, blocks: Sequence[KVCacheBlock], first: int, stop: int
    ) -> tuple[Sequence[KVCacheBlock], Sequence[BlockHashWithGroupId]]:
        """The sub-blocks among ``blocks`` that vLLM finds together with the rest of their host
        block, and their keys. ``blocks``: of a request's host blocks ``first`` to ``stop``."""
        groups = self._groups
        current: list[Any] = list(block_pool.keys_of(blocks))
        is_chained = group in groups.chained_ids
        if is_chained and all(current):
            last = groups.key_at(request.block_hashes, group, stop * groups.block_sizes[group])
            if current[-1] == last:
                return blocks, current  # vLLM's own objects, which are faster to compare
        keys = groups.sub_block_keys(request.block_hashes, group, first, stop)
        if not is_chained:
            # The window or the state has left them. They may still be in the free queue.
            cached = block_pool.find_blocks(self._device_pool, keys)
            pairs = zip(blocks, cached, strict=True)
            blocks = [(found or block) if block.is_null else block for block, found in pairs]
            current = list(block_pool.keys_of(blocks))
        count = groups.num_sub_blocks
        places = [
            place
            for end in range(count, len(keys) + 1, count)
            if current[end - count : end] == keys[end - count : end]
            for place in range(end - count, end)
        ]
        return [blocks[i] for i in places], [keys[i] for i in places]

    # Wishes

    def _claim_prompt(self, progress: Progress, num_tokens: int) -> None:
        """A request has got blocks, and ``num_tokens`` tokens are there. It owns the rest of its
        prompt, as far as no other request has brought it into a cache."""
        request = progress.request
        for group in self._groups.ids:
            first = num_tokens // self._groups.block_sizes[group]
            table = self._managers[group].req_to_blocks.get(request.request_id, [])
            own = {block.block_id for block in table[first * self._groups.num_sub_blocks :]}
            absent = self._stores.absent(self._groups.keys(request.block_hashes, group, first))
            blocks = block_pool.blocks_with(self._device_pool, absent)
            there = {block.block_hash for block in blocks if block.block_id not in own}
            self._owners.claim(progress.session, absent - there)

    def _own(
        self,
        progress: Progress,
        group: int,
        keys: Iterable[BlockHashWithGroupId],
        lacking: Iterable[BlockHashWithGroupId],
    ) -> None:
        """A request has computed contents with ``keys``, and the tier lacked ``lacking``. It owns
        the contents of its answer that no other device block has."""
        if not len(self._owners) and not progress.may_release:
            return
        request = progress.request
        first = request.num_prompt_tokens // self._groups.block_sizes[group]
        new: set[BlockHashWithGroupId] = set()
        if progress.may_release:
            answer = set(self._groups.keys(request.block_hashes, group, first))
            answer.intersection_update(lacking)
            new = answer - block_pool.repeated(self._device_pool, answer)
        self._owners.share(progress.session, [key for key in keys if key not in new])
        self._owners.claim(progress.session, new)

    def _follow_wishes(self, progress: Progress, further: Sequence[BlockHashWithGroupId]) -> None:
        """A request ends. Protect its recorded contents and ``further`` keys; or release contents
        that its session owns, and that no other request uses on the device."""
        wishes, request, groups = progress.wishes, progress.request, self._groups
        if wishes.release:
            self._protections.end(progress.session)
        elif wishes.protect and wishes.store:
            prompt_hit = groups.next_hit(request.num_prompt_tokens - 1)
            keys = [
                key
                for group in groups.ids
                for key in groups.keys(
                    request.block_hashes,
                    group,
                    groups.first_read(prompt_hit, group),
                    progress.num_recorded[group],
                )
            ]
            self._protections.add(progress.session, wishes.protect, [*keys, *further])
            return
        else:
            return
        references = Counter(block.block_id for block in self._stores.device_blocks)
        num_sub_blocks = groups.num_sub_blocks
        for group in groups.ids:
            stop = progress.num_recorded[group]
            table = self._managers[group].req_to_blocks.get(request.request_id, [])
            blocks = groups.sub_blocks(table, 0, stop)[num_sub_blocks - 1 :: num_sub_blocks]
            keys = groups.keys(request.block_hashes, group, 0, stop)
            pairs = [
                (block, key)
                for block, key in zip(blocks, keys, strict=False)
                if self._owners.of(key) == progress.session
                and (block.is_null or block.ref_cnt <= 1 + references[block.block_id])
            ]
            self._on_released(pairs)


def confirmed_tokens(request: "Request") -> int:
    """Number of the request's tokens that have been computed for certain."""
    # Async scheduling counts tokens that it only has reserved room for.
    return request.num_computed_tokens - request.num_output_placeholders
