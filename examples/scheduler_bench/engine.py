"""Engine: vLLM's scheduler and a connector, over a device that only counts steps."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from math import inf, isnan, nan
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from examples.bench.connectors import Contender
from examples.scheduler_bench.contenders import Transfer, side_of
from examples.scheduler_bench.plan import CHUNK_TOKENS
from examples.scheduler_bench.planned import Planned, one_group
from examples.scheduler_bench.stopwatch import Stopwatch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

_PATIENCE = 100_000
"""Steps after which a drained engine must be at rest."""


class Hit(NamedTuple):
    """A request's hits when its blocks were allocated, in tokens."""

    device: int
    host: int


@dataclass(slots=True)
class Wait:
    """A request's way to its first token: seconds of the shape's clock."""

    came: float
    got_blocks: float = nan
    began: float = nan
    """Its first step of compute began: what it loads is there."""
    answered: float = nan
    """The step with its first token has ended."""
    num_passed: int = 0
    """Requests that came later and got blocks before it."""


@dataclass(frozen=True)
class Shape:
    """An engine, in blocks and requests."""

    device_blocks: int
    host_blocks: int
    max_running: int = 256
    delay: int = 2
    """Steps until the end of a transfer is reported, at least."""
    bus_blocks: float = inf
    """Blocks that are copied in a second, in each direction."""
    chunk_tokens: int = CHUNK_TOKENS
    """Tokens that a step computes, at most."""
    step_seconds: float = 1.0
    """Time of a step that computes nothing."""
    tokens_per_second: float = inf
    """Speed of computing: each token adds to the time of its step."""


class Bus:
    """Times of copies: those of one direction follow each other."""

    def __init__(self, delay: int, blocks_per_second: float) -> None:
        self._delay = delay
        self._blocks_per_second = blocks_per_second
        self._free_at = {True: 0.0, False: 0.0}
        """By direction, the time at which the last copy ends."""
        self._in_flight: dict[tuple[bool, int], tuple[int, float, Transfer]] = {}
        """By direction and id, the step and the time before which no end is reported."""

    @property
    def idle(self) -> bool:
        """Whether no transfer is in flight."""
        return not self._in_flight

    def submit(self, transfers: Sequence[Transfer], step: int, now: float) -> None:
        """Transfers start with this step at this time, in seconds, or behind others."""
        for transfer in transfers:
            key = (transfer.is_load, transfer.id)
            if transfer.is_urgent:
                if key in self._in_flight:
                    self._in_flight[key] = (step, now, self._in_flight[key][2])
                continue
            start = max(self._free_at[transfer.is_load], now)
            end = start + transfer.num_blocks / self._blocks_per_second
            self._free_at[transfer.is_load] = end
            self._in_flight[key] = (step + self._delay, end, transfer)

    def drain_ended(self, step: int, now: float) -> list[Transfer]:
        """The transfers whose end is reported with the step that starts now."""
        ended = [
            key for key, (first, end, _) in self._in_flight.items() if first <= step and end <= now
        ]
        return [self._in_flight.pop(key)[2] for key in ended]


