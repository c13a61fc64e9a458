"""Stopwatch: the time of a connector's scheduler side, by hook.

It is processor time of the thread, which excludes other work on the machine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Hook(Enum):
    """The purpose of a hook."""

    LOOKUP = "lookup"
    ALLOCATION = "allocation"
    METADATA = "metadata"
    COMPLETION = "completion"
    FINISH = "finish"
    OTHER = "other"


_HOOKS = {
    "get_num_new_matched_tokens": Hook.LOOKUP,
    "update_state_after_alloc": Hook.ALLOCATION,
    "build_connector_meta": Hook.METADATA,
    "update_connector_output": Hook.COMPLETION,
    "request_finished_all_groups": Hook.FINISH,
    "on_new_request": Hook.OTHER,
    "has_pending_push_work": Hook.OTHER,
    "has_pending_block_frees": Hook.OTHER,
    "get_kv_connector_stats": Hook.OTHER,
    "take_events": Hook.OTHER,
}
"""Hooks that vLLM's scheduler calls in its steps, but for some that read an attribute."""


@dataclass(frozen=True)
class Cost:
    """Seconds in the hooks, of one step or of several."""

    by_hook: dict[Hook, float] = field(default_factory=dict)
    slowest_step: float = 0.0

    @property
    def seconds(self) -> float:
        """In all hooks."""
        return sum(self.by_hook.values())

    def over(self, count: int) -> "Cost":
        """The mean of ``count`` steps; the slowest step does not change."""
        shares = {hook: seconds / count for hook, seconds in self.by_hook.items()}
        return Cost(shares, self.slowest_step)


class Stopwatch:
    """Replaces the hooks of ``connector`` by timed ones."""

    def __init__(self, connector: Any) -> None:
        self._step = dict.fromkeys(Hook, 0)
        self._total = dict.fromkeys(Hook, 0)
        self._slowest = 0
        for name, hook in _HOOKS.items():
            setattr(connector, name, self._timed(getattr(connector, name), hook))

    def end_step(self) -> None:
        """The calls since the last end of a step belong to this step."""
        self._slowest = max(self._slowest, sum(self._step.values()))
        for hook, nanoseconds in self._step.items():
            self._total[hook] += nanoseconds
            self._step[hook] = 0

    def drain(self) -> Cost:
        """The cost of all steps since the last call."""
        cost = Cost({hook: ns / 1e9 for hook, ns in self._total.items()}, self._slowest / 1e9)
        self._total = dict.fromkeys(Hook, 0)
        self._slowest = 0
        return cost

    def _timed(self, call: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        now, step = time.thread_time_ns, self._step

        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = now()
            try:
                return call(*arguments, **keywords)
            finally:
                step[hook] += now() - start

        return timed
