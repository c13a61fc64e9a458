"""What requests wish for, and promises: what one keeps out is not stored for it, and what others
have found is not released."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    get_block_hash,
)
from vllm.v1.request import Request

from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.policy.owners import session_of
from tests.simulation import integrity

_RIGHT: tuple[Any, ...] = (
    {"store": False},
    {"store": False, "report": True},
    {"store": False, "protect": "24h", "release": True},
    {"protect": "2s"},
    {"protect": "1m", "report": True},
    {"protect": "24h"},
    {"release": True},
    {"release": True, "report": True},
    {"report": True, "store": True},
)
_WRONG: tuple[Any, ...] = (
    {"store": "no"},
    {"store": 0, "protect": "5 minutes"},
    {"protect": 300, "stor": False},
    {"release": "yes", "report": None},
    {"\n": {}, "protect": "99999h"},
    ["store"],
    {"store": True} | dict.fromkeys("abcdefghijklmnop"),
    7,
    None,
)
_SESSIONS = (None, "one", "two", "three")


def draw(rng: random.Random) -> Any:
    """The wishes of a request, right or wrong."""
    return rng.choice(_RIGHT if rng.random() < 0.8 else _WRONG)


def draw_session(rng: random.Random) -> str | None:
    """The session of a request."""
    return rng.choice(_SESSIONS)


def of(request: Request) -> dict[str, Any]:
    """The wishes of a request, as far as they are an object that is not too large."""
    wishes = (request.kv_transfer_params or {}).get("simple_offload")
    return wishes if isinstance(wishes, dict) and len(wishes) <= 16 else {}


def wants_storing(request: Request) -> bool:
    """Whether a request lets tiers keep what it leaves."""
    given = (request.kv_transfer_params or {}).get("simple_offload")
    if given is None:
        return True
    store = given.get("store") if isinstance(given, dict) and len(given) <= 16 else False
    return store is None or store is True


def kept_out_by(requests: Iterable[Request]) -> set[bytes]:
    """The hashes of blocks of ``requests`` that none of them wants stored."""
    kept_out: set[bytes] = set()
    wanted: set[bytes] = set()
    for request in requests:
        (wanted if wants_storing(request) else kept_out).update(request.block_hashes)
    return kept_out - wanted


def check_stored(keys: Iterable[BlockHashWithGroupId], requests: Iterable[Request]) -> None:
    """None of ``keys``, in the tier or on their way there, is of requests alone that want nothing
    stored. ``requests``: all so far."""
    kept_out = kept_out_by(requests)
    wrong = [key for key in keys if get_block_hash(key) in kept_out] if kept_out else []
    assert not wrong, f"{len(wrong)} blocks are stored that no request wants stored"


class Releases:
    """No block is released that a request of another session has found, as long as device or tier
    have had its contents since."""

    def __init__(self, scheduler: OffloadScheduler) -> None:
        self.num_released = 0
        """Blocks that have been released."""
        self._scheduler = scheduler
        self._session: bytes | None = None
        """Of the request that is ending."""
        self._released_by: dict[BlockHashWithGroupId, bytes] = {}
        self._finders: dict[BlockHashWithGroupId, set[bytes]] = {}
        """By key, the sessions whose requests have hit it."""
        self._num_on_device: dict[str, int] = {}
        ask, allocated = scheduler.get_num_new_matched_tokens, scheduler.update_state_after_alloc
        build, finish = scheduler.build_connector_meta, scheduler.request_finished
        release = scheduler.tier.release
        device_pool: Any = scheduler._device_pool
        evict = device_pool._maybe_evict_cached_block

        def watch_answer(request: Any, num_computed_tokens: int) -> Any:
            self._num_on_device[request.request_id] = num_computed_tokens
            return ask(request, num_computed_tokens)

        def watch_allocation(request: Any, blocks: Any, num_external_tokens: int) -> None:
            num_found = self._num_on_device.pop(request.request_id, 0) + num_external_tokens
            for group in scheduler.groups.ids:
                stop = num_found // scheduler.groups.block_sizes[group]
                for key in scheduler.groups.keys(request.block_hashes, group, 0, stop):
                    self._finders.setdefault(key, set()).add(session_of(request))
            allocated(request, blocks, num_external_tokens)

        def watch_device(block: Any) -> Any:
            key, answer = block.block_hash, evict(block)
            if key is not None and not self._is_there(key):
                self._finders.pop(key, None)
            return answer

        def watch_step(*arguments: Any) -> Any:
            self._finders = {each: of for each, of in self._finders.items() if self._is_there(each)}
            return build(*arguments)

        def watch_end(request: Any) -> Any:
            self._session = session_of(request)
            answer = finish(request)
            self._session = None
            return answer

        def watch_release(keys: Iterable[BlockHashWithGroupId]) -> None:
            keys = list(keys)
            if self._session is not None:
                self._released_by.update(dict.fromkeys(keys, self._session))
            self._check(integrity.releasable(scheduler.tier, keys))
            release(keys)

        watched: Any = scheduler
        watched.get_num_new_matched_tokens = watch_answer
        watched.update_state_after_alloc = watch_allocation
        watched.build_connector_meta = watch_step
        watched.request_finished = watch_end
        watched.tier.release = watch_release
        device_pool._maybe_evict_cached_block = watch_device

    def _is_there(self, key: BlockHashWithGroupId) -> bool:
        on_device = self._scheduler._device_pool.cached_block_hash_to_block
        return bool(on_device.get_one_block(key)) or self._scheduler._stores.has(key)

    def _check(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        self.num_released += len(keys)
        for key in keys:
            others = self._finders.get(key, set()) - {self._released_by[key]}
            assert not others, "a block is released that another session has found"
