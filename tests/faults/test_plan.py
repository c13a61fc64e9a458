"""The faults strike where they should, and only where a test asks for them."""

import re
from pathlib import Path

import pytest

from simple_offload.config import ConfigError, OffloadConfig
from tests.faults.connector import FAULTS_KEY
from tests.faults.plan import Fault, FaultPlan

PRODUCT = Path(__file__).resolve().parents[2] / "simple_offload"


@pytest.mark.parametrize(
    ("fault", "struck"),
    [
        (Fault(direction="load", action="fail"), [1]),
        (Fault(direction="load", action="fail", first=4), [4]),
        (Fault(direction="load", action="fail", first=2, every=3), [2, 5, 8]),
        (Fault(direction="load", action="fail", first=3, every=2, times=2), [3, 5]),
        (Fault(direction="store", action="fail", every=1), []),
    ],
)
def test_which_transfers_are_struck(fault: Fault, struck: list[int]) -> None:
    plan = FaultPlan.of(fault)
    assert [number for number in range(1, 10) if plan.find("load", number)] == struck


def test_the_first_fault_that_strikes_happens() -> None:
    kill = Fault(direction="load", action="kill", first=2)
    late = Fault(direction="load", action="delay", every=1, polls=3)
    assert [FaultPlan.of(kill, late).find("load", number) for number in (1, 2)] == [late, kill]


def test_a_rank_has_its_own_faults() -> None:
    everywhere = Fault(direction="load", action="fail")
    there = Fault(direction="store", action="fail", rank=1)
    plan = FaultPlan.of(everywhere, there)
    assert plan.of_rank(0) == FaultPlan.of(everywhere)
    assert plan.of_rank(1) == plan


def test_the_product_has_no_switch_for_faults() -> None:
    with pytest.raises(ConfigError, match=f"{FAULTS_KEY}=.*unknown key"):
        OffloadConfig.parse({FAULTS_KEY: {}}, num_ranks=1)
    sources = list(PRODUCT.rglob("*.py"))
    assert sources
    imports_tests = re.compile(r"^\s*(from|import) tests\b", re.MULTILINE)
    assert not [path for path in sources if imports_tests.search(path.read_text())]
