"""Accuracy without the connector and with it: the counts, the verdict, the exit code."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from examples.accuracy.__main__ import main
from examples.accuracy.evaluation import (
    Evaluation,
    Request,
    Score,
    evaluate,
    find_python,
    read_evaluation,
)
from examples.accuracy.results import Outcome, Pass
from examples.accuracy.usage import VARIABLE, Message, RecordUsage, Usage, read_usage
from examples.bench.command import BAD_RESULT, RunFailed
from examples.bench.results_file import NUMBERS
from examples.serving import Server


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
        (
            {"first": a_pass("first pass", "yes no no yes")},
            """1 of 4 answers of the first pass differ from those of the run without:
  task 2: 'yes', then 'no'""",
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


def test_missing_samples_are_reported(tmp_path: Path) -> None:
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

    async def ask(url: str, body: bytes) -> bytes:
        sent = bytearray()

        async def answer(_scope: Message, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": body[:7], "more_body": True})
            await send({"type": "http.response.body", "body": body[7:]})

        async def keep(message: Message) -> None:
            sent.extend(message.get("body", b""))

        async def receive() -> Message:
            raise AssertionError("an unexpected request")

        await RecordUsage(answer)({"type": "http", "path": url}, receive, keep)
        return bytes(sent)

    for body in bodies:
        assert asyncio.run(ask("/v1/completions", body)) == body
    asyncio.run(ask("/metrics", bodies[0]))
    assert read_usage(path) == [Usage(9, 8), Usage(5, 0)]
    assert read_usage(path, skip=1) == [Usage(5, 0)]
    assert read_usage(tmp_path / "none") == []


class FakeServer:
    """Its connector finds all but four tokens of each prompt, once the device has been reset."""

    def __init__(self, arguments: Sequence[str], usage: str) -> None:
        self.has_connector = "--kv-transfer-config" in arguments
        self.usage = Path(usage)
        self.cached = self.host_hits = 0

    def metric(self, name: str) -> int:
        return self.host_hits if name == "vllm:external_prefix_cache_hits_total" else 0

    def reset_prefix_cache(self, *, external: bool) -> None:
        assert self.has_connector
        assert not external
        self.cached = 96

    def evaluate(self, words: str) -> Evaluation:
        with self.usage.open("a") as file:
            file.write(4 * (json.dumps(vars(Usage(100, self.cached))) + "\n"))
        self.host_hits += 4 * self.cached
        return a_pass("any", words if self.cached else "yes no yes yes").evaluation


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
    @contextmanager
    def serving(
        _model: str, line: Sequence[str], environment: Mapping[str, str], _log: Path
    ) -> Iterator[FakeServer]:
        yield FakeServer(line, environment[VARIABLE])

    def evaluated(_command: object, _request: object, server: FakeServer, *_: object) -> Evaluation:
        return server.evaluate(words)

    monkeypatch.setattr("examples.accuracy.__main__.serving", serving)
    monkeypatch.setattr("examples.accuracy.__main__.evaluate", evaluated)
    (tmp_path / "recall").mkdir()
    (tmp_path / "recall" / "config.json").touch()
    arguments = ["--model", str(tmp_path / "recall"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--samples", "4", "--lm-eval", "none"]) == code
    printed = capsys.readouterr().out
    assert words_of_verdict in printed
    assert ("PASSED: all 4 samples" in printed) == (code == 0)
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    numbers = json.loads((tmp_path / "out" / NUMBERS).read_text())["recall"]
    assert numbers["passed"] == (code == 0)
    first, second = (numbers["passes"][name] for name in ("first pass", "second pass"))
    assert (first["same_answers"], second["host_hit_tokens"]) == (4, 384)
    assert f"same answers as without 4/4 {second['same_answers']}/4" in lines
    assert "found in the host tier 0 0 384" in lines
    assert "prompts found 0.0% 0.0% 100.0%" in lines
    assert "exact_match,words 1.0000 ± 0.0100 1.0000 ± 0.0100 1.0000 ± 0.0100" in lines


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
    server: str, lm_eval: str, complaint: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.touch()
    with subprocess.Popen([sys.executable, "-c", server]) as process:
        command = [sys.executable, "-c", lm_eval]
        with pytest.raises(RunFailed, match=complaint):
            evaluate(command, Request(["a"]), Server(process, 1, log), tmp_path, lambda *_: None)
        process.kill()


def test_a_missing_lm_eval_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("examples.accuracy.evaluation.OWN_PYTHON", tmp_path / "bin" / "python")
    monkeypatch.setattr("examples.accuracy.evaluation.find_spec", lambda _: None)
    with pytest.raises(RunFailed, match="make set-up-eval"):
        find_python()
