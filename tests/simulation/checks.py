"""Invariants of a world. Each check raises Violation."""

from collections import Counter
from collections.abc import Iterable
from itertools import product

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request, RequestStatus

from simple_offload.backends.base import Direction
from simple_offload.metadata import BlockIds, StepMetadata
from tests.simulation.device import ScriptedCopy, ScriptedDevice
from tests.simulation.identity import Story
from tests.simulation.runner import Violation
from tests.simulation.shape import Shape


def tier_blocks(host_blocks: BlockIds, num_sub_blocks: int) -> list[int]:
    """The tier's blocks that contain these sub-blocks of a rank."""
    blocks: list[int] = (host_blocks // num_sub_blocks).tolist()
    return blocks


def keys_of_sub_blocks(
    keys: set[BlockHashWithGroupId], requests: Iterable[Request], shape: Shape
) -> set[BlockHashWithGroupId]:
    """The keys of all sub-blocks of the host blocks with these ``keys``, each the key of a block's
    end. ``requests``: all requests so far."""
    before = {
        block_hash: request.block_hashes[:index]
        for request in requests
        for index, block_hash in enumerate(request.block_hashes)
    }
    found = set()
    for key in keys:
        size = shape.block_sizes[get_group_id(key)] // shape.hash_size
        hashes = [*before[get_block_hash(key)], get_block_hash(key)]
        for end in range(len(hashes) - size * shape.num_sub_blocks, len(hashes), size):
            sub_block = make_block_hash_with_group_id(hashes[end + size - 1], get_group_id(key))
            found.add(sub_block)
    return found


def check_open(metadata: StepMetadata, num_open: int, num_sub_blocks: int) -> None:
    """Transfers name only host blocks that the rank has opened, ``num_open`` of them. Stores write
    whole blocks of the tier."""
    for store in metadata.stores:
        sub_blocks = store.host_blocks.reshape(-1, num_sub_blocks)
        if (sub_blocks != sub_blocks[:, :1] + np.arange(num_sub_blocks)).any():
            raise Violation(f"{store.id} writes a fraction of a host block: {store.host_blocks}")
    for transfer in (*metadata.loads, *metadata.stores):
        last = max(transfer.host_blocks)
        if last >= num_open:
            raise Violation(
                f"{transfer.id} names host block {last}, but a rank has opened {num_open}"
            )


def check_tier_size(pool: BlockPool, num_open: list[int], num_sub_blocks: int) -> None:
    """The tier has as many blocks as every rank has reported. ``num_open``: by rank."""
    found, reported = len(pool.blocks), min(num_open)
    if found != max(1, reported // num_sub_blocks):  # the tier has at least a null block
        raise Violation(f"the tier has {found} blocks, every rank has opened {reported}")


def check_admitted(
    keys: Iterable[BlockHashWithGroupId], requests: Iterable[Request], threshold: int
) -> None:
    """Blocks in stores that have not ended have been in ``threshold`` requests."""
    asked: Counter[bytes] = Counter()
    for request in requests:
        asked.update(set(request.block_hashes))
    for key in keys:
        if (count := asked[get_block_hash(key)]) < threshold:
            raise Violation(f"a block is stored that only {count} requests had")


def check_copies(
    device: ScriptedDevice, device_pool: BlockPool, host_pool: BlockPool, num_sub_blocks: int
) -> None:
    """No block is read and written by copies that are not ordered. No block that a copy will still
    touch is free."""
    loads, stores = (device.copies[direction] for direction in Direction)
    for load, store in product(loads, stores):
        shared = _device_blocks(load) & _device_blocks(store)
        if shared and not load.precedes(store):
            raise Violation(f"device blocks {shared} are stored while being loaded")
        if shared := _host_blocks(load) & _host_blocks(store):
            raise Violation(f"host blocks {shared} are loaded while being stored")
    for copy in (*loads, *stores):
        for pool, blocks in (
            (device_pool, copy.transfer.device_blocks.tolist()),
            (host_pool, tier_blocks(copy.transfer.host_blocks, num_sub_blocks)),
        ):
            for block_id in blocks:
                if pool.blocks[block_id].ref_cnt == 0:
                    raise Violation(f"block {block_id} is free during {copy.transfer.id}")


def check_all_free(**pools: BlockPool) -> None:
    """Every block but the null block is free."""
    for name, pool in pools.items():
        leaked = len(pool.blocks) - 1 - pool.get_num_free_blocks()
        if leaked:
            raise Violation(f"{leaked} {name} blocks leaked")


def check_answer(request_id: str, story: Story, tokens: list[int], status: RequestStatus) -> None:
    """The answer is the one without a host tier: all of it, or a beginning if the request was
    aborted or failed on purpose."""
    expected = story.tokens[story.num_prompt_tokens :][: story.num_output_tokens]
    complete = status == RequestStatus.FINISHED_LENGTH_CAPPED
    if complete and len(tokens) != len(expected):
        raise Violation(f"{request_id}: {len(tokens)} tokens instead of {len(expected)}")
    if tokens != expected[: len(tokens)]:
        raise Violation(f"{request_id}: answered {tokens} instead of {expected}")


def _device_blocks(copy: ScriptedCopy) -> set[int]:
    return set(copy.transfer.device_blocks.tolist())


def _host_blocks(copy: ScriptedCopy) -> set[int]:
    return set(copy.transfer.host_blocks.tolist())
