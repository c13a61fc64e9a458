"""The copy kernel's arithmetic, run by Triton's interpreter on the CPU.

test_cuda.py runs it on a GPU. Bandwidth is tested in neither.
"""

import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton

from tests.backends.sides import in_chunks, make_regions

CPU = torch.device("cpu")


def import_kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernel's module, imported once more."""
    spec = importlib.util.find_spec("simple_offload.backends.cuda.kernel")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where Triton looks for globals
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernel's module with Triton's interpreter on."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when a kernel is defined
    return import_kernels(monkeypatch)


class Side:
    """Random pages in chunks with these numbers of blocks. ``gap``: as for ``make_regions``."""

    def __init__(
        self, chunks: Sequence[int], pages: Sequence[int], seed: int, gap: int | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def allocate(num_bytes: int) -> torch.Tensor:
            return torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, generator=generator)

        self._chunks = [make_regions(allocate, count, pages, gap) for count in chunks]
        self.regions = in_chunks([regions for regions, _ in self._chunks])

    def blocks(self, region: int) -> torch.Tensor:
        """A copy of all pages of a region."""
        return torch.cat([regions[region] for regions, _ in self._chunks])

    def gaps(self) -> list[torch.Tensor]:
        """Copies of the bytes between pages."""
        return [part.clone() for _, gaps in self._chunks for part in gaps]


@pytest.mark.parametrize(
    ("pages", "gaps", "word_bytes"),
    [
        ((4096,), (None, None), 8),
        ((512, 1008), (None, 16), 8),
        ((16 << 10, 20 << 10), (0, None), 8),  # a row of several tiles
        ((1028, 2052), (None, None), 4),
        ((4096,), (None, 4), 4),  # the first page is aligned, the next is not
        ((4096,), (2, None), 1),
        ((1001,), (None, None), 1),
        ((3000, 4097), (5, 0), 1),
    ],
)
@pytest.mark.parametrize(
    ("source_chunks", "destination_chunks"), [([40], [20, 20, 3]), ([7] * 6, [43])]
)
@pytest.mark.parametrize("num_programs", [1, 8])
def test_pages_of_all_pairs_and_nothing_else(
    kernels: ModuleType,
    pages: tuple[int, ...],
    gaps: tuple[int | None, int | None],
    word_bytes: int,
    source_chunks: list[int],
    destination_chunks: list[int],
    num_programs: int,
) -> None:
    """``gaps``: of the source, and of the destination."""
    source = Side(source_chunks, pages, 1, gaps[0])
    destination = Side(destination_chunks, pages, 2, gaps[1])
    between = destination.gaps()
    rng = np.random.default_rng(3)
    of, to = (
        rng.permutation(side.regions.num_blocks)[:33].astype(np.int64)
        for side in (source, destination)
    )
    wanted = []
    for region in range(len(pages)):
        wanted.append(destination.blocks(region))
        wanted[-1][to] = source.blocks(region)[of]
    regions = kernels.KernelRegions(source.regions, destination.regions, CPU)
    assert regions.word_bytes == word_bytes
    pairs = regions.write_pairs(of, to)
    for part in (pairs.slice(20, 33), *pairs.slice(13, 20).in_pieces(3), pairs.slice(0, 13)):
        regions.launch(part, num_programs, None)
    assert all(torch.equal(destination.blocks(r), wanted[r]) for r in range(len(pages)))
    assert all(map(torch.equal, destination.gaps(), between))


def test_later_launches_use_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later launches have the same arguments and run on the requested stream. Only this test checks
    the stream."""
    calls: dict[str, list[Any]] = {"first": [], "later": []}

    class Launcher:
        """Replaces the kernel, or its compiled form."""

        def __init__(self, name: str, answer: Any = None) -> None:
            self.name, self.answer = name, answer

        def __getitem__(self, grid: Any) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                calls[self.name].append((grid, arguments, named))
                return self.answer

            return call

    first = Launcher("first", Launcher("later"))
    monkeypatch.setattr(triton, "jit", lambda **_: lambda function: first)
    kernels = import_kernels(monkeypatch)
    side = Side([9], (512, 2048), 1).regions
    regions = kernels.KernelRegions(side, side, CPU)
    pairs = regions.write_pairs(np.arange(9), np.arange(9)[::-1])
    regions.launch(pairs, 8, None)
    regions.launch(pairs, 8, SimpleNamespace(cuda_stream=77))
    ((grid, arguments, named),) = calls["first"]
    assert named == {"num_warps": 16}
    assert calls["later"] == [(grid, arguments, {"stream": 77})]
    assert grid == (2, 1, 1)  # 18 pages, 16 a program
