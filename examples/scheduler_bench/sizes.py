"""Sizes of host memory: what requests find with others, predicted from one replay, and replayed."""

from typing import TYPE_CHECKING

from examples.bench.connectors import Contender
from examples.scheduler_bench.engine import Engine, Hit
from examples.scheduler_bench.plan import BLOCK_SIZE, TracePlan
from examples.scheduler_bench.replay import replay
from examples.scheduler_bench.results import Size
from simple_offload.scheduler.tier.eviction_order import DUPLICATES_SHARE
from simple_offload.sizing.curve import MissRatioCurve
from simple_offload.sizing.forecast import FACTORS, Caches, predicted_hit_ratios
from simple_offload.sizing.traces import Request as Turn
from simple_offload.sizing.traces import Trace

if TYPE_CHECKING:
    from vllm.v1.request import Request

REPLAYED = (0.5, 1.0, 2.0, 4.0)
"""Sizes of host memory, over the one that the others are predicted from."""
_WARM_UP_ENDS = 1e12
"""Seconds by which the curve's clock is set forward: it forgets the warm-up."""


def replay_sizes(
    contender: Contender, trace: Trace, plan: TracePlan, memory: tuple[float, float], seed: int
) -> dict[float, Size]:
    """By factor. ``memory``: device and host, in millions of tokens."""

    def show(trace: Trace, factor: float = 1.0) -> tuple[_Recorder, float]:
        """Replay ``trace``. Returns what was recorded, and the share of the tokens found."""
        recorder = _Recorder(plan)
        sized = (memory[0], factor * memory[1])
        outcome = replay(contender, trace, plan, sized, seed, recorder.start)
        return recorder, outcome.share(outcome.found)

    now, found_now = show(trace)
    caches = now.caches
    lru = now.curve.hit_ratios(caches.device + factor * caches.host for factor in REPLAYED)
    predicted = predicted_hit_ratios(now.curve, caches, REPLAYED)

    def size(factor: float, lru: float, predicted: float) -> Size:
        if factor == 1.0:
            return Size(lru, predicted, found_now, found_now, predicted)
        _, replayed = show(now.came(trace), factor)
        if not trace.has_sessions:
            return Size(lru, predicted, replayed, replayed, predicted)
        there, in_loop = show(trace, factor)
        same_order, _ = show(there.came(trace))
        (of_order,) = predicted_hit_ratios(same_order.curve, caches, [factor])
        return Size(lru, predicted, replayed, in_loop, of_order)

    return {
        factor: size(factor, lru[place], predicted[place]) for place, factor in enumerate(REPLAYED)
    }


class _Recorder:
    """Shows the curve what it sees in a server, and remembers when requests came."""

    curve: MissRatioCurve
    caches: Caches

    def __init__(self, plan: TracePlan) -> None:
        self._num_warm_up = int(plan.warm_up * plan.requests)
        self._scale = plan.scale
        self._requests: list[Request] = []

    def start(self, engine: Engine) -> None:
        self._engine = engine
        self._tier = engine.connector.scheduler.tier
        shape = engine.shape
        self.caches = Caches(shape.device_blocks - 1, shape.host_blocks - 1, True, DUPLICATES_SHARE)
        self.curve = MissRatioCurve(window=_WARM_UP_ENDS / 2, clock=self._clock)
        self.curve.cover(self.caches.device + FACTORS[-1] * self.caches.host)
        engine.on_hit.append(self._on_hit)
        engine.on_end.append(lambda request: self.curve.on_used(request.block_hashes))

    def came(self, trace: Trace) -> Trace:
        """The requests of ``trace``, each at the time at which it came."""
        block_tokens = trace.block_tokens
        size = block_tokens // self._scale
        waits = self._engine.waits
        turns = []
        for request in self._requests:
            assert request.prompt_token_ids is not None
            # The last token is the request's own.
            ids = [token // size for token in request.prompt_token_ids[:-1:size]]
            came = waits[request.request_id].came
            num_output = request.max_tokens * self._scale
            turns.append(Turn(came, 0.0, ids, len(ids) * block_tokens, num_output))
        sessions = [[turn] for turn in sorted(turns, key=lambda turn: turn.at)]
        return Trace(trace.name, block_tokens, sessions)

    def _clock(self) -> float:
        return self._engine.now + _WARM_UP_ENDS * (len(self._requests) > self._num_warm_up)

    def _on_hit(self, request: "Request", hit: Hit) -> None:
        self._requests.append(request)
        # Replays count whole blocks.
        num_tokens = (request.num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        self.curve.on_prompt(request.block_hashes, BLOCK_SIZE, num_tokens + 1)
        self.curve.on_found(hit.device + hit.host, self._tier.num_duplicates)
