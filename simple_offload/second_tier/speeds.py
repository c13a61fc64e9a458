"""Speeds: whether to fetch a prefix is quicker than to compute it."""

import math
from collections.abc import Callable

_UNKNOWN_SECONDS = 1.0
"""Longest wait for objects before the speed of compute is known."""
_STALE_SECONDS = 60.0
"""After this time, a tier that does not pay is measured again."""
_MIN_TOKENS = 128
"""Steps with fewer tokens say little about the speed of compute."""
_ANSWER_SHARE = 0.1
"""Most that answers may take, as a share of the time that computing takes."""
LONGEST_STEP = 30.0
"""Seconds. A step that takes longer counts as so much."""
_FADING = 0.9
"""Weight of what was measured before, against what is measured next."""


class EngineTime:
    """Seconds in which the engine steps. What a tier has done is taken note of in a step. Without
    one, while the engine is paused or frozen, a tier that answers at once looks like one that
    hangs."""

    def __init__(self, clock: Callable[[], float], longest: float) -> None:
        """``clock``: seconds, never going back. ``longest``: what a longer time between two steps
        counts as."""
        self.clock = clock
        self._longest = longest
        self._last_step = clock()
        self._num_left_out = 0.0

    def __call__(self) -> float:
        return min(self.clock(), self._last_step + self._longest) - self._num_left_out

    def on_step(self) -> None:
        """The engine makes a step."""
        now = self.clock()
        self._num_left_out += max(0.0, now - self._last_step - self._longest)
        self._last_step = now


class _Rate:
    """Tokens per second, of late."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> float | None:
        """The rate after ``num_tokens`` more in ``seconds``. None while no time has passed."""
        self._tokens = _FADING * self._tokens + num_tokens
        self._seconds = _FADING * self._seconds + seconds
        return self._tokens / self._seconds if self._seconds > 0 else None


class Speeds:
    """Tokens per second of compute and of fetches, as measured. Where fetches are slower, none is
    made, but for a probe now and then."""

    def __init__(self, clock: Callable[[], float], *, always: bool = False) -> None:
        """``clock``: seconds, never going back. ``always``: fetch, however slow that is."""
        self._clock = clock
        self._always = always
        self.compute: float | None = None
        """Tokens per second of steps that compute many. None: not measured yet."""
        self.fetch: float | None = None
        """Tokens per second of prefixes that were fetched. None: not measured yet."""
        self.answer: float | None = None
        """Seconds from a request's questions to the answers. A short time counts at once, since a
        long one may have waited for the engine's step."""
        self._computed, self._fetched = _Rate(), _Rate()
        self._num_steps = 0
        self._steps: dict[int, tuple[float, int]] = {}
        """Steps under way by number: when vLLM scheduled them, and their tokens."""
        self._step_ended = 0.0
        self._fetched_at = self._answered_at = 0.0

    @property
    def pays(self) -> bool:
        """Whether a fetch is as quick as compute, as far as is known."""
        if self._always or self.fetch is None or self.compute is None:
            return True
        return self.fetch >= self.compute

    def should_ask(self, num_tokens: int) -> bool:
        """Whether to ask for a prefix of ``num_tokens`` tokens: a fetch may pay, and an answer
        takes little of the time that computing them would. Or the last answer is long ago."""
        if self._always or self.compute is None or self.answer is None:
            return True
        if self.answer > _ANSWER_SHARE * num_tokens / self.compute:
            return self._is_stale(self._answered_at)
        return self.pays or self._is_stale(self._fetched_at)

    def should_fetch(self) -> bool:
        """Whether to make a fetch: it pays, or the speed of the last one says nothing any more."""
        if self.pays:
            return True
        if not self._is_stale(self._fetched_at):
            return False
        self._fetched_at = self._clock()  # one fetch is enough to measure it
        return True

    def max_wait(self, num_tokens: int) -> float:
        """Seconds that a request may wait for ``num_tokens`` tokens: as long as computing them
        takes."""
        if self._always:
            return math.inf
        return num_tokens / self.compute if self.compute else _UNKNOWN_SECONDS

    def on_step(self, num_tokens: int) -> int | None:
        """vLLM schedules a step of ``num_tokens`` tokens. Returns its number if its end is of
        interest."""
        if num_tokens < _MIN_TOKENS:
            return None
        self._num_steps += 1
        self._steps[self._num_steps] = (self._clock(), num_tokens)
        return self._num_steps

    def on_step_ended(self, number: int) -> None:
        """A step has ended. With ``async_scheduling``, vLLM's default, it was scheduled while the
        step before ran. It then began at the end of that step."""
        scheduled, num_tokens = self._steps[number]
        self._steps = {each: step for each, step in self._steps.items() if each > number}
        now = self._clock()
        seconds = min(now - max(scheduled, self._step_ended), LONGEST_STEP)
        self.compute = self._computed.add(num_tokens, seconds)
        self._step_ended = now

    def on_answered(self, seconds: float) -> None:
        """Record in how many ``seconds`` a request's questions were answered."""
        self._answered_at = self._clock()
        self.answer = min(seconds, _FADING * (self.answer or seconds) + (1 - _FADING) * seconds)

    def on_fetched(self, num_tokens: int, seconds: float) -> None:
        """Record a fetch."""
        self._fetched_at = self._clock()
        self.fetch = self._fetched.add(num_tokens, seconds)

    def _is_stale(self, measured_at: float) -> bool:
        return self._clock() - measured_at >= _STALE_SECONDS
