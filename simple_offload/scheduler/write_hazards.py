"""WriteHazards: free device blocks that compute in flight may still touch."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, compress
from operator import is_not
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

_Tables = dict[str, list[KVCacheBlock]]


class WriteHazards:
    """With async scheduling, vLLM learns that a request has ended (or preempts it) when its next
    step is on the device already. Its blocks may be handed out at once, and a copy into them has to
    wait for that step; also for the last step whose output has been processed, since vLLM's V2
    runner returns the output before its drafter has run (``GPUModelRunner.sample_tokens``).

    Keeps the block tables of the last ``num_steps`` steps with tokens: the one whose output was
    processed last, and all that vLLM may have in flight beside the coming one. Steps without
    tokens do not count: they have no output that shows the end of earlier compute. A table that
    was given up is no longer the request's. That shows for tables which only grow; a sliding
    window gives up blocks of a table that stays.
    """

    def __init__(self, kv_cache_manager: "KVCacheManager", num_steps: int) -> None:
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._only_grow = all(isinstance(m, FullAttentionManager) for m in self._managers)
        self._steps: deque[list[_Tables]] = deque(maxlen=num_steps)
        self._zeroed: deque[list[int]] = deque([[]], maxlen=num_steps)
        """By step, ids of the blocks that it zeroes, or steps without tokens after it."""
        self._given_up: set[int] | None = None
        """Ids of the zeroed blocks, and of blocks in use again that were in a table since given
        up; None until ``may_touch`` needs it."""

    def on_step(self, zeroed: Sequence[int] = (), *, computes: bool = True) -> None:
        """Record a scheduled step: its current block tables, if it ``computes``, and the blocks
        that it zeroes. These are new, but may be in no table: under priority scheduling, their
        request may be preempted before the step is complete."""
        self._given_up = None
        if not self._only_grow:
            return
        if computes:
            self._steps.append([dict(manager.req_to_blocks) for manager in self._managers])
            self._zeroed.append([])
        self._zeroed[-1].extend(zeroed)

    def may_touch(self, block_ids: Iterable[int]) -> bool:
        """Whether a step in flight may read or write one of these blocks, which were free until
        the coming step was scheduled."""
        if not self._only_grow:
            return True
        if self._given_up is None:
            self._given_up = self._collect()
        return bool(self._given_up) and not self._given_up.isdisjoint(block_ids)

    def _collect(self) -> set[int]:
        """Once a step: vLLM gives up no table while it builds the connector's metadata."""
        given_up = set(chain.from_iterable(self._zeroed))
        for step in self._steps:
            for manager, tables in zip(self._managers, step, strict=True):
                now = map(manager.req_to_blocks.get, tables)
                for table in compress(tables.values(), map(is_not, now, tables.values())):
                    given_up.update([block.block_id for block in table if block.ref_cnt])
        return given_up
