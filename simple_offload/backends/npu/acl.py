"""The functions of CANN's ACL runtime (libascendcl.so) that copies need, by ctypes."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from simple_offload.backends.base import Direction
from simple_offload.backends.descriptors import Descriptors

LIBRARY = "libascendcl.so"
NOT_SUPPORTED = 207000
"""The error code of a function that the runtime has but the chip lacks."""
MAX_BATCH = 4096
"""Descriptors in a batch: the documented limit of the synchronous call. That of the asynchronous
call is documented nowhere."""

HOST, DEVICE, UNREGISTERED = 0, 1, 2
"""Types of memory. Unregistered host memory is not pinned: a copy of it would block."""
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_NO_INDEX = 2**64 - 1
_RELAXED = 2  # ACL_MODEL_RI_CAPTURE_MODE_RELAXED

_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class AclError(RuntimeError):
    """The ACL runtime refused a call. The message has the function, the error code and the
    runtime's own text; ``index`` is the descriptor's, where known."""

    def __init__(self, function: str, code: int, text: str, index: int | None = None) -> None:
        self.function, self.code, self.text, self.index = function, code, text, index
        where = "" if index is None else f" at descriptor {index}"
        super().__init__(f"{function}: error {code}{where}: {text}")


class Location(ctypes.Structure):
    """aclrtMemLocation: a device and a type of memory."""

    _fields_ = (("id", ctypes.c_uint32), ("type", _int))
    id: int
    type: int


class _BatchAttributes(ctypes.Structure):
    _fields_ = (
        ("destination", Location),
        ("source", Location),
        ("reserved", ctypes.c_uint8 * 16),
    )


class _PointerAttributes(ctypes.Structure):
    _fields_ = (
        ("location", Location),
        ("page_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 4),
    )


class Locations(NamedTuple):
    """The locations of both sides, which a batch has to declare."""

    host: Location
    device: Location


class Acl:
    """The functions of a loaded ACL runtime. Each acts on the device set for the calling thread,
    and raises AclError if the runtime refuses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._text = library.aclGetRecentErrMsg
        self._text.restype = ctypes.c_char_p
        self._malloc_host = self._function("aclrtMallocHost", _pointer, _size)
        self._free_host = self._function("aclrtFreeHost", _pointer)
        self._attributes: Callable[..., int] | None = None
        if hasattr(library, "aclrtPointerGetAttributes"):
            self._attributes = self._function("aclrtPointerGetAttributes", _pointer, _pointer)
        self._copy = self._function(
            "aclrtMemcpyAsync", _pointer, _size, _pointer, _size, _int, _pointer
        )
        self._batch: Callable[..., int] | None = None
        if hasattr(library, "aclrtMemcpyBatchAsync"):
            arguments = (*[_pointer] * 4, _size, _pointer, _pointer, _size, _pointer, _pointer)
            self._batch = self._function("aclrtMemcpyBatchAsync", *arguments)

    @classmethod
    def load(cls) -> "Acl":
        """The runtime that torch_npu has loaded. Raises OSError if there is none."""
        return cls(ctypes.CDLL(LIBRARY))

    @property
    def has_batch(self) -> bool:
        """Whether this CANN has aclrtMemcpyBatchAsync (8.5 and later). The chip may still refuse
        it, with NOT_SUPPORTED."""
        return self._batch is not None

    def version(self) -> str:
        """CANN's version, such as "8.5.1"; "of unknown version" if the runtime has no answer."""
        number = ctypes.c_int32()
        get = getattr(self._library, "aclsysGetVersionNum", None)
        if get is None or get(b"runtime", ctypes.byref(number)):
            return "of unknown version"
        rest, patch = divmod(number.value // 1000, 100)
        major, minor = divmod(rest, 100)
        return f"{major}.{minor}.{patch}"

    @contextmanager
    def outside_graph_capture(self) -> Iterator[None]:
        """Allow this thread calls that would break a graph which another thread is capturing."""
        exchange = getattr(self._library, "aclmdlRICaptureThreadExchangeMode", None)
        if exchange is None:  # a CANN that captures no graphs
            yield
            return
        mode = _int(_RELAXED)
        self._check("aclmdlRICaptureThreadExchangeMode", exchange(ctypes.byref(mode)))
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))

    def malloc_host(self, num_bytes: int) -> int:
        """Address of pinned host memory."""
        address = _pointer()
        self._check("aclrtMallocHost", self._malloc_host(ctypes.byref(address), num_bytes))
        assert address.value is not None
        return address.value

    def free_host(self, address: int) -> None:
        """Free memory of ``malloc_host``."""
        self._check("aclrtFreeHost", self._free_host(address))

    def location(self, address: int) -> Location | None:
        """The location of the memory at ``address``; None if the runtime cannot find out."""
        if self._attributes is None:
            return None
        attributes = _PointerAttributes()
        code = self._attributes(address, ctypes.byref(attributes))
        self._check("aclrtPointerGetAttributes", code)
        location: Location = attributes.location
        return location

    def copy_batch(
        self, plan: Descriptors, direction: Direction, locations: Locations, stream: int
    ) -> None:
        """Queue at most MAX_BATCH copies by one call; they may run in any order. If the call fails
        at a descriptor, the earlier ones have been queued."""
        assert self._batch is not None, "this CANN has no aclrtMemcpyBatchAsync"
        source, destination = direction.sides(locations.device, locations.host)
        attributes = _BatchAttributes(destination, source)
        first_index, failed = _size(0), _size(_NO_INDEX)
        code = self._batch(
            plan.destinations.ctypes.data,
            plan.sizes.ctypes.data,  # room at the destination: exactly what is copied
            plan.sources.ctypes.data,
            plan.sizes.ctypes.data,
            len(plan.sizes),
            ctypes.byref(attributes),
            ctypes.byref(first_index),
            1,
            ctypes.byref(failed),
            stream,
        )
        index = None if failed.value == _NO_INDEX else failed.value
        self._check("aclrtMemcpyBatchAsync", code, index)

    def copy_each(self, plan: Descriptors, direction: Direction, stream: int) -> None:
        """Queue copies by one call each. If one fails, the earlier ones have been queued."""
        kind = _HOST_TO_DEVICE if direction is Direction.LOAD else _DEVICE_TO_HOST
        copy = self._copy
        rows = zip(*(part.tolist() for part in plan), strict=True)
        for index, (destination, source, size) in enumerate(rows):
            code = copy(destination, size, source, size, kind, stream)
            if code:
                self._check("aclrtMemcpyAsync", code, index)

    def _function(self, name: str, *arguments: Any) -> Callable[..., int]:
        function = getattr(self._library, name)
        function.argtypes, function.restype = arguments, _int
        return function  # type: ignore[no-any-return]

    def _check(self, function: str, code: int, index: int | None = None) -> None:
        if code:
            text = self._text() or b"no further information"
            raise AclError(function, code, text.decode(errors="replace").strip(), index)
