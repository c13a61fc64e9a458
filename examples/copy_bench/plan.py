"""The plan of a run: sizes, ways, numbers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

KIB, MIB = 1 << 10, 1 << 20

SIZES = tuple(4 * KIB << step for step in range(10))
"""Block sizes in bytes, 4 KiB to 2 MiB."""


class Way(Enum):
    """The direction of a measurement's bytes, or both."""

    LOAD = "load"
    """Host to device."""
    STORE = "store"
    """Device to host."""
    BOTH = "both"
    """Both at once, by two threads."""


@dataclass(frozen=True)
class Plan:
    """One run. Sizes are in bytes, ascending."""

    sizes: tuple[int, ...] = SIZES
    repeats: int = 7
    """Timed copies of each kind, whose median counts; slow ones are repeated less often."""
    pool_bytes: int = 1 << 30
    """Memory for blocks on each side; a multiple of every size. No copy has more bytes."""
    most_blocks: int = 16_384
    """Largest number of blocks in one copy."""
    both_from: int = 512 * KIB
    """The smallest size that is copied both ways at once."""

    def ways(self, size: int) -> Iterator[Way]:
        """The ways in which blocks of ``size`` bytes are copied."""
        yield Way.LOAD
        yield Way.STORE
        if size >= self.both_from:
            yield Way.BOTH

    def scaled(self, factor: int) -> "Plan":
        """The same with copies ``factor`` times as large, whose start weighs less."""
        return replace(
            self, pool_bytes=factor * self.pool_bytes, most_blocks=factor * self.most_blocks
        )

    @property
    def all_ways(self) -> tuple[Way, ...]:
        """The ways that occur in this plan."""
        return tuple(self.ways(max(self.sizes)))


def size_text(num_bytes: int) -> str:
    """Such as "64 KiB"."""
    if num_bytes % MIB == 0:
        return f"{num_bytes // MIB} MiB"
    return f"{num_bytes // KIB} KiB"
