"""Namespaces keep KV of different models, settings and layouts apart.

A block hash covers tokens and little else. A namespace has the rest of what decides the bytes of an
object, and the meaning of its key. Engines with equal namespaces share objects. A setting that may
matter is in it: a lost hit costs time, a wrong hit gives a wrong answer.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from vllm import envs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes, resolve_none_hash_seed

from simple_offload import vllm_compat
from simple_offload.config import ConfigError

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.config.multimodal import MultiModalConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

FORMAT_VERSION = 1
"""Of objects and namespaces. A release that writes other bytes, or other keys, raises it."""

_REPRODUCIBLE = frozenset({"sha256", "sha256_cbor"})
"""Hash algorithms for which vLLM starts from a constant seed."""

_FROM_FOLDER = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache"),
        *("pt", "gguf", "runai_streamer", "runai_streamer_sharded", "sharded_state"),
    }
)
"""Load formats that read the model's own files. Others get weights from a server, or who knows."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_BESIDE_WEIGHTS = ("*.py", "*quant*.json", "*processor_config.json")
"""Files that are not in the HF config: the model's own code, how it is quantized, and how images
become pixels."""

_ORIGIN = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Fields of HF configs that say where a model is, and not what it is."""

_HEADER_BYTES = 64 * 1024
_PAGE_BYTES = 4 * 1024
_NUM_PAGES = 64


def require_reproducible_hashes(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError unless other engines, and this one after a restart, compute the same block
    hashes."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in _REPRODUCIBLE and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"prefix_caching_hash_algo={algorithm!r}: the block hashes of each engine start from "
            "random bytes, so no engine finds what another wrote, or what it wrote before a "
            "restart. Allowed: --prefix-caching-hash-algo sha256_cbor (or sha256), or the "
            "environment variable PYTHONHASHSEED with the same number on all servers"
        )


def describe(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    *,
    row: object,
    name: str | None,
) -> dict[str, Any]:
    """The namespace of this engine's objects, in JSON's types.

    ``row``: what the ranks say about their parts of an object, as JSON. ``name``: the user's
    ``cache_namespace``. It stands for the weights of the model and of the drafter. Without a name,
    reads up to 324 KiB of each of their files; raises ConfigError if some are not on this machine.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    attention = vllm_config.attention_config
    _, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    namespace = {
        "format": FORMAT_VERSION,
        # The next minor version may lay out a block differently under the same names.
        "vllm": vllm_compat.vllm_version(),
        "hash": {
            "algorithm": cache.prefix_caching_hash_algo,
            # vLLM sets its NONE_HASH, in this way, after it has made the connectors.
            "none_hash": hash_function(resolve_none_hash_seed(hash_function)).hex(),
            "block_size": hash_block_size,
            "num_lookahead_tokens": vllm_compat.num_hash_lookahead_tokens(vllm_config),
        },
        "model": _model(vllm_config.model_config, vllm_config.load_config, name),
        "drafter": _drafter(vllm_config, name),
        "cache_dtype": cache.cache_dtype,
        "attention": {
            "indexer_kv_dtype": attention.indexer_kv_dtype,
            "use_non_causal": attention.use_non_causal,
        },
        "mamba": vllm_config.mamba_config,
        "parallel": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "decode_context": parallel.decode_context_parallel_size,
            "prefill_context": parallel.prefill_context_parallel_size,
            "interleave": parallel.cp_kv_cache_interleave_size,
        },
        # Layers in order, each spec's class and fields, and whether it is the drafter's.
        "groups": kv_cache_config.kv_cache_groups,
        "platform": vllm_config.additional_config,
        "row": row,
    }
    plain: dict[str, Any] = _as_json(namespace)
    return plain


def _model(model: "ModelConfig", load: "LoadConfig", name: str | None) -> dict[str, Any]:
    return {
        "weights": {"name": name} if name is not None else _weights(model, load),
        "architecture": model.architecture,
        "class_overrides": model.model_class_overrides,
        "code_revision": model.code_revision,
        # With hf_overrides, and what vLLM has changed.
        "config": digest(_as_json(model.hf_config.to_dict(), leave_out=_ORIGIN)),
        "dtype": model.dtype,
        "quantization": [model.quantization, model.quantization_config],
        "max_model_len": _decisive_length(model),
        "multimodal": _multimodal(model.multimodal_config),
    }


def _drafter(vllm_config: "VllmConfig", name: str | None) -> dict[str, Any] | None:
    config = vllm_config.speculative_config
    if config is None:
        return None
    load = config.draft_load_config or vllm_config.load_config
    model: ModelConfig | None = config.draft_model_config  # none if method is "suffix"
    return {
        "method": config.method,
        "num_tokens": config.num_speculative_tokens,
        "cache_dtype": config.kv_cache_dtype,
        "model": None if model is None else _model(model, load, name),
    }


