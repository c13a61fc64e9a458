"""Bugs made on purpose. Each must be caught by the simulation: one that is not means that
something is not checked."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from simple_offload.backends.base import Direction
from simple_offload.metadata import RankCapacity, StepMetadata, WorkerReport
from simple_offload.scheduler import lazy
from simple_offload.scheduler.admission import Admission
from simple_offload.scheduler.cpu_tier import CpuTier, HostHit
from simple_offload.scheduler.eager import EagerPolicy
from simple_offload.scheduler.events import KVEvents, Origins
from simple_offload.scheduler.in_flight import Ended, InFlight
from simple_offload.scheduler.lazy import StepLimits
from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.recent_tables import RecentTables
from simple_offload.scheduler.store_policy import BoundaryState
from simple_offload.scheduler.stores import Storable, Stores
from simple_offload.worker import worker
from simple_offload.worker.regions import find_regions
from simple_offload.worker.transfers import _Lane
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.device import ScriptedDevice
from tests.simulation.groups import PLAIN
from tests.simulation.script import Faults, Script
from tests.simulation.world import World

Replacement = Callable[..., Any]
MUTATIONS: dict[str, Callable[[], Any]] = {}

_ANNOUNCING = frozenset(
    {
        "admit_silently",
        "hold_compute_after_the_forward",
        "hold_compute_after_the_stores",
        "release_pins_at_the_announcement",
        "release_device_blocks_at_the_announcement",
        "announce_twice",
    }
)
_GROWING = frozenset(
    {
        "grow_to_the_largest_rank",
        "grow_before_all_ranks_have_spoken",
        "promise_what_is_not_open_yet",
        "never_grow",
    }
)

_LAZY = frozenset(
    {
        "look_no_further_than_the_front",
        "return_stored_blocks_to_the_back",
        "refuse_what_comes_before_its_parent",
        "let_a_block_outlive_the_parent_that_came_later",
    }
)
"""Bugs that show where the device has many free blocks and evicts all the same."""

_COUNTED = frozenset({"admit_everything", "count_a_request_in_each_step"})
"""Bugs that show where blocks are stored only once they have been asked for again."""

STATES_ONLY = {
    "store_the_running_state",
    "load_the_state_of_another_boundary",
    "believe_a_state_that_is_missing",
}
"""Bugs that show only in models with state layers."""

INNER_HITS_ONLY = {
    "store_the_original_of_a_copied_state",
    "take_the_inner_keys_of_another_block",
    "say_nothing_of_inner_keys",
}
"""Bugs that show only where a hit may end inside a block."""

MIXED_PAGES_ONLY = {"believe_all_pages_alike"}
"""Bugs that show only where layers have pages of different sizes."""

ENGINE_ONLY: dict[str, dict[str, Any]] = {
    "count_rejected_drafts_as_computed": {"num_drafted": 3, "windows": (0,)},
    "count_rejected_drafts_with_async_scheduling": {
        "num_drafted": 3,
        "windows": (0,),
        "async_scheduling": True,
    },
    "pair_a_hit_with_the_end_of_a_table": {
        "num_drafted": 2,
        "windows": (0,),
        "num_states": 1,
    },
    "think_all_blocks_as_large_as_the_first": {"windows": (0, 0), "scales": (1, 2)},
    "think_a_block_is_what_one_rank_has_of_it": {
        "windows": (0,),
        "num_ranks": 2,
        "context_parallel": True,
    },
    "believe_all_ranks_have_as_much_room": {
        "windows": (0,),
        "num_ranks": 2,
        "uneven_ranks": True,
        "chunk_blocks": None,
    },
}
"""Bugs that show only in engines that are run otherwise, and how those are run."""
PARTS_ONLY = {
    "pair_from_the_start_of_the_host_block",
    "number_slots_by_the_host_block",
    "grow_by_slots",
    "store_a_host_block_that_lacks_a_part",
    "know_a_host_block_by_its_first_part",
    "believe_that_all_groups_have_the_last_host_block",
}
"""Bugs that show only where a host block holds several device blocks."""


def scripts_for(name: str, seed: int) -> Script:
    """The script of ``seed``, turned towards what lets the bug ``name`` show where ordinary
    scripts seldom do."""
    script = Script.draw(seed).with_parts(1)
    shape = replace(script.shape, num_host_blocks=300)
    num_groups = len(shape.groups)
    if model := _model_for(name):
        script = script.with_model(**model, lazy=False, store_threshold=1)
        return replace(script, shape=replace(script.shape, num_host_blocks=300))
    if name in ("drop_load_barrier", "think_free_blocks_untouched"):
        # As a consumer, vLLM itself keeps blocks that a step in flight may still touch.
        shape = replace(
            shape,
            kv_role="kv_producer",
            async_scheduling=True,
            num_device_blocks=18 * num_groups,
        )
        return replace(script, shape=shape, lag=0.9, copy_speed=0.9, aborts=0.2, faults=Faults())
    if name == "store_while_loading":
        # Two requests load the same blocks, one load fails, the other request goes away.
        shape = replace(
            shape, load_failures="recompute", max_num_seqs=6, num_device_blocks=60 * num_groups
        )
        faults = Faults(load_error=0.5)
        return replace(
            script, shape=shape, copy_speed=0.1, aborts=0.3, arrivals=0.9, resets=0, faults=faults
        )
    if name in _ANNOUNCING:
        # Loads take long, and are announced to the engine in good time.
        shape = replace(
            shape, async_scheduling=True, max_num_seqs=6, num_device_blocks=24 * num_groups
        )
        return replace(
            script,
            shape=shape,
            copy_speed=0.1,
            announcements=0.6,
            arrivals=0.9,
            num_requests=60,
            faults=replace(script.faults, thread_death=0.0),
        )
    if name in _GROWING:
        shape = replace(shape, chunk_blocks=6, num_ranks=max(2, shape.num_ranks))
        faults = Faults(no_memory=script.faults.no_memory)
        return replace(script, shape=shape, arrivals=0.9, faults=faults)
    return _with_policy(name, script)


def _with_policy(name: str, script: Script) -> Script:
    """The script, with the policy that is needed for the bug to show."""
    shape = replace(script.shape, store_threshold=2 if name in _COUNTED else 1)
    if name in _COUNTED:
        return replace(script, shape=shape)
    shape = replace(shape, lazy=True)
    if name == "believe_every_known_token_computed":
        return replace(script, shape=shape)
    if name not in _LAZY:
        return script
    blocks_per_group = 60 if name == "let_a_block_outlive_the_parent_that_came_later" else 160
    shape = replace(
        shape,
        num_device_blocks=blocks_per_group * len(shape.groups),
        num_host_blocks=2000,
        chunk_blocks=None,
        max_num_batched_tokens=8,
        max_num_seqs=2,
    )
    return replace(
        script,
        shape=shape,
        copy_speed=0.9,
        arrivals=0.9,
        resets=0.0,
        aborts=0.01,
        num_requests=60,
        faults=Faults(),
    )


def _model_for(name: str) -> dict[str, Any]:
    """What the shape has to have for the bug to show; empty if that is any."""
    if name in PARTS_ONLY:
        return {"num_parts": 4, "windows": (0, 4), "num_states": 0, "match_unit": None}
    if name in STATES_ONLY:
        return PLAIN | {"num_states": 1}
    if name in ENGINE_ONLY:
        return PLAIN | ENGINE_ONLY[name]
    attention = PLAIN | {"windows": (0,)}
    if name in INNER_HITS_ONLY:
        return attention | {"num_states": 1, "match_unit": 2}
    if name in MIXED_PAGES_ONLY:
        return attention | {"mixed_pages": True}
    return {}


def mutation(function: Callable[[ExitStack], None]) -> Callable[[ExitStack], None]:
    """Register ``function``, which patches the bug in for as long as the stack is open."""

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            function(stack)
            yield

    MUTATIONS[function.__name__] = planted
    return function


def _replace(stack: ExitStack, owner: type, name: str, replacement: Replacement) -> None:
    stack.enter_context(patch.object(owner, name, replacement))


@mutation
def commit_before_completion(stack: ExitStack) -> None:
    submit = Stores.submit

    def eager_commit(self: Stores) -> Any:
        for block, host_block in self._planned.pairs:
            self.tier.pool._insert_block_hash(block.key, host_block, block.num_tokens)
        return submit(self)

    _replace(stack, Stores, "submit", eager_commit)
    _replace(stack, Stores, "check_integrity", lambda self: None)
    _replace(stack, CpuTier, "commit", lambda self, block, *_: self.unpin((block,)))


@mutation
def drop_store_barrier(stack: ExitStack) -> None:
    _drop_barrier(stack, Direction.STORE)


@mutation
def drop_load_barrier(stack: ExitStack) -> None:
    _drop_barrier(stack, Direction.LOAD)


@mutation
def think_free_blocks_untouched(stack: ExitStack) -> None:
    _replace(stack, RecentTables, "may_touch", lambda self, blocks: False)


def _drop_barrier(stack: ExitStack, direction: Direction) -> None:
    init = ScriptedDevice.__init__

    def careless(self: ScriptedDevice, *arguments: Any) -> None:
        init(self, *arguments)
        self.ignore_barriers.add(direction)

    _replace(stack, ScriptedDevice, "__init__", careless)


@mutation
def forget_unpin_after_load(stack: ExitStack) -> None:
    finish = Loads.finish

    def leaking(self: Loads, ended: Ended, device_pool: Any) -> bool:
        with patch.object(CpuTier, "unpin", lambda self, blocks: None):
            return finish(self, ended, device_pool)

    _replace(stack, Loads, "finish", leaking)


@mutation
def forget_pin_of_hit(stack: ExitStack) -> None:
    lookup = Loads.lookup

    def unpinned(self: Loads, request: Any, num_computed_tokens: int) -> int:
        num_tokens = lookup(self, request, num_computed_tokens)
        hit = self._hits.get(request.request_id)
        if hit is not None and hit.pins:
            self.tier.unpin(hit.pins)
            hit.pins.clear()
        return num_tokens

    _replace(stack, Loads, "lookup", unpinned)


@mutation
def evict_head_first(stack: ExitStack) -> None:
    _replace(stack, CpuTier, "unpin", lambda self, blocks: self.pool.free_blocks(blocks))


@mutation
def lose_a_completion(stack: ExitStack) -> None:
    note = OffloadWorker._note

    def forgetful(self: OffloadWorker, direction: Direction, completion: Any) -> None:
        if completion.transfer.id % 5 != 4:
            note(self, direction, completion)

    _replace(stack, OffloadWorker, "_note", forgetful)


@mutation
def submit_twice(stack: ExitStack) -> None:
    def careless(self: OffloadWorker, direction: Direction, transfers: list[Any]) -> None:
        assert self._engine is not None
        for transfer in transfers:
            self._engine.submit(direction, transfer, self._backend.barrier())

    _replace(stack, OffloadWorker, "_submit", careless)


@mutation
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

    keys, lookup = CpuTier.keys, CpuTier.lookup

    def strip(hashes: Any) -> Any:
        return [unsalted.get(block_hash, block_hash) for block_hash in hashes]

    _replace(stack, World, "add_request", remember)
    _replace(
        stack, CpuTier, "keys", lambda self, hashes, *a, **k: keys(self, strip(hashes), *a, **k)
    )
    _replace(
        stack, CpuTier, "lookup", lambda self, hashes, *a, **k: lookup(self, strip(hashes), *a, **k)
    )

    # The policy stores only what vLLM has hashed under the same key; let it store anything that
    # is about the tokens of its block.
    def source(self: EagerPolicy, block: Any, key: Any, group: int, ended: bool) -> Any:
        return None if block.is_null or not self._stable[group] else block

    _replace(stack, EagerPolicy, "_source_of", source)


@mutation
def keep_a_failed_store(stack: ExitStack) -> None:
    finish = Stores.finish
    _replace(
        stack,
        Stores,
        "finish",
        lambda self, ended, pool: finish(self, Ended(ended.id, ok=True), pool),
    )


@mutation
def offer_a_failed_block_again(stack: ExitStack) -> None:
    _replace(stack, CpuTier, "drop", lambda self, blocks: None)


@mutation
def skip_one_rank(stack: ExitStack) -> None:
    begin = InFlight.begin

    def impatient(self: InFlight) -> int:
        transfer_id = begin(self)
        self._ranks_left[transfer_id] = max(1, self.num_ranks - 1)
        return transfer_id

    _replace(stack, InFlight, "begin", impatient)


@mutation
def believe_the_last_rank(stack: ExitStack) -> None:
    end = InFlight.end

    def gullible(self: InFlight, report: Any) -> list[Ended]:
        self._failed.clear()
        return end(self, report)

    _replace(stack, InFlight, "end", gullible)


@mutation
def release_device_blocks_at_submission(stack: ExitStack) -> None:
    plan = Stores.plan

    def loose(self: Stores, blocks: Any, keep: Any, pool: Any) -> int:
        with patch.object(type(pool), "touch", lambda self, blocks: None):
            return plan(self, blocks, keep, pool)

    _replace(stack, Stores, "plan", loose)
    _replace(stack, Stores, "_release", lambda self, store, device_pool: None)
    _replace(stack, Stores, "check_integrity", lambda self: None)


@mutation
def store_while_loading(stack: ExitStack) -> None:
    _replace(stack, Loads, "is_loading", lambda self, request_id: False)


@mutation
def keep_stores_over_a_reset(stack: ExitStack) -> None:
    _replace(stack, Stores, "abandon", lambda self, device_pool: None)


@mutation
def keep_the_tier_over_a_reset(stack: ExitStack) -> None:
    _replace(stack, CpuTier, "reset", lambda self: None)


@mutation
def leave_the_dead_unburied(stack: ExitStack) -> None:
    _replace(stack, _Lane, "_bury", lambda self: None)


@mutation
def load_into_the_next_block(stack: ExitStack) -> None:
    submit = Loads.submit

    def shifted(self: Loads, *arguments: Any) -> Any:
        transfers = submit(self, *arguments)
        for transfer in transfers:
            transfer.host_blocks[:] = transfer.host_blocks[::-1].copy()
        return transfers

    _replace(stack, Loads, "submit", shifted)


@mutation
def store_the_neighbour(stack: ExitStack) -> None:
    submit = Stores.submit

    def shifted(self: Stores) -> Any:
        transfers = submit(self)
        for transfer in transfers:
            transfer.device_blocks[:] = transfer.device_blocks[::-1].copy()
        return transfers

    _replace(stack, Stores, "submit", shifted)


# Announced loads


@mutation
def admit_silently(stack: ExitStack) -> None:
    _replace(stack, Loads, "take_admitted", lambda self: self._newly_admitted.clear() or [])


def _hold_when(stack: ExitStack, hook: str, when: Callable[[StepMetadata], bool]) -> None:
    """Let ``bind`` hold no compute in steps of which ``when`` is true, and the worker's ``hook``
    do it at its end."""
    bind, late = OffloadWorker.bind, getattr(OffloadWorker, hook)

    def hasty(self: OffloadWorker, metadata: StepMetadata) -> None:
        admitted, metadata.admitted = metadata.admitted, []
        bind(self, metadata)
        metadata.admitted = admitted
        if not when(metadata):
            _hold(self)

    def belated(self: OffloadWorker) -> None:
        late(self)
        if self._metadata is not None and when(self._metadata):
            _hold(self)

    _replace(stack, OffloadWorker, "bind", hasty)
    _replace(stack, OffloadWorker, hook, belated)


def _hold(worker: OffloadWorker) -> None:
    assert worker._engine is not None
    assert worker._metadata is not None
    worker._engine.hold_compute(Direction.LOAD, set(worker._metadata.admitted))


@mutation
def hold_compute_after_the_forward(stack: ExitStack) -> None:
    _hold_when(stack, "submit_loads", lambda metadata: True)


@mutation
def hold_compute_after_the_stores(stack: ExitStack) -> None:
    _hold_when(stack, "submit_stores", lambda metadata: True)


@contextmanager
def no_hold_before_stores_alone() -> Iterator[None]:
    """Where a step has no compute, its stores do not wait for the loads it admits. It takes so
    much to show that random scripts never do: see test_announced."""
    with ExitStack() as stack:
        _hold_when(stack, "submit_stores", lambda metadata: not metadata.computes)
        yield


@mutation
def release_pins_at_the_announcement(stack: ExitStack) -> None:
    admit = Loads.admit

    def hasty(self: Loads, request_ids: Any) -> None:
        admit(self, request_ids)
        for load in self._in_flight.values():
            if load.admitted:
                self.tier.unpin(load.pins)
                load.pins = []

    _replace(stack, Loads, "admit", hasty)


@mutation
def release_device_blocks_at_the_announcement(stack: ExitStack) -> None:
    update = OffloadScheduler.update_connector_output

    def hasty(self: OffloadScheduler, output: Any) -> None:
        update(self, output)
        for load in self._loads._in_flight.values():
            if load.admitted:
                self._device_pool.free_blocks(reversed(load.device_blocks))
                load.device_blocks = []

    _replace(stack, OffloadScheduler, "update_connector_output", hasty)


@mutation
def announce_twice(stack: ExitStack) -> None:
    poll = OffloadWorker.poll

    def forgetful(self: OffloadWorker) -> Any:
        self._announced.clear()
        return poll(self)

    _replace(stack, OffloadWorker, "poll", forgetful)


# A tier that grows


def _grow(stack: ExitStack, size: Callable[[dict[str, int], int], int]) -> None:
    """Let the tier have as many blocks as ``size`` says, given what the ranks have said and how
    many there are."""

    def grow(self: OffloadScheduler, num_open: Any) -> None:
        self._num_open.update(num_open)
        self.tier.grow(size(self._num_open, self._in_flight.num_ranks))

    _replace(stack, OffloadScheduler, "_grow_tier", grow)


@mutation
def grow_to_the_largest_rank(stack: ExitStack) -> None:
    _grow(stack, lambda said, num_ranks: max(said.values()) if len(said) == num_ranks else 0)


@mutation
def grow_before_all_ranks_have_spoken(stack: ExitStack) -> None:
    _grow(stack, lambda said, num_ranks: min(said.values(), default=0))


@mutation
def promise_what_is_not_open_yet(stack: ExitStack) -> None:
    honest: property = vars(OffloadWorker)["capacity"]

    def boastful(self: OffloadWorker) -> RankCapacity:
        capacity: RankCapacity = honest.__get__(self)
        return replace(capacity, num_open=capacity.num_host_blocks)

    stack.enter_context(patch.object(OffloadWorker, "capacity", property(boastful)))


@mutation
def never_grow(stack: ExitStack) -> None:
    take = OffloadScheduler._take

    def deaf(self: OffloadScheduler, report: WorkerReport) -> None:
        report.num_open.clear()
        take(self, report)

    _replace(stack, OffloadScheduler, "_take", deaf)


# Other models


@mutation
def store_the_running_state(stack: ExitStack) -> None:
    """A state block is stored as soon as its last token is known, before the state has seen it."""
    num_complete, source_of = EagerPolicy._num_complete, EagerPolicy._source_of

    def known(self: EagerPolicy, request: Any, group: int, num_blocks: int) -> int:
        if self._stable[group]:
            return num_complete(self, request, group, num_blocks)
        num_tokens = len(request.block_hashes) * self.tier.hash_block_size
        return min(num_tokens // self.tier.block_sizes[group], num_blocks)

    def source(self: EagerPolicy, block: Any, key: Any, group: int, ended: bool) -> Any:
        if self._stable[group] or block.is_null:
            return source_of(self, block, key, group, ended)
        return block

    _replace(stack, EagerPolicy, "_num_complete", known)
    _replace(stack, EagerPolicy, "_source_of", source)


@mutation
def load_the_state_of_another_boundary(stack: ExitStack) -> None:
    lookup = CpuTier.lookup

    def earlier(
        self: CpuTier, block_hashes: Any, num_computed_tokens: int, max_tokens: int
    ) -> HostHit:
        hit = lookup(self, block_hashes, num_computed_tokens, max_tokens)
        for group in _state_groups(self) if hit.num_tokens else ():
            size = self.block_sizes[group]
            last = (num_computed_tokens + hit.num_tokens) // size - 1
            keys = self.keys(block_hashes, group, stop=last)
            if others := [other for key in keys if (other := self.get(key)) is not None]:
                hit.blocks[group][-1] = others[-1]
        return hit

    _replace(stack, CpuTier, "lookup", earlier)


@mutation
def believe_a_state_that_is_missing(stack: ExitStack) -> None:
    """A hit as long as the attention groups', whatever the states'; nothing is loaded for those."""
    init, plan = OffloadScheduler.__init__, Loads.plan

    def careless(self: OffloadScheduler, *args: Any) -> None:
        init(self, *args)
        coordinator: Any = self.tier.coordinator
        groups = getattr(coordinator, "attention_groups", [])
        attention = [group for group in groups if not isinstance(group.spec, MambaSpec)]
        if attention:
            coordinator.attention_groups = attention

    def without_states(self: Loads, request: Any, tables: Any, *rest: Any) -> None:
        groups = set(_state_groups(self.tier))
        plan(self, request, [[] if g in groups else t for g, t in enumerate(tables)], *rest)

    _replace(stack, OffloadScheduler, "__init__", careless)
    _replace(stack, Loads, "plan", without_states)


def _state_groups(tier: CpuTier) -> list[int]:
    managers = tier.coordinator.single_type_managers
    return [group for group in tier.group_ids if isinstance(managers[group], MambaManager)]


@mutation
def believe_all_pages_alike(stack: ExitStack) -> None:
    """Of every page as many bytes are copied as the smallest has."""

    def narrow(*args: Any) -> list[Any]:
        regions = find_regions(*args)
        page_bytes = min(region.shape[1] for region in regions)
        return [region[:, :page_bytes] for region in regions]

    stack.enter_context(patch.object(worker, "find_regions", narrow))


@mutation
def store_the_original_of_a_copied_state(stack: ExitStack) -> None:
    """vLLM copies a state that is to be kept from inside a block; the request goes on with the
    original, and this step changes it."""
    store_state = EagerPolicy._store_state

    def careless(self: EagerPolicy, progress: Any, state: BoundaryState) -> None:
        size = self.tier.block_sizes[state.group]
        request = progress.request
        key = self.tier.key_at(request.block_hashes, state.group, state.num_tokens)
        if state.num_tokens % size == 0 or self.stores.has(key):
            store_state(self, progress, state)
            return
        table = self._managers[state.group].req_to_blocks[request.request_id]
        block = table[state.num_tokens // size]
        storable = Storable((block,), key, None, state.num_tokens)
        self.stores.plan([storable], frozenset(), self._device_pool)

    _replace(stack, EagerPolicy, "_store_state", careless)


@mutation
def take_the_inner_keys_of_another_block(stack: ExitStack) -> None:
    commit: Any = CpuTier.commit
    last: list[Any] = [()]

    def mixed_up(self: CpuTier, *args: Any) -> Any:
        *others, inner, early = args
        last.append(inner)
        return commit(self, *others, last.pop(0), early)

    _replace(stack, CpuTier, "commit", mixed_up)


# Engines that are run otherwise


@mutation
def count_rejected_drafts_as_computed(stack: ExitStack) -> None:
    """Adds up what is scheduled, from when a request got its blocks on, and does not hear what
    comes of it."""
    allocated, on_step = EagerPolicy.on_allocated, EagerPolicy.on_step
    num_complete = EagerPolicy._num_complete
    computed: dict[str, int] = {}

    def start(self: EagerPolicy, request: Any) -> None:
        computed.pop(request.request_id, None)
        allocated(self, request)

    def count(self: EagerPolicy, scheduled: Any) -> None:
        on_step(self, scheduled)
        for request_id, num_tokens in scheduled.items():
            if (progress := self._progress.get(request_id)) is not None:
                request = progress.request
                first = request.num_computed_tokens - request.num_output_placeholders
                computed[request_id] = computed.get(request_id, first) + num_tokens

    def believed(self: EagerPolicy, request: Any, group: int, num_blocks: int) -> int:
        num_tokens = max(computed.get(request.request_id, 0), request.num_computed_tokens)
        with patch.multiple(request, num_computed_tokens=num_tokens, num_output_placeholders=0):
            return num_complete(self, request, group, num_blocks)

    _replace(stack, EagerPolicy, "on_allocated", start)
    _replace(stack, EagerPolicy, "on_step", count)
    _replace(stack, EagerPolicy, "_num_complete", believed)


@mutation
def count_rejected_drafts_with_async_scheduling(stack: ExitStack) -> None:
    stack.enter_context(MUTATIONS["count_rejected_drafts_as_computed"]())


@mutation
def pair_a_hit_with_the_end_of_a_table(stack: ExitStack) -> None:
    """As if a table ended with the hit: one of states has room for drafts' states behind it."""
    plan = Loads.plan

    def from_the_end(self: Loads, request: Any, tables: Any, *rest: Any) -> None:
        known = self._hits[request.request_id]
        shifted = []
        for group, table in enumerate(tables):
            first = known.num_computed_tokens // self.tier.block_sizes[group]
            num_blocks = len(known.hit.blocks[group])
            shifted.append([*table[:first], *table[len(table) - num_blocks :]])
        plan(self, request, shifted, *rest)

    _replace(stack, Loads, "plan", from_the_end)


