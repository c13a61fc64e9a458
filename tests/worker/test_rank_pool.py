"""RankPool: which ranks share host memory, and what each of them copies."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simple_offload import memory, metrics
from simple_offload.backends.base import Direction
from simple_offload.memory import Limit, MemoryShortageError
from simple_offload.metadata import StepMetadata
from simple_offload.replicas import Replicas
from simple_offload.shared_memory import SharedMemory
from simple_offload.transfer import Transfer
from simple_offload.worker import rank_pool
from simple_offload.worker.rank_pool import Peers, RankPool
from tests.worker.conftest import StartWorkers
from tests.worker.kv_memory import small_kv_memory
from tests.worker.memory_process import num_open_files
from tests.worker.peers import here, meet, outcomes, refuse
from tests.worker.rank import drain_stats, run
from tests.worker.scripted import ScriptedBackend, ScriptedError, SharingBackend

# Who copies what: planted bugs in the simulation hold the rest


@given(num_pairs=st.integers(0, 40), size=st.integers(1, 8))
def test_ranks_store_stripes_of_like_length(num_pairs: int, size: int) -> None:
    blocks = range(num_pairs)
    transfer = Transfer.pairing(7, blocks, blocks)
    parts = [RankPool(place, size).own_part(Direction.STORE, transfer) for place in range(size)]
    stripes = [part.host_blocks.tolist() for part in parts]
    assert [*itertools.chain(*stripes)] == [*blocks]
    lengths = list(map(len, stripes))
    assert max(lengths) - min(lengths) <= 1


# Who shares


def shapes(pools: Sequence[RankPool]) -> list[tuple[int, int]]:
    return [(pool.place, pool.size) for pool in pools]


def map_together(pools: Sequence[RankPool]) -> list[torch.Tensor]:
    """By rank, 4096 bytes of its pool's memory, or of its own."""
    parts = []
    for pool in pools:
        if pool.memory is not None:
            pool.memory.map(4096)
        parts.append(torch.zeros(4096) if pool.memory is None else pool.memory.part(0, 4096))
    return parts


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaaa", [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ("aabb", [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ("abab", [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("aaabb", [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]),
        ("aabc", [(0, 2), (1, 2), (0, 1), (0, 1)]),
    ],
)
def test_ranks_of_one_kind_share_memory(
    caplog: pytest.LogCaptureFixture, kinds: str, expected: list[tuple[int, int]]
) -> None:
    num_open = num_open_files()
    pools = meet(kinds)
    assert shapes(pools) == expected
    assert [pool.is_first for pool in pools] == [place == 0 for place, _ in expected]
    assert [pool.memory is None for pool in pools] == [size == 1 for _, size in expected]
    for writer, written in enumerate(parts := map_together(pools)):
        written.fill_(writer + 1)
        for reader, read in enumerate(parts):
            is_seen = bool((read == writer + 1).all())
            assert is_seen == (kinds[reader] == kinds[writer])
    assert caplog.records == []
    del pools
    assert num_open_files() == num_open


