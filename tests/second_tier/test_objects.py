"""Objects: vLLM's own tier of files, in several servers."""

import random
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from simple_offload import metrics
from tests.second_tier.conftest import MakeServer
from tests.simulation.second_tier import ScriptedDisk


class OwnFiles(FileSystemTierManager):
    """A tier of a user's own."""


class OwnDisk(ScriptedDisk):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    @property
    def config(self) -> dict[str, Any]:
        return {"type": "OwnFiles", "module_path": __name__, "root_dir": str(self._root)}


def test_the_files_of_a_tier_of_ones_own_are_left_to_it(serve: MakeServer, root: Path) -> None:
    """It may be made from vLLM's fs tier. There is no directory of ours then."""
    server = serve(disk=OwnDisk(root))
    server.put_behind("abc")
    assert server.second_tier.is_on
    assert server.fetch("abc") == 3


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
