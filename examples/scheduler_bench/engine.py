"""Engine: vLLM's scheduler and a connector, over a device that only counts steps."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from transformers import LlamaConfig
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from examples.scheduler_bench.contenders import Contender, Transfer
from examples.scheduler_bench.plan import BLOCK_SIZE, CHUNK_TOKENS
from examples.scheduler_bench.stopwatch import Stopwatch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

MAX_MODEL_LEN = 135_168
"""A prompt of 128K tokens and its answer."""
_LAYERS = ("0",)
_PATIENCE = 1_000
"""Steps after which a drained engine must be at rest."""


class Stuck(RuntimeError):
    """An engine that does not come to rest."""


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

    @classmethod
    def of_8b(cls, device_blocks: int, host_blocks: int, max_running: int = 256) -> "Shape":
        """With the speeds of an 8B model on an H200: decoding reads the weights in 6 ms, and copies
        of one direction have 54 GB/s. vLLM's null blocks come on top."""
        return cls(
            device_blocks + 1,
            host_blocks + 1,
            max_running,
            bus_blocks=409_600 / BLOCK_SIZE,
            step_seconds=0.006,
            tokens_per_second=40_000.0,
        )


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
    """One rank, one full attention group, no async scheduling.

    Nothing is computed and nothing is copied: a transfer's end is reported some steps later
    (``Bus``), and ``add`` gets the answers beforehand. The time of the connector's hooks is in
    ``stopwatch``.
    """

    def __init__(self, contender: Contender, shape: Shape) -> None:
        """Raises ConfigError, or the connector's own error, for settings that it refuses."""
        self.side = contender.side
        self.shape = shape
        kv_cache_config = _kv_cache_config(shape.device_blocks)
        block_bytes = kv_cache_config.kv_cache_tensors[0].block_stride
        config = _vllm_config(contender, shape, block_bytes)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=False,
        )
        self.connector = cast(Any, self.scheduler.connector)
        self.side.open(self.connector, shape.host_blocks, block_bytes)
        self.stopwatch = Stopwatch(self.connector)
        self.hits: dict[str, Hit] = {}
        self.on_hit: Callable[[Request, Hit], None] = lambda _, __: None
        """Is called when a request gets its blocks for the first time."""
        self.on_end: Callable[[Request], None] = lambda _: None
        """Is called when a request has its whole answer."""
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
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
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
        return all(r.num_computed_tokens >= r.num_prompt_tokens for r in self._requests)

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
            if wait.began != wait.began:  # not a number yet
                wait.began = self.now
        self.num_preempted += len(scheduled.preempted_req_ids or ())
        output = self._output(scheduled)
        requests = self.scheduler.requests.copy()
        for client_outputs in self.scheduler.update_from_output(scheduled, output).values():
            for each in client_outputs.outputs:
                if each.finish_reason is not None:
                    del self._answers[each.request_id]
                    self.on_end(requests[each.request_id])
        self.stopwatch.end_step()
        num_tokens = scheduled.total_num_scheduled_tokens
        self.now += self.shape.step_seconds + num_tokens / self.shape.tokens_per_second
        for request_id in self._first_answers:
            self.waits[request_id].answered = self.now
        self._first_answers.clear()

    def drain(self) -> None:
        """Step until no request, no transfer and no deferred store is left."""
        patience = _PATIENCE + sum(
            len(request.prompt_token_ids or ()) // CHUNK_TOKENS + request.max_tokens
            for request in self._requests
        )
        for _ in range(patience):
            if self.at_rest:
                return
            self.step()
        raise Stuck(f"not at rest after {patience} steps")

    def reset_device(self) -> None:
        """Empty the device's prefix cache, as if everything had been evicted. At rest only."""
        if not self.scheduler.reset_prefix_cache():
            raise Stuck("blocks are held at rest, and the device's cache cannot be emptied")

    def close(self) -> None:
        """Free the pools."""
        self.scheduler.shutdown()

    @property
    def _requests(self) -> list[Request]:
        return list(self.scheduler.requests.values())

    def _output(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        request_ids = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[self._sample(request_id) for request_id in request_ids],
            kv_connector_output=self.side.report(self._bus.drain_ended(self.num_steps, self.now)),
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
                self.on_hit(request, hit)
            allocated(request, blocks, num_external_tokens)

        self.connector.get_num_new_matched_tokens = observed_lookup
        self.connector.update_state_after_alloc = observed_allocation


def _kv_cache_config(num_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=num_blocks * page,
        layers=list(_LAYERS),
        layer_stride=num_blocks * page,
        block_stride=page,
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(list(_LAYERS), spec)],
        prefix_cache_retention_interval=CacheConfig().prefix_cache_retention_interval,
    )


def _vllm_config(contender: Contender, shape: Shape, block_bytes: int) -> VllmConfig:
    init_none_hash(sha256)
    side = contender.side
    cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = shape.device_blocks
    config = VllmConfig(
        model_config=_model_config(),
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.max_running,
            max_num_batched_tokens=shape.chunk_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=side.connector,
            kv_connector_module_path=side.module,
            kv_role="kv_both",
            kv_connector_extra_config={
                **side.extra_config(shape.host_blocks, block_bytes),
                **contender.extra,
            },
        ),
    )
    config.cache_config.block_size = BLOCK_SIZE
    config.scheduler_config.async_scheduling = False
    return config


@lru_cache(maxsize=1)
def _model_config() -> ModelConfig:
    """vLLM reads the folder once, so it need not stay."""
    with tempfile.TemporaryDirectory(prefix="simple-offload-bench-") as directory:
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=1024,
            hidden_size=1024,
            num_hidden_layers=len(_LAYERS),
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=MAX_MODEL_LEN,
        ).save_pretrained(Path(directory))
        return ModelConfig(
            model=directory,
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            dtype="bfloat16",
        )
