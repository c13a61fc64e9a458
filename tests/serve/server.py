"""A ``vllm serve`` process with the connector, and its HTTP interface."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.engine.harness import ROOT, engine_environment, kill_session, log_tail

START_SECONDS = 150.0
ANSWER_SECONDS = 60.0
STOP_SECONDS = 60.0
HOST = "127.0.0.1"

_HEADERS = {"Content-Type": "application/json"}


class Completion(NamedTuple):
    """The answer to one prompt."""

    tokens: list[int]
    logprobs: list[float]


class Samples:
    """The samples on /metrics at one time."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    @property
    def names(self) -> set[str]:
        """Names of all samples, as in the exposition."""
        return {sample.name for sample in self._samples}

    def sum(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with ``labels``; ``name`` as in the exposition."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


class Server:
    """Runs from construction to ``stop`` or ``kill``, in a session of its own."""

    def __init__(self, model: Path, directory: Path, *arguments: str) -> None:
        self.port = free_port()
        self.log = directory / "serve.log"
        command = [sys.executable, "-m", "examples.vllm_command", "serve", str(model)]
        address = ["--host", HOST, "--port", str(self.port), "--served-model-name", "random"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *address, *arguments],
                cwd=ROOT,
                env=engine_environment(
                    VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_SERVER_DEV_MODE="1"
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        """Return when the server answers; AssertionError when it ends or takes too long."""
        self.wait_for(self._is_up, seconds, "the server to answer")

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Poll ``condition`` until it holds; AssertionError when it does not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            status = self.process.poll()
            assert status is None, f"the server ended with {status}\n{log_tail(self.log)}"
            assert time.monotonic() < deadline, (
                f"waited {seconds:.0f} s for {what}\n{log_tail(self.log)}"
            )
            time.sleep(0.05)

    def complete(
        self, prompt: Sequence[int], max_tokens: int, stop: str | None = None
    ) -> Completion:
        """Answer greedily, stopping early at ``stop`` only."""
        body = _completion_request(prompt, max_tokens, stream=False) | {"stop": stop}
        with self._post("/v1/completions", body) as response:
            (choice,) = json.load(response)["choices"]
        return Completion(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def ask_and_hang_up(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Send a request and close the connection without reading the answer."""
        connection = HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        body = json.dumps(_completion_request(prompt, max_tokens, stream=False))
        connection.request("POST", "/v1/completions", body, _HEADERS)
        connection.close()

    @contextmanager
    def open_stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[Iterator[bytes]]:
        """The lines of a streamed answer. Leaving the block closes the connection, even before the
        end of the answer."""
        body = _completion_request(prompt, max_tokens, stream=True)
        with self._post("/v1/completions", body) as response:
            yield (line for line in response if line.strip())

    def reset_prefix_cache(self) -> None:
        """Reset the device's prefix cache but not the host tier, once all stores have ended."""
        self.wait_for(self._reset, ANSWER_SECONDS, "the prefix cache to be free")

    def samples(self) -> "Samples":
        """All samples on /metrics."""
        with self._get("/metrics") as response:
            families = text_string_to_metric_families(response.read().decode())
            return Samples([sample for family in families for sample in family.samples])

    def metric(self, name: str, **labels: str) -> float:
        """The current sum of a metric's samples, as of ``Samples.sum``."""
        return self.samples().sum(name, **labels)

    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        return not (
            self.metric("vllm:num_requests_running") or self.metric("vllm:num_requests_waiting")
        )

    def family(self) -> list[psutil.Process]:
        """The server's process and its descendants."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def shared_memory(self) -> set[Path]:
        """Files of /dev/shm that the server's processes have mapped."""
        paths = {
            Path(mapping.path.removesuffix(" (deleted)"))
            for process in self.family()
            for mapping in process.memory_maps()
        }
        return {path for path in paths if path.is_relative_to("/dev/shm")}

    def terminate(self) -> None:
        """Ask the server to stop, as a service manager does."""
        self.process.send_signal(signal.SIGTERM)

    def wait_for_end(self) -> int:
        """The server's exit status; AssertionError when it does not end in time."""
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"no end within {STOP_SECONDS:.0f} s\n{log_tail(self.log)}"
            ) from None

    def kill(self) -> None:
        """Kill all processes of the server."""
        kill_session(self.process.pid)
        self.process.wait()

    def _is_up(self) -> bool:
        try:
            with self._get("/health") as response:
                return response.status == 200
        except (OSError, HTTPException):
            return False

    def _reset(self) -> bool:
        with self._post("/reset_prefix_cache", {}) as response:
            return json.load(response)["success"] is True

    @contextmanager
    def _get(self, path: str) -> Iterator[HTTPResponse]:
        with self._request("GET", path, None) as response:
            yield response

    @contextmanager
    def _post(self, path: str, body: dict[str, Any]) -> Iterator[HTTPResponse]:
        with self._request("POST", path, body) as response:
            assert response.status == 200, f"{response.status}: {response.read()[:1000]!r}"
            yield response

    @contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[HTTPResponse]:
        connection = HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            encoded = None if body is None else json.dumps(body)
            connection.request(method, path, encoded, _HEADERS)
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()


def read_stream(lines: Iterable[bytes]) -> list[int]:
    """The tokens of a streamed answer's lines."""
    events = [line.removeprefix(b"data: ").strip() for line in lines]
    choices = [json.loads(event)["choices"] for event in events if event != b"[DONE]"]
    return [token for (choice,) in choices for token in choice["token_ids"]]


def free_port() -> int:
    """A TCP port that is free to listen on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def can_listen(port: int) -> bool:
    """Whether ``port`` is free to listen on, as a restarted server would."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _completion_request(prompt: Sequence[int], max_tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": "random",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        "stream": stream,
    }
