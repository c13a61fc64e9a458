"""Runs engines in a process of their own: ``python -m tests.engine.child JOB RESULT``.

The engine core lives in this process, so that its scheduler can be read; with several ranks
vLLM's multiprocessing executor starts one process a rank.
"""

import gc
import itertools
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
import tqdm
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

import tests.engine.random_weights  # noqa: F401 - vLLM's loaders have it from here on
from simple_offload import SimpleCPUOffloadConnector
from simple_offload.backends.base import Direction
from simple_offload.metadata import StepMetadata, Transfer
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.worker.host_pool import HostPool
from tests.engine.harness import tell_stacks_when_asked
from tests.engine.ray_cluster import local_cluster
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

HostChunk = list[torch.Tensor]
"""Consecutive host blocks: int8 tensors ``[blocks, page_bytes]``, one for each region."""


def run_engine(spec: EngineSpec) -> EngineResult:
    """Start the engine, play the rounds, read its books, shut it down."""
    result = EngineResult()
    threads_before = set(threading.enumerate())
    with _connector_warnings(result.warnings), _loads(result.loads), _host_chunks() as chunks:
        try:
            engine = LLMEngine.from_engine_args(_engine_args(spec))
            result.started = True
            try:
                result.rounds = Player(engine, result, chunks).play(spec.rounds)
                _read_books(engine, result)
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
        self._said: dict[str, tuple[int, ...]] = {}  # by ask id: prompt and answer

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
        if each.failing_copies is not None:
            self._let_copies_fail(each.failing_copies)
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
            before = () if ask.follows is None else self._said[ask.follows]
            prompts[ask.id] = (*before, *ask.prompt)
            open_asks[f"{number}/{ask.id}"] = ask
            self.engine.add_request(
                f"{number}/{ask.id}",
                _prompt(prompts[ask.id], ask.cache_salt),
                _greedy(ask.max_tokens, ask.sampling),
            )
        while open_asks:
            for output in self.engine.step():
                assert isinstance(output, RequestOutput)
                open_ask = open_asks.get(output.request_id)
                if open_ask is None:
                    continue  # aborted while this step ran
                if output.finished:
                    del open_asks[output.request_id]
                    answer = _answer_of(output)
                    answers[open_ask.id] = answer
                    self._said[open_ask.id] = (*prompts[open_ask.id], *answer.tokens)
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
        """Turn the sign of one host block's bytes, read as floats, in every region, once a
        step has planned a load of it and before that load is submitted."""
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

    def _let_copies_fail(self, every: int) -> None:
        """Let every so many-th copy, whichever its direction, move nothing and raise."""
        worker: Any = get_kv_transfer_group()
        backend = worker.worker._backend
        copy = backend.copy
        numbers = itertools.count(1)

        def copy_or_fail(direction: Direction, transfer: Transfer, barrier: Any) -> Any:
            if next(numbers) % every == 0:
                self.result.failed_copies += 1
                raise OSError("this copy fails on purpose")
            return copy(direction, transfer, barrier)

        backend.copy = copy_or_fail


def _prompt(tokens: tuple[int, ...], cache_salt: str | None) -> TokensPrompt:
    prompt = TokensPrompt(prompt_token_ids=list(tokens))
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    return prompt


def _greedy(max_tokens: int, others: dict[str, Any]) -> SamplingParams:
    usual: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 2,
        "detokenize": False,
    }
    if others.get("n", 1) > 1:
        usual["output_kind"] = RequestOutputKind.FINAL_ONLY
    return SamplingParams(**usual | others)


def _answer_of(output: RequestOutput) -> Answer:
    completions = output.outputs
    tokens = [token for completion in completions for token in completion.token_ids]
    logprobs = [
        {token: entry.logprob for token, entry in (at or {}).items()}
        for completion in completions
        for at in completion.logprobs or ()
    ]
    ranked = [sorted(at.values(), reverse=True) for at in logprobs]
    return Answer(
        tokens=tokens,
        logprobs=[at[token] for at, token in zip(logprobs, tokens, strict=True)],
        leads=[best - second for best, second, *_ in ranked],
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def _engine_args(spec: EngineSpec) -> EngineArgs:
    transfer = None
    if spec.connector is not None:
        transfer = KVTransferConfig(
            **{
                "kv_connector": "SimpleCPUOffloadConnector",
                "kv_connector_module_path": "simple_offload",
                "kv_role": "kv_both",
                "kv_connector_extra_config": spec.connector,
                **spec.transfer_arguments,
            }
        )
    return EngineArgs(model=str(spec.model), kv_transfer_config=transfer, **spec.arguments)


def _read_books(engine: LLMEngine, result: EngineResult) -> None:
    scheduler = _scheduler_of(engine)
    result.device_pool = _pool_state(scheduler.kv_cache_manager.block_pool)
    connector = _our_connector(scheduler)
    if connector is None or connector.scheduler is None:
        return
    result.host_pool = _pool_state(connector.scheduler.tier.pool)
    problems = []
    try:
        connector.scheduler.check_integrity()
    except AssertionError:
        problems.append(traceback.format_exc())
    if connector.scheduler.num_in_flight:
        problems.append(f"{connector.scheduler.num_in_flight} transfers in flight")
    result.integrity_problem = "\n".join(problems) or None


def _our_connector(scheduler: Any) -> Any:
    """The connector's scheduler side, also where it is one of several."""
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
    """Append to ``messages`` what the package logs as a warning or worse."""

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
    """The cluster that an engine needs whose ranks Ray starts."""
    if spec.arguments.get("distributed_executor_backend") != "ray":
        yield
        return
    with local_cluster(spec.arguments["tensor_parallel_size"]):
        yield


@contextmanager
def _loads(loads: list[tuple[int, int]]) -> Iterator[None]:
    """Append to ``loads`` the first and the last host block of each that is planned."""
    build = OffloadScheduler.build_connector_meta

    def build_and_note(self: OffloadScheduler, scheduler_output: Any) -> StepMetadata:
        metadata = build(self, scheduler_output)
        loads.extend(
            (int(load.host_blocks[0]), int(load.host_blocks[-1])) for load in metadata.loads
        )
        return metadata

    with patch.object(OffloadScheduler, "build_connector_meta", build_and_note):
        yield


@contextmanager
def _host_chunks() -> Iterator[list[HostChunk]]:
    """The chunks of host blocks that the connector opens in this process meanwhile."""
    chunks: list[HostChunk] = []
    cut = HostPool._cut

    def cut_and_note(self: HostPool, memory: torch.Tensor, num_blocks: int) -> HostChunk:
        chunk = cut(self, memory, num_blocks)
        chunks.append(chunk)
        return chunk

    with patch.object(HostPool, "_cut", cut_and_note):
        yield chunks
    chunks.clear()


def main(job_path: Path, result_path: Path) -> None:
    tell_stacks_when_asked()
    tqdm.tqdm.monitor_interval = 0  # else the first progress bar leaves a thread behind
    job = Job.model_validate_json(job_path.read_text())
    results = []
    for spec in job.engines:
        with _ray_cluster(spec):
            results.append(run_engine(spec))
        gc.collect()
        ensure_kv_transfer_shutdown()  # a start that failed half-way leaves its connector
        cleanup_dist_env_and_memory()
    result_path.write_text(JobResult(results=results).model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
