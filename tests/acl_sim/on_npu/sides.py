"""A backend, and memory for it to copy between."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch_npu

from simple_offload.backends.base import Barrier, Direction
from simple_offload.backends.npu.backend import NpuBackend, NpuPending
from simple_offload.metadata import Transfer
from tests.acl_sim.sim import Sim

Pages = list[npt.NDArray[np.int8]]
"""By region, ``[num_blocks, page_bytes]``."""


class Sides:
    """Regions of ``num_blocks`` blocks of random bytes on both sides. The host's are in chunks."""

    def __init__(
        self,
        sim: Sim,
        backend: NpuBackend,
        pages: Sequence[int],
        num_blocks: int,
        chunk_blocks: int,
    ) -> None:
        self.sim = sim
        self.backend = backend
        self.device = [
            torch.randint(-128, 128, (num_blocks, page), dtype=torch.int8).to("npu")
            for page in pages
        ]
        self.chunks: list[list[torch.Tensor]] = []
        backend.open(self.device)
        for start in range(0, num_blocks, chunk_blocks):
            length = min(chunk_blocks, num_blocks - start)
            memory = backend.allocate_host(length * sum(pages)).random_(-128, 128)
            parts = memory.split([length * page for page in pages])
            chunk = [part.view(length, page) for part, page in zip(parts, pages, strict=True)]
            backend.add_host_chunk(chunk)
            self.chunks.append(chunk)

    def device_pages(self) -> Pages:
        """Copies of the device's regions."""
        return [region.cpu().numpy().copy() for region in self.device]

    def host_pages(self) -> Pages:
        """Copies of the host's regions."""
        columns = zip(*self.chunks, strict=True)
        return [np.concatenate([part.numpy() for part in column]) for column in columns]

    def stream(self, direction: Direction) -> int:
        """The handle of the stream for copies of ``direction``."""
        return int(self.backend._streams[direction].npu_stream)

    def compute_stream(self) -> int:
        return int(torch_npu.npu.current_stream().npu_stream)

    def fill(self, value: int, region: int = 0) -> None:
        """Queue compute that writes ``value`` to all bytes of a device region."""
        tensor = self.device[region]
        self.sim.fill(tensor.data_ptr(), value, tensor.numel(), self.compute_stream())

    def copy(
        self,
        direction: Direction,
        device_blocks: Sequence[int] | npt.NDArray[Any],
        host_blocks: Sequence[int] | npt.NDArray[Any],
        barrier: Barrier | None = None,
    ) -> NpuPending:
        """Copy on a new thread, as the engine does. Raises the copy's exception."""
        transfer = Transfer(0, np.array(device_blocks), np.array(host_blocks))
        ended: list[NpuPending | BaseException] = []

        def run() -> None:
            try:
                self.backend.enter_thread(direction)
                ended.append(self.backend.copy(direction, transfer, barrier))
            except BaseException as error:  # noqa: BLE001 - raised again below
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        (result,) = ended
        if isinstance(result, BaseException):
            raise result
        return result

    def expected(
        self,
        direction: Direction,
        device_blocks: Sequence[int] | npt.NDArray[Any],
        host_blocks: Sequence[int] | npt.NDArray[Any],
    ) -> tuple[Pages, Pages]:
        """Expected bytes of both sides after the copy: device, host."""
        device, host = self.device_pages(), self.host_pages()
        for d, h in zip(device, host, strict=True):
            if direction is Direction.LOAD:
                d[device_blocks] = h[host_blocks]
            else:
                h[host_blocks] = d[device_blocks]
        return device, host

    def check(self, expected: tuple[Pages, Pages]) -> None:
        """Whether every byte of both sides is as expected."""
        for wanted, found in zip(expected, (self.device_pages(), self.host_pages()), strict=True):
            for w, f in zip(wanted, found, strict=True):
                np.testing.assert_array_equal(f, w)
