"""Wishes: what a request asks of the tiers, in ``kv_transfer_params["simple_offload"]``."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from simple_offload.logs import get_logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)

KEY = "simple_offload"
"""Of ``kv_transfer_params``, in requests and replies."""
MAX_SECONDS = 24 * 60 * 60
"""The longest time that a request may have its blocks protected."""

_SECONDS = {"s": 1, "m": 60, "h": 60 * 60}
_DURATION = re.compile(r"([0-9]{1,5})([smh])")
_ALLOWED = {
    "store": "true or false",
    "protect": 'a whole number and s, m or h, "1s" to "24h"',
    "release": "true or false",
    "report": "true or false",
}
_ALL = ", ".join(_ALLOWED)
_SHOWN = 60
"""Characters of a client's key or value that a log line shows at most."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request asks for."""

    store: bool = True
    """Whether a tier may keep anything of it."""
    protect: float = 0.0
    """Seconds from its end for which what it leaves is kept before others."""
    release: bool = False
    """Whether what it leaves goes before others."""
    report: bool = False
    """Whether the reply says where its prompt came from."""


NO_WISHES = Wishes()


class Wishbook:
    """The wishes of the requests that have some.

    They come from clients: nothing in them raises. What is wrong is ignored, with one warning for
    each known key, one for all unknown keys, and one for a value that is no object. A wrong
    ``store`` counts as false: who sends it wants something kept out.
    """

    def __init__(self) -> None:
        self._by_request: dict[str, Wishes] = {}
        self._told: set[str] = set()

    def of(self, request: "Request") -> Wishes:
        """The wishes of ``request``, read when this is called first."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping) or KEY not in params:
            return NO_WISHES
        known = self._by_request.get(request.request_id)
        if known is None:
            known = self._by_request[request.request_id] = self._parse(params[KEY])
        return known

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._by_request.pop(request_id, None)

    def _parse(self, given: Any) -> Wishes:
        if not isinstance(given, Mapping):
            self._tell(KEY, f"is ignored: {_shown(given)}. Allowed: an object with {_ALL}")
            return NO_WISHES
        values: dict[str, Any] = {}
        for key, value in given.items():
            if key not in _ALLOWED:
                nearest = get_close_matches(str(key)[:_SHOWN], _ALLOWED, 1, 0.0)[0]
                self._tell(
                    "unknown",
                    f"has an unknown key, which is ignored: {_shown(key)}. Allowed: {_ALL}. "
                    f"Nearest: {nearest}",
                )
            elif value is not None:
                right = _seconds(value) if key == "protect" else value
                if isinstance(right, float if key == "protect" else bool):
                    values[key] = right
                    continue
                effect = "is ignored"
                if key == "store":
                    values[key], effect = False, "counts as false"
                self._tell(
                    key,
                    f"has a wrong value of {key}, which {effect}: {_shown(value)}. "
                    f"Allowed: {_ALLOWED[key]}",
                )
        return Wishes(**values)

    def _tell(self, subject: str, what: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            logger.warning(
                "A request's kv_transfer_params.simple_offload %s. "
                "Further ones of this kind are not logged.",
                what,
            )


def _seconds(value: Any) -> float | None:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    return float(seconds) if 0 < seconds <= MAX_SECONDS else None


def _shown(value: Any) -> str:
    """``value`` on one short line, whatever it is."""
    if value is None or isinstance(value, str | bool | float):
        return reprlib.repr(value)[:_SHOWN]
    if isinstance(value, int) and value.bit_length() < 64:  # Python refuses to print very long ones
        return str(value)
    return f"a value of type {type(value).__name__}"[:_SHOWN]
