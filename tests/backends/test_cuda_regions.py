"""Regions of both sides, those together whose pages are of similar size."""

import numpy as np
import torch

from simple_offload.backends.base import Direction
from simple_offload.backends.cuda_regions import match_regions
from simple_offload.backends.plan import Regions

PAGES = (4096, 20_000, 4608, 16_384)


def regions(num_blocks: int) -> Regions:
    return Regions.of([torch.empty(num_blocks, page, dtype=torch.int8) for page in PAGES])


def test_pages_of_similar_size_go_together() -> None:
    device, host = regions(3), regions(5)
    small, large = match_regions(device, host, kernels=False)
    assert (small.page, large.page) == (4608, 20_000)
    for alike, chosen in ((small, [0, 2]), (large, [1, 3])):
        assert alike.device.pages.tolist() == [PAGES[index] for index in chosen]
        assert np.array_equal(alike.device.bases, device.bases[chosen])
        assert np.array_equal(alike.host.bases, host.bases[chosen])
        assert (alike.device.num_blocks, alike.host.num_blocks) == (3, 5)
        assert alike.sides(Direction.STORE) == (alike.device, alike.host)
        assert alike.sides(Direction.LOAD) == (alike.host, alike.device)
        assert alike.kernel == {}
