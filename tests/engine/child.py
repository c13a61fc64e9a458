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
from simple_offload.backends.cuda.queues import CudaQueues
from simple_offload.backends.host import HostBackend
from simple_offload.worker.layer_groups import LayerGroups
from tests.engine.live import LiveEngine, clean_up_process
from tests.engine.ray_cluster import cluster_for
from tests.engine.spec import Answer, EngineResult, EngineSpec, Round

_LATE_CYCLES = 200_000_000
"""Some 100 ms: longer than such a model takes to compute the layers before, and so long that loads
are divided (``simple_offload.worker.overlap``)."""

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
    with _host_chunks() as chunks, _waits(too_little=spec.waits_too_little):
        try:
            engine = LiveEngine(spec)
            result.started = True
            try:
                player = _Player(engine, result, chunks)
                with _slow_loads():
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
def _slow_loads() -> Iterator[None]:
    """On a CUDA device, loads wait before each layer group. These models' loads would end before
    compute could begin."""
    submit = CudaQueues.submit

    def submit_late(self: CudaQueues, direction: Direction, *rest: Any, **more: Any) -> Any:
        if direction is Direction.LOAD:
            for stream in (self._streams, self._kernel_streams):
                with torch.cuda.stream(stream[direction]):
                    torch.cuda._sleep(_LATE_CYCLES)
        return submit(self, direction, *rest, **more)

    with patch.object(CudaQueues, "submit", submit_late):
        yield


@contextmanager
def _waits(*, too_little: bool) -> Iterator[None]:
    """With ``too_little``, each layer of engines that start in this context waits for one layer
    group less than it needs."""
    find = LayerGroups.find

    def find_less(*arguments: Any) -> LayerGroups:
        groups = find(*arguments)
        if not too_little:
            return groups
        fewer = {layer: max(1, count - 1) for layer, count in groups.num_needed.items()}
        return replace(groups, num_needed=fewer)

    with patch.object(LayerGroups, "find", find_less):
        yield


@contextmanager
def _host_chunks() -> Iterator[list[HostChunk]]:
    """The chunks of host blocks that the connector opens in this process during the context."""
    chunks: list[HostChunk] = []
    backend: Any = CudaBackend if torch.cuda.is_available() else HostBackend
    add = backend.add_host_chunk

    def record_and_add(self: Any, regions: HostChunk) -> None:
        chunks.append(regions)
        add(self, regions)

    with patch.object(backend, "add_host_chunk", record_and_add):
        yield chunks
    chunks.clear()
