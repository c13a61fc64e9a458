"""Groups: vLLM's KV cache groups as the tier has them, and by which keys their blocks are known."""

from collections.abc import Sequence
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
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, SlidingWindowSpec

Hashes = Sequence[BlockHash] | BlockHashListWithBlockSize
"""Of the blocks of a chain from the first one on. ``end``, which goes with them, makes keys of
them: it says of which group."""

_LENGTH_OF_KEY_END = len(make_block_hash_with_group_id(BlockHash(b""), 0))


class Groups:
    """A host block may hold several device blocks, its **parts**: as many in every group. Sizes
    and keys are those of whole host blocks, unless parts are named."""

    def __init__(
        self, coordinator: KVCacheCoordinator, hash_block_size: int, num_parts: int = 1
    ) -> None:
        """``hash_block_size``: how many tokens each of a request's hashes covers; the
        coordinator's hashes and blocks are to cover ``num_parts`` times as many as the device's.
        """
        managers = coordinator.single_type_managers
        self.hash_block_size = hash_block_size
        self.num_parts = num_parts
        self.ids: tuple[int, ...] = coordinator.kv_cache_config.prefix_cacheable_group_ids
        """Of those whose blocks can be found again."""
        self.block_sizes: Sequence[int] = coordinator.group_block_sizes
        """In tokens, by group."""
        self.chained_ids = tuple(
            group for group in self.ids if isinstance(managers[group], FullAttentionManager)
        )
        """Groups of which a hit needs every block from the first token on."""
        self.stable_ids = frozenset(
            group for group in self.ids if managers[group].has_positionally_stable_blocks
        )
        """Groups whose table's block i is about the tokens of block i and nothing else. A table of
        states has the running state there, or nothing, until a boundary's is kept."""
        self.lasting_ids = frozenset(
            group for group in self.ids if type(managers[group]) is FullAttentionManager
        )
        """Groups whose blocks a request keeps as long as it has any."""
        self.all_chained = len(self.chained_ids) == len(self.ids)
        """Whether those are all whose blocks can be found again."""
        self.key_ends = [
            make_block_hash_with_group_id(BlockHash(b""), group)
            for group in range(len(self.block_sizes))
        ]
        """By group, what makes a hash a key: of a long prefix there are thousands to make."""
        self._chained_key_ends = {self.key_ends[group] for group in self.chained_ids}
        self._coordinator = coordinator
        self.is_one_chain = (
            [type(manager) for manager in managers] == [FullAttentionManager]
            and self.ids == (0,)
            and not coordinator.eagle_group_ids
            and self.block_sizes[0] == coordinator.block_pool.hash_block_size
        )
        """Whether a lookup is a walk along one chain, as for most models."""

    def hashes(self, block_hashes: list[BlockHash], group: int) -> Hashes:
        """Those of a request's blocks of ``group``."""
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

    def num_keys(self, block_hashes: list[BlockHash], group: int) -> int:
        """How many of a request's blocks of ``group`` have a key."""
        return len(block_hashes) * self.hash_block_size // self.block_sizes[group]

    def key_at(
        self, block_hashes: list[BlockHash], group: int, num_tokens: int
    ) -> BlockHashWithGroupId:
        """The key of what ends with the prefix of ``num_tokens`` tokens, a multiple of the hash
        block size: inside a block, perhaps."""
        block_hash = block_hashes[num_tokens // self.hash_block_size - 1]
        return BlockHashWithGroupId(block_hash + self.key_ends[group])

    def num_unread_tokens(self, num_tokens: int, group: int) -> int:
        """How many of a request's first ``num_tokens`` tokens attention of ``group`` does not read
        any more when it goes on from there."""
        count: int = self._coordinator.single_type_managers[group].get_num_skipped_tokens(
            num_tokens
        )
        return count

    def next_hit(self, num_tokens: int) -> int:
        """How long the hit is of a request that begins with ``num_tokens`` tokens which are all
        there, and goes on behind them."""
        block_size = self._coordinator.scheduler_block_size
        dropped = block_size if self._coordinator.eagle_group_ids else 0
        return max(0, num_tokens // block_size * block_size - dropped)

    def num_cacheable_tokens(self, num_tokens: int, group: int) -> int:
        """How many of a request's first ``num_tokens`` tokens ``group`` may have in blocks that
        can be found again."""
        count: int = self._coordinator.get_num_cacheable_tokens(num_tokens, group)
        return count

    def part_keys(
        self, block_hashes: list[BlockHash], group: int, start: int, stop: int
    ) -> list[BlockHashWithGroupId]:
        """The keys by which the device knows the parts of a request's host blocks ``start`` to
        ``stop``, whose hashes must be known."""
        hashes = self.part_hashes(block_hashes, group, start, stop)
        return make_keys(hashes, self.key_ends[group])

    def part_hashes(
        self, block_hashes: list[BlockHash], group: int, start: int, stop: int
    ) -> list[BlockHash]:
        """What becomes ``part_keys`` with ``key_ends[group]`` added to each."""
        num_parts = self.num_parts
        stride = self.block_sizes[group] // num_parts // self.hash_block_size  # hashes a part
        first, last = start * num_parts * stride, stop * num_parts * stride
        return block_hashes[first + stride - 1 : last : stride]

    def parts(self, table: list[KVCacheBlock], start: int, stop: int) -> list[KVCacheBlock]:
        """The device blocks of a block table that belong to host blocks ``start`` to ``stop``."""
        return table[start * self.num_parts : stop * self.num_parts]

    def is_chained(self, key: BlockHashWithGroupId) -> bool:
        """Whether a hit needs what precedes the block of ``key``."""
        return key[-_LENGTH_OF_KEY_END:] in self._chained_key_ends

    def start_of(self, num_computed_tokens: int) -> int:
        """Where a lookup beyond ``num_computed_tokens`` begins: there, or as many tokens earlier
        as the device has of the next host block of some group."""
        if self.num_parts == 1:
            return num_computed_tokens
        return num_computed_tokens - num_computed_tokens % self._coordinator.scheduler_block_size


def make_keys(hashes: Hashes, end: bytes) -> list[BlockHashWithGroupId]:
    """By which the blocks with these hashes are found."""
    return cast(list[BlockHashWithGroupId], [each + end for each in hashes])


def host_groups(kv_cache_config: KVCacheConfig, num_parts: int) -> KVCacheConfig:
    """The device's groups as the tier has them, ``num_parts`` of the device's blocks in one.

    Sliding windows are as wide as attention reads. The device retains more for a chain of MTP
    modules, but its prefix cache, too, looks for no more (vLLM's ``SlidingWindowManager``). Which
    blocks the device keeps (retention) is said in its own blocks, and nothing here asks.
    """
    groups = [
        replace(group, kv_cache_spec=_host_spec(group.kv_cache_spec, num_parts))
        for group in kv_cache_config.kv_cache_groups
    ]
    return replace(kv_cache_config, kv_cache_groups=groups, prefix_cache_retention_interval=None)


def _host_spec(spec: KVCacheSpec, num_parts: int) -> KVCacheSpec:
    changes: dict[str, Any] = {"block_size": spec.block_size * num_parts}
    if isinstance(spec, SlidingWindowSpec):
        changes["extra_retained_tokens"] = 0
    return replace(spec, **changes)
