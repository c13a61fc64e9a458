"""Plans a model's KV cache as vLLM's engine does, without weights and without a device.

That is done by a process of its own (``child.ask``): the model's layers are made on torch's meta
device, and vLLM's layers of experts, which have no KV and look for kernels of the device, are
replaced.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from vllm.config import SpeculativeConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_config
from vllm.utils.torch_utils import (
    get_kv_cache_quant_algo_string,
    set_default_torch_dtype,
)
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from simple_offload import vllm_compat
from simple_offload.replicas import Replicas
from simple_offload.sizing.absent import NoExperts, ZeroValues
from simple_offload.unread_groups import unread_groups

_ROOM = 2**62
"""Bytes for the KV cache. So many blocks fit that their size follows from their number."""


def plan_engine(config: str, **options: Any) -> tuple[VllmConfig, KVCacheConfig]:
    """vLLM's configuration of an engine for the model of ``config`` (a config.json), and the plan
    of a rank's KV cache, with a drafter's layers. ``options``: of vLLM's EngineArgs. Changes vLLM's
    CPU platform in this process. Raises what vLLM raises."""
    given = json.loads(Path(config).read_text(encoding="utf-8"))
    if options.get("kv_cache_dtype", "auto") == "auto":
        options["kv_cache_dtype"] = _dtype_of_checkpoint(Path(config), given)
    for each in (given, given.get("text_config") or {}):
        _drop_quantization_of_weights(each)
    if current_platform.device_type == "cpu":
        from simple_offload.sizing import gpu_rules  # not every build can import it

        gpu_rules.apply()
    _import_models(given["architectures"])
    with tempfile.TemporaryDirectory(prefix="simple-offload-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(given))
        for file in Path(config).resolve().parent.glob("*.py"):
            (Path(folder) / file.name).symlink_to(file)
        if drafter := options.get("speculative_config"):
            drafted = get_config(
                drafter.get("model", folder),
                trust_remote_code=False,
                hf_overrides_fn=SpeculativeConfig.hf_config_override,
            )
            _import_models(drafted.architectures)
        several = options.get("tensor_parallel_size", 1) > 1
        vllm_config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            language_model_only=True,
            load_format="dummy",
            enforce_eager=True,
            enable_prefix_caching=True,
            distributed_executor_backend="mp" if several else None,
            **options,
        ).create_engine_config()
        return vllm_config, _plan(vllm_config)


def describe(vllm_config: VllmConfig, planned: KVCacheConfig) -> dict[str, Any]:
    """The fields of ModelBytes, as JSON has them, of what ``plan_engine`` has returned."""
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    replicas = Replicas.find(vllm_config, planned)
    num_pools = num_ranks // replicas.count
    groups = []
    block_sizes = [group.kv_cache_spec.block_size for group in planned.kv_cache_groups]
    unread = unread_groups(vllm_config, planned, math.lcm(*block_sizes))
    for group in planned.prefix_cacheable_group_ids:
        described = planned.kv_cache_groups[group]
        (spec, *_) = iter_layer_specs(described.kv_cache_spec)
        copies = num_pools * (replicas.count if group in replicas.private_groups else 1)
        copies = 0 if group in unread else copies
        kind, num_blocks = _boundary(spec)
        groups.append((kind, len(described.layer_names), spec.block_size, num_blocks, copies))
    platform = current_platform.device_type
    return {
        "architecture": vllm_config.model_config.architecture,
        "platform": "cuda" if platform == "cpu" else platform,
        "num_ranks": num_ranks,
        "num_sharing": replicas.count,
        "block_bytes": _ROOM // planned.num_blocks,
        "groups": groups,
    }


def _dtype_of_checkpoint(config: Path, given: dict[str, Any]) -> str:
    """The KV cache's dtype that ModelOpt has chosen, or "auto". Its older checkpoints have a file
    for it."""
    file = config.with_name("hf_quant_config.json")
    quantization = given.get("quantization_config")
    if quantization is None and file.exists():
        quantization = json.loads(file.read_text(encoding="utf-8"))
    if not quantization:
        return "auto"
    # As vLLM names the method of these checkpoints.
    method = "modelopt" if quantization.get("producer", {}).get("name") == "modelopt" else ""
    return get_kv_cache_quant_algo_string({"quant_method": method} | quantization) or "auto"


def _drop_quantization_of_weights(config: dict[str, Any]) -> None:
    """Weights decide nothing here, and their quantization may need kernels that this machine lacks.
    llm-compressor's configuration has the KV cache's dtype too, which layers of attention take from
    it (those of MLA do not)."""
    for key in ("quantization_config", "compression_config"):
        quantization = config.pop(key, None) or {}
        is_compressor = "compressed" in quantization.get("quant_method", "")
        if is_compressor and quantization.get("kv_cache_scheme"):
            config[key] = quantization | {"config_groups": {}}


def _import_models(architectures: list[str]) -> None:
    """Import the models' classes here. vLLM would do so in a process of its own, and hide what that
    one raises."""
    fused_moe.FusedMoEFactory = NoExperts  # type: ignore[assignment]
    for name in architectures:
        if registered := ModelRegistry.models.get(name):
            ModelRegistry.register_model(name, registered.load_model_cls())


def _plan(vllm_config: VllmConfig) -> KVCacheConfig:
    """In the order of vLLM's engine: model, block size, specs, layout, groups."""
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    with set_current_vllm_config(vllm_config), _one_rank(num_ranks):
        model_config = vllm_config.model_config
        assert isinstance(model_config.dtype, torch.dtype)
        with set_default_torch_dtype(model_config.dtype), torch.device("meta"), ZeroValues():
            initialize_model(vllm_config)
            drafter = vllm_config.speculative_config
            if drafter and (drafter.use_eagle() or drafter.uses_draft_model()):
                # As vLLM's proposers name its layers.
                prefix = "draft_model" if drafter.uses_draft_model() else ""
                initialize_model(
                    vllm_config, prefix=prefix, model_config=drafter.draft_model_config
                )
        current_platform.update_block_size_for_backend(vllm_config)
        register_all_kvcache_specs(vllm_config)  # type: ignore[no-untyped-call]
        specs = get_kv_cache_spec(vllm_config)
        if not specs:
            raise ValueError("the model has no KV cache")
        backends = get_current_attn_backends(vllm_config)
        layouts = [each.name for each in get_supported_kv_cache_layouts(backends)]
        layout = resolve_kv_cache_layout(vllm_config, [layouts], list(specs.values()))
        vllm_config.cache_config.kv_cache_layout = layout.name
        return vllm_compat.plan_kv_cache(vllm_config, specs, _ROOM)


