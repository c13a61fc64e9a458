"""Expected: what the requests in vLLM's queue will find."""

from typing import TYPE_CHECKING

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.groups import Groups

if TYPE_CHECKING:
    from vllm.v1.request import Request

EXPECTED_SHARE = 0.75
"""Share of the tier's blocks that may be expected. The rest is for what is stored meanwhile."""


class Expected:
    """Has the tier keep what the first requests of vLLM's queue will find.

    They want it soon, and in the order of the queue. By last use, the tier would lose the contents
    of the first one first, which has waited longest. So where requests come faster than the engine
    serves them, each would lose them before its turn. What is known of the future goes before last
    use (Patterson et al., "Informed prefetching and caching", SOSP 1995).
    """

    def __init__(self, tier: CpuTier, groups: Groups, device_pool: BlockPool) -> None:
        self._tier = tier
        self._groups = groups
        self._device_pool = device_pool
        self._later: dict[str, Request] = {}
        """Requests whose contents are not expected yet, in the order of arrival."""
        self._keys: dict[str, list[BlockHashWithGroupId]] = {}
        """By request, what it expects."""

    def add(self, request: "Request") -> None:
        """A request has joined vLLM's queue."""
        self._later[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """A request has left the queue."""
        self._later.pop(request_id, None)
        if keys := self._keys.pop(request_id, None):
            self._tier.stop_expecting(keys)

    def on_step(self) -> None:
        """A step has been scheduled. Requests that are still in the queue wait."""
        tier = self._tier
        room = int(EXPECTED_SHARE * tier.max_contents) - tier.num_expected
        while self._later and room > 0:
            request_id = next(iter(self._later))
            keys = self._keys_of(self._later.pop(request_id))[:room]
            self._keys[request_id] = keys
            tier.expect(keys)
            room -= len(keys)

    def _keys_of(self, request: "Request") -> list[BlockHashWithGroupId]:
        """Of what the request would find now, in the tier and on the device."""
        if request.skip_reading_prefix_cache:
            return []
        if not self._tier.has_copies:  # it has what the device has
            hit = self._tier.lookup(request.block_hashes, 0, request.num_tokens - 1)
            return [key for key in block_pool.keys_of(hit.pins) if key is not None]
        keys = self._groups.keys(request.block_hashes, 0)
        on_device = block_pool.cached(self._device_pool)
        has = self._tier.has
        stop = next(
            (i for i, key in enumerate(keys) if not has(key) and key not in on_device), None
        )
        return keys[:stop]
