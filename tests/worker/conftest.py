"""Fixtures for tests of the copy threads and of the worker."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import within_patience
from tests.worker.rank import Rank
from tests.worker.scripted import Bench

MakeRank = Callable[..., Rank]


@pytest.fixture
def bench(no_thread_left: None) -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.backend.release()
    within_patience(bench.lane.close)


@pytest.fixture
def make_rank(no_thread_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRank]:
    """A function that makes a Rank with these configuration keywords. With ``register``, all its
    memory is open, and it has reported so."""
    ranks: list[Rank] = []

    def make(register: bool = True, **extra_config: Any) -> Rank:
        rank = Rank(monkeypatch, **extra_config)
        ranks.append(rank)
        if register:
            rank.register()
            assert rank.worker.drain_report() is not None
        return rank

    yield make
    for rank in ranks:
        rank.close()


@pytest.fixture
def rank(make_rank: MakeRank) -> Rank:
    return make_rank()
