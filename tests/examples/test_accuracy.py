"""Accuracy without the connector and with it: the counts, the verdict, the exit code."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.accuracy.__main__ import main
from examples.accuracy.evaluation import Evaluation, evaluate, read_evaluation
from examples.accuracy.results import METRICS, Outcome, Pass
from examples.bench.child import stop
from examples.bench.command import BAD_RESULT, RunFailed
from examples.bench.results_file import NUMBERS
from examples.serving import Server


def a_pass(
    name: str,
    words: str = "yes no yes yes",
    *,
    found: int = 0,
    on_device: int = 0,
    right: float = 1.0,
) -> Pass:
    answers = {("task", number): [word] for number, word in enumerate(words.split())}
    evaluation = Evaluation({"task, exact_match,words": right}, answers)
    tokens = dict(zip(METRICS, (1000, found, on_device), strict=True))
    return Pass(name, evaluation, tokens, seconds=1.0)


def an_outcome(**changed: Pass) -> Outcome:
    passes = {"without": a_pass("without"), "first": a_pass("first pass")}
    passes["second"] = a_pass("second pass", found=901)
    return Outcome(**(passes | changed), least_accuracy=0.9)


UNFIT = "are right without the connector; with less than 90% the model is not fit to show anything"
FEW_HITS = "of the prompt tokens of the second pass were found, not more than 90%"
NO_HITS = "nothing of the second pass came from the host tier"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        (
            {"first": a_pass("first pass", "yes no yes")},
            """1 of 4 answers of the first pass differ from those of the run without:
  task 3: 'yes', then 'no answer'""",
        ),
        (
            {"first": a_pass("first pass", "yes no no yes")},
            """1 of 4 answers of the first pass differ from those of the run without:
  task 2: 'yes', then 'no'""",
        ),
        ({"second": a_pass("second pass", found=900)}, f"90.0% {FEW_HITS}"),
        # Prompts share their beginning.
        ({"second": a_pass("second pass", found=100, on_device=801)}, None),
        ({"second": a_pass("second pass", on_device=1000)}, NO_HITS),
        ({"without": a_pass("without", right=0.89)}, f"89.0% {UNFIT}"),
        ({"without": a_pass("without", right=0.9)}, None),
    ],
)
def test_problems(changed: dict[str, Pass], problem: str | None) -> None:
    assert an_outcome(**changed).problems == ([] if problem is None else [problem])


def test_lm_evals_files_are_read(tmp_path: Path) -> None:
    numbers = {"alias": "gsm8k", "exact_match,strict": 0.5, "exact_match_stderr,strict": 0.1}
    numbers |= {"exact_match,flexible": 1, "exact_match_stderr,flexible": "N/A"}
    rows = [{"doc_id": 7, "resps": [["a"], ["b"]], "filter": name} for name in ("x", "y")]
    results = tmp_path / "model" / "results_2026-01-01T00-00-00.1.json"
    results.parent.mkdir()
    results.write_text(json.dumps({"results": {"gsm8k": numbers}}))
    with pytest.raises(RunFailed, match="no sample or no score"):
        read_evaluation(tmp_path)
    samples = results.with_name("samples_my_task_2026-01-01T00-00-00.1.jsonl")
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_evaluation(tmp_path)
    assert found.scores == {
        "gsm8k, exact_match,strict": 0.5,
        "gsm8k, exact_match_stderr,strict": 0.1,
        "gsm8k, exact_match,flexible": 1.0,
    }
    assert found.answers == {("my_task", 7): ["a", "b"]}


class FakeServer:
    """Its connector finds all but four tokens of each prompt, once the device has been reset."""

    def __init__(self) -> None:
        self.tokens = dict.fromkeys(METRICS.values(), 0)
        self.found = 0

    def metric(self, name: str) -> int:
        return self.tokens[name]

    def reset_prefix_cache(self, *, external: bool) -> None:
        assert not external
        self.found = 96

    def evaluate(self, words: str) -> Evaluation:
        for metric, number in zip(METRICS.values(), (100, self.found, 0), strict=True):
            self.tokens[metric] += 4 * number
        return a_pass("any", words if self.found else "yes no yes yes").evaluation


@pytest.mark.parametrize(
    ("words", "code", "words_of_verdict"),
    [
        ("yes no yes yes", 0, "when 384 of 400 prompt tokens came from the host tier."),
        ("yes no no yes", BAD_RESULT, "FAILED\n- recall: 1 of 4 answers of the second pass differ"),
    ],
)
def test_the_table_the_numbers_and_the_exit_code_agree(
    words: str,
    code: int,
    words_of_verdict: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[Sequence[str]] = []

    @contextmanager
    def serving(_model: str, line: Sequence[str], *_: object) -> Iterator[FakeServer]:
        lines.append(line)
        yield FakeServer()

    def evaluated(_: object, server: FakeServer, *__: object, **___: object) -> Evaluation:
        return server.evaluate(words)

    monkeypatch.setattr("examples.accuracy.__main__.Server", serving)
    monkeypatch.setattr("examples.accuracy.__main__.evaluate", evaluated)
    (tmp_path / "recall").mkdir()
    (tmp_path / "recall" / "config.json").touch()
    arguments = ["--model", str(tmp_path / "recall"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--samples", "4", "--lm-eval", "none"]) == code
    assert ["--kv-transfer-config" in line for line in lines] == [False, True]
    printed = capsys.readouterr().out
    assert words_of_verdict in printed
    assert ("PASSED: all 4 samples" in printed) == (code == 0)
    numbers = json.loads((tmp_path / "out" / NUMBERS).read_text())["recall"]
    assert numbers["passed"] == (code == 0)
    first, second = (numbers["passes"][name] for name in ("first pass", "second pass"))
    assert (first["same_answers"], second["host_hit_tokens"]) == (4, 384)
    assert second["same_answers"] == (4 if code == 0 else 3)
    assert second["hit_share"] == 0.96


PAUSE = "import signal; signal.pause()"


@pytest.mark.parametrize(
    ("server", "lm_eval", "complaint"),
    [
        ("raise SystemExit(9)", PAUSE, "The server ended while it was needed, exit code 9"),
        (PAUSE, "print('HTTP Error 500'); raise SystemExit(1)", "exit code 1(.|\n)*Error 500"),
        (PAUSE, "pass", "lm_eval left 0 results"),
    ],
)
def test_a_server_or_an_lm_eval_that_fails_is_reported(
    server: str, lm_eval: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.serving.COMMAND", (sys.executable, "-c", server))
    running = Server("", [], os.environ, tmp_path / "log")
    try:
        with pytest.raises(RunFailed, match=complaint):
            evaluate([sys.executable, "-c", lm_eval], running, tmp_path)
    finally:
        stop(running.process)
