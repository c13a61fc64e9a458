"""NewlyAllocated: the device blocks that requests have got since the last step."""

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.scheduler.tier import block_pool

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class NewlyAllocated:
    """Takes note of all blocks that the device's pool gives away. vLLM's output names those of some
    requests only: not those of a request that waits for a load, of a streaming-input session that
    goes on, or of a request that lost them in the same step."""

    def __init__(self, kv_cache_manager: "KVCacheManager") -> None:
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._filled: dict[int, None] = {}
        self._found: dict[str, list[int]] = {}
        block_pool.on_new_blocks(kv_cache_manager.block_pool, self._on_new_blocks)

    def on_allocated(self, request_id: str, num_found_tokens: int) -> None:
        """The request has got its first blocks, and the device had ``num_found_tokens`` of its
        tokens. Some groups are not a part of a hit (a ring, a window that is computed again): what
        they have there is new, and no other request uses it."""
        filled = self._filled
        self._found[request_id] = [
            block.block_id
            for manager in self._managers
            for block in manager.req_to_blocks[request_id][: num_found_tokens // manager.block_size]
            if not (block.is_null or (block.ref_cnt == 1 and block.block_id in filled))
        ]

    def drain(self) -> tuple[list[int], dict[str, list[int]]]:
        """Ids of the blocks that requests have got since the last call, to be filled, in this
        order; and by request, of those whose contents the device had. Without null blocks."""
        filled, found = [*self._filled], self._found
        self._filled.clear()
        self._found = {}
        return filled, found

    def _on_new_blocks(self, blocks: list[KVCacheBlock]) -> None:
        self._filled.update((block.block_id, None) for block in blocks)
