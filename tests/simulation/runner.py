"""Runner: a scripted model on one rank. It checks each page that it reads, and writes
identities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulation.device import KVMemory
from tests.simulation.groups import Group, Kind, Layer
from tests.simulation.identity import Identities, Story, of_page, of_state

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from tests.simulation.shape import Shape

_RING = np.uint64(0xF1F0)
"""The contents of a ring. What it held before is overwritten in each step."""
_REJECTED = np.uint64(0xDEAD)
"""The contents of a page for a drafted token that was rejected."""


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass(frozen=True)
class _Work:
    """One request's tokens in a step."""

    request_id: str
    story: Story
    start: int
    end: int
    """End of the tokens that are known, or were drafted and accepted."""
    num_accepted: int
    num_rejected: int
    tables: tuple["np.ndarray[tuple[int], np.dtype[np.int64]]", ...]
    """By group, device block ids."""
    samples: bool
    """Whether the step ends with a token that was not known before."""
    num_known: int
    """Number of known tokens after it has been sampled."""
    is_first: bool
    """Whether the tokens before ``start`` were found, none of them computed by this request."""
    replay_start: int
    """Where groups that replay have tokens from."""
    found_end: int
    """End of the tokens that were found. Other groups have those that are replayed."""
    redraft_from: int
    """Where chained drafters begin to compute. They leave earlier pages unchanged."""
    states: dict[int, tuple[int, int]]
    """By group of states, columns of its block table: for the state at the start, and for the state
    after the known tokens. The state after each drafted token has the next column."""

    @property
    def known_end(self) -> int:
        """End of the known tokens."""
        return self.end - self.num_accepted


@dataclass(frozen=True)
class _Batch:
    works: list[_Work]
    zeroed: list[int]
    """Device blocks to zero before anything else."""
    copies: list[tuple[int, int]]
    """Device blocks to copy after that, from and to."""


@dataclass(eq=False)
class _Known:
    tables: list[list[int]]
    num_tokens: int = 0
    """Number of known tokens: the prompt and all that were sampled."""
    num_computed: int = 0
    num_found: int = 0
    """Number of those that were found when the request got its blocks."""
    replay_start: int = 0
    states: dict[int, int] = field(default_factory=dict)
    """By group of states, the state's column in its block table."""


