"""A fake ``vllm serve`` of a recall model: it looks up the answers in the prompts.

FAKE_SERVER in the environment is JSON: see ``Faults``. Every earlier prompt counts as a hit, except
for its last token. The hit is the device's until the device's cache is reset. It is then the
connector's, if there is one and its cache is not reset as well.
"""

import argparse
import json
import os
import signal
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from examples.accuracy.usage import VARIABLE, Usage


@dataclass(frozen=True)
class Faults:
    die_at: int | None = None
    """The request (from 0) during which the process is killed."""
    refuse_at: int | None = None
    """The request that is answered with status 500."""
    never_hit: bool = False
    """True: no prompt is ever a hit."""
    mistaken_after: int | None = None
    """From this request on, every answer is wrong."""


@dataclass
class State:
    faults: Faults
    connector: bool
    on_device: set[str] = field(default_factory=set)
    on_host: set[str] = field(default_factory=set)
    requests: int = 0
    hits: int = 0


class Handler(BaseHTTPRequestHandler):
    state: State

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(b"")
            return
        lines = ["# TYPE vllm:external_prefix_cache_hits counter"]
        lines += [f"vllm:external_prefix_cache_hits_total {self.state.hits}", ""]
        self._answer("\n".join(lines).encode())

    def do_POST(self) -> None:
        state, faults = self.state, self.state.faults
        if self.path.startswith("/reset_prefix_cache"):
            state.on_device.clear()
            if not self.path.endswith("?reset_external=false"):
                state.on_host.clear()
            self._answer(b'{"success": true}')
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number, state.requests = state.requests, state.requests + 1
        if number == faults.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == faults.refuse_at:
            self.send_error(500)
            return
        prompt = body["prompt"]
        length = len(prompt.split())
        from_host = prompt in state.on_host - state.on_device
        known = not faults.never_hit and (from_host or prompt in state.on_device)
        found = length - 1 if known else 0
        state.hits += found * from_host
        state.on_device.add(prompt)
        if state.connector:
            state.on_host.add(prompt)
        with Path(os.environ[VARIABLE]).open("a") as file:
            file.write(json.dumps(vars(Usage(length, found))) + "\n")
        words = walk(prompt, body["max_tokens"])
        if faults.mistaken_after is not None and number >= faults.mistaken_after:
            words = words[::-1]
        self._answer(json.dumps({"choices": [{"index": 0, "text": " ".join(words)}]}).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def walk(prompt: str, hops: int) -> list[str]:
    """The right answer, derived from the text of a prompt alone."""
    context, _, question = prompt.partition(" ? ")
    follower = dict(pair.split() for pair in context.removesuffix(" ;").split(" ; "))
    words = [question.split()[0]]
    for _ in range(hops):
        words.append(follower[words[-1]])
    return words[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config")
    arguments, _ = parser.parse_known_args()
    faults = Faults(**json.loads(os.environ.get("FAKE_SERVER", "{}")))
    Handler.state = State(faults, arguments.kv_transfer_config is not None)
    ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
