"""The numbers on /metrics match the work, also on servers with other arguments."""

from pathlib import Path

import pytest

from simple_offload import metrics
from tests.serve.conftest import OURS, StartServer, configured
from tests.serve.test_observability import (
    BLOCK_SIZE,
    LONG,
    check_work,
    token_bytes,
    wait_for_metric,
    work,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Another KV connector of vLLM's, which keeps prompts in files. It refuses hybrid models.
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def test_two_ranks(start_server: StartServer, model: Path) -> None:
    server = start_server("--tensor-parallel-size", "2")
    work(server)
    check_work(server, model, num_ranks=2)
    server.kill()


def test_beside_another_connector(start_server: StartServer, model: Path, tmp_path: Path) -> None:
    files = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [OURS, EXAMPLE | files]},
    }
    server = start_server(*configured(both), "--disable-hybrid-kv-cache-manager")
    work(server)
    check_work(server, model)
    server.kill()


def test_lazy_stores(start_server: StartServer, model: Path) -> None:
    """The device's evictions choose the stored blocks; the numbers agree with each other."""
    extra = {"cpu_bytes_to_use": "64MiB", "lazy_offload": True}
    server = start_server(*configured({**OURS, "kv_connector_extra_config": extra}))
    server.complete(LONG, 1)
    for first in (100, 200, 300):  # each needs most of the device
        server.complete([first + token % 64 for token in range(500)], 1)
    server.complete(LONG, 1)
    server.wait_for(server.is_idle, 30, "the server to be idle")
    loaded, stored = server.metric(metrics.LOADED), server.metric(metrics.STORED)
    assert 4 <= loaded < stored
    assert server.metric(metrics.HIT_TOKENS) == loaded * BLOCK_SIZE
    assert server.metric(metrics.LOOKUPS, result="hit") == server.metric(metrics.LOADS) == 1
    assert server.metric(metrics.LOOKUPS) == 5
    wait_for_metric(server, metrics.USED, stored)
    block_bytes = BLOCK_SIZE * token_bytes(model)
    assert server.metric(metrics.BYTES, direction="load") == loaded * block_bytes
    assert server.metric(metrics.BYTES, direction="store") == stored * block_bytes
    assert server.metric(metrics.FAILED) == server.metric(metrics.EVICTED) == 0
    server.kill()
