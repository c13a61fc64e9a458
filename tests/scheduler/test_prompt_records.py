"""Each prompt token that is computed has a reason, and each token is counted once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from simple_offload import metrics
from simple_offload.miss_reason import MissReason
from simple_offload.scheduler.tier.history import History
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, prompt

THREE = prompt(13)
"""Three blocks, and a token that is always computed."""
REPORT = {"report": True}
SMALL = {"num_device_blocks": 12, "num_host_blocks": 100}
"""A device that two other prompts fill."""


def counts(driver: Driver) -> dict[str, int]:
    """Computed tokens by reason, as metrics have them."""
    found = {
        each.label: driver.world.ledger(metrics.MISSED_TOKENS, each.label) for each in MissReason
    }
    return {label: int(count) for label, count in found.items() if count}


def missed(driver: Driver, name: str, tokens: Sequence[int], **options: Any) -> dict[str, int]:
    """Serve a request. Returns its computed tokens by reason."""
    before = counts(driver)
    driver.serve(name, list(tokens), **options)
    after = counts(driver)
    changes = {label: count - before.get(label, 0) for label, count in after.items()}
    return {label: count for label, count in changes.items() if count}


def test_a_new_prompt_and_its_end(drive: MakeDriver) -> None:
    driver = drive()
    assert missed(driver, "new", THREE, wishes=REPORT) == {"unseen": 12, "prompt_end": 1}
    assert missed(driver, "longer", [*THREE, *prompt(8, 1)]) == {"unseen": 8, "prompt_end": 1}
    assert missed(driver, "again", THREE, wishes=REPORT) == {"prompt_end": 1}
    assert driver.world.first_missing["new"] == {"token": 0, "reason": "unseen"}
    assert driver.world.first_missing["again"] == {"token": 12, "reason": "prompt_end"}
    assert driver.world.ledger.samples(metrics.UNSEEN_FROM) == [0, 12]
    sources = {s: driver.world.ledger(metrics.PROMPT_TOKENS, s) for s in ("device", "host")}
    assert sources == {"device": 24, "host": 0}


def test_the_log_has_the_first_hit(drive: MakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    """Not a prompt that the device has, and no later hit."""
    caplog.set_level("INFO")
    driver = drive(num_host_blocks=100)
    for name in ("new", "on the device"):
        driver.serve(name, THREE)
    assert "First hit" not in caplog.text
    for name in ("first", "second"):
        driver.empty_device_cache()
        driver.serve(name, THREE)
    line = "First hit: 12 of a prompt's 13 tokens were loaded instead of computed"
    assert caplog.text.count("First hit") == caplog.text.count(line) == 1


@pytest.mark.parametrize("lazy", [None, True, False])
def test_contents_that_the_tier_has_evicted(drive: MakeDriver, lazy: bool | None) -> None:
    """And how large it would have had to be: about twice as large for as many newer blocks."""
    driver = drive(**SMALL | {"num_host_blocks": 9}, lazy=lazy)
    driver.serve("first", THREE)
    driver.fill(6)
    assert missed(driver, "again", THREE, wishes=REPORT) == {"evicted": 12, "prompt_end": 1}
    first = driver.world.first_missing["again"]
    assert (first["token"], first["reason"]) == (0, "evicted")
    assert 1 < first["host_memory_factor"] < 5


@pytest.mark.parametrize("lazy", [None, True, False])
def test_contents_whose_copy_failed(drive: MakeDriver, lazy: bool | None) -> None:
    driver = drive(**SMALL, lazy=lazy)
    driver.start("first", THREE)
    for family in range(50, 52):
        driver.start(f"fill {family}", prompt(21, family))
    driver.step_until(lambda: driver.pending(STORE))
    while driver.pending(STORE):
        driver.copy(STORE, fail=True)
        driver.step()
    driver.run()
    driver.fill(3)
    assert missed(driver, "again", THREE)["not_stored"] == 12


@pytest.mark.parametrize("lazy", [None, False])
@pytest.mark.parametrize("wishes", [None, {"store": False}])
def test_contents_that_were_not_to_be_stored(
    drive: MakeDriver, lazy: bool | None, wishes: Any
) -> None:
    driver = drive(**SMALL, lazy=lazy, store_threshold=2 if wishes is None else 1)
    driver.serve("first", THREE, wishes=wishes)
    driver.fill(3)
    reason = "wish" if wishes else "below_threshold"
    assert missed(driver, "again", THREE) == {reason: 12, "prompt_end": 1}


def test_a_reset(drive: MakeDriver) -> None:
    driver = drive()
    driver.serve("first", THREE)
    assert driver.world.reset(tier=True)
    assert missed(driver, "again", THREE) == {"reset": 12, "prompt_end": 1}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_fails_is_not_found(
    drive: MakeDriver, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    driver = drive(num_host_blocks=100, load_failures=policy)
    driver.serve("first", THREE)
    driver.empty_device_cache()
    before = counts(driver)
    driver.start("loads", THREE, wishes=REPORT)
    driver.step()
    driver.copy(LOAD, fail=True)
    driver.run()
    assert counts(driver) == before | {"load_failed": 12, "prompt_end": 2}
    if policy == "recompute":  # else vLLM's reply is an error
        assert driver.world.first_missing["loads"] == {"token": 0, "reason": "load_failed"}
    assert driver.world.ledger(metrics.PROMPT_TOKENS, "host") == 0
    assert driver.world.ledger(metrics.LOOKUPS, "hit") == 0
    assert "First hit" not in caplog.text


def test_a_device_hit_inside_a_block(drive: MakeDriver) -> None:
    """vLLM asks for what follows whole blocks, and keeps the rest of its own hit."""
    driver = drive(windows=(0,), num_states=1, match_unit=2, num_device_blocks=60)
    driver.serve("first", prompt(19))
    assert missed(driver, "again", prompt(19), wishes=REPORT) == {"prompt_end": 1}
    assert driver.world.first_missing["again"] == {"token": 18, "reason": "prompt_end"}
    assert driver.world.ledger(metrics.PROMPT_TOKENS, "device") == 18


def test_a_window_that_is_missing(drive: MakeDriver) -> None:
    """The attention blocks of the shorter prompt are there, and not the window at its end."""
    driver = drive(windows=(0, 8))
    driver.serve("first", prompt(41))
    assert missed(driver, "shorter", [*prompt(20), 96])["boundary"] > 0


def test_the_same_tokens_with_another_salt(drive: MakeDriver) -> None:
    """Metrics tell. A reply would tell a client what others have sent."""
    driver = drive()
    driver.serve("first", THREE, salt="a")
    found = missed(driver, "again", THREE, salt="b", wishes=REPORT)
    assert found == {"other_key": 12, "prompt_end": 1}
    assert driver.world.first_missing["again"] == {"token": 0, "reason": "unseen"}


def test_a_request_that_skips_the_caches(drive: MakeDriver) -> None:
    driver = drive()
    driver.serve("first", THREE)
    before = counts(driver)
    driver.start("skips", THREE).skip_reading_prefix_cache = True
    driver.run()
    assert counts(driver) == before | {"not_asked": 13}
    assert driver.world.ledger(metrics.LOOKUPS) == 1


def test_history_keeps_the_last_reason() -> None:
    """Of the recent ones, and of those in its table."""
    history, keys = History(), _keys(3000)
    history.note(MissReason.EVICTED, keys[:20], now=1)
    history.note(MissReason.RESET, keys[:10], now=2)
    for _ in range(2):
        assert history.knows(keys[19:21])
        assert not history.knows(keys[20:30])
        reasons, times = history.find(keys[:21])
        assert reasons.tolist() == [MissReason.RESET] * 10 + [MissReason.EVICTED] * 10 + [0]
        assert times[:20].tolist() == [2] * 10 + [1] * 10
        history.note(MissReason.WISH, keys[30:])


def test_history_forgets_the_oldest() -> None:
    """A table of 2^19 entries: of a million, the last hundred thousand are known."""
    history = History()
    keys = _keys(1_000_000)
    for first in range(0, len(keys), 10_000):
        history.note(MissReason.EVICTED, keys[first : first + 10_000])
    newest, _ = history.find(keys[-100_000:])
    oldest, _ = history.find(keys[:100_000])
    assert (newest > 0).mean() > 0.97
    assert (oldest > 0).mean() < 0.2


def _keys(count: int) -> list[bytes]:
    """Keys whose bits look like those of hashes."""
    return [row.tobytes() for row in np.random.default_rng(0).integers(0, 2**63, (count, 4))]
