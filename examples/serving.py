"""A ``vllm serve`` process for as long as a block runs, spoken to over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from examples.engine_bench.bench import environment

HOST = "127.0.0.1"
START_SECONDS = 600.0
"""A large model takes minutes to load and to compile."""
RESET_SECONDS = 60.0
STOP_SECONDS = 30.0
"""What a server may take to end once asked to, before it is killed."""
TAIL_LINES = 30
COMMAND = (sys.executable, "-m", "examples.vllm_command", "serve")
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 60.0


class ServerFailed(Exception):
    """There is no server, or none any more. The text says why, with the end of its log."""


class Server:
    """A running server. ``serving`` makes and ends it."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.port = port
        self.log = log
        self.pid = process.pid
        """Of the process, of its process group and of its session."""
        self.ended: Future[int] = Future()
        """Holds the exit code once the process has ended."""
        self.ended.set_running_or_notify_cancel()  # whoever waits for it cannot cancel it
        Thread(target=lambda: self.ended.set_result(process.wait()), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def check(self) -> None:
        """Raise ServerFailed if the process has ended."""
        if self.ended.done():
            raise self.failure("ended while it was needed")

    def failure(self, what: str) -> ServerFailed:
        """An error that says ``what`` went wrong, how the process ended if it has, and how its
        log ends."""
        with suppress(TimeoutError):  # of a process that has just died, others know first
            self.ended.result(timeout=1)
        how = f", {_how(self.ended.result())}" if self.ended.done() else ""
        tail = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return ServerFailed("\n".join([f"The server {what}{how}. The end of {self.log}:", *tail]))

    def reset_prefix_cache(self, *, external: bool) -> None:
        """Forget every prefix on the device, and with ``external`` the connector's as well.
        Waits for requests and stores that hold blocks. Only with VLLM_SERVER_DEV_MODE=1.

        Raises ServerFailed if that does not happen in time.
        """
        path = f"/reset_prefix_cache?reset_external={str(external).lower()}"
        deadline = time.monotonic() + RESET_SECONDS
        while True:
            status, body = self._request("POST", path)
            if status != 200:
                raise self.failure(f"answered {status} to {path}")
            if json.loads(body)["success"] is True:
                return
            if time.monotonic() > deadline:
                raise self.failure(f"did not reset its caches within {RESET_SECONDS:.0f} s")
            self._pause()

    def samples(self) -> list[Sample]:
        """All that /metrics says now."""
        status, body = self._request("GET", "/metrics")
        if status != 200:
            raise self.failure(f"answered {status} to /metrics")
        families = text_string_to_metric_families(body.decode())
        return [sample for family in families for sample in family.samples]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry ``labels``; ``name`` as in /metrics, so that of a
        counter ends in "_total". 0 if there are none."""
        return sum(
            sample.value
            for sample in self.samples()
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def wait_until_ready(self) -> None:
        """Return once requests are answered. Raises ServerFailed if the process ends before, or
        takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            if time.monotonic() > deadline:
                raise self.failure(f"did not answer within {START_SECONDS:.0f} s")
            self._pause()

    def _is_healthy(self) -> bool:
        try:
            return self._get_health() == 200
        except (OSError, HTTPException):
            return False  # not listening yet

    def _get_health(self) -> int:
        connection = HTTPConnection(HOST, self.port, timeout=_ANSWER_SECONDS)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        finally:
            connection.close()

    def _pause(self) -> None:
        """Wait a moment. Raises ServerFailed as soon as the process ends."""
        with suppress(TimeoutError):
            self.ended.result(timeout=_POLL_SECONDS)
            raise self.failure("ended while it was waited for")

    def _request(self, method: str, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection(HOST, self.port, timeout=_ANSWER_SECONDS)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, HTTPException) as error:
            raise self.failure(f"gave no answer to {path} ({error})") from None
        finally:
            connection.close()


def server_environment(
    device: Literal["cuda", "cpu"], scratch: Path, **extra: str
) -> dict[str, str]:
    """Environment of a server with vLLM's development endpoints, which reset caches; what it
    leaves in temporary files goes to ``scratch``. Nothing is downloaded, unless ``extra`` says
    ``HF_HUB_OFFLINE="0"``."""
    return environment(device, {"VLLM_SERVER_DEV_MODE": "1", **extra}, scratch)


@contextmanager
def serving(
    model: str | Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    port: int | None = None,
    name: str = "model",
) -> Iterator[Server]:
    """Serve ``model`` with vLLM's ``arguments`` under ``name``, on ``port`` of this host or on a
    free one, and hand over the server once it answers.

    ``environment`` is all that the server gets, see ``server_environment``. Its standard streams
    go to ``log``. Raises ServerFailed if the port is in use, or if the server does not come up.
    However the block ends, the server and all it started are gone.
    """
    if port is not None and not _is_free(port):
        raise ServerFailed(f"Port {port} of {HOST} is in use.")
    port = port or free_port()
    address = ["--host", HOST, "--port", str(port), "--served-model-name", name]
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [*COMMAND, str(model), *address, *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            # Ctrl-C then reaches this process alone, which stops the server once.
            start_new_session=True,
        )
    server = Server(process, port, log)
    ready = False
    try:
        server.wait_until_ready()
        ready = True
        yield server
    finally:
        _stop(server, ready=ready)


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Command line arguments for vLLM: ``{"block_size": 32, "enforce_eager": True}`` becomes
    ``--block-size 32 --enforce-eager``; what is False or None is left out, what is a mapping
    becomes JSON."""
    line = []
    for key, value in arguments.items():
        if value is None or value is False:
            continue
        line.append("--" + key.replace("_", "-"))
        if value is not True:
            line.append(json.dumps(value) if isinstance(value, Mapping) else str(value))
    return line


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: what the system still remembers of an ended one is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _stop(server: Server, *, ready: bool) -> None:
    """Once it is up, vLLM's server ends its engine when it is told to end. While it starts it may
    hear nothing for a minute, so its engine is told as well, and little time is given."""
    tell, seconds = (os.kill, STOP_SECONDS) if ready else (os.killpg, STOP_SECONDS / 6)
    try:
        if not server.ended.done():
            with suppress(ProcessLookupError, TimeoutError):
                tell(server.pid, signal.SIGTERM)
                server.ended.result(timeout=seconds)
    finally:
        # The engine's processes as well, which outlive a server that was killed.
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.ended.result()


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"with exit code {code}"
