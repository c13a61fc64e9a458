"""ScriptedDevice: one rank's KV memory, compute stream and copies, all under script."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from simple_offload.backends.base import Barrier, Direction
from simple_offload.backends.host import HostBackend
from simple_offload.metadata import Transfer


class CopyFault(RuntimeError):
    """A copy that the script makes fail."""


@dataclass(frozen=True)
class ComputeMark(Barrier):
    """Everything queued on the compute stream before item ``position``."""

    position: int


@dataclass(eq=False)
class ScriptedCopy:
    """A copy that a real device would be working on."""

    direction: Direction
    transfer: Transfer
    mark: ComputeMark | None
    ended: bool = False
    error: Exception | None = None

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.ended

    def wait(self) -> None:
        assert self.ended or self.error, "nothing drives the device any more"
        self.done()


class ScriptedDevice(HostBackend):
    """A CopyBackend that copies when the script says so, one copy of a direction at a time.

    The compute stream is a queue of closures, run in order, also when the script says so. A
    copy may run as soon as the compute before its barrier has: a missing barrier lets it run
    ahead of compute that it should have waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._compute: deque[Callable[[], None]] = deque()
        self.num_queued = 0
        self.num_computed = 0
        self.copies: dict[Direction, deque[ScriptedCopy]] = {d: deque() for d in Direction}
        self.fatal: dict[Direction, int] = dict.fromkeys(Direction, 0)
        """Copies of a direction whose thread is to die of them."""
        self.ignore_barriers: set[Direction] = set()

    # As a backend

    def barrier(self) -> Barrier | None:
        return ComputeMark(self.num_queued)

    def copy(  # type: ignore[override]
        self, direction: Direction, transfer: Transfer, barrier: Barrier | None
    ) -> ScriptedCopy:
        if self.fatal[direction]:
            self.fatal[direction] -= 1
            raise SystemExit("killed by the script")
        assert barrier is None or isinstance(barrier, ComputeMark)
        mark = None if direction in self.ignore_barriers else barrier
        pending = ScriptedCopy(direction, transfer, mark)
        self.copies[direction].append(pending)
        return pending

    # As a device

    def queue_compute(self, work: Callable[[], None]) -> int:
        """Queue ``work``; the position to run to for it to be over."""
        self._compute.append(work)
        self.num_queued += 1
        return self.num_queued

    def compute_until(self, position: int) -> None:
        """Run the compute stream up to and including item ``position``."""
        while self.num_computed < position:
            self.num_computed += 1
            self._compute.popleft()()

    def compute_one(self) -> bool:
        """Run one item; False when there is none."""
        if self.num_computed == self.num_queued:
            return False
        self.compute_until(self.num_computed + 1)
        return True

    def can_copy(self, direction: Direction) -> bool:
        """Whether the next copy of ``direction`` could run now."""
        if not self.copies[direction]:
            return False
        mark = self.copies[direction][0].mark
        return mark is None or mark.position <= self.num_computed

    def spoil(self, host_blocks: Iterable[int]) -> None:
        """Put garbage into host blocks that no copy is to touch any more."""
        copies = (copy for queue in self.copies.values() for copy in queue)
        busy = {block for copy in copies for block in copy.transfer.host_blocks.tolist()}
        for host in self._host:
            host[[block for block in host_blocks if block not in busy]] = -77

    def abandon(self) -> None:
        """Drop the compute that is left, and run the copies that are left."""
        self._compute.clear()
        self.num_computed = self.num_queued
        for direction in Direction:
            while self.copies[direction]:
                self.copy_one(direction)

    def copy_one(self, direction: Direction, fail_after: int | None = None) -> None:
        """Run the next copy of ``direction``. With ``fail_after`` it fails, having copied that
        many of its blocks."""
        pending = self.copies[direction].popleft()
        transfer = pending.transfer
        if fail_after is not None:
            transfer = Transfer(
                transfer.id,
                transfer.device_blocks[:fail_after],
                transfer.host_blocks[:fail_after],
            )
        super().copy(direction, transfer, None)
        pending.ended = True
        if fail_after is not None:
            pending.error = CopyFault(f"{direction.value} {transfer.id} by script")


class KVMemory:
    """One rank's KV cache: ``layers`` regions, each group's layers lying over the same bytes.

    ``block_outermost``: a block's layers are neighbours, so the worker sees one region.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_groups: int,
        block_outermost: bool,
    ) -> None:
        page = block_size * 8
        slots = torch.full((num_blocks * num_layers * block_size,), -1, dtype=torch.int64)
        shape = (num_blocks, num_layers, block_size)
        if not block_outermost:
            shape = (num_layers, num_blocks, block_size)
        view = slots.view(shape)
        self.layers = [view[:, i] if block_outermost else view[i] for i in range(num_layers)]
        self.pages = [layer.numpy().view(np.uint64) for layer in self.layers]
        self.size = num_blocks * num_layers * page
        self.block_stride = page * num_layers if block_outermost else page
        self.layer_stride = page if block_outermost else page * num_blocks
        self.layer_names: Sequence[Sequence[str]] = [
            [f"group{group}.layer{layer}" for layer in range(num_layers)]
            for group in range(num_groups)
        ]

    def kv_caches(self) -> dict[str, torch.Tensor]:
        """What vLLM would register."""
        return {
            name: self.layers[index]
            for names in self.layer_names
            for index, name in enumerate(names)
        }
