"""Chains: host blocks that follow each other, found by their keys."""

from collections.abc import Callable, Container, Iterable
from typing import Any

from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
)

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.eviction import EvictionOrder
from simple_offload.scheduler.tier.groups import Hashes, make_keys

_FIRST_LOOKUP = 64
"""Blocks of a chain with a gap that are looked for at first; then ever more."""


class Chains:
    """Finds blocks in the tier's pool. Changes nothing.

    A prompt of 128K tokens has 8,192 blocks. A chain loses its tail first, so where it ends is
    found by bisection; and a parent stands mostly right behind its child in the free queue, so
    few of its blocks have to be looked up.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self.pool = order.pool
        self._order = order

    def present(self, keys: Iterable[BlockHashWithGroupId]) -> list[KVCacheBlock]:
        """The blocks of those ``keys`` that are there."""
        return [block for block in block_pool.find(self.pool, keys) if block is not None]

    def count(
        self,
        hashes: Hashes,
        end: bytes,
        limit: int,
        guess: int | None = None,
        is_coming: Callable[[bytes], bool] | None = None,
    ) -> int:
        """How many of the first ``limit`` blocks of a chain are there, or coming. Where the chain
        has a gap, maybe more: some of those behind it. ``guess``: what it will probably be, if
        not ``limit``."""
        cached: Container[bytes] = self.pool.cached_block_hash_to_block._cache
        first, stop = 0, limit
        middle = min(limit if guess is None else guess or 1, limit) - 1
        is_guess = True
        while first < stop:
            key = hashes[middle] + end
            if key in cached or (is_coming is not None and is_coming(key)):
                first = middle + 1
            else:
                stop = middle
            # A guess is right if the next one is not there. And where the last one is not, often
            # none is.
            middle = first if is_guess else (first + stop) // 2
            is_guess = False
        return first

    def first(self, hashes: Hashes, end: bytes, count: int) -> list[KVCacheBlock]:
        """The first ``count`` blocks of a chain, as far as they are there."""
        if not count:
            return []
        chain = self._up_to(hashes[count - 1] + end, count)
        return self.present(make_keys(hashes[:count], end)) if chain is None else chain

    def longest(self, hashes: Hashes, end: bytes, limit: int) -> list[KVCacheBlock]:
        """The first blocks of a chain, at most ``limit``, up to the first that is missing."""
        count = self.count(hashes, end, limit)
        chain = self._up_to(hashes[count - 1] + end, count) if count else []
        if chain is not None:
            return chain
        # It has a gap: a block has come before its parent.
        blocks: list[KVCacheBlock] = []
        batch = _FIRST_LOOKUP
        while True:
            part = hashes[len(blocks) : min(len(blocks) + batch, limit)]
            found = block_pool.find_chain(self.pool, make_keys(part, end))
            blocks += found
            if len(found) < len(part) or len(blocks) == limit:
                return blocks
            batch *= 4

    def _up_to(self, key: bytes, count: int) -> list[KVCacheBlock] | None:
        """The ``count`` blocks of a chain, in order, of which the last holds ``key``; None where
        they cannot be followed to the first one."""
        cached: Any = self.pool.cached_block_hash_to_block._cache
        parents = self._order.parents
        block: Any = cached.get(key)
        chain: list[KVCacheBlock] = []
        for _ in range(count):
            if type(block) is not KVCacheBlock:  # none, or several
                return None
            chain.append(block)
            parent = parents[block.block_id]
            behind = block.next_free_block
            if behind is None or behind._block_hash is not parent or parent is None:
                behind = cached.get(parent)
            block = behind
        chain.reverse()
        return chain
