"""Reuse: whether new contents are wanted again while the tier has them."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

SAMPLES_PER_TIERFUL = 32
"""Prompts are long, so more samples would be more of the same requests."""
MAX_AGE = 8
"""Tierfuls that a sample is followed. Requests change, and no tier has much of a longer cycle."""
MIN_HITS = 16
"""Fewer prove nothing: a request wants all contents of its prompt at once."""
MARGIN = 1.5
"""Holding contents for long must bring so much more. If this decision is wrong, hits are lost where
requests come back soon."""
TRIAL, TRIAL_PERIOD = 0.25, 4.236
"""Tierfuls: while new contents pass, they stay for one trial in each period. So what nothing wants
any more leaves in the end. The period is the golden ratio cubed: each trial meets other requests of
a cycle."""


@dataclass(slots=True, eq=False)
class _Sample:
    key: bytes
    since: int
    gap: int | None = None
    """The time until a request wanted it again, if one has."""


class Reuse:
    """Follows samples of new contents until a request wants them again, whether the tier still has
    them or not. Time is counted in blocks that enter the tier; as many as the tier has are a
    tierful, for which contents stay by the order of last use.

    Mostly requests come back soon, so that this order serves best. If prompts come in turns, and
    all of them together are too much for the tier, each leaves before its turn. Then a tier that
    keeps a part of the contents finds that part (Qureshi et al., "Adaptive insertion policies for
    high performance caching", ISCA 2007).
    """

    def __init__(self) -> None:
        self._num_blocks = 1
        self._clock = 0
        self._samples: deque[_Sample] = deque()
        """Oldest first."""
        self._waiting: dict[bytes, _Sample] = {}
        """Those that no request has wanted again so far, by key."""
        self._keeps_old = False

    def resize(self, num_blocks: int) -> None:
        """The tier has ``num_blocks`` blocks."""
        self._num_blocks = max(1, num_blocks)

    @property
    def lets_new_pass(self) -> bool:
        """Whether new contents are to leave before those that the tier has."""
        tierfuls = self._clock / self._num_blocks
        return self._keeps_old and tierfuls % TRIAL_PERIOD >= TRIAL

    def on_wanted(self, keys: Iterable[bytes | None]) -> None:
        """Requests want contents with ``keys``."""
        wanted = self._waiting.keys() & keys
        for key in wanted:
            sample = self._waiting.pop(key)
            sample.gap = self._clock - sample.since

    def on_entered(self, num_blocks: int, key: bytes | None) -> None:
        """``num_blocks`` blocks have contents that nothing else has any more. ``key``: of one of
        them, if no request has found these contents."""
        self._clock += num_blocks
        samples, now, tierful = self._samples, self._clock, self._num_blocks
        is_due = not samples or now >= samples[-1].since + tierful / SAMPLES_PER_TIERFUL
        if key is None or key in self._waiting or not is_due:
            return
        samples.append(_Sample(key, now))
        self._waiting[key] = samples[-1]
        while samples[0].since < now - MAX_AGE * tierful:
            oldest = samples.popleft()
            if oldest.gap is None:
                del self._waiting[oldest.key]
        self._keeps_old = self._is_worth_keeping()

    def _is_worth_keeping(self) -> bool:
        """Whether holding new contents for some time beyond a tierful brings more hits by block and
        time than a tierful does (compare Gittins, "Bandit processes and dynamic allocation
        indices", J. R. Stat. Soc. B 41(2), 1979)."""
        now, tierful = self._clock, self._num_blocks
        times = sorted(
            (now - each.since, False) if each.gap is None else (each.gap, True)
            for each in self._samples
        )
        num_hits = sum(is_hit for time, is_hit in times if time <= tierful)
        least = MARGIN * num_hits / max(1, sum(min(time, tierful) for time, _ in times))
        held = hits = before = 0
        for place, (time, is_hit) in enumerate(times):
            held += (time - before) * (len(times) - place)
            before = time
            hits += is_hit
            if time > tierful and hits >= MIN_HITS and hits > least * held:
                return True
        return False
