"""Models with groups of every kind: the length of a hit, and the blocks that it loads."""

from typing import Any

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, make_request, prompt
from tests.simulation.groups import MODELS


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("retention", [0, None])
def test_a_host_hit_is_as_long_as_a_device_hit(
    drive: MakeDriver, model: dict[str, Any], retention: int | None
) -> None:
    """A host hit may be longer. With vLLM's default retention, the device drops window blocks that
    a request's end needs. It also drops a block that chained drafters complete at the request's
    end."""
    exact = retention is None and not model.get("chained")
    driver = drive(num_device_blocks=200, num_host_blocks=200, retention=retention, **model)
    tokens = driver.serve("a", prompt(35), max_tokens=12)
    coordinator = driver.world.scheduler.kv_cache_manager.coordinator
    hits = set()
    for length in range(1, len(tokens)):
        request = make_request("looker", tokens[:length], hash_size=driver.world.shape.hash_size)
        _, on_device, _ = coordinator.find_longest_cache_hit(request.block_hashes, length - 1)
        on_host = driver.tier.lookup(request.block_hashes, 0, length - 1).num_tokens
        assert on_host == on_device if exact else on_host >= on_device
        hits.add(on_device)
    assert len(hits) > 1


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("shape", "num_blocks"),
    [
        ({"windows": (0,)}, 8),
        ({"windows": (8,)}, 2),
        ({"windows": (5,)}, 1),
        ({"windows": (9,)}, 2),
        ({"windows": (10,)}, 3),
        ({"windows": (0, 8)}, 8 + 2),
        ({"windows": (0, 6, 6)}, 8 + 2 + 2),
        ({"windows": (12, 5)}, 3 + 1),
        ({"windows": (0, 64)}, 8 + 8),
        ({"windows": (), "num_states": 1}, 1),
        ({"windows": (8,), "num_states": 2}, 2 + 2),
        ({"windows": (0, 8), "num_states": 2}, 8 + 2 + 2),
        ({"windows": (), "draft": True}, 7),
        ({"windows": (0,), "draft": True}, 7 + 7),
        ({"windows": (8,), "draft": True}, 2 + 7),
    ],
    ids=str,
)
def test_a_hit_loads_the_blocks_that_attention_reads(
    drive: MakeDriver, shape: dict[str, Any], num_blocks: int, async_scheduling: bool
) -> None:
    """One state holds all of a prefix. A drafter leaves the last block to be computed: its last
    entry depends on the next token, which may differ in the next request."""
    driver = drive(
        num_device_blocks=90, num_host_blocks=90, async_scheduling=async_scheduling, **shape
    )
    driver.serve("before", prompt(33), max_tokens=5)
    driver.empty_device_cache()
    driver.start("a", prompt(33), max_tokens=5)
    driver.step()
    (load,) = driver.pending(LOAD)
    assert len(load.device_blocks) == num_blocks
    driver.run()
    assert driver.world.finished["a"] == driver.world.finished["before"]
