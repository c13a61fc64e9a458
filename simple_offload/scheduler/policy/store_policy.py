"""StorePolicy: decides which device blocks are stored, and when."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from simple_offload import metrics
from simple_offload.config import OffloadConfig
from simple_offload.scheduler.event_payload import payloads_of_host_block
from simple_offload.scheduler.policy.admission import MIN_COUNTED, Admission
from simple_offload.scheduler.policy.device_contents import DeviceContents
from simple_offload.scheduler.policy.expected import Expected
from simple_offload.scheduler.policy.newly_allocated import NewlyAllocated
from simple_offload.scheduler.policy.pacing import Batches, Pacer
from simple_offload.scheduler.policy.queue_walk import QueueWalk, StepLimits
from simple_offload.scheduler.policy.reuse import Reuse
from simple_offload.scheduler.policy.sessions import Sessions, session_of
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.run import Run
from simple_offload.scheduler.wishes import NO_WISHES, Wishes
from simple_offload.transfer import Transfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


MAX_WITHHELD = 8
"""How often blocks are withheld from a request, which may then lack room. A store takes three steps
(``StepLimits.num_steps``), and a load may need several stores."""


_NUM_AVERAGED = 8
"""Loads whose size is averaged. As many blocks are kept safe: where fewer are, the next load gets
safe blocks from further back in the device's free queue, and the device loses what it used
later."""

_MAX_POSTPONED = 8
"""Steps in a row for which work is postponed that can wait. One store of many blocks takes the
scheduler and the worker about as long as one of few."""


class BoundaryState(NamedTuple):
    """A device block that holds the state (Mamba and the like) after ``num_tokens`` tokens by the
    end of this step. vLLM hands it over; soon it may be in no block table."""

    group: int
    block_id: int
    num_tokens: int


def describe_policy(config: OffloadConfig) -> str:
    """The policy in a few words, for the log."""
    when = {
        None: "stores early where there is room",
        True: "stores when the device evicts",
        False: "stores at once",
    }[config.lazy_offload]
    if config.store_threshold == 1:
        return when
    return f"{when}, prefixes that {config.store_threshold} requests had"


@dataclass(slots=True, eq=False)
class _Progress:
    """What is known of a request with device blocks. By group, in host blocks."""

    request: "Request"
    num_recorded: list[int]
    num_ahead: list[int]
    """Recorded blocks that have been stored ahead of time, or need not be."""
    loads: bool
    """Whether the tier fills blocks of it before it runs."""
    stores: bool | None
    """Whether to store what it computes, and not only what it finds. None: store nothing."""
    wishes: Wishes
    own: set[BlockHashWithGroupId] = field(default_factory=set)
    """Keys of its blocks, for a tier that has no copies: they must not make room for its rest."""

    @property
    def may_release(self) -> bool:
        """Whether it, or a later request of its session, may release what it leaves."""
        return self.wishes.release or bool(self.request.session_id)

    @property
    def in_prompt(self) -> bool:
        """Whether the step that is being scheduled computes tokens of its prompt."""
        return self.request.num_computed_tokens < self.request.num_prompt_tokens


class _Unhashed(NamedTuple):
    """A host block of an ended request which vLLM will not find."""

    key: BlockHashWithGroupId
    blocks: list[KVCacheBlock]
    first_token: int
    num_tokens: int


class _Ended(NamedTuple):
    """Blocks of a request that has ended which would not live to the next step."""

    progress: _Progress
    unhashed: list[_Unhashed]
    at_risk: list[KVCacheBlock]
    """Children before parents."""
    held: list[KVCacheBlock]
    """All of them, in the order in which vLLM would free them."""


class StorePolicy:
    """Keeps the front of the device's free queue, which is evicted first, free of blocks that only
    the device has.

    A walk along the queue stores those (``queue_walk.py``). While the tier has empty blocks, they
    are stored as they fill up, beside their request's compute. The same happens if fewer blocks are
    free than should be safe: the device might evict what running requests give up before the walk
    meets it. A load may take more blocks in one step than are safe: those that only the device has
    are withheld from its request.

    What can wait is done in every eighth step, so that few requests wait for it before their first
    token: early stores of answers and of what has just begun, and the order of the copies of what
    requests have found on the device.
    """

    def __init__(
        self,
        config: OffloadConfig,
        vllm_config: "VllmConfig",
        tier: CpuTier,
        groups: Groups,
        stores: Stores,
        kv_cache_manager: "KVCacheManager",
        meter: metrics.Meter,
        *,
        wants_events: bool,
    ) -> None:
        self._tier = tier
        self._groups = groups
        self._stores = stores
        self._meter = meter
        self._wants_events = wants_events
        self._stores_early = config.lazy_offload is None and tier.has_copies
        self._stores_at_once = not (config.lazy_offload or self._stores_early)
        num_sub_blocks = groups.num_sub_blocks
        self._limits = StepLimits.from_config(
            vllm_config, [size // num_sub_blocks for size in groups.block_sizes]
        )
        self._max_step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._device_pool: BlockPool = kv_cache_manager.block_pool
        num_device_blocks = len(self._device_pool.blocks)
        self._admission = Admission(config.store_threshold, max(MIN_COUNTED, 2 * num_device_blocks))
        # A tier without copies gets contents when the device does, not when it lets go of them.
        num_repeated = 0 if tier.has_copies else num_device_blocks // num_sub_blocks
        self._reuse = Reuse(tier, num_repeated)
        self._contents = DeviceContents(
            tier,
            groups,
            stores,
            self._admission,
            self._reuse,
            self._device_pool,
            meter,
            wants_events,
        )
        self._records_loaded = not tier.has_copies or num_sub_blocks > 1 or wants_events
        """Whether more must be known of a loaded block than which host block has its contents."""
        self._progress: dict[str, _Progress] = {}
        self._behind: dict[str, _Progress] = {}
        """Requests with blocks recorded since they were last stored ahead of time."""
        self._states: Mapping[str, Sequence[BoundaryState]] = {}
        """States that the step being scheduled completes."""
        self._newly_allocated = NewlyAllocated(kv_cache_manager)
        self._not_run: set[str] = set()
        """Requests that no step has run since they got their first blocks."""
        self._pacer = Pacer()
        self._sessions = Sessions(has_full_attention=bool(groups.chained_ids))
        self._expected = Expected(
            tier,
            groups,
            self._device_pool,
            by_priority=vllm_config.scheduler_config.policy == "priority",
        )
        self._batches = Batches(groups)
        self._ended: list[_Ended] = []
        self._has_news = False
        """Whether blocks have joined the free queue that may be stored early."""
        self._num_postponed = 0
        """Steps for which work has been postponed by now."""
        self._num_withheld: dict[str, int] = {}
        """By request without blocks, how often some were withheld from it."""
        self._num_queued = 0
        """Device blocks that the requests in vLLM's queue will have, at most."""
        self._queued: dict[str, int] = {}
        """The same by request."""
        self._load_size = 0.0
        """Device blocks of a load, an average of the last ones."""
        self._walk = QueueWalk(
            tier, stores, self._contents, self._limits, self._device_pool, num_sub_blocks
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is postponed to the next step."""
        return not (self._ended or self._has_news or self._walk.is_behind)

    @property
    def held_blocks(self) -> list[KVCacheBlock]:
        """Device blocks of ended requests that are held until the next step."""
        return [block for ended in self._ended for block in ended.held]

    def on_new_request(self, request: "Request") -> None:
        """vLLM has put a request into its queue."""
        self._expected.add(request)
        num_blocks = self._num_blocks(request.num_tokens)
        self._queued[request.request_id] = num_blocks
        self._num_queued += num_blocks

    # Loads

    def before_allocation(
        self, request: "Request", num_load_blocks: int, num_computed_tokens: int
    ) -> bool:
        """vLLM is about to give a request ``num_load_blocks`` device blocks for a load, or else
        those for the tokens that a step computes after the first ``num_computed_tokens``. What only
        the device has is withheld from it, and stored with this step. If too few blocks are left,
        vLLM lets no request pass this one. Returns whether some are withheld."""
        num_tokens = min(request.num_tokens - num_computed_tokens, self._max_step_tokens)
        num_needed = num_load_blocks or self._num_blocks(num_tokens)
        if num_needed > self._device_pool.get_num_free_blocks():
            return False
        num_times = self._num_withheld.get(request.request_id, 0)
        if num_times == MAX_WITHHELD or not self._walk.withhold(num_needed):
            return False
        # vLLM may want room for more than these blocks, so each time counts.
        self._num_withheld[request.request_id] = num_times + 1
        return True

    def on_allocated(
        self,
        request: "Request",
        num_found_tokens: int,
        num_loaded_tokens: int,
        wishes: Wishes = NO_WISHES,
    ) -> None:
        """``request`` has (new) device blocks. The device had its first ``num_found_tokens``
        tokens, and the tier loads ``num_loaded_tokens`` after them. If it loads none, another
        connector (MultiConnector) may fill blocks until the request runs."""
        self._reuse.on_request(request.block_hashes)
        self._tier.on_request(request.block_hashes)
        self._expected.on_allocated(request)
        self._leave_queue(request.request_id)
        if num_loaded_tokens:
            num_blocks = self._num_blocks(num_loaded_tokens)
            self._load_size += (num_blocks - self._load_size) / _NUM_AVERAGED
        num_known = 0 if self._records_loaded else num_found_tokens + num_loaded_tokens
        num_recorded = [num_known // size for size in self._groups.block_sizes]
        request_id = request.request_id
        stores = None
        if wishes.store:
            stores = self._reuse.admits_next() or wishes.protect > 0
        self._progress[request_id] = progress = _Progress(
            request, num_recorded, [*num_recorded], num_loaded_tokens > 0, stores, wishes
        )
        num_tokens = num_found_tokens + num_loaded_tokens
        num_found = num_tokens // self._groups.hash_block_size
        self._sessions.on_found(request, num_found)
        if progress.may_release:
            num_there = self._num_there(request, self._groups.ids, num_tokens)
            self._sessions.begin(request, max(num_found, num_there))
        self._count(progress)
        self._newly_allocated.on_allocated(request_id, num_found_tokens)
        self._not_run.add(request_id)
        self._behind.pop(request_id, None)
        self._pacer.add(request_id)

    def on_states(self, states: Mapping[str, Sequence[BoundaryState]]) -> None:
        """A step has been scheduled that completes these state blocks, by request id."""
        self._states = states  # they may be in blocks that this step has allocated

    def on_step(self, scheduled: "SchedulerOutput") -> None:
        """A step has been scheduled. Tokens of earlier steps are computed by the time that this
        step's stores start."""
        self._expected.on_step()
        due = self._pacer.on_step(scheduled.num_scheduled_tokens)
        can_wait = self._postpone(scheduled, due)
        # First what the device has lost: a store must not evict it from the tier as a copy.
        filled, found = self._newly_allocated.drain()
        if self._not_run:
            self._not_run.difference_update(scheduled.num_scheduled_tokens)
        if filled:
            self._contents.on_allocated(filled, self._walk.drop_reason)
            self._walk.on_allocated(filled)
        for request_id, block_ids in found.items():
            progress = self._progress.get(request_id)
            stores = progress.stores if progress is not None else True
            lacks = self._contents.on_found(block_ids, stores=stores)
            self._walk.on_allocated(block_ids)
            if lacks and progress is not None:
                progress.num_ahead = [0] * len(progress.num_ahead)
        if not can_wait:
            self._contents.note_found()
        self._store_rest()
        self._record_states()
        for request_id in due:
            progress = self._progress[request_id]
            request = progress.request
            self._count(progress)
            self._record(progress)
            next_at = self._batches.next_at(progress.num_recorded, request.num_prompt_tokens)
            self._pacer.postpone(request_id, next_at - _confirmed_tokens(request))
        stores_early = self._stores_early and not can_wait
        if self._behind and (budget := self._num_to_store(early=stores_early)):
            self._store_running(budget)
        self._walk.on_step(max(self._num_queued, int(self._load_size)), stores_early)
        self._has_news = False

    def on_request_finished(self, request: "Request", loading: bool) -> None:
        """``request`` gives up its device blocks right after this call; ``loading``: they were
        still waiting for a load. Work is postponed to the next step: a client waits for the
        request's last token."""
        request_id = request.request_id
        self._leave_queue(request_id)
        self._sessions.on_request_finished(request)
        progress = self._progress.pop(request_id, None)
        has_run = request_id not in self._not_run
        self._not_run.discard(request_id)
        if progress is not None:
            self._pacer.remove(request_id)
            self._count(progress)
        self._admission.on_request_finished(request_id)
        # Until a step has run it, another connector (MultiConnector) may still be filling its
        # blocks, unless the tier does.
        if progress is None or loading or not (has_run or progress.loads):
            self._behind.pop(request_id, None)
            return
        self._record(progress)  # the last step's output may have given a block its hash
        self._behind.pop(request_id, None)
        self._has_news = self._stores_early
        if progress.wishes.release and not self._tier.num_empty:
            progress.stores = None
        unhashed = self._unhashed(request) if progress.stores else []
        if progress.wishes is not NO_WISHES:
            self._contents.note_found()  # what is released must not be found later
            self._lease(progress, unhashed)
        at_risk = self._at_risk(progress)
        held = [block for each in reversed(unhashed) for block in reversed(each.blocks)]
        held += at_risk
        if held or not self._tier.has_copies:
            block_pool.touch(self._device_pool, held)
            self._ended.append(_Ended(progress, unhashed, at_risk, held))

    def on_load_ended(self, transfer: Transfer) -> None:
        """A load has filled its device blocks."""
        if not self._records_loaded:
            self._contents.on_copied(transfer)
            self._meter.add(metrics.SKIPPED, len(transfer.device_blocks), "already_stored")

    def on_store_ended(
        self, blocks: Sequence[KVCacheBlock], transfer: Transfer | None, *, ok: bool
    ) -> None:
        """A store of these device blocks, in order, has ended: drop its references, and with the
        last one put each block where it belongs in the free queue. ``transfer``: if the tier has
        got them."""
        self._contents.on_store_ended(blocks, transfer, ok=ok)
        self._walk.free_blocks(blocks)

    def on_device_reset(self) -> None:
        """The device's prefix cache has been reset."""
        self._contents.on_device_reset(self._walk.drop_reason)

    def on_reset(self) -> None:
        """Contents of the device's blocks must not be stored any more."""
        self._progress.clear()  # those that wait for a load will still get blocks
        self._behind.clear()
        self._pacer.clear()
        self._contents.clear()
        ended, self._ended = self._ended, []
        for each in ended:
            block_pool.free_blocks(self._device_pool, each.held)

    # vLLM's queue

    def _num_blocks(self, num_tokens: int) -> int:
        """Device blocks for ``num_tokens`` tokens of a request, at most."""
        return sum(cdiv(num_tokens, manager.block_size) for manager in self._managers)

    def _leave_queue(self, request_id: str) -> None:
        self._num_queued -= self._queued.pop(request_id, 0)
        self._num_withheld.pop(request_id, None)
        self._expected.remove(request_id)

    # What can wait

    def _postpone(self, scheduled: "SchedulerOutput", due: Sequence[str]) -> bool:
        """Count the step. Returns whether it leaves to later steps what can wait. A step without
        tokens does not: no other may follow. Nor does one that goes on with the prompt of a request
        that is ``due``: long prompts are stored as they are computed."""
        begun = {request.req_id for request in scheduled.scheduled_new_reqs}
        prompts = [request_id for request_id in due if self._progress[request_id].in_prompt]
        can_wait = (
            self._tier.has_copies
            and not self._stores_at_once
            and scheduled.total_num_scheduled_tokens > 0
            and self._num_postponed < _MAX_POSTPONED
            and begun.issuperset(prompts)
        )
        self._num_postponed = self._num_postponed + 1 if can_wait else 0
        return can_wait

    # Recording

    def _count(self, progress: _Progress) -> None:
        """Count the prefixes of a request, unless it wants nothing stored."""
        if progress.stores is not None:
            self._admission.count(progress.request)

    def _record(self, progress: _Progress) -> None:
        """Record the blocks that have got a hash. Their bytes are complete by the end of the step
        that is being scheduled, if the request is part of it."""
        request, num_sub_blocks = progress.request, self._groups.num_sub_blocks
        for group in self._groups.ids:
            manager, first = self._managers[group], progress.num_recorded[group]
            stop = manager.num_cached_block.get(request.request_id, 0) // num_sub_blocks
            if first < stop:
                table = manager.req_to_blocks[request.request_id]
                found = self._groups.sub_blocks(table, first, stop)
                blocks, keys = self._complete(request, group, found, first, stop)
                if progress.may_release and group in (self._groups.chained_ids or (group,)):
                    num_known = max(
                        request.num_prompt_tokens, first * self._groups.block_sizes[group]
                    )
                    self._sessions.on_there(
                        request, self._num_there(request, (group,), num_known, stop)
                    )
                self._contents.record(blocks, keys, request, stores=progress.stores)
                if not self._tier.has_copies:
                    progress.own.update(self._groups.keys(request.block_hashes, group, first, stop))
                progress.num_recorded[group] = stop
                if progress.stores is not None:
                    self._behind[request.request_id] = progress

    def _complete(
        self, request: "Request", group: int, blocks: Sequence[KVCacheBlock], first: int, stop: int
    ) -> tuple[Sequence[KVCacheBlock], Sequence[BlockHashWithGroupId]]:
        """Those of ``blocks``, the sub-blocks of a request's host blocks ``first`` to ``stop``,
        that vLLM finds together with all others of their host block; and their keys."""
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

    def _record_states(self) -> None:
        states, self._states = self._states, {}
        for request_id, of_request in states.items():
            progress = self._progress.get(request_id)
            if progress is not None:
                self._count(progress)
                self._record(progress)  # what it has found must not make room
                blocks = [self._record_state(progress, state) for state in of_request]
                if self._num_to_store(early=self._stores_early):
                    # Running requests may need the free ones: the walk knows how many.
                    used = [block for block in blocks if block.ref_cnt > 0]
                    self._plan(used if self._walk.is_tight else blocks, progress.own)
                progress.own.update([key for key in block_pool.keys_of(blocks) if key is not None])

    def _record_state(self, progress: _Progress, state: BoundaryState) -> KVCacheBlock:
        request = progress.request
        block = self._device_pool.blocks[state.block_id]
        if state.group in self._groups.ids:
            key = self._groups.key_at(request.block_hashes, state.group, state.num_tokens)
            if block.block_hash == key:
                self._contents.record([block], [key], request, stores=progress.stores)
        return block

    # Storing blocks of requests that run or have ended

    def _num_to_store(self, *, early: bool) -> int:
        """Number of device blocks of running requests to store in this step: all if each is to be
        stored at once, as many as the tier has empty blocks for (``early``), or as many as should
        be safe if too few are free for the walk to meet them in time."""
        num_blocks = len(self._device_pool.blocks)
        if self._stores_at_once:
            return num_blocks
        budget = self._walk.min_ahead if self._walk.is_tight else 0
        if early:
            budget = max(budget, self._tier.num_empty * self._groups.num_sub_blocks)
        return budget

    def _store_running(self, budget: int) -> None:
        """Store up to ``budget`` recorded device blocks of running requests."""
        num_sub_blocks = self._groups.num_sub_blocks
        blocks: list[KVCacheBlock] = []
        own: set[BlockHashWithGroupId] = set()
        for request_id, progress in list(self._behind.items()):
            of_request: list[KVCacheBlock] = []
            for group in self._groups.ids:
                first = progress.num_ahead[group]
                left = cdiv(budget - len(blocks), num_sub_blocks)
                stop = min(progress.num_recorded[group], first + left)
                if first < stop:
                    table = self._managers[group].req_to_blocks.get(request_id, [])
                    of_request += self._groups.sub_blocks(table, first, stop)
                    progress.num_ahead[group] = stop
            blocks += reversed(of_request)
            own |= progress.own
            if len(blocks) >= budget:
                break
            del self._behind[request_id]
        self._plan(blocks, own)

    def _plan(self, blocks: Sequence[KVCacheBlock], own: set[BlockHashWithGroupId]) -> None:
        """Plan stores of those of ``blocks``, children before parents, that the tier lacks, without
        evicting what the walk has passed or the request's ``own``."""
        chosen = self._contents.choose(blocks)
        if chosen:
            self._contents.plan(chosen, block_pool.AnyOf(self._walk.passed_keys, own))

    def _unhashed(self, request: "Request") -> list[_Unhashed]:
        """Blocks that vLLM will not hash any more, and will allocate first: blocks completed by
        the last step, and a window that the next turn needs."""
        groups, found = self._groups, []
        for group in groups.ids:
            manager = self._managers[group]
            table = manager.req_to_blocks.get(request.request_id, [])
            stop = self._num_complete_blocks(request, group, len(table) // groups.num_sub_blocks)
            if group in groups.chained_ids:
                num_hashed = manager.num_cached_block.get(request.request_id, 0)
                first = num_hashed // groups.num_sub_blocks
            else:
                first = self._first_unhashed_block(request, group, table, stop)
            size = groups.block_sizes[group]
            keys = groups.keys(request.block_hashes, group, first, stop)
            for index, key in enumerate(keys, first):
                blocks = groups.sub_blocks(table, index, index + 1)
                if (
                    not any(block.is_null for block in blocks)
                    and None in block_pool.keys_of(blocks)
                    and self._admission.admits(key)
                ):
                    found.append(_Unhashed(key, blocks, index * size, (index + 1) * size))
        return found

    def _at_risk(self, progress: _Progress) -> list[KVCacheBlock]:
        """Blocks that are to be stored at once, or join a queue so short that they may be evicted
        before the next walk, children before parents."""
        num_free = self._device_pool.get_num_free_blocks()
        num_at_risk = min(self._limits.per_step, self._walk.min_ahead) - num_free
        if self._stores_at_once:
            num_at_risk = len(self._device_pool.blocks)
        elif self._stores_early:
            num_at_risk = max(num_at_risk, self._tier.num_empty * self._groups.num_sub_blocks)
        if progress.stores is None or num_at_risk <= 0:
            return []
        found: list[KVCacheBlock] = []
        for group in reversed(self._groups.ids):
            table = self._managers[group].req_to_blocks.get(progress.request.request_id, [])
            unstored = self._groups.sub_blocks(
                table, progress.num_ahead[group], progress.num_recorded[group]
            )
            found += [block for block in reversed(unstored) if block.block_hash is not None]
        return found[:num_at_risk]

    def _lease(self, progress: _Progress, unhashed: Sequence[_Unhashed]) -> None:
        """Keep or release what a request that ends has left, as it wishes: all of its prefix, or
        what its session may release, and no other request uses on the device."""
        wishes, request, groups = progress.wishes, progress.request, self._groups
        if not wishes.release and not (wishes.protect and wishes.store):
            return
        lease = self._tier.make_lease(
            None if wishes.release else wishes.protect, session_of(request)
        )
        num_kept = 0
        if wishes.release:
            num_kept = self._sessions.num_kept(request) * groups.hash_block_size
        references = Counter(block.block_id for block in self._stores.device_blocks)
        num_sub_blocks = groups.num_sub_blocks
        for group in groups.ids:
            stop = progress.num_recorded[group]
            table = self._managers[group].req_to_blocks.get(request.request_id, [])
            blocks = groups.sub_blocks(table, 0, stop)[num_sub_blocks - 1 :: num_sub_blocks]
            keys = groups.keys(request.block_hashes, group, 0, stop)
            if wishes.release:
                first = cdiv(num_kept, groups.block_sizes[group])
                used = {
                    place
                    for place, block in enumerate(blocks)
                    if block.ref_cnt > 1 + references[block.block_id] and not block.is_null
                }
                places = [place for place in range(first, len(keys)) if place not in used]
                keys = [keys[place] for place in places]
                blocks = [blocks[place] for place in places if place < len(blocks)]
            pairs = zip(blocks, keys, strict=False)
            found = {key: block for block, key in pairs if block.block_hash == key}
            self._contents.lease([*found.values()], [*found], lease)
            self._tier.lease(self._tier.ids_of(keys), lease)
        unhashed = [each for each in unhashed if each.first_token >= num_kept]
        last, keys = [each.blocks[-1] for each in unhashed], [each.key for each in unhashed]
        self._contents.lease(last, keys, lease)

    def _num_there(
        self, request: "Request", groups: Iterable[int], num_tokens: int, stop: int | None = None
    ) -> int:
        """The request's hashes up to the last block of ``groups`` behind its first ``num_tokens``
        tokens, and before block ``stop``, that device or tier have from others; 0: none. vLLM need
        not find them: it computes a prompt's last token, with ``prompt_logprobs`` all, and an
        answer that others have got too."""
        num_there, pool = 0, self._device_pool
        for group in groups:
            size = self._groups.block_sizes[group]
            first = num_tokens // size
            table = self._managers[group].req_to_blocks.get(request.request_id, [])
            own = {block.block_id for block in table[first * self._groups.num_sub_blocks :]}
            keys = self._groups.keys(request.block_hashes, group, first, stop)
            there = set(keys) - self._stores.absent(keys)
            for key in set(keys) & block_pool.cached(pool).keys():
                if any(block.block_id not in own for block in block_pool.blocks_with(pool, key)):
                    there.add(key)
            ends = [end * size for end, key in enumerate(keys, first + 1) if key in there]
            num_there = max([num_there, *ends])
        return num_there // self._groups.hash_block_size

    def _store_rest(self) -> None:
        """Store the blocks held of requests that have ended."""
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        own: set[BlockHashWithGroupId] = set()
        for each in ended if not self._tier.has_copies else ():
            own |= each.progress.own
            hashes = each.progress.request.block_hashes
            for group in self._groups.ids:
                stop = each.progress.num_recorded[group]
                self._tier.renew(self._groups.keys(hashes, group, 0, stop))
        self._plan([block for each in ended for block in each.at_risk], own)
        for each in ended:
            self._store_unhashed(each, own)
            self._contents.forget_leases(
                [each.blocks[-1].block_id for each in each.unhashed if each.blocks[-1].ref_cnt == 1]
            )
            block_pool.free_blocks(self._device_pool, each.held)

    def _store_unhashed(self, ended: _Ended, own: set[BlockHashWithGroupId]) -> None:
        """Store blocks that vLLM will not find, without evicting what the walk has passed or
        ``own``."""
        lacking = [each for each in ended.unhashed if not self._stores.has(each.key)]
        if not lacking:
            return
        run = Run(
            [block for each in lacking for block in each.blocks],
            [each.key for each in lacking],
            on_device=False,
        )
        if self._wants_events:
            request = ended.progress.request
            run.num_tokens = [each.num_tokens for each in lacking]
            run.payloads = [
                payloads_of_host_block(self._groups, each.key, (), each.num_tokens, request)
                for each in lacking
            ]
        count = self._stores.plan(
            run, block_pool.AnyOf(self._walk.passed_keys, own), self._device_pool
        )
        # The device has these no more.
        self._meter.add(metrics.DROPPED, len(lacking) - count, "tier_full")

    def _first_unhashed_block(
        self, request: "Request", group: int, table: Sequence[KVCacheBlock], stop: int
    ) -> int:
        """The first block that is stored although vLLM has not hashed it: of the ``stop`` complete
        host blocks of an ending request, in a group that is not chained. ``table``: its block
        table.

        By default vLLM hashes the blocks of a sliding window that the prompt's end needs
        (``prefix_cache_retention_interval`` 0). This adds the blocks that the request's end needs,
        if the table has all of them.
        """
        groups = self._groups
        if group not in groups.stable_ids:
            return stop
        num_tokens = min(
            _confirmed_tokens(request), len(request.block_hashes) * groups.hash_block_size
        )
        num_unread = groups.num_unread_tokens(groups.next_hit(num_tokens), group)
        first = num_unread // groups.block_sizes[group]
        has_all = first < stop and not table[first * groups.num_sub_blocks].is_null
        return first if has_all else stop

    def _num_complete_blocks(self, request: "Request", group: int, num_blocks: int) -> int:
        """Number of the request's ``num_blocks`` blocks of ``group`` that are complete and have a
        hash."""
        confirmed = _confirmed_tokens(request)
        tokens = min(
            confirmed,
            self._groups.num_cacheable_tokens(confirmed, group),
            len(request.block_hashes) * self._groups.hash_block_size,
        )
        return int(min(tokens // self._groups.block_sizes[group], num_blocks))


def _confirmed_tokens(request: "Request") -> int:
    """Number of the request's tokens that have been computed for certain."""
    # Async scheduling counts tokens that it only has reserved room for.
    return request.num_computed_tokens - request.num_output_placeholders
