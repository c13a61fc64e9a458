"""Code that the benchmarks share: arguments, children, races, tables, progress, the results
file."""

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("rich")

from rich.console import Console

from examples.bench.arguments import MAX_SEED, BenchParser, exit_codes, size
from examples.bench.child import LAYOUT, Event, engine_environment, listen
from examples.bench.command import (
    CANNOT_START,
    INTERRUPTED,
    RUN_FAILED,
    CannotStart,
    RunFailed,
    exit_code_of,
)
from examples.bench.connectors import CONTENDERS
from examples.bench.progress import Progress
from examples.bench.race import Race
from examples.bench.results_file import NUMBERS, machine, prepare_output, save_numbers
from examples.bench.tables import cells_with_ratios, medians, percentile
from simple_offload.config import ConfigError
from tests.examples.processes import assert_gone


def parse(arguments: Sequence[str]) -> Any:
    parser = BenchParser("some", "Does something.", exit_codes("good", "bad", "failed"))
    parser.add_number("--users", "users", least=2, most=16, default=4)
    parser.add_number("--rounds", "rounds")
    parser.add_names("--parts", "parts", ("cost", "hits"))
    parser.add_number("--seed", "of the texts", least=0, most=MAX_SEED, default=0)
    parser.add_argument("--bytes", type=size)
    parser.add_argument("--preset", choices=("cpu", "h200"))
    parser.add_output("--out", "some-out", "the numbers")
    return parser.parse_args(arguments)


