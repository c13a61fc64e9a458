"""Promises of the store policy, checked while a world runs. Each check raises AssertionError."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
)
from vllm.v1.request import Request

from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.tier.run import Run
from tests.simulation import integrity, wishes
from tests.simulation.integrity import has_key
from tests.simulation.watch import watch

Keys = Collection[BlockHashWithGroupId]


class Answers:
    """vLLM passes over a request that is told to ask again (None), and gives the room to those
    behind it. Few requests may pass one so. Requests that wait for the second tier do so within
    their time limit instead.

    A request loads no copy of what the load of another brings, but for a short common head. It
    waits for that, unless as many wait already as may run.
    """

    MOST_PASSED = 8

    def __init__(self, scheduler: OffloadScheduler, max_running: int) -> None:
        self.num_asked_again = 0
        """How often requests had to ask again."""
        self._scheduler = scheduler
        self._max_running = max_running
        self._waiting_since: dict[str, float] = {}
        """By request that waits for the second tier."""
        self._told: set[str] = set()
        """Requests that have to ask again, in the step that is being scheduled."""
        self._num_passed: Counter[str] = Counter()
        """By request without blocks, how many others have got blocks while it had to ask again."""
        self._num_allocated = 0
        """Requests that have got blocks so far."""
        self._first_told: dict[str, int] = {}
        """By request that has had to ask again, that count when it was first told so."""
        watch(scheduler, "get_num_new_matched_tokens", self._watch_answer)
        watch(scheduler, "update_state_after_alloc", self._watch_allocation)

    def begin(self) -> None:
        """A step begins."""
        self._told.clear()

    def _watch_answer(self, ask: Any, request: Any, *arguments: Any) -> Any:
        answer = ask(request, *arguments)
        if answer[0] is None and not self._waits_for_objects(request):
            request_id = request.request_id
            count = self._num_passed[request_id]
            assert count <= self.MOST_PASSED, f"{count} requests have passed {request_id}"
            self._told.add(request_id)
            self._first_told.setdefault(request_id, self._num_allocated)
            self.num_asked_again += 1
        return answer

    def _waits_for_objects(self, request: Any) -> bool:
        second_tier = integrity.second_tier_of(self._scheduler)
        if second_tier is None or not integrity.has_to_wait(second_tier, request.request_id):
            return False
        now = second_tier.clock()
        wait = now - self._waiting_since.setdefault(request.request_id, now)
        speed = second_tier.speeds.compute or 1.0
        assert wait < request.num_tokens / speed, f"{request.request_id} waits for too long"
        return True

    def _watch_allocation(self, allocated: Any, request: Any, blocks: Any, num_loaded: int) -> None:
        request_id = request.request_id
        if num_loaded > 0 or request.num_computed_tokens == 0:
            if num_loaded and self._scheduler.groups.is_one_chain:
                self._check_load(request_id)
            self._num_allocated += 1
            self._first_told.pop(request_id, None)
            del self._num_passed[request_id]
            self._told.discard(request_id)
            self._num_passed.update(self._told)
        allocated(request, blocks, num_loaded)

    def _check_load(self, request_id: str) -> None:
        pins = integrity.ids_of_hit(self._scheduler, request_id)
        count = len(integrity.ids_to_come(self._scheduler).intersection(pins))
        since = self._first_told.get(request_id, self._num_allocated)
        waits = len(self._told) == self._max_running or self._num_allocated > since
        assert 2 * count <= len(pins) or waits, f"{request_id} loads {count} blocks once more"


class TailsFirst:
    """The tail of a prefix leaves the tier before its head, if it has left the device before.
    Watched in exclusive tiers."""

    def __init__(self, scheduler: OffloadScheduler) -> None:
        self._num_lost = 0
        """Blocks that have left the tier to make room."""
        self._num_beheaded = 0
        """Blocks that stayed although their parents left."""
        self._device_pool = integrity.device_pool_of(scheduler)
        self._on_device: Any = self._device_pool.cached_block_hash_to_block
        self._in_tier = integrity.pool_of(scheduler.tier).cached_block_hash_to_block._cache
        self._parents: dict[BlockHashWithGroupId, BlockHashWithGroupId] = {}
        self._headless: set[BlockHashWithGroupId] = set()
        """Blocks that the device had longer than their parents. Stores held them, or a reset took
        both. And blocks that were found without them: a hit that continues from the device's blocks
        protects no block before it."""
        self._released: set[BlockHashWithGroupId] = set()
        """Blocks that a request has released. Each leaves first when the device has lost it, which
        loses the head last."""
        self._groups = scheduler.groups
        self._applies = scheduler.tier.is_exclusive
        watch(self._device_pool, "_maybe_evict_cached_block", self._watch_device)
        watch(scheduler.tier, "pin", self._watch_hit)
        watch(scheduler.tier, "release", self._watch_release)

    def begin(self, requests: Iterable[Request]) -> set[BlockHashWithGroupId]:
        """A step begins. Returns the tier's keys, for ``end``."""
        for request in requests if self._applies else ():
            keys = self._groups.keys(request.block_hashes, self._groups.ids[0])
            self._parents.update(zip(keys[1:], keys, strict=False))
        if self._on_device is not self._device_pool.cached_block_hash_to_block:
            self._on_device = self._device_pool.cached_block_hash_to_block
            self._headless.update(self._in_tier)
        return set(self._in_tier)

    def end(self, before: Set[BlockHashWithGroupId]) -> None:
        """A step has been scheduled. ``before``: the answer of ``begin``."""
        lost: Set[Any] = before - self._in_tier.keys()
        self._num_lost += len(lost)
        self._headless -= lost
        for key in self._in_tier if lost else ():
            parent = self._parents.get(key)
            if parent in lost and self._on_device.get_one_block(parent) is None:
                is_copy = self._on_device.get_one_block(key) is not None
                is_promised = not (is_copy or key in self._headless or parent in self._released)
                self._num_beheaded += is_promised
                self._headless.add(key)

    def check(self) -> None:
        """Few exceptions: what stores need must stay, and a tail alone may be found again."""
        limit = 3 + self._num_lost // 100
        assert self._num_beheaded <= limit, f"{self._num_beheaded} tails stayed without their heads"

    def _watch_device(self, evict: Any, block: KVCacheBlock) -> Any:
        key: Any = block.block_hash
        parent = self._parents.get(key)
        if parent is not None and self._on_device.get_one_block(parent) is None:
            self._headless.add(key)
        return evict(block)

    def _watch_release(self, release: Any, keys: Iterable[BlockHashWithGroupId]) -> None:
        keys = list(keys)
        self._released.update(keys)
        release(keys)

    def _watch_hit(self, pin: Any, blocks: Sequence[KVCacheBlock]) -> None:
        keys: set[Any] = {block.block_hash for block in blocks}
        self._headless.update(key for key in keys if self._parents.get(key) not in keys)
        pin(blocks)


