"""LayerGroups: which bytes of a block are loaded first, and which layers need them."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from simple_offload.backends.base import PagePart

NUM_GROUPS = 8
"""Behind the last byte of a load comes the compute of its last group. More groups have more
descriptors (docs/measurements.md, "Engines with overlap_loads and without")."""


@dataclass(frozen=True)
class LayerGroups:
    """A division of a device block's bytes, in the order of the regions: that of the layers."""

    parts: tuple[tuple[PagePart, ...], ...] = ()
    """By group; empty for one group, of all bytes."""
    num_needed: Mapping[str, int] = field(default_factory=dict)
    """By layer name, how many of the first groups have its bytes."""

    @property
    def num(self) -> int:
        """Number of groups."""
        return len(self.parts) or 1

    @classmethod
    def find(
        cls,
        kv_caches: Mapping[str, torch.Tensor],
        regions: Sequence[torch.Tensor],
        least_part_bytes: int,
        num_groups: int = NUM_GROUPS,
    ) -> "LayerGroups":
        """At most ``num_groups`` groups of about equal size, each of whole layers.

        ``kv_caches``: a strided view of every layer, ``[num_blocks x k, ...]``. ``regions``: as
        ``find_regions`` returns them. ``least_part_bytes``: as the backend has it. One if no two
        are possible: every layer may have bytes at the end of a block, parts of pages may be
        too small, or a layer has no such view.
        """
        starts = [0, *accumulate(region.shape[1] for region in regions)]
        ends = {}
        for name, cache in kv_caches.items():
            if (end := _end_in_block(cache, regions, starts)) is None:
                return cls()
            ends[name] = end
        cuts = sorted({0, *ends.values(), starts[-1]})
        for count in range(num_groups, 1, -1):
            ideal = [starts[-1] * number // count for number in range(count + 1)]
            stops = sorted({min(cuts, key=lambda cut: abs(cut - goal)) for goal in ideal})
            parts = tuple(_parts(first, stop, starts) for first, stop in pairwise(stops))
            if len(parts) > 1 and _are_large(parts, regions, least_part_bytes):
                needed = {name: bisect_left(stops, end) for name, end in ends.items()}
                return cls(parts, needed)
        return cls()


def _end_in_block(
    cache: torch.Tensor, regions: Sequence[torch.Tensor], starts: Sequence[int]
) -> int | None:
    """Where a layer's last byte ends in a block whose pages lie one after another."""
    num_rows, rest = divmod(len(cache), len(regions[0])) if cache.dim() > 1 else (0, 0)
    if not num_rows or rest:
        return None
    last = (num_rows - 1) * cache.stride(0)
    last += sum(
        (size - 1) * stride
        for size, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True)
    )
    address = cache.data_ptr() + last * cache.element_size()
    for region, start in zip(regions, starts, strict=False):
        if 0 <= (offset := address - region.data_ptr()) < region.shape[1]:
            return start + offset + cache.element_size()
    return None


def _parts(first: int, stop: int, starts: Sequence[int]) -> tuple[PagePart, ...]:
    """The bytes from ``first`` to ``stop`` of a block, by region."""
    return tuple(
        PagePart(region, max(first, start) - start, min(stop, end) - start)
        for region, (start, end) in enumerate(pairwise(starts))
        if first < end and start < stop
    )


def _are_large(
    parts: Sequence[Sequence[PagePart]], regions: Sequence[torch.Tensor], least_bytes: int
) -> bool:
    """Whether no page is cut into small parts. Whole pages are as large as without groups."""
    return all(
        (size := part.stop - part.start) >= least_bytes or size == regions[part.region].shape[1]
        for group in parts
        for part in group
    )
