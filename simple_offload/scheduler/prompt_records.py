"""PromptRecords: where the tokens of each request's prompt came from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHash

from simple_offload import metrics
from simple_offload.logs import get_logger
from simple_offload.miss_reason import MissReason
from simple_offload.scheduler.forecaster import Forecaster
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups, make_keys
from simple_offload.sizing.curve import Prompt

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = get_logger(__name__)

_MAX_KNOWN_TOKENS = 65_536
"""Blocks whose tokens are remembered without their salt, adapter or image: some 10 MiB."""
_NUM_PROBED = 4
"""Missing blocks, the first ones, and as many among the others, that are looked for in the history
first. If it knows none of them, it knows none: it has one in four of an evicted chain."""
_LABELS = {reason: reason.label for reason in MissReason}
_MOST_LOOKED_AT = 512
"""Missing blocks of a prompt that are looked for in the history. More are sampled evenly."""


@dataclass(slots=True)
class PromptRecord:
    """One request's prompt. ``device``, ``host`` and ``second_tier`` tokens were found, and the
    others computed: ``missed``, by reason."""

    num_tokens: int
    device: int
    host: int
    second_tier: int
    missed: dict[MissReason, int] = field(default_factory=dict)
    reason: MissReason = MissReason.UNSEEN
    """Of the first missing token."""
    factor: float | None = None
    """If that was evicted: the host memory that would have kept it, as a multiple of today's."""
    is_counted: bool = False
    prompt: Prompt | None = None
    """What the forecaster has seen."""

    @property
    def num_loaded(self) -> int:
        return self.host + self.second_tier

    @property
    def num_found(self) -> int:
        """Tokens that need not be computed."""
        return self.device + self.num_loaded

    def miss(self, reason: MissReason, num_tokens: int) -> None:
        """``num_tokens`` tokens before all others are missing."""
        self.missed[reason] = self.missed.get(reason, 0) + num_tokens
        self.reason, self.factor = reason, None

    def lose(self, reason: MissReason) -> None:
        """What has been loaded is computed, after all."""
        num_tokens = self.num_loaded
        self.host = self.second_tier = 0
        self.miss(reason, num_tokens)


