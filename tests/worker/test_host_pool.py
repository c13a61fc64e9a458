"""HostPool: host regions for every device region, opened chunk by chunk, also by several ranks."""

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from simple_offload.memory import MemoryShortageError
from simple_offload.shared_memory import SharedMemory
from simple_offload.worker.host_pool import HostPool
from tests.conftest import PATIENCE_SECONDS, within_patience
from tests.worker.peers import meet, on_ranks
from tests.worker.scripted import ScriptedBackend, ScriptedError, SharingBackend

PAGES = (24, 8)
BLOCK_BYTES = sum(PAGES)
CHUNK_BYTES = 3 * BLOCK_BYTES + 5
"""Room for three blocks."""


def lengths(backend: ScriptedBackend) -> list[int]:
    """Blocks of each chunk."""
    shapes = [[tuple(region.shape) for region in chunk] for chunk in backend.chunks]
    assert shapes == [[(chunk[0][0], page) for page in PAGES] for chunk in shapes]
    return [chunk[0][0] for chunk in shapes]


@dataclass
class Ranks:
    """Host pools of ranks, each opened in a thread."""

    backends: list[SharingBackend] = field(default_factory=list)
    pools: list[HostPool] = field(default_factory=list)
    looks: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released whenever a rank looks whether pages are in place."""

    def open(self) -> list[BaseException | None]:
        """By rank, the error at start."""
        with ThreadPoolExecutor(len(self.pools)) as threads:
            opening = [threads.submit(pool.open) for pool in self.pools]
            return [each.exception(PATIENCE_SECONDS) for each in opening]

    def open_all(self) -> None:
        """Open all chunks."""
        assert self.open() == [None] * len(self.pools)
        for pool in self.pools:
            within_patience(pool.join)

    def wait_looking(self) -> None:
        """Return when a rank has found that pages are not in place, and has looked again."""
        for _ in range(2):
            assert self.looks.acquire(timeout=PATIENCE_SECONDS), "no rank looks"

    @property
    def num_open(self) -> list[int]:
        return [pool.num_open for pool in self.pools]

    def check_same_bytes(self) -> None:
        """What one rank writes into a block of a region, the others find there, and nowhere
        else."""
        by_rank = [
            [page for chunk in backend.chunks for region in chunk for page in region]
            for backend in self.backends
        ]
        for written in by_rank:
            for value, page in enumerate(written, start=1):
                page.fill_(value)
            for read in by_rank:
                found = [page.unique().tolist() for page in read]
                assert found == [[value] for value in range(1, len(written) + 1)]
            for page in written:
                page.zero_()


MakeRanks = Callable[..., Ranks]


@pytest.fixture
def make_ranks(no_thread_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRanks]:
    """A function that makes host pools of ten blocks, in chunks of 3, 3, 3 and 1, on ranks of these
    kinds. Ranks of one kind share memory."""
    made: list[Ranks] = []
    memories: list[SharedMemory | None] = []

    def make(kinds: str = "aa", chunk_bytes: int = CHUNK_BYTES, **more: Any) -> Ranks:
        made.append(ranks := Ranks())
        for rank_pool in meet(kinds):
            memories.append(rank_pool.memory)
            backend = SharingBackend(chunk_bytes)
            ranks.backends.append(backend)
            ranks.pools.append(HostPool(backend, PAGES, 10, rank_pool=rank_pool, **more))
        return ranks

    num_ready: Any = SharedMemory.num_ready

    def look(memory: SharedMemory) -> int:
        for ranks in made:
            ranks.looks.release()
        return int(num_ready.fget(memory))

    monkeypatch.setattr(SharedMemory, "num_ready", property(look))
    yield make
    for ranks in made:
        for backend in ranks.backends:
            backend.release()
        for pool in ranks.pools:
            within_patience(pool.close)
    for memory in filter(None, memories):
        memory.close()


@pytest.fixture
def ranks(make_ranks: MakeRanks) -> Ranks:
    return make_ranks()


one_or_two = pytest.mark.parametrize("kinds", ["a", "aa"])


# Opening


@pytest.mark.parametrize(
    ("chunk_bytes", "expected"),
    [
        (CHUNK_BYTES, [3, 3, 3, 1]),
        (5 * BLOCK_BYTES, [5, 5]),
        (10 * BLOCK_BYTES, [10]),
        (9 * BLOCK_BYTES, [9, 1]),
        (BLOCK_BYTES - 1, [1] * 10),  # a block must lie in one piece
    ],
)
def test_chunks_have_the_backend_s_size_and_leave_nothing_over(
    make_ranks: MakeRanks, chunk_bytes: int, expected: list[int]
) -> None:
    ranks = make_ranks("a", chunk_bytes=chunk_bytes)
    ranks.open_all()
    (pool,), (backend,) = ranks.pools, ranks.backends
    assert (pool.num_open, pool.nbytes) == (10, 10 * BLOCK_BYTES)
    assert lengths(backend) == expected
    for chunk in backend.chunks:
        for value, region in enumerate(chunk, start=1):
            assert (region.dtype, region.is_contiguous()) == (torch.int8, True)
            region.add_(value)
        memory = list(chunk[0].untyped_storage())
        assert len(memory) == sum(region.nbytes for region in chunk)
        assert set(memory) == {1, 2}  # 3 if regions overlapped


def test_a_large_tier_has_larger_chunks(no_thread_left: None) -> None:
    """The work for a chunk grows with the number of those before."""
    backend = ScriptedBackend(BLOCK_BYTES)
    pool = HostPool(backend, PAGES, 10_000)
    pool.open()
    within_patience(pool.join)
    assert {len(chunk[0]) for chunk in backend.chunks[:-1]} == {2}
    assert pool.num_open == 10_000


def test_the_first_chunk_is_open_at_once_and_the_rest_later(
    no_thread_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk's blocks are open when the backend has them: a copy to an open block must find it."""
    backend = ScriptedBackend(CHUNK_BYTES)
    pool = HostPool(backend, PAGES, 10)
    open_before: list[int] = []
    add = backend.add_host_chunk

    def add_and_look(regions: Sequence[torch.Tensor]) -> None:
        open_before.append(pool.num_open)
        add(regions)

    monkeypatch.setattr(backend, "add_host_chunk", add_and_look)
    gate = backend.allocation_gates[1] = threading.Event()
    pool.open()
    assert (pool.num_open, pool.nbytes) == (3, 3 * BLOCK_BYTES)
    backend.wait_allocating(1)
    assert pool.num_open == 3
    gate.set()
    within_patience(pool.join)
    assert open_before == [0, 3, 6, 9]
    here = threading.current_thread().name
    assert backend.allocators == [here, *["simple-offload-open"] * 3]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_open_the_same_bytes(make_ranks: MakeRanks, num_ranks: int) -> None:
    ranks = make_ranks("a" * num_ranks)
    ranks.open_all()
    assert ranks.num_open == [10] * num_ranks
    assert [lengths(backend) for backend in ranks.backends] == [[3, 3, 3, 1]] * num_ranks
    ranks.check_same_bytes()
    assert [backend.are_first for backend in ranks.backends] == [
        [place == 0] * 4 for place in range(num_ranks)
    ]
    # Pinning a chunk must not pin a page of another.
    for backend in ranks.backends:
        starts = [chunk[0].data_ptr() for chunk in backend.chunks]
        assert all(start % mmap.PAGESIZE == 0 for start in starts)
        assert {stop - start for start, stop in pairwise(starts)} == {2 << 20}


