"""Forecaster: tells what requests would have found with other sizes of host memory."""

import time
from collections.abc import Sequence
from math import isnan

from vllm.v1.core.kv_cache_utils import get_group_id

from simple_offload import metrics
from simple_offload.logs import get_logger
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.eviction_order import DUPLICATES_SHARE
from simple_offload.sizing.curve import MissRatioCurve
from simple_offload.sizing.forecast import FACTORS, Caches, predicted_hit_ratios

logger = get_logger(__name__)

_SECONDS_PER_METRIC = 5.0
_SECONDS_PER_LOG = 600.0
_NUM_LOOKED_AT = 512
"""Host blocks whose groups are looked at, to know how many a prefix takes."""


class Forecaster:
    """Shows prompts to a miss-ratio curve, and its answers to users.

    Counts blocks of one group, whose keys a prefix has one by one. Other groups have blocks in the
    same caches: the tier's blocks tell in what ratio, and the device's count alike.
    """

    def __init__(
        self,
        tier: CpuTier,
        group: int,
        block_size: int,
        num_device_blocks: float,
        meter: metrics.Meter,
    ) -> None:
        """``block_size``: tokens of a host block of ``group``. ``num_device_blocks``: host blocks
        that fit on the device."""
        self._tier, self._group, self._block_size = tier, group, block_size
        self._num_device_blocks = num_device_blocks
        self._meter = meter
        self._curve = MissRatioCurve()
        self._next_metric = self._next_log = 0.0

    def on_prompt(self, hashes: Sequence[bytes], num_tokens: int) -> None:
        """A request asks for its prompt of ``num_tokens`` tokens, whose full blocks have these
        hashes."""
        self._curve.on_prompt(hashes, self._block_size, num_tokens)

    def on_found(self, num_tokens: int) -> None:
        """``num_tokens`` tokens of a prompt have been found."""
        self._curve.on_found(num_tokens, self._tier.num_duplicates)

    def on_used(self, hashes: Sequence[bytes]) -> None:
        """A request ends. Its full blocks have these hashes."""
        self._curve.on_used(hashes)

    def on_step(self) -> None:
        """Update metrics and log once in a while."""
        now = time.monotonic()
        if now < self._next_metric:
            return
        self._next_metric = now + _SECONDS_PER_METRIC
        caches = self._caches()
        self._curve.cover(caches.device + max(FACTORS) * caches.host)
        ratios = dict(zip(FACTORS, predicted_hit_ratios(self._curve, caches), strict=True))
        for factor, ratio in ratios.items():
            if not isnan(ratio):
                self._meter.set(metrics.PREDICTED, ratio, metrics.times(factor))
        if now >= self._next_log:
            if self._next_log:
                logger.info(
                    "Prompt tokens of the last hour that would be found, by host memory: %s",
                    ", ".join(f"{metrics.times(f)} {ratio:.0%}" for f, ratio in ratios.items()),
                )
            self._next_log = now + _SECONDS_PER_LOG

    def _caches(self) -> Caches:
        tier = self._tier
        step = max(1, tier.num_blocks // _NUM_LOOKED_AT)
        keys = tier.keys_at(range(1, tier.num_blocks, step))
        share = sum(get_group_id(key) == self._group for key in keys) / len(keys) if keys else 1.0
        return Caches(
            int(share * self._num_device_blocks),
            int(share * tier.max_contents),
            tier.is_exclusive,
            DUPLICATES_SHARE if tier.is_exclusive else 0.0,
        )
