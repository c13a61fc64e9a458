"""Parked: requests that have device blocks for a load and do not run yet."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from simple_offload import vllm_compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class Parked:
    """Keeps vLLM's scheduler from a standstill.

    vLLM stops at the first request of its queue that gets no blocks, and preempts no parked one. If
    nothing runs, and parked requests further back have the blocks, no step frees any (vllm#45388,
    vllm#57104, vllm#57841). Those of another connector are not known here. Two rules prevent it:

    1. **Room.** A request is parked only if the device has room for all parked requests at once,
       each with all its tokens and drafts (``has_room``).
    2. **Turn.** After a step in which nothing ran although a parked request was ready, each request
       without blocks has to ask again (``must_yield``). vLLM passes over those.

    Proof. Assume that vLLM schedules nothing, and that no step and no copy is under way. Then only
    parked requests have blocks, and all are ready. In the next step vLLM passes over the others
    (2) and comes to a parked one. What it has and lacks is at most what rule 1 counted for it, and
    the others have at most what that counted for them. So it gets its blocks, and runs.
    """

    def __init__(self, kv_cache_manager: "KVCacheManager", vllm_config: "VllmConfig") -> None:
        self._coordinator = kv_cache_manager.coordinator
        self._num_device_blocks = kv_cache_manager.block_pool.num_gpu_blocks - 1  # the null block
        self._max_tokens = vllm_config.model_config.max_model_len
        self._num_draft_slots = 0
        if vllm_config.num_speculative_tokens:
            # As much as vLLM 0.32 reserves (``Scheduler._request_remaining_blocks``).
            self._num_draft_slots = 1 + vllm_config.num_speculative_tokens
            self._num_draft_slots += vllm_config.num_lookahead_tokens
        self._num_blocks: dict[str, int] = {}
        """By request, the most blocks that it has before it has computed its prompt."""
        self._ready: set[str] = set()
        """Those whose load has ended or failed, as vLLM knows."""
        self._nothing_ran = False

    def has_room(self, request: "Request") -> bool:
        """Whether the request may be parked beside the others. The first always may."""
        if not self._num_blocks:
            return True
        num_blocks = sum(self._num_blocks.values()) + self._num_blocks_of(request)
        return num_blocks <= self._num_device_blocks

    @property
    def must_yield(self) -> bool:
        """Whether a request without blocks has to ask again, so that vLLM comes to the parked."""
        return self._nothing_ran and bool(self._ready)

    def add(self, request: "Request") -> None:
        """vLLM has given the request blocks for a load."""
        self._num_blocks[request.request_id] = self._num_blocks_of(request)

    def on_ready(self, request_ids: Iterable[str]) -> None:
        """vLLM has learned that these loads have ended or failed."""
        self._ready |= self._num_blocks.keys() & request_ids

    def remove(self, request_id: str) -> None:
        """The request runs, has lost its blocks, or has ended."""
        self._num_blocks.pop(request_id, None)
        self._ready.discard(request_id)

    def on_step(self, *, computes: bool) -> None:
        """vLLM has scheduled a step. ``computes``: for some request."""
        self._nothing_ran = not computes

    def _num_blocks_of(self, request: "Request") -> int:
        num_tokens = min(request.num_tokens, self._max_tokens)
        return vllm_compat.num_blocks_to_allocate(
            self._coordinator, request, num_tokens, self._num_draft_slots
        )
