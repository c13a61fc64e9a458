"""watch: pages of real registries over HTTP, in a terminal and in a pipe."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, islice
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from rich.console import Console
from vllm.config import KVTransferConfig

from simple_offload.cli.main import main
from simple_offload.cli.screen import View, lines, page
from simple_offload.cli.watch import follow, watch
from simple_offload.connector import SimpleCPUOffloadConnector
from simple_offload.metrics import OffloadStats
from tests.conftest import MakeVllmConfig

PREFIX = "vllm:simple_offload_"
COMMAND = (sys.executable, "-c", "import simple_offload.cli.main as m; raise SystemExit(m.main())")
GIB = 2**30
CURVE = {"0x": 0.41, "0.25x": 0.53, "0.5x": 0.6, "1x": 0.71, "2x": 0.8, "4x": 0.84, "8x": 0.85}
SECOND_TIER = "second tier: in use: 61,200 tokens/s (compute 24,100); 838 GiB read, 5 GiB written"


class Page:
    """The registry of a server's process: this connector's series, and vLLM's TTFT."""

    def __init__(self, make_vllm_config: MakeVllmConfig, num_engines: int = 1) -> None:
        self._registry = CollectorRegistry()
        types: dict[Any, Any] = {
            kind: partial(kind, registry=self._registry) for kind in (Counter, Gauge, Histogram)
        }
        names = ["model_name", "engine"]
        labels: dict[int, list[object]] = {n: ["Llama", str(n)] for n in range(num_engines)}
        self._metrics = SimpleCPUOffloadConnector.build_prom_metrics(
            make_vllm_config(), types, names, labels
        )
        buckets = (0.1, 0.25, 0.5, 1.0)
        ttft = Histogram(
            "vllm:time_to_first_token_seconds", "", names, registry=self._registry, buckets=buckets
        )
        self._ttft = [ttft.labels(*labels[engine]) for engine in labels]

    def add(self, name: str, value: float, *labels: str, engine: int = 0) -> None:
        """To a counter."""
        stats = OffloadStats()
        stats.add(PREFIX + name, value, *labels)
        self._metrics.observe(stats.to_dict(), engine)

    def set(self, name: str, value: float, *labels: str, engine: int = 0) -> None:
        """A gauge."""
        stats = OffloadStats()
        stats.set(PREFIX + name, value, *labels)
        self._metrics.observe(stats.to_dict(), engine)

    def copy(self, direction: str, num_bytes: float, seconds: float) -> None:
        """A transfer."""
        stats = OffloadStats()
        stats.add(f"{PREFIX}bytes_total", num_bytes / 4, direction, "kernel")
        stats.add(f"{PREFIX}bytes_total", num_bytes * 3 / 4, direction, "dma")
        stats.sample(f"{PREFIX}transfer_seconds", seconds, direction)
        self._metrics.observe(stats.to_dict())

    def answer(self, seconds: float, engine: int = 0) -> None:
        """A first token."""
        self._ttft[engine].observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Server(ThreadingHTTPServer):
    """Answers /metrics with a page, and other paths with 404."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.text = b""
        self.num_answers = threading.Semaphore(2**20)
        """That are left. Then it hangs."""
        self.requests = threading.Semaphore(0)
        self.url = f"http://127.0.0.1:{self.server_port}/metrics"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        if self.path != "/metrics":
            self.send_error(404)
            return
        self.server.requests.release()
        self.server.num_answers.acquire()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.text)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def filled(make_vllm_config: MakeVllmConfig) -> Page:
    """A server that has answered prompts."""
    filled = Page(make_vllm_config)
    for source, num in (("device", 41e6), ("host", 24e6), ("second_tier", 6e6), ("compute", 30e6)):
        filled.add("prompt_tokens_total", num, source)
    for reason, num in (("unseen", 14e6), ("evicted", 12e6), ("prompt_end", 3e6), ("no_room", 1e6)):
        filled.add("missed_tokens_total", num, reason)
    for name, blocks in (("capacity", 32767), ("used", 30211), ("pinned", 12)):
        filled.set(f"{name}_blocks", blocks)
    filled.set("host_memory_bytes", 64 * GIB)
    for times, ratio in CURVE.items():
        filled.set("predicted_hit_ratio", ratio, times)
    filled.set("second_tier_pays", 1)
    filled.set("second_tier_tokens_per_second", 61_200)
    filled.set("compute_tokens_per_second", 24_100)
    filled.add("second_tier_bytes_total", 838 * GIB, "read")
    filled.add("second_tier_bytes_total", 5 * GIB, "write")
    filled.copy("load", 5e12, 100)
    filled.copy("store", 3e12, 75)
    for seconds in (*[0.15] * 98, 0.4, 0.6):
        filled.answer(seconds)
    return filled


def in_terminal(view: View, width: int = 100) -> list[str]:
    """The lines of a page."""
    console = Console(force_terminal=True, width=width, file=io.StringIO(), record=True)
    console.print(page(view))
    return [line.rstrip() for line in console.export_text().splitlines()]


# What is shown


def test_a_page_in_a_pipe(
    server: Server, filled: Page, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    server.text = filled.text()
    assert main(["watch", server.url, "--once"]) == 0
    headline, *rest = capsys.readouterr().out.splitlines()
    assert headline.endswith(f"Llama  {server.url}")
    assert rest == [
        "advice: Host memory of 128 GiB (twice as much) would find 9 points more.",
        "host memory: 64 GiB, 92% full: 30,211 of 32,767 blocks, 12 pinned",
        SECOND_TIER,
        "prompt tokens device: since start 41.0M 41%",
        "prompt tokens host: since start 24.0M 24%",
        "prompt tokens second tier: since start 6.0M 6%",
        "prompt tokens compute: since start 30.0M 30%",
        "computed because unseen: since start 14.0M 14%",
        "computed because evicted: since start 12.0M 12%",
        "computed because prompt end: since start 3.0M 3%",
        "computed because no room: since start 1.0M 1%",
        "hits by host memory none: 41%",
        "hits by host memory 16 GiB: 53%",
        "hits by host memory 32 GiB: 60%",
        "hits by host memory 64 GiB (now): 71%",
        "hits by host memory 128 GiB: 80%",
        "hits by host memory 256 GiB: 84%",
        "hits by host memory 512 GiB: 85%",
        "speed loads while copying: since start 50 GB/s",
        "speed stores while copying: since start 40 GB/s",
        "speed TTFT mean: since start 157 ms",
        "speed TTFT p99: since start 500 ms",
        "",
    ]


def test_a_page_in_a_terminal(server: Server, filled: Page) -> None:
    """It fits 100 columns and 24 lines; both halves are side by side."""
    server.text = filled.text()
    views = follow(server.url, 0)
    next(views)
    filled.add("prompt_tokens_total", 3e3, "host")
    filled.add("prompt_tokens_total", 1e3, "compute")
    filled.copy("load", 3e9, 0.1)
    server.text = filled.text()
    view = next(views)
    text = in_terminal(view)
    assert len(text) <= 24
    assert max(map(len, text)) <= 100
    assert text[1] == "▶ Host memory of 128 GiB (twice as much) would find 9 points more."
    (host,) = (line for line in text if line.startswith("host "))
    assert host.split()[:5] == ["host", "24.0M", "24%", "3,000", "75%"]
    assert host.split()[6:9] == ["16", "GiB", "53%"]
    (loads,) = (line for line in text if "loads while copying" in line)
    assert loads.split()[-4:] == ["50", "GB/s", "30", "GB/s"]
    (average,) = (line for line in text if "loads on average" in line)
    assert average.split()[-2:] == [f"{3 / view.seconds:.3g}", "GB/s"]
    narrow = in_terminal(view, 60)
    assert max(map(len, narrow)) <= 60
    assert {line.partition(" ")[0] for line in narrow} >= {"host", "Hits", "evicted"}


def test_bars_are_as_long_as_shares(server: Server, filled: Page) -> None:
    server.text = filled.text()
    text = in_terminal(next(follow(server.url, 0)), 60)
    bars = {line.split("  ")[0]: line.count("█") for line in text}
    assert [bars[name] for name in ("none", "64 GiB (now)", "512 GiB")] == [8, 14, 17]


def test_before_the_first_prompt(server: Server, make_vllm_config: MakeVllmConfig) -> None:
    new = Page(make_vllm_config)
    for times in CURVE:
        new.set("predicted_hit_ratio", -1, times)
    new.set("capacity_blocks", 1024)
    new.set("host_memory_bytes", 64 << 20)
    server.text = new.text()
    assert set(lines(next(follow(server.url, 0)))) >= {
        "advice: No prompts yet.",
        "host memory: 64 MiB, 0% full: 0 of 1,024 blocks, 0 pinned",
        "prompt tokens host: since start 0 -",
        "hits by host memory any size: more prompts are needed",
        "speed loads while copying: since start -",
        "speed TTFT mean: since start -",
        "speed TTFT p99: since start -",
    }
    assert in_terminal(next(follow(server.url, 0)))


def test_a_second_tier_that_was_used(server: Server, filled: Page) -> None:
    filled.set("second_tier_pays", 0)
    server.text = filled.text()
    text = SECOND_TIER.replace("in use", "not in use")
    assert text in lines(next(follow(server.url, 0)))


@pytest.mark.parametrize("unpredicted", [0, -1])
def test_several_engines_are_one(
    unpredicted: float, server: Server, make_vllm_config: MakeVllmConfig
) -> None:
    """Ratios count by an engine's prompt tokens; an engine without a prediction does not count."""
    both = Page(make_vllm_config, num_engines=3)
    for engine, num, ratio in ((0, 300, 0.8), (1, 100, 0.4), (2, 50, unpredicted)):
        both.add("prompt_tokens_total", num, "host", engine=engine)
        both.set("capacity_blocks", 100, engine=engine)
        both.set("used_blocks", 100, engine=engine)
        both.set("host_memory_bytes", 16 * GIB, engine=engine)
        both.set("second_tier_pays", 1, engine=engine)
        both.set("second_tier_tokens_per_second", 100 * engine, engine=engine)
        for times in CURVE:
            both.set("predicted_hit_ratio", ratio, times, engine=engine)
        both.answer(0.2 + engine, engine=engine)
    server.text = both.text()
    text = list(lines(next(follow(server.url, 0))))
    assert "Llama, 3 engines" in text[0]
    assert "host memory: 48 GiB, 100% full: 300 of 300 blocks, 0 pinned" in text
    assert "prompt tokens host: since start 450 100%" in text
    assert "hits by host memory 48 GiB (now): 70%" in text
    assert "speed TTFT mean: since start 1,200 ms" in text
    assert any(line.startswith("second tier: in use: 100 tokens/s") for line in text)


