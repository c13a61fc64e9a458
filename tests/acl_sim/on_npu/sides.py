"""Memory on both sides of an NPU's copies, and the streams of the simulated runtime."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch_npu

from simple_offload.backends.base import Barrier, Direction
from simple_offload.backends.npu.backend import NpuBackend
from tests.acl_sim.sim import Sim
from tests.backends.sides import Blocks, Sides

MakeSides = Callable[..., "NpuSides"]


class NpuSides(Sides):
    """Copies run on a thread of their own, as the engine's do."""

    backend: NpuBackend

    sim: Sim

    streams: dict[Direction, Any]
    """Of the backend, which makes one for each direction, in this order."""

    def stream(self, direction: Direction) -> int:
        """The handle of the stream for copies of ``direction``."""
        return int(self.streams[direction].npu_stream)

    def compute_stream(self) -> int:
        return int(torch_npu.npu.current_stream().npu_stream)

    def fill(self, value: int) -> None:
        """Queue compute that writes ``value`` to all bytes of the first device region."""
        tensor = self.device[0]
        self.sim.fill(tensor.data_ptr(), value, tensor.numel(), self.compute_stream())

    def copy(
        self,
        direction: Direction,
        device_blocks: Blocks,
        host_blocks: Blocks,
        barrier: Barrier | None = None,
    ) -> Any:
        """Raises the copy's exception."""

        def run() -> Any:
            self.backend.enter_thread(direction)
            return Sides.copy(self, direction, device_blocks, host_blocks, barrier)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()
