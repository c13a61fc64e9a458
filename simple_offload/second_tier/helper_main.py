"""What the process of a Helper does.

It imports neither torch nor vLLM, which take seconds.
"""

import mmap
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simple_offload.second_tier.directory import Directory
from simple_offload.second_tier.messages import RECEIVE_BYTES, Message, pack, take
from simple_offload.second_tier.seals import Seals

_NUM_THREADS = 2
"""For checksums."""


class Memory(NamedTuple):
    """Where the rows are."""

    descriptor: int
    offset: int
    """Of the first row, in bytes."""
    num_rows: int
    row_bytes: int
    seal_bytes: int

    def map(self) -> Seals:
        """The seals of the rows."""
        mapped = mmap.mmap(self.descriptor, self.num_rows * self.row_bytes, offset=self.offset)
        os.close(self.descriptor)
        with suppress(OSError):  # the kernel has none
            mapped.madvise(mmap.MADV_HUGEPAGE)  # as in shared_memory.py
        rows = np.frombuffer(mapped, np.uint8).reshape(self.num_rows, self.row_bytes)
        return Seals(rows, self.seal_bytes)


def main(descriptor: int) -> None:
    """Do what comes from the socket ``descriptor``, until it ends: with the parent, or before.

    The first message has a Memory and the arguments of a Directory, or None. Then come names of
    methods: of ``Seals``, with an id for the answer, or of the directory, with 0.
    """
    # Ctrl-C and systemd reach all processes of a server. This one ends with the server, in order.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    lock = threading.Lock()
    received = bytearray()
    with socket.socket(fileno=descriptor) as connection:

        def receive() -> Iterator[Message]:
            while data := connection.recv(RECEIVE_BYTES):
                received.extend(data)
                yield from take(received)

        def send(what: str, *arguments: Any) -> None:
            with lock, suppress(OSError):  # the parent is gone
                connection.sendall(pack((what, *arguments)))

        def answer(number: int, what: str, *arguments: Any) -> None:
            try:
                send("answer", number, getattr(seals, what)(*arguments))
            except Exception:  # noqa: BLE001 - without an end, the parent would wait
                traceback.print_exc()
                connection.shutdown(socket.SHUT_RDWR)

        requests = receive()
        memory, files = next(requests)
        seals = memory.map()
        directory = None
        if files is not None:
            root, max_bytes = files
            try:
                directory = Directory(
                    Path(root), max_bytes, partial(send, "seen"), partial(send, "trouble")
                )
            except OSError as error:
                send("refused", str(error))
                return
        send("ready")
        if directory is not None:
            directory.start()
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            for number, what, *arguments in requests:
                if number:
                    threads.submit(answer, number, what, *arguments)
                else:
                    getattr(directory, what)(*arguments)
        if directory is not None:
            directory.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
