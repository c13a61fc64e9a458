"""Traces of real requests, as ``simple_offload.sizing.traces`` reads them, for the benches."""

from collections.abc import Sequence
from functools import cache
from random import Random

from simple_offload.sizing import traces
from simple_offload.sizing.traces import Request, Trace

read_trace = cache(traces.read_trace)


def sessions_in_order(trace: Trace, seed: int) -> Sequence[Sequence[Request]]:
    """Sessions of agents in another order, requests that come at their times as they are."""
    if not trace.has_sessions:
        return trace.sessions
    return Random(f"{seed} sessions").sample(trace.sessions, len(trace.sessions))
