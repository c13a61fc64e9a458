"""Ranks that start together, as threads of this process."""

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from simple_offload.worker.rank_pool import Peers, RankPool
from tests.simulation.messages import Messages

_T = TypeVar("_T")
here = threading.local()
"""``here.rank``: that of the calling thread."""


def on_ranks(num_ranks: int, call: Callable[[Peers], _T]) -> list[_T]:
    """The results of a call that each rank makes, by number. Raises an error of the first rank that
    has one."""
    messages = Messages(num_ranks)

    def call_on(rank: int) -> _T:
        here.rank = rank
        return call(messages.of(rank))

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(call_on, range(num_ranks)))


def outcomes(num_ranks: int, call: Callable[[Peers], object]) -> list[Any]:
    """As ``on_ranks``. An error is a rank's result."""

    def attempt(peers: Peers) -> object:
        try:
            return call(peers)
        except Exception as error:  # noqa: BLE001 - the test knows which it expects
            return error

    return on_ranks(num_ranks, attempt)


def refuse(monkeypatch: pytest.MonkeyPatch, owner: Any, call: str, failing: Sequence[int]) -> None:
    """Have a function raise PermissionError on these ranks."""
    original = getattr(owner, call)

    def refuse(*arguments: Any) -> Any:
        if here.rank in failing:
            raise PermissionError(f"rank {here.rank} may not")
        return original(*arguments)

    monkeypatch.setattr(owner, call, refuse)


def meet(kinds: Sequence[Hashable]) -> list[RankPool]:
    """The pools of ranks of these kinds, by number."""
    return on_ranks(len(kinds), lambda peers: RankPool.meet(peers, kinds[peers.rank]))
