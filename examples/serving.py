"""A ``vllm serve`` process, and its HTTP endpoints."""

import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from examples.bench.child import STOP_SECONDS, failure, how_ended, start, stop
from examples.bench.command import RunFailed

HOST = "127.0.0.1"
START_SECONDS = 600.0
"""A large model takes minutes to load and to compile."""
RESET_SECONDS = 60.0
COMMAND = (sys.executable, "-m", "examples.vllm_command", "serve")
_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 60.0


class Endpoint:
    """A server's HTTP endpoints."""

    def __init__(self, url: str, model: str = "") -> None:
        """``url``: http or https, without ``/v1``. ``model``: the name under which it is served."""
        self.url = url.rstrip("/")
        self.model = model

    def failure(self, text: str) -> RunFailed:
        """An error with ``text`` about the server."""
        return RunFailed(f"{self.url} {text}.")

    def find_model(self) -> int | None:
        """Ask for the first model. Returns the length of its longest request in tokens where the
        server tells it. Raises RunFailed if there is no model."""
        try:
            first = json.loads(self._request("GET", "/v1/models"))["data"][0]
            self.model, longest = first["id"], first.get("max_model_len")
            return None if longest is None else int(longest)
        except (ValueError, LookupError, TypeError) as error:
            raise self.failure(f"names no model at /v1/models ({error!r})") from None

    def samples(self) -> list[Sample]:
        """All samples of /metrics."""
        families = text_string_to_metric_families(self._request("GET", "/metrics").decode())
        return [sample for family in families for sample in family.samples]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with ``labels``; 0 if there are none. ``name`` as in /metrics:
        a counter's ends in "_total"."""
        return sum(
            sample.value
            for sample in self.samples()
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def _request(self, method: str, path: str) -> bytes:
        """The body of the answer. Raises RunFailed if there is none, or an error."""
        try:
            answer = self.exchange(method, path)
        except httpx.HTTPError as error:
            raise self.failure(f"gave no answer to {path} ({error})") from None
        if answer.status_code != 200:
            raise self.failure(f"answered {answer.status_code} to {path}")
        return answer.content

    def exchange(self, method: str, path: str) -> httpx.Response:
        """Any answer, without the proxies of the environment. Raises httpx.HTTPError if there is
        none."""
        return httpx.request(method, self.url + path, timeout=_ANSWER_SECONDS, trust_env=False)


class Server(Endpoint):
    """A ``vllm serve`` process. A ``with`` block begins once it answers. However the block ends,
    the server and all it started are gone."""

    def __init__(
        self,
        model: str | Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        port: int | None = None,
        name: str = "model",
        command: Sequence[str] = (),
    ) -> None:
        """Start to serve ``model`` with vLLM's ``arguments`` under ``name``, on ``port`` of this
        host or on a free one, by COMMAND or by another ``command``.

        ``environment`` is the server's whole one, see ``engine_environment``. Its standard streams
        go to ``log``. Raises RunFailed if the port is in use.
        """
        if port is not None and not is_free(port):
            raise RunFailed(f"Port {port} of {HOST} is in use.")
        self.port = port or free_port()
        super().__init__(f"http://{HOST}:{self.port}", name)
        self.log = log
        address = ["--host", HOST, "--port", str(self.port), "--served-model-name", name]
        line = [*(command or COMMAND), str(model), *address, *arguments]
        self.process = start(line, environment, log)
        self.pid = self.process.pid
        """Of the process, of its process group and of its session."""
        self.ended: Future[int] = Future()
        """Holds the exit code once the process has ended."""
        self.ended.set_running_or_notify_cancel()  # so that no waiting thread can cancel it
        Thread(target=lambda: self.ended.set_result(self.process.wait()), daemon=True).start()

    def __enter__(self) -> Self:
        """Raises RunFailed if the server does not come up."""
        try:
            self.wait_until_ready()
        except BaseException:
            # vLLM's server may not react to SIGTERM for a minute while it starts, so its engine
            # gets the signal as well, and little time is given.
            stop(self.process, STOP_SECONDS / 6, group=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.process)

    def check(self) -> None:
        """Raise RunFailed if the process has ended."""
        if self.ended.done():
            raise self.failure("ended while it was needed")

    def failure(self, text: str) -> RunFailed:
        """An error with ``text`` about the server, its exit code if it has ended, and the end of
        its log."""
        with suppress(TimeoutError):  # the clients of a dying process notice its end first
            self.ended.result(timeout=1)
        how = f", {how_ended(self.ended.result())}" if self.ended.done() else ""
        return failure(f"The server {text}{how}", self.log)

    def reset_prefix_cache(self, *, external: bool, seconds: float = RESET_SECONDS) -> None:
        """Reset the device's prefix cache, and with ``external`` the connector's as well. Waits
        for requests and stores that hold blocks. Needs ``engine_environment``.

        Raises RunFailed if that does not happen within ``seconds``.
        """
        path = f"/reset_prefix_cache?reset_external={str(external).lower()}"

        def is_reset() -> bool:
            return json.loads(self._request("POST", path))["success"] is True

        self.wait_for(is_reset, seconds, "its caches to be empty")

    def wait_until_ready(self) -> None:
        """Return once requests are answered. Raises RunFailed as ``wait_for`` does."""

        def is_healthy() -> bool:
            with suppress(httpx.HTTPError):  # until it listens
                return self.exchange("GET", "/health").status_code == 200
            return False

        self.wait_for(is_healthy, START_SECONDS, "an answer")

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Poll ``condition`` until it holds. Raises RunFailed when it does not in time, or when the
        process ends."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise self.failure(f"was waited for, {seconds:.0f} s, for {what}")
            with suppress(TimeoutError):
                self.ended.result(timeout=_POLL_SECONDS)
                self.check()


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Command line arguments for vLLM: ``{"block_size": 32, "enforce_eager": True}`` becomes
    ``--block-size 32 --enforce-eager``; False and None are left out, a mapping becomes JSON."""
    line = []
    for key, value in arguments.items():
        if value is None or value is False:
            continue
        line.append("--" + key.replace("_", "-"))
        if value is not True:
            line.append(json.dumps(value) if isinstance(value, Mapping) else str(value))
    return line


def free_port() -> int:
    """A TCP port of this host on which no process listens. It is below those that the kernel gives
    away by itself (from 32,768 on): another process would get such a one before it is used."""
    while not is_free(port := 20_000 + secrets.randbelow(12_000)):
        pass
    return port


def is_free(port: int) -> bool:
    """Whether ``port`` of this host is free to listen on."""
    with socket.socket() as probe:
        # As servers do: connections of an ended server that the kernel still keeps do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
