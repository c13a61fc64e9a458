"""Running lm_eval against a server, and reading what it found."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, BinaryIO

from examples.demo.child import ROOT, TAIL_LINES
from examples.serving import Server

TASKS = Path(__file__).parent / "tasks"
OUR_TASK = "key_value_recall"
OWN_PYTHON = ROOT / ".venv-eval" / "bin" / "python"
"""Of the environment that ``make set-up-eval`` makes."""

CACHE = "datasets"
"""What lm_eval makes of our data, which is of no use afterwards."""

REQUEST_SECONDS = 600
STOP_SECONDS = 10.0

_PROGRESS = re.compile(rb"Requesting API:.*?(\d+)/(\d+)")

Show = Callable[[int, int], None]
"""Is told how many requests are done, of how many."""


class EvaluationFailed(Exception):
    """lm_eval could not be run to its end, or said something that cannot be read."""


@dataclass(frozen=True)
class Score:
    """One number that lm_eval reports."""

    task: str
    metric: str
    """With the filter that answers went through: "exact_match,words"."""
    value: float
    error: float | None
    """Standard error; None where lm_eval gives none."""


@dataclass(frozen=True)
class Evaluation:
    """What lm_eval found in one pass over its tasks."""

    scores: list[Score]
    answers: dict[tuple[str, int], list[str]]
    """Of each sample (task, number), what the model said, before any filter."""


@dataclass(frozen=True)
class Request:
    """What to evaluate."""

    tasks: Sequence[str]
    limit: int | None = None
    """Samples of each task; None for all."""
    concurrency: int = 4
    extra: Sequence[str] = ()
    """Arguments for lm_eval's command line."""
    offline: bool = True


def find_python() -> str:
    """A Python that has lm_eval. Raises EvaluationFailed with what to do if there is none."""
    if OWN_PYTHON.exists():
        return str(OWN_PYTHON)
    if find_spec("lm_eval") is not None:
        return sys.executable
    raise EvaluationFailed(
        f"lm_eval is not installed: neither in {OWN_PYTHON.parents[1]} (make set-up-eval) nor "
        f'beside {sys.executable} (pip install "lm-eval[api]==0.4.13").'
    )


def evaluate(
    command: Sequence[str], request: Request, server: Server, folder: Path, show: Show
) -> Evaluation:
    """Run lm_eval (``command`` and arguments) in ``folder``, which holds the task's data, and
    return what it found. Everything it writes lies in ``folder`` afterwards.

    Raises ServerFailed as soon as the server ends, else EvaluationFailed if lm_eval fails. It
    is gone however this returns.
    """
    folder = folder.absolute()  # lm_eval's own paths would be taken from there
    log = folder / "lm_eval.log"
    output = folder / "lm_eval"
    process = subprocess.Popen(
        [*command, *_arguments(request, server, output)],
        cwd=folder,
        env=_environment(folder, offline=request.offline),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    # It would ask a dead server again and again, for minutes.
    server.ended.add_done_callback(lambda _: process.kill())
    try:
        assert process.stdout is not None
        with log.open("wb") as file, process.stdout as output_pipe:
            _follow(output_pipe, file, show)
        code = process.wait()
    finally:
        _stop(process)
        shutil.rmtree(folder / CACHE, ignore_errors=True)
    if code != 0:
        with suppress(TimeoutError):
            server.ended.result(timeout=1)  # of a dying server, its clients know first
        server.check()
        tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        raise EvaluationFailed(
            "\n".join([f"lm_eval ended with exit code {code}. The end of {log}:", *tail])
        )
    return read_evaluation(output)


def _arguments(request: Request, server: Server, output: Path) -> list[str]:
    model = {
        "model": "model",
        "base_url": f"{server.url}/v1/completions",
        "num_concurrent": request.concurrency,
        "max_retries": 1,
        "timeout": REQUEST_SECONDS,
        # Prompts travel as text, and the server is the only one to have a tokenizer.
        "tokenizer_backend": "none",
        "tokenized_requests": False,
    }
    arguments = ["run", "--model", "local-completions", "--model_args"]
    arguments += [",".join(f"{key}={value}" for key, value in model.items())]
    arguments += ["--tasks", ",".join(request.tasks), "--include_path", str(TASKS)]
    arguments += ["--log_samples", "--output_path", str(output)]
    if request.limit is not None:
        arguments += ["--limit", str(request.limit)]
    return [*arguments, *request.extra]


def _environment(folder: Path, *, offline: bool) -> dict[str, str]:
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables["PYTHONUNBUFFERED"] = "1"
    if offline:
        variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        variables["HF_DATASETS_CACHE"] = str(folder / CACHE)
    return variables


def _follow(output: IO[bytes], log: BinaryIO, show: Show) -> None:
    """Copy ``output`` to ``log`` as it comes, and tell ``show`` of the progress bar in it."""
    line = b""
    while chunk := os.read(output.fileno(), 4096):
        log.write(chunk)
        log.flush()
        *lines, line = (line + chunk).replace(b"\r", b"\n").split(b"\n")
        for done, total in (match for each in lines for match in _PROGRESS.findall(each)):
            show(int(done), int(total))


def _stop(process: "subprocess.Popen[bytes]") -> None:
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
    finally:
        process.kill()
        process.wait()


def read_evaluation(output: Path) -> Evaluation:
    """What lm_eval wrote under ``output``. Raises EvaluationFailed where something is missing."""
    results = sorted(output.rglob("results_*.json"))
    if len(results) != 1:
        raise EvaluationFailed(f"lm_eval left {len(results)} results in {output}, not one.")
    found: dict[str, Any] = json.loads(results[0].read_text(encoding="utf-8"))["results"]
    scores = [
        score for task, numbers in sorted(found.items()) for score in _task_scores(task, numbers)
    ]
    answers = {}
    for path in sorted(output.rglob("samples_*.jsonl")):
        # samples_TASK_DATE.jsonl; the date has no underscore.
        task = path.stem.removeprefix("samples_").rpartition("_")[0]
        with path.open(encoding="utf-8") as lines:
            for sample in map(json.loads, lines):
                # Once for each filter, with the same answers.
                answers[task, int(sample["doc_id"])] = _flat(sample["resps"])
    if not answers or not scores:
        raise EvaluationFailed(f"lm_eval reported no sample or no score in {output}.")
    return Evaluation(scores, answers)


def _task_scores(task: str, numbers: Mapping[str, Any]) -> list[Score]:
    scores = []
    for key, value in numbers.items():
        metric, comma, filtered = key.partition(",")
        if comma and isinstance(value, float | int) and not metric.endswith("_stderr"):
            error = numbers.get(f"{metric}_stderr,{filtered}")
            # lm_eval writes "N/A" where it knows none.
            known = error if isinstance(error, float | int) else None
            scores.append(Score(task, key, float(value), known))
    return scores


def _flat(responses: Any) -> list[str]:
    """The texts in lm_eval's nested lists of responses."""
    if isinstance(responses, list):
        return [text for each in responses for text in _flat(each)]
    return [str(responses)]
