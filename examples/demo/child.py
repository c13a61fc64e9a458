"""Running ``engine_run`` in a process of its own and listening to what it reports."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from examples.demo.plan import Plan

ROOT = Path(__file__).parents[2]
"""The directory that holds the packages ``examples`` and ``simple_offload``."""

STOP_DEADLINE = 20
"""Seconds a process may take to end once asked to, before it is killed."""

TAIL_LINES = 30


class RunFailed(Exception):
    """A run's process ended with an error. The text holds the end of its log."""

    def __init__(self, code: int, log: Path) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        super().__init__("\n".join([f"The engine process {how}. The end of {log}:", *tail]))
        self.code = code
        self.log = log


def engine_command(plan: Plan, model: Path, *, connector: bool) -> list[str]:
    """The command line of one run, less the file descriptor to report to."""
    command = [sys.executable, "-m", "examples.demo.engine_run"]
    command += ["--plan", json.dumps(plan.to_json()), "--model", str(model)]
    return [*command, "--connector"] if connector else command


def engine_environment(scratch: Path) -> dict[str, str]:
    """Environment of one run; what the engine leaves in temporary files goes to ``scratch``."""
    cores = str(len(os.sched_getaffinity(0)))
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "TMPDIR": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The engine runs eagerly, yet vLLM compiles its helpers for logprobs: that would take a
        # C++ compiler, and longer than the demo's first prefill.
        "TORCHDYNAMO_DISABLE": "1",
        # One process, so that the run is one thing to start, to time and to stop.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # An engine in one process serves with a single thread unless this names more.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", cores),
        # Spinning threads on cores that other processes want make every step ten times as long.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        # GiB that must be free; the plan then takes only the blocks it names.
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def listen(
    command: Sequence[str],
    environment: dict[str, str],
    log: Path,
    on_event: Callable[[dict[str, Any]], None],
) -> None:
    """Run ``command`` to its end and pass on every event it reports, as it comes.

    Its standard streams go to ``log``. Raises ``RunFailed`` if it fails. However this returns,
    the process and all it started are gone.
    """
    reports, write_end = os.pipe()
    with os.fdopen(reports) as lines:
        try:
            with log.open("wb") as log_file:
                process = subprocess.Popen(
                    [*command, "--results-fd", str(write_end)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    pass_fds=[write_end],
                    # Ctrl-C then reaches this process alone, which stops the other one once.
                    start_new_session=True,
                )
        finally:
            os.close(write_end)
        try:
            for line in lines:
                on_event(json.loads(line))
            code = process.wait()
        finally:
            _stop(process)
    if code != 0:
        raise RunFailed(code, log)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_DEADLINE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
