"""Code that the benchmarks share: arguments, children, contenders, races, numbers."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from examples.bench.child import LAYOUT, Event, engine_environment, listen
from examples.bench.command import CANNOT_START, CannotStart
from examples.bench.connectors import CONTENDERS
from examples.bench.race import Race, RaceResults
from examples.bench.results_file import prepare_output
from examples.bench.tables import cells_with_ratios, medians, percentile
from tests.examples.fake_server import assert_gone


@pytest.mark.parametrize(
    ("program", "arguments", "complaint"),
    [
        # Each mechanism of all programs once.
        ("scheduler_bench", "--seeds many", "--seeds: 'many' is not a whole number"),
        ("scheduler_bench", "--seeds 101", "--seeds: 101 is not within 1 and 100"),
        ("scheduler_bench", "--parts cost,cots", "'cots' is none of cost, footprint, chat, traces"),
        ("scheduler_bench", "--parts cost,cots", "did you mean 'cost'?"),
        ("demo", "--restarts", "unrecognized arguments: --restarts; did you mean '--restart'?"),
        # Of single programs.
        ("copy_bench", "--sizes 3K", "'3K' is not a power of two from 4 KiB to 2 MiB"),
        ("serve_bench", "--workloads ttft,ttft", "a name occurs twice in 'ttft,ttft'"),
        ("serve_bench", "--workloads traces", "--workloads: traces needs --traces"),
        ("serve_bench", "--workloads restart --files .", "restart needs ttft"),
        ("serve_bench", "--preset fits --workloads mix", "fits has turns and idle alone"),
        ("serve_bench", "--contenders builtin", "'builtin' does not run on the CPU: choose from"),
        ("serve_bench", "--contenders ours-files", "ours-files needs --files DIR"),
        ("serve_bench", "--before /no/such", "--before: /no/such has no package simple_offload"),
        ("serve_bench", "--kv-heads 5", "--kv-heads: 5 does not divide 8 heads"),
        ("serve_bench", "--mla", "--mla: the preset cpu runs on the CPU"),
        ("serve_bench", "--model /no/such", "'/no/such' cannot be read: there is no /no/such/conf"),
        ("serve_bench", "--input-file /no/such", "--input-file: /no/such: No such file"),
        ("serve_bench", f"--input-file {__file__}", "is no JSON"),
        ("serve_bench", "--url 127.0.0.1:80", "is no address such as http://"),
        ("serve_bench", "--url http://h --contenders ours", "--contenders: not with --url"),
        ("serve_bench", "--url http://h --transport engine", "--transport: not engine with"),
        ("accuracy", "--model /no/such/model", "/no/such/model is no folder with a config.json"),
        ("accuracy", "--host-bytes apples", "'apples' must be"),
        ("accuracy", "--tasks key_value_recall,gsm8k", "goes with no other task"),
        ("scheduler_bench", "--parts traces", "--parts: traces needs --traces FILE"),
        ("scheduler_bench", "--memory 1", "'1' is not device/host in millions of tokens"),
    ],
)
def test_wrong_usage_of_each_program_is_refused(
    program: str, arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"examples.{program}.__main__").main
    with pytest.raises(SystemExit) as exit_:
        sys.exit(main(arguments.split()))
    assert exit_.value.code == CANNOT_START
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(CannotStart, match=r"^--output: cannot write to /dev/null: "):
        prepare_output(Path("/dev/null"))


# Children


def test_an_interrupt_ends_a_child_and_its_children(tmp_path: Path) -> None:
    """A child with a child of its own, like a bench whose engine core is a separate process."""
    code = """
import os, signal, subprocess, sys
from examples.bench.child import run_child
def run(arguments, report):
    started = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    report({"family": [os.getpid(), started.pid]})
    signal.pause()
run_child(run)"""
    family: list[psutil.Process] = []

    def interrupt(event: Event) -> None:
        family.extend(psutil.Process(pid) for pid in event["family"])
        raise KeyboardInterrupt

    command = [sys.executable, "-c", code, "{}"]
    with pytest.raises(KeyboardInterrupt):
        listen(command, engine_environment("cpu", tmp_path), tmp_path / "log", interrupt)
    assert len(family) == 2
    assert_gone(family)


def test_contenders_differ_in_the_connector_and_one_in_the_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAYOUT, "LBHNC")
    configs = {
        name: each.transfer_config(cpu_bytes_to_use=1 << 30) for name, each in CONTENDERS.items()
    }
    assert configs["none"] is None
    ours, builtin = configs["ours"], configs["builtin"]
    assert ours is not None
    assert ours.pop("kv_connector_module_path") == "simple_offload"
    # The benches reset the device to find out what the host tier has.
    assert ours["kv_connector_extra_config"].pop("keep_on_device_reset")
    assert ours == builtin == configs["builtin-BLHNC"]
    lazy = {"cpu_bytes_to_use": 1 << 30, "lazy_offload": True}
    assert configs["builtin-lazy"] == {**ours, "kv_connector_extra_config": lazy}
    assert configs["offloading"] == {**ours, "kv_connector": "OffloadingConnector"}
    for name, contender in CONTENDERS.items():
        environment = engine_environment("cuda", tmp_path, **contender.environment)
        assert environment.get(LAYOUT) == ("BLHNC" if name == "builtin-BLHNC" else None)


# Races


def test_contenders_take_turns_at_being_first() -> None:
    steps: list[str] = []
    contenders = [SimpleNamespace(name=name) for name in "abc"]
    race = Race(contenders, RaceResults(machine={}), steps.append)
    seen: list[str] = []
    for _ in range(2):
        race.run("nothing", lambda each: seen.append(each.name), "ac")
    assert seen == ["a", "c", "c", "a"]
    assert steps == ["nothing"]


# Numbers and reports


def test_medians_are_over_the_runs_that_have_the_number() -> None:
    assert medians([{"a": 3, "b": 1}, {"a": 1}, {"a": 8}]) == {"a": 3, "b": 1}
    ordered = [float(value) for value in range(1, 101)]
    assert [percentile(ordered, share) for share in (0.5, 0.99, 1.0)] == [51, 100, 100]
    assert percentile([3.0], 0.5) == 3


@pytest.mark.parametrize(
    ("values", "scale", "cells"),
    [
        ((0.2, 0.16, None), 1e3, ["200", "160 (0.80x)", None]),
        ((None, 33454.0), 1, [None, "33,454"]),
        ((0.0, 2.0), 1, ["0.00", "2.00"]),
    ],
)
def test_cells(values: Sequence[float | None], scale: float, cells: Sequence[str | None]) -> None:
    given = {str(place): value for place, value in enumerate(values)}
    assert list(cells_with_ratios(given, scale).values()) == cells
