"""CudaBackend on a GPU: every byte of every requested block, no other byte, in order."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from simple_offload.backends.base import Direction
from simple_offload.backends.cuda import calibration
from simple_offload.backends.cuda.backend import CopyPath, CudaBackend
from simple_offload.backends.cuda.copy_costs import CopyCosts
from simple_offload.backends.cuda.dma import CudaCopyError, copy_one_by_one
from simple_offload.backends.cuda.queues import CudaQueues
from simple_offload.metadata import Transfer

pytestmark = pytest.mark.gpu

_LIMIT = 1 << 28  # bytes of one region
_BUSY = 200_000_000  # cycles: the compute stream is busy for about 0.1 s


_measured: dict[object, CopyCosts] = {}


@pytest.fixture(params=["batch", "one by one", "kernel", "auto"])
def backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CudaBackend]:
    measure = calibration.measure_direction

    def measure_once(
        queues: CudaQueues, direction: Direction, sizes: list[int], *buffers: torch.Tensor
    ) -> CopyCosts:
        key = (direction, *sizes, bool(queues.kernels))
        if key not in _measured:
            _measured[key] = measure(queues, direction, sizes, *buffers)
        return _measured[key]

    monkeypatch.setattr(calibration, "measure_direction", measure_once)
    path: CopyPath = request.param if request.param in ("kernel", "auto") else "dma"
    backend = CudaBackend(path)
    if request.param == "one by one":
        backend._queues.submit_dma = copy_one_by_one
    yield backend
    torch.cuda.synchronize()
    backend.close()


class Sides:
    """Random bytes on both sides; the host's blocks are in ``num_chunks`` chunks."""

    def __init__(
        self, backend: CudaBackend, num_blocks: int, pages: tuple[int, ...], num_chunks: int = 1
    ) -> None:
        self.device = [
            torch.randint(-128, 128, (num_blocks, page), dtype=torch.int8, device="cuda")
            for page in pages
        ]
        backend.open(self.device)
        self.chunks = []
        per_chunk = -(-num_blocks // num_chunks)
        for first in range(0, num_blocks, per_chunk):
            count = min(per_chunk, num_blocks - first)
            memory = backend.allocate_host(count * sum(pages))
            memory.copy_(torch.randint(-128, 128, memory.shape, dtype=torch.int8, device="cuda"))
            parts = memory.split([count * page for page in pages])
            self.chunks.append([part.view(count, -1) for part in parts])
            backend.add_host_chunk(self.chunks[-1])

    @property
    def host(self) -> list[torch.Tensor]:
        """The host's regions, joined from their chunks, on the device."""
        return [
            torch.cat([part.cuda() for part in parts]) for parts in zip(*self.chunks, strict=True)
        ]

    def fill_host(self, value: int) -> None:
        for chunk in self.chunks:
            for part in chunk:
                part.fill_(value)

    def expected(
        self, direction: Direction, transfer: Transfer
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Expected device and host regions after ``transfer``, on the device."""
        device, host = [region.clone() for region in self.device], self.host
        device_blocks, host_blocks = (
            torch.from_numpy(blocks).cuda()
            for blocks in (transfer.device_blocks, transfer.host_blocks)
        )
        for d, h in zip(device, host, strict=True):
            if direction is Direction.LOAD:
                d[device_blocks] = h[host_blocks]
            else:
                h[host_blocks] = d[device_blocks]
        return device, host

    def copy_and_check(
        self, backend: CudaBackend, direction: Direction, transfer: Transfer
    ) -> None:
        device, host = self.expected(direction, transfer)
        backend.copy(direction, transfer, backend.barrier()).wait()
        for wanted, now in zip((*device, *host), (*self.device, *self.host), strict=True):
            assert torch.equal(now, wanted)


def scattered(num_blocks: int, count: int, seed: int = 1) -> Transfer:
    sides = np.random.default_rng(seed)
    return Transfer(0, sides.permutation(num_blocks)[:count], sides.permutation(num_blocks)[:count])


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    ("page", "count"),
    [
        (512, 1),
        (512, 20_000),
        (4 << 10, 20_000),
        (1000, 333),  # no power of two
        (4097, 100),
        (4100, 700),
        (16 << 10, 4096),
        (128 << 10, 512),
        (1 << 20, 64),
        (5 << 19, 24),  # Qwen3-14B's block of 16 tokens
        (4 << 20, 20),
    ],
)
def test_blocks_and_nothing_else(
    backend: CudaBackend, direction: Direction, page: int, count: int
) -> None:
    num_blocks = min(2 * count + 3, max(count + 1, _LIMIT // page))
    sides = Sides(backend, num_blocks, (page, 3 * page + 16))
    sides.copy_and_check(backend, direction, scattered(num_blocks, count))


@pytest.mark.parametrize("direction", list(Direction))
def test_runs_of_neighbours_across_chunks(backend: CudaBackend, direction: Direction) -> None:
    sides = Sides(backend, 1000, (4096, 8192), num_chunks=7)
    blocks = np.arange(100, 900)
    sides.copy_and_check(backend, direction, Transfer(0, blocks, blocks + 50))
    sides.copy_and_check(backend, direction, scattered(1000, 400))


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    "pages", [(4096, 8192), (4096, 12288), (4096, 12304), (512, 1024, 16 << 10, 64 << 10)]
)
def test_sizes_that_grow(
    backend: CudaBackend, direction: Direction, pages: tuple[int, ...]
) -> None:
    """Driver 580.159 copies these wrongly unless the largest descriptors come first."""
    sides = Sides(backend, 8_003, pages)
    sides.copy_and_check(backend, direction, scattered(8_003, 4000, seed=3))


def test_a_store_waits_for_the_compute_that_fills_its_blocks(backend: CudaBackend) -> None:
    sides = Sides(backend, 64, (1 << 20,))
    blocks = np.arange(64)
    sides.fill_host(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY)
    sides.device[0].fill_(5)
    backend.copy(Direction.STORE, Transfer(0, blocks, blocks), backend.barrier()).wait()
    assert bool((sides.host[0] == 5).all())


def test_without_its_barrier_a_store_reads_too_soon(backend: CudaBackend) -> None:
    sides = Sides(backend, 64, (1 << 20,))
    blocks = np.arange(64)
    sides.device[0].fill_(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * _BUSY)
    sides.device[0].fill_(5)
    backend.copy(Direction.STORE, Transfer(0, blocks, blocks), None).wait()
    assert bool((sides.host[0] == 1).all())


def load_while_compute_reads(backend: CudaBackend, *, barrier: bool) -> tuple[bool, bool]:
    """Whether compute that was queued before a load has read the old bytes, and whether the load
    has written the new ones."""
    sides = Sides(backend, 64, (1 << 20,))
    blocks = np.arange(64)
    sides.device[0].fill_(1)
    sides.fill_host(9)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * _BUSY)
    read = sides.device[0].clone()
    load = Transfer(0, blocks, blocks)
    backend.copy(Direction.LOAD, load, backend.barrier() if barrier else None).wait()
    torch.cuda.synchronize()
    return bool((read == 1).all()), bool((sides.device[0] == 9).all())


def test_a_load_waits_for_the_compute_that_reads_its_blocks(backend: CudaBackend) -> None:
    assert load_while_compute_reads(backend, barrier=True) == (True, True)


@pytest.mark.proves("I3")
def test_without_its_barrier_a_load_overtakes_that_compute(backend: CudaBackend) -> None:
    assert load_while_compute_reads(backend, barrier=False) == (False, True)


def read_behind_a_load(backend: CudaBackend, *, hold: bool) -> bool:
    """Whether compute that is queued during a load reads all of the loaded bytes."""
    sides = Sides(backend, 512, (1 << 20,))
    blocks = np.arange(512)
    sides.device[0].fill_(1)
    sides.fill_host(9)
    read = torch.empty_like(sides.device[0])
    torch.cuda.synchronize()
    pending = backend.copy(Direction.LOAD, Transfer(0, blocks, blocks), backend.barrier())
    assert not pending.done()
    if hold:
        pending.hold_compute()
    read.copy_(sides.device[0])
    torch.cuda.synchronize()
    return bool((read == 9).all())


def test_compute_that_is_held_reads_what_was_loaded(backend: CudaBackend) -> None:
    assert read_behind_a_load(backend, hold=True)


def test_compute_that_is_not_held_reads_too_soon(backend: CudaBackend) -> None:
    assert not read_behind_a_load(backend, hold=False)


@pytest.mark.parametrize("neighbours", [False, True])
def test_a_store_lets_others_copy_from_the_device(backend: CudaBackend, neighbours: bool) -> None:
    """Other copies run one after another on their own stream, like vLLM's copies of each step's
    sampled tokens.

    By DMA, 2 GiB change streams 129 times, after every 16 MiB, and each time another copy can pass.
    If they changed only after parts of 64 MiB, 33 would pass; on one stream one or two. The whole
    store is queued behind compute before its first byte moves. So the time of queueing does not
    matter, which may be long for descriptors that are submitted one by one. The kernel leaves the
    copy engine idle, and hundreds pass.
    """
    sides = Sides(backend, 1024, (2 << 20,))
    sampled, expected = torch.arange(64, device="cuda"), torch.arange(64)
    tokens = torch.empty(64, dtype=torch.int64, pin_memory=True)
    stream = torch.cuda.Stream()
    blocks = np.arange(1024)
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY)
    step = 1 if neighbours else -1
    store = Transfer(0, blocks, blocks[::step].copy())
    pending = backend.copy(Direction.STORE, store, backend.barrier())
    torch.cuda.current_stream().synchronize()
    passed = 0
    while not pending.done():
        tokens.fill_(-1)
        with torch.cuda.stream(stream):
            tokens.copy_(sampled, non_blocking=True)
        stream.synchronize()
        assert torch.equal(tokens, expected)
        passed += 1
    assert passed >= 64
    assert torch.equal(sides.host[0][blocks[::step].copy()], sides.device[0])


def test_the_remaining_time_of_a_copy_shrinks(backend: CudaBackend) -> None:
    sides = Sides(backend, 512, (1 << 20,))
    blocks = np.arange(512)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * _BUSY)
    pending = backend.copy(Direction.LOAD, Transfer(0, blocks, blocks), backend.barrier())
    assert len(pending.marks) >= 4  # though all blocks are neighbours
    whole = pending.remaining_seconds()
    assert whole > (512 << 20) / 200e9  # faster than any bus there is
    pending.wait()
    assert pending.done()
    assert pending.remaining_seconds() <= whole
    assert len(pending.marks) == 1
    assert torch.equal(sides.device[0], sides.host[0])


@pytest.mark.parametrize("direction", list(Direction))
def test_memory_that_the_kernel_reads_is_not_reused(
    backend: CudaBackend, direction: Direction
) -> None:
    """The kernel reads the lists of blocks from host memory, which stays allocated during the
    copy."""
    sides = Sides(backend, 4096, (16 << 10,))
    transfer = scattered(4096, 1000)  # so few that one list holds them all
    device, host = sides.expected(direction, transfer)
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY)
    pending = backend.copy(direction, transfer, backend.barrier())
    others = [torch.zeros(2000, dtype=torch.int32, pin_memory=True) for _ in range(8)]
    assert not pending.done()
    pending.wait()
    for wanted, now in zip((*device, *host), (*sides.device, *sides.host), strict=True):
        assert torch.equal(now, wanted)
    assert not any(other.any() for other in others)


def test_both_directions_at_once_from_threads(backend: CudaBackend) -> None:
    """Like the copy lanes: one thread per direction, and the kernels' tables are not shared."""
    sides = Sides(backend, 4096, (8192, 512))
    halves = np.arange(2048), np.arange(2048, 4096)
    rng = np.random.default_rng(5)
    transfers = {
        Direction.LOAD: Transfer(0, rng.permutation(halves[0]), rng.permutation(halves[0])),
        Direction.STORE: Transfer(1, rng.permutation(halves[1]), rng.permutation(halves[1])),
    }
    device = sides.expected(Direction.LOAD, transfers[Direction.LOAD])[0]
    host = sides.expected(Direction.STORE, transfers[Direction.STORE])[1]
    errors = []

    def run(direction: Direction) -> None:
        try:
            backend.enter_thread(direction)
            for _ in range(20):
                backend.copy(direction, transfers[direction], None).wait()
        except Exception as error:  # noqa: BLE001 - raised below, on the test's thread
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=(direction,)) for direction in Direction]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for wanted, now in zip((*device, *host), (*sides.device, *sides.host), strict=True):
        assert torch.equal(now, wanted)


