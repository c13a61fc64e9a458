"""CudaBackend on a GPU: every byte of every requested block, no other byte, in order."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from simple_offload.backends.base import Direction, PagePart
from simple_offload.backends.cuda import copy_costs, queues
from simple_offload.backends.cuda.backend import CopyPath, CudaBackend
from simple_offload.backends.cuda.copy_costs import CopyCosts
from simple_offload.backends.cuda.dma import CudaCopyError, copy_one_by_one
from simple_offload.backends.cuda.queues import CudaQueues
from tests.backends.sides import Blocks, Sides

pytestmark = pytest.mark.gpu

_LIMIT = 1 << 28  # bytes of one region
_BUSY = 200_000_000  # cycles: the compute stream is busy for about 0.1 s
_measured: dict[object, CopyCosts] = {}


@pytest.fixture(params=["batch", "one by one", "kernel", "auto"])
def backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CudaBackend]:
    measure = copy_costs.measure_direction

    def measure_once(
        of_device: CudaQueues, direction: Direction, sizes: Sequence[int], *buffers: torch.Tensor
    ) -> CopyCosts:
        key = (direction, *sizes, of_device.kernel_on is not None)
        if key not in _measured:
            _measured[key] = measure(of_device, direction, sizes, *buffers)
        return _measured[key]

    monkeypatch.setattr(copy_costs, "measure_direction", measure_once)
    if request.param == "one by one":
        monkeypatch.setattr(queues, "resolve_dma", lambda: copy_one_by_one)
    path: CopyPath = request.param if request.param in ("kernel", "auto") else "dma"
    backend = CudaBackend(path)
    yield backend
    torch.cuda.synchronize()
    backend.close()


def make_sides(
    backend: CudaBackend, num_blocks: int, pages: tuple[int, ...], num_chunks: int = 1, **more: Any
) -> Sides:
    """``more``: as for ``Sides``."""
    more |= {"chunk_blocks": -(-num_blocks // num_chunks), "device": "cuda", "checked_on": "cuda"}
    return Sides(backend, pages, num_blocks, **more)


def scattered(num_blocks: int, count: int, seed: int = 1) -> tuple[Blocks, Blocks]:
    """Blocks of the device, and of the host."""
    sides = np.random.default_rng(seed)
    return sides.permutation(num_blocks)[:count], sides.permutation(num_blocks)[:count]


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
    sides = make_sides(backend, num_blocks, (page, 3 * page + 16))
    sides.copy_and_check(direction, *scattered(num_blocks, count))


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("gap", [None, 0, 16, 4, 3])
def test_runs_of_neighbours_across_chunks(
    backend: CudaBackend, direction: Direction, gap: int | None
) -> None:
    """Neighbours merge only where rows are dense. The gap decides the kernel's words."""
    sides = make_sides(backend, 1000, (4096, 8192), num_chunks=7, gap=gap)
    blocks = np.arange(100, 900)
    sides.copy_and_check(direction, blocks, blocks + 50)
    sides.copy_and_check(direction, *scattered(1000, 400))


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    "pages", [(4096, 8192), (4096, 12288), (4096, 12304), (512, 1024, 16 << 10, 64 << 10)]
)
def test_sizes_that_grow(
    backend: CudaBackend, direction: Direction, pages: tuple[int, ...]
) -> None:
    """Driver 580.159 copies these wrongly unless the largest descriptors come first."""
    sides = make_sides(backend, 8_003, pages)
    sides.copy_and_check(direction, *scattered(8_003, 4000, seed=3))


with_and_without_barrier = pytest.mark.parametrize("barrier", [True, False])


@with_and_without_barrier
def test_without_its_barrier_a_store_reads_too_soon(backend: CudaBackend, barrier: bool) -> None:
    """With it, the store reads what the compute before it has written."""
    sides = make_sides(backend, 64, (1 << 20,))
    blocks = np.arange(64)
    sides.device[0].fill_(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * _BUSY)
    sides.device[0].fill_(5)
    sides.copy(Direction.STORE, blocks, blocks, backend.barrier() if barrier else None).wait()
    assert bool((sides.host[0] == (5 if barrier else 1)).all())


