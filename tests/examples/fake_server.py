"""A fake ``vllm serve``: starts at once, invents tokens, and fails on request.

``python -m tests.examples.fake_server MODEL --host H --port P ...``. FAKE_SERVER in the environment
is JSON with the faults of a server with a connector: ``exit_at_start``, its exit code; ``child``, a
process that only a signal ends; ``resets_refused``, how often; and the number of a request, from 0,
at which it is killed (``die_at``), answers with status 500 (``refuse_at``), leaves out the last
token (``short_at``), or writes to the pipe ``stall_pipe`` and does not go on (``stall_at``).

Half of a prompt's prefix that the device knows counts as its hit. The rest of the prefix that the
connector knows, if there is one, counts as the connector's.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from pathlib import Path
from threading import Event, Lock
from typing import Any

import psutil

COMMAND = (sys.executable, "-m", "tests.examples.fake_server")


class Handler(BaseHTTPRequestHandler):
    faults: dict[str, Any]
    connector: bool
    model: str
    lock = Lock()
    requests = 0
    refusals = 0
    on_device: list[Sequence[int]]
    outside: list[Sequence[int]]
    sources: dict[str, int]

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(json.dumps({"data": [{"id": self.model, "max_model_len": 400}]}).encode())
            return
        lines = ["# TYPE vllm:prompt_tokens_by_source counter"]
        for source, value in self.sources.items():
            lines.append(f'vllm:prompt_tokens_by_source_total{{source="{source}"}} {value}')
        self._answer("\n".join([*lines, ""]).encode())  # to /health as well

    def do_POST(self) -> None:
        cls = type(self)
        if self.path.startswith("/reset_prefix_cache"):
            cls.refusals += 1
            success = self.refusals > self.faults.get("resets_refused", 0)
            if success:
                self.on_device.clear()
            if success and self.path.endswith("reset_external=true"):
                self.outside.clear()
            self._answer(json.dumps({"success": success}).encode())
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"]
        with self.lock:
            number, cls.requests = self.requests, self.requests + 1
            cached = self._find(prompt)
        if number == self.faults.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.faults.get("refuse_at"):
            self.send_error(500)
        else:
            self._stream(number, prompt, cached, body["max_tokens"])

    def _find(self, prompt: Sequence[int]) -> int:
        """Tokens of ``prompt`` that are cached; from now on all of them are."""
        local = _known(prompt, self.on_device) // 2
        external = max(0, _known(prompt, self.outside) - local)
        self.on_device.append(prompt)
        if self.connector:
            self.outside.append(prompt)
        self.sources["external_kv_transfer"] += external
        self.sources["local_cache_hit"] += local
        self.sources["local_compute"] += len(prompt) - local - external
        return local + external

    def _stream(self, number: int, prompt: Sequence[int], cached: int, length: int) -> None:
        self.send_response(200)
        self.end_headers()
        first = sum(prompt)
        num_tokens = length - (number == self.faults.get("short_at"))
        for token in range(first, first + num_tokens):
            self._event({"choices": [{"text": f"w{token} "}]})
            if number == self.faults.get("stall_at"):
                Path(self.faults["stall_pipe"]).write_text("stalled")
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


def _known(prompt: Sequence[int], seen: Sequence[Sequence[int]]) -> int:
    """Tokens of the longest prefix of ``prompt`` among ``seen``, without the last token."""
    longest = 0
    for each in seen:
        same = (a == b for a, b in zip(prompt[:-1], each, strict=False))
        longest = max(longest, sum(takewhile(bool, same)))
    return longest


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    """All have ended, or do so soon."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config")
    parser.add_argument("--served-model-name", default="fake")
    arguments, _ = parser.parse_known_args()
    connector = arguments.kv_transfer_config is not None
    faults = json.loads(os.environ.get("FAKE_SERVER", "{}")) if connector else {}
    if "exit_at_start" in faults:
        sys.stderr.write("there is no such model\n")
        sys.exit(faults["exit_at_start"])
    if "child" in faults:
        # With the server's command line, by which a test finds it.
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", *sys.argv])
    Handler.faults, Handler.connector = faults, connector
    Handler.model = arguments.served_model_name
    Handler.on_device, Handler.outside = [], []
    Handler.sources = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
    ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
