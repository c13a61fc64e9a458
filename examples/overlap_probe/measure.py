"""One run on a CUDA device: loads in groups of layers, forward passes, and both together."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch

from examples.overlap_probe.model import FlashAttention, Model, Step
from examples.overlap_probe.plan import EAGER, GRAPHS, PARTS, Plan
from examples.overlap_probe.results import Kind, Results
from simple_offload.backends.base import Direction
from simple_offload.backends.cuda.backend import CudaBackend
from simple_offload.backends.cuda.queues import CudaPending
from simple_offload.transfer import BlockIds, Transfer

_POISON = 50.0
"""KV of a block before its load. Finite: attention may multiply it by zero where it is masked."""
_EAGER_EVERY = 4  # rounds

Load = list["Future[CudaPending]"]
"""A load on its way, group by group."""


class Pass(NamedTuple):
    """A load and the forward pass behind it, in seconds."""

    both: float
    """From the load's submission to the end of the pass."""
    copied: float
    """In which the device copied."""
    queued: float
    """From the submission until the host had queued the first group's layers: a call waits while
    the device's queue is full."""
    is_right: bool
    """Whether the logits are the expected ones."""


def plan_load(blocks: BlockIds, groups: int) -> list[Transfer]:
    """A transfer for each group of layers, the first layers first. Rows are the blocks cut into
    ``groups`` pages: the layers of group g in block b are row ``b * groups + g``."""
    rows = [blocks * groups + group for group in range(groups)]
    return [Transfer(group, row, row) for group, row in enumerate(rows)]


class Loader:
    """Loads in ``groups`` groups of layers, by our backend. A thread submits the copies, as a
    ``CopyLane`` does for all but small loads."""

    def __init__(self, groups: int, pool: torch.Tensor, chunks: Sequence[torch.Tensor]) -> None:
        """``pool`` and ``chunks``, of the device and of pinned memory: int8 ``[blocks, bytes]``."""
        self.groups = groups
        self.backend = CudaBackend("dma")
        page = pool.shape[1] // groups
        self.backend.open([pool.view(-1, page)])
        for chunk in chunks:
            self.backend.add_host_chunk([chunk.view(-1, page)])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="overlap-probe-load")
        self._thread.submit(self.backend.enter_thread, Direction.LOAD).result()

    def start(self, blocks: BlockIds) -> Load:
        """Submit the load of ``blocks``. Each future ends when the device has accepted a group."""
        plan, copy = plan_load(blocks, self.groups), self.backend.copy
        return [
            self._thread.submit(copy, Direction.LOAD, transfer, self.backend.barrier())
            for transfer in plan
        ]

    def close(self) -> None:
        """Return when no copy is under way any more."""
        self._thread.shutdown()
        torch.cuda.synchronize()
        self.backend.close()


