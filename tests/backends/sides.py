"""Sides: the memory on both sides of a backend's copies, and what a copy should do to it."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from simple_offload.backends.base import Barrier, CopiesByLayer, CopyBackend, Direction, PagePart
from simple_offload.backends.descriptors import Regions
from simple_offload.transfer import Transfer

Blocks = Sequence[int] | npt.NDArray[Any]
Contents = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The regions of the device and of the host, ``[num_blocks, page_bytes]`` each."""


def make_regions(
    allocate: Callable[[int], torch.Tensor],
    num_blocks: int,
    pages: Sequence[int],
    gap: int | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Regions, and the bytes between their pages. ``allocate`` returns int8 ``[num_bytes]``.

    ``gap``: all pages of a block lie side by side, each with this many bytes behind it. If it is
    None, the regions are dense.
    """
    widths = [page + (gap or 0) for page in pages]
    memory = allocate(num_blocks * sum(widths))
    if gap is None:
        parts = memory.split([num_blocks * page for page in pages])
        return [part.view(num_blocks, page) for part, page in zip(parts, pages, strict=True)], []
    columns = memory.view(num_blocks, sum(widths)).split(widths, dim=1)
    both = list(zip(columns, pages, strict=True))
    return [part[:, :page] for part, page in both], [part[:, page:] for part, page in both]


def _transfer(device_blocks: Blocks, host_blocks: Blocks) -> Transfer:
    return Transfer(0, np.array(device_blocks, np.int64), np.array(host_blocks, np.int64))


def in_chunks(chunks: Sequence[Sequence[torch.Tensor]]) -> Regions:
    """Regions in these chunks."""
    return reduce(Regions.with_chunk, chunks[1:], Regions.from_tensors(chunks[0]))


class Sides:
    """Regions of random bytes on both sides. The host's are in chunks of ``chunk_blocks`` blocks.

    ``gap``: as for ``make_regions``, on the host. ``groups``: of layers. ``device``: where the
    device's regions lie. ``checked_on``: where bytes are compared.
    """

    def __init__(
        self,
        backend: CopyBackend,
        pages: Sequence[int],
        num_blocks: int,
        *,
        num_host_blocks: int | None = None,
        chunk_blocks: int | None = None,
        gap: int | None = None,
        groups: Sequence[Sequence[PagePart]] = (),
        device: str = "cpu",
        checked_on: str = "cpu",
    ) -> None:
        self.backend = backend
        self._checked_on = checked_on
        self._noise = torch.Generator(checked_on).manual_seed(0)
        self.device = [self._random(num_blocks, page).to(device) for page in pages]
        if groups:
            cast(CopiesByLayer, backend).divide(groups)
        backend.open(self.device)
        self.chunks: list[list[torch.Tensor]] = []
        self._gaps: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Bytes between pages of the host, and what they were."""
        num_host_blocks = num_host_blocks or num_blocks
        chunk_blocks = chunk_blocks or num_host_blocks
        for first in range(0, num_host_blocks, chunk_blocks):
            count = min(chunk_blocks, num_host_blocks - first)
            chunk, gaps = make_regions(self._allocate_host, count, pages, gap)
            backend.add_host_chunk(chunk)
            self.chunks.append(chunk)
            self._gaps += [(part, part.clone()) for part in gaps]

    def _allocate_host(self, num_bytes: int) -> torch.Tensor:
        return self.backend.allocate_host(num_bytes).copy_(self._random(num_bytes))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randint(
            -128,
            128,
            shape,
            generator=self._noise,
            dtype=torch.int8,
            device=self._checked_on,
        )

    @property
    def host(self) -> list[torch.Tensor]:
        """Copies of the host's regions, joined from their chunks."""
        columns = zip(*self.chunks, strict=True)
        return [torch.cat([part.to(self._checked_on) for part in column]) for column in columns]

    def contents(self) -> Contents:
        """Copies of both sides' regions."""
        return [region.to(self._checked_on, copy=True) for region in self.device], self.host

    def fill_host(self, value: int) -> None:
        for part in (part for chunk in self.chunks for part in chunk):
            part.fill_(value)

    def copy(
        self,
        direction: Direction,
        device_blocks: Blocks,
        host_blocks: Blocks,
        barrier: Barrier | None = None,
    ) -> Any:
        """Submit a copy. Returns the backend's answer."""
        transfer = _transfer(device_blocks, host_blocks)
        return self.backend.copy(direction, transfer, barrier)

    def load_by_layer(
        self, device_blocks: Blocks, host_blocks: Blocks, *, barrier: Barrier | None = None
    ) -> list[Any]:
        """Submit a load. Returns the backend's layer groups."""
        backend, transfer = cast(CopiesByLayer, self.backend), _transfer(device_blocks, host_blocks)
        return list(backend.copy_by_layer(transfer, barrier, quickly=False))

    def expected(
        self, direction: Direction, device_blocks: Blocks, host_blocks: Blocks
    ) -> Contents:
        """Both sides' regions after the copy."""
        device, host = self.contents()
        on_device, on_host = (
            torch.from_numpy(np.array(side, np.int64)).to(self._checked_on)
            for side in (device_blocks, host_blocks)
        )
        for d, h in zip(device, host, strict=True):
            if direction is Direction.LOAD:
                d[on_device] = h[on_host]
            else:
                h[on_host] = d[on_device]
        return device, host

    def copy_and_check(
        self, direction: Direction, device_blocks: Blocks, host_blocks: Blocks
    ) -> Any:
        """Copy behind the compute queued so far, and check every byte of both sides. Returns the
        backend's answer."""
        expected = self.expected(direction, device_blocks, host_blocks)
        pending = self.copy(direction, device_blocks, host_blocks, self.backend.barrier())
        if pending is not None:
            pending.wait()
        self.check(expected)
        return pending

    def check(self, expected: Contents) -> None:
        """Fail unless every byte of both sides is as expected, and gaps are as they were."""
        for wanted, found in zip(expected, self.contents(), strict=True):
            for w, f in zip(wanted, found, strict=True):
                assert torch.equal(f, w)
        assert all(torch.equal(now, before) for now, before in self._gaps)
