"""HostPool: the host tier's memory on one rank, opened chunk by chunk."""

import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from simple_offload import memory
from simple_offload.backends.base import CopyBackend, SharesMemory
from simple_offload.logs import get_logger
from simple_offload.worker.rank_pool import RankPool

logger = get_logger(__name__)

_LOOK_SECONDS = 0.05
"""How often to look whether another process has put pages in place."""
_MOST_CHUNKS = 4096
"""The backend has an address for each region and chunk, and copies them all with each new one."""
_PAUSE_BESIDE_STEPS = 8
"""Times as long as a chunk took. Launches wait while the driver pins memory. With one such pause,
steps with prompts took twice their time (docs/measurements.md, "Memory that opens")."""
_BUSY_SECONDS = 1.0
"""After the begin of a step."""
_ALIGNMENT = 2 << 20
"""Of chunks in shared memory: pinning one must not pin a page of the next. Rows are whole pages."""


class HostPool:
    """A host region for every device region, of the same page size, opened in chunks of consecutive
    blocks: pinning a terabyte takes minutes, and the server must not wait for it (vllm#42632).

    Within a chunk the blocks of a region are neighbours, so a run of them is one copy; or, for a
    second tier, the pages of a block are (``Row``). Ranks that share memory open the same chunks,
    each after the first rank of their pool.
    """

    def __init__(
        self,
        backend: CopyBackend,
        page_bytes: Sequence[int],
        num_blocks: int,
        *,
        is_agreed: bool = True,
        rank_pool: RankPool = RankPool(),  # noqa: B008 - frozen
        retry_seconds: float = 10.0,
    ) -> None:
        """``num_blocks``: as many as this rank has room for. Unless ``is_agreed``, other ranks may
        have room for fewer, and only the first chunk is opened before ``agree``. ``rank_pool``: the
        ranks that share this memory. ``retry_seconds``: how often to try again while memory is
        short, as another process may end, or a hypervisor may add memory."""
        self.num_blocks = num_blocks
        self.num_open = 0
        """Blocks below this number can be copied to. Only grows."""
        self._backend = backend
        self._page_bytes = page_bytes
        self._row = rank_pool.row
        self._block_bytes = self._row.num_bytes if self._row else sum(page_bytes)
        chunk_bytes = max(backend.chunk_bytes, num_blocks * self._block_bytes // _MOST_CHUNKS)
        per_chunk = chunk_bytes // max(self._block_bytes, 1)
        self.chunk_blocks = min(max(per_chunk, 1), num_blocks)
        """Blocks of a chunk; the last one may be smaller."""
        self._rank_pool = rank_pool
        self._retry_seconds = retry_seconds
        self._num_chunks = 0
        self._busy_until = 0.0
        self._closing = threading.Event()
        self._agreed = threading.Event()
        if is_agreed:
            self._agreed.set()
        self._thread: threading.Thread | None = None

    @property
    def is_agreed(self) -> bool:
        """Whether the final number of blocks is known."""
        return self._agreed.is_set()

    @property
    def nbytes(self) -> int:
        """Bytes of all open blocks."""
        return self.num_open * self._block_bytes

    def open(self) -> None:
        """Open the first chunk before returning, so that a lack of memory is an error at start,
        and the other chunks in a thread. Raises MemoryShortageError, or the backend's error."""
        if self._rank_pool.is_first:
            with self._rank_pool.others_wait():
                self._open_first()
        self._rank_pool.meet_again()
        if not self._rank_pool.is_first:
            self._open_first()
        if self.num_open < self.num_blocks:
            self._thread = threading.Thread(
                target=self._open_rest, name="simple-offload-open", daemon=True
            )
            self._thread.start()

    def agree(self, num_blocks: int) -> None:
        """Limit the pool to ``num_blocks``, those of the rank with the least room. Only the first
        call counts."""
        if not self._agreed.is_set():
            self.num_blocks = max(self.num_open, min(num_blocks, self.num_blocks))
            self._agreed.set()

    def on_step(self) -> None:
        """The engine begins a step. For a second, opening leaves most of the time to steps."""
        self._busy_until = time.monotonic() + _BUSY_SECONDS

    def close(self) -> None:
        """Stop opening chunks. The backend frees the memory when it closes."""
        self._closing.set()
        self._agreed.set()
        self.join()

    def join(self) -> None:
        """Return when no more blocks will be opened."""
        if self._thread is not None:
            self._thread.join()

    def _open_first(self) -> None:
        if (shared := self._rank_pool.memory) is not None:
            num_bytes = -(-self.num_blocks // self.chunk_blocks) * self._chunk_stride
            shared.map(num_bytes, stays_open=self._row is not None and self._rank_pool.is_first)
        with memory.using_reserve():
            self._open_chunk()

    def _open_rest(self) -> None:
        self._agreed.wait()
        is_waiting = False
        while self.num_open < self.num_blocks and not self._closing.is_set():
            if not self._may_open():
                self._closing.wait(_LOOK_SECONDS)
                continue
            began = time.monotonic()
            try:
                self._open_chunk()
                is_waiting = False
                if self._backend.pins_memory:
                    self._pause(time.monotonic() - began)
            except memory.MemoryShortageError as shortage:
                if not is_waiting:
                    logger.warning(
                        "The host tier of this rank waits at %d of %d blocks (%.2f GiB) for more "
                        "memory: %s",
                        *self._progress,
                        shortage,
                    )
                is_waiting = True
                self._closing.wait(self._retry_seconds)
            except Exception as error:  # noqa: BLE001 - after any error the server runs on with less
                logger.error(
                    "The host tier of this rank stays at %d of %d blocks (%.2f GiB): %s",
                    *self._progress,
                    error,
                )
                return
        if self.num_open == self.num_blocks:
            logger.info("The host tier of this rank is open: %.2f GiB", self.nbytes / 2**30)

    def _pause(self, chunk_seconds: float) -> None:
        """Let launches pass: the driver's lock is not fair."""
        is_busy = time.monotonic() < self._busy_until
        self._closing.wait(chunk_seconds * (_PAUSE_BESIDE_STEPS if is_busy else 1))

    @property
    def _progress(self) -> tuple[int, int, float]:
        return self.num_open, self.num_blocks, self.nbytes / 2**30

    def _may_open(self) -> bool:
        """Whether the first rank of the pool has put the next chunk's pages in place."""
        shared = self._rank_pool.memory
        return shared is None or self._rank_pool.is_first or shared.num_ready > self._num_chunks

    def _open_chunk(self) -> None:
        num_blocks = min(self.chunk_blocks, self.num_blocks - self.num_open)
        if self._page_bytes:  # a rank without layers needs no memory
            chunk = self._allocate(num_blocks * self._block_bytes)
            self._backend.add_host_chunk(self._cut(chunk, num_blocks))
        self._num_chunks += 1
        self.num_open += num_blocks
        if (shared := self._rank_pool.memory) is not None and self._rank_pool.is_first:
            shared.on_ready()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        shared, backend = self._rank_pool.memory, self._backend
        if shared is None:
            return backend.allocate_host(num_bytes)
        assert isinstance(backend, SharesMemory)
        chunk = shared.part(self._num_chunks * self._chunk_stride, num_bytes)
        backend.use_shared(chunk, is_first=self._rank_pool.is_first)
        return chunk

    @property
    def _chunk_stride(self) -> int:
        """Bytes from the begin of a chunk to that of the next, in shared memory."""
        num_bytes = self.chunk_blocks * self._block_bytes
        return num_bytes if self._row else -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def _cut(self, chunk: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
        if self._row is not None:
            ends = np.cumsum([self._row.start, *self._page_bytes]).tolist()
            rows = chunk.view(num_blocks, self._row.num_bytes)
            return [rows[:, start:end] for start, end in pairwise(ends)]
        sizes = [num_blocks * page_bytes for page_bytes in self._page_bytes]
        return [
            region.view(num_blocks, page_bytes)
            for region, page_bytes in zip(chunk.split(sizes), self._page_bytes, strict=True)
        ]
