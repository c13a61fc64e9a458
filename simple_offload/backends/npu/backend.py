"""NpuBackend: copies between pinned host memory and an Ascend NPU."""

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from simple_offload import memory
from simple_offload.backends.base import Barrier, Direction, Measurement, require_blocks_within
from simple_offload.backends.descriptors import Descriptors, Regions, plan_copies
from simple_offload.backends.npu.acl import (
    DEVICE,
    HOST,
    LIBRARY,
    MAX_BATCH,
    NOT_SUPPORTED,
    Acl,
    AclError,
    Location,
    Locations,
)
from simple_offload.config import ConfigError
from simple_offload.logs import get_logger
from simple_offload.transfer import Transfer

logger = get_logger(__name__)

_PROBE = bytes(range(1, 65))


@dataclass(slots=True, eq=False)
class NpuPending:
    """A copy under way."""

    npu: Any
    event: Any
    descriptors: Descriptors
    """Kept alive: the runtime might read them after the call."""
    path: str

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def remaining_seconds(self) -> float:
        """Infinite: no bandwidth has been measured on an NPU."""
        return math.inf

    def hold_compute(self) -> None:
        self.npu.current_stream().wait_event(self.event)

    def measure(self) -> Measurement:
        return Measurement(None, {self.path: int(self.descriptors.sizes.sum())})


