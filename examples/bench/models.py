"""Models made on the spot: a configuration, with weights or without."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from examples.random_model import save_random_model


@dataclass(frozen=True)
class ModelShape:
    """A dense model of grouped-query attention."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32: small random weights, on which the answers depend. bfloat16: no weights, vLLM
    fills in dummy ones."""
    architecture: Literal["llama", "qwen3"] = "llama"
    intermediate_size: int = 0
    """Of a model without weights."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        element = 4 if self.dtype == "float32" else 2
        head_dim = self.hidden_size // self.num_heads
        return 2 * self.num_layers * self.num_kv_heads * head_dim * element

    @property
    def load_format(self) -> Literal["auto", "dummy"]:
        """vLLM's name for the source of the weights."""
        return "auto" if self.dtype == "float32" else "dummy"


SMALL = ModelShape(2048, 512, 4, 8, 4)
LLAMA_8B = ModelShape(32000, 4096, 32, 32, 8, "bfloat16", intermediate_size=14336)
QWEN3_14B = ModelShape(151936, 5120, 40, 40, 8, "bfloat16", "qwen3", intermediate_size=17408)


def save_model(shape: ModelShape, max_model_len: int, seed: int, directory: Path) -> None:
    """Write the files, but for a tokenizer, that vLLM needs to serve a model of ``shape``."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if shape.dtype == "float32":
        save_random_model(
            directory,
            shape.architecture,
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            max_model_len=max_model_len,
            seed=seed,
        )
        return
    from transformers import LlamaConfig, Qwen3Config

    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[shape.architecture]
    kind(
        architectures=[
            {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[shape.architecture]
        ],
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        max_position_embeddings=max_model_len,
        dtype=shape.dtype,
        tie_word_embeddings=False,
    ).save_pretrained(directory)
