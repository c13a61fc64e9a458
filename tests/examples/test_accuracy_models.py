"""The recall models of this repository: their language, lm_eval's questions, and runs."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
import torch

from examples.accuracy.__main__ import MODELS, OUR_MODELS, main
from examples.accuracy.evaluation import find_python
from examples.accuracy.language import (
    END_OF_PAIR,
    HOPS,
    LONGEST,
    MIN_FILLER,
    QUESTION,
    SHORTEST,
    make_questions,
)
from examples.bench.command import BAD_RESULT, RunFailed
from examples.bench.results_file import NUMBERS


def test_questions_are_answered_by_their_contexts() -> None:
    """Lookups and lengths are spread evenly."""
    asked, places = list(make_questions(600, seed=0)), []
    for question in asked:
        context, _, end = question.prompt.partition(f" {QUESTION} ")
        pairs = [pair.split() for pair in context.removesuffix(f" {END_OF_PAIR}").split(" ; ")]
        assert {first for first, _ in pairs} == {second for _, second in pairs}, "one ring"
        assert len(end.split()) >= MIN_FILLER + 2 > 34, "the question is further back than a block"
        words = [end.split()[0], *question.answer.split()[:-1]]
        assert question.answer.split() == [dict(pairs)[word] for word in words]
        place_of = {first: place / len(pairs) for place, (first, _) in enumerate(pairs)}
        places += [place_of[word] for word in words]
    assert len(places) == 600 * HOPS
    assert fmean(places) == pytest.approx(0.5, abs=0.02)
    lengths = sorted(len(question.prompt.split()) for question in asked)
    assert SHORTEST - 32 <= lengths[0] < 1100
    assert 3900 < lengths[-1] <= LONGEST
    assert lengths[300] == pytest.approx(fmean((SHORTEST, LONGEST)), rel=0.1)


@pytest.mark.parametrize(("name", "windows"), [(OUR_MODELS[0], 0), (OUR_MODELS[1], 2)])
def test_a_word_that_is_looked_up_changes_the_answer(name: str, windows: int) -> None:
    """The models' answer follows the pairs of the context, for every pair that a question needs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # In float32, as it is served on the CPU.
    model = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    assert getattr(model.config, "layer_types", []).count("sliding_attention") == windows
    (question,) = make_questions(1, seed=5, shortest=700, longest=700)
    words = question.answer.split()

    def answer(prompt: str) -> list[str]:
        """The model's words, each with the right ones before it."""
        ids = tokenizer(f"{prompt} {question.answer}", return_tensors="pt").input_ids
        with torch.no_grad():
            predicted = model(ids).logits[0, -HOPS - 1 : -1].argmax(-1)
        return list(tokenizer.decode(predicted).split())

    assert answer(question.prompt) == words
    for hop, (word, follower) in enumerate(pairwise(words), start=1):
        other = question.prompt.replace(f"{word} {follower} ;", f"{word} {words[0]} ;")
        assert other != question.prompt
        assert answer(other)[hop] == words[0]


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
def test_corrupted_blocks_change_all_answers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With vLLM and lm_eval. tests/docs/test_readme.py runs it without corruption."""
    arguments = ["--model", str(MODELS / name), "--samples", "12", "--output", str(tmp_path)]
    code = main([*arguments, "--corrupt"])
    printed = capsys.readouterr().out
    passes = json.loads((tmp_path / NUMBERS).read_text())[name]["passes"]
    scores = {name: next(iter(numbers.values())) for name, numbers in passes.items()}
    assert scores["without"] == scores["first pass"] >= 0.9
    assert passes["second pass"]["hit_share"] > 0.9
    assert passes["second pass"]["device_hit_tokens"] == 0
    assert code == BAD_RESULT, printed
    assert "FAILED" in printed
    assert scores["second pass"] == 0
