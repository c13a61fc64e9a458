"""Invariants of a world. Each check raises AssertionError."""

from collections import Counter
from collections.abc import Collection, Iterable, Set
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
from simple_offload.metadata import StepMetadata
from simple_offload.transfer import BlockIds, Transfer
from tests.simulation.device import ScriptedDevice
from tests.simulation.identity import Story
from tests.simulation.shape import Shape

COMPLETE = {RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED}
"""How a request ends with its whole answer."""


def tier_blocks(host_blocks: BlockIds, num_sub_blocks: int) -> list[int]:
    """The tier's blocks that contain these sub-blocks of a rank."""
    blocks: list[int] = (host_blocks // num_sub_blocks).tolist()
    return blocks


def keys_of_sub_blocks(
    keys: Iterable[BlockHashWithGroupId], requests: Iterable[Request], shape: Shape
) -> dict[BlockHashWithGroupId, set[BlockHashWithGroupId]]:
    """The keys of all sub-blocks of the host blocks with these ``keys``, each the key of a block's
    end. ``requests``: all requests so far."""
    wanted = dict.fromkeys(keys)
    if shape.num_sub_blocks == 1 or not wanted:
        return {key: {key} for key in wanted}
    places = {
        block_hash: (request, index)
        for request in requests
        for index, block_hash in enumerate(request.block_hashes)
    }
    found: dict[BlockHashWithGroupId, set[BlockHashWithGroupId]] = {}
    for key in wanted:
        size = shape.block_sizes[get_group_id(key)] // shape.hash_size
        request, index = places[get_block_hash(key)]
        hashes = request.block_hashes[: index + 1]
        for end in range(len(hashes) - size * shape.num_sub_blocks, len(hashes), size):
            sub_block = make_block_hash_with_group_id(hashes[end + size - 1], get_group_id(key))
            found.setdefault(key, set()).add(sub_block)
    return found


def check_open(metadata: StepMetadata, num_open: int, num_sub_blocks: int) -> None:
    """Transfers name only host blocks that the rank has opened, ``num_open`` of them. Stores write
    whole blocks of the tier."""
    for store in metadata.stores:
        sub_blocks = store.host_blocks.reshape(-1, num_sub_blocks)
        whole = (sub_blocks == sub_blocks[:, :1] + np.arange(num_sub_blocks)).all()
        assert whole, f"{store.id} writes a fraction of a host block: {store.host_blocks}"
    for transfer in (*metadata.loads, *metadata.stores):
        last = max(transfer.host_blocks)
        assert last < num_open, f"{transfer.id} names host block {last}, but {num_open} are open"


def check_tier_size(pool: BlockPool, num_open: list[int], num_sub_blocks: int) -> None:
    """The tier has as many blocks as every rank has reported. ``num_open``: by rank."""
    expected = max(1, min(num_open) // num_sub_blocks)  # the tier has at least a null block
    found = len(pool.blocks)
    assert found == expected, f"the tier has {found} blocks, ranks have opened {num_open}"


def check_admitted(
    keys: Iterable[BlockHashWithGroupId], requests: Iterable[Request], threshold: int
) -> None:
    """Blocks in stores that have not ended have been in ``threshold`` requests."""
    asked: Counter[bytes] = Counter()
    for request in requests:
        asked.update(set(request.block_hashes))
    for key in keys:
        count = asked[get_block_hash(key)]
        assert count >= threshold, f"a block is stored that only {count} requests had"


def check_copies(
    device: ScriptedDevice,
    device_pool: BlockPool,
    host_pool: BlockPool,
    num_sub_blocks: int,
    cancelled: Set[int],
) -> None:
    """No block is read and written by copies that are not ordered. No block that a copy will still
    touch is free; but ``cancelled`` stores may read anything from the device."""
    loads, stores = (device.copies[direction] for direction in Direction)
    for load, store in product(loads, stores):
        read, written = store.transfer.device_blocks, load.transfer.device_blocks
        shared = np.intersect1d(read, written)
        ordered = load.precedes(store) or not shared.size or store.transfer.id in cancelled
        assert ordered, f"device blocks {shared} are stored while being loaded"
        shared = np.intersect1d(store.transfer.host_blocks, load.transfer.host_blocks)
        assert not shared.size, f"host blocks {shared} are loaded while being stored"
    for copy in (*loads, *stores):
        device_blocks = copy.transfer.device_blocks.tolist()
        for pool, blocks in (
            (device_pool, device_blocks if copy.transfer.id not in cancelled else ()),
            (host_pool, tier_blocks(copy.transfer.host_blocks, num_sub_blocks)),
        ):
            for block_id in blocks:
                used = pool.blocks[block_id].ref_cnt > 0
                assert used, f"block {block_id} is free during {copy.transfer.id}"


def check_all_free(held: Collection[int] = (), **pools: BlockPool) -> None:
    """Every block but the null block is free, but for ``held`` in the pool "host"."""
    for name, pool in pools.items():
        used = {block.block_id for block in pool.blocks if block.ref_cnt > 0 and not block.is_null}
        leaked = len(used.difference(held if name == "host" else ()))
        assert not leaked, f"{leaked} {name} blocks leaked"


def check_answer(request_id: str, story: Story, tokens: list[int], status: RequestStatus) -> None:
    """The answer is the one without a host tier: all of it, or a beginning if the request was
    aborted or failed on purpose."""
    expected = story.answer
    right = tokens == (expected if status in COMPLETE else expected[: len(tokens)])
    assert right, f"{request_id}: answered {tokens} instead of {expected}"


class Failures:
    """No load names a block that a load has failed to read, until other contents are stored or read
    into it. Otherwise it might fail for ever. ``num_sub_blocks``: of one of the tier's blocks."""

    def __init__(self, num_sub_blocks: int) -> None:
        self._num_sub_blocks = num_sub_blocks
        self._loads: dict[int, Transfer] = {}
        """Transfers in flight, by id."""
        self._broken: set[int] = set()

    def begin_store(self, store: Transfer) -> None:
        """New contents of a block have not failed."""
        self._broken -= self._blocks_of(store)

    def begin_read(self, blocks: Iterable[int]) -> None:
        """Objects come into these blocks."""
        self._broken -= set(blocks)

    def begin_load(self, load: Transfer) -> None:
        """No report has shown that the blocks cannot be loaded."""
        blocks = self._broken & self._blocks_of(load)
        assert not blocks, f"{load.request_id} loads {blocks}, which have failed"
        self._loads[load.id] = load

    def on_report(self, failed: Iterable[int], in_flight: Collection[int]) -> None:
        """Ranks have reported these transfers as ``failed``. ``in_flight``: ids of transfers that
        have not ended."""
        for load_id in self._loads.keys() & failed:
            self._broken |= self._blocks_of(self._loads[load_id])
        for load_id in self._loads.keys() - in_flight:
            del self._loads[load_id]

    def _blocks_of(self, transfer: Transfer) -> set[int]:
        return set(tier_blocks(transfer.host_blocks, self._num_sub_blocks))
