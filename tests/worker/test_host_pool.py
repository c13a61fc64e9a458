"""HostPool: host regions for every device region, opened chunk by chunk."""

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from simple_offload.memory import MemoryShortageError
from simple_offload.shared_memory import SharedMemory
from simple_offload.worker import host_pool
from simple_offload.worker.host_pool import HostPool
from simple_offload.worker.rank_pool import Peers, RankPool
from tests.conftest import PATIENCE_SECONDS, within_patience
from tests.worker.peers import meet, on_ranks
from tests.worker.scripted import ScriptedBackend, ScriptedError

PAGES = (24, 8)
BLOCK_BYTES = sum(PAGES)
CHUNK_BYTES = 3 * BLOCK_BYTES + 5
"""Room for three blocks."""
MakePool = Callable[..., HostPool]


@pytest.fixture
def backend(no_thread_left: None) -> Iterator[ScriptedBackend]:
    yield (backend := ScriptedBackend(CHUNK_BYTES))
    backend.release()


@pytest.fixture
def make_pool(backend: ScriptedBackend) -> Iterator[MakePool]:
    """A function that makes a pool of ten blocks in chunks of 3, 3, 3 and 1."""
    pools: list[HostPool] = []

    def make(*, is_agreed: bool = True) -> HostPool:
        pools.append(HostPool(backend, PAGES, num_blocks=10, is_agreed=is_agreed))
        return pools[-1]

    yield make
    backend.release()
    for pool in pools:
        within_patience(pool.close)


@pytest.fixture
def pool(make_pool: MakePool) -> HostPool:
    return make_pool()


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
    backend: ScriptedBackend, make_pool: MakePool, chunk_bytes: int, expected: list[int]
) -> None:
    backend.chunk_bytes = chunk_bytes
    pool = make_pool()
    pool.open()
    pool.join()
    assert (pool.num_open, pool.nbytes) == (10, 10 * BLOCK_BYTES)
    shapes = [[tuple(region.shape) for region in chunk] for chunk in backend.chunks]
    assert shapes == [[(n, 24), (n, 8)] for n in expected]
    for chunk in backend.chunks:
        for value, region in enumerate(chunk, start=1):
            assert (region.dtype, region.is_contiguous()) == (torch.int8, True)
            region.add_(value)
        memory = list(chunk[0].untyped_storage())
        assert len(memory) == sum(region.nbytes for region in chunk)
        assert set(memory) == {1, 2}  # 3 if regions overlapped


