"""Random models must make useful tests: every part of the context has to affect their tokens, and
rounding must not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from examples.random_model import Architecture, save_random_model

ARCHITECTURES: list[Architecture] = ["llama", "qwen3", "gemma3"]
PROMPT_TOKENS = 288
BLOCK = 32
ANSWER_TOKENS = 16


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = save_random_model(tmp_path_factory.mktemp("model"), request.param)
    return load(directory)


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    """Token ids ``[PROMPT_TOKENS]``."""
    return random_tokens(PROMPT_TOKENS, seed=1)


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def random_tokens(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (count,), generator=generator)


@torch.no_grad()
def prefill(model: Any, prompt: torch.Tensor) -> DynamicCache:
    """The KV of all but the last token of ``prompt``."""
    cache = DynamicCache(config=model.config)
    model(input_ids=prompt[None, :-1], past_key_values=cache)
    return cache


@torch.no_grad()
def answer(model: Any, cache: DynamicCache, last: torch.Tensor) -> list[int]:
    """Greedy tokens that follow ``cache`` and the prompt's ``last`` token."""
    tokens: list[int] = []
    token = int(last)
    for _ in range(ANSWER_TOKENS):
        logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits
        token = int(logits[0, -1].argmax())
        tokens.append(token)
    return tokens


def splice(target: DynamicCache, source: DynamicCache, start: int, end: int) -> None:
    """Overwrite the KV of tokens ``start`` to ``end`` in ``target``, as far as its layers still
    hold them, with those of ``source``."""
    for layer, other in zip(target.layers, source.layers, strict=True):
        first_held = PROMPT_TOKENS - 1 - layer.keys.shape[2]
        held = slice(max(start - first_held, 0), max(end - first_held, 0))
        layer.keys[:, :, held] = other.keys[:, :, held]
        layer.values[:, :, held] = other.values[:, :, held]


@pytest.mark.parametrize("start", range(0, PROMPT_TOKENS - BLOCK, BLOCK))
def test_one_wrong_kv_block_changes_the_answer(
    model: Any, prompt: torch.Tensor, start: int
) -> None:
    """The KV of one block is another prompt's; all blocks after it are right."""
    cache = prefill(model, prompt)
    splice(cache, prefill(model, random_tokens(PROMPT_TOKENS, seed=9)), start, start + BLOCK)
    wrong = answer(model, cache, prompt[-1])
    assert wrong != answer(model, prefill(model, prompt), prompt[-1])


@torch.no_grad()
def test_rounding_is_small_beside_the_lead(model: Any, prompt: torch.Tensor) -> None:
    single = model(prompt[None]).logits[0]
    double = model.double()(prompt[None]).logits[0]
    model.float()
    best, second = double.topk(2).values.unbind(-1)
    error = (single - double).abs().amax(-1)
    assert error.max() < 1e-4
    assert ((best - second) > 1e-3).double().mean() > 0.98
    assert torch.equal(single.argmax(-1), double.argmax(-1))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_seed_decides(tmp_path: Path, architecture: Architecture) -> None:
    paths = [
        save_random_model(tmp_path / name, architecture, seed=seed) / "model.safetensors"
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again
    assert first != other


def test_gemma_mixes_sliding_and_full_attention(tmp_path: Path) -> None:
    model = load(save_random_model(tmp_path, "gemma3", num_layers=3, sliding_window=128))
    windows, full = ["sliding_attention"] * 2, ["full_attention"]
    assert model.config.layer_types == windows + full
    assert model.config.sliding_window == 128
