"""Wishes: what a request asks of the tiers, in ``kv_transfer_params["simple_offload"]``."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from vllm.v1.request import Request

from simple_offload.logs import get_logger

logger = get_logger(__name__)

KEY = "simple_offload"
"""Of ``kv_transfer_params``, in requests and replies."""
MAX_KEYS = 16
"""The most keys that its value may have: right and wrong ones."""
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
    """The wishes of one request."""

    store: bool = True
    """Whether a tier may keep anything of it."""
    protect: float = 0.0
    """Seconds from its end for which its blocks leave last."""
    release: bool = False
    """Whether its blocks leave first."""
    report: bool = False
    """Whether the reply says where its prompt came from."""


NO_WISHES = Wishes()
_REFUSED = Wishes(store=False)


class Wishbook:
    """The wishes of the requests that have some.

    They come from clients: nothing in them raises, and their cost does not grow with their size.
    What is wrong is ignored, with one warning for each known key, and one for all unknown keys. A
    value that is no object, or has more than ``MAX_KEYS`` keys, is ignored as a whole, with one
    warning. There, or if it is wrong, ``store`` counts as false: who sends it may want something
    kept out.
    """

    def __init__(self, *, allow_reports: bool) -> None:
        """``allow_reports``: else no request gets a report, with one warning."""
        self._allow_reports = allow_reports
        self._by_request: dict[str, Wishes] = {}
        self._told: set[str] = set()

    def of(self, request: Request) -> Wishes:
        """The wishes of ``request``, read when this is called first."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping) or params.get(KEY) is None:
            return NO_WISHES
        known = self._by_request.get(request.request_id)
        if known is None:
            known = self._by_request[request.request_id] = self._parse(params[KEY])
        return known

    def forget(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)

    def _parse(self, given: Any) -> Wishes:
        if not isinstance(given, Mapping) or len(given) > MAX_KEYS:
            self._tell(
                KEY,
                f"is ignored, and store counts as false: {_shown(given)}. "
                f"Allowed: an object with {_ALL}, and at most {MAX_KEYS} keys",
            )
            return _REFUSED
        values: dict[str, Any] = {}
        for key, allowed in _ALLOWED.items():
            if (value := given.get(key)) is None:
                continue
            right = _seconds(value) if key == "protect" else value
            if isinstance(right, float if key == "protect" else bool):
                values[key] = right
                continue
            effect = "is ignored"
            if key == "store":
                values[key], effect = False, "counts as false"
            self._tell(
                key,
                f"has a wrong value of {key}, which {effect}: {_shown(value)}. Allowed: {allowed}",
            )
        if values.get("report") and not self._allow_reports:
            values["report"] = False
            self._tell(
                "allow_reports",
                "has report, which is ignored: True. Allowed: where the server's "
                "kv_connector_extra_config has allow_reports",
            )
        if "unknown" not in self._told:
            self._tell_unknown(given)
        return Wishes(**values)

    def _tell_unknown(self, given: Mapping[Any, Any]) -> None:
        for key in given:
            if key not in _ALLOWED:
                shown = _shown(key)
                nearest = get_close_matches(shown, _ALLOWED, 1, 0.0)[0]
                self._tell(
                    "unknown",
                    f"has an unknown key, which is ignored: {shown}. Allowed: {_ALL}. "
                    f"Nearest: {nearest}",
                )
                return

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
    if isinstance(value, Mapping):
        return f"an object with {len(value)} keys"
    return f"a value of type {type(value).__name__}"[:_SHOWN]
