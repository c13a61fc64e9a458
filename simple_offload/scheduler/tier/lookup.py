"""Lookup: the blocks of a request that the tier holds. Changes nothing."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.groups import Groups, Hashes, make_keys


class HostHit(NamedTuple):
    """The part of a prefix that the tier adds to the tokens on the device."""

    blocks: tuple[list[KVCacheBlock], ...] = ()
    """By group, host blocks from ``Groups.start_of`` the device's tokens on; null blocks where
    attention does not read (outside a sliding window)."""
    num_tokens: int = 0
    """Tokens that they add. 0: no hit. A hit may end inside a host block, and then uses that much
    of each group's last block."""
    pins: Sequence[KVCacheBlock] = ()
    """Its blocks, which must stay as long as the hit; by group, parents before children."""


class Lookup:
    """Finds host blocks by their keys."""

    def __init__(self, coordinator: KVCacheCoordinator, groups: Groups) -> None:
        self._coordinator = coordinator
        self._groups = groups
        self._pool = coordinator.block_pool
        self._cached = block_pool.cached(self._pool)

    def find(
        self, block_hashes: list[BlockHash], num_computed_tokens: int, max_tokens: int
    ) -> HostHit:
        """The longest prefix beyond ``num_computed_tokens`` that every group can supply, at most
        ``max_tokens`` tokens.

        Only the part that the device lacks is looked up: device blocks serve a window that
        reaches back over its start.
        """
        groups = self._groups
        start = groups.start_of(num_computed_tokens)
        remaining = groups.hashes_from(block_hashes, start)
        if not remaining or max_tokens <= 0:
            return HostHit()
        max_tokens += num_computed_tokens - start
        blocks: tuple[list[KVCacheBlock], ...]
        if groups.is_one_chain:
            size = groups.block_sizes[0]
            limit = min(max_tokens // size, len(remaining))
            chain = self._longest(remaining, groups.key_ends[0], limit)
            blocks, num_tokens = (chain,), len(chain) * size  # and so without null blocks
        else:
            blocks, num_tokens, _ = self._coordinator.find_longest_cache_hit(remaining, max_tokens)
        if groups.num_sub_blocks > 1:
            num_tokens = self._extend(block_hashes, start, blocks, num_tokens, max_tokens)
        num_tokens = max(0, start + num_tokens - num_computed_tokens)
        if groups.is_one_chain or not num_tokens:
            return HostHit(blocks, num_tokens, blocks[0] if num_tokens else ())
        pins = [block for of_group in blocks for block in of_group if not block.is_null]
        return HostHit(blocks, num_tokens, pins)

    # Details

    def _longest(self, hashes: Hashes, end: bytes, limit: int) -> list[KVCacheBlock]:
        """The first blocks of a chain, at most ``limit``, up to the first that is missing. A chain
        mostly loses its tail first, so bisection finds where it may end."""
        first, stop = 0, limit
        middle = limit - 1
        while first < stop:
            if hashes[middle] + end in self._cached:
                first = middle + 1
            else:
                stop = middle
            middle = (first + stop) // 2
        return block_pool.find_chain(self._pool, make_keys(hashes[:first], end))

    def _extend(
        self,
        block_hashes: list[BlockHash],
        start: int,
        blocks: tuple[list[KVCacheBlock], ...],
        num_tokens: int,
        max_tokens: int,
    ) -> int:
        """Extend a hit of ``num_tokens`` from ``start`` into the next host block of each group.
        That block must be there although only a part of it is used: a request computes its last
        token itself, and a drafter's block is valid up to its last token only. Returns the hit's
        new length, in whole sub-blocks; never up to the end of the host block.
        """
        groups = self._groups
        block_size = self._coordinator.scheduler_block_size
        limit = min(max_tokens, num_tokens + block_size - 1)
        limit -= limit % (block_size // groups.num_sub_blocks)
        if limit <= num_tokens:
            return num_tokens
        found = {}
        for group in groups.ids:
            size = groups.block_sizes[group]
            first, stop = (start + num_tokens) // size, cdiv(start + limit, size)
            keys = groups.keys(block_hashes, group, first, stop)
            found[group] = block_pool.find_chain(self._pool, keys)
            if len(found[group]) < stop - first:
                return num_tokens
        for group, more in found.items():
            blocks[group][num_tokens // groups.block_sizes[group] :] = more
        return limit