def _decisive_length(model: "ModelConfig") -> list[int | None] | None:
    """max_model_len as the user gave it and as it is, if KV depends on it. vLLM chooses the factors
    of LongRoPE by it, in some models the base of dynamic NTK scaling, and the temperature of Llama
    4's attention. A model is loaded before vLLM fits the length to memory, so both are needed."""
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    # Of all layers, or by kind of layer.
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if kinds & {"longrope", "dynamic"} or model.architecture.startswith("Llama4"):
        return [model.original_max_model_len, model.max_model_len]
    return None


def _multimodal(config: "MultiModalConfig | None") -> dict[str, Any] | None:
    """How images and videos become KV. Their hashes, which users may choose, do not cover it."""
    if config is None:
        return None
    return {
        "language_model_only": config.language_model_only,
        "media_io_kwargs": config.media_io_kwargs,
        "processor_kwargs": config.mm_processor_kwargs,
        "encoder_dtype": config.mm_encoder_attn_dtype,
        "video_pruning": [config.video_pruning_rate, config.video_pruning_method],
    }


def _weights(model: "ModelConfig", load: "LoadConfig") -> dict[str, Any]:
    """What tells these weights from others, wherever they are."""
    if load.load_format == "dummy":
        return {"load_format": load.load_format, "seed": model.seed}
    place, commit = _place(model, load)
    weights = _files(place, _WEIGHTS)
    if not weights:
        raise ConfigError(
            f"second_tier: the weights of {model.model!r} (load_format={load.load_format!r}) are "
            "not in files that this process finds, so it cannot tell them from other weights. Set "
            '"cache_namespace" in second_tier to a name that you change with the weights, such as '
            '"cache_namespace": "llama-3.1-8b-v1"'
        )
    files = [*weights, *_files(place, _BESIDE_WEIGHTS)]
    samples = [(path.name, path.stat().st_size, _sample(path)) for path in files]
    return {"commit": commit, "num_files": len(files), "samples": digest(samples)}


def _place(model: "ModelConfig", load: "LoadConfig") -> tuple[Path | None, str | None]:
    """The folder or file of a model's weights, and its commit if it comes from the Hugging Face
    Hub. None: they are elsewhere."""
    if load.load_format not in _FROM_FOLDER or model.model_weights:
        return None, None
    if (path := Path(model.model)).exists():
        return path, None
    if envs.VLLM_USE_MODELSCOPE:
        return None, None
    folder: str | None
    try:
        folder = snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=load.download_dir,
            local_files_only=True,
        )
    except LocalEntryNotFoundError as error:
        # vLLM downloads the files that it needs. Then the error has the folder.
        folder = getattr(error, "snapshot_path", None)
    except ValueError:  # no name of a repository
        return None, None
    return (Path(folder), Path(folder).name) if folder else (None, None)


def _files(place: Path | None, patterns: Iterable[str]) -> list[Path]:
    """Files in a folder by name, or the file itself."""
    if place is None:
        return []
    if place.is_file():
        return [place] if any(place.match(pattern) for pattern in patterns) else []
    return sorted(path for pattern in patterns for path in place.glob(pattern) if path.is_file())


def _sample(path: Path) -> str:
    """A digest of a file's beginning, and of 64 pages or more that are spread over the file.

    The beginning of a safetensors file names its tensors. Training changes nearly all values, so
    any page shows it. A change of less than a 64th of the file, such as of one tensor, may lie
    between two pages: then only ``cache_namespace`` tells both apart. Small files are read whole.
    """
    contents = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        contents.update(os.pread(file.fileno(), _HEADER_BYTES, 0))
        for start in range(0, size, max(_PAGE_BYTES, size // _NUM_PAGES)):
            contents.update(os.pread(file.fileno(), _PAGE_BYTES, start))
    return contents.hexdigest()


def _as_json(value: object, leave_out: Set[str] = frozenset()) -> Any:
    """``value`` in JSON's types, without the fields ``leave_out`` of objects, however deep."""
    return json.loads(
        json.dumps(value, default=_plain),
        object_pairs_hook=lambda pairs: {key: each for key, each in pairs if key not in leave_out},
    )


def _plain(value: object) -> object:
    """For json.dumps: a value of another type in JSON's types."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"class": type(value).__name__, **named}
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)


def digest(value: object) -> str:
    """32 hex digits that differ if values, such as namespaces, do."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