def test_unknown_labels_and_series_do_not_matter(server: Server, filled: Page) -> None:
    """Such as the process of a sample, in a server of several processes."""
    server.text = filled.text()
    wanted = list(lines(next(follow(server.url, 0))))[1:]
    text = filled.text().decode().replace('engine="0"', 'engine="0",pid="7"')
    server.text = f'# TYPE other gauge\nother{{a="b"}} NaN\n{text}'.encode()
    assert list(lines(next(follow(server.url, 0))))[1:] == wanted


# Over time


def test_a_server_that_starts_anew(server: Server, make_vllm_config: MakeVllmConfig) -> None:
    """Its counters fall. Meanwhile it cannot be reached, which the page says."""
    old, new = Page(make_vllm_config), Page(make_vllm_config)
    old.add("prompt_tokens_total", 500, "host")
    new.add("prompt_tokens_total", 400, "host")
    server.text = old.text()
    views = follow(server.url, 0)
    assert next(views).recent is None
    view = next(views)
    assert view.recent is not None
    assert view.recent.total(f"{PREFIX}prompt_tokens_total") == 0
    server.text = b""
    view = next(views)
    assert "has no series of this connector" in view.problem
    assert list(lines(view))[1:] == [view.problem]
    assert view.problem in " ".join(in_terminal(view, 1000))
    server.text = new.text()
    view = next(views)
    assert (view.recent, view.problem) == (None, "")
    assert "prompt tokens host: since start 400 100%" in lines(view)
    new.add("prompt_tokens_total", 20, "host")
    server.text = new.text()
    text = "\n".join(lines(next(views)))
    assert re.search(
        r"^prompt tokens host: since start 420 100%, last \d.\d s 20 100%$", text, re.MULTILINE
    )


