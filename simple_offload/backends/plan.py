"""Block lists to copy descriptors, without a Python loop over blocks."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from simple_offload.metadata import BlockIds

Addresses = npt.NDArray[np.uint64]


class Regions(NamedTuple):
    """Where the pages of a side lie: page of block b in region r at
    ``bases[r, b // chunk_blocks] + (b % chunk_blocks) * pages[r]``."""

    bases: Addresses  # [regions, chunks]
    pages: npt.NDArray[np.uint64]  # [regions], bytes
    chunk_blocks: int
    num_blocks: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "Regions":
        """Regions in one chunk: int8 tensors ``[num_blocks, page_bytes]``, which must be dense."""
        return cls.of_chunks([tensors])

    @classmethod
    def of_chunks(cls, chunks: Sequence[Sequence[torch.Tensor]]) -> "Regions":
        """Regions whose blocks come in chunks, each with a tensor for every region. All chunks
        but the last must have as many blocks as the first."""
        for tensor in (tensor for chunk in chunks for tensor in chunk):
            if not tensor.is_contiguous():
                raise ValueError(f"a region of shape {tuple(tensor.shape)} is not dense")
        lengths = [len(chunk[0]) if chunk else 0 for chunk in chunks]
        if any(length != lengths[0] for length in lengths[:-1]) or lengths[-1] > lengths[0]:
            raise ValueError(f"chunks of {lengths} blocks: only the last may be smaller")
        bases = [[tensor.data_ptr() for tensor in chunk] for chunk in chunks]
        return cls(
            np.ascontiguousarray(np.array(bases, dtype=np.uint64).T),
            np.array([tensor.shape[1] for tensor in chunks[0]], dtype=np.uint64),
            max(lengths[0], 1),
            sum(lengths),
        )

    def addresses(self, blocks: BlockIds) -> Addresses:
        """Of every block's page in every region, ``[regions, len(blocks)]``."""
        rows = (blocks % self.chunk_blocks).astype(np.uint64)
        if self.bases.shape[1] == 1:
            return self.bases + self.pages[:, None] * rows
        return self.bases[:, blocks // self.chunk_blocks] + self.pages[:, None] * rows


class Descriptors(NamedTuple):
    """Contiguous copies: ``sizes[i]`` bytes from ``sources[i]`` to ``destinations[i]``."""

    destinations: Addresses
    sources: Addresses
    sizes: npt.NDArray[np.uint64]

    def take(self, chosen: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> "Descriptors":
        """Those at the ``chosen`` indices, or where ``chosen`` is true, in arrays of their own."""
        return Descriptors(*(np.ascontiguousarray(part[chosen]) for part in self))


def in_parts(
    source_blocks: BlockIds, destination_blocks: BlockIds, num_pairs: int
) -> Iterator[tuple[BlockIds, BlockIds]]:
    """The pairs, at most ``num_pairs`` at a time, in the order of their source blocks: neighbours
    come together."""
    order = np.argsort(source_blocks)
    sources, destinations = source_blocks[order], destination_blocks[order]
    for start in range(0, len(order), num_pairs):
        stop = start + num_pairs
        yield sources[start:stop], destinations[start:stop]


def plan_copies(
    source: Regions, destination: Regions, source_blocks: BlockIds, destination_blocks: BlockIds
) -> Descriptors:
    """Descriptors that copy ``source_blocks[i]`` to ``destination_blocks[i]`` in every region.

    Pairs are taken in the order of their source blocks; where the next pair's blocks follow on
    both sides, within one chunk, one descriptor covers both. No block may occur twice on a side.
    """
    if (np.diff(source_blocks) < 0).any():
        ((source_blocks, destination_blocks),) = in_parts(
            source_blocks, destination_blocks, len(source_blocks)
        )
    follows = (np.diff(source_blocks) == 1) & (np.diff(destination_blocks) == 1)
    follows &= source_blocks[1:] % source.chunk_blocks != 0
    follows &= destination_blocks[1:] % destination.chunk_blocks != 0
    starts = np.flatnonzero(np.concatenate(([len(source_blocks) > 0], ~follows)))
    lengths = np.diff(starts, append=len(source_blocks)).astype(np.uint64)
    return Descriptors(
        destination.addresses(destination_blocks[starts]).ravel(),
        source.addresses(source_blocks[starts]).ravel(),
        (source.pages[:, None] * lengths).ravel(),
    )
