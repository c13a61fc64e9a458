"""Which store policy a configuration asks for."""

from typing import TYPE_CHECKING

from simple_offload import metrics
from simple_offload.config import OffloadConfig
from simple_offload.scheduler.policies.admission import MIN_COUNTED, Admission
from simple_offload.scheduler.policies.base import StorePolicy
from simple_offload.scheduler.policies.eager import EagerPolicy
from simple_offload.scheduler.policies.free_queue_walk import StepLimits
from simple_offload.scheduler.policies.lazy import LazyPolicy
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager


def describe_policy(config: OffloadConfig) -> str:
    """The policy in a few words, for the log."""
    when = "lazy stores" if config.lazy_offload else "eager stores"
    if config.store_threshold == 1:
        return when
    return f"{when} of prefixes that {config.store_threshold} requests had"


def make_policy(
    config: OffloadConfig,
    vllm_config: "VllmConfig",
    tier: CpuTier,
    groups: Groups,
    stores: Stores,
    kv_cache_manager: "KVCacheManager",
    meter: metrics.Meter,
    *,
    wants_events: bool,
) -> StorePolicy:
    """The policy of ``config`` for the device blocks of ``kv_cache_manager``."""
    num_device_blocks = len(kv_cache_manager.block_pool.blocks)
    admission = Admission(config.store_threshold, max(MIN_COUNTED, 2 * num_device_blocks))
    if config.lazy_offload:
        limits = StepLimits.from_config(vllm_config, groups.block_sizes)
        return LazyPolicy(
            tier, groups, stores, kv_cache_manager, admission, meter, limits, wants_events
        )
    return EagerPolicy(tier, groups, stores, kv_cache_manager, admission, meter, wants_events)
