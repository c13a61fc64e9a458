"""NewlyAllocated: the device blocks that a step adds to block tables."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput


class NewlyAllocated:
    """Finds the blocks that each step adds to block tables. vLLM's output names those of running
    requests. Those of requests that wait for a load, or did, are found in their tables."""

    def __init__(self, kv_cache_manager: "KVCacheManager") -> None:
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._null_id = kv_cache_manager.block_pool.null_block.block_id
        self._starting: dict[str, list[int]] = {}
        """By request that has not run since it got blocks: entries of its table in each group that
        have been seen."""
        self._num_found: dict[str, int] = {}
        """By request whose first blocks have not been seen: its tokens that the device had."""

    def on_allocated(self, request_id: str, num_found_tokens: int) -> None:
        """The request has got its first blocks in the step that is being scheduled.
        ``num_found_tokens``: its tokens that the device had."""
        self._starting[request_id] = [0] * len(self._managers)
        self._num_found[request_id] = num_found_tokens

    def on_request_finished(self, request_id: str) -> None:
        """The request has ended."""
        self._starting.pop(request_id, None)
        self._num_found.pop(request_id, None)

    def has_run(self, request_id: str) -> bool:
        """Whether a step with the request has been scheduled since it got its first blocks."""
        return request_id not in self._starting

    def on_step(self, scheduled: "SchedulerOutput") -> tuple[list[int], dict[str, list[int]]]:
        """A step has been scheduled. Returns the ids of the blocks that it has added to tables, to
        be filled; and by request, of those whose contents the device had. Without null blocks."""
        filled: list[int] = []
        found: dict[str, list[int]] = {}
        running = scheduled.scheduled_cached_reqs
        for request_id, block_ids in zip(running.req_ids, running.new_block_ids, strict=True):
            if block_ids is not None and request_id not in self._starting:
                for of_group in block_ids:
                    filled += of_group
        for request_id, num_seen in self._starting.items():
            num_tokens = self._num_found.pop(request_id, 0)
            for group, manager in enumerate(self._managers):
                table = manager.req_to_blocks.get(request_id, ())
                added = [block.block_id for block in table[num_seen[group] :]]
                num_seen[group] = len(table)
                if count := num_tokens // manager.block_size:
                    found.setdefault(request_id, []).extend(self._without_null(added[:count]))
                    added = added[count:]
                filled += added
        for request_id in self._starting.keys() & scheduled.num_scheduled_tokens.keys():
            del self._starting[request_id]
        return self._without_null(filled), found

    def _without_null(self, block_ids: list[int]) -> list[int]:
        if self._null_id not in block_ids:
            return block_ids
        return [block_id for block_id in block_ids if block_id != self._null_id]
