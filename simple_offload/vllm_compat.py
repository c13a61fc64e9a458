"""Everything that depends on which vLLM this is."""

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import vllm
from vllm import envs
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request

OLDEST, NEWEST = (0, 30), (0, 33)
"""The supported vLLM, (major, minor), both included: the last four minors, and the one that
vllm-ascend's newest stable release (0.30.0) needs."""


def vllm_version() -> tuple[int, int]:
    """(major, minor) of the running vLLM. The CPU build has another distribution name, so
    the module is asked, not the package metadata."""
    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int(minor)


def supported_range() -> str:
    """The supported versions, in words."""
    return f"{_text(OLDEST)} to {_text(NEWEST)}"


def require_supported_vllm() -> None:
    """Raise RuntimeError, which names the nearest supported version, if the running vLLM is not
    supported."""
    try:
        running = vllm_version()
    except ValueError:
        nearest = NEWEST
    else:
        nearest = max(OLDEST, min(running, NEWEST))
        if nearest == running:
            return
    raise RuntimeError(
        f"simple_offload works with vLLM {supported_range()}; this is vLLM {vllm.__version__}. "
        f"Install vLLM {_text(nearest)}, the nearest supported version, or another release of "
        "simple_offload."
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


def hit_source(source: str) -> Any:
    """The name of a "host" or "second_tier" hit in vLLM's own metrics. Before 0.32 hits have none:
    None."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return {"host": CacheHitSource.HOST, "second_tier": CacheHitSource.DISK}[source]


def event_extra_keys(extra_keys: list[Any]) -> list[Any] | None:
    """The extra keys of block hashes, one entry for each block, as KV events have them. Before 0.31
    hashes and events have the same ones; since then those of hashes have tags (vLLM's
    ``to_event_extra_keys``)."""
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", list)
    found: list[Any] | None = untagged(extra_keys)
    return found


def group_block_sizes(coordinator: KVCacheCoordinator) -> Sequence[int]:
    """Tokens of a block, by KV cache group. vllm-ascend 0.30's coordinator of hybrid models does
    not call vLLM's constructor and lacks the attribute; its managers have the same sizes."""
    sizes: Sequence[int] | None = getattr(coordinator, "group_block_sizes", None)
    return sizes or tuple(manager.block_size for manager in coordinator.single_type_managers)


def num_cacheable_tokens(coordinator: KVCacheCoordinator, num_tokens: int, group: int) -> int:
    """Number of a request's first ``num_tokens`` tokens whose blocks in ``group`` can be found
    again. Before 0.32 the rule is inside vLLM's ``cache_blocks``: final tokens; in models with
    several groups whole scheduler blocks, and one block more for a drafter."""
    if hasattr(coordinator, "get_num_cacheable_tokens"):
        return int(coordinator.get_num_cacheable_tokens(num_tokens, group))
    num_final = max(0, num_tokens - coordinator.num_reprefillable_tokens)
    align: Callable[[int], int] | None = getattr(coordinator, "_align_cacheable", None)
    if align is None:
        return num_final
    manager, aligned = coordinator.single_type_managers[group], align(num_tokens)
    if not manager.use_eagle or aligned == 0:
        return aligned
    return min(num_final, align(num_final) + manager.block_size)


def confuses_states(coordinator: KVCacheCoordinator) -> bool:
    """Whether vLLM may let a request go on from another prefix's state. 0.30 does where hits end
    inside the blocks of state layers: with async scheduling its own prefix cache finds wrong states
    in about one of 30 scripts of the simulator, also if this connector neither stores nor loads."""
    return vllm_version() < (0, 31) and getattr(coordinator, "enable_partial_hash_hits", False)


def num_prefill_lookahead_tokens(vllm_config: "VllmConfig") -> int:
    """Prompt tokens behind the computed ones that a drafter reads. Before 0.31 vLLM's scheduler
    derives it."""
    known: int | None = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if known is not None:
        return known
    speculative_config = vllm_config.speculative_config
    if speculative_config is None or not speculative_config.use_eagle():
        return 0
    is_chain = speculative_config.use_multi_module_mtp()
    return vllm_config.num_speculative_tokens if is_chain else 1


def ray_reports_one_stage() -> bool:
    """Whether ``distributed_executor_backend="ray"`` is vLLM's old executor, which 0.33 has no
    more: of a pipeline's outputs it returns those of the last stage."""
    return not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)


def returns_routed_experts(vllm_config: "VllmConfig") -> bool:
    """Whether replies have the experts of their tokens (``--enable-return-routed-experts``). 0.30
    has no such configuration, and refuses the option beside any connector."""
    config = getattr(vllm_config, "aux_output_config", None)
    return config is not None and config.enable_return_routed_experts


def num_hash_lookahead_tokens(vllm_config: "VllmConfig") -> int:
    """Tokens behind a block that its hash covers too. Only 0.33 can have some."""
    return int(getattr(vllm_config, "num_hash_lookahead_tokens", 0))


def max_tp_shards(spec: "AttentionSpec") -> int | None:
    """Number of tensor parallel ranks with different KV of a layer; None if vLLM does not say, as
    always on 0.30."""
    num_shards: int | None = getattr(spec, "max_tp_shards", None)
    return num_shards


def is_dcp_sharded(spec: "AttentionSpec") -> bool:
    """Whether decode context parallel ranks have different KV of a layer, or may have: 0.30 does
    not say."""
    return bool(getattr(spec, "dcp_sharded", True))


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
        num_prefill_lookahead=num_prefill_lookahead_tokens(vllm_config),
        allow_partial_hash_hits=True,
    )
    return get_kv_cache_coordinator(**keywords)


def plan_kv_cache(
    vllm_config: "VllmConfig", specs: "dict[str, KVCacheSpec]", num_bytes: int
) -> "KVCacheConfig":
    """vLLM's plan of one worker's KV cache of ``num_bytes``. 0.33 has it in a module of its own,
    which is given the groups."""
    if vllm_version() < (0, 33):
        (planned,) = kv_cache_utils.get_kv_cache_configs(vllm_config, [specs], [num_bytes])
        return planned
    planning: Any = importlib.import_module("vllm.v1.core.kv_cache_planning")
    groups = planning.get_global_kv_cache_groups(vllm_config, [specs])
    (later,) = planning.get_kv_cache_configs(vllm_config, [specs], [num_bytes], groups)
    return cast("KVCacheConfig", later)


def num_blocks_to_allocate(
    coordinator: KVCacheCoordinator, request: "Request", num_tokens: int, num_draft_slots: int
) -> int:
    """The most device blocks that a request has at once until its ``num_tokens`` tokens are
    computed, with ``num_draft_slots`` behind them, as vLLM admits it."""
    keywords: dict[str, Any] = {}
    if vllm_version() >= (0, 31):
        keywords["prefill_end"] = max(request.num_prompt_tokens, request.num_tokens - 1)
    return coordinator.get_num_blocks_to_allocate(
        request_id="",  # one that has no blocks
        num_tokens=num_tokens + num_draft_slots,
        new_computed_blocks=((),) * len(coordinator.single_type_managers),
        num_encoder_tokens=0,
        total_computed_tokens=0,
        num_local_computed_tokens=0,
        num_tokens_main_model=num_tokens,
        apply_admission_cap=True,
        **keywords,
    )


def _text(version: tuple[int, int]) -> str:
    major, minor = version
    return f"{major}.{minor}"
