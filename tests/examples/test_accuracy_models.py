"""The recall models of this repository, and runs with them."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.accuracy.__main__ import MODELS, OUR_MODELS, main
from examples.accuracy.corrupt import CorruptingBackend
from examples.accuracy.evaluation import find_python
from examples.accuracy.language import HOPS, make_questions
from examples.accuracy.train import measure
from examples.bench.command import BAD_RESULT, RunFailed
from examples.bench.results_file import NUMBERS
from simple_offload.backends.base import CopyBackend, Direction
from simple_offload.backends.host import HostBackend
from simple_offload.metadata import Transfer


@cache
def load(name: str) -> tuple[Any, Any]:
    """Model and tokenizer. The model is in float32, as it is served on the CPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(MODELS / name)


@pytest.mark.parametrize("name", OUR_MODELS)
def test_models_are_small(name: str) -> None:
    assert (MODELS / name / "model.safetensors").stat().st_size < 6e6
    config = json.loads((MODELS / name / "config.json").read_text())
    windows = config.get("layer_types", []).count("sliding_attention")
    assert windows == (2 if name.startswith("window") else 0)


@pytest.mark.parametrize("name", OUR_MODELS)
def test_models_recall(name: str) -> None:
    model, _ = load(name)
    recall = measure(model, 1024, 16, torch.Generator().manual_seed(0))
    assert recall.answers >= 0.9


@pytest.mark.parametrize("name", OUR_MODELS)
def test_a_word_that_is_looked_up_changes_the_answer(name: str) -> None:
    """The models' answer follows the pairs of the context, for every pair that a question needs."""
    model, tokenizer = load(name)
    (question,) = make_questions(1, seed=5, shortest=700, longest=700)
    words = question.answer.split()
    ids = tokenizer(f"{question.prompt} {question.answer}", return_tensors="pt").input_ids
    with torch.no_grad():
        predicted = model(ids).logits[0, -HOPS - 1 : -1].argmax(-1)
    assert tokenizer.decode(predicted).split() == words
    for hop, (word, follower) in enumerate(pairwise(words)):
        other = question.prompt.replace(f"{word} {follower} ;", f"{word} {words[0]} ;")
        assert other != question.prompt
        ids = tokenizer(f"{other} {question.answer}", return_tensors="pt").input_ids
        with torch.no_grad():
            predicted = model(ids).logits[0, -HOPS - 1 : -1].argmax(-1)
        assert tokenizer.decode(predicted).split()[hop + 1] == words[0]


def run_copy(backend: CopyBackend, direction: Direction, device: int, host: int) -> None:
    backend.enter_thread(direction)
    transfer = Transfer(0, np.array([device]), np.array([host]))
    pending = backend.copy(direction, transfer, backend.barrier())
    assert pending is None, "the host backend copies at once"


def top_bits_turned(block: torch.Tensor) -> torch.Tensor:
    return (block.int() ^ -128).to(torch.int8)


def test_host_blocks_are_corrupted_once_after_each_store() -> None:
    backend = CorruptingBackend(HostBackend())
    device = torch.arange(-40, 40, dtype=torch.int8).reshape(4, 20)
    stored = device.clone()
    backend.open([device])
    backend.add_host_chunk([backend.allocate_host(100).reshape(5, 20)])
    run_copy(backend, Direction.STORE, 1, 4)
    assert torch.equal(device, stored), "a store changes no device block"
    for _ in range(2):
        run_copy(backend, Direction.LOAD, 2, 4)
        assert torch.equal(device[2], top_bits_turned(stored[1]))
    run_copy(backend, Direction.STORE, 3, 4)
    run_copy(backend, Direction.LOAD, 0, 4)
    assert torch.equal(device[0], top_bits_turned(stored[3]))
    backend.close()


def test_a_block_is_corrupted_in_its_chunk_and_in_all_regions() -> None:
    class Idle(HostBackend):
        def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
            """Accepts further chunks, like a device's backend."""

    backend = CorruptingBackend(Idle())
    chunks = [[torch.zeros(3, 8, dtype=torch.int8) for _ in range(2)] for _ in range(2)]
    for regions in chunks:
        backend.add_host_chunk(regions)
    run_copy(backend, Direction.LOAD, 0, 4)
    touched = torch.stack([torch.stack(regions) for regions in chunks]).any(-1)
    assert touched.nonzero().tolist() == [[1, 0, 1], [1, 1, 1]], "chunk, region, row"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_corrupted_values_are_finite_and_wrong(dtype: torch.dtype) -> None:
    values = torch.tensor([1.5, -2.25e-3, 7.0, 300.0], dtype=dtype)
    spoilt = top_bits_turned(values.view(torch.int8)).view(dtype)
    assert spoilt.isfinite().all()
    assert (spoilt.sign() == -values.sign()).all()


def has_lm_eval() -> bool:
    try:
        find_python()
    except RunFailed:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not has_lm_eval(), reason="needs lm_eval (make set-up-eval)")
@pytest.mark.parametrize("name", OUR_MODELS)
@pytest.mark.parametrize("corrupt", [False, True], ids=["product", "corrupted"])
def test_answers_from_the_host_tier(
    name: str, corrupt: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With vLLM and lm_eval: the connector changes no answer, and corrupted blocks change all."""
    arguments = ["--model", str(MODELS / name), "--samples", "12", "--output", str(tmp_path)]
    code = main([*arguments, *(["--corrupt"] if corrupt else [])])
    printed = capsys.readouterr().out
    passes = json.loads((tmp_path / NUMBERS).read_text())[name]["passes"]
    scores = {each: numbers["scores"][0]["value"] for each, numbers in passes.items()}
    assert scores["without"] == scores["first pass"] >= 0.9
    assert passes["second pass"]["hit_share"] == 1
    assert passes["second pass"]["device_hit_tokens"] == 0
    if corrupt:
        assert code == BAD_RESULT
        assert "FAILED" in printed
        assert scores["second pass"] == 0
    else:
        assert code == 0, printed
        assert "PASSED: all 12 samples" in printed
