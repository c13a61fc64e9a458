"""GivenOut: which device blocks a step gives to requests."""

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput


class GivenOut:
    """vLLM says which blocks a step adds to the tables of requests that run. Those of requests
    that wait for a load, or have waited, are found in their tables."""

    def __init__(self, kv_cache_manager: "KVCacheManager") -> None:
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._blocks = kv_cache_manager.block_pool.blocks
        self._starting: dict[str, list[int]] = {}
        """By request that has not run since it got blocks: how many of its table in each group
        have been seen."""

    def follow(self, request_id: str) -> None:
        """The request has got its first blocks in the step that is being scheduled."""
        self._starting[request_id] = [0] * len(self._managers)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._starting.pop(request_id, None)

    def clear(self) -> None:
        """All requests are to be forgotten."""
        self._starting.clear()

    def has_run(self, request_id: str) -> bool:
        """Whether a step with the request has been scheduled since it was followed."""
        return request_id not in self._starting

    def step(self, scheduled: "SchedulerOutput") -> list[KVCacheBlock]:
        """The blocks that the step has put into tables, new ones and those that a request has
        found. Null blocks are none of them."""
        given: list[KVCacheBlock] = []
        for request_id, num_seen in self._starting.items():
            for group, manager in enumerate(self._managers):
                table = manager.req_to_blocks.get(request_id, ())
                given += table[num_seen[group] :]
                num_seen[group] = len(table)
        running, blocks = scheduled.scheduled_cached_reqs, self._blocks
        for request_id, block_ids in zip(running.req_ids, running.new_block_ids, strict=True):
            if block_ids is not None and request_id not in self._starting:
                given += [blocks[block_id] for of_group in block_ids for block_id in of_group]
        for request_id in self._starting.keys() & scheduled.num_scheduled_tokens.keys():
            del self._starting[request_id]
        return [block for block in given if not block.is_null]
