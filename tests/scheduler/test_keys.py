"""Keys: salt, LoRA adapter and pictures distinguish blocks of equal tokens."""

from collections.abc import Mapping
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, make_request, prompt
from tests.simulation.identity import Story
from tests.simulation.router import LORA_PATH

PROMPT = prompt(24)
PICTURE_AT = 8
NUM_LOADED = 20
"""Tokens of ``PROMPT`` in a hit. The last token's block is always computed."""


def adapter(name: str) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=len(name), lora_path=LORA_PATH)


def picture(content: str) -> MultiModalFeatureSpec:
    where = PlaceholderRange(offset=PICTURE_AT, length=4)
    return MultiModalFeatureSpec(None, "image", content, where, content)


KEYS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "salts": ({"salt": "red"}, {"salt": "blue"}, 0),
    "a salt and none": ({"salt": "red"}, {}, 0),
    "adapters": ({"lora": adapter("one")}, {"lora": adapter("other")}, 0),
    "an adapter and none": ({"lora": adapter("one")}, {}, 0),
    "pictures": ({"pictures": [picture("cat")]}, {"pictures": [picture("dog")]}, PICTURE_AT),
    "a picture and none": ({"pictures": [picture("cat")]}, {}, PICTURE_AT),
}
"""Two kinds of request with the same tokens, and the number of tokens that they may share."""


def ask(driver: Driver, request_id: str, key: Mapping[str, Any]) -> int:
    """Run ``PROMPT`` under ``key``. Returns the number of tokens loaded. The world checks every
    page that is read."""
    plain = make_request(request_id, PROMPT, max_tokens=1)
    request = Request(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        sampling_params=plain.sampling_params,
        pooling_params=None,
        cache_salt=key.get("salt"),
        lora_request=key.get("lora"),
        mm_features=key.get("pictures"),
        block_hasher=plain._block_hasher,
    )
    world = driver.world
    world.stories[request_id] = Story(PROMPT, 1, _what_pages_depend_on(key), 0)
    world.requests[request_id] = request
    world.scheduler.max_num_encoder_input_tokens = 16
    world.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=16)
    world.scheduler.add_request(request)
    before = world.num_blocks_loaded
    driver.run()
    world.check_finished(request_id)
    driver.empty_device_cache()
    return (world.num_blocks_loaded - before) * world.shape.block_size


def _what_pages_depend_on(key: Mapping[str, Any]) -> str | None:
    return str(key) if key and "pictures" not in key else None


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
