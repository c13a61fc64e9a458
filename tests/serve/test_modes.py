"""Servers with other arguments: the numbers on /metrics match the work."""

from pathlib import Path

import pytest

from tests.serve.conftest import OURS, StartServer, configured
from tests.serve.test_observability import check_work, work
from tests.serve.test_serve import ASKS, HITS, answers, assert_same, assert_stops

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


def test_two_engines(start_server: StartServer) -> None:
    """Data parallel: each engine has a host tier of its own."""
    server = start_server("--data-parallel-size", "2", "--api-server-count", "1")
    first = answers(server, ASKS, at_once=1)
    for _ in range(3):
        server.reset_prefix_cache(external=False)
        assert_same(first, answers(server, ASKS, at_once=len(ASKS)))
    assert all(server.metric(HITS, engine=engine) > 0 for engine in ("0", "1"))
    assert_stops(server)  # without a grace period, vLLM's default
