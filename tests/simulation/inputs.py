"""Inputs: what a request's contents depend on beside its tokens and its salt."""

import random
from collections.abc import Sequence
from itertools import groupby

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tests.simulation.identity import NUM_TOKENS
from tests.simulation.router import LORA_PATH

PICTURE = NUM_TOKENS
"""The token of all pictures."""
LONGEST_PICTURE = 8
"""Tokens: no more than any step may have."""
ADAPTERS = [LoRARequest(name, index, LORA_PATH) for index, name in enumerate(("poet", "bard"), 1)]
_PICTURES = "cat", "dog"


def pictures_in(tokens: Sequence[int], rng: random.Random) -> list[MultiModalFeatureSpec]:
    """Pictures for the places that ``tokens`` have for them."""
    found, start = [], 0
    for token, run in groupby(tokens):
        end = start + len(list(run))
        for offset in range(start, end, LONGEST_PICTURE) if token == PICTURE else ():
            length = min(LONGEST_PICTURE, end - offset)
            found.append(picture(f"{rng.choice(_PICTURES)} {length}", offset, length))
        start = end
    return found


def picture(content: str, offset: int, length: int) -> MultiModalFeatureSpec:
    """A picture at these tokens of a prompt. ``content`` ends with its length, for the router."""
    return MultiModalFeatureSpec(
        None, "image", content, PlaceholderRange(offset=offset, length=length), content
    )
