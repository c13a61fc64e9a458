"""Attribution: each prompt token is counted once, and with the reason why no cache had it."""

from collections import Counter
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import get_block_hash

from simple_offload import metrics
from simple_offload.miss_reason import MissReason
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.prompt_records import PromptRecord
from simple_offload.vllm_compat import vllm_version
from tests.simulation import integrity
from tests.simulation.ledger import Ledger
from tests.simulation.watch import watch

_NEVER_THERE = {MissReason.UNSEEN, MissReason.OTHER_KEY}
_ANY_TIME = {MissReason.NO_ROOM, MissReason.BOUNDARY, MissReason.NOT_ASKED}
_WAS_THERE = {
    MissReason.LOAD_FAILED,
    MissReason.EVICTED,
    MissReason.NOT_STORED,
    MissReason.BELOW_THRESHOLD,
    MissReason.OVERLOAD,
    MissReason.WISH,
    MissReason.RESET,
}


class _Begun(NamedTuple):
    """A request has got its first blocks."""

    num_on_device: int
    num_loaded: int
    was_there: bool | None
    """Whether a cache has ever had a missing block of it; None: it misses no whole block."""


class Attribution:
    """What the simulation knows of each request, compared with its record and with the counts."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector
        self._scheduler: OffloadScheduler = connector.scheduler
        scheduler = self._scheduler
        self._begun: dict[str, _Begun] = {}
        self._lost: set[str] = set()
        """Requests that compute what they had loaded."""
        self._ever: set[bytes] = set()
        """Hashes of blocks that either cache has had at the end of a step."""
        self.tokens: Counter[str] = Counter()
        """Prompt tokens of ended requests, by source."""
        self.missed: Counter[MissReason] = Counter()
        self._num_ended = 0
        self._num_unexplained = 0
        """Requests that miss what a cache has had, as if it were new, or the other way round. One
        that is preempted, or aborted, leaves blocks that the policy has not recorded. And contents
        may come and go within a step."""
        self._sources: dict[str, tuple[int, int]] = {}
        """By request, the tokens that it loads from the host tier and the second tier, as vLLM's
        metrics have got them in the step that is being scheduled."""
        records = integrity.records_of(scheduler)
        watch(scheduler, "update_state_after_alloc", self._watch_allocation)
        watch(records, "on_lost", self._watch_lost)
        watch(records, "on_finished", self._watch_end)

    def end_step(self) -> None:
        """A step has been scheduled."""
        scheduler = self._scheduler
        for request_id, sources in self._sources.items():
            record = integrity.record_of(scheduler, request_id)
            assert record is not None
            assert sources == (record.host, record.second_tier), f"{sources}, {record}"
        self._sources.clear()
        for pool in (integrity.device_pool_of(scheduler), integrity.pool_of(scheduler.tier)):
            self._ever.update(map(get_block_hash, pool.cached_block_hash_to_block._cache))

    def check(self, counted: Ledger) -> None:
        """At rest: the counts are those of all requests that have ended."""
        limit = 3 + self._num_ended // 20
        assert self._num_unexplained <= limit, f"{self._num_unexplained} misses not explained"
        for source, count in self.tokens.items():
            assert counted(metrics.PROMPT_TOKENS, source) == count, f"prompt tokens of {source}"
        for reason in MissReason:
            found = counted(metrics.MISSED_TOKENS, reason.label)
            assert found == self.missed[reason], f"{found} tokens are missed: {reason.label}"
        assert counted(metrics.MISSED_TOKENS) == self.tokens["compute"]

    def _watch_allocation(self, allocated: Any, request: Any, blocks: Any, num_loaded: int) -> None:
        is_first = request.request_id not in self._begun
        if is_first:
            num_on_device = request.prefill_stats.num_local_cached_tokens
            was_there = self._was_there(request, num_on_device + num_loaded)
            self._begun[request.request_id] = _Begun(num_on_device, num_loaded, was_there)
        allocated(request, blocks, num_loaded)
        if is_first and num_loaded and vllm_version() >= (0, 32):  # before, hits had no sources
            hits = self._connector.get_external_cache_hit_sources(request, num_loaded)
            found = {source.value: count for source, count in hits.items()}
            self._sources[request.request_id] = found.get("host", 0), found.get("disk", 0)

    def _was_there(self, request: Any, num_found: int) -> bool | None:
        groups = self._scheduler.groups
        group = (*groups.chained_ids, *groups.ids)[0]
        index = num_found // groups.block_sizes[group]
        stop = groups.next_hit(request.num_prompt_tokens - 1) // groups.block_sizes[group]
        missing = groups.hashes(request.block_hashes, group)[index:stop]
        # Of a host block of several, the device may have had the last part only. Without attention
        # over all tokens, blocks before a window may never have had a hash.
        is_known = groups.num_sub_blocks == 1 and group in groups.chained_ids
        return any(each in self._ever for each in missing) if missing and is_known else None

    def _watch_lost(self, on_lost: Any, request_id: str, reason: MissReason) -> None:
        record = integrity.record_of(self._scheduler, request_id)
        if record is not None and not record.is_counted:
            self._lost.add(request_id)
        on_lost(request_id, reason)

    def _watch_end(self, on_finished: Any, request: Any) -> PromptRecord | None:
        record: PromptRecord | None = on_finished(request)
        begun = self._begun.pop(request.request_id, None)
        assert (begun is None) == (record is None)
        if begun is not None and record is not None:
            self._check_record(request, begun, record)
        self._lost.discard(request.request_id)
        return record

    def _check_record(self, request: Any, begun: _Begun, record: PromptRecord) -> None:
        self._num_ended += 1
        name, loaded = request.request_id, record.host + record.second_tier
        is_lost = name in self._lost
        assert record.device == begun.num_on_device, f"{name}: {record}, {begun}"
        assert loaded == (0 if is_lost else begun.num_loaded), f"{name}: {record}, {begun}"
        assert min(record.missed.values()) >= 0, f"{name}: {record}"
        num_missed = sum(record.missed.values())
        assert record.num_found + num_missed == request.num_prompt_tokens, f"{name}: {record}"
        if not is_lost and begun.was_there is not None:
            reasons = _WAS_THERE if begun.was_there else _NEVER_THERE
            self._num_unexplained += record.reason not in reasons | _ANY_TIME
        sources = {"device": record.device, "host": record.host}
        self.tokens.update(sources, second_tier=record.second_tier, compute=num_missed)
        self.missed.update(record.missed)
