"""Block lists to copy descriptors, without a Python loop over blocks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from simple_offload.metadata import BlockIds

Addresses = npt.NDArray[np.uint64]


class Regions(NamedTuple):
    """Where the pages of a side lie: page of block b in region r at ``bases[r] + b * pages[r]``."""

    bases: Addresses
    pages: npt.NDArray[np.uint64]  # bytes

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "Regions":
        """Regions of int8 tensors ``[num_blocks, page_bytes]``, which must be dense."""
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(f"a region of shape {tuple(tensor.shape)} is not dense")
        return cls(
            np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64),
            np.array([tensor.shape[1] for tensor in tensors], dtype=np.uint64),
        )


class Descriptors(NamedTuple):
    """Contiguous copies: ``sizes[i]`` bytes from ``sources[i]`` to ``destinations[i]``."""

    destinations: Addresses
    sources: Addresses
    sizes: npt.NDArray[np.uint64]


def plan_copies(
    source: Regions, destination: Regions, source_blocks: BlockIds, destination_blocks: BlockIds
) -> Descriptors:
    """Descriptors that copy ``source_blocks[i]`` to ``destination_blocks[i]`` in every region.

    Pairs are taken in the order of their source blocks; where the next pair's blocks follow on
    both sides, one descriptor covers both. No destination block may occur twice.
    """
    order = np.argsort(source_blocks, kind="stable")
    sources, destinations = source_blocks[order], destination_blocks[order]
    follows = (np.diff(sources) == 1) & (np.diff(destinations) == 1)
    starts = np.flatnonzero(np.concatenate(([len(order) > 0], ~follows)))
    lengths = np.diff(np.concatenate((starts, [len(order)]))).astype(np.uint64)
    first_sources = sources[starts].astype(np.uint64)
    first_destinations = destinations[starts].astype(np.uint64)
    pages = source.pages[:, None]
    return Descriptors(
        (destination.bases[:, None] + pages * first_destinations).ravel(),
        (source.bases[:, None] + pages * first_sources).ravel(),
        (pages * lengths).ravel(),
    )
