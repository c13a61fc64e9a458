"""Traces of real requests, as ``simple_offload.sizing.traces`` reads them, for the benches."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

from examples.bench.command import CannotStart
from simple_offload.config import ConfigError
from simple_offload.sizing import traces
from simple_offload.sizing.traces import Request, Trace


@cache
def read_trace(path: Path) -> Trace:
    """Raises CannotStart, which names the file and the line or session, for anything else."""
    try:
        return traces.read_trace(path)
    except ConfigError as error:
        raise CannotStart(f"--traces: {error}") from None


def sessions_in_order(trace: Trace, seed: int) -> Sequence[Sequence[Request]]:
    """Sessions of agents in another order, requests that come at their times as they are."""
    if not trace.has_sessions:
        return trace.sessions
    return Random(f"{seed} sessions").sample(trace.sessions, len(trace.sessions))
