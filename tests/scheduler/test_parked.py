"""Requests that are parked with device blocks, beside requests that get none: vLLM comes to an end.

Without ``Parked`` each of these scenes stands still for some size of the device: the last on the
pinned vLLM, all on vLLM 0.30, where they run too (tests/vllm_versions).
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from simple_offload import metrics
from simple_offload.scheduler.parked import Parked
from simple_offload.vllm_compat import vllm_version
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, make_request, prompt
from tests.simulation.integrity import parked_of

LARGE = 32
"""Tokens of a prompt. 10 to 12 device blocks are room for it, but not beside a parked request."""


def park(driver: Driver, *names: str, num_tokens: int = 20) -> None:
    """Requests wait for loads, whose copies have ended. vLLM does not know yet."""
    for family, name in enumerate(names):
        driver.start(name, prompt(num_tokens, family))
    driver.step()
    assert driver.pending(LOAD), "no request is parked"
    while driver.pending(LOAD):
        driver.copy(LOAD)


def windows_driver(drive: MakeDriver, num_device_blocks: int) -> Driver:
    """Behind a loaded prefix, vLLM reserves too few blocks for the groups with windows."""
    shape = {"windows": (0, 4, 4), "max_num_batched_tokens": 8}
    driver = driver_with(drive, 2, num_device_blocks=num_device_blocks, **shape)
    park(driver, "one", "two", num_tokens=24)
    return driver


def driver_with(drive: MakeDriver, num_prompts: int, **shape: Any) -> Driver:
    """A tier that has the first prompts, and a device that has none."""
    driver = drive(num_host_blocks=100, max_model_len=60, lazy=False, **shape)
    for family in range(num_prompts):
        driver.serve(f"first {family}", prompt(20, family))
    driver.empty_device_cache()
    return driver


@pytest.mark.proves("I11")
@pytest.mark.parametrize("num_device_blocks", range(13, 23))
def test_drafts_of_parked_requests_have_room(drive: MakeDriver, num_device_blocks: int) -> None:
    """vllm#57104: both have their prompt's blocks, and neither gets those of its drafts."""
    shape = {"num_drafted": 3, "draft": True, "num_device_blocks": num_device_blocks}
    driver = driver_with(drive, 2, **shape)
    park(driver, "one", "two")
    driver.run()


def driver_with_large_request(drive: MakeDriver, num_device_blocks: int) -> Driver:
    """It came first, and has waited for its grammar. A parked request has the blocks it needs."""
    driver = driver_with(drive, 1, num_device_blocks=num_device_blocks)
    large = driver.start("large", prompt(LARGE, 7))
    large.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    large.structured_output_request = grammar = SimpleNamespace(grammar=None)  # type: ignore[assignment]
    park(driver, "parked")
    driver.step()
    grammar.grammar = "compiled"
    driver.step()
    large.structured_output_request = None
    return driver


@pytest.mark.proves("I11")
@pytest.mark.parametrize("num_device_blocks", range(10, 13))
def test_a_large_request_without_blocks_lets_a_parked_one_pass(
    drive: MakeDriver, num_device_blocks: int
) -> None:
    """vllm#57841."""
    driver_with_large_request(drive, num_device_blocks).run()


@pytest.mark.proves("I11")
@pytest.mark.parametrize("num_device_blocks", range(10, 20))
def test_a_large_request_of_higher_priority_lets_a_parked_one_pass(
    drive: MakeDriver, num_device_blocks: int
) -> None:
    """vllm#45388."""
    driver = driver_with(drive, 2, num_device_blocks=num_device_blocks, priority=True)
    park(driver, "parked")
    large = driver.start("large", prompt(LARGE, 7))
    assert large.priority < driver.world.requests["parked"].priority
    driver.run()


@pytest.mark.proves("I11")
@pytest.mark.parametrize("num_device_blocks", range(16, 26))
def test_windows_of_parked_requests_have_room(drive: MakeDriver, num_device_blocks: int) -> None:
    windows_driver(drive, num_device_blocks).run()


@pytest.mark.proves("I11")
def test_a_load_that_has_no_room_on_an_empty_device_is_not_offered_again(
    drive: MakeDriver,
) -> None:
    """vLLM keeps some blocks free beside a load, for drafts. Here a prompt has room without."""
    driver = drive(
        num_drafted=7, num_device_blocks=15, max_model_len=55, num_host_blocks=100, lazy=False
    )
    driver.serve("first", prompt(53))
    driver.empty_device_cache()
    driver.serve("second", prompt(53), wishes={"report": True})
    if vllm_version() < (0, 31):
        return  # it keeps none there
    assert driver.world.first_missing["second"] == {"token": 0, "reason": "no_room"}
    assert driver.world.ledger(metrics.MISSED_TOKENS, "no_room") == 52