def test_a_refused_copy_fails_when_what_was_queued_has_ended(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = Sides(backend, 512, (1 << 20,))
    blocks = np.arange(512)
    rng = np.random.default_rng(6)
    queues = backend._queues
    monkeypatch.setattr(queues, "submit", refusing_behind(queues.submit))
    sides.fill_host(9)
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY)
    load = Transfer(0, rng.permutation(blocks), rng.permutation(blocks))
    with pytest.raises(CudaCopyError, match="refused"):
        backend.copy(Direction.LOAD, load, backend.barrier())
    streams = queues._streams[Direction.LOAD], queues._kernel_streams[Direction.LOAD]
    assert all(stream.query() for stream in streams)
    assert bool((sides.device[0] == 9).any())


def refusing_behind(submit: Callable[..., Any]) -> Callable[..., Any]:
    def submit_and_refuse(*arguments: Any, **named: Any) -> Any:
        yield from submit(*arguments, **named)
        raise CudaCopyError("refused")

    return submit_and_refuse


def test_blocks_that_are_not_open_are_refused(backend: CudaBackend) -> None:
    Sides(backend, 8, (4096,))
    blocks = np.array([8])
    with pytest.raises(IndexError, match="host blocks 8 to 8; there are 8"):
        backend.copy(Direction.LOAD, Transfer(0, np.array([0]), blocks), backend.barrier())


