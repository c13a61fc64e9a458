"""ScriptedDevice: one rank's KV memory, compute stream and copies, driven by a script."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from simple_offload.backends.base import Barrier, Direction, Measurement, PagePart
from simple_offload.backends.host import HostBackend
from simple_offload.transfer import Transfer
from tests.simulation.identity import Identities

_TORN = -55
_SECONDS = 60.0
"""Seconds after which the thread that opens host memory is missing."""
SLOT = 8
"""Bytes of an identity."""


class CopyFault(RuntimeError):
    """The script's failure of a copy."""


@dataclass(frozen=True)
class ComputeMark(Barrier):
    """All items queued on the compute stream before item ``position``."""

    position: int
    device: "ScriptedDevice"

    def seconds_since(self, earlier: "ComputeMark") -> float | None:
        """None: no time passes here."""
        return 0.0 if self.position <= self.device.num_computed else None


@dataclass(eq=False)
class ScriptedCopy:
    """A copy under way on the device."""

    device: "ScriptedDevice"
    direction: Direction
    transfer: Transfer
    mark: ComputeMark | None
    ended: bool = False
    error: Exception | None = None
    num_groups: int = 1
    """Layer groups, which are copied one after another."""
    num_copied: int = 0
    """Layer groups whose bytes have arrived."""
    torn: bool = False
    """Whether its destination holds garbage, as that of a copy under way does."""
    nearly_done: bool = False
    """Whether it has announced that it will end at once. From then on it must not fail."""
    held_at: int | None = None
    """The position on the compute stream up to which compute does not wait for this copy."""

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.ended

    def wait(self) -> None:
        assert self.ended or self.error, "nothing drives the device"
        self.done()

    def remaining_seconds(self) -> float:
        self.nearly_done = self.nearly_done or self.device.estimate(self)
        return 0.0 if self.nearly_done else math.inf

    def measure(self) -> Measurement:
        """Long copies, so that most loads are divided (``simple_offload.worker.overlap``)."""
        return Measurement(1.0, {})

    def hold_compute(self, num_groups: int | None = None) -> None:
        """``num_groups``: wait for its first layer groups only."""
        hold = _Hold(self, num_groups or self.num_groups)
        is_partial = hold.num_groups < self.num_groups
        self.device.num_holds_by_layer += is_partial
        self.device.num_holds += not (hold.is_over or is_partial)
        position = self.device.queue_compute(hold)
        if hold.num_groups == self.num_groups and self.held_at is None:
            self.held_at = position

    def precedes(self, other: "ScriptedCopy") -> bool:
        """Whether ``other`` cannot start before this copy has ended, because the compute that it
        waits for cannot."""
        return (
            self.held_at is not None
            and other.mark is not None
            and other.mark.position >= self.held_at
        )


class ScriptedGroup(NamedTuple):
    """A layer group of a copy."""

    copy: ScriptedCopy
    number: int
    """From 1."""
    seconds: float = 0.0

    def done(self) -> bool:
        return self.copy.done()

    def wait(self) -> None:
        self.copy.wait()

    def remaining_seconds(self) -> float:
        return self.copy.remaining_seconds()

    def measure(self) -> Measurement:
        return self.copy.measure()

    def hold_compute(self) -> None:
        self.copy.hold_compute(self.number)


class _Hold(NamedTuple):
    """A point where compute waits for the first layer groups of a copy."""

    copy: ScriptedCopy
    num_groups: int

    @property
    def is_over(self) -> bool:
        return self.copy.ended or self.copy.num_copied >= self.num_groups