@contextmanager
def _one_rank(num_ranks: int) -> Iterator[None]:
    """Be the first of ``num_ranks`` tensor parallel ranks, without the others."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    try:
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.init_distributed_environment(1, 0, "", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        parallel_state.get_tp_group().world_size = num_ranks
        yield
    finally:
        parallel_state.destroy_model_parallel()  # type: ignore[no-untyped-call]
        parallel_state.destroy_distributed_environment()  # type: ignore[no-untyped-call]


def _boundary(spec: KVCacheSpec) -> tuple[str, int]:
    """The kind of a group, and the blocks that a hit needs at its end."""
    if isinstance(spec, MambaSpec):
        return "state", 1
    if isinstance(spec, SlidingWindowSpec):
        # SlidingWindowManager: the next token's window has itself and those before it.
        return "window", -(-(spec.sliding_window - 1) // spec.block_size)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunk", -(-spec.attention_chunk_size // spec.block_size)
    return "chain", 0


def answer(file: Path, **options: Any) -> None:
    """Write the plan of ``plan_engine(**options)`` to ``file``, or why there is none."""
    try:
        found: object = describe(*plan_engine(**options))
    except Exception as error:  # noqa: BLE001 - a model's code may raise every kind
        found = _reason(error)
    file.write_text(json.dumps(found))


def _reason(error: Exception) -> str:
    details = getattr(error, "errors", None)  # pydantic's, whose text repeats the arguments
    text = details()[0]["msg"] if callable(details) else f"{type(error).__name__}: {error}"
    return " ".join(text.removeprefix("Value error, ").split())
