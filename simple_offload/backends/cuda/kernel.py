"""A Triton kernel that copies scattered pages between host and device on a few SMs.

A DMA engine handles one descriptor at a time, which costs up to microseconds each; a kernel keeps
many small ones in flight over the bus (vllm#42212), at the cost of the SMs it runs on. It works out
the pages' addresses itself, so the host only lists the blocks. It reads that list in host memory:
an upload delayed each copy, most of all behind a copy of the other direction.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from simple_offload.backends.descriptors import Regions
from simple_offload.transfer import BlockIds

_TILE_BYTES = 32 << 10
"""Bytes that one program has in flight; several programs together hide the latency of the bus."""
_NUM_WARPS = 16
_COLUMNS = (128, 1024)
"""Smallest and largest width of a tile, in words."""
_WORDS = ((8, 16, tl.int64), (4, 4, tl.int32), (1, 1, tl.int8))
"""Bytes of a word, the alignment it requires of every address, size and stride, its type."""


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "num_pairs",
        "first",
        "count",
        "num_regions",
        "source_chunks",
        "source_chunk_blocks",
        "destination_chunks",
        "destination_chunk_blocks",
        "max_words",
    ]
)
def _copy_pages(  # type: ignore[no-untyped-def]
    pairs,
    num_pairs,
    first,
    count,
    table,
    num_regions,
    source_chunks,
    source_chunk_blocks,
    destination_chunks,
    destination_chunk_blocks,
    max_words,
    WORD: tl.constexpr,  # noqa: N803
    WORD_BYTES: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Copy ``count`` pages of every region: those of the pairs of blocks ``pairs`` [2, num_pairs]
    (sources, destinations) from index ``first`` on.

    ``table``: the regions' page sizes, source strides and destination strides in bytes, then the
    addresses of their source chunks, then of their destination chunks. No page has more than
    ``max_words`` words. A program copies ROWS pages at a time, COLUMNS words of each, so that small
    pages have as many bytes in flight as large ones.

    ``pairs`` lies in host memory: a program fetches the pairs of its next tile while it copies.
    """
    columns = tl.arange(0, COLUMNS)
    source_strides = table + num_regions
    destination_strides = source_strides + num_regions
    source_bases = destination_strides + num_regions
    destination_bases = source_bases + num_regions * source_chunks
    num_rows = count * num_regions
    step = tl.num_programs(0) * ROWS
    # The first tile's pairs: nothing is copied meanwhile.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = pairs + first + rows // num_regions
    next_source = tl.load(pair, mask=rows < num_rows, other=0)
    next_destination = tl.load(pair + num_pairs, mask=rows < num_rows, other=0)
    for start in range(tl.program_id(0) * ROWS, num_rows, step):
        rows = start + tl.arange(0, ROWS)
        valid = rows < num_rows
        regions = rows % num_regions
        source, destination = next_source, next_destination
        # The next tile's pairs, so that the bus brings them during this tile's copy.
        ahead = rows + step
        pair = pairs + first + ahead // num_regions
        next_source = tl.load(pair, mask=ahead < num_rows, other=0)
        next_destination = tl.load(pair + num_pairs, mask=ahead < num_rows, other=0)
        # The addresses of this tile's pages: the host has listed blocks only.
        page = tl.load(table + regions, mask=valid, other=0)
        source_stride = tl.load(source_strides + regions, mask=valid, other=0)
        destination_stride = tl.load(destination_strides + regions, mask=valid, other=0)
        source_chunk = regions * source_chunks + source // source_chunk_blocks
        destination_chunk = regions * destination_chunks + destination // destination_chunk_blocks
        source_page = tl.load(source_bases + source_chunk, mask=valid, other=0)
        destination_page = tl.load(destination_bases + destination_chunk, mask=valid, other=0)
        source_page += (source % source_chunk_blocks) * source_stride
        destination_page += (destination % destination_chunk_blocks) * destination_stride
        source_words = tl.multiple_of(source_page, ALIGNMENT).to(tl.pointer_type(WORD))
        destination_words = tl.multiple_of(destination_page, ALIGNMENT).to(tl.pointer_type(WORD))
        # The copy, in the widest words that all addresses allow.
        words = page // WORD_BYTES
        for offset in range(0, max_words, COLUMNS):
            at = offset + columns
            inside = at[None, :] < words[:, None]
            values = tl.load(source_words[:, None] + at[None, :], mask=inside)
            tl.store(destination_words[:, None] + at[None, :], values, mask=inside)


