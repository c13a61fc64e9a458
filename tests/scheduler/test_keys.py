"""Keys: salt, LoRA adapter and pictures distinguish blocks of equal tokens."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, prompt
from tests.simulation.inputs import ADAPTERS, picture

PROMPT = prompt(24)
PICTURE_AT = 8
NUM_LOADED = 20
"""Tokens of ``PROMPT`` in a hit. The last token's block is always computed."""

CAT, DOG = ([picture(f"{animal} 4", PICTURE_AT, 4)] for animal in ("cat", "dog"))

KEYS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "salts": ({"salt": "red"}, {"salt": "blue"}, 0),
    "a salt and none": ({"salt": "red"}, {}, 0),
    "adapters": ({"adapter": ADAPTERS[0]}, {"adapter": ADAPTERS[1]}, 0),
    "an adapter and none": ({"adapter": ADAPTERS[0]}, {}, 0),
    "pictures": ({"pictures": CAT}, {"pictures": DOG}, PICTURE_AT),
    "a picture and none": ({"pictures": CAT}, {}, PICTURE_AT),
}
"""Two kinds of request with the same tokens, and the number of tokens that they may share."""


def ask(driver: Driver, request_id: str, key: Mapping[str, Any]) -> int:
    """Run ``PROMPT`` under ``key``. Returns the number of tokens loaded. The world checks every
    page that is read."""
    world = driver.world
    before = world.num_blocks_loaded
    world.add_request(request_id, PROMPT, 1, epoch=0, **({"salt": None} | dict(key)))
    driver.run()
    driver.empty_device_cache()
    return (world.num_blocks_loaded - before) * world.shape.block_size


@pytest.mark.proves("I8")
@pytest.mark.parametrize(("one", "other", "num_shared"), KEYS.values(), ids=KEYS)
def test_only_the_same_contents_are_found(
    drive: MakeDriver, one: dict[str, Any], other: dict[str, Any], num_shared: int
) -> None:
    driver = drive()
    assert ask(driver, "first", one) == 0
    assert ask(driver, "same", one) == NUM_LOADED
    assert ask(driver, "other", other) == num_shared
    assert ask(driver, "other again", other) == NUM_LOADED
    assert ask(driver, "same again", one) == NUM_LOADED
