"""Kept: what must not leave the tier to make room for the rest of a request."""

from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId


class Kept:
    """The keys of a request's first blocks, by group, and some more.

    A container that costs little until somebody asks: only a full tier does.
    """

    def __init__(self, keys: Sequence[Sequence[BlockHashWithGroupId]]) -> None:
        """``keys``: by group, of the request's blocks, as they become known."""
        self._keys = keys
        self._counts = [0] * len(keys)
        self._num_collected = [0] * len(keys)
        self._collected: set[BlockHashWithGroupId] = set()

    def keep_first(self, group: int, count: int) -> None:
        """Keep at least the first ``count`` blocks of a group, whose keys must be known."""
        self._counts[group] = max(self._counts[group], count)

    def keep(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Keep these too."""
        self._collected.update(keys)

    def __contains__(self, key: object) -> bool:
        if self._num_collected != self._counts:
            for group, count in enumerate(self._counts):
                self._collected.update(self._keys[group][self._num_collected[group] : count])
            self._num_collected = self._counts.copy()
        return key in self._collected
