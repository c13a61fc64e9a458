"""Rows: for a second tier, the pages of all ranks lie side by side in one memory."""

import mmap
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from simple_offload.config import ConfigError
from simple_offload.metadata import RankCapacity, StepMetadata
from simple_offload.replicas import Replicas
from simple_offload.shared_memory import SEAL_BYTES, SharedMemory
from simple_offload.transfer import Transfer
from simple_offload.worker import rank_pool
from simple_offload.worker.host_pool import HostPool
from simple_offload.worker.rank_pool import Peers, RankPool, row_bytes
from simple_offload.worker.worker import OffloadWorker
from tests.simulation.messages import Messages
from tests.worker.conftest import StartWorkers
from tests.worker.kv_memory import KVMemory, full, small_kv_memory
from tests.worker.memory_process import num_open_files
from tests.worker.peers import here, on_ranks, outcomes, refuse
from tests.worker.rank import run
from tests.worker.scripted import ScriptedBackend, SharingBackend

PAGE = mmap.PAGESIZE
Pages = tuple[int, ...]
"""Bytes of one rank's pages of a block, by region."""
SECOND_TIER = {"type": "fs", "root_dir": "/nowhere", "bytes": "1TiB"}


# Where bytes lie


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(1, PAGE), (PAGE - 32, PAGE), (PAGE - 31, 2 * PAGE), (9 * PAGE, 10 * PAGE)],
)
def test_a_row_has_whole_pages_of_memory_and_room_for_a_seal(num_bytes: int, expected: int) -> None:
    assert (row_bytes(num_bytes), SEAL_BYTES) == (expected, 32)


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize(
    ("kinds", "pages", "starts", "num_pages"),
    [
        ("abc", [(65,), (64, 1, 64), (5000,)], [0, 128, 320], 2),
        ("aabb", [(100,), (100,), (4000,), (4000,)], [0, 0, 128, 128], 2),
        ("abab", [(100,), (30, 40), (100,), (30, 40)], [0, 128, 0, 128], 1),
    ],
)
def test_each_kind_of_ranks_has_a_part_of_every_row(
    kinds: str, pages: list[Pages], starts: list[int], num_pages: int
) -> None:
    """Rows follow each other without a gap, whatever the chunks. Nothing writes to the bytes
    between the parts. What one rank writes, those of its kind find."""
    num_ranks, num_blocks, num_bytes = len(kinds), 10, num_pages * PAGE
    backends = [SharingBackend(3 * num_bytes + 5) for _ in kinds]

    def start(peers: Peers) -> tuple[RankPool, HostPool]:
        rank = peers.rank
        rank_pool = RankPool.meet_in_rows(peers, kinds[rank], sum(pages[rank]))
        pool = HostPool(backends[rank], pages[rank], num_blocks, rank_pool=rank_pool)
        pool.open()
        pool.join()
        return rank_pool, pool

    started = on_ranks(num_ranks, start)
    rank_pools = [rank_pool for rank_pool, _ in started]
    assert [pool.nbytes for _, pool in started] == [num_blocks * num_bytes] * num_ranks
    address = rank_pools[0].address
    assert address is not None
    memory = SharedMemory.open(address)  # as the scheduler's process does
    memory.map(num_blocks * num_bytes)
    rows = memory.part(0, num_blocks * num_bytes).numpy().reshape(num_blocks, num_bytes)
    expected = np.zeros_like(rows)
    random = np.random.default_rng(0)
    for rank, backend in enumerate(backends):
        assert [len(chunk[0]) for chunk in backend.chunks] == [3, 3, 3, 1]
        place = starts[rank]
        assert place % 64 == 0
        # Pinning one chunk must not pin a page of the next.
        assert all((chunk[0].data_ptr() - place) % PAGE == 0 for chunk in backend.chunks)
        for region, page in enumerate(pages[rank]):
            content = random.integers(-128, 128, (num_blocks, page), np.int8)
            for chunk, part in zip(backend.chunks, np.split(content, [3, 6, 9]), strict=True):
                chunk[region].copy_(torch.from_numpy(part))
            expected[:, place : place + page] = content
            place += page
    assert (rows == expected).all()
    for rank, kind in enumerate(kinds):
        alike = backends[kinds.index(kind)].chunks
        for own, other in zip(backends[rank].chunks, alike, strict=True):
            assert all(map(torch.equal, own, other))
    for pool in rank_pools:
        pool.free()


