"""Files behind host memory: engines find what others have left, before or beside them."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.engine.beside import tell, wait_for
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
    connector = None
    if files is not None:
        root_dir = str(runs.directory / files)
        second_tier: dict[str, Any] = {"type": "fs", "root_dir": root_dir, "bytes": "1GiB"}
        # A small model computes sooner than a slow disk reads.
        second_tier |= {"fetch": "always", "n_read_threads": 2, "n_write_threads": 2}
        connector = {"num_cpu_blocks": HOST_BLOCKS, "second_tier": second_tier | options}
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


def test_an_engine_finds_what_one_beside_it_wrote_before_it_was_killed(runs: Runs) -> None:
    """It is killed while it goes on writing."""
    folder = runs.directory / "beside"
    folder.mkdir()
    found: list[EngineResult] = []

    def write() -> None:
        with suppress(EngineJobFailed):
            run_child(folder / "writer", "tests.engine.beside:write_until_killed", writer, folder)

    def play() -> None:
        found.append(
            run_child(folder / "reader", "tests.engine.beside:play_beside", reader, folder)
        )

    writer, reader = spec(runs, "shared"), spec(runs, "shared")
    threads = [threading.Thread(target=write), threading.Thread(target=play)]
    for thread in threads:
        thread.start()
    for name in ("written", "up"):
        wait_for(folder / name)
    tell(folder / "die")
    threads[0].join()
    tell(folder / "go")
    threads[1].join()
    (result,) = found
    assert_same_answers(one_after_another(runs)["plain"].rounds, result)
    assert num_cached(result) > 0.8 * NUM_PROMPT_TOKENS
    assert_nothing_left(result)
    assert any(Path(runs.directory / "shared").rglob("*.bin"))
