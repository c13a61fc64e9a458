"""Process: another Python process, which gets and sends messages."""

import io
import os
import pickle
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from simple_offload.logs import get_logger

logger = get_logger(__name__)

_RECEIVE_BYTES = 1 << 20
"""Most that is received at once."""

Message = tuple[Any, ...]


class Process:
    """Neither ``send`` nor ``receive`` waits for the other process, even if that is stopped: what
    the pipe has no room for is sent later.

    Not multiprocessing's, nor a pool of concurrent.futures: their pipes wait, and a spawned process
    imports the server's main module again. With ``vllm serve`` it was ready after 31 s, and took
    407 MiB; this one after 0.7 s, with 28 MiB (vLLM 0.32, two cores).
    """

    def __init__(self, module: str, descriptors: Sequence[int] = ()) -> None:
        """Run ``module``, whose standard input is its end of the socket: pickles go both ways. The
        process inherits ``descriptors``. Raises OSError if it cannot be started."""
        self._socket, theirs = socket.socketpair()
        self._unsent = bytearray()
        self._received = bytearray()
        with theirs:
            path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                stdin=theirs.fileno(),
                pass_fds=descriptors,
            )

    def send(self, message: Message) -> None:
        """Raises OSError if the process has ended."""
        self._unsent += pickle.dumps(message)
        self._flush()

    def receive(self, seconds: float = 0.0) -> list[Message]:
        """The messages that have come. Waits for one for some seconds. Raises EOFError or OSError
        if the process has ended."""
        self._flush()
        if seconds:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poll.poll(1000 * seconds)
        try:
            data = self._socket.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError(f"its process has ended (exit code {self._process.poll()})")
        self._received += data
        messages: list[Message] = []
        received, end = io.BytesIO(self._received), 0
        with suppress(EOFError, pickle.UnpicklingError):  # of the last one, a part has come
            while True:
                messages.append(pickle.load(received))  # noqa: S301 - from our own process
                end = received.tell()
        del self._received[:end]
        return messages

    def close(self, seconds: float = 10.0) -> None:
        """Let the process end after what was sent, and wait for it. One that does not end in time
        is killed."""
        deadline = time.monotonic() + seconds
        with self._socket, suppress(OSError):  # it has ended
            self._socket.settimeout(seconds)
            self._socket.sendall(self._unsent)
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("The second tier's process did not end and is killed")
            self._process.kill()

    def _flush(self) -> None:
        while self._unsent:
            try:
                num_sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            del self._unsent[:num_sent]
