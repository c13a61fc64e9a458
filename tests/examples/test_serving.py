"""A server that runs during a block: its start, its failures and its end."""

import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("prometheus_client")

from examples import serving as serving_module
from examples.bench.child import ROOT
from examples.bench.command import RunFailed
from examples.serving import HOST, Server, command_line, free_port, serving
from tests.examples.processes import assert_gone

FAKE = (sys.executable, "-m", "tests.examples.fake_server")


@pytest.fixture(autouse=True)
def fake_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "COMMAND", FAKE)


def environment(**faults: Any) -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "FAKE_SERVER": json.dumps(faults)}


def serve(tmp_path: Path, port: int | None = None, **faults: Any) -> AbstractContextManager[Server]:
    return serving("some-model", [], environment(**faults), tmp_path / "log", port=port)


def test_runs_while_the_block_does(tmp_path: Path) -> None:
    port = free_port()
    with serve(tmp_path, port) as server:
        assert server.url == f"http://{HOST}:{port}"
        process = psutil.Process(server.pid)
        assert process.cmdline()[3] == "some-model"
        assert server.metric("vllm:prompt_tokens_by_source_total") == 0
        assert "local_compute" in {sample.labels.get("source") for sample in server.samples()}
        server.check()
        assert not server.ended.done()
    assert_gone([process])
    assert server.ended.result(timeout=0) == -15, "asked to end, it did"


def test_ends_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may ignore SIGTERM, and the block may end by an exception."""
    monkeypatch.setattr(serving_module, "STOP_SECONDS", 0.2)
    family: list[psutil.Process] = []

    def interrupted() -> None:
        with serve(tmp_path, child=True, ignore_sigterm=True) as server:
            family.extend([psutil.Process(server.pid), *psutil.Process(server.pid).children()])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(family) == 2
    assert_gone(family)


def test_ends_with_what_it_started_when_it_dies(tmp_path: Path) -> None:
    with serve(tmp_path, child=True) as server:
        process = psutil.Process(server.pid)
        (child,) = process.children()
        process.kill()
        assert server.ended.result(timeout=10) == -9
        with pytest.raises(RunFailed, match="ended while it was needed, killed by signal 9"):
            server.check()
        with pytest.raises(RunFailed, match="gave no answer to /metrics"):
            server.samples()
    assert_gone([child])


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    failed = pytest.raises(RunFailed, match="exit code 7")
    with failed as error, serve(tmp_path, exit_at_start=7):
        pass
    assert "there is no such model" in str(error.value)
    assert str(tmp_path / "log") in str(error.value)


def test_a_server_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [sys.executable, "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(serving_module, "COMMAND", silent)
    monkeypatch.setattr(serving_module, "START_SECONDS", 0.5)
    with (
        pytest.raises(RunFailed, match="did not answer within"),
        serving("some-model", [], environment(), tmp_path / "log"),
    ):
        pass
    assert not any("signal.pause()" in child.cmdline() for child in psutil.Process().children())


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RunFailed, match=f"Port {port} .* is in use"), serve(tmp_path, port):
            pass
    assert not (tmp_path / "log").exists(), "nothing was started"


def test_reset_waits_for_its_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(tmp_path, resets_refused=2) as server:
        server.reset_prefix_cache(external=True)
    monkeypatch.setattr(serving_module, "RESET_SECONDS", 0.1)
    with (
        serve(tmp_path, resets_refused=1000) as server,
        pytest.raises(RunFailed, match="did not reset its caches"),
    ):
        server.reset_prefix_cache(external=False)


def test_command_line() -> None:
    arguments = {"block_size": 32, "enforce_eager": True, "seed": 0, "port": None, "eager": False}
    assert command_line({**arguments, "kv_transfer_config": {"kv_role": "kv_both"}}) == [
        *("--block-size", "32", "--enforce-eager", "--seed", "0"),
        *("--kv-transfer-config", '{"kv_role": "kv_both"}'),
    ]
