"""Costs from measured times: no GPU needed. ``test_cuda.py`` tests the measurement."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from simple_offload.backends.base import Direction
from simple_offload.backends.cuda import calibration
from simple_offload.backends.cuda.copy_costs import CopyCosts, Path


def test_dma_of_small_pages_counts_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """DMA takes longer in a tier than in the measured memory; the kernel does not."""
    sizes = [16384, 32768, 65536]

    def measured(sizes: list[int], dma: Path, kernel: Path | None) -> CopyCosts:
        assert kernel is not None
        return CopyCosts(np.array(sizes, np.float64), np.full(3, 1e-6), np.full(3, 1e-6), 2e-5)

    monkeypatch.setattr(calibration, "measure_costs", measured)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(calibration, "classify_regions", lambda *_, kernels: kernels)
    queues: Any = SimpleNamespace(kernels={Direction.LOAD: "kernel"}, submit=lambda *_: iter(()))
    scratch = torch.zeros(1 << 20, dtype=torch.int8)
    costs = calibration.measure_direction(queues, Direction.LOAD, sizes, scratch, scratch)
    assert costs.dma.tolist() == pytest.approx([1.15e-6, 1.15e-6, 1e-6])
    assert costs.by_kernel.tolist() == [True, True, False]
    assert (costs.kernel.tolist(), costs.kernel_start) == ([1e-6] * 3, 2e-5)