class ChunkGate:
    """Makes the thread that opens host memory wait for the script, chunk by chunk. The first chunk
    does not wait: it is opened before the server starts."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._verdicts: SimpleQueue[bool] = SimpleQueue()
        self._verdicts.put(True)

    def enter(self) -> None:
        """Wait for the script. Raises MemoryError if the script grants no memory."""
        if self._verdicts.empty():
            self._reached.set()
        if not self._verdicts.get(timeout=_SECONDS):
            raise MemoryError("no host memory, by script")

    def wait_until_reached(self) -> None:
        """Return when the thread waits at the gate: the chunk before is open."""
        assert self._reached.wait(_SECONDS), "no thread came to the gate"

    def answer(self, granted: bool) -> None:
        """Grant the waiting thread its chunk, or refuse it."""
        self._reached.clear()
        self._verdicts.put(granted)


class ScriptedDevice(HostBackend):
    """A CopyBackend under script, which makes one copy of a direction at a time when the script
    decides. The script also decides when there is host memory for the next ``chunk_bytes``.

    The compute stream is a queue of closures, and of copies that it has to wait for. They run in
    order when the script decides. A copy may run once the compute before its barrier has run.
    Without the barrier, the copy may run before compute that it should wait for. From that
    moment until its end, the destination of the copy holds garbage.
    """

    least_part_bytes = 1
    """Scripted pages are small."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = ChunkGate()
        self._compute: deque[Callable[[], None] | _Hold] = deque()
        self.num_queued = 0
        self.num_computed = 0
        self.num_holds = 0
        """How often compute had to wait for the end of a copy that had not ended."""
        self.num_holds_by_layer = 0
        """How often compute waits for a part of a copy's layers."""
        self._parts: Sequence[Sequence[PagePart]] = ()
        """By layer group."""
        self.copies: dict[Direction, deque[ScriptedCopy]] = {d: deque() for d in Direction}
        self.num_copied = dict.fromkeys(Direction, 0)
        """Blocks of copies that have not failed."""
        self.fatal = dict.fromkeys(Direction, 0)
        """By direction, copies that end their thread."""
        self.estimate: Callable[[ScriptedCopy], bool] = lambda copy: False
        """Whether each copy announces from now on that it is nearly done."""

    # As a backend

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        self.gate.enter()
        return super().allocate_host(num_bytes)

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        """Append the chunk's rows, so that each row is a host block."""
        new = [region.numpy() for region in regions]
        if self._host:
            new = [np.concatenate(pair) for pair in zip(self._host, new, strict=True)]
        self._host = new

    def barrier(self) -> ComputeMark:
        return ComputeMark(self.num_queued, self)

    mark_compute = barrier

    def copy(  # type: ignore[override]
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> ScriptedCopy:
        if self.fatal[direction]:
            self.fatal[direction] -= 1
            raise SystemExit("killed by the script")
        assert barrier is None or isinstance(barrier, ComputeMark)
        pending = ScriptedCopy(self, direction, transfer, barrier)
        self.copies[direction].append(pending)
        return pending

    def copy_by_layer(
        self,
        transfer: Transfer,
        barrier: Barrier | None,
        *,
        quickly: bool,
    ) -> Iterator[ScriptedGroup]:
        copy = self.copy(Direction.LOAD, transfer, barrier)
        copy.num_groups = len(self._parts)
        for number in range(1, copy.num_groups + 1):
            yield ScriptedGroup(copy, number)

    def divide(self, groups: Sequence[Sequence[PagePart]]) -> None:
        self._parts = groups

    # As a device

    def queue_compute(self, work: "Callable[[], None] | _Hold") -> int:
        """Queue ``work``, or a copy to wait for. Returns the position that compute reaches when it
        has run."""
        self._compute.append(work)
        self.num_queued += 1
        return self.num_queued

    def compute_until(self, position: int) -> None:
        """Run the compute stream up to and including item ``position``, with the copies that it has
        to wait for."""
        while self.num_computed < position:
            self._tear()
            work = self._compute.popleft()
            if isinstance(work, _Hold):
                while not work.is_over:
                    direction = work.copy.direction
                    assert self.can_copy(direction), "deadlock of compute and a copy"
                    self.copy_one(direction)
            else:
                work()
            self.num_computed += 1

    def compute_one(self) -> bool:
        """Run one item. False if there is none, or if it has to wait for a copy."""
        if not self._compute:
            return False
        first = self._compute[0]
        if isinstance(first, _Hold) and not first.is_over:
            return False
        self.compute_until(self.num_computed + 1)
        return True

    def can_copy(self, direction: Direction) -> bool:
        """Whether the next copy of ``direction`` could run now."""
        return bool(self.copies[direction]) and self._has_passed(self.copies[direction][0])

    def abandon(self) -> None:
        """Drop the remaining compute, and run the remaining copies."""
        self._compute.clear()
        self.num_computed = self.num_queued
        self.run_all()

    def run_all(self) -> None:
        """Run all compute, then all copies."""
        self.compute_until(self.num_queued)
        for direction in Direction:
            while self.copies[direction]:
                self.copy_one(direction)

    def copy_one(self, direction: Direction, fail_after: int | None = None) -> None:
        """Run the next copy of ``direction``, or the next layer group of it. With ``fail_after`` it
        fails after that many blocks."""
        self._tear()
        pending = self.copies[direction][0]
        transfer = pending.transfer
        device_blocks = transfer.device_blocks[:fail_after]
        host_blocks = transfer.host_blocks[:fail_after]
        if pending.num_groups == 1:
            super().copy(direction, Transfer(transfer.id, device_blocks, host_blocks), None)
        else:
            for region, start, stop in self._parts[pending.num_copied]:
                loaded = self._host[region][host_blocks, start:stop]
                self._device[region][device_blocks, start:stop] = loaded
        pending.num_copied += 1
        if fail_after is not None:
            assert not pending.nearly_done, "compute may wait for it"
            pending.error = CopyFault(f"{direction.value} {transfer.id} by script")
        elif pending.num_copied < pending.num_groups:
            return
        else:
            self.num_copied[direction] += len(host_blocks)
        pending.ended = True
        self.copies[direction].popleft()

    # Details

    def _has_passed(self, copy: ScriptedCopy) -> bool:
        return copy.mark is None or copy.mark.position <= self.num_computed

    def _tear(self) -> None:
        """Put garbage in destinations: a copy may write at any time after its barrier, in any
        order."""
        for direction, queue in self.copies.items():
            for copy in queue:
                if not copy.torn and self._has_passed(copy):
                    copy.torn = True
                    loads = direction is Direction.LOAD
                    transfer = copy.transfer
                    blocks = transfer.device_blocks if loads else transfer.host_blocks
                    for region in self._device if loads else self._host:
                        region[blocks] = _TORN


class KVMemory:
    """One rank's KV cache, with the layers where ``config`` places them. The groups share the same
    bytes."""

    def __init__(self, config: KVCacheConfig) -> None:
        slots = torch.full((config.kv_cache_tensors[0].size // SLOT,), -1, dtype=torch.int64)
        groups = config.kv_cache_groups
        specs = {name: layer_spec(group, name) for group in groups for name in group.layer_names}
        self.kv_caches: dict[str, torch.Tensor] = {
            name: slots.as_strided(
                (config.num_blocks, specs[name].page_size_bytes // SLOT),
                (tensor.block_stride // SLOT, 1),
                (tensor.offset + index * tensor.layer_stride) // SLOT,
            )
            for tensor in config.kv_cache_tensors
            for index, name in enumerate(tensor.layers)
        }
        """As vLLM would register them."""
        in_groups = {
            name: (index, layer)
            for index, group in enumerate(groups)
            for layer, name in enumerate(group.layer_names)
        }
        self.places = {name: in_groups[name] for name in self.kv_caches}
        """By layer name, in the order of compute, its group and its place there."""
        self.pages = [
            [_entries(self.kv_caches[name], specs[name]) for name in group.layer_names]
            for group in groups
        ]
        """By group and layer, ``[num_blocks, entries, width]``, without padding."""


def _entries(cache: torch.Tensor, spec: KVCacheSpec) -> Identities:
    num_entries = num_entries_of(spec)
    width = cache.shape[1] // num_entries
    pages: Identities = cache.numpy().view(np.uint64)[:, : num_entries * width]
    return pages.reshape(len(pages), num_entries, width)


def layer_spec(group: KVCacheGroupSpec, layer_name: str) -> KVCacheSpec:
    """The spec of one layer of a group."""
    if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        return group.kv_cache_spec.kv_cache_specs[layer_name]
    return group.kv_cache_spec


def num_entries_of(spec: KVCacheSpec, shrink: int = 1) -> int:
    """The number of entries in a page, after ``shrink`` tokens have become one."""
    if isinstance(spec, MambaSpec):
        return 1
    tokens_per_entry = int(spec.tokens_per_state)
    return spec.block_size // (tokens_per_entry if tokens_per_entry > 1 else shrink)
