"""Models made on the spot: a configuration, with weights or without."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ModelShape:
    """A dense model of grouped-query attention, or of latent attention (MLA)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32: small random weights, on which the answers depend. bfloat16: no weights, vLLM
    fills in dummy ones."""
    architecture: Literal["llama", "qwen3", "mla"] = "llama"
    intermediate_size: int = 0
    """Of a model without weights."""

    def kv_bytes_per_token(self, num_ranks: int = 1) -> int:
        """Keys and values of all layers, or what stands for them, on each of ``num_ranks`` ranks.
        All have the same latents, and the same heads where there are fewer heads than ranks."""
        element = 4 if self.dtype == "float32" else 2
        if self.architecture == "mla":
            latent = MLA_SIZES["kv_lora_rank"] + MLA_SIZES["qk_rope_head_dim"]
            return self.num_layers * latent * element
        head_dim = self.hidden_size // self.num_heads
        num_heads = max(1, self.num_kv_heads // num_ranks)
        return 2 * self.num_layers * num_heads * head_dim * element


MLA_SIZES = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""As all DeepSeek models from V2 on have them."""

SMALL = ModelShape(2048, 512, 4, 8, 4)
LLAMA_8B = ModelShape(32000, 4096, 32, 32, 8, "bfloat16", intermediate_size=14336)
QWEN3_14B = ModelShape(151936, 5120, 40, 40, 8, "bfloat16", "qwen3", intermediate_size=17408)
DEEPSEEK_LITE = ModelShape(102400, 2048, 27, 16, 16, "bfloat16", "mla", intermediate_size=10944)
"""DeepSeek-V2-Lite without experts."""


def save_model(shape: ModelShape, max_model_len: int, seed: int, directory: Path) -> None:
    """Write the files, but for a tokenizer, that vLLM needs to serve a model of ``shape``."""
    # Imported here, since transformers takes seconds: a command's help or refusal needs no model.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils.logging import disable_progress_bar

    from examples.random_model import SIZES, model_config, save_random_model

    disable_progress_bar()
    sizes = {name: getattr(shape, name) for name in SIZES if name != "max_model_len"}
    sizes["max_model_len"] = max_model_len
    if shape.dtype == "float32":
        assert shape.architecture != "mla", "made without weights only"
        save_random_model(directory, shape.architecture, seed=seed, **sizes)
        return
    sizes["intermediate_size"] = shape.intermediate_size
    config = model_config(shape.architecture, **sizes)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = shape.dtype
    config.save_pretrained(directory)
