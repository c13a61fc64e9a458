"""HostPool: the host tier's memory on one rank, opened chunk by chunk."""

import threading
from collections.abc import Sequence

import torch

from simple_offload import memory
from simple_offload.backends.base import CopyBackend
from simple_offload.logs import get_logger

logger = get_logger(__name__)

_RETRY_SECONDS = 10.0
"""How often to look whether there is memory again: a process has ended, or a hypervisor has given
some."""


class HostPool:
    """For every device region host regions of the same page size, in chunks of consecutive
    blocks: to pin a terabyte takes minutes, and the server is not to wait for it (vllm#42632).

    Within a chunk a region's blocks are neighbours, so that runs can be copied as one.
    """

    def __init__(
        self,
        backend: CopyBackend,
        page_bytes: Sequence[int],
        num_blocks: int,
        *,
        is_agreed: bool = True,
    ) -> None:
        """``is_agreed``: the ranks know that all have room for ``num_blocks``. Where they do not,
        no more than the first chunk is opened before ``agree``."""
        self.num_blocks = num_blocks
        self.num_open = 0
        """Blocks 0 to this one are ready to be copied to. Only grows."""
        self._backend = backend
        self._page_bytes = page_bytes
        self._block_bytes = sum(page_bytes)
        per_chunk = backend.chunk_bytes // max(self._block_bytes, 1)
        self._chunk_blocks = min(max(per_chunk, 1), num_blocks)
        self._closing = threading.Event()
        self._agreed = threading.Event()
        if is_agreed:
            self._agreed.set()
        self._thread: threading.Thread | None = None

    @property
    def is_agreed(self) -> bool:
        """Whether it is known how many blocks there will be."""
        return self._agreed.is_set()

    @property
    def nbytes(self) -> int:
        """Bytes of all open blocks."""
        return self.num_open * self._block_bytes

    def open(self) -> None:
        """Open the first chunk before returning, so that memory which cannot be had at all is
        an error at start, and the rest from a thread."""
        with memory.taking_first():
            self._open_chunk()
        if self.num_open < self.num_blocks:
            self._thread = threading.Thread(
                target=self._open_rest, name="simple-offload-open", daemon=True
            )
            self._thread.start()

    def agree(self, num_blocks: int) -> None:
        """Open no more than ``num_blocks`` in all: the rank with the least room has no more. Only
        the first call counts."""
        if not self._agreed.is_set():
            self.num_blocks = max(self.num_open, min(num_blocks, self.num_blocks))
            self._agreed.set()

    def close(self) -> None:
        """Open no more. The backend gives the memory back when it closes."""
        self._closing.set()
        self._agreed.set()
        self.join()

    def join(self) -> None:
        """Return when no more blocks will be opened."""
        if self._thread is not None:
            self._thread.join()

    def _open_rest(self) -> None:
        self._agreed.wait()
        is_waiting = False
        while self.num_open < self.num_blocks and not self._closing.is_set():
            try:
                self._open_chunk()
                is_waiting = False
            except memory.MemoryShortageError as shortage:
                if not is_waiting:
                    logger.warning(
                        "The host tier of this rank waits at %d of %d blocks (%.2f GiB) for more "
                        "memory: %s",
                        *self._progress,
                        shortage,
                    )
                is_waiting = True
                self._closing.wait(_RETRY_SECONDS)
            except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on with less
                logger.error(
                    "The host tier of this rank stays at %d of %d blocks (%.2f GiB): %s",
                    *self._progress,
                    error,
                )
                return
        if self.num_open == self.num_blocks:
            logger.info("The host tier of this rank is open: %.2f GiB", self.nbytes / 2**30)

    @property
    def _progress(self) -> tuple[int, int, float]:
        return self.num_open, self.num_blocks, self.nbytes / 2**30

    def _open_chunk(self) -> None:
        num_blocks = min(self._chunk_blocks, self.num_blocks - self.num_open)
        if self._page_bytes:  # a rank without layers has nothing to hold
            chunk = self._backend.allocate_host(num_blocks * self._block_bytes)
            self._backend.add_host_chunk(self._cut(chunk, num_blocks))
        self.num_open += num_blocks

    def _cut(self, chunk: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
        sizes = [num_blocks * page_bytes for page_bytes in self._page_bytes]
        return [
            part.view(num_blocks, page_bytes)
            for part, page_bytes in zip(chunk.split(sizes), self._page_bytes, strict=True)
        ]
