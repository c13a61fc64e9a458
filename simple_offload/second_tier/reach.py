"""Reach: how far a lookup would get if the tier had some objects too."""

from collections.abc import Callable

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)

from simple_offload.scheduler.tier.groups import Groups


class Reach:
    """vLLM's own rules for a lookup (``KVCacheCoordinator``), over a set of keys."""

    def __init__(self, coordinator: KVCacheCoordinator, groups: Groups) -> None:
        """``coordinator``: as the tier's, for this use only. Its pool answers as ``find`` says."""
        self._groups = groups
        self._coordinator = coordinator
        self._block = KVCacheBlock(1)
        self._has: Callable[[BlockHashWithGroupId], bool] = lambda _: False
        self._found: set[BlockHashWithGroupId] = set()
        coordinator.block_pool.get_cached_block = self._get_cached_block  # type: ignore[method-assign]

    def find(
        self,
        block_hashes: list[BlockHash],
        num_computed_tokens: int,
        max_tokens: int,
        has: Callable[[BlockHashWithGroupId], bool],
    ) -> tuple[int, list[tuple[int, BlockHashWithGroupId]]]:
        """Tokens beyond ``num_computed_tokens``, at most ``max_tokens``, that a lookup would find,
        and the blocks that it needs for them: the token that each ends before, and its key, in this
        order. ``has``: whether there are contents with a key."""
        groups = self._groups
        start = groups.start_of(num_computed_tokens)
        hashes = groups.hashes_from(block_hashes, start)
        max_tokens += num_computed_tokens - start
        if not hashes or max_tokens <= 0:
            return 0, []
        self._has = has
        self._found.clear()
        _, num_tokens, _ = self._coordinator.find_longest_cache_hit(hashes, max_tokens)
        if start + num_tokens <= num_computed_tokens:
            return 0, []
        # A drafter's lookup needs a block that the hit does not have.
        stop = start + num_tokens + self._coordinator.scheduler_block_size
        needed = [
            (end, key)
            for group in groups.ids
            for end, key in groups.keys_between(block_hashes, group, start, stop)
            if key in self._found
        ]
        return start + num_tokens - num_computed_tokens, sorted(needed)

    def _get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """As vLLM's pool (``BlockPool.get_cached_block``), which its lookup asks."""
        keys = [make_block_hash_with_group_id(block_hash, group) for group in kv_cache_group_ids]
        if not all(map(self._has, keys)):
            return None
        self._found.update(keys)
        return [self._block] * len(keys)
