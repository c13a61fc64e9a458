"""Coming: what is on its way to the tier."""

from collections.abc import Container, Iterable, Sequence

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

from simple_offload.scheduler.cpu_tier import CpuTier
from simple_offload.scheduler.runs import Run

_KEYS_PER_PARENT = 4
"""As many keys are looked for in the time that it takes to look for a run's parent."""
_LONG = 64
_MOST_LONG = 4
"""Runs of at least ``_LONG`` keys have a set of their own, but no more runs than that: whoever
looks for a key looks in each."""


class Coming(Container[BlockHashWithGroupId]):
    """The keys of runs that are being stored. No key may be added that is there.

    The set of a long run is dropped as a whole: to take thousands of keys out of a set takes as
    long as to put them there.
    """

    def __init__(self, tier: CpuTier) -> None:
        self.tier = tier
        self._runs: set[Run] = set()
        self._own_keys: dict[Run, set[BlockHashWithGroupId]] = {}
        """Of each run that has a set of its own."""
        self._keys: set[BlockHashWithGroupId] = set()
        """Of all others."""

    def __contains__(self, key: object) -> bool:
        if key in self._keys:
            return True
        return bool(self._own_keys) and any(key in each for each in self._own_keys.values())

    @property
    def keys(self) -> set[BlockHashWithGroupId]:
        """All of them: for tests."""
        return {key for run in self._runs for key in run.keys}

    def add(self, run: Run) -> None:
        """The run is on its way."""
        self._runs.add(run)
        if len(run) >= _LONG and len(self._own_keys) < _MOST_LONG:
            self._own_keys[run] = set(run.keys)
        else:
            self._keys.update(run.keys)

    def remove(self, run: Run) -> None:
        """It is not any more."""
        self._runs.remove(run)
        if self._own_keys.pop(run, None) is None:
            self._keys.difference_update(run.keys)

    def clear(self) -> None:
        """Nothing is on its way any more."""
        self._runs.clear()
        self._own_keys.clear()
        self._keys.clear()

    def has_none(self, keys: Sequence[BlockHashWithGroupId]) -> bool:
        """Whether none of ``keys``, at least one, of blocks that follow each other in a chain, is
        on its way. The tier must have none of them either."""
        if keys[0] in self:
            return False
        # A run with another of them would begin behind the first, or else have that too. So its
        # parent would be one of them, which is not in the tier, nor, by the same token, coming.
        if len(self._runs) * _KEYS_PER_PARENT < len(keys) and self._all_have_parents():
            return True
        return all(each.isdisjoint(keys) for each in self._sets())

    def check_integrity(self, runs: Iterable[Run]) -> None:
        """Raise AssertionError unless these runs are on their way, and no other key is."""
        assert self._runs == set(runs), "runs on their way differ from the stores'"
        assert set().union(*self._sets()) == self.keys, "keys on their way differ from the stores'"

    def _sets(self) -> list[set[BlockHashWithGroupId]]:
        return [self._keys, *self._own_keys.values()]

    def _all_have_parents(self) -> bool:
        """Whether what precedes each run is in the tier or on its way, if something does. It may
        have left the tier meanwhile, or its store may have failed; or the run came early."""
        return all(
            run.parent is None or run.parent in self or self.tier.has(run.parent)
            for run in self._runs
        )
