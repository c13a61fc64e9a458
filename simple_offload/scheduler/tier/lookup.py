"""Lookup: the blocks of a request that the tier holds. Changes nothing.

A prompt of 128K tokens has 8,192 blocks. A chain loses its tail first, so bisection finds its end;
and a parent stands mostly right behind its child in the free queue, so few blocks are looked up.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.eviction import EvictionOrder
from simple_offload.scheduler.tier.groups import Groups, Hashes, make_keys

_FIRST_LOOKUP = 64
"""Blocks of a chain with a gap that are looked up first; then ever more."""


class HostHit(NamedTuple):
    """The part of a prefix that the tier adds to the tokens on the device."""

    blocks: tuple[list[KVCacheBlock], ...]
    """By group, host blocks from ``Groups.start_of`` the device's tokens on; null blocks where
    attention does not read (outside a sliding window)."""
    num_tokens: int
    """Tokens that they add. 0: no hit. A hit may end inside a host block, and then uses that much
    of each group's last block."""
    pins: list[KVCacheBlock]
    """Blocks that must stay as long as the hit: its own and their ancestors, although the device
    has copies of those; parents before children."""


class Lookup:
    """Finds host blocks by their keys."""

    def __init__(
        self, coordinator: KVCacheCoordinator, groups: Groups, order: EvictionOrder
    ) -> None:
        self._coordinator = coordinator
        self._groups = groups
        self._order = order
        self._pool = coordinator.block_pool
        self._cached = block_pool.cached(self._pool)

    def count_first(
        self,
        block_hashes: list[BlockHash],
        group: int,
        limit: int,
        guess: int | None = None,
        is_coming: Callable[[bytes], bool] | None = None,
    ) -> int:
        """``CpuTier.count_first``."""
        hashes, end = self._groups.hashes(block_hashes, group), self._groups.key_ends[group]
        return self._count(hashes, end, limit, guess, is_coming)

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
        first = start // groups.hash_block_size
        remaining = block_hashes[first + groups.num_sub_blocks - 1 :: groups.num_sub_blocks]
        if not remaining or max_tokens <= 0:
            return HostHit((), 0, [])
        max_tokens += num_computed_tokens - start
        blocks: tuple[list[KVCacheBlock], ...]
        if groups.is_one_chain:
            size = groups.block_sizes[0]
            limit = min(max_tokens // size, len(remaining))
            chain = self._longest(remaining, groups.key_ends[0], limit)
            blocks, num_tokens = (chain,), len(chain) * size
        else:
            blocks, num_tokens, _ = self._coordinator.find_longest_cache_hit(remaining, max_tokens)
        if groups.num_sub_blocks > 1:
            num_tokens = self._extend(block_hashes, start, blocks, num_tokens, max_tokens)
        num_tokens = max(0, start + num_tokens - num_computed_tokens)
        return HostHit(blocks, num_tokens, self._pins(block_hashes, start, blocks, num_tokens))

    def first_blocks(
        self, block_hashes: list[BlockHash], group: int, count: int
    ) -> list[KVCacheBlock]:
        """Those of the first ``count`` blocks of a request in a chained group that are in the
        tier."""
        if not count:
            return []
        hashes, end = self._groups.hashes(block_hashes, group), self._groups.key_ends[group]
        chain = block_pool.chain_up_to(
            self._pool, self._order.parents, hashes[count - 1] + end, count
        )
        return self._present(make_keys(hashes[:count], end)) if chain is None else chain

    def blocks(
        self, block_hashes: list[BlockHash], group: int, start: int, stop: int
    ) -> list[KVCacheBlock]:
        """Those of a request's blocks ``start`` to ``stop`` of ``group`` that are in the tier."""
        return self._present(self._groups.keys(block_hashes, group, start, stop))

    # Details

    def _present(self, keys: Iterable[BlockHashWithGroupId]) -> list[KVCacheBlock]:
        return [block for block in block_pool.find_blocks(self._pool, keys) if block is not None]

    def _count(
        self,
        hashes: Hashes,
        end: bytes,
        limit: int,
        guess: int | None = None,
        is_coming: Callable[[bytes], bool] | None = None,
    ) -> int:
        first, stop = 0, limit
        middle = min(limit if guess is None else guess or 1, limit) - 1
        is_guess = True
        while first < stop:
            key = hashes[middle] + end
            if key in self._cached or (is_coming is not None and is_coming(key)):
                first = middle + 1
            else:
                stop = middle
            # A guess is right if the next block is missing. And if the guessed last block is
            # missing, often all are.
            middle = first if is_guess else (first + stop) // 2
            is_guess = False
        return first

    def _longest(self, hashes: Hashes, end: bytes, limit: int) -> list[KVCacheBlock]:
        """The first blocks of a chain, at most ``limit``, up to the first that is missing."""
        count = self._count(hashes, end, limit)
        if not count:
            return []
        chain = block_pool.chain_up_to(
            self._pool, self._order.parents, hashes[count - 1] + end, count
        )
        if chain is not None:
            return chain
        # The chain has a gap: a block came before its parent.
        blocks: list[KVCacheBlock] = []
        batch = _FIRST_LOOKUP
        while True:
            part = hashes[len(blocks) : min(len(blocks) + batch, limit)]
            found = block_pool.find_chain(self._pool, make_keys(part, end))
            blocks += found
            if len(found) < len(part) or len(blocks) == limit:
                return blocks
            batch *= 4

    def _pins(
        self,
        block_hashes: list[BlockHash],
        start: int,
        blocks: Sequence[list[KVCacheBlock]],
        num_tokens: int,
    ) -> list[KVCacheBlock]:
        pins: list[KVCacheBlock] = []
        if num_tokens:
            for group in self._groups.chained_ids:
                size = self._groups.block_sizes[group]
                pins += self.first_blocks(block_hashes, group, start // size)
            for group, of_group in enumerate(blocks):
                is_chained = group in self._groups.chained_ids  # and so has no null blocks
                pins += of_group if is_chained else [b for b in of_group if not b.is_null]
        return pins

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
            found[group] = self.blocks(block_hashes, group, first, stop)
            if len(found[group]) < stop - first:
                return num_tokens
        for group, more in found.items():
            blocks[group][num_tokens // groups.block_sizes[group] :] = more
        return limit
