"""Models made on the spot: a configuration, weights or none, and a tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from examples.multi_turn.tokens import WordVocabulary
from examples.random_model import save_random_model


@dataclass(frozen=True)
class Shape:
    """A dense model of grouped-query attention."""

    architecture: Literal["llama", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: Literal["float32", "bfloat16"]
    """float32: small random weights, on which what the model says depends. bfloat16: none, vLLM
    fills in dummy ones."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        element = 4 if self.dtype == "float32" else 2
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element

    @property
    def load_format(self) -> Literal["auto", "dummy"]:
        """vLLM's name for where weights come from."""
        return "auto" if self.dtype == "float32" else "dummy"


SMALL = Shape("llama", 2048, 512, 1024, 4, 8, 4, 64, "float32")
LLAMA_8B = Shape("llama", 32000, 4096, 14336, 32, 32, 8, 128, "bfloat16")
QWEN3_14B = Shape("qwen3", 151936, 5120, 17408, 40, 40, 8, 128, "bfloat16")


def save_model(shape: Shape, max_model_len: int, seed: int, directory: Path) -> None:
    """Write what vLLM needs to serve a model of ``shape``."""
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
    else:
        _save_config(shape, max_model_len, directory)
    WordVocabulary(shape.vocab_size).save(directory)


def _save_config(shape: Shape, max_model_len: int, directory: Path) -> None:
    from transformers import LlamaConfig, Qwen3Config

    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[shape.architecture]
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[shape.architecture]
    kind(
        architectures=[name],
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_model_len,
        dtype=shape.dtype,
        tie_word_embeddings=False,
    ).save_pretrained(directory)