@pytest.mark.proves("I3")
@with_and_without_barrier
def test_without_its_barrier_a_load_overtakes_that_compute(
    backend: CudaBackend, barrier: bool
) -> None:
    """With it, compute that was queued before the load reads the old bytes."""
    sides = make_sides(backend, 64, (1 << 20,))
    blocks = np.arange(64)
    sides.device[0].fill_(1)
    sides.fill_host(9)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * _BUSY)
    read = sides.device[0].clone()
    sides.copy(Direction.LOAD, blocks, blocks, backend.barrier() if barrier else None).wait()
    torch.cuda.synchronize()
    assert bool((read == 1).all()) is barrier
    assert bool((sides.device[0] == 9).all())


@pytest.mark.parametrize("hold", [True, False])
def test_compute_that_is_not_held_reads_too_soon(backend: CudaBackend, hold: bool) -> None:
    """Compute that is held reads what was loaded."""
    sides = make_sides(backend, 512, (1 << 20,))
    blocks = np.arange(512)
    sides.device[0].fill_(1)
    sides.fill_host(9)
    read = torch.empty_like(sides.device[0])
    torch.cuda.synchronize()
    pending = sides.copy(Direction.LOAD, blocks, blocks, backend.barrier())
    assert not pending.done()
    if hold:
        pending.hold_compute()
    read.copy_(sides.device[0])
    torch.cuda.synchronize()
    assert bool((read == 9).all()) is hold