class Engine:
    """One engine without async scheduling, for the scheduler side of all its ranks.

    Nothing is computed and nothing is copied: a transfer's end is reported some steps later
    (``Bus``), and ``add`` gets the answers beforehand. The time of the connector's hooks is in
    ``stopwatch``.
    """

    def __init__(self, contender: Contender, shape: Shape, planned: Planned | None = None) -> None:
        """``planned``: the model, ``one_group()`` by default. Raises ConfigError, or the
        connector's own error, for settings that it refuses."""
        init_none_hash(sha256)
        self.planned = planned = planned or one_group()
        self.side = side_of(contender)
        self.shape = shape
        transfer = contender.transfer_config(**self.side.size(shape.host_blocks, planned))
        assert transfer is not None
        config = _vllm_config(KVTransferConfig(**transfer), shape, planned.config)
        # As EngineCore does.
        kv_cache = generate_scheduler_kv_cache_config([planned.with_blocks(shape.device_blocks)])
        block_size, self.hash_block_size = resolve_kv_cache_block_sizes(kv_cache, config)
        kv_cache.hash_block_size = self.hash_block_size
        kv_cache.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            kv_cache, config, block_size, self.hash_block_size
        )
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=self.hash_block_size,
            log_stats=False,
        )
        self.connector = cast(Any, self.scheduler.connector)
        self.side.open(self.connector, shape.host_blocks, planned)
        self.stopwatch = Stopwatch(self.connector)
        self.hits: dict[str, Hit] = {}
        self.on_hit: list[Callable[[Request, Hit], None]] = []
        """Are called when a request gets its blocks for the first time."""
        self.on_end: list[Callable[[Request], None]] = []
        """Are called when a request has its whole answer."""
        self.waits: dict[str, Wait] = {}
        """By request, in the order in which they came."""
        self._without_blocks: dict[str, Wait] = {}
        self._first_answers: list[str] = []
        """Requests whose first token comes with this step."""
        self.num_steps = 0
        self.now = 0.0
        """Seconds of the shape's clock. Whoever has nothing to ask for may set it forward."""
        self.num_loaded = 0
        self.num_stored = 0
        """In blocks, since the start."""
        self.num_preempted = 0
        """How often a request has been, since the start."""
        self._answers: dict[str, Sequence[int]] = {}
        self._computed_on_device: dict[str, int] = {}
        self._bus = Bus(shape.delay, shape.bus_blocks)
        self._hasher = get_request_block_hasher(self.hash_block_size, sha256)
        self._observe()

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        answer: Sequence[int],
        came: float | None = None,
    ) -> None:
        """Add a request to the scheduler. It gets ``answer``, a token a step. ``came``: when its
        wait began, if earlier than now."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=len(answer), ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._answers[request_id] = answer
        wait = Wait(self.now if came is None else came)
        self.waits[request_id] = self._without_blocks[request_id] = wait
        self.scheduler.add_request(request)

    @property
    def num_unfinished(self) -> int:
        """Number of requests without their whole answer."""
        return len(self._answers)

    def is_running(self, request_id: str) -> bool:
        """True for a request without its whole answer."""
        return request_id in self._answers

    @property
    def all_decode(self) -> bool:
        """True if the prompt of every request is computed."""
        requests = self.scheduler.requests.values()
        return all(each.num_computed_tokens >= each.num_prompt_tokens for each in requests)

    @property
    def at_rest(self) -> bool:
        """True if no request, no transfer and no deferred store is left."""
        return self._bus.idle and not self.scheduler.has_requests()

    def step(self) -> None:
        """One engine step."""
        self.num_steps += 1
        scheduled = self.scheduler.schedule()
        assert scheduled.kv_connector_metadata is not None
        transfers = self.side.submitted(scheduled.kv_connector_metadata)
        self.num_loaded += sum(each.num_blocks for each in transfers if each.is_load)
        self.num_stored += sum(each.num_blocks for each in transfers if not each.is_load)
        self._bus.submit(transfers, self.num_steps, self.now)
        for request_id in scheduled.num_scheduled_tokens:
            wait = self.waits[request_id]
            if isnan(wait.began):
                wait.began = self.now
        self.num_preempted += len(scheduled.preempted_req_ids or ())
        output = self._output(scheduled)
        requests = self.scheduler.requests.copy()
        for client_outputs in self.scheduler.update_from_output(scheduled, output).values():
            for each in client_outputs.outputs:
                if each.finish_reason is not None:
                    del self._answers[each.request_id]
                    for call in self.on_end:
                        call(requests[each.request_id])
        num_tokens = scheduled.total_num_scheduled_tokens
        self.now += self.shape.step_seconds + num_tokens / self.shape.tokens_per_second
        for request_id in self._first_answers:
            self.waits[request_id].answered = self.now
        self._first_answers.clear()

    def drain(self) -> None:
        """Step until no request, no transfer and no deferred store is left."""
        for _ in range(_PATIENCE):
            if self.at_rest:
                return
            self.step()
        raise RuntimeError(f"not at rest after {_PATIENCE} steps")

    def reset_device(self) -> None:
        """Empty the device's prefix cache, as if everything had been evicted. At rest only."""
        if not self.scheduler.reset_prefix_cache():
            raise RuntimeError("blocks are held at rest, the device's cache cannot be emptied")

    def close(self) -> None:
        """Free the pools."""
        self.scheduler.shutdown()

    def _output(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        request_ids = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[self._sample(request_id) for request_id in request_ids],
            kv_connector_output=self.side.report(
                self._bus.drain_ended(self.num_steps, self.now), self.planned.num_ranks
            ),
        )

    def _sample(self, request_id: str) -> list[int]:
        request = self.scheduler.requests[request_id]
        if request.num_computed_tokens < request.num_tokens:
            return []  # a part of its prompt
        if not request.num_output_tokens:
            self._first_answers.append(request_id)
        return [self._answers[request_id][request.num_output_tokens]]

    def _note_blocks(self, request_id: str) -> None:
        for earlier, wait in self._without_blocks.items():
            if earlier == request_id:
                break
            wait.num_passed += 1
        self._without_blocks.pop(request_id).got_blocks = self.now

    def _observe(self) -> None:
        """Record the hits of each request, outside the stopwatch."""
        lookup: Callable[..., Any] = self.connector.get_num_new_matched_tokens
        allocated: Callable[..., Any] = self.connector.update_state_after_alloc

        def observed_lookup(request: Request, num_computed_tokens: int) -> Any:
            self._computed_on_device[request.request_id] = num_computed_tokens
            return lookup(request, num_computed_tokens)

        def observed_allocation(
            request: Request, blocks: "KVCacheBlocks", num_external_tokens: int
        ) -> None:
            on_device = self._computed_on_device.get(request.request_id, 0)
            if request.request_id not in self.hits:
                hit = Hit(on_device, num_external_tokens)
                self.hits[request.request_id] = hit
                self._note_blocks(request.request_id)
                for call in self.on_hit:
                    call(request, hit)
            allocated(request, blocks, num_external_tokens)

        self.connector.get_num_new_matched_tokens = observed_lookup
        self.connector.update_state_after_alloc = observed_allocation


def _vllm_config(transfer: KVTransferConfig, shape: Shape, model: VllmConfig) -> VllmConfig:
    config = copy(model)  # a new one would be changed by vLLM's platform
    config.cache_config = copy(model.cache_config)
    config.cache_config.num_gpu_blocks = shape.device_blocks
    config.scheduler_config = scheduler = copy(model.scheduler_config)
    scheduler.max_num_seqs = shape.max_running
    scheduler.max_num_batched_tokens = shape.chunk_tokens
    scheduler.max_num_scheduled_tokens = None
    scheduler.async_scheduling = False
    config.kv_transfer_config = transfer
    has_groups = KVConnectorFactory.supports_hma_config(transfer)
    scheduler.disable_hybrid_kv_cache_manager = not has_groups
    return config
