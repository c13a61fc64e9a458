"""An overload: prompts come in turns, and all of them together are too much for both caches."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from simple_offload import metrics
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, prompt
from tests.simulation.integrity import pretend_overload, reuse_of

BLOCKS = 8
"""Of each agent's prompt."""
SMALL = {"num_device_blocks": 20, "num_host_blocks": 6 * BLOCKS + 1, "max_num_batched_tokens": 8}
"""A device with room for two prompts, which it computes in five steps each. A tier with room for
six."""
SETTINGS = pytest.mark.parametrize("lazy", [None, False])
SHAPES = pytest.mark.parametrize(
    "shape",
    [
        {},
        {"lazy": True},
        {"lazy": False},
        {"kv_events": True},
        {"kv_events": True, "lazy": True},
        {"num_sub_blocks": 5},
        {"windows": (0, 8)},
    ],
    ids=str,
)
"""With KV events, blocks that a request hits are recorded once more."""


def serve(driver: Driver, agent: int, num_blocks: int = BLOCKS) -> int:
    """Serve a request with the agent's prompt. Returns how many blocks of it the tier had."""
    tokens = prompt(4 * num_blocks + 1, family=agent)
    num_found = driver.found(tokens) // 4
    driver.serve(f"{len(driver.world.finished)}", tokens)
    return num_found


def take_turns(driver: Driver, agents: Sequence[int], num_turns: int) -> list[int]:
    """Agents take turns. Returns how many blocks of each prompt the tier had in the last turn."""
    return [[serve(driver, agent) for agent in agents] for _ in range(num_turns)][-1]


# Twelve agents in turn: twice what the tier has room for


@SETTINGS
def test_a_part_of_the_prompts_stays(drive: MakeDriver, lazy: bool | None) -> None:
    """By last use, each would leave before its turn. Few requests are stored, each as a whole."""
    driver = drive(**SMALL, lazy=lazy)
    take_turns(driver, range(12), 4)
    num_stored = driver.num_stored
    assert take_turns(driver, range(12), 8).count(BLOCKS) >= 4
    assert driver.num_stored - num_stored < 8 * 12 * BLOCKS / 8
    assert driver.world.ledger(metrics.MISSED_TOKENS, "overload") > 0


@SETTINGS
def test_prompts_that_come_no_more_leave(drive: MakeDriver, lazy: bool | None) -> None:
    """Those of other agents take their place."""
    driver = drive(**SMALL, lazy=lazy)
    take_turns(driver, range(12), 8)
    assert sum(take_turns(driver, range(12, 24), 16)) >= 3 * BLOCKS


@SETTINGS
def test_requests_that_are_sent_twice_do_not_hide_it(drive: MakeDriver, lazy: bool | None) -> None:
    """The device has lost the first one when the second comes."""
    driver = drive(**SMALL, lazy=lazy)
    found = []
    for turn in range(12):
        serve(driver, 20 + turn, num_blocks=4)
        found = take_turns(driver, range(2), 1)
        serve(driver, 20 + turn, num_blocks=4)
        found += take_turns(driver, range(2, 12), 1)
    assert sum(found) >= 3 * BLOCKS


@SETTINGS
def test_when_it_has_ended_all_prompts_are_found(drive: MakeDriver, lazy: bool | None) -> None:
    driver = drive(**SMALL, lazy=lazy)
    take_turns(driver, range(12), 8)
    assert take_turns(driver, range(12, 17), 10) == [BLOCKS] * 5


@pytest.mark.parametrize("num_host_blocks", [84, 96, 108, 116])
def test_a_tier_of_a_model_with_several_groups_notices_it(
    drive: MakeDriver, num_host_blocks: int
) -> None:
    """It has what the device has, too. Each prompt takes ten blocks."""
    driver = drive(windows=(0, 8), num_device_blocks=40, num_host_blocks=num_host_blocks + 1)
    take_turns(driver, range(12), 3)
    for _ in range(6):
        assert sum(take_turns(driver, range(12), 1)) >= 3 * BLOCKS


@SETTINGS
def test_one_prompt_that_returns_late_is_no_overload(drive: MakeDriver, lazy: bool | None) -> None:
    """All of its blocks return at once, so they prove nothing."""
    driver = drive(**SMALL, lazy=lazy)
    for turn in range(3):
        take_turns(driver, [0, *range(1 + 12 * turn, 13 + 12 * turn)], 1)
    assert driver.world.ledger(metrics.SKIPPED, "overload") == 0


# An overload in which chance admits no request


def in_overload(drive: MakeDriver, **shape: Any) -> Driver:
    """A driver in an overload. Its tier has room for twenty prompts of ``fill``."""
    driver = drive(**{"num_device_blocks": 60, "num_host_blocks": 101} | shape)
    pretend_overload(driver.scheduler, admits_none=True)
    return driver


@pytest.mark.proves("I9")
@pytest.mark.parametrize("lazy", [None, True, False])
def test_while_the_tier_has_empty_blocks_all_is_stored(
    drive: MakeDriver, lazy: bool | None
) -> None:
    """What is bypassed later counts as skipped, and not as dropped."""
    driver = in_overload(drive, lazy=lazy)
    counted = driver.world.ledger
    while driver.num_kept < 100:
        assert counted(metrics.SKIPPED) == 0
        driver.fill(1, first=len(driver.world.finished))
    driver.fill(12, first=45)  # with lazy stores, the device still has others
    num_stored = driver.num_stored
    driver.fill(30, first=60)
    assert driver.num_stored == num_stored
    assert counted(metrics.SKIPPED, "overload") == counted(metrics.SKIPPED) == (12 + 30) * 5
    assert counted(metrics.DROPPED) == 0


@SHAPES
@pytest.mark.parametrize(
    ("admitted", "same_step"), [(None, False), (0, False), (1, False), (None, True)]
)
def test_what_two_requests_compute_one_after_the_other_is_stored(
    drive: MakeDriver,
    shape: dict[str, Any],
    admitted: int | None,
    same_step: bool,
) -> None:
    """The second one hits what the first one has computed, or computes in the same step.
    ``admitted``: the request that chance admits."""
    driver = in_overload(drive, **shape)
    driver.fill(40, first=0)
    reuse: Any = reuse_of(driver.scheduler)
    numbers = count()
    reuse.admits_next = lambda: next(numbers) == admitted
    driver.start("a", prompt(25, 60))
    if not same_step:
        driver.step()
    driver.start("b", [*prompt(24, 60), *prompt(9, 61)])
    driver.run()
    driver.fill(30, first=62)
    assert driver.found(prompt(25, 60)) >= 20