def test_advice_about_the_last_hour(server: Server, filled: Page) -> None:
    """All since the start, until watch has seen an hour."""
    for times in CURVE:
        filled.set("predicted_hit_ratio", 0.71, times)
    filled.add("missed_tokens_total", 30e6, "reset")
    minutes = count()
    views = follow(server.url, 0, lambda: 60.0 * next(minutes))
    server.text = filled.text()
    for _ in range(60):
        view = next(views)
        assert "were lost by resets" in list(lines(view))[1]
        filled.add("prompt_tokens_total", 1000, "compute")
        filled.add("missed_tokens_total", 1000, "prompt_end")
        server.text = filled.text()
    assert "are ends of prompts" in list(lines(next(views)))[1]
    filled.add("failed_transfers_total", 1, "load", "thread_died")
    server.text = filled.text()
    *_, view = islice(views, 70)
    assert "A copy thread has died" in list(lines(view))[1]


def test_an_engine_that_is_gone(server: Server, make_vllm_config: MakeVllmConfig) -> None:
    server.text = Page(make_vllm_config, num_engines=2).text()
    views = follow(server.url, 0)
    next(views)
    server.text = Page(make_vllm_config).text()
    assert next(views).recent is None


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_in_a_terminal_a_signal_ends_it_at_once(
    ending: signal.Signals, hangs: bool, server: Server, filled: Page
) -> None:
    """In a pause, or while a server hangs. The cursor and the other screen are back, and the last
    page stays."""
    server.text = filled.text()
    server.num_answers = threading.Semaphore(1)
    mine, its = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [*COMMAND, "watch", server.url, "--interval", "0.1" if hangs else "86400"],
        stdin=its,
        stdout=its,
        stderr=its,
        env=environment,
    )
    os.close(its)
    shown = b""
    while b"TTFT p99" not in shown:
        shown += os.read(mine, 1 << 16)
    for _ in range(1 + hangs):
        server.requests.acquire()
    process.send_signal(ending)
    try:
        while more := os.read(mine, 1 << 16):
            shown += more
    except OSError:  # the other end is closed
        pass
    os.close(mine)
    assert process.wait() == 0
    before, _, after = shown.partition(b"\x1b[?1049l")
    assert b"\x1b[?1049h" in before
    assert b"\x1b[?25h" in shown
    assert b"TTFT p99" in after
    assert b"Traceback" not in shown
    assert b"cannot be reached" not in shown


