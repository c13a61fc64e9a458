"""Ranks that start together, as threads of this process."""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from simple_offload.worker.rank_pool import Peers, RankPool
from tests.simulation.messages import Messages

_T = TypeVar("_T")


def on_ranks(num_ranks: int, call: Callable[[Peers], _T]) -> list[_T]:
    """The results of a call that each rank makes, by number. Raises an error of the first rank that
    has one."""
    messages = Messages(num_ranks)
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(lambda rank: call(messages.of(rank)), range(num_ranks)))


def meet(kinds: Sequence[Hashable]) -> list[RankPool]:
    """The pools of ranks of these kinds, by number."""
    return on_ranks(len(kinds), lambda peers: RankPool.meet(peers, kinds[peers.rank]))
