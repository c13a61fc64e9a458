"""Kept: what must not leave the tier to make room for the rest of a request."""

from collections.abc import Iterable, Set

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId

from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.lookup import Lookup


class Kept:
    """A request's first host blocks, by group, and some more.

    Their keys are collected when somebody asks: only a full tier does.
    """

    def __init__(self, groups: Groups, lookup: Lookup, block_hashes: list[BlockHash]) -> None:
        self._groups = groups
        self._lookup = lookup
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
        """Keys of which the queue of eviction has one before it has anything that is kept; none
        but of blocks that are kept."""
        for group, count in enumerate(self._counts):
            if count > self._num_collected[group]:
                if group in self._groups.chained_ids:
                    self._collect_last(group, count)
                else:
                    self._collect_all(group, count)
        return self._collected

    def _collect_last(self, group: int, count: int) -> None:
        """Of a chain the last block that is there stands before all others. Unless somebody holds
        it, it is all that one has to know."""
        count = self._lookup.count_first(self._hashes, group, count)
        if count:
            last = self._groups.key_at(self._hashes, group, count * self._groups.block_sizes[group])
            block = self._lookup.get(last)
            if block is not None and block.ref_cnt == 0:
                self._collected.add(last)
            else:
                self._collect_all(group, count)

    def _collect_all(self, group: int, count: int) -> None:
        first = self._num_collected[group]
        if first < count:
            self._collected.update(self._groups.keys(self._hashes, group, first, count))
            self._num_collected[group] = count