def halves(*pages: int) -> list[list[PagePart]]:
    """Four layer groups: each half of each page, for two regions."""
    return [
        [PagePart(region, start, start + page // 2)]
        for region, page in enumerate(pages)
        for start in (0, page // 2)
    ]


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("page", [4 << 10, 256 << 10])
@pytest.mark.parametrize("gap", [None, 16])
def test_loads_by_layer_group(backend: CudaBackend, page: int, gap: int | None, cut: bool) -> None:
    """All bytes come, whether pages are cut or groups have whole pages."""
    pages = page, page
    whole = [[PagePart(0, 0, page)], [PagePart(1, 0, page)]]
    groups = halves(*pages) if cut else whole
    sides = make_sides(backend, 1000, pages, num_chunks=7, gap=gap, groups=groups)
    blocks = np.arange(100, 900)
    for pair in ((blocks, blocks + 50), scattered(1000, 400)):
        expected = sides.expected(Direction.LOAD, *pair)
        found = sides.load_by_layer(*pair, barrier=backend.barrier())
        assert len(found) == len(groups)
        found[-1].wait()
        sides.check(expected)
        for direction in Direction:
            sides.copy_and_check(direction, *pair)


@pytest.mark.proves("I3")
@pytest.mark.parametrize("num_held", range(5))
def test_compute_waits_for_the_layer_groups_that_it_reads(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch, num_held: int
) -> None:
    """Compute that is held for some groups finds their bytes, and not yet those of the next: each
    group has its own hold, and each is needed. Before each group the load's streams are busy."""
    submit = CudaQueues.submit
    streams: set[torch.cuda.Stream] = set()

    def submit_late(*arguments: Any, **keywords: Any) -> Any:
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_BUSY)
        for piece in submit(*arguments, **keywords):
            streams.add(piece.stream)
            yield piece

    page = 1 << 20
    sides = make_sides(backend, 64, (page, page), groups=halves(page, page))
    monkeypatch.setattr(CudaQueues, "submit", submit_late)  # when copies have been measured
    blocks = np.arange(64)
    parts = [sides.device[part.region][:, part.start : part.stop] for (part,) in halves(page, page)]
    reads = [part.clone() for part in parts]  # loads what compute runs below
    sides.load_by_layer(blocks, blocks)[-1].wait()  # its pieces tell the streams
    for region in sides.device:
        region.fill_(1)
    sides.fill_host(9)
    torch.cuda.synchronize()
    groups = sides.load_by_layer(blocks, blocks, barrier=backend.barrier())
    for group in groups[:num_held][-1:]:
        group.hold_compute()
    for read, part in reversed(list(zip(reads, parts, strict=True))):
        read.copy_(part)
    torch.cuda.synchronize()
    arrived = [bool((read == 9).all()) for read in reads]
    assert arrived == [group < num_held for group in range(4)]


def test_compute_marks_tell_the_time_between_them(backend: CudaBackend) -> None:
    before = backend.mark_compute()
    torch.cuda._sleep(_BUSY)
    after = backend.mark_compute()
    assert after.seconds_since(before) is None
    torch.cuda.synchronize()
    assert 0.01 < (after.seconds_since(before) or 0.0) < 1.0


def test_the_remaining_time_of_layer_groups(backend: CudaBackend) -> None:
    """Groups take as long together as whole pages do."""
    page = 1 << 20
    sides = make_sides(backend, 256, (page, page), groups=halves(page, page))
    blocks = np.arange(256)
    for pending in (
        *sides.load_by_layer(blocks, blocks),
        sides.copy(Direction.LOAD, blocks, blocks),
    ):
        pending.wait()  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * _BUSY)
    undivided = sides.copy(Direction.LOAD, blocks, blocks, backend.barrier()).remaining_seconds()
    groups = sides.load_by_layer(blocks, blocks, barrier=backend.barrier())
    remaining = [group.remaining_seconds() for group in groups]
    assert remaining == pytest.approx([group.seconds for group in groups])
    assert max(remaining) < 1.5 * min(remaining)
    assert undivided / 1.5 < sum(remaining) < 1.5 * undivided
    groups[-1].wait()
    assert groups[0].remaining_seconds() <= groups[0].seconds


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("neighbours", [False, True])
def test_a_copy_lets_others_of_its_direction_pass(
    backend: CudaBackend, neighbours: bool, direction: Direction
) -> None:
    """Other copies run one after another on their own stream, like vLLM's copies of each step's
    inputs and sampled tokens.

    By DMA, a store of 2 GiB changes streams 129 times, after every 16 MiB, and each time another
    copy can pass; a load 33 times. On one stream one or two would. The whole copy is queued behind
    compute before its first byte moves. So the time of queueing does not matter, which may be long
    for descriptors that are submitted one by one. The kernel leaves the copy engine idle, and
    hundreds pass.
    """
    sides = make_sides(backend, 1024, (2 << 20,))
    expected, nothing = torch.arange(64), torch.full((64,), -1)
    if direction is Direction.LOAD:
        source, target = expected.pin_memory(), nothing.cuda()
    else:
        source, target = expected.cuda(), nothing.pin_memory()
    stream = torch.cuda.Stream()
    blocks = np.arange(1024)
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY)
    host_blocks = blocks if neighbours else blocks[::-1].copy()
    pending = sides.copy(direction, blocks, host_blocks, backend.barrier())
    torch.cuda.current_stream().synchronize()
    passed = 0
    while not pending.done():
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()
        passed += 1
    assert passed >= (16 if direction is Direction.LOAD else 64)
    assert torch.equal(target.cpu(), expected)
    assert torch.equal(sides.host[0][host_blocks], sides.device[0])


def test_the_remaining_time_of_a_copy_shrinks(backend: CudaBackend) -> None:
    sides = make_sides(backend, 512, (1 << 20,))
    blocks = np.arange(512)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * _BUSY)
    pending = sides.copy(Direction.LOAD, blocks, blocks, backend.barrier())
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
    sides = make_sides(backend, 4096, (16 << 10,))
    blocks = scattered(4096, 1000)  # so few that one list holds them all
    expected = sides.expected(direction, *blocks)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * _BUSY)  # longer than eight pinned allocations
    pending = sides.copy(direction, *blocks, backend.barrier())
    others = [torch.zeros(2000, dtype=torch.int32, pin_memory=True) for _ in range(8)]
    assert not pending.done()
    pending.wait()
    sides.check(expected)
    assert not any(other.any() for other in others)