class FoundOnDevice:
    """Skipped contents are stored after all if a request finds them. Watched with host blocks of
    one device block, and in a tier that is larger than the device."""

    def __init__(self, scheduler: OffloadScheduler) -> None:
        self.num_evicted = 0
        """Blocks with such contents that the device evicted."""
        self._num_lost = 0
        """Those that the tier neither had nor got."""
        self._num_taken = 0
        """Blocks that the device has evicted in this step."""
        self._scheduler = scheduler
        self._device_pool = integrity.device_pool_of(scheduler)
        self._found: set[BlockHashWithGroupId] = set()
        watch(scheduler, "update_state_after_alloc", self._watch_allocation)
        watch(self._device_pool, "_maybe_evict_cached_block", self._watch_device)
        watch(scheduler, "request_finished", self._watch_end)

    def begin(self) -> None:
        """A step begins."""
        self._num_taken = 0

    def _watch_allocation(self, allocated: Any, request: Any, blocks: Any, *rest: Any) -> None:
        begins = request.num_computed_tokens == 0  # a session that goes on finds nothing
        is_watched = begins and self._scheduler.groups.num_sub_blocks == 1
        if is_watched and wishes.wants_storing(request):
            bypassed = integrity.bypassed(self._scheduler)
            table = [block for of_group in blocks.blocks for block in of_group]
            keys = [b.block_hash for b in table if b.block_hash == bypassed.get(b.block_id)]
            self._found.update(key for key in keys if key is not None)
        allocated(request, blocks, *rest)

    def _watch_device(self, evict: Any, block: KVCacheBlock) -> Any:
        key, answer = block.block_hash, evict(block)
        self._num_taken += 1
        if key in self._found and not has_key(self._device_pool, key):
            self._found.discard(key)
            self._on_evicted(key)
        return answer

    def _watch_end(self, finish: Any, request: Any) -> Any:
        if wishes.of(request).get("release") is True:
            released = set(request.block_hashes)
            self._found = {key for key in self._found if get_block_hash(key) not in released}
        return finish(request)

    def check(self) -> None:
        """Few exceptions: a load may take blocks whose stores are late."""
        limit = 3 + self.num_evicted // 10
        assert self._num_lost <= limit, f"{self._num_lost} blocks were found, and never stored"

    def _on_evicted(self, key: BlockHashWithGroupId) -> None:
        tier = self._scheduler.tier
        num_places = integrity.num_places_of(tier)  # each may take a block of its own
        has_room = tier.num_blocks > num_places * len(self._device_pool.blocks)
        # Where a step may take more than a quarter of the device, some blocks cannot be safe.
        if has_room and self._num_taken <= integrity.min_ahead_of(self._scheduler):
            self.num_evicted += 1
            self._num_lost += len(integrity.stores_of(self._scheduler).absent([key]))


