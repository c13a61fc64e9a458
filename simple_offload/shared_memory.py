"""SharedMemory: host memory that several processes of one machine have mapped."""

import ctypes
import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

_HEADER_BYTES = 2 << 20
"""Before the memory proper lie a token and a counter. As large as a huge page, so that the memory
begins with one. Only the first page of it takes up memory."""
_TOKEN_BYTES = 16

SEAL_BYTES = 32
"""At the end of a row of host memory, for the second tier's seal."""

_MFD_CLOEXEC = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Address(NamedTuple):
    """Where other processes find the memory, in the kernel's list of this one's open files."""

    pid: int
    descriptor: int
    token: bytes
    """First bytes of the memory, so that no other file is taken for it."""


class SharedMemory:
    """Memory without a name (memfd_create): no limit of /dev/shm applies to it, and the kernel
    frees it with the last process that has it, however that process ends.

    The process that created it puts its pages in place, part by part, and counts the parts: others
    need no page before.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = torch.empty(0, dtype=torch.int8)
        self._counter = np.zeros(1, np.int64)

    @classmethod
    def create(cls) -> "SharedMemory":
        """Memory of size 0. Raises OSError if the system allows none."""
        # Python's own function is missing in uv's Pythons, which are built for an old libc.
        descriptor = _libc.memfd_create(b"simple-offload", _MFD_CLOEXEC)
        if descriptor < 0:
            raise OSError(code := ctypes.get_errno(), os.strerror(code))
        os.write(descriptor, secrets.token_bytes(_TOKEN_BYTES))
        return cls(descriptor)

    @classmethod
    def open(cls, address: Address) -> "SharedMemory":
        """The memory that another process has created. Raises OSError if this process may not, or
        does not see that process."""
        path = Path(f"/proc/{address.pid}/fd/{address.descriptor}")
        memory = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        with suppress(OSError):  # a pipe
            if memory.address.token == address.token:
                return memory
        memory.close()
        raise OSError(f"{path} is another file: process {address.pid} is not the one meant")

    @property
    def address(self) -> Address:
        """For ``open`` in other processes, until ``close``."""
        token = os.pread(self._descriptor, _TOKEN_BYTES, 0)
        return Address(os.getpid(), self._descriptor, token)

    @property
    def file(self) -> tuple[int, int]:
        """For a child process that inherits it: the descriptor, until ``close``, and where in the
        file the memory begins."""
        return self._descriptor, _HEADER_BYTES

    def map(self, num_bytes: int, *, stays_open: bool = False) -> None:
        """Have at least ``num_bytes``, zeroed, in this process. They take up memory only once
        written. ``stays_open``: other processes may open it later, until ``close``."""
        num_bytes += _HEADER_BYTES
        if os.fstat(self._descriptor).st_size < num_bytes:
            os.ftruncate(self._descriptor, num_bytes)
        # Python's own mmap would keep a descriptor open, by which a forked child would keep the
        # memory too.
        path = f"/proc/self/fd/{self._descriptor}"
        storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=num_bytes)
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):  # as in host_memory.py
            _libc.madvise(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(num_bytes), advice)
        whole = torch.empty(0, dtype=torch.int8).set_(storage)  # type: ignore[arg-type]
        self._counter = whole[_TOKEN_BYTES : _TOKEN_BYTES + 8].view(torch.int64).numpy()
        self._memory = whole[_HEADER_BYTES:]
        if not stays_open:
            self.close()

    def part(self, start: int, num_bytes: int) -> torch.Tensor:
        """Bytes ``start`` to ``start + num_bytes``, int8 ``[num_bytes]``."""
        return self._memory[start : start + num_bytes]

    @property
    def num_ready(self) -> int:
        """Parts whose pages are in place."""
        return int(self._counter[0])

    def on_ready(self) -> None:
        """The pages of one more part are in place. For the process that puts them there."""
        self._counter[0] += 1

    def free(self) -> None:
        """Give the memory back, once no tensor of it is used any more."""
        self._memory, self._counter = torch.empty(0, dtype=torch.int8), np.zeros(1, np.int64)
        self.close()

    def close(self) -> None:
        """Let no other process open it. What has been mapped stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
