"""A fake ``vllm serve``: starts at once, streams invented tokens, and fails on request.

``python -m tests.examples.fake_server MODEL --host H --port P ...``. FAKE_SERVER in the environment
is JSON: see ``Faults``. Half of a prompt's known prefix counts as a hit on the device. The other
half counts as a hit of the connector, if there is one.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock
from typing import Any


@dataclass(frozen=True)
class Faults:
    exit_at_start: int | None = None
    """Exits with this code before it answers."""
    child: bool = False
    """True: starts a process that only a signal ends."""
    ignore_sigterm: bool = False
    die_at: int | None = None
    """The request (from 0) during which the process is killed."""
    refuse_at: int | None = None
    """The request that is answered with status 500."""
    short_at: int | None = None
    """The request whose answer lacks its last token."""
    other_at: int | None = None
    """The request whose answer has other tokens."""
    stall_at: int | None = None
    """The request whose answer never ends."""
    no_hits: bool = False
    resets_refused: int = 0
    """Number of resets that fail before one succeeds."""


class State:
    def __init__(self, faults: Faults, connector: bool) -> None:
        self.faults = faults
        self.connector = connector
        self.lock = Lock()
        self.requests = 0
        self.refusals = faults.resets_refused
        self.on_device: list[list[int]] = []
        self.outside: list[list[int]] = []
        self.sources = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}

    def admit(self, prompt: list[int]) -> tuple[int, int]:
        """The number of a request, and how many of its tokens are cached."""
        with self.lock:
            number, self.requests = self.requests, self.requests + 1
            local = _known(prompt, self.on_device) // 2
            external = _known(prompt, self.outside) - local
            if not self.faults.no_hits:
                self.on_device.append(prompt)
            if self.connector and not self.faults.no_hits:
                self.outside.append(prompt)
            else:
                external = 0
            self.sources["external_kv_transfer"] += external
            self.sources["local_cache_hit"] += local
            self.sources["local_compute"] += len(prompt) - local - external
            return number, local + external

    def reset(self, *, external: bool) -> bool:
        self.refusals -= 1
        if self.refusals >= 0:
            return False
        self.on_device.clear()
        if external:
            self.outside.clear()
        return True


def _known(prompt: list[int], seen: list[list[int]]) -> int:
    """Tokens of the longest prefix of ``prompt`` among ``seen``."""
    lengths = [
        next(
            (i for i, (a, b) in enumerate(zip(prompt, each, strict=False)) if a != b),
            min(len(prompt), len(each)),
        )
        for each in seen
    ]
    return max(lengths, default=0)


class Handler(BaseHTTPRequestHandler):
    state: State

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(b"")
            return
        lines = [
            f'vllm:prompt_tokens_by_source_total{{source="{source}"}} {value}'
            for source, value in self.state.sources.items()
        ]
        header = "# TYPE vllm:prompt_tokens_by_source counter"
        self._answer("\n".join([header, *lines, ""]).encode())

    def do_POST(self) -> None:
        if self.path.startswith("/reset_prefix_cache"):
            success = self.state.reset(external=self.path.endswith("reset_external=true"))
            self._answer(json.dumps({"success": success}).encode())
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._complete(body)

    def _complete(self, body: dict[str, Any]) -> None:
        prompt, length = body["prompt"], body["max_tokens"]
        number, cached = self.state.admit(prompt)
        faults = self.state.faults
        if number == faults.refuse_at:
            self.send_error(500)
            return
        self.send_response(200)
        self.end_headers()
        if number == faults.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        first = sum(prompt) + (number == faults.other_at)
        num_tokens = length - (number == faults.short_at)
        for token in range(first, first + num_tokens):
            self._event({"choices": [{"text": f"w{token} "}]})
            if number == faults.stall_at:
                Event().wait()
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config")
    arguments, _ = parser.parse_known_args()
    faults = Faults(**json.loads(os.environ.get("FAKE_SERVER", "{}")))
    if faults.exit_at_start is not None:
        sys.stderr.write("there is no such model\n")
        sys.exit(faults.exit_at_start)
    if faults.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if faults.child:
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Handler.state = State(faults, arguments.kv_transfer_config is not None)
    ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
