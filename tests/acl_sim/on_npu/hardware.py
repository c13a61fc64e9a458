"""The program for the first run on hardware."""

import re
import runpy
import sys

import pytest

from tests.acl_sim.sim import Sim


def test_the_hardware_check(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program runs to its end. On hardware it is the test."""
    monkeypatch.setattr(sys, "argv", ["", "check", "bench", "--mib", "4", "--rounds", "1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tests.backends.npu_hardware", run_name="__main__")
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert "all right" in printed
    assert len(re.findall(r"(?:batch|single) +(?:load|store) .* GB/s", printed)) == 24
