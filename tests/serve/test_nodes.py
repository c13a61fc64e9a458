"""One engine on two nodes, by vLLM's multiprocessing executor. A PID namespace of its own makes the
second node another machine for this project: its processes cannot open the first one's memory."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.bench.child import ROOT
from examples.serving import COMMAND, free_port
from simple_offload import metrics
from tests.engine.harness import engine_environment, kill_session
from tests.engine.test_parallel import TRACE_ONLY
from tests.serve.conftest import ARGUMENTS, save_model
from tests.serve.server import HOST, Server
from tests.serve.test_serve import ASKS, HITS, answers, assert_same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root"),
]

APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
TENSOR = ("--tensor-parallel-size", "2")
PIPELINE = (
    *("--pipeline-parallel-size", "2", "--no-enforce-eager"),
    *("--compilation-config", json.dumps(TRACE_ONLY["compilation_config"])),
)


@contextmanager
def two_nodes(folder: Path, *arguments: str, apart: bool) -> Iterator[Server]:
    """A server with one rank on each node. The model's ranks repeat its only KV head."""
    model = save_model(folder / "model", num_kv_heads=1)
    nodes = (
        *("--distributed-executor-backend", "mp", "--nnodes", "2"),
        *("--master-addr", HOST, "--master-port", str(free_port())),
    )
    command: Sequence[str] = (
        *(APART if apart else ()),
        *(*COMMAND, str(model), *ARGUMENTS, *arguments, *nodes, "--node-rank", "1", "--headless"),
    )
    environment = {"VLLM_HOST_IP": HOST}
    with (folder / "second.log").open("wb") as log:
        second = subprocess.Popen(
            command,
            cwd=ROOT,
            env=engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", **environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(
        model,
        folder,
        *(*ARGUMENTS, *arguments, *nodes, "--node-rank", "0"),
        environment=environment,
    )
    try:
        with server:
            yield server
    finally:
        kill_session(second.pid)
        second.wait()


def check_answers(server: Server) -> None:
    """Answers come back from host memory."""
    first = answers(server, ASKS, at_once=1)
    server.reset_prefix_cache(external=False)
    assert_same(first, answers(server, ASKS, at_once=len(ASKS)))
    assert server.metric(HITS) > 0
    server.wait_for(server.is_idle, 30, "its requests to end")
    server.reset_prefix_cache(external=False)
    server.wait_until_unpinned()


@pytest.mark.parametrize("apart", [True, False], ids=["two machines", "one machine"])
def test_ranks_that_have_the_same_kv(tmp_path: Path, apart: bool) -> None:
    """On one machine, they share memory and each stores a half. On two, each stores all."""
    with two_nodes(tmp_path, *TENSOR, apart=apart) as server:
        check_answers(server)
        num_stored = server.metric(metrics.STORED)
        num_bytes = server.metric(metrics.BYTES, direction="store")
        block_bytes = 2 * 3 * 32 * 32 * 4  # keys and values, layers, tokens, head size, float32
        assert num_bytes == num_stored * block_bytes * (2 if apart else 1)
        assert "cannot share host memory" not in server.log.read_text(), "nor do they try"


def test_stages(tmp_path: Path) -> None:
    """Pipeline parallel: ranks with unlike numbers of layers agree on a number of blocks."""
    with two_nodes(tmp_path, *PIPELINE, apart=True) as server:
        check_answers(server)
        rank_bytes, layer_bytes = 8 << 20, 2 * 32 * 32 * 4
        assert server.metric(metrics.CAPACITY) == rank_bytes // (2 * layer_bytes) - 1
