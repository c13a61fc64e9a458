"""CudaBackend on a GPU: every byte of every asked block, no other, in order."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from simple_offload.backends import cuda
from simple_offload.backends.base import Direction
from simple_offload.backends.cuda import CudaBackend
from simple_offload.metadata import Transfer

pytestmark = pytest.mark.gpu

_LIMIT = 1 << 28  # bytes of one region


@pytest.fixture(params=["batch", "one by one"])
def backend(request: pytest.FixtureRequest) -> Iterator[CudaBackend]:
    backend = CudaBackend()
    if request.param == "one by one":
        backend._submit = cuda._copy_one_by_one
    yield backend
    torch.cuda.synchronize()
    backend.close()


def make_sides(
    backend: CudaBackend, num_blocks: int, pages: tuple[int, ...]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    device = [
        torch.randint(-128, 128, (num_blocks, page), dtype=torch.int8, device="cuda")
        for page in pages
    ]
    host = [backend.allocate_host(num_blocks, page) for page in pages]
    for tensor in host:
        tensor.random_(-128, 128)
    backend.open(device, host)
    return device, host


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    ("page", "count"),
    [
        (512, 1),
        (512, 20_000),
        (4 << 10, 20_000),
        (1000, 333),  # no power of two
        (4097, 100),
        (16 << 10, 4096),
        (128 << 10, 512),
        (1 << 20, 64),
        (4 << 20, 20),
    ],
)
def test_blocks_and_nothing_else(
    backend: CudaBackend, direction: Direction, page: int, count: int
) -> None:
    num_blocks = min(2 * count + 3, max(count + 1, _LIMIT // page))
    device, host = make_sides(backend, num_blocks, (page, 3 * page + 16))
    device_blocks = np.random.default_rng(1).permutation(num_blocks)[:count]
    host_blocks = np.random.default_rng(2).permutation(num_blocks)[:count]
    wanted = [(d.cpu(), h.clone()) for d, h in zip(device, host, strict=True)]
    for d, h in wanted:
        if direction is Direction.LOAD:
            d[device_blocks] = h[host_blocks]
        else:
            h[host_blocks] = d[device_blocks]
    transfer = Transfer(0, device_blocks, host_blocks)
    backend.copy(direction, transfer, backend.barrier()).wait()
    for (d, h), now_d, now_h in zip(wanted, device, host, strict=True):
        assert torch.equal(now_d.cpu(), d)
        assert torch.equal(now_h, h)


def test_a_store_waits_for_the_compute_that_fills_its_blocks(backend: CudaBackend) -> None:
    device, host = make_sides(backend, 64, (1 << 20,))
    blocks = np.arange(64)
    host[0].zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the compute stream is busy for about 0.1 s
    device[0].fill_(5)
    backend.copy(Direction.STORE, Transfer(0, blocks, blocks), backend.barrier()).wait()
    assert bool((host[0] == 5).all())


def test_without_its_barrier_a_store_reads_too_soon(backend: CudaBackend) -> None:
    device, host = make_sides(backend, 64, (1 << 20,))
    blocks = np.arange(64)
    device[0].fill_(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    device[0].fill_(5)
    backend.copy(Direction.STORE, Transfer(0, blocks, blocks), None).wait()
    assert bool((host[0] == 1).all())


def test_a_load_waits_for_the_compute_that_reads_its_blocks(backend: CudaBackend) -> None:
    device, host = make_sides(backend, 64, (1 << 20,))
    blocks = np.arange(64)
    device[0].fill_(1)
    host[0].fill_(9)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    read = device[0].clone()
    backend.copy(Direction.LOAD, Transfer(0, blocks, blocks), backend.barrier()).wait()
    torch.cuda.synchronize()
    assert bool((read == 1).all())
    assert bool((device[0] == 9).all())


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    "pages", [(4096, 8192), (4096, 12288), (4096, 12304), (512, 1024, 16 << 10, 64 << 10)]
)
def test_sizes_that_grow(
    backend: CudaBackend, direction: Direction, pages: tuple[int, ...]
) -> None:
    """What driver 580.159 copies wrongly unless the largest descriptors come first."""
    device, host = make_sides(backend, 8_003, pages)
    device_blocks = np.random.default_rng(3).permutation(8_003)[:4000]
    host_blocks = np.random.default_rng(4).permutation(8_003)[:4000]
    transfer = Transfer(0, device_blocks, host_blocks)
    wanted = []
    for d, h in zip(device, host, strict=True):
        source, target = (h, d.cpu()) if direction is Direction.LOAD else (d.cpu(), h.clone())
        if direction is Direction.LOAD:
            target[device_blocks] = source[host_blocks]
        else:
            target[host_blocks] = source[device_blocks]
        wanted.append(target)
    backend.copy(direction, transfer, backend.barrier()).wait()
    for target, d, h in zip(wanted, device, host, strict=True):
        assert torch.equal(d.cpu() if direction is Direction.LOAD else h, target)
