"""Measures one contiguous pinned copy from host to device.

A process of its own, since the bench's own process must not touch the device before the engine
does. Reports ``{"bytes_per_second": ...}``.
"""

import faulthandler
from statistics import median
from typing import Any

import torch

from examples.bench.child import Report, run_child

NUM_BYTES = 1 << 30
REPEATS = 8
DEADLINE = 120
"""Seconds, after which the process ends with its stacks in the log."""


def run(_arguments: dict[str, Any], report: Report) -> None:
    faulthandler.dump_traceback_later(DEADLINE, exit=True)
    host = torch.zeros(NUM_BYTES, dtype=torch.int8).pin_memory()
    device = torch.empty(NUM_BYTES, dtype=torch.int8, device="cuda")
    seconds = []
    for _ in range(REPEATS + 1):  # the first is a warm-up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    report({"bytes_per_second": NUM_BYTES / median(seconds[1:])})


if __name__ == "__main__":
    run_child(run)
