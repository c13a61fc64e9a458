"""Kept: what must not leave the tier to make room for the rest of a request."""

from collections.abc import Iterable, Set

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId

from simple_offload.scheduler.groups import Groups


class Kept:
    """The keys of a request's first host blocks, by group, and some more.

    They are collected when somebody asks: only a full tier does.
    """

    def __init__(self, groups: Groups, block_hashes: list[BlockHash]) -> None:
        self._groups = groups
        self._hashes = block_hashes
        self._counts = [0] * len(groups.block_sizes)
        self._num_collected = self._counts.copy()
        self._collected: set[BlockHashWithGroupId] = set()

    def keep_first(self, group: int, count: int) -> None:
        """Keep at least the first ``count`` blocks of a group."""
        self._counts[group] = max(self._counts[group], count)

    def keep(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Keep these too."""
        self._collected.update(keys)

    def collect(self) -> Set[BlockHashWithGroupId]:
        """All that is kept."""
        if self._num_collected != self._counts:
            for group, count in enumerate(self._counts):
                first = self._num_collected[group]
                self._collected.update(self._groups.keys(self._hashes, group, first, count))
            self._num_collected = self._counts.copy()
        return self._collected
