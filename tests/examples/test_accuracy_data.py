"""The recall models' language, lm_eval's questions and the batches for training."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.accuracy import train
from examples.accuracy.language import (
    ANSWER,
    END_OF_PAIR,
    HOPS,
    LONGEST,
    MAX_FILLER,
    MIN_FILLER,
    QUESTION,
    SHORTEST,
    make_questions,
)
from examples.accuracy.train import make_batch


def test_a_question_is_answered_by_its_context() -> None:
    for question in make_questions(20, seed=0):
        context, _, asked = question.prompt.partition(f" {QUESTION} ")
        pairs = [pair.split() for pair in context.removesuffix(f" {END_OF_PAIR}").split(" ; ")]
        assert {first for first, _ in pairs} == {second for _, second in pairs}, "one ring"
        answer = question.answer.split()
        looked_up = [asked.split()[0], *answer[:-1]]
        assert answer == [dict(pairs)[word] for word in looked_up]
        assert len(answer) == HOPS
        firsts = [first for first, _ in pairs]
        assert question.places == [firsts.index(word) / len(pairs) for word in looked_up]
        assert MIN_FILLER + 2 <= len(asked.split()) <= MAX_FILLER + 2
        assert asked.endswith(ANSWER)
    assert MIN_FILLER > 32, "the question lies further back than a block"


def test_lengths_and_answers_are_spread_evenly() -> None:
    asked = list(make_questions(600, seed=0))
    lengths = torch.tensor([len(question.prompt.split()) for question in asked])
    assert SHORTEST - 32 <= lengths.min() < 1100
    assert 3900 < lengths.max() <= LONGEST
    thirds = torch.histc(lengths.float(), 3, min=SHORTEST - 32, max=LONGEST) / len(asked)
    assert thirds.tolist() == pytest.approx([1 / 3] * 3, abs=0.08)
    places = torch.tensor([question.places for question in asked])
    tenths = torch.histc(places, 10, min=0, max=1) / places.numel()
    assert tenths.tolist() == pytest.approx([0.1] * 10, abs=0.02)


TINY = train.Course(64, 16, (train.Stage(10, 4, 16, 2, 4, 1.0, 80),), 5, 3e-3, (100,), 8)
"""A small model, and contexts of 16 words."""


@pytest.fixture
def deterministic() -> Iterator[None]:
    """The end of what ``train`` switches on."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kind", ["llama", pytest.param("window", marks=pytest.mark.slow)])
def test_training_lowers_the_loss_and_saves_what_it_trained(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few steps: the model learns uniform attention to the context at once, but not recall."""
    from transformers import AutoModelForCausalLM

    assert train.main([kind, "--output", str(tmp_path)], TINY) == train.TOO_INACCURATE
    assert "FAILED" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path).float()
    batch = make_batch(64, 10, [4], 4, torch.Generator().manual_seed(1), 16)
    with torch.no_grad():
        logits = train.answer_logits(model, batch)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())
    assert loss < 4.5, "it predicts only the 16 words of 2048 tokens: log 2048 = 7.6"
