"""Forecaster: tells what requests would have found with other sizes of host memory."""

import time
from collections.abc import Callable, Iterable
from math import isnan

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_group_id

from simple_offload import metrics
from simple_offload.logs import get_logger
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.eviction_order import DUPLICATES_SHARE
from simple_offload.sizing.curve import MissRatioCurve
from simple_offload.sizing.forecast import FACTORS, Caches, predicted_hit_ratios

logger = get_logger(__name__)

_SECONDS_PER_METRIC = 5.0
_SECONDS_PER_LOG = 600.0
_NUM_LOOKED_AT = 512
"""Blocks of device and host whose groups are looked at, to know how many a prefix takes."""


class Forecaster:
    """Shows prompts to a miss-ratio curve, and its answers to users.

    Counts blocks of one group, whose keys a prefix has one by one. Other groups have blocks in the
    same caches. In what ratio is not the same on device and host: windows and states that are over
    leave the device sooner.
    """

    def __init__(
        self,
        tier: CpuTier,
        group: int,
        device_pool: BlockPool,
        num_sub_blocks: int,
        meter: metrics.Meter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``num_sub_blocks``: device blocks in a host block."""
        self._tier, self._group = tier, group
        self._device_pool, self._num_sub_blocks = device_pool, num_sub_blocks
        self._meter, self._clock = meter, clock
        self.curve = MissRatioCurve(clock=clock)
        self._next_metric = self._next_log = 0.0

    def on_step(self) -> None:
        """Update metrics and log once in a while."""
        now = self._clock()
        if now < self._next_metric:
            return
        self._next_metric = now + _SECONDS_PER_METRIC
        caches = self._caches()
        self.curve.cover(caches.device + max(FACTORS) * caches.host)
        ratios = dict(zip(FACTORS, predicted_hit_ratios(self.curve, caches), strict=True))
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
        tier, on_device = self._tier, self._device_pool.blocks
        step = max(1, len(on_device) // _NUM_LOOKED_AT)
        device_share = self._share(filter(None, block_pool.keys_of(on_device[::step])))
        step = max(1, tier.num_blocks // _NUM_LOOKED_AT)
        host_share = self._share(tier.keys_at(range(1, tier.num_blocks, step)))
        return Caches(
            int(device_share * len(on_device) / self._num_sub_blocks),
            int(host_share * tier.max_contents),
            tier.is_exclusive,
            DUPLICATES_SHARE if tier.is_exclusive else 0.0,
        )

    def _share(self, keys: Iterable[BlockHashWithGroupId]) -> float:
        """Share of the group's keys."""
        are_own = [get_group_id(key) == self._group for key in keys]
        return sum(are_own) / len(are_own) if are_own else 1.0
