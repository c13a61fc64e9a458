"""The recall models' language, and lm_eval's questions."""

import pytest
import torch

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
)


def looked_up(question: Question) -> tuple[list[list[str]], list[str]]:
    """The pairs of the context, and the words whose followers are the answer."""
    context, _, asked = question.prompt.partition(f" {QUESTION} ")
    pairs = [pair.split() for pair in context.removesuffix(f" {END_OF_PAIR}").split(" ; ")]
    assert MIN_FILLER + 2 <= len(asked.split()) <= MAX_FILLER + 2
    assert asked.endswith(ANSWER)
    return pairs, [asked.split()[0], *question.answer.split()[:-1]]


def test_a_question_is_answered_by_its_context() -> None:
    for question in make_questions(20, seed=0):
        pairs, words = looked_up(question)
        assert {first for first, _ in pairs} == {second for _, second in pairs}, "one ring"
        assert question.answer.split() == [dict(pairs)[word] for word in words]
        assert len(words) == HOPS
    assert MIN_FILLER > 32, "the question lies further back than a block"


def test_lengths_and_answers_are_spread_evenly() -> None:
    asked = list(make_questions(600, seed=0))
    lengths = torch.tensor([len(question.prompt.split()) for question in asked])
    assert SHORTEST - 32 <= lengths.min() < 1100
    assert 3900 < lengths.max() <= LONGEST
    thirds = torch.histc(lengths.float(), 3, min=SHORTEST - 32, max=LONGEST) / len(asked)
    assert thirds.tolist() == pytest.approx([1 / 3] * 3, abs=0.08)
    places = []
    for pairs, words in map(looked_up, asked):
        place_of = {first: place / len(pairs) for place, (first, _) in enumerate(pairs)}
        places += [place_of[word] for word in words]
    tenths = torch.histc(torch.tensor(places), 10, min=0, max=1) / len(places)
    assert tenths.tolist() == pytest.approx([0.1] * 10, abs=0.02)
