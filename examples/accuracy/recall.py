"""The questions that lm_eval asks: made from a seed, written as JSON lines."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.accuracy.language import (
    ANSWER,
    END_OF_PAIR,
    FILLER,
    HOPS,
    MAX_FILLER,
    MIN_FILLER,
    QUESTION,
    num_pairs,
    words,
)

SHORTEST, LONGEST = 1000, 4000
"""Tokens of the shortest and the longest prompt."""


@dataclass(frozen=True)
class Question:
    """One sample."""

    prompt: str
    """Of as many tokens as it has words and signs, which blanks separate."""
    answer: str
    """HOPS words."""
    places: list[float]
    """Where in the context the pair lies that each word of the answer needs; in [0, 1)."""


def make_questions(
    number: int, seed: int, *, shortest: int = SHORTEST, longest: int = LONGEST
) -> Iterator[Question]:
    """``number`` questions, the same for the same arguments, each with a context of its own.

    Prompt lengths are spread evenly from ``shortest`` to ``longest`` tokens. The first
    questions are the same however many follow.
    """
    for index in range(number):
        source = random.Random(f"{seed} recall {index}")
        yield _question(source, source.randint(shortest, longest))


def _question(source: random.Random, prompt_tokens: int) -> Question:
    ring = source.sample(words(), num_pairs(prompt_tokens))
    if len(ring) <= HOPS:
        raise ValueError(f"a prompt of {prompt_tokens} tokens is too short for {HOPS} hops")
    start = source.randrange(len(ring))
    walk = [ring[(start + step) % len(ring)] for step in range(HOPS + 1)]
    order = list(range(len(ring)))
    source.shuffle(order)
    pairs = [f"{ring[word - 1]} {ring[word]} {END_OF_PAIR}" for word in order]
    filler = [FILLER] * source.randint(MIN_FILLER, MAX_FILLER)
    place = {ring[word - 1]: number / len(order) for number, word in enumerate(order)}
    return Question(
        prompt=" ".join([*pairs, QUESTION, walk[0], *filler, ANSWER]),
        answer=" ".join(walk[1:]),
        places=[place[word] for word in walk[:-1]],
    )


def write_questions(questions: Iterator[Question], path: Path) -> None:
    """One JSON object a line, as the task's YAML file has it."""
    with path.open("w", encoding="utf-8") as file:
        for question in questions:
            file.write(json.dumps(vars(question)) + "\n")
