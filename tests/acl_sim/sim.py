"""The switches of the simulated ACL runtime, and a few of its functions for tests."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "aclrtCreateEventExWithFlag": (_pointer, ctypes.c_uint32),
    "aclrtCreateStream": (_pointer,),
    "aclrtDestroyEvent": (_pointer,),
    "aclrtDestroyStream": (_pointer,),
    "aclrtFree": (_pointer,),
    "aclrtFreeHost": (_pointer,),
    "aclrtMalloc": (_pointer, _size, _int),
    "aclrtMemcpyAsync": (_pointer, _size, _pointer, _size, _int, _pointer),
    "aclrtMemcpyBatchAsync": (
        *[_pointer] * 4, _size, _pointer, _pointer, _size, _pointer, _pointer,
    ),
    "aclrtMemsetAsync": (_pointer, _size, _int, _size, _pointer),
    "aclrtRecordEvent": (_pointer, _pointer),
    "aclrtSetDevice": (_int,),
    "aclrtStreamWaitEvent": (_pointer, _pointer),
    "aclrtSynchronizeEvent": (_pointer,),
    "aclrtSynchronizeStream": (_pointer,),
    "acl_sim_delay": (_pointer, _int),
    "acl_sim_delay_all": (_int,),
    "acl_sim_fail_after": (ctypes.c_int64, _int),
    "acl_sim_fail_stream": (_pointer, _int),
    "acl_sim_hold": (_pointer,),
    "acl_sim_hold_waits": (_int,),
    "acl_sim_limit_host": (_size,),
    "acl_sim_num_tasks": (_pointer,),
    "acl_sim_release": (_pointer,),
    "acl_sim_settle": (_pointer,),
    "acl_sim_take_counts": (_pointer,),
}  # fmt: skip


class Counts(NamedTuple):
    """Copies since the last query."""

    batch_calls: int
    single_calls: int
    descriptors: int
    largest_batch: int
    blocking: int
    """Copies of memory that is not pinned; the caller had to wait for them."""


class Sim:
    """A loaded simulated runtime. ``call`` raises when a function refuses. Tests use the other
    methods, unseen by the code under test."""

    def __init__(self, library: Path | str) -> None:
        self.library = ctypes.CDLL(str(library))
        for name, arguments in _SIGNATURES.items():
            if hasattr(self.library, name):
                getattr(self.library, name).argtypes = arguments
        self.library.aclGetRecentErrMsg.restype = ctypes.c_char_p

    def code(self, name: str, *arguments: Any) -> int:
        """The return code of a function of the runtime."""
        return int(getattr(self.library, name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the runtime; AssertionError when it refuses."""
        code = self.code(name, *arguments)
        assert code == 0, f"{name}: {code}: {self.library.aclGetRecentErrMsg()}"

    def create(self, name: str, *arguments: Any) -> int:
        """Call a function that writes a handle or an address to its first argument; return it."""
        made = _pointer()
        self.call(name, ctypes.byref(made), *arguments)
        assert made.value is not None
        return made.value

    def fill(self, address: int, value: int, size: int, stream: int) -> None:
        """Queue a write to device memory, as compute would."""
        self.call("aclrtMemsetAsync", address, size, value, size, stream)

    @contextmanager
    def held(self, *streams: int) -> Iterator[None]:
        """The streams start no task during the context."""
        for stream in streams:
            self.library.acl_sim_hold(stream)
        try:
            yield
        finally:
            for stream in streams:
                self.library.acl_sim_release(stream)

    @contextmanager
    def delayed(self, stream: int) -> Iterator[None]:
        """The stream begins each task late. A call that does not wait for it returns before."""
        self.library.acl_sim_delay(stream, 100_000)
        yield
        self.library.acl_sim_delay(stream, 0)

    def hold_waits(self, held: bool) -> None:
        """Whether callers of aclrtStreamWaitEvent are blocked there."""
        self.library.acl_sim_hold_waits(int(held))

    def num_tasks(self, stream: int) -> int:
        """Number of tasks that the stream has not finished."""
        return int(self.library.acl_sim_num_tasks(stream))

    def settle(self, stream: int) -> None:
        """Return when the stream has reached a wait for an event, or its end."""
        self.library.acl_sim_settle(stream)

    def take_counts(self) -> Counts:
        numbers = (ctypes.c_uint64 * len(Counts._fields))()
        self.library.acl_sim_take_counts(numbers)
        return Counts(*numbers)

    def take_batches(self, taken: bool) -> None:
        """Whether the chip takes batches; if not, they are refused with 207000."""
        self.library.acl_sim_set_batch_supported(int(taken))

    def fail_after(self, num_descriptors: int, code: int) -> None:
        """Refuse one descriptor with ``code``, after ``num_descriptors`` more have succeeded; -1
        refuses none."""
        self.library.acl_sim_fail_after(num_descriptors, code)

    def reset(self) -> None:
        """Reset every switch."""
        self.take_batches(True)
        self.hold_waits(False)
        self.fail_after(-1, 0)
        self.library.acl_sim_delay_all(0)
        self.library.acl_sim_limit_host(2**64 - 1)
        self.library.acl_sim_set_capturing(0)
        self.library.acl_sim_set_first_device(0)
        self.library.acl_sim_set_version(80501000)
        self.take_counts()
