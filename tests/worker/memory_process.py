"""A process that has shared memory, and does with it what a test says. It is forked: to import
torch takes seconds."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from simple_offload.shared_memory import Address, SharedMemory

PATIENCE_SECONDS = 30.0
_fork = multiprocessing.get_context("fork")


class MemoryProcess:
    """A process that creates memory, or opens that of another process at ``address``."""

    def __init__(self, address: Address | None = None) -> None:
        here, there = _fork.Pipe()
        self._connection = here
        self._process = _fork.Process(target=_serve, args=(here, there, address), daemon=True)
        self._process.start()
        there.close()

    def ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function of this module or of ``SharedMemory``, called there with its
        memory and these arguments."""
        self._connection.send((call, arguments))
        assert self._connection.poll(PATIENCE_SECONDS), f"{call} does not return"
        return self._connection.recv()

    def kill(self) -> None:
        """Kill it with SIGKILL. No effect if it has ended."""
        self._process.kill()
        self._process.join(PATIENCE_SECONDS)
        assert not self._process.is_alive()
        self._connection.close()


def address(memory: SharedMemory) -> Address:
    return memory.address


def num_ready(memory: SharedMemory) -> int:
    return memory.num_ready


def fill(memory: SharedMemory, start: int, num_bytes: int, value: int) -> None:
    memory.part(start, num_bytes).fill_(value)


def extremes(memory: SharedMemory, start: int, num_bytes: int) -> tuple[int, int]:
    """The lowest and the highest value of these bytes."""
    lowest, highest = memory.part(start, num_bytes).aminmax()
    return int(lowest), int(highest)


def mappings(_: SharedMemory) -> list[str]:
    """The files that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if len(line.split()) > 5]


def num_open_files() -> int:
    """Of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def _serve(parents: Connection, connection: Connection, address: Address | None) -> None:
    parents.close()  # else its end would not be seen
    memory = SharedMemory.create() if address is None else SharedMemory.open(address)
    while True:
        try:
            call, arguments = connection.recv()
        except EOFError:
            return
        connection.send(call(memory, *arguments))
