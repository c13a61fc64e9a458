"""Models with groups of every kind: the tier finds what the device would."""

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
    """At least: with vLLM's default retention, the device does not keep what a request's end
    needs of a sliding window; nor a block that chained drafters finish as the request ends."""
    exact = retention is None and not model.get("chained")
    driver = drive(num_device_blocks=200, num_host_blocks=200, retention=retention, **model)
    tokens = driver.say("a", prompt(35), max_tokens=12)
    coordinator = driver.world.scheduler.kv_cache_manager.coordinator
    hits = set()
    for length in range(1, len(tokens)):
        request = make_request("looker", tokens[:length], hash_size=driver.world.shape.hash_size)
        _, on_device, _ = coordinator.find_longest_cache_hit(request.block_hashes, length - 1)
        on_host = driver.tier.lookup.hit(request.block_hashes, 0, length - 1).num_tokens
        assert on_host == on_device if exact else on_host >= on_device
        hits.add(on_device)
    assert len(hits) > 1


@pytest.mark.parametrize("windows", [(), (0,), (8,)], ids=str)
def test_a_drafter_leaves_the_last_block_to_be_computed(
    drive: MakeDriver, windows: tuple[int, ...]
) -> None:
    """Its last token has seen one that may differ in the next request."""
    driver = drive(windows=windows, draft=True, num_device_blocks=90, num_host_blocks=90)
    driver.say("a", prompt(34))
    driver.forget_device()
    assert driver.found(prompt(34)) == 28
    driver.say("b", prompt(34))
    assert driver.world.num_blocks_loaded == 7 + sum(2 if window else 7 for window in windows)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_a_request_s_keys(drive: MakeDriver, num_parts: int) -> None:
    """One block's, or one part's, is the key of the prefix that ends with it."""
    driver = drive(
        num_device_blocks=200,
        num_host_blocks=80,
        num_parts=num_parts,
        windows=(0, 8),
        scales=(2, 1),
    )
    groups = driver.tier.groups
    request = make_request("r", prompt(67), hash_size=groups.hash_block_size)
    hashes = request.block_hashes
    for group in groups.ids:
        size, part_size = groups.block_sizes[group], groups.block_sizes[group] // num_parts
        ends = range(size, 67 + 1, size)
        assert groups.num_keys(hashes, group) == len(ends)
        keys = [groups.key_at(hashes, group, end) for end in ends]
        assert groups.keys(hashes, group) == keys
        assert groups.keys(hashes, group, 1, 3) == keys[1:3]
        assert all(groups.is_chained(key) == (group == 0) for key in keys)
        parts = [groups.key_at(hashes, group, end) for end in range(part_size, 67 + 1, part_size)]
        assert groups.part_keys(hashes, group, 1, 3) == parts[num_parts : 3 * num_parts]
    end = driver.world.shape.scheduler_block_size * (num_parts + 1)
    assert groups.start_of(end) == (end // (num_parts + 1) * num_parts if num_parts > 1 else end)