def test_the_first_chunk_is_open_at_once_and_the_rest_later(
    pool: HostPool, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk's blocks are open when the backend has them: a copy to an open block must find it."""
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
    pool.join()
    assert open_before == [0, 3, 6, 9]
    here = threading.current_thread().name
    assert backend.allocators == [here, *["simple-offload-open"] * 3]


# Failures


def test_a_first_chunk_that_fails_is_an_error_at_start(
    pool: HostPool, backend: ScriptedBackend
) -> None:
    backend.allocation_errors[0] = error = ScriptedError("no memory at all")
    with pytest.raises(ScriptedError) as caught:
        pool.open()
    assert caught.value is error
    assert (pool.num_open, len(backend.allocators)) == (0, 1)


@pytest.mark.parametrize("failing", [1, 3])
def test_a_later_chunk_that_fails_leaves_the_tier_as_it_is(
    pool: HostPool, backend: ScriptedBackend, caplog: pytest.LogCaptureFixture, failing: int
) -> None:
    backend.allocation_errors[failing] = ScriptedError("no more memory")
    pool.open()
    pool.join()
    assert pool.num_open == sum(len(chunk[0]) for chunk in backend.chunks) == 3 * failing
    assert len(backend.allocators) == failing + 1  # it does not ask again
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert f"stays at {3 * failing} of 10 blocks (0.00 GiB): no more memory" in record.getMessage()


def test_a_tier_that_is_short_of_memory_goes_on_when_there_is_more(
    pool: HostPool,
    backend: ScriptedBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another process ends, or a hypervisor gives memory. One log message reports the wait."""
    caplog.set_level("INFO")
    monkeypatch.setattr(host_pool, "_RETRY_SECONDS", 0.0)
    for attempt in (1, 2, 3):
        backend.allocation_errors[attempt] = MemoryShortageError("too little")
    pool.open()
    pool.join()
    assert (pool.num_open, len(backend.allocators)) == (10, 7)
    tier = "The host tier of this rank"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"{tier} waits at 3 of 10 blocks (0.00 GiB) for more memory: too little"),
        ("INFO", f"{tier} is open: 0.00 GiB"),
    ]


# What the ranks agree on


@pytest.mark.parametrize(
    ("agreed", "opened"), [(2, [3]), (3, [3]), (7, [3, 3, 1]), (99, [3, 3, 3, 1])]
)
def test_no_more_than_the_ranks_agree_on(
    backend: ScriptedBackend, make_pool: MakePool, agreed: int, opened: list[int]
) -> None:
    """The first chunk is open before they agree."""
    pool = make_pool(is_agreed=False)
    pool.open()
    assert (pool.is_agreed, pool.num_open) == (False, 3)
    pool.agree(agreed)
    pool.agree(9)  # only the first call counts
    pool.join()
    assert (pool.is_agreed, pool.num_open, pool.num_blocks) == (True, sum(opened), sum(opened))
    assert [len(chunk[0]) for chunk in backend.chunks] == opened


# Closing


def test_closing_while_there_is_no_memory(pool: HostPool, backend: ScriptedBackend) -> None:
    backend.allocation_errors[1] = MemoryShortageError("too little")
    pool.open()
    backend.wait_allocating(1)
    within_patience(pool.close)  # well before its next attempt
    assert pool.num_open == 3


def test_closing_before_the_ranks_agree(backend: ScriptedBackend, make_pool: MakePool) -> None:
    pool = make_pool(is_agreed=False)
    pool.open()
    within_patience(pool.close)
    assert (pool.num_open, len(backend.allocators)) == (3, 1)


# Ranks that share memory


class SharingBackend(ScriptedBackend):
    """Takes shared memory as it takes its own: a test scripts each chunk by its number."""

    numa_node: int | None = None

    def __init__(self, log: list[tuple[int, int, str]], rank: int) -> None:
        super().__init__(CHUNK_BYTES)
        self.are_first: list[bool] = []
        self.moved = threading.Event()
        """Whether it has been given a chunk, or its rank waits for the others."""
        self._steps, self._rank = log, rank

    def use_shared(self, memory: torch.Tensor, *, is_first: bool) -> None:
        number = len(self.are_first)
        self._steps.append((self._rank, number, "begin"))
        self.moved.set()
        self.are_first.append(is_first)
        self.allocate_host(memory.nbytes)
        self._steps.append((self._rank, number, "end"))

    @property
    def shapes(self) -> list[list[tuple[int, ...]]]:
        return [[tuple(region.shape) for region in chunk] for chunk in self.chunks]


class Announcing:
    """A rank's side of the messages that announces each call."""

    def __init__(self, peers: Peers, calls: threading.Event) -> None:
        self._peers, self._calls = peers, calls
        self.rank = peers.rank

    def gather(self, value: Any) -> list[Any]:
        self._calls.set()
        return self._peers.gather(value)


@dataclass
class Ranks:
    """Host pools of ranks, each opened in a thread."""

    backends: list[SharingBackend]
    pools: list[HostPool]
    steps: list[tuple[int, int, str]]
    """Rank, number of the chunk, and "begin" or "end", in order."""
    looks: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released whenever a rank looks whether pages are in place."""

    def open(self) -> list[BaseException | None]:
        """By rank, the error at start."""
        with ThreadPoolExecutor(len(self.pools)) as threads:
            opening = [threads.submit(pool.open) for pool in self.pools]
            return [each.exception(PATIENCE_SECONDS) for each in opening]

    def join(self) -> None:
        for pool in self.pools:
            within_patience(pool.join)

    def wait_looking(self) -> None:
        """Return when a rank has found that pages are not in place, and has looked again."""
        for _ in range(2):
            assert self.looks.acquire(timeout=PATIENCE_SECONDS), "no rank looks"

    @property
    def num_open(self) -> list[int]:
        return [pool.num_open for pool in self.pools]


MakeRanks = Callable[..., Ranks]


@pytest.fixture
def make_ranks(no_thread_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRanks]:
    """A function that makes host pools of ten blocks, in chunks of 3, 3, 3 and 1, on ranks of these
    kinds."""
    made: list[Ranks] = []
    rank_pools: list[RankPool] = []

    def make(kinds: str = "aa", *, is_agreed: bool = True) -> Ranks:
        met = meet(kinds)
        rank_pools.extend(met)
        steps: list[tuple[int, int, str]] = []
        ranks = Ranks([], [], steps)
        for rank, rank_pool in enumerate(met):
            assert rank_pool.peers is not None
            backend = SharingBackend(steps, rank)
            announcing = replace(rank_pool, peers=Announcing(rank_pool.peers, backend.moved))
            pool = HostPool(backend, PAGES, 10, is_agreed=is_agreed, rank_pool=announcing)
            ranks.backends.append(backend)
            ranks.pools.append(pool)
        made.append(ranks)
        return made[-1]

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
    for rank_pool in rank_pools:
        if rank_pool.memory is not None:
            rank_pool.memory.close()


@pytest.fixture
def ranks(make_ranks: MakeRanks) -> Ranks:
    return make_ranks()


def check_same_bytes(one: ScriptedBackend, other: ScriptedBackend) -> None:
    """What one rank writes into a block of a region, the other one finds there, and nowhere
    else."""
    for writer, reader in ((one, other), (other, one)):
        values = iter(range(1, 128))
        written = [
            (number, place, block, next(values))
            for number, chunk in enumerate(writer.chunks)
            for place, region in enumerate(chunk)
            for block in range(len(region))
        ]
        for number, place, block, value in written:
            writer.chunks[number][place][block] = value
        for number, place, block, value in written:
            assert reader.chunks[number][place][block].unique().tolist() == [value]
        for backend in (one, other):
            for chunk in backend.chunks:
                for region in chunk:
                    region.zero_()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_open_the_same_bytes(make_ranks: MakeRanks, num_ranks: int) -> None:
    ranks = make_ranks("a" * num_ranks)
    assert ranks.open() == [None] * num_ranks
    ranks.join()
    first, *others = ranks.backends
    assert ranks.num_open == [10] * num_ranks
    assert first.shapes == [[(n, 24), (n, 8)] for n in (3, 3, 3, 1)]
    for other in others:
        assert other.shapes == first.shapes
        check_same_bytes(first, other)
    assert [backend.are_first for backend in ranks.backends] == [
        [place == 0] * 4 for place in range(num_ranks)
    ]


def test_ranks_of_two_pools_share_nothing(make_ranks: MakeRanks) -> None:
    ranks = make_ranks("abab")
    assert ranks.open() == [None] * 4
    ranks.join()
    for one, other in ((0, 2), (1, 3)):
        check_same_bytes(ranks.backends[one], ranks.backends[other])
    for chunk in ranks.backends[0].chunks:
        chunk[0].fill_(1)
    assert not any(chunk[0].any() for chunk in ranks.backends[1].chunks)


def test_no_page_belongs_to_two_chunks(ranks: Ranks) -> None:
    """Pinning the one would pin a page of the other."""
    ranks.open()
    ranks.join()
    for backend in ranks.backends:
        starts = [chunk[0].data_ptr() for chunk in backend.chunks]
        assert all(start % mmap.PAGESIZE == 0 for start in starts)
        assert {stop - start for start, stop in pairwise(starts)} == {2 << 20}


# One after another


def test_the_first_rank_opens_the_first_chunk_first(ranks: Ranks) -> None:
    first, second = ranks.backends
    gate = first.allocation_gates[0] = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        opening = [threads.submit(pool.open) for pool in ranks.pools]
        first.wait_allocating(0)
        assert second.moved.wait(PATIENCE_SECONDS)
        before = list(ranks.steps), ranks.num_open
        gate.set()
        assert [each.exception(PATIENCE_SECONDS) for each in opening] == [None, None]
    assert before == ([(0, 0, "begin")], [0, 0])
    assert min(ranks.num_open) >= 3


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
    ranks.join()
    assert ranks.num_open == [10, 10]
    for each in range(4):
        assert ranks.steps.index((0, each, "end")) < ranks.steps.index((1, each, "begin"))


def test_ranks_agree_on_fewer_blocks(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(is_agreed=False)
    ranks.open()
    assert ranks.num_open == [3, 3]
    for pool in ranks.pools:
        pool.agree(7)
    ranks.join()
    assert ranks.num_open == [7, 7]
    assert ranks.backends[1].shapes == [[(n, 24), (n, 8)] for n in (3, 3, 1)]
    check_same_bytes(*ranks.backends)


# Failures of one of several ranks


@pytest.mark.parametrize("kinds", ["aabb", "ab"])
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
    ranks.join()
    assert ranks.backends[-1].are_first in ([], [True]), "those that wait have not tried"


def test_a_rank_that_cannot_use_the_first_chunk_fails_alone(ranks: Ranks) -> None:
    """Its device's driver may refuse what others accept."""
    error = ranks.backends[1].allocation_errors[0] = ScriptedError("cannot pin")
    assert ranks.open() == [None, error]
    ranks.join()
    assert ranks.num_open == [10, 0]


@pytest.mark.parametrize("error", [MemoryShortageError("too little"), ScriptedError("broken")])
def test_while_the_first_rank_has_no_more_memory_the_others_wait(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    first, second = ranks.backends
    first.allocation_errors[1] = error
    ranks.open()
    first.wait_allocating(1)
    ranks.wait_looking()
    assert ranks.num_open == [3, 3]
    for pool in ranks.pools[::-1]:
        within_patience(pool.close)  # well before its next attempt
    assert (len(first.are_first), len(second.are_first)) == (2, 1)
    assert len(caplog.records) == 1  # the first one's


def test_when_the_first_rank_has_memory_again_all_go_on(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "_RETRY_SECONDS", 0.0)
    for attempt in (1, 2, 4):
        ranks.backends[0].allocation_errors[attempt] = MemoryShortageError("too little")
    ranks.open()
    ranks.join()
    assert ranks.num_open == [10, 10]
    check_same_bytes(*ranks.backends)


def test_a_rank_that_is_short_of_memory_tries_the_same_chunk_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is short of; the first one has put the pages in place."""
    monkeypatch.setattr(host_pool, "_RETRY_SECONDS", 0.0)
    ranks.backends[1].allocation_errors[2] = MemoryShortageError("too little")
    ranks.open()
    ranks.join()
    assert ranks.num_open == [10, 10]
    check_same_bytes(*ranks.backends)


def test_ranks_without_layers_open_all_of_their_blocks(no_thread_left: None) -> None:
    """A stage of a pipeline may have none. It has chunks of one block then."""
    backends = [SharingBackend([], rank) for rank in range(2)]
    pools = [
        HostPool(backend, [], 3, rank_pool=rank_pool)
        for backend, rank_pool in zip(backends, meet("aa"), strict=True)
    ]
    for pool in pools:
        pool._chunk_blocks = 1
    on_ranks(2, lambda peers: pools[peers.rank].open())
    for pool in pools:
        within_patience(pool.join)
    assert [pool.num_open for pool in pools] == [3, 3]
