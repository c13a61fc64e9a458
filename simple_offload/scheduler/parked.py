"""Parked: requests that have device blocks for a load and do not run yet."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from simple_offload import vllm_compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class Parked:
    """Keeps vLLM's scheduler from a standstill.

    vLLM stops at the first request of its queue that gets no blocks, and preempts no parked one. If
    nothing runs, and parked requests further back have the blocks, no step frees any (vllm#45388,
    vllm#57104, vllm#57841). Two rules prevent it:

    1. **Room.** A request is parked only if the device has room for all parked requests at once,
       each with all its tokens and drafts (``has_room``).
    2. **Give back.** If all parked requests are ready, no copy is under way, and vLLM still
       schedules nothing, they give their blocks back (``give_back``). Each is computed then, and
       never parked again. Nor is the request that vLLM refuses a load at that moment
       (``Gate.on_standstill``).

    Proof. Assume that vLLM schedules nothing, and that no step and no copy is under way. Nothing
    else is pending either: the second tier says so for some seconds only. Then all parked requests
    are ready, and give their blocks back (2). From then on only requests have blocks that would
    have them without a host tier: those that run, streaming-input sessions, and those of another
    connector. The first request that lacks blocks is offered no load. So vLLM goes on, unless it
    would stand still without a tier too. Each request gives back, or is refused a load, once.

    The first rule makes the second one rare. Among parked requests alone, none lacks a block.
    """

    def __init__(self, kv_cache_manager: "KVCacheManager", vllm_config: "VllmConfig") -> None:
        self._kv_cache_manager = kv_cache_manager
        self._coordinator = kv_cache_manager.coordinator
        self._num_device_blocks = kv_cache_manager.block_pool.num_gpu_blocks - 1  # the null block
        self._max_tokens = vllm_config.model_config.max_model_len
        self._max_steps = vllm_config.max_concurrent_batches
        self._num_draft_slots = 0
        if vllm_config.num_speculative_tokens:
            # As much as vLLM 0.32 reserves (``Scheduler._request_remaining_blocks``).
            self._num_draft_slots = 1 + vllm_config.num_speculative_tokens
            self._num_draft_slots += vllm_config.num_lookahead_tokens
        self._requests: dict[str, Request] = {}
        self._num_blocks: dict[str, int] = {}
        """By request, the most blocks that it has before it has computed its prompt."""
        self._num_needed = 0
        """Sum of ``_num_blocks``."""
        self._asked: tuple[str, int] | None = None
        """The last request that asked for room beside others, and its blocks."""
        self._ready: set[str] = set()
        """Requests whose load has ended or failed, as vLLM knows."""
        self._num_idle_steps = 0
        """Steps in a row in which nothing ran although all, or none, were ready."""

    def has_room(self, request: "Request") -> bool:
        """Whether the request may be parked beside the others. The first always may."""
        self._asked = None
        if not self._num_blocks:
            return True
        num_blocks = self._num_blocks_of(request)
        self._asked = request.request_id, num_blocks
        return self._num_needed + num_blocks <= self._num_device_blocks

    @property
    def device_blocks(self) -> list["KVCacheBlock"]:
        """The device blocks of requests that are ready, one for each reference."""
        tables = [self._kv_cache_manager.get_blocks(each).blocks for each in self._ready]
        blocks = [block for table in tables for of_group in table for block in of_group]
        return [block for block in blocks if not block.is_null]

    def add(self, request: "Request") -> None:
        """vLLM has given the request blocks for a load."""
        request_id, asked = request.request_id, self._asked
        self.remove(request_id)
        # vLLM gives blocks right after the request has asked.
        num_blocks = asked[1] if asked and asked[0] == request_id else self._num_blocks_of(request)
        self._requests[request_id] = request
        self._num_blocks[request_id] = num_blocks
        self._num_needed += num_blocks

    def on_ready(self, request_ids: Iterable[str]) -> None:
        """vLLM has learned that these loads have ended or failed."""
        self._ready |= self._requests.keys() & request_ids

    def remove(self, request_id: str) -> None:
        """The request runs, has lost its blocks, or has ended."""
        if self._requests.pop(request_id, None) is not None:
            self._num_needed -= self._num_blocks.pop(request_id)
            self._ready.discard(request_id)

    def on_step(self, *, goes_on: bool) -> bool:
        """vLLM has scheduled a step. ``goes_on``: for a request that runs or has ended, or for work
        that is pending. Returns whether vLLM stands still: it goes on without parked requests, and
        no earlier step is under way any more."""
        waits = not goes_on and len(self._ready) == len(self._requests)
        self._num_idle_steps = self._num_idle_steps + 1 if waits else 0
        return self._num_idle_steps > self._max_steps

    def give_back(self) -> list[str]:
        """Free the blocks of requests that are ready, as vLLM does where a load has failed: it will
        ask for their hits again. Returns their ids."""
        ready = sorted(self._ready)
        for request_id in ready:
            request = self._requests[request_id]
            self._kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            self.remove(request_id)
        return ready

    def _num_blocks_of(self, request: "Request") -> int:
        num_tokens = min(request.num_tokens, self._max_tokens)
        return vllm_compat.num_blocks_to_allocate(
            self._coordinator, request, num_tokens, self._num_draft_slots
        )
