"""Process: another Python process, which gets and sends messages."""

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from simple_offload.logs import get_logger
from simple_offload.second_tier.messages import RECEIVE_BYTES, Message, pack, take

logger = get_logger(__name__)

_END_SECONDS = 10.0
"""Longest wait for its end."""


class Process:
    """Neither ``send`` nor ``receive`` waits for the other process, even if that is stopped: what
    the pipe has no room for is sent later.

    Not multiprocessing's: that imports the server's main module again, and its pipes wait.
    """

    def __init__(self, module: str, descriptors: Sequence[int] = ()) -> None:
        """Run ``module`` with the descriptor of its socket as its argument. The process inherits
        ``descriptors``. Raises OSError if it cannot be started."""
        self._socket, theirs = socket.socketpair()
        self._unsent = bytearray()
        self._received = bytearray()
        with theirs:
            path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *descriptors],
            )

    def send(self, message: Message) -> None:
        """Raises OSError if the process has ended."""
        self._unsent += pack(message)
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
            data = self._socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError(f"its process has ended (exit code {self._process.poll()})")
        self._received += data
        return take(self._received)

    def close(self) -> None:
        """Let the process end after what was sent, and wait for it. One that does not end is
        killed."""
        deadline = time.monotonic() + _END_SECONDS
        try:
            while self._unsent and time.monotonic() < deadline:
                self.receive(1.0)
            self._socket.shutdown(socket.SHUT_WR)
            while time.monotonic() < deadline:
                self.receive(1.0)
        except (EOFError, OSError):
            pass  # it has ended
        self._socket.close()
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
