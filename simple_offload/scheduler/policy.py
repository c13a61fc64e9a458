"""Which blocks to store, and when: eagerly, as soon as they are computed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
        self._store_ready(progress, finished=True)
        for group in self._groups:
            count = progress.next_index[group]
            hashes = request.block_hashes
            self.tier.refresh(self.tier.key(hashes, group, index) for index in range(count))

    def on_reset(self) -> None:
        self._progress.clear()

    def _store_ready(self, progress: _Progress, finished: bool) -> None:
        request = progress.request
        # Tokens that async scheduling has only reserved room for are not known yet.
        limit = request.num_computed_tokens - request.num_output_placeholders
        for group in self._groups:
            block_size = self.tier.block_sizes[group]
            tokens = min(limit, self.tier.coordinator.get_num_cacheable_tokens(limit, group))
            if tokens // block_size > progress.next_index[group]:
                self._store_group(progress, group, tokens // block_size, finished)
            if group in self.tier.chained_group_ids:
                limit = min(limit, progress.next_index[group] * block_size)

    def _store_group(self, progress: _Progress, group: int, num_ready: int, finished: bool) -> None:
        """Plan stores from the group's cursor on, and move it."""
        request = progress.request
        table: Sequence[KVCacheBlock] = self._managers[group].req_to_blocks.get(
            request.request_id, ()
        )
        num_ready = min(num_ready, len(table), self._num_hashes(request, group))
        for index in range(progress.next_index[group], num_ready):
            key = self.tier.key(request.block_hashes, group, index)
            parent = self.tier.key(request.block_hashes, group, index - 1) if index else None
            if not self._store_block(table[index], key, parent, group, index, finished):
                return
            progress.next_index[group] = index + 1

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
