"""Everything that depends on which vLLM this is."""

from typing import TYPE_CHECKING, Any

import vllm
from vllm import envs
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SUPPORTED = ((0, 32), (0, 34))
"""Lowest vLLM (major, minor) that works, and the first one that is not known to."""


def vllm_version() -> tuple[int, int]:
    """(major, minor) of the running vLLM. The CPU build has another distribution name, so
    the module is asked, not the package metadata."""
    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int(minor)


def require_supported_vllm() -> None:
    """Raise RuntimeError unless the running vLLM lies within ``SUPPORTED``."""
    lowest, beyond = SUPPORTED
    try:
        supported = lowest <= vllm_version() < beyond
    except ValueError:
        supported = False
    if not supported:
        raise RuntimeError(
            f"simple_offload works with vLLM >= {lowest[0]}.{lowest[1]} and "
            f"< {beyond[0]}.{beyond[1]}; this is vLLM {vllm.__version__}. "
            "Install a supported vLLM or another release of simple_offload."
        )


def claim_builtin_name(connector_class: type) -> None:
    """Let vLLM 0.33 take ``connector_class`` for its own connector of the same name.

    From 0.33 on, the engine finds that name in the configuration and asks the worker's
    instance of the *built-in* class for its number of host blocks; with any other class it
    stops at start. The built-in class is an ABC, so ours can register as a virtual subclass.
    """
    if vllm_version() < (0, 33):
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
        SimpleCPUOffloadConnector,
    )

    SimpleCPUOffloadConnector.register(connector_class)


def ray_reports_one_stage() -> bool:
    """Whether ``distributed_executor_backend="ray"`` is vLLM's old executor, which 0.33 has no
    more: of a pipeline's outputs it returns those of the last stage."""
    return not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)


def num_hash_lookahead_tokens(vllm_config: "VllmConfig") -> int:
    """Tokens behind a block that its hash covers too. Only 0.33 can have some."""
    return int(getattr(vllm_config, "num_hash_lookahead_tokens", 0))


def make_host_coordinator(
    kv_cache_config: "KVCacheConfig",
    vllm_config: "VllmConfig",
    scheduler_block_size: int,
    hash_block_size: int,
) -> KVCacheCoordinator:
    """A coordinator with a BlockPool of ``kv_cache_config.num_blocks`` host blocks and the
    device's groups, so that a host lookup follows the rules of a device lookup.

    Hits may end inside a block where the device's may. Keywords throughout: 0.33 has an
    argument more in the middle.
    """
    speculative_config = vllm_config.speculative_config
    keywords: dict[str, Any] = dict(
        kv_cache_config=kv_cache_config,
        max_model_len=vllm_config.model_config.max_model_len,
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        use_eagle=speculative_config is not None and speculative_config.use_eagle_block_drop(),
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=vllm_config.parallel_config.decode_context_parallel_size,
        pcp_world_size=1,
        scheduler_block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
        num_prefill_lookahead=vllm_config.num_prefill_lookahead_tokens,
        allow_partial_hash_hits=True,
    )
    return get_kv_cache_coordinator(**keywords)
