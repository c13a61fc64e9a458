"""Runs engines in child processes with a deadline, and ends every process."""

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import tqdm

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 270.0
GRACE_SECONDS = 10.0
STACKS_SECONDS = 3.0
"""Time for a stuck child to write its stacks."""
LOG_TAIL_CHARACTERS = 6000


class EngineJobFailed(AssertionError):
    """The child failed, did not end, or left processes behind."""


def engine_environment(**extra: str) -> dict[str, str]:
    """The environment of a process that runs vLLM on CPU with a model from this disk."""
    environment = dict(os.environ)
    environment |= {
        "PYTHONPATH": os.pathsep.join(
            part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part
        ),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Ranks would be bound to a NUMA node's cores each, and there may be one node only.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Greedy sampling needs none, and it comes with vLLM on some GPU hosts only.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # vLLM compiles a few small functions even with enforce_eager: ten seconds per process.
        "TORCHDYNAMO_DISABLE": "1",
    }
    return environment | extra


def run_child(
    directory: Path,
    module: str,
    *arguments: str | Path,
    deadline: float = DEADLINE_SECONDS,
    **environment: str,
) -> Path:
    """Run ``python -m module arguments`` to its end; return its log, ``directory``/engine.log.

    Raises EngineJobFailed, with the end of the log, if the child fails, runs for more than
    ``deadline`` seconds or leaves a process behind. No process of it is alive on return.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log_path = directory / "engine.log"
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            env=engine_environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = wait_for(child, deadline)
    finally:
        left = processes_left(child.pid, within=GRACE_SECONDS if child.returncode == 0 else 0)
        kill_session(child.pid)
        child.wait()
        _remove_rendezvous_files(log_path)
    if status is None:
        raise EngineJobFailed(f"no end within {deadline:.0f} s\n{log_tail(log_path)}")
    if status != 0 or left:
        raise EngineJobFailed(
            f"the child ended with status {status}, processes left: {left}\n{log_tail(log_path)}"
        )
    return log_path


def prepare_child() -> None:
    """Prepare this process for ``wait_for`` and for counts of its threads."""
    # Not by the clock: to walk the stacks of running threads may crash the process (seen with
    # Python 3.12 inside compiled code).
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    tqdm.tqdm.monitor_interval = 0  # else the first progress bar leaves a thread behind


def wait_for(child: "subprocess.Popen[bytes]", deadline: float) -> int | None:
    """The child's exit status; None after ``deadline`` seconds, with its stacks in its log."""
    try:
        return child.wait(timeout=deadline)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGUSR1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=STACKS_SECONDS)
    return None


def processes_left(session: int, *, within: float) -> list[str]:
    """Processes of a session still alive ``within`` seconds from now, other than its leader."""
    deadline = time.monotonic() + within
    while True:
        left = [_describe(process) for process in _session_members(session)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.1)


def kill_session(session: int) -> None:
    """End every process of a session, its leader included. Does not wait for zombies."""
    for process in [*_session_members(session), *_by_id(session)]:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


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


def _session_members(session: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        try:
            in_session = process.pid != session and os.getsid(process.pid) == session
            if in_session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return members


def _by_id(pid: int) -> Iterable[psutil.Process]:
    try:
        return [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return str(process.pid)
