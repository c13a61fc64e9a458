"""Calls functions in child processes with a deadline, and ends every process."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import pkgutil
import re
import signal
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import tqdm

from examples.bench import child
from examples.bench.child import without_collection

DEADLINE_SECONDS = 270.0
GRACE_SECONDS = 10.0
STACKS_SECONDS = 3.0
"""Time for a stuck child to write its stacks."""
LOG_TAIL_CHARACTERS = 6000


class EngineJobFailed(AssertionError):
    """The child failed, did not end, or left processes behind."""


def engine_environment(**extra: str) -> dict[str, str]:
    """The environment of a process that runs vLLM on CPU with a model from this disk."""
    usual = {
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM compiles a few small functions even with enforce_eager: ten seconds per process.
        "TORCHDYNAMO_DISABLE": "1",
    }
    return child.engine_environment("cpu", Path(tempfile.gettempdir()), **usual | extra)


def run_child(
    directory: Path,
    function: str,
    *arguments: object,
    deadline: float = DEADLINE_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Call ``function`` ("module:name") in a child process; return its result.

    Raises EngineJobFailed, with the end of the log, if the child fails, runs for more than
    ``deadline`` seconds or leaves a process behind. No process of it is alive on return. The
    child's log is ``directory``/engine.log.
    """
    directory.mkdir(parents=True, exist_ok=True)
    job_path, log_path = directory / "job.pickle", directory / "engine.log"
    job_path.write_bytes(pickle.dumps(arguments))
    context: Any = multiprocessing.get_context("spawn" if environment else _usual_start())
    process = context.Process(target=main, args=(function, job_path, log_path))
    with patch.dict(os.environ, engine_environment(**environment or {}), clear=True):
        process.start()
    try:
        process.join(deadline)
        status: int | None = process.exitcode
        if status is None:
            os.kill(process.pid, signal.SIGUSR1)
            process.join(STACKS_SECONDS)
    finally:
        left = processes_left(process.pid, within=GRACE_SECONDS if process.exitcode == 0 else 0)
        process.kill()
        kill_session(process.pid)
        process.join()
        _remove_rendezvous_files(log_path)
    if status != 0 or left:
        end = f"no end within {deadline:.0f} s" if status is None else f"status {status}"
        raise EngineJobFailed(f"{end}, processes left: {left}\n{log_tail(log_path)}")
    return pickle.loads(job_path.with_suffix(".result").read_bytes())


def processes_left(session: int, *, within: float) -> list[str]:
    """Processes of a session still alive ``within`` seconds from now, other than its leader."""
    deadline = time.monotonic() + within
    while True:
        left = [
            f"{process.pid} {' '.join(process.info['cmdline'] or ())[:200]}"
            for process in _processes_of(session)
            if process.pid != session and process.info["status"] != psutil.STATUS_ZOMBIE
        ]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.1)


def kill_session(session: int) -> None:
    """End every process of a session, its leader included. Does not wait for zombies."""
    for process in _processes_of(session):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def log_tail(path: Path | None) -> str:
    """The end of a log, for the message of an assertion."""
    if path is None:
        return ""
    text = path.read_text(errors="replace")
    return f"--- end of {path}:\n{text[-LOG_TAIL_CHARACTERS:]}"


def _remove_rendezvous_files(log_path: Path) -> None:
    """Remove the files of vLLM's CPU communicator: it leaves its shared memory and, sometimes, the
    file that names the group, with a connector or without."""
    for group in set(re.findall(r"vllm_dist_[0-9a-f]{32}", log_path.read_text(errors="replace"))):
        for directory in (Path("/dev/shm"), Path(tempfile.gettempdir())):
            for path in directory.glob(f"{group}*"):
                path.unlink(missing_ok=True)


def _processes_of(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session:
                found.append(process)
    return found


def _usual_start() -> str:
    """How a process starts. On CPU it is forked from one that has imported vLLM, once: that takes
    most of a short test's time."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "spawn"
    multiprocessing.set_forkserver_preload(["tests.engine.loaded"])
    with patch.dict(os.environ, engine_environment(), clear=True):
        forkserver.ensure_running()
    return "forkserver"


def main(function: str, job_path: Path, log_path: Path) -> None:
    """The child process of ``run_child``. Writes its stacks on SIGUSR1."""
    os.setsid()
    with log_path.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Not by the clock: to walk the stacks of running threads may crash the process (seen with
    # Python 3.12 inside compiled code).
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    tqdm.tqdm.monitor_interval = 0  # else the first progress bar leaves a thread behind
    with without_collection():
        call, arguments = pkgutil.resolve_name(function), pickle.loads(job_path.read_bytes())
    # vLLM thaws all objects at each engine's end, and looks for garbage among them: seconds.
    with patch("gc.freeze"), patch("gc.unfreeze"):
        result = call(*arguments)
    job_path.with_suffix(".result").write_bytes(pickle.dumps(result))
