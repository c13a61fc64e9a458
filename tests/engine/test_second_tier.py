"""Files behind host memory: engines find what others have left before them. Engines beside each
other: ``tests/serve/test_modes.py``."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.serving import free_port
from tests.conftest import PATIENCE_SECONDS
from tests.engine.compare import assert_nothing_left, assert_same_answers
from tests.engine.harness import EngineJobFailed, run_child
from tests.engine.runs import HOST_BLOCKS, Runs
from tests.engine.spec import EngineResult, EngineSpec, Round
from tests.engine.workloads import shared_prefix_asks

ASKS = shared_prefix_asks("a", seed=6)
ROUNDS = (Round(ASKS, together=False),)
NUM_PROMPT_TOKENS = sum(len(ask.prompt) for ask in ASKS)


def spec(runs: Runs, files: str | None, **options: Any) -> EngineSpec:
    """An engine with a folder for ``files``; None: without the connector."""
    if files is None:
        return runs.spec("gemma3", connector=None, rounds=ROUNDS)
    root_dir = str(runs.directory / files)
    threads = {"n_read_threads": 2, "n_write_threads": 2}
    return spec_of(runs, {"type": "fs", "root_dir": root_dir, "bytes": "1GiB"} | threads | options)


def spec_of(runs: Runs, second_tier: dict[str, Any]) -> EngineSpec:
    # A small model computes sooner than a slow disk reads.
    connector: dict[str, Any] = {"num_cpu_blocks": HOST_BLOCKS, "keep_on_device_reset": True}
    connector |= {"second_tier": second_tier | {"fetch": "always"}}
    return runs.spec("gemma3", connector=connector, rounds=ROUNDS)


def one_after_another(runs: Runs) -> dict[str, EngineResult]:
    """Engines that play the same requests."""
    return runs.run(
        "restart",
        {
            "plain": spec(runs, None),
            "first": spec(runs, "files"),
            "restarted": spec(runs, "files"),
            "other": spec(runs, "files", cache_namespace="other weights"),
        },
    )


def num_cached(result: EngineResult) -> int:
    """Prompt tokens that an engine did not compute."""
    return sum(answer.num_cached_tokens for answer in result.rounds[0].values())


def test_a_restarted_engine_finds_what_the_first_one_left(runs: Runs) -> None:
    results = one_after_another(runs)
    for name, result in results.items():
        assert_same_answers(results["plain"].rounds, result)
        assert_nothing_left(result)
        is_restarted = name == "restarted"
        assert (num_cached(result) > 0.8 * NUM_PROMPT_TOKENS) == is_restarted, name
        assert (result.metrics.get("simple_offload_fetched_blocks", 0) > 0) == is_restarted
        if name in ("first", "other"):
            assert 100 < result.metrics["simple_offload_compute_tokens_per_second"] < 10**6
    # Those of one prompt system after another, on the device and in host memory.
    assert num_cached(results["other"]) == num_cached(results["first"])


@pytest.mark.slow
def test_an_engine_finds_what_one_wrote_before_it_was_killed(runs: Runs) -> None:
    """It is killed while it goes on writing."""
    writer = spec(runs, "shared")
    with pytest.raises(EngineJobFailed, match="status -9"):
        run_child(runs.directory / "writer", "tests.engine.beyond:write_until_killed", writer)
    assert any(Path(runs.directory / "shared").rglob("*.bin"))
    result = runs.run("reader", {"reader": spec(runs, "shared")})["reader"]
    assert_same_answers(one_after_another(runs)["plain"].rounds, result)
    assert num_cached(result) > 0.8 * NUM_PROMPT_TOKENS
    assert_nothing_left(result)


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    """A server for S3 in a process of its own, with a bucket: ``store_config`` of vLLM's obj tier.
    CONTRIBUTING.md says how to install it."""
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("nixl")
    pytest.importorskip("moto")
    port = free_port()
    keys = {"access_key": "a", "secret_key": "b", "region": "us-east-1"}
    config = {"bucket": "kv-objects", "endpoint_override": f"http://127.0.0.1:{port}"} | keys
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = boto3.client(
            "s3",
            endpoint_url=config["endpoint_override"],
            aws_access_key_id="a",
            aws_secret_access_key="b",
            region_name="us-east-1",
        )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                client.create_bucket(Bucket=config["bucket"])
                break
            except Exception:  # noqa: BLE001 - it is not yet up
                assert time.monotonic() < deadline
        yield config
        assert client.list_objects_v2(Bucket=config["bucket"])["KeyCount"] > 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_restarted_engine_finds_objects_in_s3(runs: Runs, s3: dict[str, str]) -> None:
    """By vLLM's obj tier and NIXL."""
    objects = spec_of(runs, {"type": "obj", "store_config": s3})
    plain = one_after_another(runs)["plain"]
    results = runs.run("s3", {"first": objects, "restarted": objects})
    for result in results.values():
        assert_same_answers(plain.rounds, result)
        assert_nothing_left(result)
    assert num_cached(results["restarted"]) > 0.8 * NUM_PROMPT_TOKENS
    assert results["restarted"].metrics["simple_offload_fetched_blocks"] > 0
