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
from typing import Any

import numpy as np

from simple_offload.second_tier.directory import Directory
from simple_offload.second_tier.process import RECEIVE_BYTES, Message, pack, take
from simple_offload.second_tier.seals import Seals

_NUM_THREADS = 2
"""For checksums."""


def _map(descriptor: int, offset: int, num_rows: int, row_bytes: int, seal_bytes: int) -> Seals:
    """The seals of the rows in a file, the first of which begins at byte ``offset``."""
    mapped = mmap.mmap(descriptor, num_rows * row_bytes, offset=offset)
    os.close(descriptor)
    with suppress(OSError):  # the kernel has none
        mapped.madvise(mmap.MADV_HUGEPAGE)  # as in shared_memory.py
    return Seals(np.frombuffer(mapped, np.uint8).reshape(num_rows, row_bytes), seal_bytes)


def main(descriptor: int) -> None:
    """Do what comes from the socket ``descriptor``, until it ends: with the parent, or before.

    The first message has the place of the rows, and the arguments of a Directory, or None. Then
    come names of methods: of ``Seals``, with an id for the answer, or of the directory, with 0.
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
        place, files = next(requests)
        seals = _map(*place)
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
