"""A Triton kernel that copies scattered descriptors between host and device on a few SMs.

DMA engines handle one descriptor at a time, at a cost of up to microseconds each; a kernel keeps
many small ones in flight over the bus (vllm#42212). What it costs is the SMs it runs on.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from simple_offload.backends.plan import Descriptors

_TILE_BYTES = 32 << 10
"""What one program has in flight: enough programs of this hide the latency of the bus."""
_NUM_WARPS = 16
_COLUMNS = (128, 1024)
"""Bounds of a tile's width, in words."""
_WORDS = ((8, 16, tl.int64), (4, 4, tl.int32), (1, 1, tl.int8))
"""Bytes of a word, the alignment it asks of every address and size, its type."""


@triton.jit(do_not_specialize=["num_descriptors", "max_words"])  # type: ignore[untyped-decorator]
def _copy_tiles(  # type: ignore[no-untyped-def]
    table,
    num_descriptors,
    max_words,
    WORD: tl.constexpr,  # noqa: N803
    WORD_BYTES: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Copy ``table`` [3, num_descriptors] (destinations, sources, bytes), of at most
    ``max_words`` words each. A program takes ROWS descriptors at a time, COLUMNS words of
    each, so that as many bytes are in flight for small descriptors as for large ones."""
    columns = tl.arange(0, COLUMNS)
    first = tl.program_id(0) * ROWS
    stride = tl.num_programs(0) * ROWS
    for start in range(first, num_descriptors, stride):
        rows = start + tl.arange(0, ROWS)
        valid = rows < num_descriptors
        destinations = tl.load(table + rows, mask=valid, other=0)
        sources = tl.load(table + num_descriptors + rows, mask=valid, other=0)
        words = tl.load(table + 2 * num_descriptors + rows, mask=valid, other=0) // WORD_BYTES
        to = tl.multiple_of(destinations, ALIGNMENT).to(tl.pointer_type(WORD))
        of = tl.multiple_of(sources, ALIGNMENT).to(tl.pointer_type(WORD))
        for offset in range(0, max_words, COLUMNS):
            at = offset + columns
            inside = at[None, :] < words[:, None]
            values = tl.load(of[:, None] + at[None, :], mask=inside)
            tl.store(to[:, None] + at[None, :], values, mask=inside)


class CopyKernel:
    """Launches the kernel from one thread, on one stream at a time.

    The descriptors travel through a device buffer that is written and read in stream order.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 15) -> None:
        self.capacity = capacity
        self._table = torch.empty(3 * capacity, dtype=torch.int64, device=device)

    def launch(
        self, plan: Descriptors, num_programs: int, stream: torch.cuda.Stream
    ) -> list[torch.Tensor]:
        """Copy ``plan`` on ``stream`` with at most ``num_programs`` SMs. Returns what has to live
        until the copy has ended.

        Descriptors of similar size are launched together. An address or size that is not a
        multiple of 16 costs its launch speed, not correctness.
        """
        kept = []
        with torch.cuda.stream(stream):
            for alike in _of_similar_size(plan):
                for first in range(0, len(alike.sizes), self.capacity):
                    part = slice(first, first + self.capacity)
                    columns = np.stack([column[part] for column in alike])
                    kept.append(self._launch_similar(columns, num_programs))
        return kept

    def _launch_similar(self, columns: npt.NDArray[np.uint64], num_programs: int) -> torch.Tensor:
        """One launch over ``columns`` [3, n]; returns its pinned table."""
        count, largest = columns.shape[1], int(columns[2].max())
        shared = int(np.bitwise_or.reduce(columns, axis=None))
        word_bytes, alignment, word = next(w for w in _WORDS if shared % w[1] == 0)
        tile_words = _TILE_BYTES // max(word_bytes, 4)  # bytes one by one: a smaller tile
        max_words = -(-largest // word_bytes)
        # Few shapes, since each is compiled when it is first used.
        tile_columns = min(max(1 << (max_words - 1).bit_length(), _COLUMNS[0]), _COLUMNS[1])
        tile_rows = tile_words // tile_columns
        pinned = torch.empty(3 * count, dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = columns.view(np.int64).ravel()
        self._table[: 3 * count].copy_(pinned, non_blocking=True)
        grid = (min(num_programs, -(-count // tile_rows)),)
        _copy_tiles[grid](
            self._table,
            count,
            max_words,
            WORD=word,
            WORD_BYTES=word_bytes,
            ALIGNMENT=alignment,
            ROWS=tile_rows,
            COLUMNS=tile_columns,
            num_warps=_NUM_WARPS,
        )
        return pinned


def _of_similar_size(plan: Descriptors) -> list[Descriptors]:
    """``plan`` by size, within a factor of two: a launch's time goes by its largest."""
    if not len(plan.sizes) or plan.sizes.max() < 2 * plan.sizes.min():
        return [plan]
    classes = np.floor(np.log2(plan.sizes.astype(np.float64)))
    return [plan.take(classes == size_class) for size_class in np.unique(classes)]