def _skip_blocks_of(stack: ExitStack, size: Callable[[CpuTier, int], int]) -> None:
    """Let the part of a table that the device has be counted in blocks of ``size`` tokens, given
    the tier and the group."""
    plan = Loads.plan

    def mistaken(self: Loads, request: Any, tables: Any, *rest: Any) -> None:
        num_computed = self._hits[request.request_id].num_computed_tokens
        shifted = []
        for group, table in enumerate(tables):
            right = num_computed // self.tier.block_sizes[group]
            wrong = min(num_computed // size(self.tier, group), len(table) - 1)
            shifted.append([*table[:right], *(table[wrong:] + table[:wrong])])
        plan(self, request, shifted, *rest)

    _replace(stack, Loads, "plan", mistaken)


@mutation
def think_all_blocks_as_large_as_the_first(stack: ExitStack) -> None:
    _skip_blocks_of(stack, lambda tier, group: tier.block_sizes[0])


@mutation
def think_a_block_is_what_one_rank_has_of_it(stack: ExitStack) -> None:
    def of_one_rank(tier: CpuTier, group: int) -> int:
        spec = tier.coordinator.kv_cache_config.kv_cache_groups[group].kv_cache_spec
        return int(spec.block_size)

    _skip_blocks_of(stack, of_one_rank)


@mutation
def believe_all_ranks_have_as_much_room(stack: ExitStack) -> None:
    """Once every rank has opened all it will, the first one's number goes for all."""
    _grow(stack, lambda said, num_ranks: next(iter(said.values())) if len(said) == num_ranks else 0)


# Lazy stores, and stores of what is asked for again


@mutation
def look_no_further_than_the_front(stack: ExitStack) -> None:
    of = StepLimits.of

    def short(*args: Any) -> StepLimits:
        return of(*args)._replace(lookahead=2)

    stack.enter_context(patch.object(StepLimits, "of", short))


@mutation
def return_stored_blocks_to_the_back(stack: ExitStack) -> None:
    release = Stores._release

    def careless(self: Stores, store: Any, device_pool: Any) -> None:
        for block, _ in store.pairs:
            self.first_to_go.pop(block.device_blocks[0].block_id, None)
        release(self, store, device_pool)

    _replace(stack, Stores, "_release", careless)


@mutation
def refuse_what_comes_before_its_parent(stack: ExitStack) -> None:
    commit: Any = CpuTier.commit
    _replace(stack, CpuTier, "commit", lambda self, *args: commit(self, *args[:5]))


@mutation
def let_a_block_outlive_the_parent_that_came_later(stack: ExitStack) -> None:
    _replace(stack, CpuTier, "_renew", lambda self, block: None)


@mutation
def believe_every_known_token_computed(stack: ExitStack) -> None:
    """The last token of a request has been said, and never been computed."""

    def known(tier: CpuTier, request: Any, group: int, num_blocks: int) -> int:
        num_tokens = len(request.block_hashes) * tier.hash_block_size
        return min(num_tokens // tier.block_sizes[group], num_blocks)

    stack.enter_context(patch.object(lazy, "num_complete_blocks", known))


@mutation
def admit_everything(stack: ExitStack) -> None:
    _replace(stack, Admission, "admits", lambda self, key: True)


@mutation
def count_a_request_in_each_step(stack: ExitStack) -> None:
    note = Admission.note

    def forgetful(self: Admission, request: Any) -> None:
        self.forget(request.request_id)
        note(self, request)

    _replace(stack, Admission, "note", forgetful)


# Host blocks of several device blocks


@mutation
def pair_from_the_start_of_the_host_block(stack: ExitStack) -> None:
    """A load that begins in the middle of a host block."""
    submit = Loads.submit

    def shifted(self: Loads, *arguments: Any) -> Any:
        transfers = submit(self, *arguments)
        for transfer in transfers:
            transfer.host_blocks[:] -= transfer.host_blocks[0] % self.tier.num_parts
        return transfers

    _replace(stack, Loads, "submit", shifted)


@mutation
def number_slots_by_the_host_block(stack: ExitStack) -> None:
    """As if the parts of the next host block began at the next slot."""

    def slots(self: CpuTier, blocks: Any) -> list[int]:
        parts = range(self.num_parts)
        return [block.block_id + self.num_parts - 1 + part for block in blocks for part in parts]

    _replace(stack, CpuTier, "slots", slots)


@mutation
def grow_by_slots(stack: ExitStack) -> None:
    _grow(stack, lambda said, num_ranks: min(said.values()) if len(said) == num_ranks else 0)


@mutation
def store_a_host_block_that_lacks_a_part(stack: ExitStack) -> None:
    sources_of = EagerPolicy._sources_of

    def lenient(self: EagerPolicy, parts: Any, *arguments: Any) -> Any:
        sources = sources_of(self, parts, *arguments)
        if sources is not None or self.tier.num_parts == 1:
            return sources
        there = [part for part in parts if not part.is_null]
        return tuple(there[0] if part.is_null else part for part in parts) if there else None

    _replace(stack, EagerPolicy, "_sources_of", lenient)


@mutation
def know_a_host_block_by_its_first_part(stack: ExitStack) -> None:
    keys, lookup = CpuTier.keys, CpuTier.lookup

    def first(self: CpuTier, hashes: Any) -> Any:
        return [hashes[index - index % self.num_parts] for index in range(len(hashes))]

    _replace(
        stack,
        CpuTier,
        "keys",
        lambda self, hashes, *a, **k: keys(self, first(self, hashes), *a, **k),
    )
    _replace(
        stack,
        CpuTier,
        "lookup",
        lambda self, hashes, *a, **k: lookup(self, first(self, hashes), *a, **k),
    )


@mutation
def believe_that_all_groups_have_the_last_host_block(stack: ExitStack) -> None:
    """Of a hit that ends inside it."""
    extend = CpuTier._extend

    def careless(self: CpuTier, *arguments: Any) -> int:
        with patch.object(self, "group_ids", self.group_ids[:1]):
            return extend(self, *arguments)

    _replace(stack, CpuTier, "_extend", careless)


# What a router is told


@mutation
def say_stored_at_submission(stack: ExitStack) -> None:
    submit, stored = Stores.submit, KVEvents.stored

    def hasty(self: Stores) -> Any:
        for block, _ in self._planned.pairs:
            assert self.events is not None
            stored(self.events, block.key, block.inner_keys, block.num_tokens, block.request)
        return submit(self)

    _replace(stack, Stores, "submit", hasty)
    _replace(stack, KVEvents, "stored", lambda self, *_: None)


@mutation
def say_nothing_of_evictions(stack: ExitStack) -> None:
    _replace(stack, KVEvents, "_queue_removed", lambda self, keys: None)


@mutation
def say_nothing_of_a_reset(stack: ExitStack) -> None:
    reset = CpuTier.reset

    def silent(self: CpuTier) -> None:
        with patch.object(self.pool, "_emit_block_removed_events", lambda keys: None):
            reset(self)

    _replace(stack, CpuTier, "reset", silent)


@mutation
def say_nothing_of_inner_keys(stack: ExitStack) -> None:
    stored = KVEvents.stored
    _replace(
        stack, KVEvents, "stored", lambda self, key, inner, *rest: stored(self, key, (), *rest)
    )


@mutation
def name_a_request_that_had_the_block_before(stack: ExitStack) -> None:
    on_step = Origins.on_step

    def first_come(self: Origins, *arguments: Any) -> None:
        before = dict(self._by_block)
        on_step(self, *arguments)
        self._by_block.update(before)

    _replace(stack, Origins, "on_step", first_come)
