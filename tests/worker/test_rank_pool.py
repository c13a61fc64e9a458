"""RankPool: which ranks share host memory, and what each of them copies."""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_layout import KVCacheLayout

from simple_offload import memory, metrics
from simple_offload.backends.base import Direction
from simple_offload.config import OffloadConfig
from simple_offload.memory import MemoryShortageError
from simple_offload.metadata import RankCapacity, StepMetadata
from simple_offload.ranks import Ranks
from simple_offload.replicas import Replicas
from simple_offload.shared_memory import Address, SharedMemory
from simple_offload.transfer import Transfer
from simple_offload.worker import rank_pool
from simple_offload.worker.rank_pool import Peers, RankPool
from simple_offload.worker.worker import OffloadWorker
from tests.conftest import within_patience
from tests.simulation.ledger import Ledger
from tests.worker.kv_memory import full, group, make_kv_memory
from tests.worker.peers import meet, on_ranks
from tests.worker.scripted import ScriptedBackend, ScriptedError

LOAD, STORE = Direction
Pair = tuple[int, int]
"""A device block and a host block."""


# Who copies what


def make_transfer(
    num_pairs: int, private: Sequence[bool] = (), num_places: int = 0, first: int = 100
) -> Transfer:
    """A transfer of device blocks 10, 11, ... with host blocks from ``first`` on. By pair, whether
    each of ``num_places`` ranks has a host block of its own."""
    device = np.arange(10, 10 + num_pairs)
    if not num_places:
        return Transfer(7, device, np.arange(first, first + num_pairs), "r", False)
    by_place = np.tile(np.arange(first, first + num_pairs), (num_places, 1))
    for place in range(num_places):
        by_place[place, np.array(private, bool)] += 1000 * place
    return Transfer(7, device, by_place[0].copy(), "r", False, by_place)


def pairs(transfer: Transfer) -> list[Pair]:
    assert transfer.by_place is None  # backends do not know of places
    assert (transfer.id, transfer.request_id, transfer.after_compute) == (7, "r", False)
    return list(zip(transfer.device_blocks.tolist(), transfer.host_blocks.tolist(), strict=True))


def own_parts(direction: Direction, transfer: Transfer, size: int) -> list[list[Pair]]:
    """By place, what the rank there copies."""
    return [pairs(RankPool(place, size).own_part(direction, transfer)) for place in range(size)]


@given(size=st.integers(1, 8), num_pairs=st.integers(0, 40))
def test_a_pool_stores_each_pair_once_and_loads_all_everywhere(size: int, num_pairs: int) -> None:
    """Each rank stores a stripe of neighbours, and none many more than another."""
    transfer = make_transfer(num_pairs)
    everything = pairs(transfer)
    assert own_parts(LOAD, transfer, size) == [everything] * size
    stored = own_parts(STORE, transfer, size)
    assert [pair for part in stored for pair in part] == everything
    lengths = [len(part) for part in stored]
    assert max(lengths) - min(lengths) <= 1


@given(
    private=st.lists(st.booleans(), max_size=30),
    size=st.integers(1, 5),
    num_unused=st.integers(0, 3),
)
def test_each_rank_stores_its_own_contents_of_private_groups(
    private: list[bool], size: int, num_unused: int
) -> None:
    """Into blocks of its own, and loads them from there. Other pools may have more places."""
    num_places = size + num_unused
    transfer = make_transfer(len(private), private, num_places)
    assert transfer.by_place is not None
    everything = [
        list(zip(transfer.device_blocks.tolist(), hosts, strict=True))
        for hosts in transfer.by_place[:size].tolist()
    ]
    assert own_parts(LOAD, transfer, size) == everything
    stored = own_parts(STORE, transfer, size)
    # A pair that all places have alike is shared, and there is one place only where all are.
    is_private = [each and num_places > 1 for each in private]
    shared: list[Pair] = []
    for place, part in enumerate(stored):
        own = [pair for pair, each in zip(everything[place], is_private, strict=True) if each]
        assert [pair for pair in part if pair in own] == own
        shared += [pair for pair in part if pair not in own]
    assert shared == [
        pair for pair, each in zip(everything[0], is_private, strict=True) if not each
    ]
    lengths = [len(part) for part in stored]
    assert max(lengths) - min(lengths) <= 1


# Who shares


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def shapes(pools: Sequence[RankPool]) -> list[tuple[int, int]]:
    return [(pool.place, pool.size) for pool in pools]


def map_together(pools: Sequence[RankPool]) -> list[torch.Tensor]:
    """By rank, 4096 bytes of its pool's memory."""
    parts = []
    for pool in pools:
        assert pool.memory is not None
        pool.memory.map(4096)
        parts.append(pool.memory.part(0, 4096))
    return parts


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaaa", [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ("aabb", [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ("abab", [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("aaabb", [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]),
    ],
)
def test_ranks_of_one_kind_meet(kinds: str, expected: list[tuple[int, int]]) -> None:
    pools = meet(kinds)
    assert shapes(pools) == expected
    assert [pool.is_first for pool in pools] == [place == 0 for place, *_ in expected]
    for writer, written in enumerate(parts := map_together(pools)):
        written.fill_(writer + 1)
        for reader, read in enumerate(parts):
            is_seen = bool((read == writer + 1).all())
            assert is_seen == (kinds[reader] == kinds[writer])