def test_arguments() -> None:
    parsed = parse(["--parts", "hits,cost", "--rounds", "3", "--bytes", "2KiB"])
    assert (parsed.users, parsed.rounds, parsed.parts) == (4, 3, ["hits", "cost"])
    assert (parsed.bytes, parsed.seed, parsed.output) == (2048, 0, Path("some-out"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--users", "1"], "--users: 1 is not within 2 and 16"),
        (["--users", "many"], "--users: 'many' is not a whole number"),
        (["--rounds", "0"], "--rounds: 0 is less than 1"),
        (["--seed", "-1"], "--seed: -1 is not within 0 and 4294967295"),
        (["--parts", "costs"], "'costs' is none of cost, hits; did you mean 'cost'?"),
        (["--parts", "hits,hits"], "a name occurs twice in 'hits,hits'"),
        (["--bytes", "4 apples"], "--bytes: '4 apples' must be a number of bytes or a size"),
        (["--preset", "h100"], "invalid choice: 'h100' (choose from 'cpu', 'h200'); did you mean"),
        (["--round", "3"], "unrecognized arguments: --round 3; did you mean '--rounds'?"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == CANNOT_START
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "arguments", "complaint"),
    [
        ("demo", "--users 1", "--users: 1 is not within 2 and 16"),
        ("demo", "--turns 13", "--turns: 13 is not within 2 and 12"),
        ("copy_bench", "--sizes 3K", "'3K' is not a power of two from 4 KiB to 2 MiB"),
        ("copy_bench", "--sizes 64K big", "'big' is not a power of two from 4 KiB to 2 MiB"),
        ("copy_bench", "--repeats 0", "--repeats: 0 is not within 1 and 100"),
        ("copy_bench", "--scale 9", "--scale: 9 is not within 1 and 8"),
        ("engine_bench", "--parts ttft,all", "--parts: 'all' is none of ttft, idle, mix, turns"),
        ("engine_bench", "--contenders theirs", "--contenders: 'theirs' is none of none, ours"),
        ("engine_bench", "--rounds 0", "--rounds: 0 is less than 1"),
        ("engine_bench", "--kv-heads 5", "--kv-heads: 5 does not divide 32 heads"),
        (
            "engine_bench",
            "--preset cpu --contenders offloading",
            "'offloading' does not run on the CPU: choose from none, ours",
        ),
        ("multi_turn", "--preset big", "invalid choice: 'big'"),
        ("multi_turn", "--contenders builtin", "'builtin' does not run on the CPU"),
        ("multi_turn", "--num-clients 13", "13 clients, 12 active conversations, 12 conversations"),
        (
            "multi_turn",
            "--max-active-conversations 13",
            "2 clients, 13 active conversations, 12 co",
        ),
        ("multi_turn", "--model /no/such", "'/no/such' cannot be read: there is no /no/such/conf"),
        ("multi_turn", "--input-file /no/such", "--input-file: /no/such: No such file"),
        ("accuracy", "--model /no/such/model", "/no/such/model is no folder with a config.json"),
        ("accuracy", "--model ./Qwen/Qwen3", "is no folder"),
        ("accuracy", "--samples 0", "0 is less than 1"),
        ("accuracy", "--host-bytes apples", "'apples' must be"),
        ("accuracy", "--tasks key_value_recall,gsm8k", "goes with no other task"),
        ("accuracy", "--device-tokens 1000", "1000 do not hold one request of 4128 tokens"),
        ("accuracy", "--device tpu", "invalid choice: 'tpu'"),
    ],
)
def test_wrong_usage_of_each_program_is_refused(
    program: str, arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"examples.{program}.__main__").main
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    assert exit_.value.code == CANNOT_START
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(CannotStart, match=r"^--out: cannot write to /dev/null: "):
        prepare_output("--out", Path("/dev/null"))


def test_numbers_replace_those_of_an_earlier_run(tmp_path: Path) -> None:
    kind = Enum("kind", {"LOAD": "load"})
    folder = tmp_path / "new" / "out"
    prepare_output("--out", folder)
    save_numbers(folder, {"kinds": {kind.LOAD: [1]}, **machine()})
    numbers = json.loads((folder / "result.json").read_text())
    assert numbers["kinds"] == {"load": [1]}
    assert {"processor", "cores", "vllm", "torch", "commit", "date"} <= set(numbers)
    (folder / "plot.png").touch()
    prepare_output("--out", folder, NUMBERS, "plot.png")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (CannotStart("no device"), CANNOT_START, "no device\n"),
        (RunFailed("The engine ended."), RUN_FAILED, "The engine ended.\n"),
        (KeyboardInterrupt(), INTERRUPTED, "Interrupted.\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert exit_code_of(fail) == code
    assert capsys.readouterr() == ("", words)


# Children


def listen_to(code: str, tmp_path: Path, on_event: Callable[[Event], None]) -> None:
    """Pass the events of a child that runs ``code`` to ``on_event``."""
    start = "import os, signal, subprocess, sys; from examples.bench.child import run_child\n"
    command = [sys.executable, "-c", start + code, '{"times": 3}']
    listen(command, engine_environment("cpu", tmp_path), tmp_path / "log", on_event)


def events_of(code: str, tmp_path: Path) -> list[Event]:
    """The events of a child that runs ``code``."""
    events: list[Event] = []
    listen_to(code, tmp_path, events.append)
    return events


def test_events_come_in_order_and_apart_from_the_log(tmp_path: Path) -> None:
    code = """
def run(arguments, report):
    for number in range(arguments["times"]):
        print("noise", flush=True)
        report({"phase": number})
run_child(run)"""
    assert events_of(code, tmp_path) == [{"phase": number} for number in range(3)]
    assert (tmp_path / "log").read_text() == "noise\n" * 3


def test_a_child_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="killed by signal 9"):
        events_of("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    with pytest.raises(RunFailed, match="exit code 7") as error:
        events_of("print(*range(1000), sep='\\n'); sys.exit(7)", tmp_path)
    lines = str(error.value).splitlines()
    assert str(tmp_path / "log") in lines[0]
    assert lines[-1] == "999"
    assert "900" not in lines


def test_an_interrupt_ends_a_child_and_its_children(tmp_path: Path) -> None:
    """A child with a child of its own, like a bench whose engine core is a separate process."""
    code = """
def run(arguments, report):
    started = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    report({"family": [os.getpid(), started.pid]})
    signal.pause()
run_child(run)"""
    family: list[psutil.Process] = []

    def interrupt(event: Event) -> None:
        family.extend(psutil.Process(pid) for pid in event["family"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        listen_to(code, tmp_path, interrupt)
    assert len(family) == 2
    assert_gone(family)


def test_contenders_differ_in_the_connector_and_one_in_the_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAYOUT, "LBHNC")
    configs = {name: each.transfer_config(1 << 30) for name, each in CONTENDERS.items()}
    assert configs["none"] is None
    ours, builtin = configs["ours"], configs["builtin"]
    assert ours is not None
    assert ours.pop("kv_connector_module_path") == "simple_offload"
    assert ours == builtin == configs["builtin-BLHNC"]
    assert configs["offloading"] == {**ours, "kv_connector": "OffloadingConnector"}
    for name, contender in CONTENDERS.items():
        environment = engine_environment("cuda", tmp_path, **contender.environment)
        assert environment.get(LAYOUT) == ("BLHNC" if name == "builtin-BLHNC" else None)


# Races


def test_contenders_take_turns_at_being_first() -> None:
    race = Race([SimpleNamespace(name=name) for name in "abc"])
    seen: list[str] = []
    for _ in range(2):
        race.run("nothing", lambda each: seen.append(each.name), lambda each: each.name != "b")
    assert seen == ["a", "c", "c", "a"]


def test_a_contender_that_fails_is_out_and_the_others_go_on() -> None:
    race = Race([SimpleNamespace(name=name) for name in "abc"])

    def work(each: SimpleNamespace) -> str:
        if each.name == "a":
            raise ConfigError("copy_path='odd'")
        if each.name == "b":
            raise RuntimeError("lost count")
        return "done"

    for step in ("first", "second"):
        assert race.run(step, work) == {"c": "done"}
    assert race.left_out == {"a": "copy_path='odd'"}
    assert race.failures == {"b": "first: RuntimeError: lost count"}


# Numbers and reports


def test_medians_are_over_the_runs_that_have_the_number() -> None:
    assert medians([{"a": 3, "b": 1}, {"a": 1}, {"a": 8}]) == {"a": 3, "b": 1}
    ordered = [float(value) for value in range(1, 101)]
    assert [percentile(ordered, share) for share in (0.5, 0.99, 1.0)] == [51, 100, 100]
    assert percentile([3.0], 0.5) == 3


def test_cells() -> None:
    assert cells_with_ratios([0.2, 0.16, None], 1e3) == ["200", "160 (0.80x)", "-"]
    assert cells_with_ratios([None, 33454.0]) == ["-", "33,454"]
    assert cells_with_ratios([0.0, 2.0]) == ["0.00", "2.00"]


def test_progress_on_a_terminal_and_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    def play(console: Console) -> str:
        with Progress(console) as progress:
            for who in ("none", "ours"):
                progress.show(who, "starting the server")
                for done in range(3):
                    progress.show(who, "round 1/1", done, 2)
        return capsys.readouterr().out

    lines = play(Console(force_terminal=False)).splitlines()
    assert [line.partition(" s  ")[2] for line in lines] == [
        *("none: starting the server", "none: round 1/1"),
        *("ours: starting the server", "ours: round 1/1"),
    ]
    bars = play(Console(force_terminal=True, width=100))
    assert "2/2" in bars
    assert "━" in bars