def test_ranks_of_other_machines_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers of processes mean nothing here."""
    monkeypatch.setattr(rank_pool, "this_machine", lambda: here.rank // 2)
    assert shapes(meet("aaaa")) == [(0, 2), (1, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("owner", "call", "failing"),
    [
        (SharedMemory, "open", (1,)),  # a rank may not look into another
        (SharedMemory, "open", (2,)),
        (SharedMemory, "open", (1, 2)),
        (SharedMemory, "create", (0,)),  # a system may forbid it (vm.memfd_noexec)
    ],
)
def test_if_a_rank_cannot_have_the_memory_each_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    call: str,
    failing: tuple[int, ...],
) -> None:
    """Others are not concerned."""
    num_open = num_open_files()
    refuse(monkeypatch, owner, call, failing)
    pools = meet("aaabb")
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

    def start(peers: Peers) -> None:
        with pools[peers.rank].others_wait():
            if peers.rank in failing:
                raise ScriptedError(f"of rank {peers.rank}")
        pools[peers.rank].meet_again()

    others = "None"
    if failing:
        others = (
            f"tensor parallel rank {failing[0]} cannot start: ScriptedError: of rank {failing[0]}"
        )
    expected = [f"of rank {rank}" if rank in failing else others for rank in range(5)]
    assert list(map(str, outcomes(5, start))) == expected


# The workers' pools


@pytest.mark.parametrize(
    ("count", "nodes", "host_copies", "expected"),
    [
        (4, [0, 0, 1, 1], "auto", [2, 2, 2, 2]),
        (4, [0, 0, 0, 1], "auto", [4, 4, 4, 4]),
        (4, [None] * 4, "auto", [4, 4, 4, 4]),
        (2, [None] * 4, "auto", [2, 2, 2, 2]),
        (4, [0, 0, 1, 1], "one", [4, 4, 4, 4]),
        (2, [0, 1, 0, 1], "one", [2, 2, 2, 2]),
        (4, [0, 0, 1, 1], "private", [1, 1, 1, 1]),
        (1, [0, 0, 0, 0], "one", [1, 1, 1, 1]),
    ],
)
def test_ranks_with_the_same_kv_share_memory_near_their_devices(
    start_workers: StartWorkers,
    count: int,
    nodes: list[int | None],
    host_copies: str,
    expected: list[int],
) -> None:
    replicas = Replicas(count, frozenset({1}) if count > 1 else frozenset())
    backends = [SharingBackend(numa_node=node) for node in nodes]
    sizes = {"num_cpu_blocks": None, "cpu_bytes_to_use": 1 << 16}
    memories = [small_kv_memory()] * 4
    workers = start_workers(memories, replicas, backends, host_copies=host_copies, **sizes)
    assert len({worker.capacity.num_open for worker in workers}) == 1  # none has some for nothing
    assert [worker.capacity.num_places for worker in workers] == expected
    assert [worker.capacity.private_groups for worker in workers] == [
        frozenset({1}) if places > 1 else frozenset() for places in expected
    ]


@pytest.mark.parametrize(
    ("heads", "backend", "expected"),
    [([2, 2, 2, 1], SharingBackend, [3, 3, 3, 1]), ([2, 2], ScriptedBackend, [1, 1])],
    ids=["other pages", "memory that the runtime must allocate"],
)
def test_ranks_that_cannot_share(
    start_workers: StartWorkers,
    heads: list[int],
    backend: Callable[[], ScriptedBackend],
    expected: list[int],
) -> None:
    memories = list(map(small_kv_memory, heads))
    workers = start_workers(memories, Replicas(len(heads)), [backend() for _ in heads])
    assert [worker.capacity.num_places for worker in workers] == expected


def test_ranks_with_tiers_of_other_sizes_do_not_share(
    start_workers: StartWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of the machine's memory, to which a hypervisor adds some meanwhile. Where a page lies
    depends on the number of blocks."""
    memories = [small_kv_memory() for _ in range(2)]
    monkeypatch.setattr(memory, "limit", lambda: Limit((here.rank + 3) << 20, is_final=True))
    sizes = {"num_cpu_blocks": None, "cpu_bytes_to_use": "50%"}
    workers = start_workers(memories, Replicas(2), **sizes)
    for each, worker in zip(memories, workers, strict=True):
        each.storage.fill_(5)
        run(worker, StepMetadata(stores=[Transfer.pairing(0, [1, 2], [1, 2])]))
    for each, worker in zip(memories, workers, strict=True):
        each.storage.fill_(0)
        run(worker, StepMetadata(loads=[Transfer.pairing(1, [1, 2], [1, 2], "r")]))
        assert each.kv_caches["b"][1:3].view(torch.int8).unique().tolist() == [5]


def test_no_rank_waits_for_one_that_lacks_memory(
    start_workers: StartWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor asks the ranks in order, and would wait for the first one."""
    require, calls = memory.require, itertools.count()

    def short(num_bytes: int) -> None:
        if next(calls) == 1:
            raise MemoryShortageError("another program was quicker")
        require(num_bytes)

    monkeypatch.setattr(memory, "require", short)
    errors = start_workers([small_kv_memory()] * 2, Replicas(2), start=outcomes)
    texts = sorted(map(str, errors), key=len)
    assert texts[0] == "another program was quicker"
    assert texts[1].endswith("cannot start: MemoryShortageError: another program was quicker")


def mapped() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "memfd:simple-offload" in line}


def test_a_shutdown_frees_the_memory(start_workers: StartWorkers) -> None:
    before = mapped()  # other tests' may not have been collected yet
    workers = start_workers([small_kv_memory()] * 2, Replicas(2))
    assert mapped() - before
    for worker in workers:
        worker.shutdown()
    assert [worker.capacity.num_places for worker in workers] == [2, 2]
    assert not mapped() - before


def test_a_rank_that_stores_nothing_samples_no_bandwidth(start_workers: StartWorkers) -> None:
    found = []
    for worker in start_workers([small_kv_memory()] * 2, Replicas(2)):
        run(worker, StepMetadata(stores=[Transfer.pairing(0, [1], [1])]))
        ledger, way = drain_stats(worker), Direction.STORE.value
        samples = ledger.samples(metrics.BANDWIDTH, way)
        found.append((len(samples), ledger(metrics.BYTES, way, "host")))
    assert sorted(found) == [(0, 0), (1, worker.capacity.block_bytes)]
