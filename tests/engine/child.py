"""Runs engines in a process of their own: ``python -m tests.engine.child JOB RESULT``.

The engine core lives in this process, so that tests can read its scheduler. With several ranks,
vLLM's multiprocessing executor starts one process per rank.
"""

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

import tests.engine.random_weights  # noqa: F401 - vLLM's loaders have it from here on
from simple_offload import SimpleCPUOffloadConnector
from simple_offload.metadata import StepMetadata
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.worker.host_pool import HostPool
from tests.engine.harness import prepare_child
from tests.engine.ray_cluster import local_cluster
from tests.engine.requests import answer_of, clean_up_process, engine_args, greedy, prompt_of
from tests.engine.spec import (
    Answer,
    Ask,
    EngineResult,
    EngineSpec,
    Job,
    JobResult,
    PoolState,
    Round,
)
from tests.simulation import integrity

HostChunk = list[torch.Tensor]
"""Consecutive host blocks: int8 tensors ``[blocks, page_bytes]``, one for each region."""


def run_engine(spec: EngineSpec) -> EngineResult:
    """Start the engine, play the rounds, check its state, shut it down."""
    result = EngineResult()
    threads_before = set(threading.enumerate())
    with _connector_warnings(result.warnings), _loads(result.loads), _host_chunks() as chunks:
        try:
            engine = LLMEngine.from_engine_args(engine_args(spec, EngineArgs))
            result.started = True
            try:
                result.rounds = Player(engine, result, chunks).play(spec.rounds)
                _read_state(engine, result)
                result.metrics = _counters()
            finally:
                engine.engine_core.shutdown()
        except Exception:  # noqa: BLE001 - whatever it is, the parent reports it
            result.error = traceback.format_exc()
    survivors = set(threading.enumerate()) - threads_before
    result.surviving_threads = sorted(thread.name for thread in survivors)
    return result


class Player:
    """Plays rounds on one engine."""

    def __init__(self, engine: LLMEngine, result: EngineResult, chunks: list[HostChunk]) -> None:
        self.engine = engine
        self.result = result
        self.chunks = chunks
        self.scheduler = _scheduler_of(engine)
        self._dialogs: dict[str, tuple[int, ...]] = {}  # ask id -> prompt and answer

    def play(self, rounds: tuple[Round, ...]) -> list[dict[str, Answer]]:
        """Play all rounds, then step until the last store has ended."""
        answers = [self._play_round(number, each) for number, each in enumerate(rounds)]
        self._drain()
        return answers

    def _play_round(self, number: int, each: Round) -> dict[str, Answer]:
        if each.reset != "none":
            self._drain()
            assert self.engine.reset_prefix_cache(reset_connector=each.reset == "both")
        if each.corrupt_a_block:
            self._corrupt_first_load()
        batches = [each.asks] if each.together else [(ask,) for ask in each.asks]
        answers: dict[str, Answer] = {}
        for batch in batches:
            answers |= self._answer(number, batch)
        return answers

    def _answer(self, number: int, asks: tuple[Ask, ...]) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        open_asks: dict[str, Ask] = {}
        prompts: dict[str, tuple[int, ...]] = {}
        for ask in asks:
            before = () if ask.follows is None else self._dialogs[ask.follows]
            prompts[ask.id] = (*before, *ask.prompt)
            open_asks[f"{number}/{ask.id}"] = ask
            self.engine.add_request(
                f"{number}/{ask.id}",
                prompt_of(prompts[ask.id], ask.cache_salt),
                greedy(ask.max_tokens, **ask.sampling),
            )
        while open_asks:
            for output in self.engine.step():
                assert isinstance(output, RequestOutput)
                open_ask = open_asks.get(output.request_id)
                if open_ask is None:
                    continue  # aborted while this step ran
                if output.finished:
                    del open_asks[output.request_id]
                    answer = answer_of(output)
                    answers[open_ask.id] = answer
                    self._dialogs[open_ask.id] = (*prompts[open_ask.id], *answer.tokens)
                elif open_ask.abort_after is not None and (
                    len(output.outputs[0].token_ids) >= open_ask.abort_after
                ):
                    del open_asks[output.request_id]
                    self.engine.abort_request([output.request_id])
        return answers

    def _drain(self) -> None:
        while self.scheduler.has_requests():
            self.engine.step()

    def _corrupt_first_load(self) -> None:
        """Negate the floats of one host block, in every region, once. This happens after a step has
        planned the block's load and before the load is submitted."""
        connector = self.scheduler.connector
        build = connector.build_connector_meta

        def build_and_corrupt(scheduler_output: Any) -> Any:
            metadata = build(scheduler_output)
            if metadata.loads:
                connector.build_connector_meta = build
                chunk, row = divmod(int(metadata.loads[0].host_blocks[0]), len(self.chunks[0][0]))
                for region in self.chunks[chunk]:
                    region[row].view(torch.float32).neg_()
                self.result.corrupted_blocks += 1
            return metadata

        connector.build_connector_meta = build_and_corrupt


