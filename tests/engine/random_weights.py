"""Random weights for any model class of vLLM: ``load_format=RANDOM_WEIGHTS``.

A folder with only a ``config.json`` is then a model. With vLLM's own "dummy" weights, within 1e-3,
every token sees the same average of its context. With these, one wrong block changes the answers.
"""

import zlib

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from tests.engine.shrunk import RANDOM_WEIGHTS

_GAIN = 2.0
_LIKELY = 32
"""Every n-th token is likely; all others are almost never the best. A drafter with random weights
then guesses some tokens right."""
_ONES = ("norm.weight", "layernorm.weight", "_scale")


@register_model_loader(RANDOM_WEIGHTS)
class RandomWeightsLoader(BaseModelLoader):
    """Fills parameters in place; the same names and shapes always get the same weights."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        gemma = {
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, GemmaRMSNorm) or "Gemma" in type(module).__name__
        }
        # Gemma multiplies embeddings by the root of the hidden size.
        embeds_loudly = hasattr(getattr(model, "model", None), "normalizer")
        for name, weight in model.named_parameters():
            # On the CPU: a GPU's generator may give other numbers on another GPU.
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = _draw(name, weight, generator, is_gemma_norm=name in gemma)
            if embeds_loudly and "embed" in name:
                drawn *= float(weight.shape[1] ** -0.5)
            weight.data.copy_(drawn.to(weight.dtype))
        if getattr(model, "finalizes_weights_during_load", False):
            model.process_weights_after_loading()  # type: ignore[operator]


def _draw(
    name: str, weight: torch.Tensor, generator: torch.Generator, *, is_gemma_norm: bool
) -> torch.Tensor:
    """Random values of the shape of ``weight``: float32, or zeros for integers."""
    shape = tuple(weight.shape)
    if not weight.is_floating_point():
        return torch.zeros(shape)
    if name.endswith("dt_bias"):
        # Kimi's gates: a state then decays by a few hundredths per token.
        return torch.full(shape, -5.5)
    if name.endswith("sinks"):
        return torch.empty(shape).normal_(generator=generator)
    if name.endswith(_ONES):
        # Norms behind the projections undo the gain of queries and keys, so they have it too.
        gain = _GAIN if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        # Gemma's norms multiply by one more than their weight.
        return torch.full(shape, gain - 1.0 if is_gemma_norm else gain)
    if weight.dim() < 2:
        return torch.zeros(shape)
    drawn = torch.empty(shape).normal_(0.0, _spread(name, shape), generator=generator)
    if "lm_head" in name or "shared_head.head" in name:
        likely = torch.arange(shape[0]) % _LIKELY == 0
        drawn[~likely] *= 0.25
    return drawn


def _spread(name: str, shape: tuple[int, ...]) -> float:
    """The standard deviation that gives all parts of the residual stream one size."""
    if "embed" in name:
        return 1.0
    # With a larger output of attention, answers depend more on the context.
    loud = ("qkv", "q_proj", "q_b_proj", "wq_b", "o_proj", "wo_b")
    gain = _GAIN if any(part in name for part in loud) else 1.0
    return gain * float(shape[-1] ** -0.5)
