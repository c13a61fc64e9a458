"""Rig: the work in the connector's hooks, on an engine of scheduler_bench.

The engine needs the pinned vLLM or a newer one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from typing import Any

from vllm.v1.request import RequestStatus

from examples.bench.connectors import OURS
from examples.scheduler_bench.engine import Engine, Shape
from examples.scheduler_bench.plan import BLOCK_SIZE
from examples.scheduler_bench.stopwatch import HOOKS
from tests.scheduler.work import Work, WorkCounter


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