class MovedHashes:
    """vLLM moves the hash of a partial tail away from a running state's block, which the next step
    overwrites (``move_block_hashes``). No store of that block under that hash may be planned or in
    flight: it would copy other bytes (vllm#57505)."""

    def __init__(self, scheduler: OffloadScheduler) -> None:
        self.num_moved = 0
        """Hashes that vLLM has moved."""
        self._scheduler = scheduler
        device_pool = integrity.device_pool_of(scheduler)
        if hasattr(device_pool, "move_block_hashes"):  # not on all versions of vLLM
            watch(device_pool, "move_block_hashes", self._watch_move)

    def _watch_move(self, move: Any, source: KVCacheBlock, target: KVCacheBlock) -> Any:
        self.num_moved += 1
        stored = integrity.keys_being_stored(self._scheduler, source)
        assert source.block_hash not in stored, f"the hash of {source} moves during its store"
        return move(source, target)


def check_contents(runs: Iterable[Run], sub_keys: Callable[[Keys], Mapping[Any, Keys]]) -> None:
    """The device blocks of planned stores have the contents that the tier's blocks will be found
    by. ``sub_keys``: by key of a host block, those of its sub-blocks."""
    for run in runs:
        expected, count = sub_keys(run.keys), len(run.device_blocks) // len(run.keys)
        for place, key in enumerate(run.keys):
            for block in run.device_blocks[place * count : (place + 1) * count]:
                # vLLM gives some blocks no hash; the runner checks their bytes.
                unknown = block.block_hash is None and not run.on_device
                right = unknown or block.block_hash in expected[key]
                assert right, f"{block} is stored as a part of other contents"


def check_free(
    pool: BlockPool, were_free: dict[int, Any], runs: Iterable[Run], reserve: int
) -> None:
    """Stores of free blocks leave at least ``reserve`` blocks free, unless the blocks were withheld
    from a request. Other stores may take blocks of requests: a host block counts only if all of its
    device blocks were free before the step. ``were_free``: the keys of those, by id."""
    num_free = pool.get_num_free_blocks()
    for run in runs:
        count = len(run.device_blocks) // len(run.keys)
        for first in range(0, len(run.device_blocks), count):
            blocks = run.device_blocks[first : first + count]
            taken = all(
                block.ref_cnt == 1
                and block.block_hash is not None
                and block.block_hash == were_free.get(block.block_id)
                for block in blocks
            )
            assert not taken or num_free >= reserve, f"stores of free blocks leave only {num_free}"
