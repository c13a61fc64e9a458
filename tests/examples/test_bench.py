"""Code that the benchmarks share: arguments, children, contenders, races, numbers."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.accuracy.__main__ import MODELS
from examples.bench.command import CANNOT_START, CannotStart
from examples.bench.race import Race, RaceResults
from examples.bench.results_file import prepare_output
from examples.bench.tables import cells_with_ratios, medians, spread
from simple_offload.config import ConfigError


@pytest.mark.parametrize(
    ("program", "arguments", "complaint"),
    [
        # Each mechanism of all programs once.
        ("scheduler_bench", "--seeds many", "--seeds: 'many' is not a whole number"),
        ("scheduler_bench", "--seeds 101", "--seeds: '101' is not a whole number from 1 to 100"),
        ("scheduler_bench", "--parts cost,cots", "'cots' is none of cost, chat, traces"),
        ("scheduler_bench", "--parts cost,cots", "did you mean 'cost'?"),
        ("demo", "--restarts", "unrecognized arguments: --restarts; did you mean '--restart'?"),
        # Of single programs.
        ("copy_bench", "", "No CUDA device (torch"),
        ("copy_bench", "--sizes 3K", "invalid choice: 3072 (choose from 4096, 8192"),
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
        ("accuracy", "--model {here}/llama-recall --model {here}/llama-recall", "two are alike"),
        ("accuracy", "--host-bytes apples", "'apples' must be"),
        ("accuracy", "--host-bytes 0", "'0' is less than a byte"),
        ("accuracy", "--tasks key_value_recall,gsm8k", "goes with no other task"),
        ("scheduler_bench", "--parts traces", "--parts: traces needs --traces FILE"),
        (
            "scheduler_bench",
            "--parts sizes --traces x --working-sets 2",
            "--working-sets: sizes are of one",
        ),
        ("scheduler_bench", "--memory 1", "'1' is not device/host in millions of tokens"),
    ],
)
def test_wrong_usage_of_each_program_is_refused(
    program: str,
    arguments: str,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main = importlib.import_module(f"examples.{program}.__main__").main
    with pytest.raises(SystemExit) as exit_:
        sys.exit(main(arguments.format(here=MODELS).split()))
    assert exit_.value.code == CANNOT_START
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(CannotStart, match=r"^--output: cannot write to /dev/null: "):
        prepare_output(Path("/dev/null"))


# Races


def test_contenders_take_turns_at_being_first_until_one_fails() -> None:
    contenders = [SimpleNamespace(name=name) for name in "abc"]
    results = RaceResults(machine={})
    steps: list[str] = []
    seen: list[str] = []
    race = Race(contenders, results, steps.append)

    def work(each: SimpleNamespace) -> str:
        seen.append(each.name)
        if len(seen) in (5, 6):
            raise ConfigError("refused")
        return "done"

    for _ in range(2):
        assert race.run("nothing", work, "ac") == {"a": "done", "c": "done"}
    assert race.run("more", work) == {"b": "done"}
    assert seen == ["a", "c", "c", "a", "c", "a", "b"]
    assert steps == ["nothing", "more"]
    refused = "more: ConfigError: refused"
    assert results.failures == {"c": refused, "a": refused}
    assert race.run("more", work, "ac") == {}


# Numbers and reports


def test_medians_are_over_the_runs_that_have_the_number() -> None:
    assert medians([{"a": 3, "b": 1}, {"a": 1}, {"a": 8}]) == {"a": 3, "b": 1}
    found = spread(range(100, 0, -1), 50, 99)
    assert found == {"mean": 50.5, "p50": 51, "p99": 100, "worst": 100}
    assert spread([3.0], 50) == {"mean": 3, "p50": 3, "worst": 3}


def test_ratios_are_to_the_first() -> None:
    cells = [
        list(cells_with_ratios(dict(zip("abc", values, strict=False)), 1e3).values())
        for values in ((0.2, 0.16, None), (None, 33.454), (0.0, 2.0))
    ]
    assert cells == [["200", "160 (0.80x)", None], [None, "33,454"], ["0.00", "2,000"]]
