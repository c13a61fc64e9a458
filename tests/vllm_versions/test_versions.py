"""The connector on the supported versions of vLLM but the pinned one: unit tests and simulation
once more, in a process of its own for each version.

The other packages are those of the pinned version's environment.
"""

from pathlib import Path

import pytest

from tests.vllm_versions.versions import (
    LONG_RUN_SECONDS,
    RUN_SECONDS,
    V030,
    V033,
    VERSIONS,
    Version,
)
from tools.set_up import ROOT

# Few: importing vLLM takes most of the time. They meet all that differs between versions.
TESTS = (
    "tests/vllm_versions/on_any.py",
    "tests/test_connector.py",
    "tests/test_vllm_compat.py",
    "tests/worker/test_regions.py",
    "tests/worker/test_worker.py",
)
# Nothing in the package tells 0.31 from the pinned version, so that its test is a slow one.
TESTS_BUT_OF_031 = (
    "tests/test_drop_in.py",
    "tests/test_metrics.py",
    "tests/scheduler/test_event_consumers.py",
    "tests/scheduler/test_events.py",
    "tests/scheduler/test_groups.py",
    "tests/scheduler/test_parked.py",
    "tests/scheduler/test_states.py",
    "tests/scheduler/test_supported.py",
    "tests/worker/test_worker_steps.py",
)
TESTS_OF_033 = (
    "tests/vllm_versions/on_033.py",
    "tests/test_metadata.py",
    "tests/scheduler/test_counting.py",
    "tests/scheduler/test_inner_hits.py",
    "tests/second_tier/test_fetches.py",
    "tests/simulation/test_real_models.py::test_groups",
)
# With what vLLM has since the pinned version.
TESTS_OF_NEWER = ("tests/scheduler/test_unread_groups.py", "tests/scheduler/test_work.py")
# vLLM 0.30 starts no store in a step without tokens: some come a step later, or too late.
LATE_ON_030 = (
    "tests/scheduler/test_prompt_records.py::test_contents_whose_copy_failed[True]",
    "tests/scheduler/test_small_tier.py::test_two_prompts_alternate_that_fit_only_together",
)
MORE_TESTS = {V030: TESTS_BUT_OF_031, V033: TESTS_BUT_OF_031 + TESTS_OF_033}

# The first test of a version may have to download its wheel.
pytestmark = pytest.mark.timeout(V033.wheel.download_seconds + RUN_SECONDS)


@pytest.mark.parametrize(
    "version",
    [
        pytest.param(each, marks=() if each in MORE_TESTS else pytest.mark.slow, id=each.number)
        for each in VERSIONS
    ],
)
def test_on(version: Version, tmp_path: Path) -> None:
    assert version.num_passed(tmp_path, *TESTS, *MORE_TESTS.get(version, ())) > 50


@pytest.mark.slow
@pytest.mark.timeout(V033.wheel.download_seconds + LONG_RUN_SECONDS)
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.number)
def test_scripts_on(version: Version, tmp_path: Path) -> None:
    """Hundreds of scripts, and all unit tests of both sides."""
    rooms = ("tests/scheduler", "tests/second_tier", "tests/worker")
    tests = ("tests/vllm_versions/on_any.py", *rooms)
    ignored = () if version is V033 else TESTS_OF_NEWER
    late = LATE_ON_030 if version is V030 else ()
    options = ["-m", "not gpu", *(f"--ignore={ROOT / each}" for each in ignored)]
    options += [f"--deselect={each}" for each in late]
    assert version.num_passed(tmp_path, *tests, *options, seconds=LONG_RUN_SECONDS) > 500


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.number)
def test_engine_on(version: Version, tmp_path: Path) -> None:
    """The same answers with and without the connector, and hits. vLLM's CPU builds of 0.30 and 0.31
    need the same torch as the pinned one; 0.33's Python files run on the pinned one's operators."""
    assert version.num_passed(tmp_path, "tests/engine/test_architectures.py") > 5


@pytest.mark.slow
def test_real_models_on_033(tmp_path: Path) -> None:
    """Scripts with the KV cache groups that vLLM 0.33 plans."""
    assert V033.num_passed(tmp_path, "tests/simulation/test_real_models.py") > 20