def test_ranks_without_layers_open_all_of_their_blocks(no_thread_left: None) -> None:
    """A stage of a pipeline may have none. Here it has chunks of one block."""
    pools = [HostPool(SharingBackend(1), [], 3, rank_pool=each) for each in meet("aa")]
    on_ranks(2, lambda peers: pools[peers.rank].open())
    for pool in pools:
        within_patience(pool.join)
    assert [(pool.num_open, pool.nbytes) for pool in pools] == [(3, 0)] * 2


# One after another


@pytest.mark.parametrize("number", [1, 3])
def test_the_first_rank_opens_each_chunk_first(ranks: Ranks, number: int) -> None:
    first, _ = ranks.backends
    gate = first.allocation_gates[number] = threading.Event()
    ranks.open()
    first.wait_allocating(number)
    while ranks.num_open[1] < 3 * number:  # the second one opens what is there
        ranks.wait_looking()
    ranks.wait_looking()
    assert ranks.num_open == [3 * number, 3 * number]
    gate.set()
    for pool in ranks.pools:
        within_patience(pool.join)
    assert ranks.num_open == [10, 10]


# What the ranks agree on


@one_or_two
@pytest.mark.parametrize(
    ("agreed", "opened"), [(2, [3]), (3, [3]), (7, [3, 3, 1]), (99, [3, 3, 3, 1])]
)
def test_no_more_than_the_ranks_agree_on(
    make_ranks: MakeRanks, kinds: str, agreed: int, opened: list[int]
) -> None:
    """The first chunk is open before they agree."""
    ranks = make_ranks(kinds, is_agreed=False)
    ranks.open()
    assert [(pool.is_agreed, pool.num_open) for pool in ranks.pools] == [(False, 3)] * len(kinds)
    for pool in ranks.pools:
        pool.agree(agreed)
        pool.agree(9)  # only the first call counts
    for pool, backend in zip(ranks.pools, ranks.backends, strict=True):
        within_patience(pool.join)
        assert (pool.is_agreed, pool.num_open, pool.num_blocks) == (True, *[sum(opened)] * 2)
        assert lengths(backend) == opened
    ranks.check_same_bytes()


