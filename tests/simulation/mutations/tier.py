"""The host tier: the keys that it finds and the blocks that it keeps."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from simple_offload.scheduler.policies.request_walk import DeviceBlocks
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.eviction import EvictionOrder
from simple_offload.scheduler.tier.groups import Groups
from simple_offload.scheduler.tier.lookup import Lookup
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import failing_loads
from tests.simulation.world import World


@mutation()
def evict_head_first(stack: ExitStack) -> None:
    substitute(
        stack, EvictionOrder, "free", lambda self, chain, parent: self._pool.free_blocks(chain)
    )


@mutation()
def take_what_stands_behind_for_the_parent(stack: ExitStack) -> None:
    """Where chains lie mostly in one piece in the free queue."""

    def blindly(pool: BlockPool, parents: Any, key: Any, count: int) -> Any:
        block: Any = block_pool.get_block(pool, key)
        chain = []
        while block is not None:
            chain.append(block)
            if len(chain) == count:
                return chain[::-1]
            block = block.next_free_block
            if block is block_pool.queue_end(pool):
                return None
        return None

    stack.enter_context(patch.object(block_pool, "chain_up_to", blindly))


@mutation()
def ignore_salt(stack: ExitStack) -> None:
    unsalted: dict[bytes, bytes] = {}
    add_request = World.add_request

    def remember(self: World, request_id: str, prompt: list[int], *rest: Any) -> None:
        add_request(self, request_id, prompt, *rest)
        twin = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.shape.hash_size, sha256),
        )
        salted = self.scheduler.requests[request_id].block_hashes
        unsalted.update(zip(salted, twin.block_hashes, strict=True))

    keys, find = Groups.keys, Lookup.find

    def strip(hashes: Any) -> Any:
        return [unsalted.get(block_hash, block_hash) for block_hash in hashes]

    substitute(stack, World, "add_request", remember)
    substitute(
        stack, Groups, "keys", lambda self, hashes, *a, **k: keys(self, strip(hashes), *a, **k)
    )
    substitute(
        stack, Lookup, "find", lambda self, hashes, *a, **k: find(self, strip(hashes), *a, **k)
    )

    # The policy stores only blocks that vLLM has hashed under the same key. Here it stores any
    # block of the right tokens, whatever its salt.
    match = DeviceBlocks.match

    def any_match(self: DeviceBlocks, hashes: Any, group: int, *arguments: Any) -> Any:
        return match(self, strip(hashes), group, *arguments)

    def find_any(self: DeviceBlocks, block: Any, key: Any, group: int, *_: Any) -> Any:
        return None if block.is_null or group not in self._groups.stable_ids else block

    substitute(stack, DeviceBlocks, "match", any_match)
    substitute(stack, DeviceBlocks, "_find", find_any)


@mutation(failing_loads)
def offer_a_failed_block_again(stack: ExitStack) -> None:
    substitute(stack, CpuTier, "drop", lambda self, blocks: None)


@mutation(failing_loads)
def drop_at_the_first_failure(stack: ExitStack) -> None:
    substitute(stack, CpuTier, "doubt", lambda self, blocks, *_: self.drop(blocks))


@mutation(failing_loads)
def keep_descendants_of_the_dropped(stack: ExitStack) -> None:
    substitute(stack, EvictionOrder, "_with_descendants", lambda self, block_ids: list(block_ids))


@mutation()
def keep_the_tier_over_a_reset(stack: ExitStack) -> None:
    substitute(stack, CpuTier, "reset", lambda self: None)
