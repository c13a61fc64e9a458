"""Models made on the spot: a configuration, with weights or without."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from examples.random_model import SIZES, model_config, save_random_model


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
    sizes = {name: getattr(shape, name) for name in SIZES if name != "max_model_len"}
    sizes["max_model_len"] = max_model_len
    if shape.dtype == "float32":
        save_random_model(directory, shape.architecture, seed=seed, **sizes)
        return
    sizes["intermediate_size"] = shape.intermediate_size
    config = model_config(shape.architecture, **sizes)
    config.architectures = [f"{shape.architecture.capitalize()}ForCausalLM"]
    config.dtype = shape.dtype
    config.save_pretrained(directory)
