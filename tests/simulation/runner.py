"""Runner: a scripted model on one rank. Checks what it reads, writes who it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.simulation.device import KVMemory
from tests.simulation.identity import Story, of_page

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass(frozen=True)
class _Work:
    """One request's part of a step."""

    request_id: str
    story: Story
    start: int
    end: int
    tables: tuple["np.ndarray[tuple[int], np.dtype[np.int64]]", ...]
    """By group, device block ids."""
    samples: bool
    """Whether the step ends with a token that was not known before."""


@dataclass(eq=False)
class _Known:
    tables: list[list[int]]
    num_tokens: int = field(default=0)
    """Tokens that are known: the prompt and what has been sampled."""


class Runner:
    """Follows requests through scheduler outputs as vLLM's model runner does."""

    def __init__(
        self,
        rank: int,
        memory: KVMemory,
        windows: tuple[int, ...],
        block_size: int,
        stories: Mapping[str, Story],
    ) -> None:
        self.rank = rank
        self.memory = memory
        self.windows = windows
        self.block_size = block_size
        self.stories = stories
        self.num_pages_read = 0
        self._known: dict[str, _Known] = {}

    def update(self, scheduled: "SchedulerOutput") -> list[_Work]:
        """Take in what is new, and snapshot this step's work."""
        for request_id in scheduled.finished_req_ids:
            self._known.pop(request_id, None)
        starts = {}
        for new in scheduled.scheduled_new_reqs:
            story = self.stories[new.req_id]
            tables = [list(ids) for ids in new.block_ids]
            self._known[new.req_id] = _Known(tables, story.num_prompt_tokens)
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            known = self._known[request_id]
            new_ids = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                assert new_ids is not None
                known.tables = [list(ids) for ids in new_ids]
                story = self.stories[request_id]
                known.num_tokens = story.num_prompt_tokens + cached.num_output_tokens[index]
            elif new_ids is not None:
                for table, ids in zip(known.tables, new_ids, strict=True):
                    table.extend(ids)
            starts[request_id] = cached.num_computed_tokens[index]
        return [
            self._snapshot(request_id, starts[request_id], num_tokens)
            for request_id, num_tokens in scheduled.num_scheduled_tokens.items()
        ]

    def _snapshot(self, request_id: str, start: int, num_tokens: int) -> _Work:
        known = self._known[request_id]
        end = start + num_tokens
        samples = end >= known.num_tokens
        if samples:
            known.num_tokens = end + 1
        tables = tuple(np.array(table, dtype=np.int64) for table in known.tables)
        return _Work(request_id, self.stories[request_id], start, end, tables, samples)

    def compute(self, batch: list[_Work], samples: dict[str, list[int]]) -> None:
        """The forward: write the new tokens' pages, then for each request check every page that
        attention reads. In this order, since vLLM lets a request hit blocks that another one
        fills in the same step. Sampled tokens go into ``samples``."""
        for work in batch:
            for group in range(len(self.windows)):
                self._write(work, group)
        for work in batch:
            for group, window in enumerate(self.windows):
                self._check(work, group, window)
        for work in batch:
            if work.samples:
                samples[work.request_id] = [work.story.tokens[work.end]]

    def _check(self, work: _Work, group: int, window: int) -> None:
        first = max(0, work.start - window + 1) if window else 0
        positions = np.arange(first, work.start)
        blocks = work.tables[group][positions // self.block_size]
        for layer, pages in enumerate(self.memory.pages):
            found = pages[blocks, positions % self.block_size]
            wanted = of_page(work.story.identities[positions], group, self.rank, layer)
            if not np.array_equal(found, wanted):
                wrong = int(positions[np.flatnonzero(found != wanted)[0]])
                raise Violation(
                    f"{work.request_id} reads a wrong page: rank {self.rank}, group {group}, "
                    f"layer {layer}, position {wrong} of {work.start}, "
                    f"device block {work.tables[group][wrong // self.block_size]}"
                )
        self.num_pages_read += len(np.unique(blocks)) * len(self.memory.pages)

    def _write(self, work: _Work, group: int) -> None:
        positions = np.arange(work.start, work.end)
        blocks = work.tables[group][positions // self.block_size]
        identities = work.story.identities[positions]
        for layer, pages in enumerate(self.memory.pages):
            pages[blocks, positions % self.block_size] = of_page(
                identities, group, self.rank, layer
            )
