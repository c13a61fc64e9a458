"""CudaPending: a copy that the device has been handed."""

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from simple_offload.backends.base import Measurement


class Part(NamedTuple):
    """A stretch of a copy."""

    event: torch.cuda.Event
    """Behind it on the stream."""
    seconds: float
    """How long it should take."""


@dataclass(slots=True, eq=False)
class CudaPending:
    """A copy under way."""

    parts: deque[Part]
    """Those that had not ended when last looked at. Never empty: the last one stays."""
    kept: list[Any]
    """What the driver and the kernel may read until the copy has ended."""
    start: torch.cuda.Event
    num_bytes: dict[str, int]
    """By path."""

    def done(self) -> bool:
        return bool(self.parts[-1].event.query())

    def wait(self) -> None:
        self.parts[-1].event.synchronize()

    def remaining_seconds(self) -> float:
        while len(self.parts) > 1 and self.parts[0].event.query():
            self.parts.popleft()
        return sum(part.seconds for part in self.parts)

    def hold_compute(self) -> None:
        torch.cuda.current_stream().wait_event(self.parts[-1].event)

    def measure(self) -> Measurement:
        return Measurement(self.start.elapsed_time(self.parts[-1].event) / 1e3, self.num_bytes)
