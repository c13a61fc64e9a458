"""Faults hit the planned transfers only, and the product has no switch for them."""

import re
from pathlib import Path

import pytest

from simple_offload.config import ConfigError, OffloadConfig
from tests.faults.connector import FAULTS_KEY
from tests.faults.plan import Fault, FaultPlan

PRODUCT = Path(__file__).resolve().parents[2] / "simple_offload"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(direction="load", action="fail"), [1]),
        (Fault(direction="load", action="fail", first=4), [4]),
        (Fault(direction="load", action="fail", first=2, every=3), [2, 5, 8]),
        (Fault(direction="load", action="fail", first=3, every=2, times=2), [3, 5]),
        (Fault(direction="store", action="fail", every=1), []),
    ],
)
def test_which_transfers_are_hit(fault: Fault, expected: list[int]) -> None:
    plan = FaultPlan(faults=(fault,))
    assert [number for number in range(1, 10) if plan.find("load", number)] == expected


def test_the_first_fault_that_hits_wins() -> None:
    kill = Fault(direction="load", action="kill", first=2)
    late = Fault(direction="load", action="delay", every=1, polls=3)
    plan = FaultPlan(faults=(kill, late))
    assert [plan.find("load", number) for number in (1, 2)] == [late, kill]


def test_a_rank_has_its_own_faults() -> None:
    everywhere = Fault(direction="load", action="fail")
    there = Fault(direction="store", action="fail", rank=1)
    plan = FaultPlan(faults=(everywhere, there))
    assert plan.for_rank(0) == FaultPlan(faults=(everywhere,))
    assert plan.for_rank(1) == plan


def test_the_product_has_no_switch_for_faults() -> None:
    with pytest.raises(ConfigError, match=f"{FAULTS_KEY}=.*unknown key"):
        OffloadConfig.parse({FAULTS_KEY: {}}, num_ranks=1)
    sources = list(PRODUCT.rglob("*.py"))
    assert sources
    imports_tests = re.compile(r"^\s*(from|import) tests\b", re.MULTILINE)
    assert not [path for path in sources if imports_tests.search(path.read_text())]
