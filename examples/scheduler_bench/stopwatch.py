"""Stopwatch: the time of a connector's scheduler side.

It is processor time of the thread, which excludes other work on the machine.
"""

import time
from collections.abc import Callable
from typing import Any

HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "on_new_request",
    "has_pending_push_work",
    "has_pending_block_frees",
    "get_kv_connector_stats",
    "take_events",
)
"""Hooks that vLLM's scheduler calls in its steps, but for some that read an attribute."""


class Stopwatch:
    """Replaces the hooks of ``connector`` by timed ones."""

    def __init__(self, connector: Any) -> None:
        self._nanoseconds = 0
        for name in HOOKS:
            setattr(connector, name, self._timed(getattr(connector, name)))

    def drain(self) -> float:
        """Seconds in all hooks since the last call."""
        seconds = self._nanoseconds / 1e9
        self._nanoseconds = 0
        return seconds

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        now = time.thread_time_ns

        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = now()
            try:
                return call(*arguments, **keywords)
            finally:
                self._nanoseconds += now() - start

        return timed
