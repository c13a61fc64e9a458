"""Measures one contiguous pinned copy from host to device: ``python -m ...peak``.

A process of its own, since vLLM's must not have touched the device before the engine does.
Prints ``{"bytes_per_second": ...}``.
"""

import json
from statistics import median

import torch

NUM_BYTES = 1 << 30
REPEATS = 8


def main() -> None:
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
    print(json.dumps({"bytes_per_second": NUM_BYTES / median(seconds[1:])}))


if __name__ == "__main__":
    main()