def _read_state(engine: LLMEngine, result: EngineResult) -> None:
    scheduler = _scheduler_of(engine)
    result.device_pool = _pool_state(scheduler.kv_cache_manager.block_pool)
    connector = _our_connector(scheduler)
    if connector is None or connector.scheduler is None:
        return
    result.host_pool = _pool_state(integrity.pool_of(connector.scheduler.tier))
    problems = []
    try:
        integrity.check_scheduler(connector.scheduler)
    except AssertionError:
        problems.append(traceback.format_exc())
    if in_flight := integrity.ids_in_flight(connector.scheduler):
        problems.append(f"{len(in_flight)} transfers in flight")
    result.integrity_problem = "\n".join(problems) or None


def _our_connector(scheduler: Any) -> Any:
    """The connector's scheduler side, also inside a MultiConnector."""
    several = getattr(scheduler.connector, "sub_connectors", [scheduler.connector])
    ours = [each for each in several if isinstance(each, SimpleCPUOffloadConnector)]
    return ours[0] if ours else None


def _scheduler_of(engine: LLMEngine) -> Any:
    client = engine.engine_core
    assert isinstance(client, InprocClient), "the engine core runs in another process"
    return client.engine_core.scheduler


def _pool_state(pool: BlockPool) -> PoolState:
    return PoolState(free=pool.get_num_free_blocks(), total=pool.num_gpu_blocks - 1)


def _counters() -> dict[str, float]:
    counters: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        if isinstance(metric, Counter):
            name = metric.name.removeprefix("vllm:").removesuffix("_total")
            counters[name] = counters.get(name, 0) + metric.value
    return counters


@contextmanager
def _connector_warnings(messages: list[str]) -> Iterator[None]:
    """Append the package's log messages from level WARNING on to ``messages``."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "simple_offload" in record.pathname:
                messages.append(record.getMessage())

    listener = Listener(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("simple_offload", "vllm")]
    for logger in loggers:
        logger.addHandler(listener)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(listener)


@contextmanager
def _ray_cluster(spec: EngineSpec) -> Iterator[None]:
    """A Ray cluster, if the engine's executor needs one."""
    if spec.arguments.get("distributed_executor_backend") != "ray":
        yield
        return
    with local_cluster(spec.arguments["tensor_parallel_size"]):
        yield


@contextmanager
def _loads(loads: list[tuple[int, int]]) -> Iterator[None]:
    """Append the first and the last host block of each planned load to ``loads``."""
    build = OffloadScheduler.build_connector_meta

    def build_and_record(self: OffloadScheduler, scheduler_output: Any) -> StepMetadata:
        metadata = build(self, scheduler_output)
        loads.extend(
            (int(load.host_blocks[0]), int(load.host_blocks[-1])) for load in metadata.loads
        )
        return metadata

    with patch.object(OffloadScheduler, "build_connector_meta", build_and_record):
        yield


@contextmanager
def _host_chunks() -> Iterator[list[HostChunk]]:
    """The chunks of host blocks that the connector opens in this process during the context."""
    chunks: list[HostChunk] = []
    cut = HostPool._cut

    def cut_and_record(self: HostPool, memory: torch.Tensor, num_blocks: int) -> HostChunk:
        chunk = cut(self, memory, num_blocks)
        chunks.append(chunk)
        return chunk

    with patch.object(HostPool, "_cut", cut_and_record):
        yield chunks
    chunks.clear()


def main(job_path: Path, result_path: Path) -> None:
    prepare_child()
    job = Job.model_validate_json(job_path.read_text())
    results = []
    for spec in job.engines:
        with _ray_cluster(spec):
            results.append(run_engine(spec))
        clean_up_process()
    result_path.write_text(JobResult(results=results).model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
