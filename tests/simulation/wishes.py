"""What requests wish for, and promises: what one keeps out is not stored for it, and what others
have found is not released."""

import random
from collections.abc import Iterable
from itertools import chain
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_block_hash, get_group_id
from vllm.v1.request import Request

from simple_offload.scheduler.manager import OffloadScheduler
from simple_offload.scheduler.policy.owners import session_of
from simple_offload.scheduler.tier import block_pool
from tests.simulation import integrity
from tests.simulation.watch import watch

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
SESSIONS = (None, "one", "two", "three")


def draw(rng: random.Random) -> Any:
    """The wishes of a request, right or wrong."""
    return rng.choice(_RIGHT if rng.random() < 0.8 else _WRONG)


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
        self.num_superseded = 0
        """Windows and states that have been released because a later boundary was hit."""
        self._scheduler = scheduler
        self._session: bytes | None = None
        """Of the request that is ending."""
        self._hit: tuple[list[Any], int] | None = None
        """Hashes of a request, and the tokens of its hit. While it goes on from there, boundaries
        before that hit may be released without a wish."""
        self._may_wish = True
        """Whether the request that is ending may release anything."""
        self._gone_on: dict[bytes, list[Request]] = {}
        """By last hash of a prefix, the requests that have gone on from there. The next one of a
        conversation takes the place of the one before."""
        self._read_at: dict[BlockHashWithGroupId, set[bytes]] = {}
        """By key of a window's or state's block, the last hashes of prefixes whose hits read it."""
        self._left: set[BlockHashWithGroupId] = set()
        """Keys of windows and states that requests have left for hits at their ends."""
        self._released_by: dict[BlockHashWithGroupId, bytes] = {}
        self._finders: dict[BlockHashWithGroupId, set[bytes]] = {}
        """By key, the sessions whose requests have hit it before the step that is scheduled."""
        self._new_finders: list[tuple[BlockHashWithGroupId, bytes]] = []
        """Those whose requests hit it in this step."""
        self._to_compute: set[int] = set()
        """Ids of the device blocks that requests got in this step, and will compute."""
        self._num_on_device: dict[str, int] = {}
        watch(scheduler, "get_num_new_matched_tokens", self._watch_answer)
        watch(scheduler, "update_state_after_alloc", self._watch_allocation)
        watch(scheduler, "build_connector_meta", self._watch_step)
        watch(scheduler, "request_finished", self._watch_end)
        watch(scheduler.tier, "release", self._watch_release)
        if (boundaries := integrity.boundaries_of(scheduler)) is not None:
            watch(boundaries, "hit", self._watch_hit)
            watch(boundaries, "add", self._watch_add)
        self._device_pool = integrity.device_pool_of(scheduler)
        watch(self._device_pool, "_maybe_evict_cached_block", self._watch_device)
        watch(self._device_pool, "reset_prefix_cache", self._watch_device_reset)

    def _watch_answer(self, ask: Any, request: Any, num_computed_tokens: int) -> Any:
        self._num_on_device[request.request_id] = num_computed_tokens
        self._forget_gone()  # the request may compute it anew
        return ask(request, num_computed_tokens)

    def _watch_allocation(self, allocated: Any, request: Any, blocks: Any, num_loaded: int) -> None:
        groups = self._scheduler.groups
        num_found = self._num_on_device.pop(request.request_id, 0) + num_loaded
        begins = num_loaded > 0 or request.num_computed_tokens == 0
        for group in groups.ids if begins else ():
            stop = num_found // groups.block_sizes[group]
            found = groups.keys(request.block_hashes, group, 0, stop)
            self._new_finders += [(key, session_of(request)) for key in found]
            rest = blocks.blocks[group][stop * groups.num_sub_blocks :]
            self._to_compute.update(block.block_id for block in rest)
        allocated(request, blocks, num_loaded)

    def _watch_device(self, evict: Any, block: Any) -> Any:
        key, answer = block.block_hash, evict(block)
        if key is not None and not self._is_there(key):
            self._finders.pop(key, None)
        return answer

    def _watch_device_reset(self, reset: Any) -> Any:
        """Before the next request gets blocks, which may have the same contents anew."""
        answer = reset()
        self._forget_gone()
        return answer

    def _watch_step(self, build: Any, *arguments: Any) -> Any:
        self._forget_gone()
        self._to_compute.clear()
        for key, session in self._new_finders:
            if self._is_there(key):  # a hit does not read all that is before it
                self._finders.setdefault(key, set()).add(session)
        self._new_finders.clear()
        return build(*arguments)

    def _forget_gone(self) -> None:
        self._finders = {each: of for each, of in self._finders.items() if self._is_there(each)}

    def _watch_end(self, finish: Any, request: Any) -> Any:
        self._session, self._may_wish = session_of(request), of(request).get("release") is True
        answer = finish(request)
        self._session, self._may_wish = None, True
        return answer

    def _watch_hit(self, hit: Any, request: Request, num_tokens: int) -> Any:
        hashes: list[Any] = request.block_hashes
        self._hit = hashes, num_tokens
        if read := self._read_by(hashes, num_tokens):
            last = bytes(hashes[num_tokens // self._scheduler.groups.hash_block_size - 1])
            others = self._gone_on.setdefault(last, [])
            tokens = list(request.all_token_ids)
            self._gone_on[last] = [
                each for each in others if tokens[: each.num_tokens] != list(each.all_token_ids)
            ]
            self._gone_on[last].append(request)
            for key in read:
                self._read_at.setdefault(key, set()).add(last)
        answer = hit(request, num_tokens)
        self._hit = None
        return answer

    def _watch_add(self, add: Any, request: Any, ends: Any, *rest: Any) -> None:
        self._left.update(chain.from_iterable(ends.values()))
        add(request, ends, *rest)

    @property
    def _may_forget(self) -> bool:
        """Whether the policy may have forgotten hits: it remembers as many keys as fit the tier."""
        return len(self._left | self._read_at.keys()) > self._scheduler.tier.max_contents

    def _read_by(self, hashes: list[Any], num_tokens: int) -> list[BlockHashWithGroupId]:
        """Keys of the windows and states that a hit of ``num_tokens`` tokens reads."""
        groups = self._scheduler.groups
        return [
            key
            for group in set(groups.ids).difference(groups.chained_ids)
            for key in groups.keys(
                hashes,
                group,
                groups.num_unread_tokens(num_tokens, group) // groups.block_sizes[group],
                num_tokens // groups.block_sizes[group],
            )
        ]

    def _watch_release(self, release: Any, keys: Iterable[BlockHashWithGroupId]) -> None:
        keys = list(keys)
        if self._hit is not None:
            self._check_superseded(keys, *self._hit)
            self.num_superseded += len(keys)
            release(keys)
            return
        assert not keys or self._may_wish, "a request without that wish has released blocks"
        if self._session is not None:
            self._released_by.update(dict.fromkeys(keys, self._session))
        released = integrity.releasable(self._scheduler.tier, keys)
        self.num_released += len(released)
        for key in released:
            others = self._finders.get(key, set()) - {self._released_by[key]}
            assert not others, "a block is released that another session has found"
        release(keys)

    def _check_superseded(
        self, keys: Iterable[BlockHashWithGroupId], hashes: list[Any], num_tokens: int
    ) -> None:
        """A request goes on after a hit, and ``keys`` are released: windows and states of the same
        prefix that the hit does not read, and that two conversations have not gone on from."""
        groups, read = self._scheduler.groups, set(self._read_by(hashes, num_tokens))
        before = {bytes(each) for each in hashes[: num_tokens // groups.hash_block_size]}
        for key in keys:
            assert get_group_id(key) not in groups.chained_ids, "the chain of a prefix is released"
            assert bytes(get_block_hash(key)) in before, "what is not before a hit is released"
            assert key not in read, "what a hit reads is released"
            most = max((len(self._gone_on[last]) for last in self._read_at.get(key, ())), default=0)
            assert most <= 1 or self._may_forget, "what two conversations have read is released"

    def _is_there(self, key: BlockHashWithGroupId) -> bool:
        """Whether a cache has contents, and no request of this step alone will compute them."""
        blocks = block_pool.blocks_with(self._device_pool, [key])
        is_on_device = any(block.block_id not in self._to_compute for block in blocks)
        return is_on_device or not integrity.stores_of(self._scheduler).absent([key])
