"""Watch: what an engine's requests find, what is computed again and why, and how long they wait."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import get_block_hash

from examples.scheduler_bench.bounds import Access, lru_hits, optimal_hits
from examples.scheduler_bench.engine import Engine, Hit, Wait
from examples.scheduler_bench.plan import BLOCK_SIZE
from examples.scheduler_bench.results import Outcome

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LATER = 0.5
"""Share of a prompt that was computed before, from which on it is a later turn's."""


class Watch:
    """Counts requests from ``begin`` on, when they get their blocks. Those before are the warm-up:
    they fill both caches."""

    def __init__(self, engine: Engine, is_later: "Callable[[Request], bool] | None" = None) -> None:
        """``is_later``: whether a request is a later turn's, of models with several groups. These
        have no losses and bounds. By default, the share of a prompt that was computed
        before tells."""
        self._engine = engine
        self._is_later = is_later
        self._tokens: Counter[str] = Counter()
        """The counts of tokens that ``Outcome`` has, by name."""
        self._accesses: list[Access] = []
        self._seen: set[bytes] = set()
        self._unstored: set[bytes] = set()
        """Hashes that left the device when the tier did not have them."""
        self._waits: dict[bool, list[Wait]] = {False: [], True: []}
        """By whether it is a later turn's."""
        self._first: int | None = None
        """The first access that counts."""
        self._start = self._counts()
        if is_later is None:
            pool: Any = engine.scheduler.kv_cache_manager.block_pool
            # vLLM's own method, which no hook announces.
            pool._maybe_evict_cached_block = partial(self._evict, pool._maybe_evict_cached_block)
            engine.on_end.append(lambda each: self._seen.update(map(bytes, each.block_hashes)))
        engine.on_hit.append(self._on_hit)

    def begin(self) -> None:
        """Count from now on."""
        self._first = len(self._accesses)
        self._start = self._counts()

    def outcome(self) -> Outcome:
        """What was counted until now, when all requests are answered. Raises ValueError if there
        was nothing to count."""
        if not any(self._waits.values()):
            raise ValueError("no request came after the warm-up: ask for fewer")
        accesses, shape = self._accesses, self._engine.shape
        first = len(accesses) if self._first is None else self._first
        num_blocks = shape.device_blocks + shape.host_blocks - 2  # without vLLM's null blocks
        return Outcome(
            prompt=self._tokens["prompt"],
            device=self._tokens["device"],
            host=self._tokens["host"],
            unstored=self._tokens["unstored"],
            evicted=self._tokens["evicted"],
            lru=lru_hits(accesses, num_blocks, first) * BLOCK_SIZE,
            optimal=optimal_hits(accesses, num_blocks, first) * BLOCK_SIZE,
            first_turns=(tuple(self._waits[False]),),
            later_turns=(tuple(self._waits[True]),),
            **{name: count - self._start[name] for name, count in self._counts().items()},
        )

    def _counts(self) -> dict[str, Any]:
        """The engine's, from its start."""
        engine = self._engine
        return {
            "stored": engine.num_stored,
            "preempted": engine.num_preempted,
            "seconds": engine.now,
        }

    def _on_hit(self, request: "Request", hit: Hit) -> None:
        counts = self._first is not None
        if self._is_later is not None:
            if counts:
                self._count(request, hit, self._is_later(request), request.num_prompt_tokens)
            return
        # Its last token is its own.
        num_blocks = (request.num_prompt_tokens - 1) // BLOCK_SIZE
        blocks = [bytes(each) for each in request.block_hashes[:num_blocks]]
        num_answer = (request.num_prompt_tokens + request.max_tokens) // BLOCK_SIZE - num_blocks
        self._accesses.append(Access(blocks, num_answer))
        num_seen = sum(block in self._seen for block in blocks)
        for block in blocks[(hit.device + hit.host) // BLOCK_SIZE :]:
            if block in self._seen and counts:
                self._tokens["unstored" if block in self._unstored else "evicted"] += BLOCK_SIZE
            self._unstored.discard(block)
        self._seen.update(blocks)
        if not counts:
            return
        is_later = num_seen >= _LATER * len(blocks) > 0
        self._count(request, hit, is_later, len(blocks) * BLOCK_SIZE)

    def _count(self, request: "Request", hit: Hit, is_later: bool, num_tokens: int) -> None:
        self._tokens.update(prompt=num_tokens, device=hit.device, host=hit.host)
        self._waits[is_later].append(self._engine.waits[request.request_id])

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
