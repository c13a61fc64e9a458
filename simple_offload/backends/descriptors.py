"""Turns lists of blocks into copy descriptors, without a Python loop over blocks."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from simple_offload.transfer import BlockIds

Addresses = npt.NDArray[np.uint64]


class Regions(NamedTuple):
    """Addresses of the pages of one side. The page of block b in region r is at
    ``bases[r, b // chunk_blocks] + (b % chunk_blocks) * strides[r]``."""

    bases: Addresses  # [regions, chunks]
    pages: npt.NDArray[np.uint64]  # [regions], bytes
    strides: npt.NDArray[np.uint64]  # [regions], bytes
    chunk_blocks: int
    num_blocks: int
    is_dense: bool
    """Whether no region of this side has room between its pages. ``select`` keeps it: regions that
    are selected separately share their extents."""

    @classmethod
    def from_tensors(cls, tensors: Sequence[torch.Tensor]) -> "Regions":
        """Regions in one chunk: int8 tensors ``[num_blocks, page_bytes]``. Raises ValueError where
        pages overlap or are not contiguous."""
        strides = [max(tensor.stride(0), tensor.shape[1]) for tensor in tensors]
        pages = [tensor.shape[1] for tensor in tensors]
        num_blocks = len(tensors[0]) if tensors else 0
        return cls(
            _bases(tensors, strides),
            np.array(pages, dtype=np.uint64),
            np.array(strides, dtype=np.uint64),
            max(num_blocks, 1),
            num_blocks,
            is_dense=strides == pages,
        )

    def with_chunk(self, tensors: Sequence[torch.Tensor]) -> "Regions":
        """With one more chunk behind the others, a tensor per region. Raises ValueError where its
        strides differ, or where it is larger than the others or behind a smaller one."""
        num_blocks = len(tensors[0]) if tensors else 0
        if self.num_blocks % self.chunk_blocks or num_blocks > self.chunk_blocks:
            raise ValueError(
                f"a chunk of {num_blocks} blocks behind {self.num_blocks} in chunks of "
                f"{self.chunk_blocks}: only the last may be smaller"
            )
        bases = np.concatenate((self.bases, _bases(tensors, self.strides.tolist())), axis=1)
        return self._replace(bases=bases, num_blocks=self.num_blocks + num_blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all regions."""
        return int(self.pages.sum())

    def select(self, chosen: npt.NDArray[np.intp]) -> "Regions":
        """The regions at these indices."""
        return self._replace(
            bases=self.bases[chosen], pages=self.pages[chosen], strides=self.strides[chosen]
        )

    def addresses(self, blocks: BlockIds) -> Addresses:
        """Addresses of the blocks' pages, ``[regions, len(blocks)]``."""
        rows = (blocks % self.chunk_blocks).astype(np.uint64)
        if self.bases.shape[1] == 1:
            return self.bases + self.strides[:, None] * rows
        return self.bases[:, blocks // self.chunk_blocks] + self.strides[:, None] * rows


def _bases(tensors: Sequence[torch.Tensor], strides: Sequence[int]) -> Addresses:
    """Addresses of a chunk, ``[regions, 1]``."""
    for tensor, stride in zip(tensors, strides, strict=True):
        if tensor.stride() != (stride, 1):
            raise ValueError(
                f"a region of shape {tuple(tensor.shape)} has strides {tensor.stride()}, "
                f"not {(stride, 1)}"
            )
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)[:, None]


class Descriptors(NamedTuple):
    """Contiguous copies: ``sizes[i]`` bytes from ``sources[i]`` to ``destinations[i]``."""

    destinations: Addresses
    sources: Addresses
    sizes: npt.NDArray[np.uint64]

    def select(self, chosen: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> "Descriptors":
        """Copies of the descriptors at the indices ``chosen``, or where ``chosen`` is true."""
        return Descriptors(*(np.ascontiguousarray(part[chosen]) for part in self))

    def split(self, num_bytes: int) -> "Descriptors":
        """The same copies, in descriptors of at most ``num_bytes``."""
        if not len(self.sizes) or self.sizes.max() <= num_bytes:
            return self
        counts = -(-self.sizes.astype(np.int64) // num_bytes)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = within.astype(np.uint64) * np.uint64(num_bytes)
        destinations, sources, sizes = (np.repeat(part, counts) for part in self)
        return Descriptors(
            destinations + offsets,
            sources + offsets,
            np.minimum(sizes - offsets, np.uint64(num_bytes)),
        )

    @classmethod
    def concatenate(cls, plans: Sequence["Descriptors"]) -> "Descriptors":
        """The descriptors of all ``plans``, at least one."""
        if len(plans) == 1:
            return plans[0]
        return cls(*(np.concatenate(parts) for parts in zip(*plans, strict=True)))


class Extents(NamedTuple):
    """Pairs of blocks, with neighbours merged: the ``lengths[i]`` blocks from ``sources[i]`` on are
    copied to those from ``destinations[i]`` on."""

    sources: BlockIds
    destinations: BlockIds
    lengths: BlockIds

    def select(self, chosen: npt.NDArray[np.bool_]) -> "Extents":
        """The extents where ``chosen`` is true."""
        return Extents(*(part[chosen] for part in self))

    def pairs(self) -> tuple[BlockIds, BlockIds]:
        """Source and destination block of every pair."""
        num_pairs = int(self.lengths.sum())
        if num_pairs == len(self.lengths):
            return self.sources, self.destinations
        ends = np.cumsum(self.lengths)
        within = np.arange(num_pairs) - np.repeat(ends - self.lengths, self.lengths)
        return (
            np.repeat(self.sources, self.lengths) + within,
            np.repeat(self.destinations, self.lengths) + within,
        )


def find_extents(
    source: Regions, destination: Regions, source_blocks: BlockIds, destination_blocks: BlockIds
) -> Extents:
    """Merge the pairs ``source_blocks[i]``, ``destination_blocks[i]`` into extents.

    Consecutive pairs merge if their blocks are neighbours on both sides, upwards or downwards, and
    lie in one chunk. None do where a side has room between pages, as one descriptor would cover
    it. No block may occur twice on a side.

    Pairs are not sorted first: that takes longer than to copy small pages, and blocks come in the
    order of their requests' tokens, in which most neighbours are consecutive already.
    """
    steps = source_blocks[1:] - source_blocks[:-1]
    joins = np.abs(steps) == 1
    if joins.any():
        joins &= steps == destination_blocks[1:] - destination_blocks[:-1]
    if not (source.is_dense and destination.is_dense and joins.any()):
        return Extents(source_blocks, destination_blocks, np.ones_like(source_blocks))
    for blocks, chunk_blocks in (
        (source_blocks, source.chunk_blocks),
        (destination_blocks, destination.chunk_blocks),
    ):
        chunks = blocks // chunk_blocks
        joins &= chunks[1:] == chunks[:-1]
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    lengths = np.diff(starts, append=len(source_blocks))
    lasts = starts + lengths - 1
    return Extents(
        np.minimum(source_blocks[starts], source_blocks[lasts]),
        np.minimum(destination_blocks[starts], destination_blocks[lasts]),
        lengths,
    )


def describe(source: Regions, destination: Regions, extents: Extents) -> Descriptors:
    """Descriptors that copy ``extents`` in every region."""
    return Descriptors(
        destination.addresses(extents.destinations).ravel(),
        source.addresses(extents.sources).ravel(),
        (source.pages[:, None] * extents.lengths.astype(np.uint64)).ravel(),
    )


def plan_copies(
    source: Regions, destination: Regions, source_blocks: BlockIds, destination_blocks: BlockIds
) -> Descriptors:
    """Descriptors that copy ``source_blocks[i]`` to ``destination_blocks[i]`` in every region,
    with neighbours merged (``find_extents``)."""
    extents = find_extents(source, destination, source_blocks, destination_blocks)
    return describe(source, destination, extents)


def in_stretches(total: int, first: int, at_once: int) -> Iterator[tuple[int, int]]:
    """Divide ``range(total)`` into stretches of ``at_once``, as (start, stop). The first has
    ``first``: a smaller one, so that its copy begins sooner."""
    start, stop = 0, min(total, first)
    while start < stop:
        yield start, stop
        start, stop = stop, min(total, stop + at_once)


def in_pieces(plan: Descriptors, num_bytes: int, num_descriptors: int) -> Iterator[Descriptors]:
    """Divide ``plan``, in its order, into pieces that end once they have ``num_bytes`` or more, or
    ``num_descriptors``."""
    start, total = 0, len(plan.sizes)
    ends = np.cumsum(plan.sizes)
    before = 0
    while start < total:
        stop = min(int(np.searchsorted(ends, before + num_bytes)) + 1, start + num_descriptors)
        yield Descriptors(*(part[start:stop] for part in plan))
        start, before = stop, int(ends[min(stop, total) - 1])


def group_by_size(pages: npt.NDArray[np.uint64]) -> list[npt.NDArray[np.intp]]:
    """Indices of ``pages`` in groups, each of sizes within a factor of two."""
    if len(pages) and pages.max() < 2 * pages.min():
        return [np.arange(len(pages))]
    classes = np.floor(np.log2(pages.astype(np.float64)))
    return [np.flatnonzero(classes == size_class) for size_class in np.unique(classes)]