# Who meets


def refusals(num_ranks: int) -> list[str]:
    """By rank, the message that refuses its start."""
    errors = outcomes(num_ranks, lambda peers: RankPool.meet_in_rows(peers, peers.rank, 100))
    assert {type(error) for error in errors} == {ConfigError}
    return list(map(str, errors))


def test_ranks_of_two_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the machine that has most of them."""
    num_open = num_open_files()
    monkeypatch.setattr(rank_pool, "this_machine", lambda: here.rank // 2)
    for message in refusals(3):
        assert message.startswith("second_tier: ")
        assert "only 2 of 3 ranks are on this machine" in message
        assert message.endswith("Allowed: one machine for all ranks, or no second_tier")
    assert num_open_files() == num_open


@pytest.mark.parametrize(
    ("owner", "call", "failing"),
    [
        (SharedMemory, "create", (0,)),
        (SharedMemory, "create", (0, 1, 2)),
        (SharedMemory, "open", (2,)),
        (SharedMemory, "open", (1, 2)),
    ],
)
def test_if_a_rank_cannot_have_the_memory_none_starts(
    monkeypatch: pytest.MonkeyPatch, owner: Any, call: str, failing: tuple[int, ...]
) -> None:
    """As with a rank that may not look into another, or where the system allows no memfd."""
    num_open = num_open_files()
    refuse(monkeypatch, owner, call, failing)
    for message in refusals(3):
        assert f"rank {failing[0]} may not" in message
    assert num_open_files() == num_open


# Through workers

NUM_BLOCKS = 4
PAGES = full().page_size_bytes
"""Bytes of a rank's page of two heads, in each of two layers."""


@pytest.fixture
def start_workers(start_workers: StartWorkers) -> StartWorkers:
    """With a second tier."""
    return partial(start_workers, second_tier=SECOND_TIER)


def capacities(workers: Sequence[OffloadWorker]) -> list[RankCapacity]:
    return [worker.capacity for worker in workers]


def fill(memory: KVMemory, value: int) -> None:
    """Block b is filled with value + b."""
    for view in memory.kv_caches.values():
        for block, page in enumerate(view):
            page.view(torch.int8).fill_(value + block)


def values(memory: KVMemory) -> list[set[int]]:
    """By block, the bytes in it."""
    views = memory.kv_caches.values()
    return [
        {int(byte) for view in views for byte in view[block].contiguous().view(torch.int8).unique()}
        for block in range(NUM_BLOCKS)
    ]


@pytest.mark.parametrize(
    ("replicas", "host_copies", "heads", "num_places"),
    [
        (Replicas(2), "auto", [2, 2], [2, 2]),
        (Replicas(2), "one", [2, 2], [2, 2]),
        (Replicas(2), "private", [2, 2], [1, 1]),
        (Replicas(2, frozenset({0})), "auto", [2, 2], [1, 1]),
        (Replicas(3), "auto", [2, 2, 1], [2, 2, 1]),  # in doubt, the pages decide
    ],
)
def test_only_ranks_with_the_same_kv_share_a_part(
    start_workers: StartWorkers,
    replicas: Replicas,
    host_copies: str,
    heads: list[int],
    num_places: list[int],
) -> None:
    memories = [small_kv_memory(each) for each in heads]
    workers = start_workers(memories, replicas, host_copies=host_copies)
    assert [each.num_places for each in capacities(workers)] == num_places
    assert {each.private_groups for each in capacities(workers)} == {frozenset()}
    for rank, worker in enumerate(workers):
        fill(memories[rank], 10 * (rank + 1))
        run(worker, StepMetadata(stores=[Transfer.pairing(0, [1, 2], [1, 2])]))
    for rank, worker in enumerate(workers):
        run(worker, StepMetadata(loads=[Transfer.pairing(1, [0, 3], [1, 2], "r")]))
        first, second = values(memories[rank])[::3]
        # Of ranks that share a part, each has stored one of these blocks.
        own = 10 * (rank + 1)
        shares = num_places[rank] > 1
        assert (first, second) == (({11}, {22}) if shares else ({own + 1}, {own + 2}))
    # A part's start is in its layout, and so in the namespace: rows may be as long without sharing.
    layouts = {str(each.layout) for each in capacities(workers)}
    assert len(layouts) == len(heads) - max(num_places) + 1


