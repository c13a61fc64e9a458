"""Two engines behind one server (data parallel), each with a host tier of its own."""

import pytest

from tests.serve.conftest import StartServer
from tests.serve.test_serve import ASKS, HITS, answers, assert_same, assert_stops


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_engines(start_server: StartServer) -> None:
    server = start_server("--data-parallel-size", "2", "--api-server-count", "1")
    first = answers(server, ASKS, at_once=1)
    for _ in range(3):
        server.reset_prefix_cache(external=False)
        assert_same(first, answers(server, ASKS, at_once=len(ASKS)))
    assert all(server.metric(HITS, engine=engine) > 0 for engine in ("0", "1"))
    assert_stops(server)  # without a grace period, vLLM's default
