"""Reuse: whether requests want new contents again while the tier has them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from random import Random

from simple_offload.scheduler.tier.cpu_tier import CpuTier

SAMPLES_PER_CAPACITY = 32
"""Prompts are long, so more samples would be more of the same requests."""
MAX_AGE = 8
"""A sample is followed for new contents of this many times the tier's blocks. Requests change, and
no tier has much of a longer cycle."""
MIN_HITS = 16
"""Fewer prove nothing: a request wants all contents of its prompt at once."""
NUM_DEVIATIONS = 1
"""Old contents must win by this many standard deviations of the hit count. A wrong decision loses
hits where requests return soon (docs/measurements.md,
"Recorded requests")."""
ADMITTED_SHARE = 1 / 16
"""Share of the requests whose new contents are stored in an overload. They displace what nothing
wants any more. The choice is random, so that it differs from turn to turn."""


@dataclass(slots=True, eq=False)
class _Sample:
    block_hash: bytes
    since: int
    gap: int | None = None
    """The time until a request wanted it again, if one has."""


class Reuse:
    """Follows samples of new contents until a request wants them again, whether the tier has them
    or not. Time is counted in new contents. If all of these are stored, and leave in the order of
    last use, each stays while as many others come as the tier has blocks.

    Most requests return sooner, and LRU order is best. If prompts come in turns, and all of them
    together are too much for the tier, each leaves before its turn. Then a tier that keeps its
    contents has hits for a part of them. So few requests are stored (bimodal insertion: Qureshi et
    al., "Adaptive insertion policies for high performance caching", ISCA 2007).
    """

    def __init__(self, tier: CpuTier) -> None:
        self._tier = tier
        self._clock = self._before = 0
        """New contents so far; and before the last ones."""
        self._samples: deque[_Sample] = deque()
        """Oldest first."""
        self._waiting: dict[bytes, _Sample] = {}
        """By block hash, samples that no request has wanted again so far."""
        self._keeps_old = False
        self._random = Random(0)

    def admits_next(self) -> bool:
        """Whether to store what the next request computes."""
        if not self._keeps_old or self._tier.num_empty:
            return True
        return self._random.random() < ADMITTED_SHARE

    def on_request(self, block_hashes: Sequence[bytes]) -> None:
        """A request wants contents with ``block_hashes``."""
        for block_hash in self._waiting.keys() & block_hashes:
            sample = self._waiting.pop(block_hash)
            sample.gap = self._clock - sample.since

    def advance(self, num_blocks: int) -> bool:
        """``num_blocks`` new contents are the tier's, if it stores them. Returns whether to follow
        one of them."""
        if not num_blocks:
            return False
        self._before = self._clock
        self._clock += num_blocks
        samples = self._samples
        period = self._tier.max_contents / SAMPLES_PER_CAPACITY
        return not samples or self._clock >= samples[-1].since + period

    def follow(self, block_hash: bytes) -> None:
        """Follow new contents with ``block_hash``."""
        if block_hash in self._waiting:
            return
        samples, now = self._samples, self._clock
        samples.append(_Sample(block_hash, self._before))
        self._waiting[block_hash] = samples[-1]
        while samples and samples[0].since < now - MAX_AGE * self._tier.max_contents:
            oldest = samples.popleft()
            if oldest.gap is None:
                del self._waiting[oldest.block_hash]
        self._keeps_old = self._is_worth_keeping()

    def _is_worth_keeping(self) -> bool:
        """Whether new contents that stay for longer than the tier's size allows bring more hits, by
        block and time, than others (compare Gittins, "Bandit processes and dynamic allocation
        indices", J. R. Stat. Soc. B 41(2), 1979). Hits count as independent events, whose
        number varies by its square root."""
        now, capacity = self._clock, self._tier.max_contents
        gaps = [each.gap for each in self._samples if each.gap is not None]
        num_hits = sum(gap <= capacity for gap in gaps)
        if not _exceeds(len(gaps), num_hits):
            return False  # later hits are too few, even if they took no more time
        times = sorted(
            (now - each.since, False) if each.gap is None else (each.gap, True)
            for each in self._samples
        )
        rate = num_hits / max(1, sum(min(time, capacity) for time, _ in times))
        held = hits = before = 0
        for place, (time, is_hit) in enumerate(times):
            held += (time - before) * (len(times) - place)
            before = time
            hits += is_hit
            if time > capacity and _exceeds(hits, rate * held):
                return True
        return False


def _exceeds(num_hits: int, expected: float) -> bool:
    """Whether ``num_hits`` is above ``expected`` beyond chance."""
    return num_hits >= MIN_HITS and num_hits - NUM_DEVIATIONS * sqrt(num_hits) > expected