def test_ranks_share_memory_however_far_their_devices_are_apart(
    start_workers: StartWorkers,
) -> None:
    """A row must lie in one memory."""
    backends = [SharingBackend(numa_node=node) for node in (0, 1)]
    workers = start_workers([small_kv_memory()] * 2, Replicas(2), backends)
    assert [each.num_places for each in capacities(workers)] == [2, 2]


def test_memory_that_a_runtime_must_allocate_is_refused(
    start_workers: StartWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a message to other ranks, so that none waits."""
    monkeypatch.setattr(Messages, "gather", lambda *_: pytest.fail("it asks"))
    backends = [ScriptedBackend() for _ in range(2)]
    for error in start_workers([small_kv_memory()] * 2, Replicas(2), backends, outcomes):
        assert isinstance(error, ConfigError)
        assert str(error).startswith("second_tier: ")
        assert str(error).endswith("(backend='auto'); allowed: none")


# The address


def test_the_address_is_good_until_shutdown(start_workers: StartWorkers) -> None:
    num_open = num_open_files()
    workers = start_workers([small_kv_memory(), small_kv_memory(3)])
    address, told_by_the_other = (each.memory for each in capacities(workers))
    assert address is not None
    assert told_by_the_other is None
    # A forked child would inherit descriptors, and keep the memory: there is one only.
    assert num_open_files() == num_open + 1
    for _ in range(2):
        SharedMemory.open(address).close()
    workers[1].shutdown()
    SharedMemory.open(address).close()
    workers[0].shutdown()
    with pytest.raises(OSError, match=f"/proc/{os.getpid()}/fd/{address.descriptor}"):
        SharedMemory.open(address)
    assert num_open_files() == num_open
    assert workers[0].capacity.memory == address  # vLLM may still ask


# Sizes


@pytest.mark.parametrize(
    ("heads", "count", "extra_config", "expected"),
    [
        ([2], 1, {"cpu_bytes_to_use": 10 * PAGE + PAGE // 2}, 10),
        ([2], 1, {"num_cpu_blocks": 7}, 7),
        ([2, 3], 1, {"cpu_bytes_to_use": 10 * PAGE}, 10),
        ([2, 3], 1, {"cpu_bytes_to_use_per_rank": 10 * PAGE}, 20),
        ([2, 2], 2, {"cpu_bytes_to_use_per_rank": 10 * PAGE}, 20),
        ([10, 30], 1, {"cpu_bytes_to_use": 20 * PAGE}, 10),
        ([30, 30], 2, {"cpu_bytes_to_use": 20 * PAGE}, 10),
        ([30, 30], 1, {"cpu_bytes_to_use": 21 * PAGE}, 7),
    ],
)
def test_bytes_count_rows_with_their_padding(
    start_workers: StartWorkers,
    heads: list[int],
    count: int,
    extra_config: dict[str, Any],
    expected: int,
) -> None:
    """A page of a head has 96 bytes, and a block two pages of each head."""
    extra_config = {"num_cpu_blocks": None} | extra_config
    workers = start_workers(list(map(small_kv_memory, heads)), Replicas(count), **extra_config)
    assert [(each.num_host_blocks, each.num_open) for each in capacities(workers)] == [
        (expected, expected)
    ] * len(heads)


def test_too_few_bytes_for_rows_are_refused(start_workers: StartWorkers) -> None:
    sizes = {"num_cpu_blocks": None, "cpu_bytes_to_use": 2 * PAGE - 1}
    for error in start_workers([small_kv_memory()] * 2, start=outcomes, **sizes):
        assert isinstance(error, ConfigError)
        assert f"cpu_bytes_to_use={2 * PAGE - 1}" in str(error)
        assert f"at least 2, that is {2 * PAGE} bytes per 2 ranks" in str(error)


# What decides the bytes


def test_ranks_tell_how_their_pages_are_laid_out(start_workers: StartWorkers) -> None:
    workers = start_workers([small_kv_memory(), small_kv_memory(1)])
    assert [each.layout for each in capacities(workers)] == [
        (0, [PAGES, PAGES], "LBHNC", {"a": 1}),
        (2 * PAGES, [PAGES // 2, PAGES // 2], "LBHNC", {"a": 1}),
    ]
    assert [each.block_bytes for each in capacities(workers)] == [2 * PAGES, PAGES]
    assert {each.row_bytes for each in capacities(workers)} == {PAGE}
