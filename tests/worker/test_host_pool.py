"""HostPool: host regions for every device region, opened chunk by chunk."""

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from simple_offload.memory import MemoryShortageError
from simple_offload.worker import host_pool
from simple_offload.worker.host_pool import HostPool
from tests.conftest import within_patience
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