class Pairs(NamedTuple):
    """Pairs of blocks to copy, in memory that host and device can read."""

    blocks: torch.Tensor
    """Sources, then destinations, int32 ``[2 * n]``."""
    first: int
    length: int

    def slice(self, first: int, stop: int) -> "Pairs":
        """The pairs ``first`` to ``stop``, counted in ``blocks``."""
        return self._replace(first=first, length=stop - first)

    def in_pieces(self, length: int) -> Iterator["Pairs"]:
        """The pairs in their order, at most ``length`` at a time."""
        stop = self.first + self.length
        for first in range(self.first, stop, length):
            yield self.slice(first, min(first + length, stop))


class KernelRegions:
    """Source and destination regions of copies by the kernel of ``device``, on one stream. Their
    pages should be of similar size: the largest decides how long a copy takes. Addresses, sizes and
    strides that are no multiples of 16 make copies slower, not wrong."""

    def __init__(self, source: Regions, destination: Regions, device: torch.device) -> None:
        self._device = device
        addresses = source.bases.ravel(), destination.bases.ravel()
        table = np.concatenate((source.pages, source.strides, destination.strides, *addresses))
        self._table = torch.from_numpy(table.view(np.int64))
        shared = int(np.bitwise_or.reduce(table))
        self.word_bytes, alignment, word = next(w for w in _WORDS if shared % w[1] == 0)
        max_words = -(-int(source.pages.max()) // self.word_bytes)
        # Few shapes, since the first use of each compiles it.
        columns = min(max(1 << (max_words - 1).bit_length(), _COLUMNS[0]), _COLUMNS[1])
        # Words of one byte: a smaller tile.
        self.rows = _TILE_BYTES // max(self.word_bytes, 4) // columns
        self.num_regions = len(source.pages)
        self.shape = (
            self.num_regions,
            source.bases.shape[1],
            source.chunk_blocks,
            destination.bases.shape[1],
            destination.chunk_blocks,
            max_words,
        )
        self.constants = (word, self.word_bytes, alignment, self.rows, columns)
        self.compiled: Any = None
        """The kernel compiled for these regions, after its first launch."""

    def write_pairs(self, source_blocks: BlockIds, destination_blocks: BlockIds) -> Pairs:
        """Write the blocks to memory that kernels launched from now on can read."""
        count = len(source_blocks)
        pins = self._device.type == "cuda"
        pairs = torch.empty(2 * count, dtype=torch.int32, pin_memory=pins)
        blocks = pairs.numpy()
        blocks[:count], blocks[count:] = source_blocks, destination_blocks
        return Pairs(pairs, 0, count)

    def launch(self, pairs: Pairs, num_programs: int, stream: torch.cuda.Stream | None) -> None:
        """Copy the pages of ``pairs`` in every region, on ``stream``, which must be the same in
        every call, with at most ``num_programs`` SMs. The caller keeps this object and ``pairs``
        until the copy ends."""
        if self._table.device != self._device:
            with torch.cuda.stream(stream):
                self._table = self._table.to(self._device)
        num_tiles = -(-pairs.length * self.num_regions // self.rows)
        grid = (min(num_programs, num_tiles), 1, 1)
        arguments = (
            pairs.blocks,
            len(pairs.blocks) // 2,
            pairs.first,
            pairs.length,
            self._table,
            *self.shape,
            *self.constants,
        )
        if self.compiled is None or stream is None:
            with torch.cuda.stream(stream):
                # None where Triton interprets kernels.
                self.compiled = _copy_pages[grid](*arguments, num_warps=_NUM_WARPS)
        else:
            # Triton's lookup by arguments takes longer than the launch.
            self.compiled[grid](*arguments, stream=stream.cuda_stream)
