"""Objects: vLLM's own tier of files, in several servers."""

import random

from simple_offload import metrics
from tests.second_tier.conftest import MakeServer


def test_servers_with_one_seed_write_one_object_at_a_time(serve: MakeServer) -> None:
    """vLLM seeds ``random``, and its fs tier draws the names of temporary files."""
    server = serve()
    file = server.path("a")
    random.seed(0)
    number = random.randint(0, 2**63 - 1)
    file.parent.mkdir(parents=True)
    file.with_name(f"{file.name}_{number}.tmp").touch()  # the other server is about to rename it
    random.seed(0)
    server.put("a")
    server.settle()
    assert server.counted(metrics.SECOND_TIER_FAILED, "write") == 0
    assert file.exists()
    assert random.randint(0, 2**63 - 1) == number, "vLLM's own draws are the same"
