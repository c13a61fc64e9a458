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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from types import FrameType
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from examples.bench.connectors import OURS
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.plan import BLOCK_SIZE
from examples.scheduler_bench.stopwatch import HOOKS


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


class Rig:
    """vLLM's scheduler with the connector, whose hooks are counted."""

    def __init__(
        self,
        *,
        device: int,
        tier: int,
        max_running: int = 8,
        delay: int = 2,
        chunk: int = 8,
        extra: dict[str, Any],
    ) -> None:
        """``device``, ``tier``: blocks. ``delay``: as for ``Shape``. ``chunk``: blocks that a step
        computes, at most; few, so that the policy keeps few ahead of the device's eviction.
        ``extra``: the connector's configuration."""
        shape = Shape(  # with vLLM's null blocks
            device + 1, tier + 1, max_running, delay, chunk_tokens=chunk * BLOCK_SIZE
        )
        self.engine = Engine(replace(OURS, extra=extra), shape)
        self.is_lazy = extra.get("lazy_offload") is not False
        self._counter = WorkCounter()
        self._random = Random(0)
        self._ids = count()
        connector = self.engine.connector
        for name in HOOKS:
            setattr(connector, name, partial(self._counter.count, getattr(connector, name)))

    def tokens(self, count: int) -> list[int]:
        """Random tokens."""
        return self._random.choices(range(1000), k=count)

    def prompts(self, count: int, blocks: int) -> list[list[int]]:
        """Prompts that fill ``blocks`` blocks each, and have one more token to compute."""
        return [self.tokens(blocks * BLOCK_SIZE + 1) for _ in range(count)]

    def add(self, prompt: Sequence[int], answer_tokens: int = 1) -> str:
        """Add a request to the scheduler. Returns its id."""
        request_id = f"{next(self._ids):06}"
        self.engine.add(request_id, prompt, self.tokens(answer_tokens))
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request, as its client wishes."""
        self.engine.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def run(self, prompts: Iterable[Sequence[int]]) -> None:
        """Run one request after another, each until all is at rest."""
        for prompt in prompts:
            self.add(prompt)
            self.engine.drain()

    def step(self, count: int) -> None:
        """Run engine steps."""
        for _ in range(count):
            self.engine.step()

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the device."""
        return int(self.engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def num_transferred(self) -> int:
        """Blocks, loaded or stored, so far."""
        return self.engine.num_loaded + self.engine.num_stored

    def count(self, call: Callable[..., Any], *arguments: Any) -> Work:
        """The work in the hooks during a call."""
        with self._counter.counting():
            call(*arguments)
        return self._counter.work
