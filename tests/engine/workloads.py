"""Rounds of prompts with shared prefixes, identical on every machine."""

import random
from collections.abc import Sequence

from tests.engine.spec import Ask, Round

VOCABULARY = range(3, 512)
"""Token ids of prompts: those of a random model of the default size."""


def shared_prefix_asks(
    name: str,
    *,
    seed: int,
    system_lengths: Sequence[int] = (160, 230, 97),
    tails: int = 3,
    tail_lengths: tuple[int, int] = (33, 110),
    max_tokens: int = 12,
) -> tuple[Ask, ...]:
    """``tails`` requests on each of several system prompts (lengths in tokens).

    Requests of one system prompt are not adjacent: they belong to different users.
    """
    rng = random.Random(seed)
    systems = [_tokens(rng, length) for length in system_lengths]
    return tuple(
        Ask(
            id=f"{name}-{group}-{tail}",
            prompt=(*systems[group], *_tokens(rng, rng.randint(*tail_lengths))),
            max_tokens=max_tokens,
        )
        for tail in range(tails)
        for group in range(len(systems))
    )


def follow_ups(asks: Sequence[Ask], name: str, *, seed: int) -> tuple[Ask, ...]:
    """The next turn of each conversation: its prompt, its answer and a few new tokens."""
    rng = random.Random(seed)
    return tuple(
        Ask(
            id=f"{name}-{ask.id}",
            prompt=_tokens(rng, rng.randint(5, 40)),
            follows=ask.id,
            max_tokens=ask.max_tokens,
        )
        for ask in asks
    )


COLD, TOGETHER, ABORTS, LONG, TURNS, TURNS_FROM_HOST = range(6)
"""Numbers of the full workload's rounds."""


def full_workload(seed: int = 6) -> tuple[Round, ...]:
    """More than a device pool of a few dozen blocks holds: conversations repeated, aborted,
    preempted and continued, one by one and all together."""
    rng = random.Random(seed)
    asks = shared_prefix_asks("a", seed=seed)
    turns = follow_ups(asks, "turn", seed=seed + 1)
    aborted = tuple(
        ask._replace(abort_after=rng.randint(1, 8)) if index % 3 == 0 else ask
        for index, ask in enumerate(_shuffled(rng, asks))
    )
    long = tuple(ask._replace(max_tokens=72) for ask in _shuffled(rng, asks))
    return (
        Round(asks=asks, together=False),
        Round(asks=_shuffled(rng, asks), together=True),
        Round(asks=aborted, together=True),
        Round(asks=long, together=True),
        Round(asks=_shuffled(rng, turns), together=True),
        Round(asks=turns, together=False, reset="device"),
    )


def _shuffled(rng: random.Random, asks: Sequence[Ask]) -> tuple[Ask, ...]:
    return tuple(rng.sample(asks, len(asks)))


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(VOCABULARY, k=count))