def test_ranks_that_meet_none_have_memory_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    num_open = num_open_files()
    pools = meet("aabc")
    assert shapes(pools)[2:] == [(0, 1)] * 2
    assert [pool.memory is None for pool in pools] == [False, False, True, True]
    map_together(pools[:2])
    assert caplog.records == []
    del pools
    assert num_open_files() == num_open


def test_ranks_of_other_machines_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers of processes mean nothing here."""
    here = threading.local()
    monkeypatch.setattr(rank_pool, "_machine", lambda: here.name)

    def start(peers: Peers) -> RankPool:
        here.name = f"machine {peers.rank // 2}"
        return RankPool.meet(peers, "a")

    assert shapes(on_ranks(4, start)) == [(0, 2), (1, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize("failing", [(1,), (2,), (1, 2)])
def test_if_a_rank_cannot_open_the_memory_each_has_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: tuple[int, ...]
) -> None:
    """As with a rank that may not look into another. Others are not concerned."""
    num_open = num_open_files()
    here = threading.local()
    open_memory = SharedMemory.open

    def try_to_open(address: Address) -> SharedMemory:
        if here.rank in failing:
            raise PermissionError(f"rank {here.rank} may not")
        return open_memory(address)

    monkeypatch.setattr(SharedMemory, "open", try_to_open)

    def start(peers: Peers) -> RankPool:
        here.rank = peers.rank
        return RankPool.meet(peers, "aaabb"[peers.rank])

    pools = on_ranks(5, start)
    assert shapes(pools) == [(0, 1)] * 3 + [(0, 2), (1, 2)]
    assert [pool.memory is None for pool in pools] == [True] * 3 + [False] * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    for message in caplog.messages:
        assert message.startswith("3 ranks have the same KV but cannot share host memory")
        assert message.endswith(f": rank {failing[0]} may not")
    map_together(pools[3:])
    del pools
    assert num_open_files() == num_open


# What the first rank tells the others


@pytest.mark.parametrize("failing", [(0,), (2,), (0, 2), ()])
def test_no_rank_starts_if_one_cannot(failing: tuple[int, ...]) -> None:
    """Whatever its pool: vLLM needs all."""
    pools = meet("aabbc")

    def start(peers: Peers) -> str:
        try:
            with pools[peers.rank].others_wait():
                if peers.rank in failing:
                    raise ScriptedError(f"of rank {peers.rank}")
            pools[peers.rank].meet_again()
        except (ScriptedError, RuntimeError) as error:
            return str(error)
        return "started"

    others = "started"
    if failing:
        others = (
            f"tensor parallel rank {failing[0]} cannot start: ScriptedError: of rank {failing[0]}"
        )
    expected = [f"of rank {rank}" if rank in failing else others for rank in range(5)]
    assert on_ranks(5, start) == expected


def test_a_rank_without_others_waits_for_none() -> None:
    RankPool().meet_again()
    with pytest.raises(ScriptedError, match="its own"), RankPool().others_wait():
        raise ScriptedError("its own")


def test_ranks_that_may_create_no_memory_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may forbid it (vm.memfd_noexec)."""
    create = os.memfd_create
    refused = threading.local()

    def refuse(*arguments: Any) -> int:
        if refused.here:
            raise PermissionError("no memfd")
        return create(*arguments)

    monkeypatch.setattr(os, "memfd_create", refuse)

    def start(peers: Peers) -> RankPool:
        refused.here = peers.rank == 0
        return RankPool.meet(peers, "a" if peers.rank < 2 else "b")

    assert shapes(on_ranks(4, start)) == [(0, 1), (0, 1), (0, 2), (1, 2)]


# The workers' pools


class NearDevice(ScriptedBackend):
    """A backend of a device near a NUMA node."""

    def __init__(self, numa_node: int | None) -> None:
        super().__init__()
        self.numa_node = numa_node

    def use_shared(self, memory: torch.Tensor, *, is_first: bool) -> None:
        """Nothing to prepare."""


def start_workers(
    monkeypatch: pytest.MonkeyPatch,
    backends: Sequence[ScriptedBackend],
    replicas: Replicas,
    heads: Sequence[int] = (),
    **extra_config: Any,
) -> list[RankCapacity]:
    """What the workers of ranks with these backends report at start. ``heads``: KV heads in their
    pages, by rank."""
    here = threading.local()
    monkeypatch.setattr("simple_offload.worker.worker.make_backend", lambda *_: backends[here.rank])
    num_ranks = len(backends)
    config = OffloadConfig.parse({"num_cpu_blocks": 8} | extra_config, num_ranks)

    def start(peers: Peers) -> RankCapacity:
        here.rank = peers.rank
        spec = full(heads[peers.rank] if heads else 2)
        memory = make_kv_memory([group(spec, "a")], 4, KVCacheLayout.LBHNC)
        ranks = Ranks(num_ranks, num_ranks)
        worker = OffloadWorker(memory.config, config, ranks, replicas, lambda: peers)
        try:
            worker.register_kv_caches(memory.kv_caches)
            return worker.capacity
        finally:
            within_patience(worker.shutdown)

    return on_ranks(num_ranks, start)