def test_both_directions_at_once_from_threads(backend: CudaBackend) -> None:
    """Like the copy lanes: one thread per direction, and the kernels' tables are not shared."""
    sides = make_sides(backend, 4096, (8192, 512))
    halves = np.arange(2048), np.arange(2048, 4096)
    rng = np.random.default_rng(5)
    blocks = {
        direction: (rng.permutation(half), rng.permutation(half))
        for direction, half in zip((Direction.LOAD, Direction.STORE), halves, strict=True)
    }
    device, _ = sides.expected(Direction.LOAD, *blocks[Direction.LOAD])
    _, host = sides.expected(Direction.STORE, *blocks[Direction.STORE])

    def run(direction: Direction) -> None:
        backend.enter_thread(direction)
        for _ in range(20):
            sides.copy(direction, *blocks[direction]).wait()

    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, direction) for direction in Direction]:
            done.result()
    sides.check((device, host))


def test_a_refused_copy_fails_when_what_was_queued_has_ended(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = make_sides(backend, 512, (1 << 20,))
    blocks = np.arange(512)
    rng = np.random.default_rng(6)
    submit = CudaQueues.submit
    streams: set[torch.cuda.Stream] = set()

    def submit_and_refuse(*arguments: Any, **keywords: Any) -> Any:
        for piece in submit(*arguments, **keywords):
            streams.add(piece.stream)
            yield piece
        raise CudaCopyError("refused")

    monkeypatch.setattr(CudaQueues, "submit", submit_and_refuse)
    sides.fill_host(9)
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY)
    pairs = rng.permutation(blocks), rng.permutation(blocks)
    with pytest.raises(CudaCopyError, match="refused"):
        sides.copy(Direction.LOAD, *pairs, backend.barrier())
    assert streams
    assert all(stream.query() for stream in streams)
    assert bool((sides.device[0] == 9).any())


def test_blocks_that_are_not_open_are_refused(backend: CudaBackend) -> None:
    sides = make_sides(backend, 8, (4096,))
    with pytest.raises(IndexError, match="host blocks 8 to 8; there are 8"):
        sides.copy(Direction.LOAD, [0], [8], backend.barrier())


def test_memory_is_pinned_while_a_graph_is_captured(backend: CudaBackend) -> None:
    """vLLM captures its graphs while the tier is still being opened."""
    tensor = torch.zeros(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), ThreadPoolExecutor(1) as pool:
        tensor += 1
        pool.submit(backend.allocate_host, 1 << 24).result()
    graph.replay()
    assert bool((tensor == 1).all())


def test_memory_pinned_before_the_device_is_open(backend: CudaBackend) -> None:
    """The pinned memory stays when the measurement's memory is freed."""
    early = backend.allocate_host(1 << 20)
    make_sides(backend, 8, (4096,))
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
    sides = make_sides(backend, 512, (8192,) * 64)
    pending = sides.copy(direction, *scattered(512, 256), backend.barrier())
    pending.wait()
    assert pending.measure().num_bytes == {"kernel": 256 * 64 * 8192}
    assert len(sides.device) == 64  # both sides are there until here


@pytest.mark.parametrize(
    ("backend", "paths"),
    [
        ("batch", {"dma"}),
        ("one by one", {"dma"}),
        ("kernel", {"kernel"}),
        ("auto", {"dma", "kernel"}),
    ],
    indirect=["backend"],
)
def test_a_copy_is_measured(backend: CudaBackend, paths: set[str]) -> None:
    """Each byte is counted once, under one of the paths."""
    sides = make_sides(backend, 64, (1 << 16, 1 << 12))
    blocks = np.arange(0, 64, 2)
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY)
    pending = sides.copy(Direction.STORE, blocks, blocks, backend.barrier())
    pending.wait()
    copied = pending.measure()
    assert copied.seconds is not None
    assert copied.seconds > 0
    assert sum(copied.num_bytes.values()) == len(blocks) * sum(d.shape[1] for d in sides.device)
    assert set(copied.num_bytes) <= paths
