"""Accuracy without the connector and with it: the counts, the verdict, the exit code."""

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("prometheus_client")

from examples import serving as serving_module
from examples.accuracy.__main__ import main
from examples.accuracy.evaluation import (
    Evaluation,
    Score,
    find_python,
    read_evaluation,
)
from examples.accuracy.results import Outcome, Pass, agreeing, outcome_json, verdict
from examples.accuracy.usage import VARIABLE, Message, RecordUsage, Usage, read_usage
from examples.bench.child import ROOT
from examples.bench.command import BAD_RESULT, RUN_FAILED, RunFailed
from examples.bench.results_file import NUMBERS

FAKE_SERVER = (sys.executable, "-m", "tests.examples.fake_server")
FAKE_LM_EVAL = f"{sys.executable} {ROOT / 'tests/examples/fake_lm_eval.py'}"


def a_pass(
    name: str, words: str = "yes no yes yes", *, cached: int = 0, right: float = 1.0
) -> Pass:
    answers = {("task", number): [word] for number, word in enumerate(words.split())}
    evaluation = Evaluation([Score("task", "exact_match,words", right, 0.01)], answers)
    usages = [Usage(100, cached)] * len(answers)
    hits = cached * len(answers)
    return Pass(name, evaluation, usages, hits, 0, seconds=1.0, tail_tokens=10)


def an_outcome(**changed: Pass) -> Outcome:
    passes = {"without": a_pass("without"), "first": a_pass("first pass")}
    passes["second"] = a_pass("second pass", cached=96)
    return Outcome(**(passes | changed), least_accuracy=0.9)


@pytest.mark.parametrize("which", ["first", "second"])
def test_one_answer_that_differs_fails(which: str) -> None:
    name = f"{which} pass"
    outcome = an_outcome(**{which: a_pass(name, "yes no no yes", cached=96)})
    assert agreeing(outcome.without, getattr(outcome, which)) == 3
    text = verdict({"good": an_outcome(), "bad": outcome})
    assert text.startswith("FAILED\n- bad: 1 of 4 answers")
    assert "task 2: 'yes', then 'no'" in text
    assert "good" not in text
    assert outcome_json(outcome)["passes"][name]["same_answers"] == 3


def second_pass(*usages: Usage) -> dict[str, Pass]:
    return {"second": replace(a_pass("second pass", cached=96), usages=usages)}


HIT, MISS = Usage(100, 96), Usage(100, 0)
UNFIT = "the model is not fit to show anything"
FEW_HITS = "of the prompts of the second pass were found, not more than 90%"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        (
            {"first": a_pass("first pass", "yes no yes")},
            "1 samples were answered in only one of without and first pass",
        ),
        # A prompt is found but for its tail.
        (second_pass(Usage(100, 89)), f"0.0% {FEW_HITS}"),
        (second_pass(Usage(100, 90)), None),
        (second_pass(*[HIT] * 90, *[MISS] * 10), f"90.0% {FEW_HITS}"),
        (second_pass(*[HIT] * 91, *[MISS] * 9), None),
        # Device hits are no host hits.
        (
            {"second": replace(a_pass("second pass", cached=96), host_hit_tokens=0)},
            "nothing of the second pass came from the host tier",
        ),
        (
            {"without": a_pass("without", right=0.89)},
            f"89.0% are right without the connector; with less than 90% {UNFIT}",
        ),
        ({"without": a_pass("without", right=0.9)}, None),
    ],
)
def test_problems(changed: dict[str, Pass], problem: str | None) -> None:
    assert an_outcome(**changed).problems == ([] if problem is None else [problem])


def lm_eval_files(folder: Path, results: dict[str, Any], samples: dict[str, list[Any]]) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "results_2026-01-01T00-00-00.1.json").write_text(json.dumps({"results": results}))
    for task, lines in samples.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (model / f"samples_{task}_2026-01-01T00-00-00.1.jsonl").write_text(text)
    return folder


def test_lm_evals_files_are_read(tmp_path: Path) -> None:
    numbers = {"alias": "gsm8k", "exact_match,strict": 0.5, "exact_match_stderr,strict": 0.1}
    numbers |= {"exact_match,flexible": 1, "exact_match_stderr,flexible": "N/A"}
    rows = [{"doc_id": 7, "resps": [["a"], ["b"]], "filter": name} for name in ("x", "y")]
    found = read_evaluation(lm_eval_files(tmp_path, {"gsm8k": numbers}, {"my_task": rows}))
    assert found.scores == [
        Score("gsm8k", "exact_match,strict", 0.5, 0.1),
        Score("gsm8k", "exact_match,flexible", 1.0, None),
    ]
    assert found.answers == {("my_task", 7): ["a", "b"]}


def test_missing_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="left 0 results"):
        read_evaluation(tmp_path)
    with pytest.raises(RunFailed, match="no sample or no score"):
        read_evaluation(lm_eval_files(tmp_path, {"t": {"acc,none": 1.0}}, {}))


