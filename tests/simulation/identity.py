"""The contents of each KV slot: the exact identity of the tokens that it stands for."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from vllm.multimodal.inputs import MultiModalFeatureSpec

Identities = npt.NDArray[np.uint64]

NUM_TOKENS = 97
"""Size of the vocabulary."""

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


def of_page(tokens: Identities, group: int, rank: int, layer: int, width: int) -> Identities:
    """The contents of one layer's pages, of one group on one rank, for these token identities. Each
    has ``width`` slots: ``[len(tokens), width]``."""
    own = tokens ^ np.uint64(extend(extend(extend(11, group), rank), layer))
    return own[:, None] ^ _slots(width)


def of_state(prefix: int, group: int, rank: int, layer: int, shape: tuple[int, int]) -> Identities:
    """The contents of a page of ``shape``: the state after the prefix of this identity."""
    tokens = np.array([prefix], dtype=np.uint64)
    return of_page(tokens, group, rank, layer, shape[0] * shape[1]).reshape(shape)


@lru_cache
def _slots(count: int) -> Identities:
    return np.array([extend(0, slot) if slot else 0 for slot in range(count)], dtype=np.uint64)


class Story:
    """A request's tokens up to any length: the prompt, then the model's answer. The identity of the
    whole prefix determines each next token."""

    def __init__(
        self,
        prompt: Sequence[int],
        num_output_tokens: int,
        salt: str | None,
        epoch: int,
        num_beyond: int = 1,
        num_stop_tokens: int = 0,
        pictures: Iterable[MultiModalFeatureSpec] = (),
    ) -> None:
        """``num_beyond``: tokens beyond the answer, for drafts and for steps that sample one too
        many (async scheduling). ``num_stop_tokens``: of ``Shape``. ``pictures``: what the model
        sees at their places."""
        self.num_prompt_tokens = len(prompt)
        self.num_output_tokens = num_output_tokens
        self.epoch = epoch
        self.tokens = list(prompt)
        seen: dict[int, int] = {}
        for picture in pictures:
            place, content = picture.mm_position, root(picture.identifier, 0)
            seen |= {place.offset + part: extend(content, part) for part in range(place.length)}
        identities = []
        value = root(salt, epoch)
        for position in range(len(prompt) + num_output_tokens + num_beyond):
            if position == len(self.tokens):
                self.tokens.append(value % NUM_TOKENS)
            value = extend(value, seen.get(position, self.tokens[position]))
            identities.append(value)
        self.identities: Identities = np.array(identities, dtype=np.uint64)
        self._num_stop_tokens = num_stop_tokens
        self._pages: dict[tuple[int, int, int, int], Identities] = {}

    @property
    def answer(self) -> list[int]:
        """What vLLM returns: up to the first stop token."""
        answer = self.tokens[self.num_prompt_tokens :][: self.num_output_tokens]
        stops = (i for i, token in enumerate(answer, 1) if token < self._num_stop_tokens)
        return answer[: next(stops, None)]

    def pages(self, group: int, rank: int, layer: int, width: int) -> Identities:
        """The contents of one layer's pages, of one group on one rank, for all tokens: ``[tokens,
        width]``."""
        key = group, rank, layer, width
        if key not in self._pages:
            self._pages[key] = of_page(self.identities, *key)
        return self._pages[key]

    def num_accepted(self, num_tokens: int, num_drafted: int) -> int:
        """How many of the ``num_drafted`` drafts after the first ``num_tokens`` tokens are
        right."""
        return int(self.identities[num_tokens - 1] >> np.uint64(7)) % (num_drafted + 1)
