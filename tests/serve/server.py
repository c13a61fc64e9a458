"""A ``vllm serve`` process with the connector, and its HTTP interface."""

import json
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from examples import serving
from simple_offload import metrics
from tests.engine.harness import engine_environment, kill_session, log_tail

HOST = serving.HOST
FORKING = (sys.executable, "-m", "tests.serve.forking", "serve")
"""Command of servers that start sooner."""
ANSWER_SECONDS = 60.0
STOP_SECONDS = 60.0


class Completion(NamedTuple):
    """The answer to one prompt."""

    tokens: list[int]
    logprobs: list[float]
    leads: list[float]
    """As in ``tests.engine.spec.Answer``."""


class Server(serving.Server):
    """Runs from construction to ``terminate`` or ``kill``, or to the end of a ``with`` block."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
        variables = engine_environment(**variables | dict(environment or {}))
        log = directory / "serve.log"
        super().__init__(model, arguments, variables, log, name="random", command=command)

    def __exit__(self, *_: object) -> None:
        self.kill()

    def complete(
        self, prompt: Sequence[int], max_tokens: int, stop: str | None = None
    ) -> Completion:
        """Answer greedily, stopping early at ``stop`` only."""
        return completion(self.answer(prompt, max_tokens, stop=stop))

    def answer(
        self, prompt: Sequence[int], max_tokens: int, path: str = "/v1/completions", **more: Any
    ) -> dict[str, Any]:
        """The whole answer of the endpoint at ``path``; in a chat, the prompt is a message.
        ``more``: of the request's body."""
        if "chat" in path:
            message = " ".join(f"w{token}" for token in prompt)
            more |= {"messages": [{"role": "user", "content": message}], "logprobs": False}
        with self._ask(prompt, max_tokens, path, **more) as connection:
            response = connection.getresponse()
            text = response.read()
        assert response.status == 200, text[:1000]
        found: dict[str, Any] = json.loads(text)
        return found

    def ask_and_hang_up(
        self, prompt: Sequence[int], max_tokens: int, *, after: float = 0.0, **more: Any
    ) -> None:
        """Send a request and close the connection ``after`` seconds, without reading the answer."""
        with self._ask(prompt, max_tokens, **more):
            time.sleep(after)

    @contextmanager
    def open_stream(
        self, prompt: Sequence[int], max_tokens: int, **more: Any
    ) -> Iterator[Iterator[bytes]]:
        """The lines of a streamed answer. Leaving the block closes the connection, even before the
        end of the answer."""
        asked = self._ask(prompt, max_tokens, stream=True, **more)
        with asked as connection, connection.getresponse() as response:
            assert response.status == 200, response.read()[:1000]
            yield (line for line in response if line.strip())

    @contextmanager
    def _ask(
        self, prompt: Sequence[int], max_tokens: int, path: str = "/v1/completions", **more: Any
    ) -> Iterator[HTTPConnection]:
        """A connection on which the request has been sent."""
        body = {
            "model": "random",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            **more,
        }
        with self._post(path, body) as connection:
            yield connection

    @contextmanager
    def _post(self, path: str, body: Mapping[str, Any]) -> Iterator[HTTPConnection]:
        headers = {"Content-Type": "application/json"}
        with closing(HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)) as connection:
            connection.request("POST", path, json.dumps(body), headers)
            yield connection

    def call_workers(self, method: str, *arguments: str) -> None:
        """Call a method of vLLM's workers."""
        with self._post("/collective_rpc", {"method": method, "args": arguments}) as connection:
            response = connection.getresponse()
            assert response.status == 200, response.read()[:1000]

    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return not any(each.value for each in self.samples() if each.name in names)

    def wait_until_unpinned(self) -> None:
        """Until no transfer holds a host block."""
        self.wait_for(lambda: self.metric(metrics.PINNED) == 0, 30, "no pinned host block")

    def family(self) -> list[psutil.Process]:
        """The server's process and its descendants."""
        server = psutil.Process(self.pid)
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
            return self.ended.result(STOP_SECONDS)
        except TimeoutError:
            raise AssertionError(
                f"no end within {STOP_SECONDS:.0f} s\n{log_tail(self.log)}"
            ) from None

    def kill(self) -> None:
        """Kill all processes of the server."""
        kill_session(self.pid)
        self.ended.result()


def completion(answer: Mapping[str, Any]) -> Completion:
    """The one choice of an answer."""
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    best = [sorted(each.values(), reverse=True) for each in logprobs["top_logprobs"]]
    leads = [first - second for first, second, *_ in best]
    return Completion(choice["token_ids"], logprobs["token_logprobs"], leads)


def read_stream(lines: Iterable[bytes]) -> list[int]:
    """The tokens of a streamed answer's lines."""
    events = [line.removeprefix(b"data: ").strip() for line in lines]
    choices = [json.loads(event)["choices"] for event in events if event != b"[DONE]"]
    return [token for (choice,) in choices for token in choice["token_ids"]]
