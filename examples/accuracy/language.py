"""The language of the recall models: their words, the form of a prompt, and lm_eval's questions.

A prompt is a context of pairs in random order and a question:

    miru tako ; bani velo ; tako bani ; ... ? miru . . . . =

Every pair is a word and its follower; together they make one ring. A right answer walks on
from the word of the question, "tako bani velo ...": each hop is one more pair that has to be
found somewhere in the context. The dots keep the word away from the answer that depends on it.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

END_OF_PAIR, QUESTION, FILLER, ANSWER = ";", "?", ".", "="
NUM_WORDS = 2042
"""The tokenizers have 2048 tokens: these words, four signs, <unk> and </s>."""

MIN_FILLER, MAX_FILLER = 40, 56
"""Dots of a question. The fewest are more than a KV block has tokens, so that the block with the
word of the question is always whole, and can come from the host."""
HOPS = 8
"""Words of an answer."""

SHORTEST, LONGEST = 1000, 4000
"""Tokens of the shortest and the longest prompt that lm_eval asks."""


def words() -> list[str]:
    """The NUM_WORDS words in the order of their ids."""
    syllables = [consonant + vowel for consonant, vowel in product("bdfgklmnprstvz", "aeiou")]
    # Every other one, so that first letters reach to the end of the alphabet.
    return [first + second for first, second in product(syllables, syllables)][::2][:NUM_WORDS]


@dataclass(frozen=True)
class Question:
    """One sample."""

    prompt: str
    """Of as many tokens as it has words and signs, which blanks separate."""
    answer: str
    """HOPS words."""


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
    # A pair takes three tokens, as do the signs and the word of the question.
    ring = source.sample(words(), (prompt_tokens - 3 - MAX_FILLER) // 3)
    if len(ring) <= HOPS:
        raise ValueError(f"a prompt of {prompt_tokens} tokens is too short for {HOPS} hops")
    start = source.randrange(len(ring))
    walk = [ring[(start + step) % len(ring)] for step in range(HOPS + 1)]
    order = list(range(len(ring)))
    source.shuffle(order)
    pairs = [f"{ring[word - 1]} {ring[word]} {END_OF_PAIR}" for word in order]
    filler = [FILLER] * source.randint(MIN_FILLER, MAX_FILLER)
    return Question(
        prompt=" ".join([*pairs, QUESTION, walk[0], *filler, ANSWER]),
        answer=" ".join(walk[1:]),
    )


def write_questions(questions: Iterator[Question], path: Path) -> None:
    """One JSON object a line, as the task's YAML file has it."""
    with path.open("w", encoding="utf-8") as file:
        for question in questions:
            file.write(json.dumps(vars(question)) + "\n")
