"""What each KV slot must hold: the exact identity of the tokens it stands for."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Identities = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


@lru_cache(maxsize=1 << 18)
def extend(prefix: int, token: int) -> int:
    """The identity of ``prefix`` followed by ``token`` (a 64-bit mix, splitmix64's finisher)."""
    value = (prefix ^ (token + 1)) * _ODD & _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def root(salt: str | None, epoch: int) -> int:
    """The identity of the empty prefix under ``salt``, with the weights of ``epoch``."""
    value = extend(epoch, 7)
    for character in salt or "":
        value = extend(value, ord(character))
    return value


def of_page(tokens: Identities, group: int, rank: int, layer: int) -> Identities:
    """What the slots of one layer of one group on one rank hold for these token identities."""
    return tokens ^ np.uint64(extend(extend(extend(11, group), rank), layer))


class Story:
    """A request's tokens, as far as they will ever go: the prompt, and what the model would say
    to it. Each next token follows from the identity of everything before."""

    def __init__(
        self, prompt: Sequence[int], num_output_tokens: int, salt: str | None, epoch: int
    ) -> None:
        self.num_prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        identities = []
        value = root(salt, epoch)
        for position in range(len(prompt) + num_output_tokens):
            if position == len(self.tokens):
                self.tokens.append(value % 97)
            value = extend(value, self.tokens[position])
            identities.append(value)
        self.tokens.append(value % 97)  # sampled by a step too many (async scheduling), dropped
        self.identities: Identities = np.array(identities, dtype=np.uint64)