class Rig:
    """A model, its KV on the device and on the host, and a loader for each number of groups."""

    def __init__(self, results: Results, stack: ExitStack) -> None:
        plan, shape = results.plan, results.plan.shape
        device = current_device()
        loaded, tail = (
            -(-max(tokens) // shape.block_tokens) for tokens in (plan.contexts, plan.new_tokens)
        )
        pool = torch.empty(loaded + tail, *shape.block_shape, dtype=torch.bfloat16, device=device)
        self.pool = pool.normal_()
        raw = pool.view(torch.int8).view(len(pool), shape.block_bytes)
        chunks = self._pin(loaded, shape.block_bytes, stack)
        self.loaders = {groups: Loader(groups, raw, chunks) for groups in plan.groups}
        for loader in self.loaders.values():
            stack.callback(loader.close)
        self.blocks = np.arange(loaded)
        backend = self.loaders[1].backend
        (everything,) = plan_load(self.blocks, 1)
        backend.copy(Direction.STORE, everything, backend.barrier()).wait()
        attention = FlashAttention(device)
        results.attention = f"FA{attention.version}"
        model = Model(shape, device)
        self.steps = [
            Step(model, attention, pool, new_tokens, context)
            for context in plan.contexts
            for new_tokens in plan.new_tokens
        ]
        for step in self.steps:
            step.learn()

    @staticmethod
    def _pin(num_blocks: int, block_bytes: int, stack: ExitStack) -> list[torch.Tensor]:
        """Host memory as a ``HostPool`` opens it."""
        memory = CudaBackend("dma")
        stack.callback(memory.close)
        per_chunk = max(1, memory.chunk_bytes // block_bytes)
        counts = [min(per_chunk, num_blocks - i) for i in range(0, num_blocks, per_chunk)]
        return [
            memory.allocate_host(count * block_bytes).view(count, block_bytes) for count in counts
        ]

    def load(self, groups: int, blocks: BlockIds) -> float:
        """Seconds of a load alone, from its submission to its end."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        for group in self.loaders[groups].start(blocks):
            group.result().wait()
        return time.perf_counter() - started

    def load_and_compute(self, step: Step, launch: str, groups: int, lag_seconds: float) -> Pass:
        """Load the context of ``step``, and compute each group's layers behind its bytes. The host
        queues no compute in the first ``lag_seconds``."""
        self.pool[: step.context_blocks] = _POISON
        step.logits.zero_()
        torch.cuda.synchronize()
        parts, queued_at = step.launches[launch], 0.0
        started = time.perf_counter()
        load = self.loaders[groups].start(self.blocks[: step.context_blocks])
        time.sleep(max(0.0, started + lag_seconds - time.perf_counter()))
        for index, group in enumerate(load):
            group.result().hold_compute()
            for part in parts[index * PARTS // groups : (index + 1) * PARTS // groups]:
                part()
            queued_at = queued_at or time.perf_counter()
        torch.cuda.current_stream().synchronize()
        both = time.perf_counter() - started
        first, last = load[0].result(), load[-1].result()
        last.wait()
        copied = first.start.elapsed_time(last.marks[-1].event) / 1e3
        is_right = torch.equal(step.logits, step.expected[launch])
        return Pass(both, copied, queued_at - started, is_right)

    def compute(self, step: Step, launch: str) -> float:
        """Seconds of the forward pass on the device."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step.run(launch)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def compute_beside(self, step: Step, launch: str, num_loads: int) -> float | None:
        """The same while ``num_loads`` loads are copied one after another. None if they ended
        before the forward pass did."""
        blocks, loader = self.blocks[: step.context_blocks], self.loaders[1]
        loads = [loader.start(blocks) for _ in range(num_loads)]
        loads[0][0].result()
        seconds = self.compute(step, launch)
        last = loads[-1][-1].result()
        was_copying = not last.done()
        last.wait()
        return seconds if was_copying else None


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def cuda_rig(results: Results) -> Iterator[Rig]:
    """The current device, and pinned memory until the end."""
    with torch.inference_mode(), ExitStack() as stack:
        yield Rig(results, stack)


def run(rig: Rig, results: Results, on_step: Callable[[str], None]) -> None:
    """Fill ``results`` as its plan says. ``on_step`` gets the name of every step before it begins,
    and "done" at the end."""
    for context in results.plan.contexts:
        on_step(f"{context:,} tokens, bytes alone")
        _measure_loads(rig, results, context)
        for step in rig.steps:
            if step.context == context:
                on_step(f"{context:,} tokens, {step.new_tokens:,} new")
                _measure_step(rig, results, step)
    on_step("done")


def _rounds(plan: Plan) -> Iterator[tuple[int, list[int]]]:
    """The number of each round, and numbers of groups so that none is always first. The round
    before number 0 warms up and does not count."""
    for number in range(-1, plan.rounds):
        first = number % len(plan.groups)
        yield number, [*plan.groups[first:], *plan.groups[:first]]


def _measure_loads(rig: Rig, results: Results, context: int) -> None:
    count = context // results.plan.shape.block_tokens
    scattered = np.random.default_rng(0).permutation(rig.blocks)[:count]
    for number, order in _rounds(results.plan):
        found = {Kind(context, "scattered"): rig.load(1, scattered)}
        for groups in order:
            found[Kind(context, "bytes", groups)] = rig.load(groups, rig.blocks[:count])
        _keep(results, number, found)


def _measure_step(rig: Rig, results: Results, step: Step) -> None:
    plan = results.plan
    fastest = min(results.seconds[Kind(step.context, "bytes")])
    for number, order in _rounds(plan):
        for launch in (GRAPHS, EAGER):
            if launch == EAGER and number > 0 and number % _EAGER_EVERY:
                continue
            found = {}
            kind = Kind(step.context, "both", new_tokens=step.new_tokens, launch=launch)
            for groups in order:
                done = rig.load_and_compute(step, launch, groups, plan.lag_seconds)
                for what in ("both", "copied", "queued"):
                    found[kind._replace(groups=groups, what=what)] = getattr(done, what)
                results.num_faults += not done.is_right
            alone = found[kind._replace(what="compute")] = rig.compute(step, launch)
            beside = rig.compute_beside(step, launch, math.ceil(2 * alone / fastest))
            if beside is not None:
                found[kind._replace(what="beside")] = beside
            _keep(results, number, found)


def _keep(results: Results, number: int, found: Mapping[Kind, float]) -> None:
    if number >= 0:
        for kind in sorted(found):
            results.seconds[kind].append(found[kind])
