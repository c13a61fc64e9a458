"""Processes: starting one, listening to its events, stopping it with all that it started."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from examples.bench.command import RunFailed

ROOT = Path(__file__).resolve().parents[2]
"""The directory that holds the packages ``examples`` and ``simple_offload``."""
_LAYOUT = "VLLM_KV_CACHE_LAYOUT"

STOP_SECONDS = 30.0
"""A process may take this long to end before it is killed."""
TAIL_LINES = 30

Device = Literal["cuda", "cpu"]
Event = dict[str, Any]
Report = Callable[[Event], None]


def failure(text: str, log: Path) -> RunFailed:
    """An error with ``text`` and the end of ``log``."""
    tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return RunFailed("\n".join([f"{text}. The end of {log}:", *tail]))


def how_ended(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def engine_environment(device: Device, scratch: Path, **extra: str) -> dict[str, str]:
    """Environment of a process with a vLLM engine; its temporary files go to ``scratch``. Nothing
    is downloaded, unless ``extra`` has ``HF_HUB_OFFLINE="0"``."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        **{name: value for name, value in os.environ.items() if name != _LAYOUT},
        "PYTHONPATH": os.pathsep.join(path),
        "TMPDIR": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # For the endpoints that reset caches.
        "VLLM_SERVER_DEV_MODE": "1",
        # Greedy sampling needs no sampler, and FlashInfer's comes with vLLM on some hosts only.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **extra,
    }
    if device == "cpu":
        # GiB that must be free; a plan then takes only the blocks it names.
        variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
        # Spinning threads on cores that other processes want make every step ten times as long.
        variables.setdefault("OMP_WAIT_POLICY", "passive")
        # An engine in one process serves with a single thread unless this names more.
        variables.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return variables


def child_command(module: str, **arguments: Any) -> list[str]:
    """The command line of a module that calls ``run_child``. Arguments may be dataclasses."""
    return [sys.executable, "-m", module, json.dumps(to_jsonable_python(arguments))]


def start(
    command: Sequence[str], environment: Mapping[str, str], log: Path, **more: Any
) -> "subprocess.Popen[bytes]":
    """Start a process that leads a session, with its standard streams in ``log``. ``more`` is
    Popen's. ``environment`` is the whole one."""
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Ctrl-C then reaches this process alone, which stops the other one once.
            start_new_session=True,
            **more,
        )


def listen(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    on_event: Callable[[Event], None],
) -> None:
    """Run ``command`` to its end and pass on every event that it reports, as it comes.

    The child gets a file descriptor as its last argument, for events, one JSON object a line. Its
    standard streams go to ``log``. Raises RunFailed if it fails. However this returns, the process
    and all that it started are gone.
    """
    reports, write_end = os.pipe()
    with os.fdopen(reports) as lines:
        try:
            process = start([*command, str(write_end)], environment, log, pass_fds=[write_end])
        finally:
            os.close(write_end)
        try:
            for line in lines:
                on_event(json.loads(line))
            code = process.wait()
        finally:
            stop(process)
    if code != 0:
        raise failure(f"The process of {log.stem} ended: {how_ended(code)}", log)


def run_child(run: Callable[[dict[str, Any], Report], None]) -> None:
    """The main function of a child that ``listen`` starts: call ``run`` with the arguments of
    ``child_command`` and with a function that reports an event."""
    arguments, descriptor = json.loads(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    # So that the engine is shut down in order when the parent wants an end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with os.fdopen(descriptor, "w", buffering=1) as events:
        # A parent that is gone breaks this pipe, which ends an orphaned run.
        run(arguments, lambda event: print(json.dumps(event), file=events))


@contextmanager
def without_collection() -> Iterator[None]:
    """Import vLLM within this context. Its modules make millions of objects that stay: to look for
    garbage among them takes a third of the time, and seconds later on."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def stop(
    process: "subprocess.Popen[Any]", seconds: float = STOP_SECONDS, *, group: bool = False
) -> None:
    """End a process that leads its session, and all that it started. It is asked first, alone or
    with its whole ``group``."""
    try:
        if process.poll() is None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                (os.killpg if group else os.kill)(process.pid, signal.SIGTERM)
                process.wait(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
