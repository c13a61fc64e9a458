"""Blocks that are stored keep their place in the device's order of eviction."""

import pytest

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import make_request, prompt


@pytest.mark.parametrize("lazy", [None, True, False])
@pytest.mark.parametrize("num_host_blocks", [21, 200])
def test_the_device_keeps_the_prompts_of_late(
    drive: MakeDriver, lazy: bool | None, num_host_blocks: int
) -> None:
    driver = drive(lazy=lazy, num_device_blocks=31, num_host_blocks=num_host_blocks)
    driver.fill(10)
    coordinator = driver.world.scheduler.kv_cache_manager.coordinator
    kept = []
    for family in range(50, 60):
        request = make_request("looker", prompt(21, family))
        kept.append(coordinator.find_longest_cache_hit(request.block_hashes, 20)[1] // 4)
    assert kept == [0] * 4 + [kept[4]] + [5] * 5


def test_an_idle_engine_stores_all_that_there_is_room_for(drive: MakeDriver) -> None:
    driver = drive(
        max_num_batched_tokens=8, max_num_seqs=2, num_device_blocks=80, num_host_blocks=80
    )
    tokens = driver.serve("a", prompt(60), max_tokens=8)
    assert driver.num_kept == (len(tokens) - 1) // 4
