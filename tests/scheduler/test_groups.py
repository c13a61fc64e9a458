"""Models with groups of every kind: a host hit is as long as a device hit."""

from typing import Any

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import make_request, prompt
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


@pytest.mark.parametrize("windows", [(), (0,), (8,)], ids=str)
def test_a_drafter_leaves_the_last_block_to_be_computed(
    drive: MakeDriver, windows: tuple[int, ...]
) -> None:
    """The drafter's last entry depends on the next token, which may differ in the next request."""
    driver = drive(windows=windows, draft=True, num_device_blocks=90, num_host_blocks=90)
    driver.serve("a", prompt(34))
    driver.empty_device_cache()
    assert driver.found(prompt(34)) == 28
    driver.serve("b", prompt(34))
    assert driver.world.num_blocks_loaded == 7 + sum(2 if window else 7 for window in windows)
