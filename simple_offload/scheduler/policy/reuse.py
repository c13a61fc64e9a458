"""Reuse: whether requests want new contents again while the tier has them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from random import Random

from simple_offload.scheduler.tier.cpu_tier import CpuTier

SAMPLES_PER_TIERFUL = 32
"""Prompts are long, so more samples would be more of the same requests."""
MAX_AGE = 8
"""A sample is followed while the device lets go of this many times the tier's blocks. Requests
change, and no tier has much of a longer cycle."""
MIN_HITS = 16
"""Fewer prove nothing: a request wants all contents of its prompt at once."""
NUM_DEVIATIONS = 1
"""Holding contents for long must bring more by as many standard deviations of its hits. If this
decision is wrong, hits are lost where requests come back soon (docs/measurements.md,
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
    or not. Time is counted in blocks that the device lets go of. If all of these are stored, and
    leave in the order of last use, each stays for a tierful.

    Mostly requests come back sooner, so that this order serves best. If prompts come in turns, and
    all of them together are too much for the tier, each leaves before its turn. Then a tier that
    keeps what it has finds a part of them. So few requests are stored (bimodal insertion: Qureshi
    et al., "Adaptive insertion policies for high performance caching", ISCA 2007).
    """

    def __init__(self, tier: CpuTier, num_repeated: int = 0) -> None:
        """``num_repeated``: blocks of the tier that the device has too."""
        self._tier = tier
        self._num_repeated = num_repeated
        self._clock = 0
        self._samples: deque[_Sample] = deque()
        """Oldest first."""
        self._waiting: dict[bytes, _Sample] = {}
        """Those that no request has wanted again so far, by block hash."""
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

    def on_let_go(self, num_blocks: int) -> bool:
        """The device has let go of the contents of ``num_blocks`` blocks. Returns whether to follow
        one of them."""
        self._clock += num_blocks
        samples = self._samples
        period = self._tierful / SAMPLES_PER_TIERFUL
        return not samples or self._clock >= samples[-1].since + period

    def follow(self, block_hash: bytes) -> None:
        """The device has let go of contents with ``block_hash``, which no request has found."""
        if block_hash in self._waiting:
            return
        samples, now = self._samples, self._clock
        samples.append(_Sample(block_hash, now))
        self._waiting[block_hash] = samples[-1]
        while samples[0].since < now - MAX_AGE * self._tier.max_contents:
            oldest = samples.popleft()
            if oldest.gap is None:
                del self._waiting[oldest.block_hash]
        self._keeps_old = self._is_worth_keeping()

    @property
    def _tierful(self) -> int:
        return max(1, self._tier.max_contents - self._num_repeated)

    def _is_worth_keeping(self) -> bool:
        """Whether holding new contents for some time beyond a tierful brings more hits by block and
        time than a tierful does (compare Gittins, "Bandit processes and dynamic allocation
        indices", J. R. Stat. Soc. B 41(2), 1979). Hits count as independent events, whose
        number varies by its square root."""
        now, tierful = self._clock, self._tierful
        times = sorted(
            (now - each.since, False) if each.gap is None else (each.gap, True)
            for each in self._samples
        )
        num_hits = sum(is_hit for time, is_hit in times if time <= tierful)
        rate = num_hits / max(1, sum(min(time, tierful) for time, _ in times))
        held = hits = before = 0
        for place, (time, is_hit) in enumerate(times):
            held += (time - before) * (len(times) - place)
            before = time
            hits += is_hit
            is_sure = hits >= MIN_HITS and hits - NUM_DEVIATIONS * sqrt(hits) > rate * held
            if time > tierful and is_sure:
                return True
        return False
