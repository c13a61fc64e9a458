"""Two engines at once, in child processes that tell each other by files how far they are."""

import os
import signal
import threading
import time
from itertools import count
from pathlib import Path

import tests.engine.random_weights  # noqa: F401 - vLLM's loaders have it from here on
from tests.engine.live import LiveEngine
from tests.engine.spec import EngineResult, EngineSpec
from tests.engine.workloads import shared_prefix_asks

_SECONDS = 120.0


def tell(file: Path) -> None:
    """Let the other one go on."""
    file.touch()


def wait_for(file: Path) -> None:
    """Until the other one has told. AssertionError if it does not."""
    deadline = time.monotonic() + _SECONDS
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} never came"
        time.sleep(0.02)


def write_until_killed(spec: EngineSpec, folder: Path) -> None:
    """Play the rounds of ``spec``, tell, and go on with other prompts until ``folder`` has "die".
    Then this process dies at once, whatever it is doing."""
    engine = LiveEngine(spec)
    for each in spec.rounds:
        engine.play(each.asks)
    tell(folder / "written")

    def die() -> None:
        wait_for(folder / "die")
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    for seed in count(100):
        engine.play(shared_prefix_asks("more", seed=seed))


def play_beside(spec: EngineSpec, folder: Path) -> EngineResult:
    """Start, tell, and play the rounds of ``spec`` once ``folder`` has "go"."""
    engine = LiveEngine(spec)
    tell(folder / "up")
    wait_for(folder / "go")
    result = EngineResult(started=True)
    for each in spec.rounds:
        engine.answers = {}
        engine.play(each.asks)
        result.rounds.append(engine.answers)
    engine.drain()
    result.left = engine.left()
    engine.shut_down()
    return result
