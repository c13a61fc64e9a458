"""EvictionHorizon: as far as needed, and no farther where that is costly."""

import pytest
from vllm.config import KVTransferConfig

from simple_offload.scheduler.policies.free_queue_walk import EvictionHorizon, StepLimits
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import prompt
from tests.scheduler.test_lazy import ROOMY, policy_of
from tests.simulation.shape import Shape
from tests.simulation.vllm_config import make_vllm_config

LIMITS = StepLimits(per_step=10, num_steps=3, longest=50, reserve=2)
MOST = 3 * 10 + 50

NONE = 0
"""Empty host blocks: the tier is full."""


def allocate(horizon: EvictionHorizon, *counts: int) -> None:
    """Steps that allocate ``counts`` blocks."""
    for count in counts:
        horizon.on_allocated(count)
        horizon.on_step()


@pytest.mark.parametrize("windows", [(0,), (0, 8)], ids=str)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_limits(windows: tuple[int, ...], async_scheduling: bool) -> None:
    transfer = KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both")
    shape = Shape(
        max_num_batched_tokens=32,
        max_num_seqs=6,
        max_model_len=80,
        async_scheduling=async_scheduling,
    )
    groups, num_steps = len(windows), 4 if async_scheduling else 3
    limits = StepLimits.from_config(make_vllm_config(shape, transfer), [4] * groups)
    assert limits == (groups * (8 + 6), num_steps, groups * 20, groups * 6)


def test_the_largest_possible_need_if_it_is_small_beside_the_device() -> None:
    assert EvictionHorizon(LIMITS, 3 * MOST).num_blocks(NONE) == MOST


def test_no_more_than_a_quarter_of_the_device_for_a_long_request() -> None:
    limits = LIMITS._replace(per_step=1, longest=10_000)
    assert EvictionHorizon(limits, 100).num_blocks(NONE) == 3 + 25


def test_otherwise_the_largest_recent_need() -> None:
    horizon = EvictionHorizon(LIMITS, 160)
    assert horizon.num_blocks(NONE) == 10
    allocate(horizon, 2, 7, 5, 6, 1, 0, 2)
    assert horizon.num_blocks(NONE) == 7 + 5 + 6


def test_an_actual_need_may_exceed_the_largest_possible_need() -> None:
    """Several long loads in one step."""
    horizon = EvictionHorizon(LIMITS, 3 * MOST)
    allocate(horizon, 2 * MOST)
    assert horizon.num_blocks(NONE) == 2 * MOST


def test_a_need_counts_until_the_device_has_been_filled_twice() -> None:
    horizon = EvictionHorizon(LIMITS, 160)
    allocate(horizon, 40, *[2] * 59)  # 158
    for _ in range(2):
        assert horizon.num_blocks(NONE) == 44
        allocate(horizon, *[2] * 80)
    assert horizon.num_blocks(NONE) == 10


@pytest.mark.parametrize(
    ("num_empty", "expected"), [(40, 12), (80, 20), (4 * MOST, MOST), (10_000, MOST)]
)
def test_farther_while_the_tier_has_room_to_spare(num_empty: int, expected: int) -> None:
    assert EvictionHorizon(LIMITS, 200).num_blocks(num_empty) == expected


@pytest.mark.parametrize("windows", [(0,), (8,)], ids=str)
def test_blocks_found_on_the_device_do_not_count(
    drive: MakeDriver, windows: tuple[int, ...]
) -> None:
    driver = drive(**ROOMY | {"windows": windows, "max_num_batched_tokens": 64})
    horizon = policy_of(driver)._walk._horizon
    history = driver.serve("a", prompt(30))
    assert horizon._peak == 8
    driver.serve("b", [*history, *prompt(2, family=1)])
    assert horizon._num_allocated == 8 + 2
