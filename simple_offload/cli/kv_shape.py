"""How large a model's KV cache is, by its config.json. Needs neither vLLM nor the weights.

The formulas are those by which vLLM sizes pages (vllm/v1/kv_cache_interface.py) and groups layers
(vllm/v1/core/kv_cache_utils.py); tests compare both with vLLM's own classes and functions.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import ceil
from pathlib import Path
from typing import Any

from simple_offload.cli.arguments import CommandError, nearest


class Kind(Enum):
    """What a layer's attention looks back on."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "MLA"


_LAYER_TYPES = {
    "full_attention": Kind.FULL,
    "sliding_attention": Kind.SLIDING,
    "chunked_attention": Kind.CHUNKED,
}
_NESTED = ("text_config", "llm_config", "language_config")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_DTYPE_BYTES = {"float32": 2, "float16": 2, "bfloat16": 2, "half": 2}
"""vLLM serves float32 checkpoints in float16 unless told otherwise."""
KV_DTYPES = {
    "auto": None,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of an element by --kv-cache-dtype; None: the model's."""
_ALTERNATING = {"gemma2", "gpt_oss"}
"""Model types whose every other layer has a window, beginning with the first, whether or not
their config.json says so."""
_STATES = "state layers (Mamba, linear attention), whose size does not follow from tokens"
_SHARED = "layers that share or differ in heads, which config.json tells in the model's own way"
_BEYOND = {
    **dict.fromkeys(
        ("mamba_d_state", "ssm_cfg", "ssm_state_size", "state_size", "linear_key_head_dim"), _STATES
    ),
    **dict.fromkeys(("hybrid_override_pattern", "layers_block_type", "rwkv_version"), _STATES),
    **dict.fromkeys(("num_kv_shared_layers", "global_head_dim", "block_configs"), _SHARED),
    **dict.fromkeys(("index_topk", "compress_ratios"), "a cache for sparse attention beside it"),
    "is_encoder_decoder": "cross attention",
}
"""Keys of models that this cannot size, and what they have."""
_INSTEAD = (
    "plan cannot size it. Start vLLM once: the connector logs the bytes of a block "
    '("Host memory of this rank")'
)


@dataclass(frozen=True)
class Group:
    """Layers that share a block table, as vLLM groups them."""

    kind: Kind
    layers: int
    """That have KV; a group may be padded to the size of the others."""
    window: int | None
    """Tokens that attention looks back on; None for all."""

    def resident_tokens(self, tokens: int) -> int:
        """Of a context of ``tokens``, those whose KV a hit brings back."""
        return tokens if self.window is None else min(tokens, self.window)


@dataclass(frozen=True)
class KVShape:
    """A model's KV cache on one rank. Sizes are in bytes."""

    model_type: str
    layer_bytes: int
    """Of one token in one layer."""
    groups: tuple[Group, ...]
    group_layers: int
    """Layers that every group has room for."""

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Of one token in all layers: what computing a token writes."""
        return self.layers * self.layer_bytes

    def block_bytes(self, block_size: int) -> int:
        """Of a block of ``block_size`` tokens, which belongs to one group."""
        return self.group_layers * self.layer_bytes * block_size

    def blocks(self, tokens: int, block_size: int, *, stored: bool = False) -> int:
        """Blocks of a context of ``tokens``: those that a hit brings back, or, ``stored``, all
        that computing it fills."""
        return sum(
            ceil((tokens if stored else group.resident_tokens(tokens)) / block_size)
            for group in self.groups
        )


def read_config(path: Path) -> dict[str, Any]:
    """The object in config.json at ``path``, a file or the folder that has it. CommandError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(
            f"MODEL={str(path)!r}: {file} cannot be read ({error.strerror}). Allowed: a model's "
            "folder, or its config.json"
        ) from None
    except ValueError as error:
        raise CommandError(f"MODEL={str(path)!r}: {file} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise CommandError(f"MODEL={str(path)!r}: {file} holds no JSON object")
    return config


def kv_shape(config: Mapping[str, Any], *, tensor_parallel: int, kv_dtype: str) -> KVShape:
    """The KV cache on one of ``tensor_parallel`` ranks. CommandError names what is missing from
    ``config``, or what it has that cannot be sized."""
    text = _text_config(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "unknown")
    for key, what in _BEYOND.items():
        if text.get(key):
            raise CommandError(f"{model_type}: {key}={_short(text[key])}: {what}; {_INSTEAD}")
    num_layers = _whole(text, "num_hidden_layers", "n_layer", "num_layers")
    element = KV_DTYPES[kv_dtype] or _element_bytes(config, text)
    if text.get("kv_lora_rank"):
        # One latent vector, the same on every rank.
        latent = _whole(text, "kv_lora_rank") + _whole(text, "qk_rope_head_dim")
        group = Group(Kind.MLA, num_layers, None)
        return KVShape(model_type, latent * element, (group,), num_layers)
    num_heads = _whole(text, "num_attention_heads", "n_head")
    if num_heads % tensor_parallel:
        raise CommandError(
            f"--tensor-parallel={tensor_parallel}: does not divide num_attention_heads={num_heads}"
        )
    kv_heads = _kv_heads(text, num_heads)
    head_dim = text.get("head_dim") or _whole(text, "hidden_size", "n_embd") // num_heads
    layer_bytes = 2 * max(1, kv_heads // tensor_parallel) * int(head_dim) * element
    group_layers, groups = _group(_layer_kinds(model_type, text, num_layers))
    return KVShape(model_type, layer_bytes, groups, group_layers)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a multimodal model, what it says of its language model."""
    for key in _NESTED:
        if isinstance(config.get(key), dict):
            nested: Mapping[str, Any] = config[key]
            return nested
    return config


def _whole(config: Mapping[str, Any], *keys: str) -> int:
    """The value of the first of ``keys`` that is there."""
    for key in keys:
        if key in config:
            value = config[key]
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CommandError(f"config.json: {key}={value!r}: must be a whole number above 0")
            return value
    raise CommandError(
        f"config.json: {keys[0]} is missing" + nearest(keys[0], (k for k in config if k != keys[0]))
    )


def _kv_heads(text: Mapping[str, Any], num_heads: int) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    keys = [key for key in _KV_HEADS if text.get(key)]
    return _whole(text, keys[0]) if keys else num_heads


def _element_bytes(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        return 1
    dtypes = (each.get(key) for each in (text, config) for key in ("dtype", "torch_dtype"))
    dtype = str(next(filter(None, dtypes), "bfloat16"))
    if dtype not in _DTYPE_BYTES:
        raise CommandError(
            f"config.json: dtype={dtype!r}: must be one of {', '.join(_DTYPE_BYTES)}"
            + nearest(dtype, _DTYPE_BYTES)
        )
    return _DTYPE_BYTES[dtype]


def _layer_kinds(
    model_type: str, text: Mapping[str, Any], num_layers: int
) -> list[tuple[Kind, int | None]]:
    """Every layer's kind and window."""
    kinds = text.get("layer_types")
    if kinds is None:
        kinds = _unsaid_layer_types(model_type, text, num_layers)
    unknown = sorted(set(map(str, kinds)) - _LAYER_TYPES.keys())
    if unknown:
        raise CommandError(f"{model_type}: layer_types has {unknown[0]!r}: {_STATES}; {_INSTEAD}")
    if len(kinds) != num_layers:
        raise CommandError(
            f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers"
        )
    windows: dict[Kind, int | None] = {Kind.FULL: None}
    for kind, key in ((Kind.SLIDING, "sliding_window"), (Kind.CHUNKED, "attention_chunk_size")):
        if any(_LAYER_TYPES[name] is kind for name in kinds):
            windows[kind] = _whole(text, key)
    return [(kind, windows[kind]) for kind in (_LAYER_TYPES[name] for name in kinds)]


def _unsaid_layer_types(model_type: str, text: Mapping[str, Any], num_layers: int) -> list[str]:
    """What config.json means where it has no layer_types."""
    if text.get("attention_chunk_size"):
        raise CommandError(
            f"{model_type}: attention_chunk_size={text['attention_chunk_size']} without "
            f"layer_types does not say which layers are chunked; {_INSTEAD}"
        )
    window = text.get("sliding_window") and text.get("use_sliding_window", True)
    if not window:
        return ["full_attention"] * num_layers
    every = 2 if model_type in _ALTERNATING else text.get("sliding_window_pattern") or 0
    return [
        "full_attention" if every and (layer + 1) % every == 0 else "sliding_attention"
        for layer in range(num_layers)
    ]


def _group(kinds: list[tuple[Kind, int | None]]) -> tuple[int, tuple[Group, ...]]:
    """Layers in a group, and the groups. All have as many layers as the rarest kind; where
    kinds are about as frequent, as the most frequent one, and the others are padded."""
    number = Counter(kinds)
    least, most = min(number.values()), max(number.values())
    per_group = most if most < 1.5 * least else least
    groups = []
    for (kind, window), total in number.items():
        num_groups = ceil(total / per_group)
        groups += [
            Group(kind, len(range(index, total, num_groups)), window) for index in range(num_groups)
        ]
    return per_group, tuple(groups)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:36]}..."