class PromptRecords:
    """One record a request, from the blocks that it gets first to its end. Metrics and replies
    read it, and nothing else counts hits.

    A prompt is counted once: when its request runs or ends. A preempted request keeps its record.
    """

    def __init__(
        self,
        tier: CpuTier,
        groups: Groups,
        kv_cache_manager: "KVCacheManager",
        meter: metrics.Meter,
    ) -> None:
        self._tier, self._groups, self._meter = tier, groups, meter
        self._device_pool = kv_cache_manager.block_pool
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._group = (*groups.chained_ids, *groups.ids, 0)[0]
        """A hit needs its blocks, if there is such a group."""
        self._block_size = groups.block_sizes[self._group]
        self._forecaster = Forecaster(
            tier, self._group, self._device_pool, groups.num_sub_blocks, meter
        )
        self._curve = self._forecaster.curve
        self._by_request: dict[str, PromptRecord] = {}
        self._begun: list[tuple[Request, PromptRecord, int]] = []
        """Since the last step, requests with new records, and their ``_refused``."""
        self._refused: dict[str, int] = {}
        """By request, the end of a hit for whose load there was no room, in tokens."""
        self._hash_of: dict[int, BlockHash] = {}
        """By tokens of a block, and all before them: its hash, which has further keys in it."""
        self._has_hit = False

    # What happens to a request

    def on_refused(self, request_id: str, num_tokens: int) -> None:
        """There is no room to load the request's hit, which ends after ``num_tokens`` tokens."""
        self._refused[request_id] = num_tokens

    def on_allocated(
        self,
        request: "Request",
        num_loaded: int,
        num_fetched: int,
        *,
        is_asked: bool,
    ) -> None:
        """The request has got blocks. The first time, its prompt's tokens get their sources. vLLM
        knows the device's. Loads bring ``num_loaded``; the second tier had ``num_fetched`` of them.
        ``is_asked``: whether caches were asked."""
        request_id = request.request_id
        if (record := self._by_request.get(request_id)) is not None:
            if not num_loaded:
                self._count(record)
            return
        vllm_stats = request.prefill_stats  # until its first token, which needs blocks
        self._by_request[request_id] = record = PromptRecord(
            request.num_prompt_tokens,
            vllm_stats.num_local_cached_tokens if vllm_stats is not None else 0,
            num_loaded - num_fetched,
            num_fetched,
        )
        if is_asked:
            self._begun.append((request, record, self._refused.pop(request_id, 0)))
        else:
            record.miss(MissReason.NOT_ASKED, record.num_tokens - record.num_found)
            self._count(record)

    def on_step(self) -> None:
        """A step has been scheduled, and the policy knows what the device has lost in it."""
        begun, self._begun = self._begun, []
        for request, record, refused in begun:
            hashes = self._hashes(request)
            record.prompt = self._curve.on_prompt(hashes, self._block_size, record.num_tokens)
            self._explain(request, hashes, record, refused)
            if not record.num_loaded:
                self._count(record)
        if begun:
            self._forecaster.on_step()

    def on_lost(self, request_id: str, reason: MissReason) -> None:
        """The request computes what was, or would have been, loaded."""
        record = self._by_request.get(request_id)
        if record is not None and not record.is_counted:
            record.lose(reason)

    def on_finished(self, request: "Request") -> PromptRecord | None:
        """The request has ended. Returns its record, if it has had blocks."""
        self._refused.pop(request.request_id, None)
        record = self._by_request.pop(request.request_id, None)
        if record is not None:
            self._count(record)
            num_computed, prompt = request.num_computed_tokens // self._block_size, record.prompt
            if prompt is not None and prompt.num_blocks > num_computed:
                prompt = None
            first = prompt.num_blocks if prompt else 0
            self._curve.on_used(self._hashes(request)[first:num_computed], prompt)
            # A streaming-input session goes on in its own blocks.
            if num_more := request.num_prompt_tokens - record.num_tokens:
                self._count_missed({MissReason.NOT_ASKED: num_more})
                record.missed.setdefault(MissReason.NOT_ASKED, 0)
                record.missed[MissReason.NOT_ASKED] += num_more
        return record

    # Details

    def _count(self, record: PromptRecord) -> None:
        if record.is_counted:
            return
        record.is_counted = True
        add = self._meter.add
        add(metrics.PROMPT_TOKENS, record.device, "device")
        add(metrics.PROMPT_TOKENS, record.host, "host")
        add(metrics.PROMPT_TOKENS, record.second_tier, "second_tier")
        self._count_missed(record.missed)
        if record.reason is MissReason.UNSEEN:
            self._meter.sample(metrics.UNSEEN_FROM, record.num_found)
        if record.reason is not MissReason.NOT_ASKED:
            is_hit = record.num_loaded > 0
            add(metrics.LOOKUPS, 1, "hit" if is_hit else "miss")
            if is_hit and not self._has_hit:
                self._has_hit = True
                logger.info(
                    "First hit: %d of a prompt's %d tokens were loaded instead of computed",
                    record.num_loaded,
                    record.num_tokens,
                )
            # The second tier would have these with any host memory.
            self._curve.on_found(record.device + record.host, self._tier.num_duplicates)

    def _hashes(self, request: "Request") -> Sequence[BlockHash]:
        """Of the request's full blocks."""
        hashes = self._groups.hashes(request.block_hashes, self._group)
        return hashes if isinstance(hashes, list) else list(hashes)

    def _count_missed(self, missed: Mapping[MissReason, int]) -> None:
        self._meter.add(metrics.PROMPT_TOKENS, sum(missed.values()), "compute")
        for reason, count in missed.items():
            self._meter.add(metrics.MISSED_TOKENS, count, _LABELS[reason])

    def _explain(
        self, request: "Request", hashes: Sequence[BlockHash], record: PromptRecord, refused: int
    ) -> None:
        """Give each token of the prompt that was not found a reason. ``hashes``: of its blocks.
        ``refused``: the end of a hit for whose load there was no room."""
        num_tokens, found, size = record.num_tokens, record.num_found, self._block_size
        # A drafter's last block, and all behind a whole block, can be in no hit.
        stop = min(self._groups.next_hit(num_tokens - 1), len(hashes) * size)
        first, last = found // size, stop // size
        num_blocks = last - first
        if num_blocks <= 0:
            record.miss(MissReason.PROMPT_END, num_tokens - found)
            return
        record.missed[MissReason.PROMPT_END] = num_tokens - last * size
        unseen = MissReason.UNSEEN
        if self._is_under_other_key(request, first):
            unseen = MissReason.OTHER_KEY
        num_there = 0 if self._groups.is_one_chain else self._num_there(request, first, last)
        probed = [*hashes[first : min(last, first + _NUM_PROBED)]]
        if num_blocks > _NUM_PROBED:
            probed += hashes[first + _NUM_PROBED : last : cdiv(num_blocks, _NUM_PROBED)]
        keys = make_keys(probed, self._groups.key_ends[self._group])
        is_chained = self._group in self._groups.chained_ids
        if is_chained and not (num_there or refused or self._tier.history.knows(keys)):
            record.miss(unseen, last * size - found)
            return
        reasons = np.full(num_blocks, unseen, np.uint8)
        reasons[:num_there] = MissReason.BOUNDARY
        factor = self._look_up(hashes[first + num_there : last], reasons[num_there:])
        sizes = np.full(num_blocks, size)
        sizes[0] -= found - first * size
        reasons[found + np.cumsum(sizes) <= refused] = MissReason.NO_ROOM
        for code in np.unique(reasons).tolist():
            record.missed[MissReason(code)] = int(sizes[reasons == code].sum())
        record.reason = MissReason(int(reasons[0]))
        record.factor = factor if record.reason is MissReason.EVICTED else None

    def _look_up(self, missing: Sequence[BlockHash], reasons: NDArray[np.uint8]) -> float | None:
        """Write the history's reasons for ``missing`` blocks into ``reasons``. Returns how much
        host memory would have kept the first one, over today's, if that was evicted."""
        step = cdiv(len(missing), _MOST_LOOKED_AT) or 1
        keys = make_keys(missing[::step], self._groups.key_ends[self._group])
        known, times = self._tier.history.find(keys)
        if not known.any():
            return None
        # A chain was computed from its first block on: one before a known one was lost too,
        # although it is not looked at, or forgotten.
        places = step * np.flatnonzero(known)
        following = places[np.searchsorted(places, np.arange(places[-1] + 1))] // step
        reasons[: len(following)] = known[following]
        ago = self._tier.num_evicted - int(times[following[0]])
        return round(1 + ago / max(1, self._tier.max_contents), 2)

    def _num_there(self, request: "Request", first: int, last: int) -> int:
        """Of the request's blocks ``first`` to ``last``, those that device or tier have although
        they are in no hit: other groups lack theirs; or, without a chain, the window does not end
        where a hit may end."""
        hashes, end = self._hashes(request), self._groups.key_ends[self._group]
        table = self._managers[self._group].req_to_blocks.get(request.request_id, [])

        def is_there(place: int) -> bool:
            key = hashes[place] + end
            if self._tier.has(key):
                return True
            # Of its own new blocks vLLM has entered the keys already.
            own = self._groups.sub_blocks(table, place, place + 1)
            return any(b not in own for b in block_pool.blocks_with(self._device_pool, [key]))

        places = range(first, last)
        if self._group in self._groups.chained_ids:
            return sum(1 for _ in takewhile(is_there, places))
        return max((place + 1 - first for place in places if is_there(place)), default=0)

    def _is_under_other_key(self, request: "Request", first: int) -> bool:
        """Whether block ``first`` is known with the same tokens and another hash. Only a prompt's
        first block, and those with the start of an image, are compared: there hashes part."""
        features, tokens = request.mm_features, request.prompt_token_ids
        if tokens is None or (first and not features):
            return False
        size, hashes = self._groups.hash_block_size, request.block_hashes
        is_other = False
        for index in {0, *(feature.mm_position.offset // size for feature in features)}:
            if index * size // self._block_size < first or index >= len(hashes):
                continue
            parent = hashes[index - 1] if index else b""
            fingerprint = hash((parent, *tokens[index * size : (index + 1) * size]))
            known = self._hash_of.pop(fingerprint, None)
            if known is not None and known != hashes[index]:
                is_other |= index * size // self._block_size == first
            self._hash_of[fingerprint] = hashes[index]
        while len(self._hash_of) > _MAX_KNOWN_TOKENS:
            del self._hash_of[next(iter(self._hash_of))]
        return is_other


def report(record: PromptRecord) -> Mapping[str, Any]:
    """What a reply says. It does not tell a client that another salt has the same tokens."""
    reason = record.reason
    if reason is MissReason.OTHER_KEY:
        reason = MissReason.UNSEEN
    first: dict[str, Any] = {"token": record.num_found, "reason": reason.label}
    if record.factor is not None:
        first["host_memory_factor"] = record.factor
    sources = {
        "device": record.device,
        "host": record.host,
        "second_tier": record.second_tier,
        "compute": sum(record.missed.values()),
    }
    return {"prompt_tokens": sources, "first_missing": first}
