"""Samples of the memory of a server's processes, and the shared files that they leave behind."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

MIB = 2**20


@dataclass
class MemoryWatch:
    """Resident memory of several processes together, and the shared memory files that they map."""

    samples: list[tuple[float, int]] = field(default_factory=list)
    """Time in seconds (monotonic) and bytes."""
    shared_files: set[Path] = field(default_factory=set)

    def sample(self, processes: Iterable[psutil.Process]) -> int:
        """Record and return the bytes of ``processes`` now; a process that has ended has none."""
        total = 0
        for process in processes:
            try:
                total += process.memory_info().rss
                paths = [mapped.path for mapped in process.memory_maps()]
            except psutil.NoSuchProcess:
                continue
            self.shared_files |= {Path(path) for path in paths if path.startswith("/dev/shm/")}
        self.samples.append((time.monotonic(), total))
        return total

    def at(self, fraction: float) -> float:
        """MiB at ``fraction`` of the recorded time: the median of the samples around it, or else
        the closest one."""
        first, last = self.samples[0][0], self.samples[-1][0]
        centre, reach = first + fraction * (last - first), 0.05 * (last - first)
        near = [size for at, size in self.samples if abs(at - centre) <= reach]
        if not near:  # a sample took long
            near = [min(self.samples, key=lambda sample: abs(sample[0] - centre))[1]]
        return median(near) / MIB

    def growth(self, start: float) -> float:
        """Growth from ``start`` (a fraction of the recorded time) to the end, as a fraction."""
        return self.at(1.0) / self.at(start) - 1

    def shared_files_left(self) -> list[Path]:
        """Files in shared memory that the processes mapped and that still exist."""
        return sorted(path for path in self.shared_files if path.exists())