class Runner:
    """Follows requests through scheduler outputs as vLLM's model runner does."""

    def __init__(
        self, rank: int, memory: KVMemory, shape: "Shape", stories: Mapping[str, Story]
    ) -> None:
        self.rank = rank
        self.shape = shape
        self.groups = tuple(enumerate(shape.groups))
        self.stories = stories
        self.former_stories: Sequence[Story] = ()
        """Of requests of earlier engines, whose blocks a second tier may have."""
        self._sizes = shape.block_sizes
        self._layers = shape.layers
        self._alike = [{kind: _alike(layers, kind) for kind in Kind} for layers in self._layers]
        """By group and kind, layers whose pages have entries for the same tokens."""
        self._pages = memory.pages
        self._attention = {
            name: (index, layer)
            for name, (index, layer) in memory.places.items()
            if self._layers[index][layer].kind is Kind.ATTENTION
        }
        self.has_states = any(group.kind is Kind.STATE for group in shape.groups)
        self._known: dict[str, _Known] = {}

    def update(self, scheduled: "SchedulerOutput") -> _Batch:
        """Apply the scheduler's output, and snapshot this step's work."""
        for request_id in scheduled.finished_req_ids:
            self._known.pop(request_id, None)
        # Requests with their first blocks, then those with more or other blocks.
        for new in scheduled.scheduled_new_reqs:
            story = self.stories[new.req_id]
            tables = [list(ids) for ids in new.block_ids]
            # To the V2 runner, requests that go on after a preemption are new ones.
            known_ids = new.prefill_token_ids
            num_known = story.num_prompt_tokens if known_ids is None else len(known_ids)
            num_computed = num_found = new.num_computed_tokens
            replay_start = getattr(new, "replay_start", 0)
            if replay_start:
                assert num_computed == replay_start, f"{new.req_id} does not replay its window"
                num_found += self.shape.replay_window
            self._known[new.req_id] = _Known(
                tables, num_known, num_computed, num_found, replay_start
            )
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            known = self._known[request_id]
            new_ids = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                assert new_ids is not None
                known.tables = [list(ids) for ids in new_ids]
                story = self.stories[request_id]
                known.num_tokens = story.num_prompt_tokens + cached.num_output_tokens[index]
                known.num_computed = known.num_found = cached.num_computed_tokens[index]
                known.states.clear()
            elif new_ids is not None:
                for table, ids in zip(known.tables, new_ids, strict=True):
                    table.extend(ids)
            # With async scheduling, vLLM counts drafts as computed until they are rejected.
            ahead = cached.num_computed_tokens[index] - known.num_computed
            limit = self.shape.num_drafted * self.shape.num_stages
            limit = limit if self.shape.async_scheduling else 0
            assert 0 <= ahead <= limit, f"vLLM is {ahead} tokens ahead of {request_id}"
        # A snapshot: the step may run after the scheduler has changed these tables.
        drafts = scheduled.scheduled_spec_decode_tokens
        works = [
            self._snapshot(request_id, num_tokens, len(drafts.get(request_id, ())))
            for request_id, num_tokens in scheduled.num_scheduled_tokens.items()
        ]
        copies = [(c.src_block_id, c.dst_block_id) for c in scheduled.kv_cache_block_copies or ()]
        return _Batch(works, list(scheduled.new_block_ids_to_zero or ()), copies)

    def _snapshot(self, request_id: str, num_tokens: int, num_drafts: int) -> _Work:
        known, story = self._known[request_id], self.stories[request_id]
        start = known.num_computed
        end = start + num_tokens - num_drafts
        samples = end >= known.num_tokens
        accepted = 0
        if samples:
            accepted = min(story.num_accepted(end, num_drafts), len(story.tokens) - 1 - end)
            known.num_tokens = end + accepted + 1
        known.num_computed = end + accepted
        states = {}
        for index, group in self.groups:
            if group.kind is Kind.STATE:
                source = known.states.get(index, (start - 1) // self._sizes[index])
                target = (start + num_tokens - 1) // self._sizes[index]
                states[index] = source, target
                # A state at a block's end moves to that block after the step.
                moved = known.num_computed == (target + 1) * self._sizes[index]
                known.states[index] = target if moved else target + accepted
        return _Work(
            request_id,
            story,
            start,
            end + accepted,
            accepted,
            num_drafts - accepted,
            tuple(np.array(table, dtype=np.int64) for table in known.tables),
            samples,
            known.num_tokens,
            start == (known.replay_start or known.num_found),
            known.replay_start,
            known.num_found,
            min(start, max(start - self.shape.num_reprefilled, known.num_found)),
            states,
        )

    def prepare(self, batch: _Batch) -> None:
        """The work that vLLM queues before it calls the connector's hooks: it zeroes and copies
        blocks. It also moves a state where the step goes on from it in another block."""
        for pages in chain.from_iterable(self._pages):
            pages[batch.zeroed] = 0
            for source, target in batch.copies:
                pages[target] = pages[source]
        self._check_states(batch, moves=True)

    def compute(self, batch: _Batch, samples: dict[str, list[int]]) -> None:
        """The forward, without the drafter. Sampled tokens go into ``samples``.

        States are read before anything is written: in vLLM, no request starts from a state that
        another one writes in the same step. Attention pages are checked after all new tokens'
        pages have been written: a request may read pages that another one writes in that step.
        """
        self._check_states(batch, moves=False)
        for work in batch.works:
            for index, group in self.groups:
                if group.kind is Kind.STATE:
                    self._write_state(work, index)
                elif group.kind is Kind.RING:
                    (block,) = work.tables[index]
                    for pages in self._pages[index]:
                        pages[block] = _RING
        self._attend(batch, Kind.ATTENTION)
        self.sample(batch, samples)

    def layers(self) -> list[str]:
        """Names of the layers of attention, without the drafter's, in the order of compute."""
        return list(self._attention)

    def compute_layer(self, batch: _Batch, name: str) -> None:
        """The forward of one layer of attention."""
        index, layer = self._attention[name]
        alike = self._alike[index]
        self._alike[index] = {kind: [[layer]] if kind is Kind.ATTENTION else [] for kind in Kind}
        others, self.groups = self.groups, (self.groups[index],)
        try:
            self._attend(batch, Kind.ATTENTION)
        finally:
            self._alike[index], self.groups = alike, others

    def sample(self, batch: _Batch, samples: dict[str, list[int]]) -> None:
        """The end of the forward. Sampled tokens go into ``samples``."""
        for work in batch.works:
            if work.samples:
                samples[work.request_id] = work.story.tokens[work.known_end : work.end + 1]

    def draft(self, batch: _Batch) -> None:
        """The drafter: fills its pages of the step's tokens, and drafts."""
        self._attend(batch, Kind.DRAFT)

    def _attend(self, batch: _Batch, kind: Kind) -> None:
        for work in batch.works:
            for index, _ in self.groups:
                self._copy_again(batch, work, index, kind)
                self._write(work, index, kind)
        for work in batch.works:
            for index, group in self.groups:
                self._check(work, index, group, kind)

    def _copy_again(self, batch: _Batch, work: _Work, index: int, kind: Kind) -> None:
        """Copy the block that the request's hit ends inside from what this step has written.

        vLLM copies it before the step, also if another request computes the source in this step:
        its guard against hits on such blocks (vllm#29387) knows those of states only. The tokens
        are wrong then, with and without a connector. A window's table keeps the ids of blocks that
        it has left, which may be a target by now.
        """
        column = work.start // self._sizes[index]
        for source, target in batch.copies:
            if target in work.tables[index][column : column + 1]:
                for layer in chain.from_iterable(self._alike[index][kind]):
                    pages = self._pages[index][layer]
                    pages[target] = pages[source]

    def fill(self, request_id: str, tables: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Write the pages of a request's first ``num_tokens`` tokens, as if loaded from another
        machine. Attention groups only."""
        arrays = tuple(np.array(table, dtype=np.int64) for table in tables)
        story = self.stories[request_id]
        work = _Work(
            request_id, story, 0, num_tokens, 0, 0, arrays, False, num_tokens, False, 0, 0, 0, {}
        )
        for index, _ in self.groups:
            for kind in (Kind.ATTENTION, Kind.DRAFT):
                self._write(work, index, kind)

    def _check(self, work: _Work, index: int, group: Group, kind: Kind) -> None:
        start = work.redraft_from if kind is Kind.DRAFT else work.start
        for layers in self._alike[index][kind]:
            spec = self._layers[index][layers[0]]
            read = group.read(start, work.story.num_prompt_tokens)
            if group.replays:
                read = read[read >= work.replay_start]
            elif work.is_first and kind is Kind.ATTENTION:
                # Also what attention will not read: vLLM may give these blocks to others.
                found = work.found_end
                is_block = work.tables[index][: -(-found // self._sizes[index])] != 0
                read = np.arange(found)[np.repeat(is_block, self._sizes[index])[:found]]
            positions = self._own(spec.ends(read))
            blocks, slots = self._places(work, positions, index, spec)
            for layer in layers:
                found = self._pages[index][layer][blocks, slots]
                wrong = (found != self._tokens(work, positions, index, layer)).any(axis=1)
                for position in positions[wrong].tolist():
                    if not self._is_of_a_sibling(work, position, index, layer):
                        self._complain(work, index, layer, position)

    def _write(self, work: _Work, index: int, kind: Kind) -> None:
        start = work.redraft_from if kind is Kind.DRAFT else work.start
        if work.replay_start and not dict(self.groups)[index].replays:
            start = max(start, work.found_end)
        for layers in self._alike[index][kind]:
            spec = self._layers[index][layers[0]]
            positions = self._own(spec.ends(np.arange(start, work.end)))
            blocks, slots = self._places(work, positions, index, spec)
            rejected = self._own(spec.ends(self._rejected(work, index, kind)))
            for layer in layers:
                pages = self._pages[index][layer]
                pages[blocks, slots] = self._tokens(work, positions, index, layer)
                if len(rejected):
                    pages[self._places(work, rejected, index, spec)] = _REJECTED
                # A module that reads beyond the known tokens uses drafts.
                if ahead := self._layers[index][layer].ahead:
                    unknown = positions + ahead >= work.num_known
                    pages[blocks[unknown], slots[unknown]] = _REJECTED

    def _rejected(self, work: _Work, index: int, kind: Kind) -> "np.ndarray[Any, Any]":
        """Positions of rejected drafted tokens, and of tokens that a drafter drafts one by one for
        the next step. The drafter writes their pages as it drafts."""
        num_ahead = work.num_rejected
        if kind is Kind.DRAFT and work.samples:
            num_ahead = max(num_ahead, self.shape.num_drafted)
        room = len(work.tables[index]) * self._sizes[index]
        return np.arange(work.end, min(work.end + num_ahead, room))

    def _own(self, positions: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Those of ``positions`` whose tokens this rank keeps."""
        shards = self.shape.num_shards
        own: np.ndarray[Any, Any] = positions[positions % shards == self.rank % shards]
        return own

    def _places(
        self, work: _Work, positions: "np.ndarray[Any, Any]", index: int, layer: Layer
    ) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
        """The device blocks of ``positions``, and the entries in them."""
        size = self._sizes[index]
        blocks = work.tables[index][positions // size]
        return blocks, positions % size // (self.shape.num_shards * layer.tokens_per_entry)

    def _tokens(
        self, work: _Work, positions: "np.ndarray[Any, Any]", index: int, layer: int
    ) -> Identities:
        width = self._pages[index][layer].shape[2]
        pages = work.story.pages(index, self._replica(index), layer, width)
        tokens: Identities = pages[positions + self._layers[index][layer].ahead]
        return tokens

    def _is_of_a_sibling(self, work: _Work, position: int, index: int, layer: int) -> bool:
        """Whether a drafter's page is that of a request with other tokens after the block.

        The last entries of a draft block depend on tokens after the block, which its hash does not
        cover. vLLM treats blocks of the same hash as equal. Drafts from them may be worse, but the
        answer is the same.
        """
        size, spec = self._sizes[index], self._layers[index][layer]
        last = position - position % size + size - 1
        if position + spec.ahead <= last:
            return False
        pages = self._pages[index][layer]
        found = pages[self._places(work, np.array([position]), index, spec)][0]
        mine = work.story.identities[last]
        siblings = [
            story.identities[position + spec.ahead]
            for story in chain(self.stories.values(), self.former_stories)
            if len(story.identities) > position + spec.ahead and story.identities[last] == mine
        ]
        allowed = of_page(np.array(siblings), index, self._replica(index), layer, pages.shape[2])
        return bool((allowed == found).all(axis=1).any())

    def _check_states(self, batch: _Batch, moves: bool) -> None:
        """Check the states that requests start from: those that the step ``moves``, or the
        others."""
        for work in batch.works:
            for index, (source, target) in work.states.items():
                if work.start > 0 and (source != target) is moves:
                    self._check_state(work, index)

    def _check_state(self, work: _Work, index: int) -> None:
        block = work.tables[index][work.states[index][0]]
        for layer, pages in enumerate(self._pages[index]):
            if not np.array_equal(pages[block], self._state(work, work.start, index, layer)):
                self._complain(work, index, layer, work.start - 1)

    def _write_state(self, work: _Work, index: int) -> None:
        """Write the state after the known tokens, and after each drafted token in the next columns.
        Where the accepted tokens pass the end of a block, that block also gets its state."""
        table, column, size = work.tables[index], work.states[index][1], self._sizes[index]
        checkpoint = self.shape.checkpoint(index, work.start, work.end + work.num_rejected)
        for layer, pages in enumerate(self._pages[index]):
            if checkpoint is not None:
                num_tokens, checkpoint_column = checkpoint
                pages[table[checkpoint_column]] = self._state(work, num_tokens, index, layer)
            for place in range(work.num_accepted + 1):
                state = self._state(work, work.known_end + place, index, layer)
                pages[table[column + place]] = state
            for place in range(work.num_rejected):
                pages[table[column + work.num_accepted + 1 + place]] = _REJECTED
            boundary = work.end // size * size
            if boundary >= work.known_end:
                pages[table[boundary // size - 1]] = self._state(work, boundary, index, layer)

    def _state(self, work: _Work, num_tokens: int, index: int, layer: int) -> Identities:
        prefix = int(work.story.identities[num_tokens - 1])
        shape = self._pages[index][layer].shape[1:]
        return of_state(prefix, index, self._replica(index), layer, shape)

    def _replica(self, index: int) -> int:
        return self.shape.replica_of(self.rank, index)

    def _complain(self, work: _Work, index: int, layer: int, position: int) -> None:
        raise Violation(
            f"{work.request_id} reads a wrong page: rank {self.rank}, group {index}, "
            f"layer {layer}, position {position} of {work.start}, "
            f"device block {work.tables[index][position // self._sizes[index]]}"
        )


def _alike(layers: Sequence[Layer], kind: Kind) -> list[list[int]]:
    alike: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.kind is kind:
            alike.setdefault(layer.tokens_per_entry, []).append(index)
    return list(alike.values())