def test_in_a_pipe_a_block_each_interval(server: Server, filled: Page) -> None:
    """Until the reader closes it."""
    server.text = filled.text()
    process = subprocess.Popen(
        [*COMMAND, "watch", server.url.removeprefix("http://"), "--interval", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    first, second = ([*iter(process.stdout.readline, "\n")] for _ in range(2))
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0
    assert len(first) == 23
    assert len(second) == 25
    assert not any(re.search(r"last \d", line) for line in first)
    host = r"prompt tokens host: since start 24.0M 24%, last \d.\d s 0 -\n"
    assert any(re.fullmatch(host, line) for line in second)


# What is wrong


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"# TYPE x gauge\nx 1\n", "has no series of this connector. To switch it on, start"),
        (b"<html>\n", "is not a page of Prometheus metrics"),
        (b"\xff", "is not a page of Prometheus metrics"),
        (
            b"# TYPE vllm:simple_offload_used_blocks gauge\nvllm:simple_offload_used_blocks 1\n",
            "simple_offload is older than this command",
        ),
    ],
)
def test_no_page_of_this_connector(
    text: bytes, message: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.text = text
    assert main(["watch", server.url, "--once"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"simple-offload watch: {server.url} ")
    assert message in error


def test_how_to_switch_the_connector_on(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line in the message is one that vLLM and the connector accept."""
    assert main(["watch", server.url, "--once"]) == 1
    _, _, rest = capsys.readouterr().err.partition("--kv-transfer-config '")
    config = KVTransferConfig(**json.loads(rest.partition("'")[0]))
    assert config.kv_connector_module_path == "simple_offload"


def test_nobody_listens(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with Server() as closed:
        pass
    assert main(["watch", closed.url]) == 1
    message = f"{closed.url} cannot be reached: Connection refused. Is the server up?"
    assert message in capsys.readouterr().err
    for no_address in ("my..host", "host:1/\u00e4"):
        assert main(["watch", no_address]) == 1
        assert f"{no_address}/metrics cannot be reached: " in capsys.readouterr().err
    assert main(["watch", server.url.replace("/metrics", "/v1")]) == 1
    assert "/v1/metrics answers HTTP 404 Not Found" in capsys.readouterr().err


def test_a_signal_while_a_page_is_written_ends_it_after_the_page(
    server: Server, filled: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    server.text = filled.text()

    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            signal.raise_signal(signal.SIGINT)
            return super().write(text)

    written = Interrupted()
    console = Console(file=written, width=100, force_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        watch(server.url, console, 86_400.0, once=False)
    on_screen, _, after = written.getvalue().partition("\x1b[?1049l")
    assert "TTFT p99" in on_screen
    assert "TTFT p99" in after
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
