"""What the process of a Helper does.

It imports neither torch nor vLLM, which take seconds.
"""

import mmap
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from simple_offload.second_tier.directory import Directory
from simple_offload.second_tier.seals import Seals

_NUM_THREADS = 2
"""For checksums."""
_PAUSE_SECONDS = 1.0
_PAUSE_SCANS = 9
"""The pause between two scans: a second, or the time of nine scans if that is longer. So scans that
achieve nothing take up a tenth of the time at most."""


def _map(descriptor: int, offset: int, num_rows: int, row_bytes: int, seal_bytes: int) -> Seals:
    """The seals of the rows in a file, the first of which begins at byte ``offset``."""
    mapped = mmap.mmap(descriptor, num_rows * row_bytes, offset=offset)
    os.close(descriptor)
    with suppress(OSError):  # the kernel has none
        mapped.madvise(mmap.MADV_HUGEPAGE)  # as in shared_memory.py
    return Seals(np.frombuffer(mapped, np.uint8).reshape(num_rows, row_bytes), seal_bytes)


def _scan_for_ever(directory: Directory) -> None:
    while directory.scan_due.wait():
        began_at = time.monotonic()
        directory.scan()
        time.sleep(max(_PAUSE_SECONDS, _PAUSE_SCANS * (time.monotonic() - began_at)))


def main() -> None:
    """Do what comes from the parent, by the socket that is standard input, until that ends: with
    the parent, or before.

    The first message has the place of the rows, and the arguments of a Directory, or None. Then
    come names of methods: of ``Seals``, with an id for the answer, or of the directory, with 0.
    """
    # Ctrl-C and systemd reach all processes of a server. This one ends with the server, in order.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    lock = threading.Lock()
    directory: Directory | None = None
    connection = socket.socket(fileno=sys.stdin.fileno())

    def send(what: str, *arguments: Any) -> None:
        with lock, suppress(OSError):  # the parent is gone
            connection.sendall(pickle.dumps((what, *arguments)))

    def act(number: int, what: str, *arguments: Any) -> None:
        try:
            answer = getattr(seals if number else directory, what)(*arguments)
            if number:
                send("answer", number, answer)
        except Exception:  # noqa: BLE001 - without an end, the parent would wait
            traceback.print_exc()
            connection.shutdown(socket.SHUT_RDWR)

    with connection, connection.makefile("rb") as received:
        place, files = pickle.load(received)  # noqa: S301 - from our own parent
        seals = _map(*place)
        if files is None:
            send("seen", sys.maxsize)
        else:
            root, max_bytes = files
            try:
                directory = Directory(
                    Path(root), max_bytes, partial(send, "seen"), partial(send, "trouble")
                )
            except OSError as error:
                send("refused", str(error))
                return
            # A scan may take minutes. Other changes wait for none, and the process ends in one.
            threading.Thread(target=_scan_for_ever, args=[directory], daemon=True).start()
        with (
            ThreadPoolExecutor(_NUM_THREADS) as checksums,
            ThreadPoolExecutor(1) as changes,
            suppress(EOFError, ConnectionError, pickle.UnpicklingError),  # the end, at any place
        ):
            while True:
                number, *request = pickle.load(received)  # noqa: S301
                (checksums if number else changes).submit(act, number, *request)


if __name__ == "__main__":
    main()
