"""NewlyAllocated: finds every block that leaves the device's free queue."""

from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from simple_offload.scheduler.policies.device_contents import NewlyAllocated
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, prompt
from tests.scheduler.test_lazy import ROOMY

Seen = list[tuple[set[int], set[int]]]


def watch(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """For each step from now on: ids of blocks that have left the queue, and ids of those found."""
    seen: Seen = []
    queue = driver.device_pool.free_block_queue
    on_step, free = NewlyAllocated.on_step, set[int]()

    def watched(self: NewlyAllocated, scheduled: SchedulerOutput) -> list[KVCacheBlock]:
        found = on_step(self, scheduled)
        left = free - {block.block_id for block in queue.get_all_free_blocks()}
        seen.append((left, {block.block_id for block in found}))
        return found

    step = driver.world.step

    def step_and_look(*arguments: Any, **keywords: Any) -> None:
        free.clear()
        free.update(block.block_id for block in queue.get_all_free_blocks())
        step(*arguments, **keywords)

    monkeypatch.setattr(NewlyAllocated, "on_step", watched)
    monkeypatch.setattr(driver.world, "step", step_and_look)
    return seen


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("windows", "num_states", "num_drafted"),
    [((0,), 0, 0), ((0, 8), 0, 0), ((0,), 1, 0), ((0,), 0, 3)],
    ids=str,
)
def test_blocks_that_leave_the_queue_are_found(
    drive: MakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    windows: tuple[int, ...],
    num_states: int,
    num_drafted: int,
    async_scheduling: bool,
) -> None:
    """Blocks leave for new requests and hits, for loads, and after a preemption."""
    num_groups = len(windows) + num_states
    driver = drive(
        **ROOMY | {"num_device_blocks": 20 * num_groups + 1, "max_num_seqs": 3},
        windows=windows,
        num_states=num_states,
        num_drafted=num_drafted,
        async_scheduling=async_scheduling,
    )
    seen = watch(driver, monkeypatch)
    requests: list[Request] = []
    for family in [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 2, 3, 9, 4]:
        requests.append(driver.start(f"{len(requests)}", prompt(21, family), max_tokens=16))
        driver.step()
        driver.copy_all()
    driver.drain()
    assert driver.world.num_blocks_loaded > 0
    assert any(request.num_preemptions for request in requests)
    for left, found in seen:
        assert left <= found
