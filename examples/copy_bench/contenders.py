"""Contenders: ways to copy blocks, to be measured side by side."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import numpy as np
import torch

from examples.copy_bench.arena import Arena, rows
from simple_offload.backends.base import CopyBackend, Direction, Pending
from simple_offload.transfer import Transfer


class Contender:
    """One way to copy blocks between the two pools of an arena."""

    name: str
    """The heading of its column."""

    def opened(self, arena: Arena, size: int) -> AbstractContextManager[None]:
        """Copies blocks of ``size`` bytes during the block, and frees its resources after it.
        ConfigError: this machine does not have what it takes."""
        raise NotImplementedError

    def enter_thread(self, direction: Direction) -> None:
        """Prepare the calling thread, which will make all copies of ``direction``."""

    def copy(self, direction: Direction, transfer: Transfer) -> None:
        """Copy, and return when the copy has ended. At most a copy of the other direction, which
        shares no block with this one, runs beside it."""
        raise NotImplementedError

    def path(self, _directions: Collection[Direction]) -> str | None:
        """The path of most bytes in the last copies of ``directions``, as ``Cell.path``."""
        return None


class BackendContender(Contender):
    """A backend of this project, made anew for each size: it measures its paths for it."""

    def __init__(self, name: str, make_backend: Callable[[], CopyBackend]) -> None:
        self.name = name
        self._make_backend = make_backend
        self._last: dict[Direction, Pending | None] = {}

    @contextmanager
    def opened(self, arena: Arena, size: int) -> Iterator[None]:
        self._backend = self._make_backend()
        with closing(self._backend):
            self._backend.open([arena.device.view(-1, size)])
            self._backend.add_host_chunk([arena.host.view(-1, size)])
            yield

    def enter_thread(self, direction: Direction) -> None:
        self._backend.enter_thread(direction)

    def copy(self, direction: Direction, transfer: Transfer) -> None:
        self._last[direction] = pending = self._backend.copy(direction, transfer, None)
        if pending is not None:
            pending.wait()

    def path(self, directions: Collection[Direction]) -> str | None:
        paths: set[str] = set()
        for pending in map(self._last.get, directions):
            if pending is not None:
                num_bytes = pending.measure().num_bytes
                paths.add(max(num_bytes, key=num_bytes.__getitem__))
        return "mixed" if len(paths) > 1 else next(iter(paths), None)


class _TorchContender(Contender):
    """Copies with torch, each direction on a stream of its own."""

    @contextmanager
    def opened(self, arena: Arena, size: int) -> Iterator[None]:
        self._device, self._host = rows(arena.device, size), rows(arena.host, size)
        self._device_staging = rows(arena.device_staging, size)
        self._host_staging = rows(arena.host_staging, size)
        yield

    def enter_thread(self, _direction: Direction) -> None:
        if self._device.is_cuda:
            torch.cuda.set_device(self._device.device)
            torch.cuda.set_stream(torch.cuda.Stream(self._device.device))

    def _wait(self) -> None:
        """For what this thread has queued."""
        if self._device.is_cuda:
            torch.cuda.current_stream().synchronize()


class ContiguousCopy(_TorchContender):
    """The peak: one copy between pinned memory and the device, of blocks that lie in a row and
    go to the same place."""

    name = "peak"

    def copy(self, direction: Direction, transfer: Transfer) -> None:
        blocks = transfer.device_blocks
        assert np.array_equal(blocks, transfer.host_blocks)
        first, stop = int(blocks[0]), int(blocks[-1]) + 1
        assert stop - first == len(blocks)
        device, host = self._device[first:stop], self._host[first:stop]
        target, source = (device, host) if direction is Direction.LOAD else (host, device)
        target.copy_(source, non_blocking=True)
        self._wait()


class PlainTorch(_TorchContender):
    """The plain torch way: select the blocks into pinned staging memory, copy that in one piece,
    and scatter the blocks to their places."""

    name = "torch"

    def copy(self, direction: Direction, transfer: Transfer) -> None:
        count = len(transfer.device_blocks)
        # Loads stage at the beginning and stores at the end, so that both can run at once.
        part = slice(count) if direction is Direction.LOAD else slice(-count, None)
        on_device, on_host = self._device_staging[part], self._host_staging[part]
        host_blocks = torch.from_numpy(transfer.host_blocks)
        device_blocks = torch.from_numpy(transfer.device_blocks).to(self._device.device)
        if direction is Direction.LOAD:
            torch.index_select(self._host, 0, host_blocks, out=on_host)
            on_device.copy_(on_host, non_blocking=True)
            self._device.index_copy_(0, device_blocks, on_device)
            self._wait()
        else:
            torch.index_select(self._device, 0, device_blocks, out=on_device)
            on_host.copy_(on_device, non_blocking=True)
            self._wait()
            self._host.index_copy_(0, host_blocks, on_host)