def num_places(capacities: Sequence[RankCapacity]) -> list[int]:
    return [capacity.num_places for capacity in capacities]


@pytest.mark.usefixtures("no_thread_left", "machine")
@pytest.mark.parametrize(
    ("count", "nodes", "host_copies", "expected"),
    [
        (4, [0, 0, 1, 1], "auto", [2, 2, 2, 2]),
        (4, [0, 0, 0, 1], "auto", [3, 3, 3, 1]),
        (4, [None] * 4, "auto", [4, 4, 4, 4]),
        (2, [None] * 4, "auto", [2, 2, 2, 2]),
        (4, [0, 0, 1, 1], "one", [4, 4, 4, 4]),
        (2, [0, 1, 0, 1], "one", [2, 2, 2, 2]),
        (4, [0, 0, 1, 1], "private", [1, 1, 1, 1]),
        (1, [0, 0, 0, 0], "one", [1, 1, 1, 1]),
    ],
)
def test_ranks_with_the_same_kv_share_memory_near_their_devices(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    nodes: list[int | None],
    host_copies: str,
    expected: list[int],
) -> None:
    replicas = Replicas(count, frozenset({1}) if count > 1 else frozenset())
    capacities = start_workers(
        monkeypatch, list(map(NearDevice, nodes)), replicas, host_copies=host_copies
    )
    assert num_places(capacities) == expected
    assert [capacity.private_groups for capacity in capacities] == [
        frozenset({1}) if places > 1 else frozenset() for places in expected
    ]


@pytest.mark.usefixtures("no_thread_left", "machine")
def test_a_rank_whose_pages_differ_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    capacities = start_workers(
        monkeypatch, [NearDevice(None) for _ in range(4)], Replicas(4), heads=[2, 2, 2, 1]
    )
    assert num_places(capacities) == [3, 3, 3, 1]


@pytest.mark.usefixtures("no_thread_left", "machine")
def test_ranks_whose_memory_the_runtime_must_allocate_share_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capacities = start_workers(monkeypatch, [ScriptedBackend() for _ in range(2)], Replicas(2))
    assert num_places(capacities) == [1, 1]


# Through workers


def start_two(use: Callable[[OffloadWorker], Any]) -> list[Any]:
    """Results of ``use`` for each of two workers that have the same KV; a rank's own error if it
    cannot start."""

    def start(peers: Peers) -> Any:
        kv = make_kv_memory([group(full(), "a")], 4, KVCacheLayout.LBHNC)
        config = OffloadConfig.parse({"num_cpu_blocks": 8}, 2)
        worker = OffloadWorker(kv.config, config, Ranks(2, 2), Replicas(2), lambda: peers)
        try:
            worker.register_kv_caches(kv.kv_caches)
            return use(worker)
        except (RuntimeError, MemoryError) as error:
            return error
        finally:
            worker.shutdown()

    return on_ranks(2, start)


def test_no_rank_waits_for_one_that_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor asks the ranks in order, and would wait for the first one."""
    require, calls = memory.require, itertools.count()

    def short(num_bytes: int) -> None:
        if next(calls) == 1:
            raise MemoryShortageError("another program was quicker")
        require(num_bytes)

    monkeypatch.setattr(memory, "require", short)
    errors = start_two(lambda worker: None)
    texts = sorted(map(str, errors), key=len)
    assert texts[0] == "another program was quicker"
    assert texts[1].endswith("cannot start: MemoryShortageError: another program was quicker")


def mapped() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "memfd:simple-offload" in line}


def test_a_shutdown_frees_the_memory() -> None:
    before = mapped()  # other tests' may not have been collected yet

    def use(worker: OffloadWorker) -> OffloadWorker:
        assert mapped() - before
        return worker

    workers = start_two(use)
    assert [worker.capacity.num_places for worker in workers] == [2, 2]
    assert not mapped() - before


def test_a_rank_that_stores_nothing_samples_no_bandwidth() -> None:
    def use(worker: OffloadWorker) -> list[float]:
        worker.bind(StepMetadata(stores=[Transfer.pairing(0, [1], [1])]))
        worker.submit_stores()
        worker.drain()
        worker.poll()
        ledger = Ledger()
        ledger.add(worker.drain_stats())
        return ledger.samples(metrics.BANDWIDTH, Direction.STORE.value)

    assert sorted(map(len, start_two(use))) == [0, 1]