def test_usage_is_kept_and_answers_are_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "usage.jsonl"
    monkeypatch.setenv(VARIABLE, str(path))
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    bodies = [json.dumps({"usage": usage}).encode(), b"not JSON", b'{"error": "no usage"}']
    bodies += [b'{"usage": {"prompt_tokens": 5}}']

    async def ask(url: str, body: bytes) -> list[Message]:
        sent: list[Message] = []

        async def answer(_scope: Message, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": body[:7], "more_body": True})
            await send({"type": "http.response.body", "body": body[7:]})

        async def keep(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            raise AssertionError("an unexpected request")

        await RecordUsage(answer)({"type": "http", "path": url}, receive, keep)
        return sent

    for body in bodies:
        sent = asyncio.run(ask("/v1/completions", body))
        assert b"".join(message.get("body", b"") for message in sent) == body
    asyncio.run(ask("/metrics", bodies[0]))
    assert read_usage(path) == [Usage(9, 8), Usage(5, 0)]
    assert read_usage(path, skip=1) == [Usage(5, 0)]
    assert read_usage(tmp_path / "none") == []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "recall"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the faults of the fake servers, which replace vLLM's."""
    monkeypatch.setattr(serving_module, "COMMAND", FAKE_SERVER)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def set_faults(**faults: Any) -> None:
        monkeypatch.setenv("FAKE_SERVER", json.dumps(faults))

    return set_faults


def run_main(model: Path, tmp_path: Path, *arguments: str) -> int:
    # Like the default, a path relative to this folder; lm_eval runs in another one.
    output = os.path.relpath(tmp_path / "out")
    command = ["--model", str(model), "--output", output, "--samples", "5"]
    command += ["--device", "cpu", "--lm-eval", f"env PYTHONPATH={ROOT} {FAKE_LM_EVAL}"]
    return main([*command, *arguments])


def leftovers() -> list[psutil.Process]:
    """Children of this process that still run."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    return [each for each in children if "tests.examples.fake" in " ".join(each.cmdline())]


def test_a_run_that_passes(model: Path, tmp_path: Path, faulty: Any, capsys: Any) -> None:
    faulty()
    assert run_main(model, tmp_path) == 0
    printed = capsys.readouterr().out
    assert "PASSED: all 5 samples" in printed
    found = "once more when {host_hit_tokens} of {prompt_tokens} prompt tokens came from the host"
    assert "1.0000 ± 0.0000" in printed
    assert "5/5" in printed
    numbers = json.loads((tmp_path / "out" / NUMBERS).read_text())["recall"]
    assert numbers["passed"]
    passes = numbers["passes"]
    assert found.format(**passes["second pass"]) in printed
    assert [each["prompts"] for each in passes.values()] == [5, 5, 5]
    assert [each["hit_share"] for each in passes.values()] == [0, 0, 1]
    assert passes["second pass"]["host_hit_tokens"] == passes["without"]["prompt_tokens"] - 5
    assert not leftovers()


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        # The server with the connector gets ten requests; the one without gets five.
        ({"other_from": 7}, "3 of 5 answers of the second pass differ"),
        ({"no_hits": True}, "0.0% of the prompts of the second pass were found"),
    ],
)
def test_a_run_that_fails(
    model: Path, tmp_path: Path, faulty: Any, capsys: Any, faults: dict[str, Any], why: str
) -> None:
    faulty(**faults)
    assert run_main(model, tmp_path) == BAD_RESULT
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert why in printed
    assert not json.loads((tmp_path / "out" / NUMBERS).read_text())["recall"]["passed"]
    assert not leftovers()


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"die_at": 2}, "The server ended while it was needed, killed by signal 9"),
        ({"die_at": 8}, "The server ended while it was needed, killed by signal 9"),
        ({"refuse_at": 1}, "lm_eval ended, exit code 1"),
        ({"refuse_at": 1}, "HTTP Error 500"),
    ],
)
def test_a_server_or_an_lm_eval_that_fails_is_reported(
    model: Path, tmp_path: Path, faulty: Any, capsys: Any, faults: dict[str, Any], words: str
) -> None:
    faulty(**faults)
    numbers = tmp_path / "out" / NUMBERS
    numbers.parent.mkdir()
    numbers.write_text("of an earlier run")
    assert run_main(model, tmp_path) == RUN_FAILED
    printed = "".join(capsys.readouterr())
    assert words in printed
    assert "PASSED" not in printed
    assert not numbers.exists()
    assert not leftovers()


def test_a_missing_lm_eval_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("examples.accuracy.evaluation.OWN_PYTHON", tmp_path / "bin" / "python")
    monkeypatch.setattr("examples.accuracy.evaluation.find_spec", lambda _: None)
    with pytest.raises(RunFailed, match="make set-up-eval"):
        find_python()
