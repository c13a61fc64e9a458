"""vLLM's engine while copies fail, are late, or lose their threads: the answers do not change, no
block stays referenced, and the log names the failures."""

import re

import pytest

from examples.bench.child import ROOT
from tests.engine.harness import run_child
from tests.engine.runs import Runs
from tests.faults.scenes import FAIL, RECOMPUTE

HOST_BLOCKS = 300
"""Host blocks: more than all scenes together store."""


@pytest.fixture(scope="module", params=["gemma3", pytest.param("llama", marks=pytest.mark.slow)])
def problems(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, str | None]:
    """By scene that was played; None: it ended well."""
    runs = Runs(tmp_path_factory.mktemp("faults"))
    recompute, fail = (
        runs.spec(
            request.param,
            connector={"num_cpu_blocks": HOST_BLOCKS, "keep_on_device_reset": True},
            rounds=(),
            transfer_arguments={
                "kv_connector_module_path": "tests.faults.connector",
                "kv_load_failure_policy": policy,
            },
        )
        for policy in ("recompute", "fail")
    )
    plain = runs.spec(request.param, connector=None, rounds=())
    played: dict[str, str | None] = run_child(
        runs.directory, "tests.faults.scenes:play_all", plain, recompute, fail
    )
    return played


@pytest.mark.proves("I5", "I7")
@pytest.mark.parametrize("scene", [scene.__name__ for scene in (*RECOMPUTE, *FAIL)])
def test_every_request_gets_its_answer_and_nothing_is_held(
    problems: dict[str, str | None], scene: str
) -> None:
    assert scene in problems, f"an earlier scene failed: {problems}"
    assert problems[scene] is None, problems[scene]


def test_the_product_has_no_switch_for_faults() -> None:
    sources = [path.read_text() for path in (ROOT / "simple_offload").rglob("*.py")]
    assert sources
    imports_tests = re.compile(r"^\s*(from|import) tests\b", re.MULTILINE)
    assert not any(imports_tests.search(source) for source in sources)
