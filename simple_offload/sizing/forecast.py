"""Forecast: what this server would have found with other sizes of host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import cbrt, inf

from simple_offload.sizing.curve import MissRatioCurve

FACTORS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Sizes of host memory that are asked for, over the size that it has."""
_MAX_UNKNOWN = 1 / 8
"""Room that the caches may be short of: beside the duplicates of an exclusive tier, over the
device's blocks; else, over all. Where the curve is flat, a small difference would stand for
much."""


@dataclass(frozen=True)
class Caches:
    """The caches of a server, in blocks."""

    device: int
    host: int
    is_exclusive: bool
    """Whether contents that the device has too leave the host first."""
    duplicates_share: float = 0.0
    """Of an exclusive host tier, the share that such contents may keep although others need
    room."""

    def room(self, factor: float, num_more: float) -> float:
        """Blocks of different contents, with ``factor`` times the host memory. ``num_more``: of
        duplicates, those beyond their share."""
        host = factor * self.host
        if not self.is_exclusive:
            # Nearly the same contents, in another order: two of equal size have a quarter more.
            return max(float(self.device), cbrt(self.device**3 + host**3))
        num_duplicates = self.duplicates_share * host + num_more
        return self.device + host - min(num_duplicates, self.device, host)


def predicted_hit_ratios(
    curve: MissRatioCurve, caches: Caches, factors: Sequence[float] = FACTORS
) -> list[float]:
    """By factor, the share of the prompts' tokens in the window that ``caches`` would have found
    with so many times the host memory; nan without prompts.

    The LRU curve, with corrections. An exclusive tier has duplicates: a share of it, and as many
    more as the device needs for its work, which is the same number for any tier. Any other tier has
    nearly the contents of the device. Caches that find less than the curve says have less room: an
    exclusive tier by a number of blocks, any other by a share. Caches that find more retain some of
    what LRU loses, each part of the host's room independently: with twice the room, twice as many
    chances. The form was chosen on the first seed of two recorded traces, that for other tiers on
    two seeds; others may fit less well.

    It holds for the same requests at the same times. Then it is within 3 points of replays at 1/2,
    1, 2 and 4 times the memory, mean of three seeds of exclusive tiers, and within 5 points of each
    (``--parts sizes`` of ``examples/scheduler_bench``; docs/measurements.md). Agents that wait for
    their answers come later with less memory, and in another order. Then less is found than
    predicted: at half the memory by 7 and 20 points, mean of 16 and of 32 agents. From the order of
    these the mean is within 3 points again. More memory may find more than predicted, where the
    caches are far too small now.
    """
    num_measured = curve.num_duplicates - caches.duplicates_share * caches.host
    num_more = max(0.0, num_measured) if caches.is_exclusive else 0.0
    now = caches.room(1.0, num_more)
    lru, most = curve.hit_ratios([now, inf])
    found = curve.found_ratio
    missed = usable = 1.0
    if found < lru and caches.is_exclusive:
        num_more += min(now - curve.size_of(found), _MAX_UNKNOWN * caches.device)
    elif found < lru:
        usable = max(curve.size_of(found) / now, 1 - _MAX_UNKNOWN)
    elif lru < min(found, most) and now > caches.device:
        missed = max(0.0, most - found) / (most - lru)
    rooms = [usable * caches.room(each, num_more) for each in factors]
    return [
        most - (most - ratio) * missed ** ((room - caches.device) / max(1.0, now - caches.device))
        for ratio, room in zip(curve.hit_ratios(rooms), rooms, strict=True)
    ]