# Failures


@pytest.mark.parametrize("kinds", ["b", "aabb", "ab"])
@pytest.mark.parametrize("error", [ScriptedError("no memory"), MemoryShortageError("too little")])
def test_a_first_chunk_that_fails_is_an_error_on_all_ranks(
    make_ranks: MakeRanks, kinds: str, error: Exception
) -> None:
    """Also on those that do not share it: vLLM needs all."""
    ranks = make_ranks(kinds)
    failing = kinds.index("b")
    ranks.backends[failing].allocation_errors[0] = error
    errors = ranks.open()
    assert errors.pop(failing) is error
    for other in errors:
        assert isinstance(other, RuntimeError)
        assert str(error) in str(other)
    assert (ranks.num_open[failing], len(ranks.backends[failing].allocators)) == (0, 1)
    assert ranks.backends[-1].are_first in ([], [True]), "those that wait have not tried"


def test_a_rank_that_cannot_use_the_first_chunk_fails_alone(ranks: Ranks) -> None:
    """Its device's driver may refuse what others accept."""
    error = ranks.backends[1].allocation_errors[0] = ScriptedError("cannot pin")
    assert ranks.open() == [None, error]
    within_patience(ranks.pools[0].join)
    assert ranks.num_open == [10, 0]


@pytest.mark.parametrize("failing", [1, 3])
def test_a_later_chunk_that_fails_leaves_the_tier_as_it_is(
    make_ranks: MakeRanks, caplog: pytest.LogCaptureFixture, failing: int
) -> None:
    ranks = make_ranks("a")
    (backend,) = ranks.backends
    backend.allocation_errors[failing] = ScriptedError("no more memory")
    ranks.open_all()
    assert ranks.num_open == [sum(lengths(backend))] == [3 * failing]
    assert len(backend.allocators) == failing + 1  # it does not ask again
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert f"stays at {3 * failing} of 10 blocks (0.00 GiB): no more memory" in record.getMessage()


@pytest.mark.parametrize(
    ("kinds", "short", "attempts"),
    [("a", 0, [1, 2, 3]), ("aa", 0, [1, 2, 4]), ("aa", 1, [2])],
    ids=["alone", "first", "second"],
)
def test_a_tier_that_is_short_of_memory_goes_on_when_there_is_more(
    make_ranks: MakeRanks,
    caplog: pytest.LogCaptureFixture,
    kinds: str,
    short: int,
    attempts: list[int],
) -> None:
    """Another process ends, or a hypervisor gives memory. It tries the same chunk again, and one
    log message reports each wait."""
    caplog.set_level("INFO")
    ranks = make_ranks(kinds, retry_seconds=0.0)
    backend = ranks.backends[short]
    for attempt in attempts:
        backend.allocation_errors[attempt] = MemoryShortageError("too little")
    ranks.open_all()
    assert ranks.num_open == [10] * len(kinds)
    assert len(backend.allocators) == 4 + len(attempts)
    ranks.check_same_bytes()
    tier = "The host tier of this rank"
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    waits = [message for level, message in told if level == "WARNING"]
    assert told.count(("INFO", f"{tier} is open: 0.00 GiB")) == len(kinds)
    assert len(told) - len(kinds) == len(waits) == (2 if attempts[-1] == 4 else 1)
    at = 3 * attempts[0]
    assert waits[0] == f"{tier} waits at {at} of 10 blocks (0.00 GiB) for more memory: too little"


# Closing


@one_or_two
@pytest.mark.parametrize("error", [MemoryShortageError("too little"), ScriptedError("broken")])
def test_closing_while_the_first_rank_has_no_more_memory(
    make_ranks: MakeRanks, caplog: pytest.LogCaptureFixture, kinds: str, error: Exception
) -> None:
    """The others wait."""
    ranks = make_ranks(kinds)
    ranks.backends[0].allocation_errors[1] = error
    ranks.open()
    ranks.backends[0].wait_allocating(1)
    if len(kinds) > 1:
        ranks.wait_looking()
    for pool in ranks.pools[::-1]:
        within_patience(pool.close)  # well before its next attempt
    assert ranks.num_open == [3] * len(kinds)
    assert [len(backend.allocators) for backend in ranks.backends] == [2, 1][: len(kinds)]
    assert len(caplog.records) == 1  # the first one's


def test_closing_before_the_ranks_agree(make_ranks: MakeRanks) -> None:
    ranks = make_ranks("a", is_agreed=False)
    ranks.open()
    within_patience(ranks.pools[0].close)
    assert (ranks.num_open, len(ranks.backends[0].allocators)) == ([3], 1)
