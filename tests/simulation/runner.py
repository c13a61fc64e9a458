"""Runner: a scripted model on one rank. Checks what it reads, writes who it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulation.device import KVMemory
from tests.simulation.groups import Group, Kind
from tests.simulation.identity import NUM_TOKENS, Identities, Story, extend, of_page, of_state

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


@dataclass(frozen=True)
class _Batch:
    works: list[_Work]
    zeroed: list[int]
    """Device blocks to be zeroed before anything else."""

    copies: list[tuple[int, int]]
    """Then device blocks to be copied, from and to."""


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
        groups: Sequence[Group],
        block_size: int,
        stories: Mapping[str, Story],
    ) -> None:
        self.rank = rank
        self.memory = memory
        self.groups = tuple(enumerate(groups))
        self.block_size = block_size
        self.stories = stories
        self.num_pages_read = 0
        self._known: dict[str, _Known] = {}

    def update(self, scheduled: "SchedulerOutput") -> _Batch:
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
        works = [
            self._snapshot(request_id, starts[request_id], num_tokens)
            for request_id, num_tokens in scheduled.num_scheduled_tokens.items()
        ]
        copies = [(c.src_block_id, c.dst_block_id) for c in scheduled.kv_cache_block_copies or ()]
        return _Batch(works, list(scheduled.new_block_ids_to_zero or ()), copies)

    def _snapshot(self, request_id: str, start: int, num_tokens: int) -> _Work:
        known = self._known[request_id]
        end = start + num_tokens
        samples = end >= known.num_tokens
        if samples:
            known.num_tokens = end + 1
        tables = tuple(np.array(table, dtype=np.int64) for table in known.tables)
        return _Work(request_id, self.stories[request_id], start, end, tables, samples)

    def compute(self, batch: _Batch, samples: dict[str, list[int]]) -> None:
        """The forward. Sampled tokens go into ``samples``.

        States are read before anything is written: vLLM lets no request start from a state that
        another one writes in the same step. Attention pages are checked when all new tokens'
        pages have been written: there, it does.
        """
        self._prepare(batch)
        for work in batch.works:
            for index, group in self.groups:
                if group.kind is Kind.STATE and work.start > 0:
                    self._check_state(work, index)
        for work in batch.works:
            for index, group in self.groups:
                if group.kind is Kind.STATE:
                    self._write_state(work, index)
                else:
                    self._write(work, index, group)
        for work in batch.works:
            for index, group in self.groups:
                if group.kind is not Kind.STATE:
                    self._check(work, index, group)
        for work in batch.works:
            if work.samples:
                samples[work.request_id] = [work.story.tokens[work.end]]

    def _prepare(self, batch: _Batch) -> None:
        for pages in self.memory.pages:
            pages[batch.zeroed] = 0
            for source, target in batch.copies:
                pages[target] = pages[source]

    def _check(self, work: _Work, index: int, group: Group) -> None:
        first = max(0, work.start - group.window + 1) if group.window else 0
        positions = np.arange(first, work.start)
        blocks = work.tables[index][positions // self.block_size]
        for layer, pages in enumerate(self.memory.pages):
            found = pages[blocks, positions % self.block_size]
            wrong = (found != self._tokens(work, positions, index, group, layer)).any(axis=1)
            for position in positions[wrong].tolist():
                if not self._is_of_a_sibling(work, position, index, group, layer):
                    self._complain(work, index, layer, position)
        self.num_pages_read += len(np.unique(blocks)) * len(self.memory.pages)

    def _write(self, work: _Work, index: int, group: Group) -> None:
        positions = np.arange(work.start, work.end)
        blocks = work.tables[index][positions // self.block_size]
        for layer, pages in enumerate(self.memory.pages):
            tokens = self._tokens(work, positions, index, group, layer)
            pages[blocks, positions % self.block_size] = tokens

    def _tokens(
        self, work: _Work, positions: "np.ndarray[Any, Any]", index: int, group: Group, layer: int
    ) -> Identities:
        ahead = 1 if group.kind is Kind.DRAFT else 0
        identities = work.story.identities[positions + ahead]
        return of_page(identities, index, self.rank, layer, self.memory.pages[layer].shape[2])

    def _is_of_a_sibling(
        self, work: _Work, position: int, index: int, group: Group, layer: int
    ) -> bool:
        """Whether a drafter's page is that of a request which goes on otherwise after its block.

        The last token of a draft block has seen the token behind the block, which the block's
        hash does not cover. vLLM lets blocks of the same hash stand for each other; what is
        drafted from them may be worse, what is said is the same.
        """
        last = position % self.block_size == self.block_size - 1
        if group.kind is not Kind.DRAFT or not last:
            return False
        pages = self.memory.pages[layer]
        found = pages[work.tables[index][position // self.block_size], self.block_size - 1]
        prefix = int(work.story.identities[position])
        siblings = np.array([extend(prefix, t) for t in range(NUM_TOKENS)], dtype=np.uint64)
        allowed = of_page(siblings, index, self.rank, layer, pages.shape[2])
        return bool((allowed == found).all(axis=1).any())

    def _check_state(self, work: _Work, index: int) -> None:
        block = work.tables[index][(work.start - 1) // self.block_size]
        for layer, pages in enumerate(self.memory.pages):
            if not np.array_equal(pages[block], self._state(work, work.start, index, layer)):
                self._complain(work, index, layer, work.start - 1)
        self.num_pages_read += len(self.memory.pages)

    def _write_state(self, work: _Work, index: int) -> None:
        block = work.tables[index][(work.end - 1) // self.block_size]
        for layer, pages in enumerate(self.memory.pages):
            pages[block] = self._state(work, work.end, index, layer)

    def _state(self, work: _Work, num_tokens: int, index: int, layer: int) -> Identities:
        prefix = int(work.story.identities[num_tokens - 1])
        shape = self.memory.pages[layer].shape[1:]
        return of_state(prefix, index, self.rank, layer, shape)

    def _complain(self, work: _Work, index: int, layer: int, position: int) -> None:
        raise Violation(
            f"{work.request_id} reads a wrong page: rank {self.rank}, group {index}, "
            f"layer {layer}, position {position} of {work.start}, "
            f"device block {work.tables[index][position // self.block_size]}"
        )
