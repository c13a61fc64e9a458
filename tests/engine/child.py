"""Runs engines, one after another, in a process of their own."""

import threading
import traceback
from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from vllm.v1.metrics.reader import Counter, Gauge, get_metrics_snapshot

import tests.engine.random_weights  # noqa: F401 - vLLM's loaders have it from here on
from simple_offload.backends.base import Direction
from simple_offload.backends.cuda.backend import CudaBackend
from simple_offload.worker import layer_groups, overlap
from simple_offload.worker.host_pool import HostPool
from simple_offload.worker.overlap import Overlap
from tests.engine.live import LiveEngine, clean_up_process
from tests.engine.ray_cluster import cluster_for
from tests.engine.spec import Answer, EngineResult, EngineSpec, Round

_LATE_CYCLES = 5_000_000
"""A few milliseconds: longer than such a model takes to compute the layers before."""

HostChunk = list[torch.Tensor]
"""Consecutive host blocks: int8 tensors ``[blocks, page_bytes]``, one for each region."""


def run_engines(specs: list[EngineSpec]) -> list[EngineResult]:
    """Run each engine from its start to its shutdown."""
    results = []
    for spec in specs:
        with cluster_for(spec):
            results.append(_run_engine(spec))
        clean_up_process()
    return results


def _run_engine(spec: EngineSpec) -> EngineResult:
    result = EngineResult()
    threads_before = set(threading.enumerate())
    with _host_chunks() as chunks, _slow_loads(waits_too_little=spec.waits_too_little):
        try:
            engine = LiveEngine(spec)
            result.started = True
            try:
                player = _Player(engine, result, chunks)
                result.rounds = [player.play(each) for each in spec.rounds]
                engine.drain()
                result.left = engine.left()
                result.metrics = _metrics()
                result.memory = _memory()
                if engine.offload is not None:
                    result.num_host_blocks = engine.offload.tier.num_blocks - 1
            finally:
                engine.shut_down()
        except Exception:  # noqa: BLE001 - whatever it is, the parent reports it
            result.error = traceback.format_exc()
    survivors = set(threading.enumerate()) - threads_before
    result.surviving_threads = sorted(thread.name for thread in survivors)
    return result


class _Player:
    """Plays rounds on one engine, and notes its loads."""

    def __init__(self, engine: LiveEngine, result: EngineResult, chunks: list[HostChunk]) -> None:
        self._engine = engine
        self._result = result
        self._chunks = chunks
        self._corrupts = False
        if engine.offload is not None:
            build = engine.offload.build_connector_meta

            def build_and_note(scheduler_output: Any) -> Any:
                metadata = build(scheduler_output)
                for load in metadata.loads:
                    self._note(int(load.host_blocks[0]), int(load.host_blocks[-1]))
                return metadata

            engine.offload.build_connector_meta = build_and_note  # type: ignore[method-assign]

    def play(self, each: Round) -> dict[str, Answer]:
        """The answers of one round, without those of aborted requests."""
        if each.reset != "none":
            self._engine.reset_device(both=each.reset == "both")
        self._corrupts = each.corrupt_a_block
        self._engine.answers = {}
        for batch in [each.asks] if each.together else [(ask,) for ask in each.asks]:
            self._engine.play(batch)
        return self._engine.answers

    def _note(self, first: int, last: int) -> None:
        """Note a planned load. Negate the floats of its first host block, in every region, if this
        round wants that; the load is not yet submitted."""
        self._result.loads.append((first, last))
        if self._corrupts:
            self._corrupts = False
            chunk, row = divmod(first, len(self._chunks[0][0]))
            for region in self._chunks[chunk]:
                region[row].view(torch.float32).neg_()
            self._result.num_corrupted_blocks += 1


def _memory() -> dict[str, int]:
    """Memory of this process and its descendants, by kind. A page that several of them have mapped
    counts for each in part."""
    me = psutil.Process()
    found: Counts[str] = Counts()
    for process in (me, *me.children(recursive=True)):
        with suppress(OSError):  # it has ended
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            for line in rollup.splitlines()[1:]:
                kind, kib = line.split()[:2]
                found[kind.rstrip(":")] += int(kib) * 1024
    return dict(found)


def _metrics() -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        if isinstance(metric, Counter | Gauge):
            name = metric.name.removeprefix("vllm:").removesuffix("_total")
            found[name] = found.get(name, 0) + metric.value
    return found


@contextmanager
def _slow_loads(*, waits_too_little: bool) -> Iterator[None]:
    """On a CUDA device, loads wait before each layer group. These models' loads would end before
    compute could begin. Parts of their small pages count as large enough."""
    if not torch.cuda.is_available():
        yield
        return
    queue_group, on_layer = CudaBackend._queue_group, Overlap.on_layer

    def queue_late(
        self: CudaBackend, pending: Any, direction: Direction, *rest: Any, **more: Any
    ) -> None:
        if direction is Direction.LOAD:
            for stream in (self._queues._streams, self._queues._kernel_streams):
                with torch.cuda.stream(stream[direction]):
                    torch.cuda._sleep(_LATE_CYCLES)
        queue_group(self, pending, direction, *rest, **more)

    def wait_for_one_less(self: Overlap, name: str) -> None:
        num_needed = self._groups.num_needed
        fewer = {layer: max(1, count - 1) for layer, count in num_needed.items()}
        self._groups = replace(self._groups, num_needed=fewer)
        on_layer(self, name)
        self._groups = replace(self._groups, num_needed=num_needed)

    with (
        patch.object(layer_groups, "MIN_BYTES", 1),
        patch.object(overlap, "LEAST_LAGS", 0.0),
        patch.object(CudaBackend, "_queue_group", queue_late),
        patch.object(Overlap, "on_layer", wait_for_one_less if waits_too_little else on_layer),
    ):
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
