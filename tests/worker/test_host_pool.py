"""HostPool: a host region for every device region."""

import torch

from simple_offload.backends.host import HostBackend
from simple_offload.worker.host_pool import HostPool


def region(num_blocks: int, page: int, gap: int = 0) -> torch.Tensor:
    return torch.zeros((num_blocks, page + gap), dtype=torch.int8)[:, :page]


def test_host_regions_have_the_pages_of_the_device_and_their_own_number() -> None:
    pool = HostPool(HostBackend(), [region(4, 24), region(4, 8, gap=16)], num_blocks=10)
    assert [tuple(tensor.shape) for tensor in pool.tensors] == [(10, 24), (10, 8)]
    assert pool.num_blocks == 10
    assert pool.nbytes == 10 * (24 + 8)


def test_no_regions() -> None:
    pool = HostPool(HostBackend(), [], num_blocks=10)
    assert (pool.tensors, pool.nbytes) == ([], 0)


def test_closing() -> None:
    pool = HostPool(HostBackend(), [region(4, 24)], num_blocks=2)
    pool.close()
    pool.close()
    assert (pool.tensors, pool.nbytes) == ([], 0)
