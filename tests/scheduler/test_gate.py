"""What vLLM is told of a request's hit: load it, load nothing, or ask again."""

import pytest
from vllm.v1.request import Request

from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, Driver, make_request, prompt

TOKENS = 41
"""Of a prompt: ten blocks, and a token of the next."""
NUM_BLOCKS = 10


def driver_with(drive: MakeDriver, num_prompts: int = 1, **shape: object) -> Driver:
    """A tier that has some prompts, and a device that has none."""
    shape = {"num_device_blocks": 121, "max_num_seqs": 16, "lazy": False} | shape
    driver = drive(num_host_blocks=300, max_model_len=100, max_num_batched_tokens=64, **shape)
    for family in range(num_prompts):
        driver.serve(f"first {family}", prompt(TOKENS, family))
    driver.empty_device_cache()
    return driver


# One load for one prefix


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_requests_with_one_prompt_share_its_load(drive: MakeDriver, async_scheduling: bool) -> None:
    driver = driver_with(drive, async_scheduling=async_scheduling)
    for number in range(8):
        driver.start(f"again {number}", prompt(TOKENS), max_tokens=8)
    driver.step(2)
    driver.start("later", prompt(TOKENS))
    driver.step()
    assert len(driver.pending(LOAD)) == 1
    num_held, _ = driver.num_held
    assert num_held == NUM_BLOCKS
    driver.run()
    assert driver.world.num_blocks_loaded == NUM_BLOCKS


def test_a_short_common_head_is_loaded_by_each(drive: MakeDriver) -> None:
    driver = driver_with(drive, 0)
    prompts = [[*prompt(12), *prompt(29, family)] for family in (1, 2)]
    for number, tokens in enumerate(prompts):
        driver.serve(f"first {number}", tokens)
    driver.empty_device_cache()
    for number, tokens in enumerate(prompts):
        driver.start(f"again {number}", tokens)
    driver.step()
    assert len(driver.pending(LOAD)) == 2
    driver.run()
    assert driver.world.num_blocks_loaded == 2 * NUM_BLOCKS


def test_few_requests_pass_one_that_waits_for_the_load_of_another(drive: MakeDriver) -> None:
    driver = driver_with(drive)
    driver.start("first", prompt(TOKENS))
    waiting = driver.start("second", prompt(TOKENS))
    num_passed = 0
    while len(driver.pending(LOAD)) < 2:
        driver.start(f"other {num_passed}", prompt(5, 20 + num_passed))
        driver.step()
        num_passed += 1
        assert num_passed < 20, "it waits for ever"
    assert num_passed >= 8
    assert not waiting.is_finished()
    driver.run()


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_without_that_load_the_request_goes_on(drive: MakeDriver, how: str) -> None:
    """It loads by itself, or finds what the other one computes after its failure."""
    driver = driver_with(drive)
    driver.start("first", prompt(TOKENS))
    driver.start("second", prompt(TOKENS))
    driver.step()
    if how == "abort":
        driver.world.abort("first")
        driver.step(2)
        assert len(driver.pending(LOAD)) == 2
    else:
        driver.copy(LOAD, fail=True)
    driver.run()
    assert len(driver.world.finished["second"][0]) == 1


# No room


def test_none_passes_a_request_that_has_no_room_beside_the_parked(drive: MakeDriver) -> None:
    """Though those behind it would have room, and more come in each step."""
    driver = driver_with(drive, 4, num_device_blocks=31)
    driver.start("parked", prompt(TOKENS))
    driver.step()
    assert len(driver.pending(LOAD)) == 1
    large = driver.start("large", [*prompt(TOKENS, 1), *prompt(99 - TOKENS, 50)][:95])
    behind: list[Request] = []
    for number in range(12):
        behind.append(driver.start(f"behind {number}", prompt(TOKENS, 2 + number % 2)))
        driver.step()
        assert not any(request.num_computed_tokens for request in behind)
    driver.copy_all()
    driver.step_until(lambda: large.num_computed_tokens)
    driver.run()


# KV from another server


def test_a_request_whose_prefill_is_elsewhere_gets_nothing_of_the_tier(drive: MakeDriver) -> None:
    """Another connector (MultiConnector) brings its KV from there. The tier is not searched, and
    keeps nothing for it."""
    driver = driver_with(drive)
    params: dict[str, object] = {"do_remote_prefill": True, "remote_engine_id": "p"}
    request = make_request("remote", prompt(TOKENS), extra_args={"kv_transfer_params": params})
    driver.scheduler.on_new_request(request)
    assert driver.found(prompt(TOKENS)) == 4 * NUM_BLOCKS
    assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    driver.step()
    assert driver.tier.num_reserved == 0
    params["do_remote_prefill"] = False  # as NixlConnector says once it has it
    params["do_remote_decode"] = True
    assert driver.scheduler.get_num_new_matched_tokens(request, 0) == (4 * NUM_BLOCKS, True)
    driver.scheduler.request_finished(request)


# Running requests


def test_loads_beside_a_full_device_preempt_no_running_request(drive: MakeDriver) -> None:
    """What is withheld from them comes back: vLLM waits for it (``has_pending_block_frees``)."""
    driver = driver_with(drive, 4, num_device_blocks=61, max_num_seqs=4, lazy=True)
    driver.fill(20, first=20)
    running = [driver.start(f"runs {n}", prompt(9, 10 + n), max_tokens=40) for n in range(3)]
    driver.step_until(lambda: all(request.num_output_tokens for request in running))
    for turn in range(12):
        driver.start(f"load {turn}", prompt(TOKENS, turn % 4))
        driver.step(3)
        driver.copy_all()
    driver.run()
    assert driver.world.num_blocks_loaded > 3 * NUM_BLOCKS
    assert sum(request.num_preemptions for request in running) == 0
