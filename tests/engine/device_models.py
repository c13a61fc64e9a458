"""Random models for the tests on a GPU, of kinds that vLLM cannot serve on every CPU.

Weights are spread like those of ``examples.random_model``, so that answers depend on the whole
context.
"""

import json
import math
from pathlib import Path
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from examples.random_model import Architecture, save_random_model
from tests.engine.shrunk import DRAFTERS, FILLED, HIDDEN_SIZE, MODELS

FORGETS = (0.003, 0.05)
"""Decay of a Mamba head's state per token, minimum and maximum. The state then depends on tens to
hundreds of tokens, so that a wrong state changes many later tokens."""

ONE_KV_HEAD = "-one-kv-head"
"""End of the names of models that have less KV heads than a pair of ranks."""
SIZES = {"hidden_size": HIDDEN_SIZE, "num_layers": 6, "num_kv_heads": 4}
"""Of the models that ``examples`` writes. Two of Gemma's layers have full attention: each of vLLM's
groups then has two KV tensors, which loads can divide. In blocks of 128 tokens their parts are
large enough (``simple_offload.worker.layer_groups``)."""
DRAFTER = "drafter"
"""Folder of the drafter inside the folder of its target."""


def save_device_model(directory: Path, kind: str, *, seed: int = 0) -> Path:
    """Write a model in float32; return ``directory``. Those in MODELS are a configuration only:
    ``random_weights`` fills them when they are loaded."""
    if kind in MODELS:
        configs = {directory: MODELS[kind]}
        if kind in DRAFTERS:
            configs[directory / DRAFTER] = DRAFTERS[kind]
        for folder, config in configs.items():
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(config))
        return directory
    kind, has_one_kv_head = kind.removesuffix(ONE_KV_HEAD), kind.endswith(ONE_KV_HEAD)
    if kind in {"llama", "gemma3"}:
        architecture = cast(Architecture, kind)
        sizes = SIZES | ({"num_kv_heads": 1} if has_one_kv_head else {})
        return save_random_model(directory, architecture, seed=seed, **sizes)
    heads = {"num_key_value_heads": 1} if has_one_kv_head else {}
    config = AutoConfig.for_model(**FILLED[kind] | heads)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(*(math.log(rate) for rate in FORGETS), generator=generator)
            elif weight.dim() == 2:
                weight.normal_(0.0, _spread(name, weight, kind), generator=generator)
    model.save_pretrained(directory)
    return directory


def _spread(name: str, weight: torch.Tensor, kind: str) -> float:
    """Standard deviation of one matrix; attention scores then have a standard deviation of 4."""
    if "embed" in name:
        return 1.0
    gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
    if kind == "mla" and "q_proj" in name:
        gain = 4.0  # keys come through a norm and one matrix with the values, without a gain
    return gain * float(weight.shape[1] ** -0.5)
