"""Models with state layers."""

from contextlib import ExitStack
from typing import Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec

from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.policies.eager import EagerPolicy
from simple_offload.scheduler.policies.request_walk import DeviceBlocks
from simple_offload.scheduler.tier import block_pool
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.lookup import HostHit, Lookup
from simple_offload.scheduler.tier.run import Run
from tests.simulation.mutations.registry import mutation, substitute
from tests.simulation.mutations.scripts import INNER_HITS, STATES


@mutation(STATES)
def store_the_running_state(stack: ExitStack) -> None:
    """A state block is stored once its last token is known, before the state includes that
    token."""
    num_complete, find = EagerPolicy._num_complete, DeviceBlocks._find

    def known(self: EagerPolicy, request: Any, group: int, num_blocks: int) -> int:
        if group in self._groups.stable_ids:
            return num_complete(self, request, group, num_blocks)
        num_tokens = len(request.block_hashes) * self._groups.hash_block_size
        return min(num_tokens // self._groups.block_sizes[group], num_blocks)

    def running(self: DeviceBlocks, block: Any, key: Any, group: int, may_lack_hash: bool) -> Any:
        if group in self._groups.stable_ids or block.is_null:
            return find(self, block, key, group, may_lack_hash)
        return block

    substitute(stack, EagerPolicy, "_num_complete", known)
    substitute(stack, DeviceBlocks, "_find", running)


@mutation(STATES)
def load_the_state_of_another_boundary(stack: ExitStack) -> None:
    find = Lookup.find

    def earlier(
        self: Lookup, block_hashes: Any, num_computed_tokens: int, max_tokens: int
    ) -> HostHit:
        hit: HostHit = find(self, block_hashes, num_computed_tokens, max_tokens)
        for group in _state_groups(self._coordinator) if hit.num_tokens else ():
            size = self._groups.block_sizes[group]
            last = (num_computed_tokens + hit.num_tokens) // size - 1
            keys = self._groups.keys(block_hashes, group, stop=last)
            blocks = block_pool.find_blocks(self._pool, keys)
            if others := [block for block in blocks if block is not None]:
                hit.blocks[group][-1] = others[-1]
        return hit

    substitute(stack, Lookup, "find", earlier)


@mutation(STATES)
def believe_a_state_that_is_missing(stack: ExitStack) -> None:
    """The hit is as long as the attention groups', whatever the state groups hold. No state is
    loaded."""
    init, plan = OffloadScheduler.__init__, Loads.plan

    def careless(self: OffloadScheduler, *args: Any) -> None:
        init(self, *args)
        coordinator: Any = self.tier._lookup._coordinator
        groups = getattr(coordinator, "attention_groups", [])
        attention = [group for group in groups if not isinstance(group.spec, MambaSpec)]
        if attention:
            coordinator.attention_groups = attention

    def without_states(self: Loads, request: Any, tables: Any, *rest: Any) -> None:
        groups = set(_state_groups(self._tier._lookup._coordinator))
        plan(self, request, [[] if g in groups else t for g, t in enumerate(tables)], *rest)

    substitute(stack, OffloadScheduler, "__init__", careless)
    substitute(stack, Loads, "plan", without_states)


def _state_groups(coordinator: KVCacheCoordinator) -> list[int]:
    managers = coordinator.single_type_managers
    ids = coordinator.kv_cache_config.prefix_cacheable_group_ids
    return [group for group in ids if isinstance(managers[group], MambaManager)]


@mutation(INNER_HITS)
def store_the_original_of_a_copied_state(stack: ExitStack) -> None:
    """vLLM copies a state to keep it from inside a block. The request goes on with the original,
    which this step changes."""
    on_states = EagerPolicy.on_states

    def careless(self: EagerPolicy, states: Any) -> None:
        for request_id, of_request in states.items():
            for state in of_request if request_id in self._progress else ():
                hashes = self._progress[request_id].hashes
                size = self._groups.block_sizes[state.group]
                key = self._groups.key_at(hashes, state.group, state.num_tokens)
                if state.num_tokens % size == 0 or self._walk._stores.has(key):
                    on_states(self, {request_id: [state]})
                    continue
                table = self._managers[state.group].req_to_blocks[request_id]
                block = table[state.num_tokens // size]
                run = Run((block,), (key,), None, state.num_tokens)
                self._walk._stores.plan(run, frozenset, self._device_pool)

    substitute(stack, EagerPolicy, "on_states", careless)


@mutation(INNER_HITS)
def take_the_inner_keys_of_another_block(stack: ExitStack) -> None:
    commit = CpuTier.commit
    last: list[Any] = [()]

    def mixed_up(self: CpuTier, runs: Any) -> list[list[int]]:
        for run in runs:
            inner_keys = run.inner_keys or [()] * len(run)
            last.extend(inner_keys)
            run.inner_keys = [last.pop(0) for _ in inner_keys]
        return commit(self, runs)

    substitute(stack, CpuTier, "commit", mixed_up)
