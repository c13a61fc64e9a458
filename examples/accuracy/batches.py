"""Training batches: many questions to each context, made on the device that trains."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from examples.accuracy.language import (
    ANSWER,
    END_OF_PAIR,
    FILLER,
    FIRST_WORD,
    NUM_WORDS,
    PAIR_TOKENS,
    QUESTION,
    token,
)


@dataclass(frozen=True)
class Batch:
    """Contexts with questions and their answers."""

    tokens: torch.Tensor
    """[sequences, tokens] int64."""
    answer_index: torch.Tensor
    """[answers] int64: positions within a sequence at which an answer's word is due next, the
    same in all of them; those of a question follow one another."""
    places: torch.Tensor
    """[sequences, answers] in [0, 1): where in the context the pair lies that an answer needs."""

    @property
    def answers(self) -> torch.Tensor:
        """[sequences, answers]: the right words."""
        return self.tokens[:, self.answer_index + 1]


def make_batch(
    sequences: int,
    pairs: int,
    fillers: Sequence[int],
    hops: int,
    generator: torch.Generator,
    num_words: int = NUM_WORDS,
) -> Batch:
    """Contexts of ``pairs`` pairs, with as many questions as there are ``fillers`` (dots), of
    the first ``num_words`` words.

    No two questions of a sequence need the same pair, so there must be ``hops`` + 1 pairs a
    question.
    """
    stretch = pairs // len(fillers)
    if stretch < hops + 1 or pairs > num_words:
        raise ValueError(f"{pairs} pairs: not {hops + 1} for each question, or too few words")
    device = generator.device
    # The ring: word i is followed by word i + 1.
    ring = _shuffles(sequences, num_words, generator)[:, :pairs] + FIRST_WORD
    follower = ring.roll(-1, dims=1)
    order = _shuffles(sequences, pairs, generator)
    context = torch.full((sequences, pairs, PAIR_TOKENS), token(END_OF_PAIR), device=device)
    context[:, :, 0] = ring.gather(1, order)
    context[:, :, 1] = follower.gather(1, order)
    place_of_word = order.argsort(dim=1) / pairs

    def signs(*texts: str) -> torch.Tensor:
        row = torch.tensor([token(text) for text in texts], device=device)
        return row.expand(sequences, -1)

    parts, length = [context.flatten(1)], pairs * PAIR_TOKENS
    index, places = [], []
    for number, filler in enumerate(fillers):
        start = number * stretch
        walk = ring[:, start : start + hops + 1]
        parts += [signs(QUESTION), walk[:, :1], signs(*[FILLER] * filler, ANSWER), walk[:, 1:]]
        length += 3 + filler
        index.append(torch.arange(length - 1, length - 1 + hops, device=device))
        length += hops
        places.append(place_of_word[:, start : start + hops])
    return Batch(torch.cat(parts, 1), torch.cat(index), torch.cat(places, 1))


def _shuffles(rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, length]: a permutation of range(length) in each row."""
    return torch.rand(rows, length, generator=generator, device=generator.device).argsort(dim=1)
