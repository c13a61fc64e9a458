"""Lookup: the blocks of a request that the tier holds. Changes nothing."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.eviction import EvictionOrder
from simple_offload.scheduler.tier.groups import Groups, Hashes, make_keys

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


class HostHit(NamedTuple):
    """What the tier holds of a prefix beyond the tokens the device has."""

    blocks: tuple[list[KVCacheBlock], ...]
    """For each group the host blocks from ``Groups.start_of`` the device's tokens on; null
    blocks where attention does not look (outside a sliding window)."""

    num_tokens: int
    """How many tokens they add to the device's. 0: no hit, and nothing to pin. It may end inside
    a host block; then of each group's last block as much counts."""


class Lookup:
    """Finds host blocks by what they hold."""

    def __init__(
        self, coordinator: KVCacheCoordinator, groups: Groups, order: EvictionOrder
    ) -> None:
        self._coordinator = coordinator
        self._groups = groups
        self._order = order
        self._pool: BlockPool = order.pool
        self._chains = Chains(order)

    def get(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """The block that holds ``key``, if any."""
        found = self._pool.cached_block_hash_to_block._cache.get(key)
        if isinstance(found, dict):  # several hold it
            return self._pool.cached_block_hash_to_block.get_one_block(key)
        return found

    def has(self, key: BlockHashWithGroupId) -> bool:
        """Whether a block holds ``key``."""
        return key in self._pool.cached_block_hash_to_block._cache

    def count_first(
        self,
        block_hashes: list[BlockHash],
        group: int,
        limit: int,
        guess: int | None = None,
        is_coming: Callable[[bytes], bool] | None = None,
    ) -> int:
        """How many of the first ``limit`` blocks of a request of a chained group are there, or
        coming. ``guess``: what it will probably be, if not all."""
        hashes = self._groups.hashes(block_hashes, group)
        end = self._groups.key_ends[group]
        return self._chains.count(hashes, end, limit, guess, is_coming)

    def has_none(self, keys: Sequence[BlockHashWithGroupId]) -> bool:
        """Whether no block holds one of ``keys``, at least one, of blocks that follow each other
        in a chain."""
        cached = self._pool.cached_block_hash_to_block._cache
        if not self._order.early and self._groups.is_chained(keys[0]):
            return keys[0] not in cached  # nor is there what follows it, then
        return cached.keys().isdisjoint(keys)

    def hit(
        self, block_hashes: list[BlockHash], num_computed_tokens: int, max_tokens: int
    ) -> HostHit:
        """The longest prefix beyond ``num_computed_tokens`` that every group can supply, at most
        ``max_tokens`` tokens.

        Only the part that the device lacks is looked up: a window that reaches back over its
        start is served by the device blocks in front of it.
        """
        groups = self._groups
        start = groups.start_of(num_computed_tokens)
        first = start // groups.hash_block_size
        remaining = block_hashes[first + groups.num_parts - 1 :: groups.num_parts]
        if not remaining or max_tokens <= 0:
            return HostHit((), 0)
        max_tokens += num_computed_tokens - start
        blocks: tuple[list[KVCacheBlock], ...]
        if groups.is_one_chain:
            size = groups.block_sizes[0]
            limit = min(max_tokens // size, len(remaining))
            chain = self._chains.longest(remaining, groups.key_ends[0], limit)
            blocks, num_tokens = (chain,), len(chain) * size
        else:
            blocks, num_tokens, _ = self._coordinator.find_longest_cache_hit(remaining, max_tokens)
        if groups.num_parts > 1:
            num_tokens = self._extend(block_hashes, start, blocks, num_tokens, max_tokens)
        return HostHit(blocks, max(0, start + num_tokens - num_computed_tokens))

    def lineage(
        self, block_hashes: list[BlockHash], num_computed_tokens: int
    ) -> list[KVCacheBlock]:
        """The blocks that precede a hit in its chains, in order, as far as they are there: they
        have to stay as long as the hit does, although the device has its own copies."""
        groups = self._groups
        start = groups.start_of(num_computed_tokens)
        ancestors = []
        for group in groups.chained_ids:
            ancestors += self.first_blocks(block_hashes, group, start // groups.block_sizes[group])
        return ancestors

    def first_blocks(
        self, block_hashes: list[BlockHash], group: int, count: int
    ) -> list[KVCacheBlock]:
        """The first ``count`` blocks of a request of a chained group, as far as they are
        there."""
        hashes = self._groups.hashes(block_hashes, group)
        return self._chains.first(hashes, self._groups.key_ends[group], count)

    def blocks(
        self, block_hashes: list[BlockHash], group: int, start: int, stop: int
    ) -> list[KVCacheBlock]:
        """Those of a request's blocks ``start`` to ``stop`` of ``group`` that are there."""
        return self._chains.present(self._groups.keys(block_hashes, group, start, stop))

    def _extend(
        self,
        block_hashes: list[BlockHash],
        start: int,
        blocks: tuple[list[KVCacheBlock], ...],
        num_tokens: int,
        max_tokens: int,
    ) -> int:
        """Let a hit of ``num_tokens`` from ``start`` on go on into the next host block of each
        group, which must be there although not all of it is to be used: a request computes its
        last token itself, and a drafter's block is good up to its last token only. Returns how
        long the hit is then, in whole device blocks; never to the end of the host block.
        """
        groups = self._groups
        block_size = self._coordinator.scheduler_block_size
        limit = min(max_tokens, num_tokens + block_size - 1)
        limit -= limit % (block_size // groups.num_parts)
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
