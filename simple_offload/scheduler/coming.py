"""Coming: what is on its way to the tier."""

from collections.abc import Container, Iterable, Sequence

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

from simple_offload.scheduler.cpu_tier import CpuTier
from simple_offload.scheduler.runs import Run

_KEYS_PER_PARENT = 4
"""As many keys are looked for in the time that it takes to look for a run's parent."""


class Coming(Container[BlockHashWithGroupId]):
    """The keys of runs that are being stored. No key may be added that is there."""

    def __init__(self, tier: CpuTier) -> None:
        self.tier = tier
        self._runs: set[Run] = set()
        self._keys: set[BlockHashWithGroupId] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    @property
    def keys(self) -> set[BlockHashWithGroupId]:
        """All of them: for tests."""
        return {key for run in self._runs for key in run.keys}

    def add(self, run: Run) -> None:
        """The run is on its way."""
        self._runs.add(run)
        self._keys.update(run.keys)

    def remove(self, run: Run) -> None:
        """It is not any more."""
        self._runs.remove(run)
        self._keys.difference_update(run.keys)

    def clear(self) -> None:
        """Nothing is on its way any more."""
        self._runs.clear()
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
        return self._keys.isdisjoint(keys)

    def check_integrity(self, runs: Iterable[Run]) -> None:
        """Raise AssertionError unless these runs are on their way, and no other key is."""
        assert self._runs == set(runs), "runs on their way differ from the stores'"
        assert self._keys == self.keys, "keys on their way differ from the stores'"

    def _all_have_parents(self) -> bool:
        """Whether what precedes each run is in the tier or on its way, if something does. It may
        have left the tier meanwhile, or its store may have failed; or the run came early."""
        return all(
            run.parent is None or run.parent in self or self.tier.has(run.parent)
            for run in self._runs
        )