def test_memory_is_pinned_while_a_graph_is_captured(backend: CudaBackend) -> None:
    """vLLM captures its graphs while the tier is still being opened."""
    tensor = torch.zeros(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    errors = []

    def pin() -> None:
        try:
            backend.allocate_host(1 << 24)
        except Exception as error:  # noqa: BLE001 - raised below, on the test's thread
            errors.append(error)

    with torch.cuda.graph(graph):
        tensor += 1
        thread = threading.Thread(target=pin)
        thread.start()
        thread.join()
    graph.replay()
    assert not errors
    assert bool((tensor == 1).all())


def test_memory_pinned_before_the_device_is_open(backend: CudaBackend) -> None:
    """The pinned memory stays when the measurement's memory is freed."""
    early = backend.allocate_host(1 << 20)
    Sides(backend, 8, (4096,))
    copied = early.cuda(non_blocking=True)
    torch.cuda.synchronize()
    assert early.is_pinned()
    assert torch.equal(copied.cpu(), early)


@pytest.mark.parametrize("backend", ["auto"], indirect=True)
@pytest.mark.parametrize("direction", list(Direction))
def test_small_pages_of_many_regions_go_by_kernel(
    backend: CudaBackend, direction: Direction
) -> None:
    """Each region alone has few pages."""
    sides = Sides(backend, 512, (8192,) * 64)
    transfer = scattered(512, 256)
    pending = backend.copy(direction, transfer, backend.barrier())
    pending.wait()
    assert pending.measure().num_bytes == {"kernel": 256 * 64 * 8192, "dma": 0}
    assert len(sides.device) == 64  # both sides are there until here


def test_memory_beyond_the_available(backend: CudaBackend) -> None:
    with pytest.raises(MemoryError, match="GiB available"):
        backend.allocate_host(1 << 50)


def test_a_copy_is_measured(backend: CudaBackend) -> None:
    """Each byte is counted once, under one of the paths."""
    sides = Sides(backend, 64, (1 << 16, 1 << 12))
    blocks = np.arange(0, 64, 2)
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY)
    pending = backend.copy(Direction.STORE, Transfer(0, blocks, blocks), backend.barrier())
    pending.wait()
    copied = pending.measure()
    assert copied.seconds is not None
    assert copied.seconds > 0
    assert sum(copied.num_bytes.values()) == len(blocks) * sum(d.shape[1] for d in sides.device)
    assert copied.num_bytes.keys() == {"dma", "kernel"}
    if backend._copy_path != "auto":
        assert copied.num_bytes["kernel"] > 0 or backend._copy_path == "dma"
        assert copied.num_bytes["dma"] > 0 or backend._copy_path == "kernel"
