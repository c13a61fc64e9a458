"""The recall models' language, lm_eval's questions and the batches for training."""

import json
from collections.abc import Iterator
from itertools import islice
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
    Question,
    make_questions,
    write_questions,
)
from examples.accuracy.train import make_batch


def walk(prompt: str, hops: int) -> list[str]:
    """The right answer to a recall question, derived from its text alone."""
    context, _, question = prompt.partition(" ? ")
    follower = dict(pair.split() for pair in context.removesuffix(" ;").split(" ; "))
    words = [question.split()[0]]
    for _ in range(hops):
        words.append(follower[words[-1]])
    return words[1:]


def questions(number: int, seed: int = 0) -> list[Question]:
    return list(make_questions(number, seed))


def test_a_question_is_answered_by_its_context() -> None:
    for question in questions(20):
        assert question.answer.split() == walk(question.prompt, HOPS)
        context, _, asked = question.prompt.partition(f" {QUESTION} ")
        pairs = [pair.split() for pair in context.removesuffix(f" {END_OF_PAIR}").split(" ; ")]
        assert {first for first, _ in pairs} == {second for _, second in pairs}, "one ring"
        looked_up = [asked.split()[0], *question.answer.split()[:-1]]
        firsts = [first for first, _ in pairs]
        assert question.places == [firsts.index(word) / len(pairs) for word in looked_up]
        assert MIN_FILLER + 2 <= len(asked.split()) <= MAX_FILLER + 2
        assert asked.endswith(ANSWER)
    assert MIN_FILLER > 32, "the question lies further back than a block"


def test_lengths_and_answers_are_spread_evenly() -> None:
    asked = questions(600)
    lengths = torch.tensor([len(question.prompt.split()) for question in asked])
    assert SHORTEST - 32 <= lengths.min() < 1100
    assert 3900 < lengths.max() <= LONGEST
    thirds = torch.histc(lengths.float(), 3, min=SHORTEST - 32, max=LONGEST) / len(asked)
    assert thirds.tolist() == pytest.approx([1 / 3] * 3, abs=0.08)
    places = torch.tensor([question.places for question in asked])
    tenths = torch.histc(places, 10, min=0, max=1) / places.numel()
    assert tenths.tolist() == pytest.approx([0.1] * 10, abs=0.02)


def test_questions_follow_from_the_seed() -> None:
    assert questions(3) == list(islice(make_questions(9, 0), 3))
    assert questions(3) != questions(3, seed=1)
    assert len({question.prompt[:40] for question in questions(50)}) == 50, "nothing is shared"
    with pytest.raises(ValueError, match="60 tokens is too short"):
        list(make_questions(1, 0, shortest=60, longest=60))


def test_questions_are_written_as_the_task_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    write_questions(iter(questions(2)), path)
    assert [Question(**json.loads(line)) for line in path.read_text().splitlines()] == questions(2)
    task = Path(train.__file__).with_name("tasks").joinpath("key_value_recall.yaml").read_text()
    assert "{{prompt}}" in task
    assert "{{answer}}" in task
    assert f"max_gen_toks: {HOPS} " in task


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model, and contexts of 16 words."""
    changes = {"HIDDEN_SIZE": 64, "RATE": 3e-3, "WORDS": 16, "LAST_STEPS": 5, "SAMPLES": 8}
    for name, value in changes.items():
        monkeypatch.setattr(train, name, value)
    monkeypatch.setattr(train, "LENGTHS", (100,))
    monkeypatch.setattr(train, "STAGES", (train.Stage(10, 4, 16, 2, 4, 1.0, 80),))


@pytest.fixture
def deterministic_until_the_end() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("tiny", "deterministic_until_the_end")
@pytest.mark.parametrize("kind", ["llama", "window"])
def test_training_lowers_the_loss_and_saves_what_it_trained(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few steps: the model learns uniform attention to the context at once, but not recall."""
    from transformers import AutoModelForCausalLM

    assert train.main([kind, "--output", str(tmp_path)]) == train.TOO_INACCURATE
    assert "FAILED" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path).float()
    batch = make_batch(64, 10, [4], 4, torch.Generator().manual_seed(1), 16)
    with torch.no_grad():
        logits = train.answer_logits(model, batch)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())
    assert loss < 4.5, "it predicts only the 16 words of 2048 tokens: log 2048 = 7.6"