@pytest.mark.proves("I11")
def test_a_parked_request_gives_back_what_a_session_needs(drive: MakeDriver) -> None:
    """A streaming-input session has more input. Its blocks and those of a parked request are all
    but three of the device's. vLLM stops at the session, and never comes to the parked request
    behind it."""
    driver = driver_with(drive, 1, num_device_blocks=13)
    driver.world.add_request("session", prompt(18, 7), 2, None, 0, resumable=True)
    driver.step_until(lambda: driver.world.is_waiting_for_input("session"))
    park(driver, "parked")
    driver.copy_all()
    driver.world.resume("session", prompt(20, 8), 2)
    driver.step_until(lambda: driver.world.is_waiting_for_input("session"))
    driver.world.resume("session", [], 1)
    driver.run()
    assert driver.world.num_blocks_loaded == 4, "the parked request was loaded twice"


@pytest.mark.parametrize("driver_with_scene", [windows_driver, driver_with_large_request])
def test_without_both_rules_parked_requests_stand_still(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch, driver_with_scene: Any
) -> None:
    """A control. The second scene stands still on vLLM 0.30 only."""
    monkeypatch.setattr(Parked, "has_room", lambda parked, request: True)
    monkeypatch.setattr(Parked, "give_back", lambda parked: [])
    if driver_with_scene is driver_with_large_request and vllm_version() > (0, 30):
        pytest.skip("vLLM 0.31 comes to parked requests first")
    driver = driver_with_scene(drive, 16 if driver_with_scene is windows_driver else 12)
    with pytest.raises(AssertionError, match="do not end"):
        driver.drain()


def test_a_pause_is_no_standstill(drive: MakeDriver) -> None:
    """vLLM goes on with steps, without tokens, for a store of a request that runs after it."""
    driver = driver_with(drive, 1, num_device_blocks=60)
    driver.start("runs", prompt(LARGE + 1, family=9), max_tokens=20)
    driver.step_until(lambda: driver.pending(STORE))
    park(driver, "parked")
    driver.world.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not driver.world.connector.has_pending_block_frees()
    driver.step(8)
    driver.world.scheduler.set_pause_state(PauseState.UNPAUSED)
    driver.run()
    assert driver.world.ledger(metrics.PROMPT_TOKENS, "host") == 16


def test_aborts_during_a_pause_are_no_standstill(drive: MakeDriver) -> None:
    """vLLM makes a step without tokens for each."""
    driver = driver_with(drive, 1, num_device_blocks=60)
    park(driver, "parked")
    waiting = [driver.start(f"waits {n}", prompt(LARGE, 9 + n)) for n in range(8)]
    driver.world.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for request in waiting:
        driver.world.abort(request.request_id)
        driver.step()
    driver.world.scheduler.set_pause_state(PauseState.UNPAUSED)
    driver.run()
    assert driver.world.ledger(metrics.PROMPT_TOKENS, "host") == 16


def test_a_fetch_during_a_pause_is_no_standstill(drive: MakeDriver) -> None:
    """vLLM makes steps without tokens until it has ended."""
    driver = driver_with(drive, 1, num_device_blocks=60, second_tier=True)
    disk = driver.world.disk
    disk.finish()
    driver.tier.reset()
    driver.serve("second", prompt(20, 1))
    driver.empty_device_cache()
    for family, name in enumerate(["fetches", "parked"]):
        driver.start(name, prompt(20, family))
    driver.step()
    assert disk.tier is not None
    disk.tier.answer(random.Random(0), 1.0)
    driver.step()
    driver.copy_all()
    driver.world.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(4):
        assert driver.world.has_work
        driver.step()
    driver.world.scheduler.set_pause_state(PauseState.UNPAUSED)
    disk.finish()
    driver.run()
    assert driver.world.ledger(metrics.PROMPT_TOKENS, "host") == 16


def test_a_request_that_has_grown_needs_more_room(drive: MakeDriver) -> None:
    """It has asked before, when it was shorter."""
    parked = parked_of(drive(num_device_blocks=13).scheduler)
    short, long = (make_request("grows", prompt(size)) for size in (16, 32))
    other = make_request("other", prompt(16))
    parked.add(other)
    assert parked.has_room(short)
    parked.remove("other")
    assert parked.has_room(long)
    parked.add(long)
    assert not parked.has_room(make_request("third", prompt(24)))
