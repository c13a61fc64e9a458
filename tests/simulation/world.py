"""World: one engine, stepped by hand."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from vllm.config import CUDAGraphMode, KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    generate_scheduler_kv_cache_config,
    get_block_hash,
    get_request_block_hasher,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from simple_offload.backends.base import Direction
from simple_offload.config import OffloadConfig
from simple_offload.metadata import StepMetadata, WorkerReport
from simple_offload.ranks import Ranks
from simple_offload.replicas import Replicas
from simple_offload.transfer import Transfer
from simple_offload.worker.rank_pool import Peers
from simple_offload.worker.worker import OffloadWorker
from tests.simulation import checks, integrity, promises, second_tier, wishes
from tests.simulation.attribution import Attribution
from tests.simulation.device import KVMemory, ScriptedDevice
from tests.simulation.identity import Story
from tests.simulation.ledger import Ledger
from tests.simulation.messages import Messages
from tests.simulation.router import EVENTS_CONFIG, Router
from tests.simulation.runner import Runner
from tests.simulation.second_tier import SECONDS_OF_A_STEP, ScriptedDisk
from tests.simulation.shape import SAYS_REPLICAS, Shape
from tests.simulation.vllm_config import make_vllm_config


@dataclass(eq=False)
class Rank:
    """One worker process."""

    memory: KVMemory
    worker: OffloadWorker
    device: ScriptedDevice
    runner: Runner
    out_of_memory: bool = False
    """Whether it opens no more host blocks because it lacks memory."""

    def register(self) -> None:
        self.worker.register_kv_caches(self.memory.kv_caches)


@dataclass
class _Step:
    scheduled: SchedulerOutput
    outputs: list[KVConnectorOutput]
    positions: list[int]
    num_open: list[int]
    """By rank, the number of host blocks open when it reported."""
    samples: dict[str, list[int]] = field(default_factory=dict)


class World:
    """``step`` schedules and submits one engine step. With async scheduling, it processes the
    output of the step before only then."""

    is_ours = True
    """Whether the scheduler side is this project's. It has a handshake, which tells the ranks the
    capacity of the smallest; admission, KV events and counts."""

    def __init__(self, shape: Shape, disk: ScriptedDisk | None = None) -> None:
        """``disk``: of an earlier world."""
        self.shape = shape
        self.disk = disk or ScriptedDisk()
        self.num_steps = 0
        self.seconds = 0.0
        """Since the start."""
        now = lambda: self.seconds  # noqa: E731
        self._stop_clock = (
            second_tier.scripted_clock(now, self.disk) if shape.second_tier else lambda: None
        )
        self.config = make_vllm_config(shape, self.kv_transfer_config())
        self.config.kv_events_config = self.kv_events_config()
        self.kv_cache_configs = [shape.kv_cache_config(rank) for rank in range(shape.num_ranks)]
        are_alike = not (shape.uneven_ranks and self.is_ours)
        self._parallelism = Ranks(shape.num_ranks, shape.num_ranks, are_alike)
        scheduler_class = AsyncScheduler if shape.async_scheduling else Scheduler
        with patch.object(Ranks, "from_config", return_value=self._parallelism):
            self.scheduler: Scheduler = scheduler_class(
                vllm_config=self.config,
                kv_cache_config=generate_scheduler_kv_cache_config(self.kv_cache_configs),
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=shape.scheduler_block_size,
                hash_block_size=shape.hash_size,
                log_stats=False,
            )
        # As vLLM does for a model of pictures. But with a drafter, it would come to a standstill
        # between two pictures, without room for two of each request.
        budget = shape.max_num_batched_tokens
        self.scheduler.max_num_encoder_input_tokens = budget
        room = budget * 2 * shape.max_num_seqs if shape.draft else budget
        self.scheduler.encoder_cache_manager = EncoderCacheManager(room)
        self.connector = self.find_connector()
        self.router = Router(shape.hash_size)
        self.scheduler.kv_event_publisher = cast(Any, self.router)
        self.stories: dict[str, Story] = {}
        self.ranks = self._make_ranks()
        # Some ranks are faster than the handshake, and the handshake of some comes too late.
        for rank, num_chunks in zip(self.ranks, shape.early_chunks, strict=False):
            for _ in range(num_chunks):
                if self.can_open(rank):
                    self.open_chunk(rank)
        if self.is_ours:
            reached = self.ranks[: shape.num_handshakes]
            self.connector.set_xfer_handshake_metadata_pp_aware(
                {(0, index): rank.worker.capacity for index, rank in enumerate(reached)}
            )
        self.ledger = Ledger()
        self.ledger.watch(self.connector)
        self.finished: dict[str, tuple[list[int], RequestStatus]] = {}
        self.requests: dict[str, Request] = {}
        self.reports: dict[str, dict[str, int]] = {}
        """By request, where its reply says that the prompt's tokens came from."""
        self.first_missing: dict[str, dict[str, Any]] = {}
        """By request, which token its reply says is the first that was not found, and why."""
        self.num_blocks_loaded = 0
        self.num_begun_inside = 0
        self.num_ended_inside = 0
        """Loads that begin behind the first sub-block of a host block, and loads that end before
        the last one."""
        self.hits_inside_blocks: set[str] = set()
        """Requests with a load that ended inside a block."""
        self.is_tier_reset = False
        """Whether the host tier has ever been reset."""
        self.promises_no_loss = False
        """Whether stores must be in time: nothing fails, and the tier has had room for all blocks
        so far."""
        self.keeps_up = False
        """Whether copies are fast, and nothing fails or is reset."""
        self.num_evicted = 0
        """Blocks that the device evicted while that was promised and enough blocks were free."""
        self._ever: list[Request] = []
        """All requests so far."""
        self.stores: dict[int, Transfer] = {}
        """By id, all so far."""
        self._failures = checks.Failures(shape.num_sub_blocks)
        self.disk.on_read = self._failures.begin_read
        self._device_pool = self.scheduler.kv_cache_manager.block_pool
        # Watchers call each other in this order, the last one first.
        if self.is_ours:
            scheduler = self.connector.scheduler
            self.answers = promises.Answers(scheduler, shape.max_num_seqs)
            integrity.watch_duplicates(scheduler, self._check_duplicates)
            self._tails = promises.TailsFirst(scheduler)
            self.found = promises.FoundOnDevice(scheduler)
            self.releases = wishes.Releases(scheduler)
            self.moved = promises.MovedHashes(scheduler)
            self.attribution = Attribution(self.connector)
            integrity.set_clock(scheduler, now)
            self._withheld = integrity.watch_withheld(scheduler)
        self._reset_stores: set[int] = set()
        self._aggregator = KVOutputAggregator(shape.num_ranks)
        self._open_steps: deque[_Step] = deque()

    # For other connectors to override

    def kv_transfer_config(self) -> KVTransferConfig:
        """The value of ``--kv-transfer-config``."""
        return KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector",
            kv_connector_module_path="simple_offload",
            kv_role=self.shape.kv_role,
            kv_load_failure_policy=self.shape.load_failures,
            kv_connector_extra_config=self.worker_config(),
        )

    def find_connector(self) -> Any:
        """The connector's scheduler side."""
        return self.scheduler.connector

    def kv_events_config(self) -> KVEventsConfig | None:
        """The value of ``--kv-events-config``."""
        return EVENTS_CONFIG if self.is_ours and self.shape.kv_events else None

    def worker_config(self) -> dict[str, Any]:
        """The configuration of our workers."""
        shape = self.shape
        config: dict[str, Any] = {
            "num_cpu_blocks": shape.num_host_blocks,
            "store_threshold": shape.store_threshold,
            "keep_on_device_reset": shape.keeps_on_reset,
            "allow_reports": shape.allows_reports,
        }
        if shape.lazy is not None:
            config["lazy_offload"] = shape.lazy
        if shape.uneven_ranks:
            del config["num_cpu_blocks"]
            config["cpu_bytes_to_use_per_rank"] = shape.host_bytes
        if shape.second_tier:
            config["second_tier"] = self.disk.config
        if shape.num_sub_blocks > 1:
            config["cpu_block_size"] = shape.num_sub_blocks * shape.scheduler_block_size
        return config

    @property
    def host_pool(self) -> BlockPool:
        """The tier's blocks."""
        return integrity.pool_of(self.connector.scheduler.tier)

    def ids_in_flight(self) -> set[int]:
        """Transfers that the scheduler side still waits for."""
        return integrity.ids_in_flight(self.connector.scheduler)

    def to_step_metadata(self, metadata: KVConnectorMetadata | None) -> StepMetadata:
        """The connector's metadata, as our workers read it."""
        assert isinstance(metadata, StepMetadata)
        return metadata

    def to_connector_output(self, worker: OffloadWorker) -> KVConnectorOutput:
        """Our worker's report, as the connector's scheduler side reads it."""
        loaded, failed = worker.poll()
        return KVConnectorOutput(
            finished_recving=loaded,
            failed_recving=failed,
            kv_connector_worker_meta=worker.drain_report(),
            kv_connector_stats=worker.drain_stats(),
        )

    def check_bookkeeping(self, at_rest: bool) -> None:
        """Raise AssertionError if the scheduler side contradicts itself, or still holds something
        at rest."""
        check = integrity.check_at_rest if at_rest else integrity.check_scheduler
        check(self.connector.scheduler)

    def check_events(self) -> None:
        """The published KV events name exactly the keys that can be found in the tier."""
        if not self.shape.kv_events:
            assert not self.router.keys
            return
        keys = set(self.host_pool.cached_block_hash_to_block._cache)
        if self.shape.num_sub_blocks > 1:
            keys = set().union(*self._sub_keys(keys).values())
        wrong = keys ^ self.router.keys
        assert not wrong, f"KV events are wrong for {len(wrong)} keys; the tier has {len(keys)}"

    def check_counts(self) -> None:
        """Raise AssertionError unless the counts are right. At rest."""
        self.connector.get_kv_connector_stats()  # counts since the last step
        num_bytes = {
            direction: sum(
                rank.device.num_copied[direction] * self.shape.block_bytes(index)
                for index, rank in enumerate(self.ranks)
            )
            for direction in Direction
        }
        num_slots = sum(len(store.host_blocks) for store in self.stores.values())
        num_sent = num_slots // self.shape.num_sub_blocks
        num_used = sum(block.block_hash is not None for block in self.host_pool.blocks)
        self.ledger.check(num_bytes, num_sent, num_used)
        self.attribution.check(self.ledger)

    def _check_rooms(self) -> None:
        """No rank has opened more than the smallest has room for, or one chunk, which it may open
        before it knows that size."""
        shape = self.shape
        if shape.chunk_blocks is not None and shape.uneven_ranks:
            ranks = range(shape.num_ranks)
            rooms = [shape.host_bytes // shape.block_bytes(rank) for rank in ranks]
            pools = [rank.worker.host_pool for rank in self.ranks]
            opened = [pool.num_open for pool in pools]
            first = max(pool.chunk_blocks for pool in pools)
            assert max(opened) <= max(min(rooms), first), f"ranks have opened {opened}"

    def _make_ranks(self) -> list[Rank]:
        """Ranks start at the same time: those that share host memory wait for each other."""
        shape = self.shape
        size = shape.tensor_parallel_size
        stages = [Messages(size) for _ in range(shape.num_stages)]
        peers = [stages[rank // size].of(rank % size) for rank in range(shape.num_ranks)]
        ranks = list(map(self._make_rank, range(shape.num_ranks), peers))
        if shape.num_replicas == 1 and not shape.second_tier:
            for rank in ranks:
                rank.register()
        else:
            with ThreadPoolExecutor(shape.num_ranks) as threads:
                list(threads.map(Rank.register, ranks))
        return ranks

    def _make_rank(self, rank: int, peers: Peers) -> Rank:
        shape = self.shape
        memory = KVMemory(self.kv_cache_configs[rank])
        config = OffloadConfig.parse(self.worker_config(), self._parallelism)
        # Where vLLM says nothing of a layer, the model's number of heads counts. The scripted model
        # has another one.
        replicas = (
            Replicas.find(self.config, self.kv_cache_configs[rank]) if SAYS_REPLICAS else Replicas()
        )
        device = ScriptedDevice()
        if shape.chunk_blocks is not None:
            device.chunk_bytes = shape.chunk_blocks * shape.block_bytes(rank)
        with patch("simple_offload.worker.worker.make_backend", return_value=device):
            worker = OffloadWorker(
                self.kv_cache_configs[rank],
                config,
                self._parallelism,
                replicas,
                lambda: peers,
                # With a drafter, a layer may read without a call (``waiting_layers``).
                waiting_layers=lambda: () if self.config.speculative_config else memory.kv_caches,
            )
        runner = Runner(rank, memory, shape, self.stories)
        runner.former_stories = self.disk.stories
        return Rank(memory, worker, device, runner)

    # What users do

    def add_request(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        salt: str | None,
        epoch: int,
        wishes: Any = None,
        session_id: str | None = None,
        resumable: bool = False,
        needs_grammar: bool = False,
        priority: int | None = None,
        reads_cache: bool = True,
        pictures: Sequence[MultiModalFeatureSpec] = (),
        adapter: LoRARequest | None = None,
        as_embeddings: bool = False,
    ) -> None:
        """Hand a request to the scheduler. ``resumable``: more input may follow (``resume``).
        ``needs_grammar``: it waits for ``compile_grammar``. ``reads_cache``: whether it may hit.
        ``as_embeddings``: whether vLLM gets the embeddings of the prompt's tokens in their place.
        """
        sampling = self._sampling(max_tokens)
        sampling.skip_reading_prefix_cache = not reads_cache
        if wishes is not None:
            sampling.extra_args = {"kv_transfer_params": {"simple_offload": wishes}}
        request = Request(
            request_id=request_id,
            prompt_token_ids=None if as_embeddings else prompt,
            prompt_embeds=torch.tensor(prompt)[:, None] if as_embeddings else None,
            mm_features=list(pictures),
            lora_request=adapter,
            sampling_params=sampling,
            pooling_params=None,
            session_id=session_id,
            cache_salt=salt,
            priority=len(self._ever) * 7 % 5 if priority is None else priority,
            block_hasher=get_request_block_hasher(self.shape.hash_size, sha256),
            resumable=resumable,
        )
        self._tell_story(request, prompt, epoch)
        self.requests[request_id] = request
        self._ever.append(request)
        if needs_grammar:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.scheduler.add_request(request)

    def resume(
        self,
        request_id: str,
        tokens: list[int],
        max_tokens: int,
        pictures: Sequence[MultiModalFeatureSpec] = (),
    ) -> None:
        """More input of a streaming-input session (vLLM's realtime API); none: its end. It may be
        computing or waiting."""
        more = Request(
            request_id=request_id,
            prompt_token_ids=tokens or [0],
            mm_features=list(pictures),
            sampling_params=self._sampling(max_tokens),
            pooling_params=None,
            resumable=bool(tokens),
        )
        self.scheduler.add_request(more)
        self._tell_stories()

    def _sampling(self, max_tokens: int) -> SamplingParams:
        stops = list(range(self.shape.num_stop_tokens))
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stops)

    def is_waiting_for_input(self, request_id: str) -> bool:
        """Whether a session has answered, and more input may come."""
        return self.requests[request_id].status is RequestStatus.WAITING_FOR_STREAMING_REQ

    def compile_grammar(self) -> None:
        """Grammars that requests wait for are there."""
        for request in self.requests.values():
            if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                request.status = RequestStatus.WAITING

    def _tell_story(self, request: Request, prompt: list[int], epoch: int) -> None:
        num_beyond = self.num_batches + (2 + self.num_batches) * self.shape.num_drafted
        adapter = request.lora_request.lora_name if request.lora_request else ""
        self.stories[request.request_id] = Story(
            prompt,
            request.max_tokens,
            (request.cache_salt or "") + adapter,
            epoch,
            num_beyond,
            self.shape.num_stop_tokens,
            request.mm_features,
        )

    def _tell_stories(self) -> None:
        """Sessions with more input have other prompts."""
        for request_id, request in self.requests.items():
            story = self.stories[request_id]
            told = story.num_prompt_tokens, story.num_output_tokens
            if request.resumable and told != (request.num_prompt_tokens, request.max_tokens):
                self._tell_story(request, list(request.prompt_token_ids or ()), story.epoch)

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def reset(self, tier: bool, preempt: bool = False) -> bool:
        """Reset the device's prefix cache and, with ``tier``, the host's. Returns whether vLLM
        reports success: no earlier block is left."""
        stores = self.ids_in_flight() & self.stores.keys()
        must_succeed = self._must_reset(preempt)
        is_reset = bool(
            self.scheduler.reset_prefix_cache(reset_running_requests=preempt, reset_connector=tier)
        )
        if tier or (is_reset and not self.shape.keeps_on_reset):
            self._reset_stores |= stores
            self.is_tier_reset = True
        assert is_reset or not must_succeed, "the device's cache is not reset"
        return is_reset

    def _must_reset(self, preempt: bool) -> bool:
        """Whether a reset of the device's cache succeeds without a connector; or here, at least
        once all loads have ended."""
        scheduler = self.scheduler
        if not self.is_ours or self.shape.keeps_on_reset or scheduler.deferred_frees:
            return False
        holders = [
            request
            for request in scheduler.requests.values()
            if self._has_blocks(request)
            and request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS
            and not (preempt and request.status is RequestStatus.RUNNING)
        ]
        return not holders and integrity.loads_of(self.connector.scheduler).idle

    @property
    def loading(self) -> bool:
        """Whether a request that does not run has device blocks: it waits for a load, or its load
        has ended and it waits to be scheduled."""
        scheduler = self.scheduler
        waiting = [each for each in scheduler.requests.values() if each not in scheduler.running]
        return any(map(self._has_blocks, waiting))

    @property
    def any_waits(self) -> bool:
        """Whether a request waits for its blocks."""
        return not all(map(self._has_blocks, self.requests.values()))

    def _has_blocks(self, request: Request) -> bool:
        return any(self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks)

    # Host memory of a rank

    def can_open(self, rank: Rank) -> bool:
        """Whether the rank still has host blocks to open."""
        pool = rank.worker.host_pool
        has_more = pool.num_open < pool.num_blocks
        return has_more and pool.is_agreed and not rank.out_of_memory

    def open_chunk(self, rank: Rank, granted: bool = True) -> None:
        """Let the rank open its next chunk of host blocks, and return when it has. If not
        ``granted``, there is no memory for this chunk or any later one."""
        pool, gate = rank.worker.host_pool, rank.device.gate
        rank.out_of_memory = not granted
        is_last = pool.num_open + pool.chunk_blocks >= pool.num_blocks
        gate.wait_until_reached()
        gate.answer(granted)
        if is_last or not granted:
            pool.join()
        else:
            gate.wait_until_reached()

    # What the engine does

    @property
    def num_batches(self) -> int:
        """The most batches in flight at once."""
        count: int = self.config.max_concurrent_batches
        return count

    @property
    def has_work(self) -> bool:
        """Whether vLLM's EngineCore would make a step."""
        return self.scheduler.has_requests() or bool(self._open_steps)

    def wait(self, seconds: float = SECONDS_OF_A_STEP) -> None:
        """Let time pass without a step."""
        self.seconds += seconds

    def step(
        self, repeat_hooks: bool = False, meanwhile: Callable[[Rank], None] = lambda rank: None
    ) -> None:
        """Schedule one step, submit it on every rank, and process the oldest output. ``meanwhile``:
        the work of each rank's device before that output is due."""
        self.num_steps += 1
        self.wait()
        # What promises are about: both caches as they were before this step's changes.
        before = self._cached_on_device() if self.promises_no_loss else {}
        were_free = {b.block_id: b.block_hash for b in self._device_pool.blocks if b.ref_cnt == 0}
        kept = set()
        if self.is_ours:
            kept = self._tails.begin(self.requests.values())
            self.answers.begin()
            self._withheld.clear()
            self.found.begin()
        scheduled = self.scheduler.schedule()
        if before:
            self._check_losses(before)
        if self.is_ours:
            self._tails.end(kept)
            self.attribution.end_step()
            metadata = self.to_step_metadata(scheduled.kv_connector_metadata)
            self._check_stores(metadata.stores, were_free)
        self.hits_inside_blocks |= {
            request.request_id
            for request in self.scheduler.requests.values()
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and request.num_computed_tokens % self.shape.block_size
        }
        # The host submits on every rank; what their devices have done until then is random.
        step = _Step(scheduled, [], [], [])
        for rank in self.ranks:
            output, position = self._execute(rank, step, num_calls=2 if repeat_hooks else 1)
            step.outputs.append(output)
            step.positions.append(position)
            meanwhile(rank)
        self._open_steps.append(step)
        # As vLLM's EngineCore.step_with_batch_queue: it goes on without an output while more
        # batches may be in flight and there is something to schedule.
        executed = scheduled.total_num_scheduled_tokens > 0
        while self._open_steps and (
            len(self._open_steps) >= self.num_batches
            or not (executed or self.scheduler.has_requests())
        ):
            self._process_output(self._open_steps.popleft())

    def _execute(self, rank: Rank, step: _Step, num_calls: int) -> tuple[KVConnectorOutput, int]:
        """One rank's model runner. It calls each hook ``num_calls`` times. The V2 runner's output
        does not wait for the drafter. With drafts, the V1 runner asks for results before it drafts,
        and has stores submitted after that, on some stages."""
        scheduled = step.scheduled
        worker, device = rank.worker, rank.device
        metadata = self.to_step_metadata(scheduled.kv_connector_metadata)
        self.num_blocks_loaded += sum(len(load.host_blocks) for load in metadata.loads)
        if rank is self.ranks[0]:
            self._note_transfers(metadata)
        checks.check_open(metadata, worker.host_pool.num_open, self.shape.num_sub_blocks)
        batch = rank.runner.update(scheduled)
        samples = step.samples if rank is self.ranks[0] else {}
        # A step without tokens runs no forward, and its output waits for nothing.
        position = 0
        if batch.works or batch.zeroed or batch.copies:
            position = device.queue_compute(lambda: rank.runner.prepare(batch))
        # vLLM replays a step in which requests decode as one CUDA graph, which calls no hook.
        by_layer = any(num_tokens > 1 for num_tokens in scheduled.num_scheduled_tokens.values())
        with _forward_context(by_layer):
            for _ in range(num_calls):
                worker.bind(metadata)
        if by_layer and metadata.admitted and not rank.runner.has_states:
            for name in rank.runner.layers():
                worker.wait_for_layer(name)
                device.queue_compute(partial(rank.runner.compute_layer, batch, name))
            position = device.queue_compute(lambda: rank.runner.sample(batch, samples))
        elif batch.works:
            position = device.queue_compute(lambda: rank.runner.compute(batch, samples))
        for _ in range(num_calls):
            worker.submit_loads()
        output = self.to_connector_output(worker) if self.shape.polls_before_drafts else None
        if batch.works and self.shape.draft:
            drafted = device.queue_compute(lambda: rank.runner.draft(batch))
            position = position if self.shape.v2_runner else drafted
        if not self.shape.skips_store_hooks(rank.runner.rank, scheduled.total_num_scheduled_tokens):
            for _ in range(num_calls):
                worker.submit_stores()
        for lane in worker.lanes.values():
            lane.flush()
        if output is None:
            output = self.to_connector_output(worker)
        step.num_open.append(worker.host_pool.num_open)
        return output, position

    def _note_transfers(self, metadata: StepMetadata) -> None:
        for store in metadata.stores:
            self.stores[store.id] = store
            self._failures.begin_store(store)
            self._check_admitted()
        for load in metadata.loads:
            self._failures.begin_load(load)
            num_sub_blocks = self.shape.num_sub_blocks
            self.num_begun_inside += bool(load.host_blocks[0] % num_sub_blocks)
            self.num_ended_inside += bool((load.host_blocks[-1] + 1) % num_sub_blocks)

    def _process_output(self, step: _Step) -> None:
        for rank, position in zip(self.ranks, step.positions, strict=True):
            rank.device.compute_until(position)
        # As vLLM's executor: one output of all ranks.
        req_ids = list(step.scheduled.num_scheduled_tokens)
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                req_ids=req_ids,
                req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
                sampled_token_ids=[step.samples.get(req_id, []) for req_id in req_ids],
                kv_connector_output=output,
            )
            for output in step.outputs
        ]
        combined = self._aggregator.aggregate(outputs)
        assert combined is not None
        if combined.kv_connector_output is not None:
            self.ledger.add(combined.kv_connector_output.kv_connector_stats)
        # As vLLM's frontend: a request ends with its last output, but a session goes on.
        for client_outputs in self.scheduler.update_from_output(step.scheduled, combined).values():
            for output in client_outputs.outputs:
                request = self.requests.get(output.request_id)
                if output.finish_reason is None or request is None:
                    continue
                if request.is_finished():
                    self._note_report(output.request_id, output.kv_transfer_params)
                    self._note_finished(output.request_id)
                elif self.is_waiting_for_input(output.request_id):
                    answer = list(request.output_token_ids), RequestStatus.FINISHED_LENGTH_CAPPED
                    checks.check_answer(
                        request.request_id, self.stories[request.request_id], *answer
                    )
        # The next step is scheduled with the outcome of this one, which must be consistent by now.
        self._tell_stories()
        self._propose_drafts(step)
        if self.is_ours:
            self.check_events()
            checks.check_tier_size(self.host_pool, step.num_open, self.shape.num_sub_blocks)
            self._check_rooms()
        report = getattr(combined.kv_connector_output, "kv_connector_worker_meta", None)
        failed = report.failed if isinstance(report, WorkerReport) else ()
        self._failures.on_report(failed, self.ids_in_flight())
        self._check_after_reset()
        # Aborted requests have no last output.
        for request_id in [r for r in self.requests if self.requests[r].is_finished()]:
            self._note_finished(request_id)

    def _propose_drafts(self, step: _Step) -> None:
        """Pass the drafts to the scheduler. With async scheduling, it goes on before it knows their
        number, and it never gets their tokens."""
        if not self.shape.num_drafted or self.shape.async_scheduling:
            return
        in_flight = {
            request_id
            for other in self._open_steps
            for request_id in other.scheduled.num_scheduled_tokens
        }
        running = {request.request_id for request in self.scheduler.running} - in_flight
        drafts = {
            request_id: [0] * (len(tokens) and self._num_proposed(request_id))
            for request_id, tokens in step.samples.items()
            if request_id in running
        }
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def _num_proposed(self, request_id: str) -> int:
        """A drafter model always drafts the same number; n-grams draft as many as they find."""
        if self.shape.draft:
            return self.shape.num_drafted
        return (self.num_steps + len(request_id)) % (self.shape.num_drafted + 1)

    def _cached_on_device(self) -> dict[BlockHashWithGroupId, int]:
        """Host blocks whose contents are in the device's prefix cache, if it has many free
        blocks: by key, the last device block."""
        shape, pool, tier = self.shape, self._device_pool, self.connector.scheduler.tier
        num_empty = tier.num_free - tier.num_used
        self.promises_no_loss = num_empty * shape.num_sub_blocks >= len(pool.blocks)
        per_step = shape.max_num_batched_tokens // shape.block_size + shape.max_num_seqs
        longest = shape.max_model_len // shape.block_size
        if pool.get_num_free_blocks() < (12 * per_step + 3 * longest) * len(shape.groups):
            return {}
        found = {
            block.block_hash: block.block_id
            for block in pool.blocks
            if block.block_hash is not None
            and block.block_hash_num_tokens is not None
            and block.block_hash_num_tokens % (shape.block_size * shape.num_sub_blocks) == 0
        }
        sub_keys = self._sub_keys(found)
        return {key: found[key] for key in found if self._is_on_device(sub_keys[key])}

    def _is_on_device(self, keys: Iterable[BlockHashWithGroupId]) -> bool:
        return all(integrity.has_key(self._device_pool, key) for key in keys)

    def _check_losses(self, before: dict[BlockHashWithGroupId, int]) -> None:
        """Blocks evicted since then must be in the tier, or in a store."""
        stores = integrity.stores_of(self.connector.scheduler)
        kept_out = wishes.kept_out_by(self._ever)
        for key, sub_keys in self._sub_keys(before).items():
            if get_block_hash(key) not in kept_out and not self._is_on_device(sub_keys):
                block_id = before[key]
                self.num_evicted += 1
                assert not stores.absent([key]), (
                    f"device block {block_id} was evicted before it was stored"
                )

    def _sub_keys(
        self, keys: Iterable[BlockHashWithGroupId]
    ) -> dict[BlockHashWithGroupId, set[BlockHashWithGroupId]]:
        """The keys of all sub-blocks of these host blocks."""
        return checks.keys_of_sub_blocks(keys, self._ever, self.shape)

    def _check_duplicates(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """The device has all of what the tier calls a duplicate."""
        for sub_keys in self._sub_keys(keys).values():
            assert self._is_on_device(sub_keys), f"not a duplicate: the device has lost {sub_keys}"

    def _check_stores(self, stores: Iterable[Transfer], were_free: dict[int, Any]) -> None:
        scheduler = self.connector.scheduler
        runs = [run for store in stores for run in integrity.runs_of(scheduler, store.id)]
        wishes.check_stored([key for run in runs for key in run.keys], self._ever)
        promises.check_contents(runs, self._sub_keys)
        limits = self.shape.max_num_seqs, self.shape.max_num_batched_tokens
        were_free = {i: key for i, key in were_free.items() if i not in self._withheld}
        num_blocks = len(self._device_pool.blocks)
        reserve = min(min(limits) * len(self.shape.groups), num_blocks // 4)
        promises.check_free(self._device_pool, were_free, runs, reserve)

    def _check_admitted(self) -> None:
        if self.is_ours and (threshold := self.shape.store_threshold) > 1:
            keys = integrity.keys_to_come(self.connector.scheduler)
            checks.check_admitted(keys, self._ever, threshold)

    def _check_after_reset(self) -> None:
        for transfer_id in sorted(self._reset_stores - self.ids_in_flight()):
            self._reset_stores.discard(transfer_id)
            host_blocks = self.stores[transfer_id].host_blocks
            for block_id in checks.tier_blocks(host_blocks, self.shape.num_sub_blocks):
                block_hash = self.host_pool.blocks[block_id].block_hash
                assert block_hash is None, f"store {transfer_id} was committed after a reset"

    def _note_report(self, request_id: str, params: Any) -> None:
        """The reply has a report, of all tokens of the prompt, if the request wished for one. Where
        it fails with its load, vLLM's reply has none."""
        if not self.is_ours:
            return
        request = self.requests[request_id]
        failed = request.status is RequestStatus.FINISHED_ERROR
        wished = wishes.of(request).get("report") is True and self.shape.allows_reports
        wished = wished and not failed
        assert wished == (params is not None), f"{request_id}: wished {wished}, got {params}"
        if wished:
            self.first_missing[request_id] = params["simple_offload"]["first_missing"]
            self.reports[request_id] = report = params["simple_offload"]["prompt_tokens"]
            assert [*report] == ["device", "host", "second_tier", "compute"]
            assert min(report.values()) >= 0, f"{request_id}: {report}"
            assert sum(report.values()) == request.num_prompt_tokens, f"{request_id}: {report}"

    def _note_finished(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        tokens = list(request.output_token_ids)
        self.finished[request_id] = (tokens, request.status)

    # Invariants

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent, or a block that a copy will
        still touch is free."""
        self.check_copies()
        self.check_bookkeeping(at_rest=False)
        if self.is_ours and not self.shape.second_tier:
            # A second tier may bring what an earlier engine has stored.
            wishes.check_stored(self.host_pool.cached_block_hash_to_block._cache, self._ever)

    def check_step(self) -> None:
        """``check`` after each step, for less: the bookkeeping, which takes longest, in each third
        one. What is wrong there stays wrong."""
        if self.num_steps % 3:
            self.check_copies()
        else:
            self.check()

    def check_copies(self) -> None:
        """Raise AssertionError if a block that a copy will still touch is free, or a copy is not
        one."""
        if self.is_ours:
            self._check_duplicates(integrity.duplicates(self.connector.scheduler))
        cancelled = integrity.cancelled_stores(self.connector.scheduler) if self.is_ours else set()
        pools = self._device_pool, self.host_pool
        for rank in self.ranks:
            checks.check_copies(rank.device, *pools, self.shape.num_sub_blocks, cancelled)

    @property
    def has_disk_work(self) -> bool:
        """Whether the second tier has begun what it has not ended, or would begin something."""
        if not self.is_ours or not self.shape.second_tier:
            return False
        return self.disk.is_busy or not integrity.is_second_tier_idle(self.connector.scheduler)

    def check_at_rest(self) -> None:
        """Raise AssertionError unless every block is free and every map empty."""
        held: set[int] = set()
        if self.is_ours:
            scheduler = self.connector.scheduler
            held = integrity.others_of(scheduler.tier) | integrity.blocks_of_reads(scheduler)
            self.check_counts()
        checks.check_all_free(held, device=self._device_pool, host=self.host_pool)
        self.check_bookkeeping(at_rest=True)
        requests = [*self.scheduler.requests, *self.requests]
        assert not requests, f"requests never ended: {requests}"
        for rank in self.ranks:
            assert not any(rank.device.copies.values()), "copies are left that nothing waits for"

    def check_kept(self) -> None:
        """No blocks have left the tier before others that are of no use without them."""
        if self.is_ours:
            self._tails.check()
        if self.is_ours and self.keeps_up:
            self.found.check()

    def check_finished(self, request_id: str) -> None:
        """Raise AssertionError unless the answer is the one without a host tier: all of it, or a
        beginning if the request was aborted or failed on purpose."""
        checks.check_answer(request_id, self.stories[request_id], *self.finished[request_id])

    def close(self) -> None:
        """Shut the workers down. Copies in flight complete."""
        self.disk.stories += self.stories.values()
        self._stop_clock()
        for rank in self.ranks:
            for lane in rank.worker.lanes.values():
                lane.flush()
            rank.device.abandon()
            if self.can_open(rank):
                self.open_chunk(rank, granted=False)
            rank.worker.shutdown()
        self.scheduler.shutdown()


def _forward_context(by_layer: bool) -> AbstractContextManager[None]:
    """As vLLM's model runner sets it."""
    mode = CUDAGraphMode.PIECEWISE if by_layer else CUDAGraphMode.FULL
    context = ForwardContext({}, {"every layer": cast(Any, None)}, {}, cudagraph_runtime_mode=mode)
    return override_forward_context(context)
