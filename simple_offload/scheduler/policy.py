"""Which blocks to store, and when: eagerly, as soon as they are computed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    resolve_block_hashes,
)

from simple_offload.scheduler.cpu_tier import CpuTier
from simple_offload.scheduler.stores import Stores

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class StorePolicy(Protocol):
    """Decides what is stored by calling ``Stores.plan``."""

    @property
    def num_requests(self) -> int:
        """Requests that are being followed."""

    def on_allocated(self, request: "Request") -> None:
        """``request`` has (new) device blocks."""

    def on_step(self, request_ids: Iterable[str]) -> None:
        """A step has been scheduled that runs these requests. What was computed in earlier
        steps is complete by the time that this step's stores start."""

    def on_finished(self, request: "Request", loading: bool) -> None:
        """``request`` is giving up its device blocks right after this call; ``loading``: they
        were still waiting for a load."""

    def on_reset(self) -> None:
        """The device blocks of running requests must not be stored any more."""


@dataclass(slots=True, eq=False)
class _Progress:
    request: "Request"
    next_index: list[int]
    """By group, the first block that has not been dealt with."""

    keys: set[BlockHashWithGroupId] = field(default_factory=set)
    """Of the blocks that have: these must not leave the tier to make room for the rest."""


class EagerPolicy:
    """Stores every full block once its tokens are confirmed computed.

    Walks each request's block tables with a cursor. A cursor stops where the tier has no
    room, and goes on when it has.
    """

    def __init__(
        self,
        tier: CpuTier,
        stores: Stores,
        kv_cache_manager: "KVCacheManager",
    ) -> None:
        self.tier = tier
        self.stores = stores
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._device_pool: BlockPool = kv_cache_manager.block_pool
        self._progress: dict[str, _Progress] = {}
        chained = set(tier.chained_group_ids)
        self._groups = (*tier.chained_group_ids, *(g for g in tier.group_ids if g not in chained))
        """Chained groups first: the others' blocks are of no use beyond them."""

    @property
    def num_requests(self) -> int:
        """Requests that are being followed."""
        return len(self._progress)

    def on_allocated(self, request: "Request") -> None:
        self._progress[request.request_id] = _Progress(request, [0] * len(self._managers))

    def on_step(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (progress := self._progress.get(request_id)) is not None:
                self._store_ready(progress, finished=False)

    def on_finished(self, request: "Request", loading: bool) -> None:
        progress = self._progress.pop(request.request_id, None)
        if progress is None or loading:
            return
        for group in self.tier.chained_group_ids:
            stored = self._num_stored(progress, group)
            progress.next_index[group] = min(progress.next_index[group], stored)
        # What the request has in the tier is the most recently used from now on, so that its
        # rest displaces others' blocks.
        for group in self._groups:
            count = progress.next_index[group]
            hashes = request.block_hashes
            self.tier.refresh(self.tier.key(hashes, group, index) for index in range(count))
        self._store_ready(progress, finished=True)

    def on_reset(self) -> None:
        self._progress.clear()

    def _store_ready(self, progress: _Progress, finished: bool) -> None:
        """Plan stores from the groups' cursors on, all groups abreast: a hit needs every group,
        so a tier that is too small for the request had better hold the beginning of each."""
        request = progress.request
        num_ready = {group: self._num_ready(request, group) for group in self._groups}
        sizes = self.tier.block_sizes
        while behind := [g for g in self._groups if progress.next_index[g] < num_ready[g]]:
            group = min(behind, key=lambda g: progress.next_index[g] * sizes[g])
            if not self._store_next(progress, group, finished):
                return
            progress.next_index[group] += 1

    def _num_ready(self, request: "Request", group: int) -> int:
        """How many of the request's blocks of ``group`` are complete."""
        # Tokens that async scheduling has only reserved room for are not known yet.
        confirmed = request.num_computed_tokens - request.num_output_placeholders
        tokens = min(confirmed, self.tier.coordinator.get_num_cacheable_tokens(confirmed, group))
        table = self._managers[group].req_to_blocks.get(request.request_id, ())
        num_hashes = self._num_hashes(request, group)
        return min(tokens // self.tier.block_sizes[group], len(table), num_hashes)

    def _store_next(self, progress: _Progress, group: int, finished: bool) -> bool:
        """Store the block at the group's cursor, if there is need to. False: not now, and
        nothing of the request after it either."""
        request, index = progress.request, progress.next_index[group]
        key = self.tier.key(request.block_hashes, group, index)
        parent = self.tier.key(request.block_hashes, group, index - 1) if index else None
        if self.tier.next_to_leave() in progress.keys and not self.stores.has(key):
            return False  # the tier is full of this very request
        progress.keys.add(key)
        block = self._managers[group].req_to_blocks[request.request_id][index]
        return self._store_block(block, key, parent, group, index, finished)

    def _store_block(
        self,
        block: KVCacheBlock,
        key: BlockHashWithGroupId,
        parent: BlockHashWithGroupId | None,
        group: int,
        index: int,
        finished: bool,
    ) -> bool:
        """False: not now, and nothing after it either."""
        if self.stores.has(key):
            return True
        chained = group in self.tier.chained_group_ids
        if chained and parent is not None and not self.stores.has(parent):
            return False
        if block.is_null:
            # The window has moved on. The block may still lie in the free queue, unharmed.
            cached = self._device_pool.get_cached_block(get_block_hash(key), [group])
            if cached is None:
                return not chained
            block = cached[0]
        elif block.block_hash != key:
            # vLLM has not hashed it: because it never will (the block serves no hit), or, if
            # this is where the request ends, because there is no later step to do so.
            own = finished and block.block_hash is None
            if not own:
                return not chained
        num_tokens = (index + 1) * self.tier.block_sizes[group]
        return self.stores.plan(block, key, parent, num_tokens, self._device_pool)

    def _num_stored(self, progress: _Progress, group: int) -> int:
        """Length of the chain that the tier has (or is getting) of this request, in blocks.
        A chain loses its tail first, hence bisection."""
        low, high = 0, progress.next_index[group]
        hashes = progress.request.block_hashes
        while low < high:
            middle = (low + high + 1) // 2
            if self.stores.has(self.tier.key(hashes, group, middle - 1)):
                low = middle
            else:
                high = middle - 1
        return low

    def _num_hashes(self, request: "Request", group: int) -> int:
        size = self.tier.block_sizes[group]
        return len(resolve_block_hashes(request.block_hashes, self.tier.hash_block_size, size))
