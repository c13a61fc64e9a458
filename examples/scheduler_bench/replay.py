"""Replay of a trace: hit rates, where hits are lost, and what the memory would allow.

All sizes are divided by ``TracePlan.scale``, so that a block of the device stands for as many
blocks of the trace's tokens. Loads, chunks, prompts and memory keep their ratios. Hit rates depend
on the speed of the engine and of the bus, which the plan states.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import get_block_hash

from examples.bench.traces import Trace, Turn, token_ids
from examples.scheduler_bench.bounds import Access, lru_hits, optimal_hits
from examples.scheduler_bench.contenders import Contender
from examples.scheduler_bench.engine import Engine, Hit, Shape
from examples.scheduler_bench.plan import BLOCK_SIZE, CHUNK_TOKENS, TracePlan
from examples.scheduler_bench.results import TraceCount

if TYPE_CHECKING:
    from vllm.v1.request import Request

_SAMPLE_STEPS = 64
"""Steps between two looks at the tier's copies of the device's blocks."""


def replay(
    contender: Contender, trace: Trace, plan: TracePlan, memory: tuple[float, float], seed: int
) -> TraceCount:
    """Play ``trace`` with ``memory`` (device and host, in millions of the trace's tokens)."""
    block_tokens = BLOCK_SIZE * plan.scale
    device_blocks, host_blocks = (int(each * 1e6 / block_tokens) for each in memory)
    shape = Shape(
        device_blocks=device_blocks + 1,
        host_blocks=host_blocks + 1,
        max_running=plan.running,
        bus_blocks=plan.bus_tokens / block_tokens,
        chunk_tokens=CHUNK_TOKENS // plan.scale,
        step_seconds=plan.step_seconds,
        tokens_per_second=plan.tokens_per_second / plan.scale,
    )
    engine = Engine(contender, shape)
    try:
        player = _Player(engine, trace, plan, seed)
        player.play()
    finally:
        engine.close()
    return player.count(device_blocks, host_blocks)


@dataclass(frozen=True)
class _Due:
    """A request that is to come."""

    session: Sequence[Turn]
    index: int

    @property
    def turn(self) -> Turn:
        return self.session[self.index]


class _Player:
    """Requests of agents in a closed loop, or at the times of the trace."""

    def __init__(self, engine: Engine, trace: Trace, plan: TracePlan, seed: int) -> None:
        self._engine = engine
        self._plan = plan
        self._tokens_per_id = trace.block_tokens // plan.scale
        self._longest = plan.max_prompt // trace.block_tokens
        self._order = count()
        self._due: list[tuple[float, int, _Due]] = []
        self._waiting: list[Sequence[Turn]] = []
        self._watch = _Watch(engine, int(plan.warm_up * plan.requests))
        if trace.has_sessions:
            self._waiting = trace.shuffled(seed)[::-1]
            for agent in range(plan.agents):
                self._start_session(agent * plan.max_pause / plan.agents)
        else:
            for session in trace.sessions:
                self._add_due(session[0].at, _Due(session, 0))

    def play(self) -> None:
        """Until the plan's number of requests, or the trace's, has ended."""
        running: dict[str, _Due] = {}
        num_added = 0
        engine = self._engine
        while running or (self._due and num_added < self._plan.requests):
            may_add = num_added < self._plan.requests
            if engine.at_rest and not running and may_add:
                engine.now = max(engine.now, self._due[0][0])
            while self._due and may_add and self._due[0][0] <= engine.now:
                due = heapq.heappop(self._due)[2]
                request_id = f"{num_added}"
                self._add(request_id, due.turn)
                running[request_id] = due
                num_added += 1
                may_add = num_added < self._plan.requests
            engine.step()
            for request_id in [each for each in running if not engine.is_running(each)]:
                self._go_on(running.pop(request_id))
        engine.drain()

    def count(self, device_blocks: int, host_blocks: int) -> TraceCount:
        """The requests after the warm-up."""
        return self._watch.count(device_blocks, host_blocks)

    def _add(self, request_id: str, turn: Turn) -> None:
        """The prompt ends with a token of its own, and no token of the answer comes again: the
        trace does not show them."""
        place = 2 * int(request_id)
        prompt = [*token_ids(turn.ids, self._tokens_per_id), -1 - place]
        length = max(1, turn.output_tokens // self._plan.scale)
        self._engine.add(request_id, prompt, [-2 - place] * length)

    def _go_on(self, ended: _Due) -> None:
        """The session's next request follows, or the agent's next session."""
        following = _Due(ended.session, ended.index + 1)
        if following.index < len(ended.session) and self._fits(following.turn):
            pause = min(following.turn.pause, self._plan.max_pause)
            self._add_due(self._engine.now + pause, following)
        else:
            self._start_session(self._engine.now)

    def _start_session(self, at: float) -> None:
        while self._waiting:
            session = self._waiting.pop()
            if self._fits(session[0]):
                self._add_due(at, _Due(session, 0))
                return

    def _add_due(self, at: float, due: _Due) -> None:
        if self._fits(due.turn):
            heapq.heappush(self._due, (at, next(self._order), due))

    def _fits(self, turn: Turn) -> bool:
        return len(turn.ids) <= self._longest


class _Watch:
    """Counts hits when a request gets its blocks, and explains misses of what was computed
    before."""

    def __init__(self, engine: Engine, num_warm_up: int) -> None:
        self._engine = engine
        self._num_warm_up = num_warm_up
        self._accesses: list[Access] = []
        self._seen: set[bytes] = set()
        self._unstored: set[bytes] = set()
        """Hashes that left the device when the tier did not have them."""
        self._num_unstored = self._num_evicted = 0
        """Blocks, after the warm-up."""
        self._hits: list[Hit] = []
        self._num_shared: list[int] = []
        """Samples of the number of blocks that device and tier both have."""
        self._start = (0, 0, 0, 0.0)
        """Steps, blocks stored and loaded, and the time, at the end of the warm-up."""
        self._end = 0.0
        """The time at which a request got its blocks last."""
        self._next_sample = 0
        pool: Any = engine.scheduler.kv_cache_manager.block_pool
        self._device_pool = pool
        # vLLM's own method, which no hook announces.
        pool._maybe_evict_cached_block = partial(self._evict, pool._maybe_evict_cached_block)
        engine.on_hit = self._on_hit

    def count(self, device_blocks: int, host_blocks: int) -> TraceCount:
        engine, first = self._engine, self._num_warm_up
        cost = engine.stopwatch.drain()
        hits = self._hits[first:]
        accesses = self._accesses
        return TraceCount(
            prompt=sum(len(access.blocks) for access in accesses[first:]) * BLOCK_SIZE,
            device=sum(hit.device for hit in hits),
            host=sum(hit.host for hit in hits),
            unstored=self._num_unstored * BLOCK_SIZE,
            evicted=self._num_evicted * BLOCK_SIZE,
            stored=engine.num_stored - self._start[1],
            loaded=engine.num_loaded - self._start[2],
            shared=sum(self._num_shared) / max(1, len(self._num_shared)) / host_blocks,
            hook_seconds=cost.seconds,
            steps=engine.num_steps - self._start[0],
            requests=len(hits),
            seconds=self._end - self._start[3],
            lru_host=lru_hits(accesses, host_blocks, first) * BLOCK_SIZE,
            lru_both=lru_hits(accesses, device_blocks + host_blocks, first) * BLOCK_SIZE,
            optimal=optimal_hits(accesses, device_blocks + host_blocks, first) * BLOCK_SIZE,
        )

    def _on_hit(self, request: "Request", hit: Hit) -> None:
        engine = self._engine
        if len(self._hits) == self._num_warm_up:
            engine.stopwatch.drain()
            self._start = (engine.num_steps, engine.num_stored, engine.num_loaded, engine.now)
        self._end = engine.now
        counts = len(self._hits) >= self._num_warm_up
        self._hits.append(hit)
        # Its last token is its own.
        num_blocks = (request.num_prompt_tokens - 1) // BLOCK_SIZE
        blocks = [bytes(each) for each in request.block_hashes[:num_blocks]]
        num_answer = (request.num_prompt_tokens + request.max_tokens) // BLOCK_SIZE - num_blocks
        self._accesses.append(Access(blocks, num_answer))
        for block in blocks[(hit.device + hit.host) // BLOCK_SIZE :]:
            if block in self._seen and counts:
                if block in self._unstored:
                    self._num_unstored += 1
                else:
                    self._num_evicted += 1
            self._unstored.discard(block)
        self._seen.update(blocks)
        if counts and engine.num_steps >= self._next_sample:
            self._next_sample = engine.num_steps + _SAMPLE_STEPS
            has = partial(engine.side.has, engine.connector)
            keys = [key for each in self._device_pool.blocks if (key := each.block_hash)]
            self._num_shared.append(sum(map(has, keys)))

    def _evict(self, evict: Callable[[Any], bool], block: Any) -> bool:
        key = block.block_hash
        if not evict(block):
            return False
        block_hash = bytes(get_block_hash(key))
        if self._engine.side.has(self._engine.connector, key):
            self._unstored.discard(block_hash)
        else:
            self._unstored.add(block_hash)
        return True
