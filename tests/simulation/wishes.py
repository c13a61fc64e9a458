"""What requests wish for, and the promise that what one keeps out is not stored for it."""

import random
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_block_hash
from vllm.v1.request import Request

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
    "store",
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
    """The wishes of a request, as far as they are an object."""
    wishes = (request.kv_transfer_params or {}).get("simple_offload")
    return wishes if isinstance(wishes, dict) else {}


def wants_storing(request: Request) -> bool:
    """Whether a request lets tiers keep what it leaves."""
    store = of(request).get("store")
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
