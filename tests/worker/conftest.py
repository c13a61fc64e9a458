"""Fixtures for tests of the copy threads and of the worker."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from simple_offload.config import OffloadConfig
from simple_offload.ranks import Ranks
from simple_offload.replicas import Replicas
from simple_offload.worker.rank_pool import Peers
from simple_offload.worker.worker import OffloadWorker
from tests.conftest import Machine, within_patience
from tests.worker.kv_memory import KVMemory
from tests.worker.peers import here, on_ranks
from tests.worker.rank import Rank
from tests.worker.scripted import Bench, ScriptedBackend

MakeRank = Callable[..., Rank]
StartWorkers = Callable[..., list[Any]]


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


@pytest.fixture
def start_workers(
    no_thread_left: None, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartWorkers]:
    """A function that starts workers of ranks with these KV memories, on the host backend unless
    ``backends`` has one for each. They are shut down after the test. ``start``: ``on_ranks``, or
    ``outcomes`` where some may fail. ``num_ranks``: if there are more than those."""
    made: list[OffloadWorker] = []

    def start_workers(
        memories: Sequence[KVMemory],
        replicas: Replicas = Replicas(),  # noqa: B008 - frozen
        backends: Sequence[ScriptedBackend] = (),
        start: Callable[..., list[Any]] = on_ranks,
        num_ranks: int | None = None,
        **extra_config: Any,
    ) -> list[Any]:
        num_ranks = num_ranks or len(memories)
        if backends:
            monkeypatch.setattr(
                "simple_offload.worker.worker.make_backend", lambda *_: backends[here.rank]
            )

        def start_one(peers: Peers) -> OffloadWorker:
            memory = memories[peers.rank]
            worker = OffloadWorker(
                memory.config,
                OffloadConfig.parse(
                    {"num_cpu_blocks": 8} | extra_config, Ranks(num_ranks, num_ranks)
                ),
                Ranks(num_ranks, num_ranks),
                replicas,
                lambda: peers,
                lambda: ("LBHNC", {"a": 1}),
            )
            made.append(worker)
            worker.register_kv_caches(memory.kv_caches)
            return worker

        return start(len(memories), start_one)

    yield start_workers
    for worker in made:
        within_patience(worker.shutdown)
