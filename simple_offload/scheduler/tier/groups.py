"""Groups: vLLM's KV cache groups as the host tier has them, and the keys of their blocks."""

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any, cast

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashListWithBlockSize,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from simple_offload import vllm_compat

Hashes = Sequence[BlockHash] | BlockHashListWithBlockSize
"""Hashes of the blocks of a chain, from the first one on. A hash and its group's ``end`` make a
key."""


class Groups:
    """A host block may hold several device blocks, its **sub-blocks**, in each group the same
    number. Sizes and keys are those of whole host blocks, unless sub-blocks are named."""

    def __init__(
        self,
        coordinator: KVCacheCoordinator,
        hash_block_size: int,
        num_sub_blocks: int = 1,
        unread_ids: Set[int] = frozenset(),
    ) -> None:
        """``hash_block_size``: tokens that one of a request's hashes covers. The coordinator's
        hashes and blocks must cover ``num_sub_blocks`` times as many tokens as the device's.
        ``unread_ids``: as ``host_groups`` has got them."""
        managers = coordinator.single_type_managers
        self.specs: list[KVCacheSpec] = [
            group.kv_cache_spec for group in coordinator.kv_cache_config.kv_cache_groups
        ]
        """By group."""
        self.hash_block_size = hash_block_size
        self.num_sub_blocks = num_sub_blocks
        self.ids: tuple[int, ...] = coordinator.kv_cache_config.prefix_cacheable_group_ids
        """Ids of the groups whose blocks can be found again."""
        self.block_sizes = vllm_compat.group_block_sizes(coordinator)
        """In tokens, by group."""
        self.chained_ids = tuple(
            group for group in self.ids if isinstance(managers[group], FullAttentionManager)
        )
        """Groups in which a hit needs every block from the first token on."""
        self.stable_ids = frozenset(
            group for group in self.ids if managers[group].has_positionally_stable_blocks
        )
        """Groups in whose block tables entry i holds the tokens of block i only. In a table of
        states, entry i is the running state, or null, until the state at its boundary is kept."""
        self.lasting_ids = frozenset(
            group for group in self.ids if type(managers[group]) is FullAttentionManager
        )
        """Groups whose blocks a request keeps until it gives up all blocks."""
        self.all_chained = len(self.chained_ids) == len(self.ids)
        """Whether all ``ids`` are chained."""
        self.key_ends = [
            make_block_hash_with_group_id(BlockHash(b""), group)
            for group in range(len(self.block_sizes))
        ]
        """By group, the bytes that turn a hash into a key: a long prompt needs thousands."""
        self._unread_ids = unread_ids
        self._coordinator = coordinator
        self.is_one_chain = (
            [type(manager) for manager in managers] == [FullAttentionManager]
            and self.ids == (0,)
            and not coordinator.eagle_group_ids
            and self.block_sizes[0] == coordinator.block_pool.hash_block_size
        )
        """Whether a lookup follows one chain only, as for most models."""

    def hashes(self, block_hashes: list[BlockHash], group: int) -> Hashes:
        """The hashes of a request's blocks of ``group``."""
        hashes: Hashes = resolve_block_hashes(
            block_hashes, self.hash_block_size, self.block_sizes[group]
        )
        return hashes

    def keys(
        self, block_hashes: list[BlockHash], group: int, start: int = 0, stop: int | None = None
    ) -> list[BlockHashWithGroupId]:
        """The keys of a request's blocks ``start`` to ``stop`` of ``group``, as far as their
        hashes are known."""
        return make_keys(self.hashes(block_hashes, group)[start:stop], self.key_ends[group])

    def hashes_from(self, block_hashes: list[BlockHash], start: int) -> list[BlockHash]:
        """A request's hashes of host blocks, from the token ``start`` on, the first of one."""
        first = start // self.hash_block_size
        return block_hashes[first + self.num_sub_blocks - 1 :: self.num_sub_blocks]

    def keys_between(
        self, block_hashes: list[BlockHash], group: int, start: int, stop: int
    ) -> list[tuple[int, BlockHashWithGroupId]]:
        """The keys of a request's whole blocks of ``group`` between two tokens, as far as their
        hashes are known, each with the token that it ends before."""
        size = self.block_sizes[group]
        first = start // size
        keys = self.keys(block_hashes, group, first, stop // size)
        return [((first + index + 1) * size, key) for index, key in enumerate(keys)]

    def key_at(
        self, block_hashes: list[BlockHash], group: int, num_tokens: int
    ) -> BlockHashWithGroupId:
        """The key of the prefix of ``num_tokens`` tokens, a multiple of the hash block size. It
        may end inside a block."""
        block_hash = block_hashes[num_tokens // self.hash_block_size - 1]
        return BlockHashWithGroupId(block_hash + self.key_ends[group])

    def num_unread_tokens(self, num_tokens: int, group: int) -> int:
        """Number of a request's first ``num_tokens`` tokens that attention of ``group`` no longer
        reads for the tokens after them."""
        if group in self._unread_ids:
            return num_tokens
        count: int = self._coordinator.single_type_managers[group].get_num_skipped_tokens(
            num_tokens
        )
        return count

    def first_read(self, num_tokens: int, group: int) -> int:
        """The first block of ``group`` that is read after a hit of ``num_tokens`` tokens: of
        windows and states, those before it are not."""
        if group in self.chained_ids:
            return 0
        return self.num_unread_tokens(num_tokens, group) // self.block_sizes[group]

    def next_hit(self, num_tokens: int) -> int:
        """Tokens that a longer request can hit if the blocks of its first ``num_tokens`` tokens
        are all there."""
        dropped = self._coordinator.scheduler_block_size if self._coordinator.eagle_group_ids else 0
        return max(0, self._whole(num_tokens) - dropped)

    def needed_blocks(self, num_tokens: int, group: int) -> range:
        """The blocks of ``group`` that must be there for ``next_hit``."""
        next_hit = self.next_hit(num_tokens)
        # vLLM looks for one block more of a drafter's attention, and drops that.
        has_more = group in self._coordinator.eagle_group_ids and group in self.stable_ids
        stop = next_hit // self.block_sizes[group] + has_more
        return range(self.first_read(next_hit, group), stop)

    def num_cacheable_tokens(self, num_tokens: int, group: int) -> int:
        """Number of a request's first ``num_tokens`` tokens whose blocks in ``group`` can be found
        again."""
        return vllm_compat.num_cacheable_tokens(self._coordinator, num_tokens, group)

    def sub_block_keys(
        self, block_hashes: list[BlockHash], group: int, start: int, stop: int
    ) -> list[BlockHashWithGroupId]:
        """The device's keys of the sub-blocks of a request's host blocks ``start`` to ``stop``,
        whose hashes must be known."""
        num_sub_blocks = self.num_sub_blocks
        stride = (
            self.block_sizes[group] // num_sub_blocks // self.hash_block_size
        )  # hashes a sub-block
        first, last = start * num_sub_blocks * stride, stop * num_sub_blocks * stride
        return make_keys(block_hashes[first + stride - 1 : last : stride], self.key_ends[group])

    def sub_blocks(self, table: list[KVCacheBlock], start: int, stop: int) -> list[KVCacheBlock]:
        """The device blocks of a block table that belong to host blocks ``start`` to ``stop``."""
        return table[start * self.num_sub_blocks : stop * self.num_sub_blocks]

    def start_of(self, num_computed_tokens: int) -> int:
        """First token of a lookup beyond ``num_computed_tokens``: the beginning of the host block
        that the device has a part of."""
        if self.num_sub_blocks == 1:
            return num_computed_tokens
        return self._whole(num_computed_tokens)

    def _whole(self, num_tokens: int) -> int:
        """Of ``num_tokens`` tokens, those in whole blocks of every group."""
        return num_tokens - num_tokens % self._coordinator.scheduler_block_size


def make_keys(hashes: Hashes, end: bytes) -> list[BlockHashWithGroupId]:
    """The keys of blocks with these hashes."""
    return cast(list[BlockHashWithGroupId], [each + end for each in hashes])


def host_groups(
    kv_cache_config: KVCacheConfig, num_sub_blocks: int, unread_ids: Set[int] = frozenset()
) -> KVCacheConfig:
    """The device's groups as the tier has them, ``num_sub_blocks`` device blocks in a host block.
    Those of ``unread_ids`` have no host blocks: nothing is read of them after a hit.

    Sliding windows are as wide as attention reads. The device retains more tokens for a chain of
    MTP modules, but its prefix cache looks for the window only too (vLLM's
    ``SlidingWindowManager``). Retention is left out: it decides which blocks the device hashes.
    """
    groups = [
        replace(
            group,
            kv_cache_spec=_uncached(group.kv_cache_spec)
            if number in unread_ids
            else _host_spec(group.kv_cache_spec, num_sub_blocks),
        )
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    ]
    return replace(kv_cache_config, kv_cache_groups=groups, prefix_cache_retention_interval=None)


def _uncached(spec: KVCacheSpec) -> KVCacheSpec:
    """A group that prefix caching leaves out."""
    (first, *_) = iter_layer_specs(spec)
    return CircularBufferSpec(
        block_size=spec.block_size, num_kv_heads=1, head_size=1, dtype=cast(Any, first).dtype
    )


def _host_spec(spec: KVCacheSpec, num_sub_blocks: int) -> KVCacheSpec:
    changes: dict[str, Any] = {"block_size": spec.block_size * num_sub_blocks}
    if isinstance(spec, SlidingWindowSpec):
        changes["extra_retained_tokens"] = 0
    return replace(spec, **changes)
