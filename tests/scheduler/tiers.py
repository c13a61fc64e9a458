"""Small host tiers whose blocks have names.

A letter stands for the tokens of one block. "abc" is a chain of three blocks, and also the name of
its last block. Chains with a common prefix share blocks.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_group_id,
    make_block_hash_with_group_id,
)

from simple_offload.metrics import Meter
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups, host_groups
from simple_offload.scheduler.tier.run import Run
from simple_offload.transfer import BlockIds
from simple_offload.vllm_compat import make_host_coordinator
from tests.simulation.integrity import (
    check_tier,
    free_queues_of,
    is_duplicate,
    is_protected,
    pool_of,
)
from tests.simulation.shape import Shape
from tests.simulation.vllm_config import make_vllm_config

BLOCK_SIZE = 4
_NAMES: dict[BlockHashWithGroupId, str] = {}


def make_tier(num_blocks: int, windows: tuple[int, ...] = (0,), num_sub_blocks: int = 1) -> CpuTier:
    """A tier with room for ``num_blocks`` blocks; ``windows`` and ``num_sub_blocks`` as in
    Shape."""
    return make_tier_of_vllm(num_blocks, windows, num_sub_blocks)[0]


def make_tier_of_vllm(
    num_blocks: int, windows: tuple[int, ...], num_sub_blocks: int = 1
) -> tuple[CpuTier, KVCacheCoordinator]:
    """Such a tier, and what it is made of."""
    shape = Shape(num_device_blocks=num_blocks + 1, block_size=BLOCK_SIZE, windows=windows)
    config = host_groups(shape.kv_cache_config(), num_sub_blocks)
    size = BLOCK_SIZE * num_sub_blocks
    coordinator = make_host_coordinator(config, _vllm_config(), size, size)
    groups = Groups(coordinator, BLOCK_SIZE, num_sub_blocks)
    is_exclusive = windows == (0,) and num_sub_blocks == 1
    return CpuTier(coordinator, groups, Meter(), is_exclusive=is_exclusive), coordinator


@lru_cache(maxsize=1)
def _vllm_config() -> VllmConfig:
    transfer = KVTransferConfig(
        kv_connector="SimpleCPUOffloadConnector",
        kv_connector_module_path="simple_offload",
        kv_role="kv_both",
    )
    return make_vllm_config(Shape(block_size=BLOCK_SIZE), transfer)


@lru_cache(maxsize=4096)
def key(name: str, group: int = 0) -> BlockHashWithGroupId:
    """The key of a block."""
    key = make_block_hash_with_group_id(BlockHash(sha256(name.encode()).digest()), group)
    _NAMES[key] = name
    return key


def prefixes(chain: str) -> list[str]:
    """The names of a chain's blocks, head first."""
    return [chain[:length] for length in range(1, len(chain) + 1)]


def hashes(chain: str) -> list[BlockHash]:
    """The block hashes of a request for this chain."""
    return [BlockHash(sha256(name.encode()).digest()) for name in prefixes(chain)]


def get(tier: CpuTier, key: BlockHashWithGroupId) -> KVCacheBlock | None:
    """The block that holds ``key``, if any."""
    return pool_of(tier).cached_block_hash_to_block.get_one_block(key)


def block(tier: CpuTier, name: str, group: int = 0) -> KVCacheBlock:
    """The block that holds ``name``, which is in the tier."""
    found = get(tier, key(name, group))
    assert found is not None, f"{name} is not in the tier"
    return found


def blocks(tier: CpuTier, chain: str, group: int = 0) -> list[KVCacheBlock]:
    """All blocks of a chain that is in the tier."""
    return [block(tier, name, group) for name in prefixes(chain)]


def ids(tier: CpuTier, *stored: str) -> BlockIds:
    """The ids of the blocks that hold these names."""
    return np.array([block(tier, name).block_id for name in stored], np.int64)


def commit(
    tier: CpuTier,
    filled: Sequence[KVCacheBlock],
    stored: Iterable[str],
    group: int = 0,
    *,
    on_device: bool = False,
    inner_keys: Sequence[Collection[BlockHashWithGroupId]] = (),
) -> list[int]:
    """Commit the blocks allocated for these names. Returns the places of useless ones."""
    keys = [key(name, group) for name in stored]
    run = Run((), keys, on_device=on_device, host_blocks=list(filled), inner_keys=inner_keys)
    return tier.commit(run)


def store(tier: CpuTier, *chains: str, group: int = 0, on_device: bool = False) -> None:
    """Store the missing blocks of each chain in one transfer, and check the tier."""
    for chain in chains:
        lacking = [name for name in prefixes(chain) if get(tier, key(name, group)) is None]
        filled = tier.allocate(len(lacking))
        assert len(filled) == len(lacking), f"no room for {chain}"
        assert commit(tier, filled, lacking, group, on_device=on_device) == []
        check_tier(tier)


def names(found: Iterable[KVCacheBlock], group: int = 0) -> list[str]:
    """The names of blocks' contents, "" for an empty block."""
    return [
        _NAMES[block.block_hash]
        if block.block_hash is not None and get_group_id(block.block_hash) == group
        else ""
        for block in found
    ]


def contents(tier: CpuTier, group: int = 0) -> set[str]:
    """Names that can be found."""
    return {
        name
        for name in names(pool_of(tier).blocks, group)
        if name and get(tier, key(name, group)) is not None
    }


def queues(tier: CpuTier) -> list[list[str]]:
    """Names of the free blocks, the next to leave first: empty ones and those on probation, the
    protected ones, and duplicates. Without reserved ones."""
    probation, protected, _, empty, duplicates = free_queues_of(tier)
    free = [*empty.get_all_free_blocks(), *probation.get_all_free_blocks()]
    rest = [queue.get_all_free_blocks() for queue in (protected, duplicates)]
    return [names(blocks) for blocks in (free, *rest)]


def reserved(tier: CpuTier) -> list[str]:
    """Names of the free blocks that are reserved, the next to leave first."""
    return names(free_queues_of(tier)[2].get_all_free_blocks())


def check_links(tier: CpuTier) -> None:
    """Each queue is linked in both directions, and ends after its last block."""
    for queue in free_queues_of(tier):
        block: Any = queue.fake_free_list_head
        for _ in range(queue.num_free_blocks + 1):
            following = block.next_free_block
            assert following.prev_free_block is block
            block = following
        assert block is queue.fake_free_list_tail


def settle(tier: CpuTier) -> None:
    """Move what the device has lost, as an eviction does first."""
    tier.release(())
    check_tier(tier)


def protected(tier: CpuTier) -> set[str]:
    """Names of the protected blocks, free or pinned, when all have moved that have to."""
    settle(tier)
    return {name for name in contents(tier) if is_protected(tier, block(tier, name))}


def duplicates(tier: CpuTier) -> set[str]:
    """Names of the duplicates, free or pinned."""
    return {name for name in contents(tier) if is_duplicate(tier, block(tier, name))}


def leave(tier: CpuTier) -> list[str]:
    """Evict until nothing more can be evicted. Returns the evicted names in order. Empty blocks are
    allocated first, and are not in the result."""
    left: list[str] = []
    while True:
        before = contents(tier)
        if not tier.allocate(1):
            return left
        left += before - contents(tier)