class NpuBackend:
    """Each direction has a stream, so loads and stores overlap each other and the compute stream.

    ``copy_path``: "batch" copies up to 4096 descriptors by one call, "single" one by one call;
    "auto" uses batches where CANN and the chip support them. (VLLM_ASCEND_ENABLE_BATCH_MEMCPY, with
    which vllm-ascend was built, is not read: it says nothing of the chip.)
    Raises ConfigError if torch_npu or CANN cannot be loaded, or "batch" is not supported.
    """

    chunk_bytes = 1 << 30  # the runtime refuses a single allocation of some 200 GB
    pins_memory = True

    def __init__(self, copy_path: str = "auto") -> None:
        if copy_path not in ("auto", "batch", "single"):
            raise ConfigError(
                f"copy_path={copy_path!r}: on an NPU it can be 'auto', 'batch' or 'single'"
            )
        self._npu = _load_torch_npu()
        self._acl = _load_acl()
        self.version = self._acl.version()
        """CANN's."""
        self._device: int = self._npu.current_device()
        self._npu.set_device(self._device)
        self._streams = {direction: self._npu.Stream(self._device) for direction in Direction}
        self._locations = Locations(Location(0, HOST), Location(self._device, DEVICE))
        self._host_addresses: list[int] = []
        self._host_regions: Regions | None = None
        self._must_batch = copy_path == "batch"
        self.batches, why = self._choose(copy_path)
        """Whether copies go in batches: no longer after the chip has refused one."""
        logger.info(
            "CANN %s, NPU %d: copying %s (%s)",
            self.version,
            self._device,
            "in batches" if self.batches else "one descriptor a call",
            why,
        )

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory from the runtime; registering other memory would require alignment.
        Raises MemoryShortageError, or AclError, if there is too little."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.int8)
        self._npu.set_device(self._device)
        # vLLM may be capturing its graphs.
        with memory.claim(num_bytes), self._acl.outside_graph_capture():
            address = self._acl.malloc_host(num_bytes)
        self._host_addresses.append(address)
        buffer = (ctypes.c_char * num_bytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.int8)

    def open(self, device: Sequence[torch.Tensor]) -> None:
        """Note the tensors' addresses. The caller keeps the tensors alive."""
        self._device_regions = Regions.from_tensors(device)
        if device:
            self._locations = self._locate(device[0])
            if self._locations.device.type != DEVICE:
                raise ValueError(
                    f"a KV cache in memory of type {self._locations.device.type}, not the NPU's"
                )

    def add_host_chunk(self, regions: Sequence[torch.Tensor]) -> None:
        """Replace the list of addresses; copies under way keep theirs."""
        host = self._host_regions
        self._host_regions = host.with_chunk(regions) if host else Regions.from_tensors(regions)

    def barrier(self) -> Barrier | None:
        """An event on the compute stream."""
        event: Barrier = self._npu.current_stream(self._device).record_event()
        return event

    def enter_thread(self, direction: Direction) -> None:
        """Set the device: the runtime has a context per thread."""
        self._npu.set_device(self._device)

    def copy(self, direction: Direction, transfer: Transfer, barrier: Barrier | None) -> NpuPending:
        plan = self._plan(direction, transfer)
        stream = self._streams[direction]
        if barrier is not None:
            stream.wait_event(barrier)
        try:
            # torch_npu queues the wait on the host, and reading the handle empties that queue:
            # with a handle read before, the copies would reach the stream ahead of the wait.
            self._submit(plan, direction, stream.npu_stream)
            event = stream.record_event()
        except BaseException:
            # Some descriptors may be queued, and the failed transfer's blocks are given to others.
            stream.synchronize()
            raise
        path = "batch" if self.batches else "single"
        return NpuPending(self._npu, event, plan, path)

    def close(self) -> None:
        self._npu.set_device(self._device)
        for stream in self._streams.values():
            with suppress(RuntimeError):  # a broken device copies nothing more
                stream.synchronize()
        for address in self._host_addresses:
            self._acl.free_host(address)
        self._host_addresses.clear()

    # One copy

    def _plan(self, direction: Direction, transfer: Transfer) -> Descriptors:
        device = self._device_regions
        host = self._host_regions or device
        if len(device.pages):
            require_blocks_within(transfer, device.num_blocks, host.num_blocks)
        blocks = direction.sides(transfer.device_blocks, transfer.host_blocks)
        return plan_copies(*direction.sides(device, host), *blocks)

    def _submit(self, plan: Descriptors, direction: Direction, stream: int) -> None:
        """Queue ``plan``. Raises AclError, with the index in the whole plan, for a refused
        descriptor; the earlier ones have been queued."""
        for start in range(0, len(plan.sizes), MAX_BATCH):
            chunk = Descriptors(*(part[start : start + MAX_BATCH] for part in plan))
            try:
                self._submit_chunk(chunk, direction, stream)
            except AclError as error:
                index = None if error.index is None else start + error.index
                raise AclError(error.function, error.code, error.text, index) from error

    def _submit_chunk(self, chunk: Descriptors, direction: Direction, stream: int) -> None:
        if self.batches:
            try:
                self._acl.copy_batch(chunk, direction, self._locations, stream)
            except AclError as error:
                if error.code != NOT_SUPPORTED or self._must_batch:
                    raise
                self.batches = False
                logger.warning("This NPU refused a batch copy: one descriptor per call from now on")
            else:
                return
        # Some of the refused chunk may be queued; copying it twice does no harm.
        self._acl.copy_each(chunk, direction, stream)

    # Choosing, at start

    def _choose(self, copy_path: str) -> tuple[bool, str]:
        """Whether to copy in batches, and why. Raises ConfigError if ``copy_path`` is not
        supported."""
        if copy_path == "single":
            return False, "as configured"
        if not self._acl.has_batch:
            refusal = f"CANN {self.version} has no aclrtMemcpyBatchAsync"
        else:
            try:
                self._probe()
            except AclError as error:
                refusal = str(error)
            else:
                return True, "as configured" if copy_path == "batch" else "they work here"
        if copy_path == "batch":
            raise ConfigError(f"copy_path='batch': {refusal}. Allowed here: 'auto' or 'single'")
        return False, refusal

    def _probe(self) -> None:
        """Copy some bytes to the device and back, by one batch each. Raises AclError if a batch is
        refused, or other bytes come back."""
        size, stream = len(_PROBE), self._npu.current_stream(self._device)
        with memory.using_reserve():  # soon given back
            host = self.allocate_host(2 * size)
        try:
            host[:size] = torch.frombuffer(bytearray(_PROBE), dtype=torch.int8)
            host[size:] = 0
            device = torch.empty(size, dtype=torch.int8, device=f"npu:{self._device}")
            locations = self._locate(device)
            regions = Regions.from_tensors([device.view(1, size)])
            for direction, at in ((Direction.LOAD, 0), (Direction.STORE, size)):
                side = Regions.from_tensors([host[at : at + size].view(1, size)])
                source, destination = direction.sides(regions, side)
                plan = Descriptors(destination.bases[0], source.bases[0], regions.pages)
                self._acl.copy_batch(plan, direction, locations, stream.npu_stream)
            stream.synchronize()
            if host[size:].numpy().tobytes() != _PROBE:
                raise AclError("aclrtMemcpyBatchAsync", 0, "a probe came back with other bytes")
        finally:
            stream.synchronize()  # also if only the first batch was queued
            self._acl.free_host(self._host_addresses.pop())

    def _locate(self, device: torch.Tensor) -> Locations:
        """The locations of host memory and of ``device`` for batches. The runtime may number
        devices otherwise than the process does."""
        location = self._acl.location(device.data_ptr())
        return Locations(Location(0, HOST), location or Location(self._device, DEVICE))


def _load_torch_npu() -> Any:
    """The module ``torch.npu``. Raises ConfigError if it cannot be imported."""
    try:
        import torch_npu
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch_npu"
        raise ConfigError(
            f"backend='npu': torch_npu cannot be imported: {error}. "
            + (
                "Install the torch_npu that fits this PyTorch"
                if missing
                else "Is CANN installed, and its set_env.sh sourced?"
            )
        ) from error
    return torch_npu.npu


def _load_acl() -> Acl:
    try:
        return Acl.load()
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"backend='npu': CANN's {LIBRARY} cannot be used: {error}. "
            "Is CANN installed, and its set_env.sh sourced?"
        ) from error
