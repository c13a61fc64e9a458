"""Work: the cost of calls, in counts that no other work on the machine changes.

Lines of Python code show each loop in Python. Bytes show what C code makes within a line:
``[None] * n``, ``set(blocks)``, ``keys | others``.

Neither shows C code that only reads: ``key in blocks``, ``sum(flags)``, ``keys.isdisjoint(ids)``.
Of copies that a C loop makes and frees one by one within a line, only the largest counts:
``sum(map(len, map(set, tables)))``.
"""

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple


class Work(NamedTuple):
    """The cost of calls."""

    lines: float
    """Executed lines of Python code, including vLLM's. Each turn of a loop counts, also within a
    line."""
    allocated: float
    """Peak growth of memory within a line in bytes, summed over all lines. Memory that the same
    line frees again counts. About 64 bytes a line are the counter's own."""

    def over(self, count: int) -> "Work":
        """The mean of ``count`` times the work."""
        return Work(self.lines / count, self.allocated / count)


class WorkCounter:
    """Sums up the work of the calls made through ``count``, while ``counting``."""

    def __init__(self) -> None:
        self._lines = self._allocated = 0
        self._is_counting = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count from zero. The garbage collector pauses: chance decides which call it meets."""
        assert not tracemalloc.is_tracing(), "another tracer would reset the peak of memory"
        self._lines = self._allocated = 0
        was_enabled = gc.isenabled()
        gc.disable()
        tracemalloc.start()
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False
            tracemalloc.stop()
            if was_enabled:
                gc.enable()

    @property
    def work(self) -> Work:
        """The work since the last start of ``counting``."""
        return Work(self._lines, self._allocated)

    def count(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Make a call and return its result."""
        if not self._is_counting:
            return call(*arguments, **keywords)
        lines = allocated = memory = 0
        measure, reset_peak = tracemalloc.get_traced_memory, tracemalloc.reset_peak

        def on_event(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal lines, allocated, memory
            if event == "line":
                lines += 1
            allocated += measure()[1] - memory
            reset_peak()
            memory = measure()[1]
            return on_event

        before = sys.gettrace()
        reset_peak()
        memory = measure()[1]
        sys.settrace(on_event)
        try:
            return call(*arguments, **keywords)
        finally:
            sys.settrace(before)
            self._lines += lines
            self._allocated += allocated


def count_work(call: Callable[..., Any], *arguments: Any) -> Work:
    """The work of one call."""
    counter = WorkCounter()
    with counter.counting():
        counter.count(call, *arguments)
    return counter.work
