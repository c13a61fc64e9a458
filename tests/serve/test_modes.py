"""Servers with other arguments: the numbers on /metrics match the work."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from simple_offload import metrics
from tests.engine.harness import log_tail, processes_left
from tests.serve.conftest import ARGUMENTS, OURS, StartServer, configured, save_model
from tests.serve.server import Server
from tests.serve.test_observability import check_work, work
from tests.serve.test_serve import ASKS, HITS, LONG, answers, assert_same, assert_stops

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_ranks(start_server: StartServer, model: Path) -> None:
    server = start_server("--tensor-parallel-size", "2")
    work(server)
    check_work(server, model, num_ranks=2)
    server.kill()


def ranks_that_share(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have mapped shared host memory."""
    found = []
    for process in processes:
        with suppress(OSError):  # it has ended
            if "/memfd:simple-offload" in Path(f"/proc/{process.pid}/maps").read_text():
                found.append(process)
    return found


@pytest.mark.parametrize("victim", ["rank", "engine"])
def test_killed_processes_leave_no_shared_memory(victim: str, tmp_path: Path) -> None:
    """More ranks than KV heads: both share host memory. One of their processes, or the engine's,
    is killed while a request runs. The server ends, and the memory with it."""
    model = save_model(tmp_path / "model", num_kv_heads=1)
    with Server(model, tmp_path, *ARGUMENTS, "--tensor-parallel-size", "2") as server:
        first = answers(server, ASKS, at_once=1)
        server.reset_prefix_cache(external=False)
        assert_same(first, answers(server, ASKS, at_once=1))
        assert server.metric(HITS) > 0
        family = server.family()
        ranks = ranks_that_share(family)
        assert len(ranks) == 2, "both have mapped it"
        with server.open_stream(ASKS[0].prompt, LONG) as lines:
            next(lines)
            (ranks[0] if victim == "rank" else ranks[0].parent()).kill()  # type: ignore[union-attr]
            server.wait_for_end()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive, f"{alive} outlived the killed {victim}\n{log_tail(server.log)}"
        assert not processes_left(server.pid, within=0)


def test_two_engines_share_files(start_server: StartServer, tmp_path: Path) -> None:
    """Data parallel: each engine has a host tier of its own, and finds what the other one has
    written, with none of it in its host memory."""
    second_tier = {"type": "fs", "root_dir": str(tmp_path), "bytes": "4GiB", "fetch": "always"}
    extra = {**OURS["kv_connector_extra_config"], "second_tier": second_tier}
    server = start_server(
        *("--data-parallel-size", "2", "--api-server-count", "1"),
        *configured({**OURS, "kv_connector_extra_config": extra}),
    )
    first = answers(server, ASKS, at_once=1)
    for _ in range(3):
        server.reset_prefix_cache(external=False)
        assert_same(first, answers(server, ASKS, at_once=len(ASKS)))
    fetched = "vllm:simple_offload_fetched_blocks_total"
    for engine in ("0", "1"):
        assert server.metric(fetched, engine=engine) > 0
        # Not all that it loaded has come from files meanwhile.
        assert server.metric(metrics.LOADED, engine=engine) > server.metric(fetched, engine=engine)
        assert server.metric(HITS, engine=engine) > 0
    assert_stops(server)  # without a grace period, vLLM's default
