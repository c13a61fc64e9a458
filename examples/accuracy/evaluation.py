"""Runs lm_eval against a server, and reads its results."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from examples.bench.child import ROOT, failure, how_ended, start, stop
from examples.bench.command import RunFailed
from examples.serving import Server

TASKS = Path(__file__).parent / "tasks"
OUR_TASK = "key_value_recall"
OWN_PYTHON = ROOT / ".venv-eval" / "bin" / "python"
"""Of the environment that ``make set-up-eval`` makes."""

CACHE = "datasets"
"""lm_eval's copy of our data, which is removed afterwards."""

REQUEST_SECONDS = 600


@dataclass(frozen=True)
class Evaluation:
    """lm_eval's results of one pass over its tasks."""

    scores: dict[str, float]
    """By task, metric and filter: "gsm8k, exact_match,words". Standard errors are metrics too."""
    answers: dict[tuple[str, int], list[str]]
    """By sample (task, number), the model's answers, before any filter."""


def find_python() -> str:
    """A Python that has lm_eval. Raises RunFailed with instructions if there is none."""
    if OWN_PYTHON.exists():
        return str(OWN_PYTHON)
    if find_spec("lm_eval") is not None:
        return sys.executable
    raise RunFailed(
        f"lm_eval is not installed: neither in {OWN_PYTHON.parents[1]} (make set-up-eval) nor "
        f'beside {sys.executable} (pip install "lm-eval[api]==0.4.13").'
    )


def evaluate(
    command: Sequence[str],
    server: Server,
    folder: Path,
    *,
    concurrency: int = 4,
    offline: bool = True,
) -> Evaluation:
    """Run lm_eval in ``folder``, which holds the task's data, and return its results. All its
    files lie in ``folder`` afterwards. ``command`` names the tasks, and is given the model.

    Raises RunFailed as soon as the server ends, or if lm_eval fails. However this returns, lm_eval
    is gone.
    """
    folder = folder.absolute()  # lm_eval's own paths would be taken from there
    log = folder / "lm_eval.log"
    output = folder / "lm_eval"
    model = {
        "model": "model",
        "base_url": f"{server.url}/v1/completions",
        "num_concurrent": concurrency,
        "max_retries": 1,
        "timeout": REQUEST_SECONDS,
        # Prompts travel as text, and the server is the only one to have a tokenizer.
        "tokenizer_backend": "none",
        "tokenized_requests": False,
    }
    options = ["--model", "local-completions", "--model_args"]
    options += [",".join(f"{key}={value}" for key, value in model.items())]
    options += ["--include_path", str(TASKS), "--log_samples", "--output_path", str(output)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PYTHONUNBUFFERED"] = "1"
    if offline:
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        environment["HF_DATASETS_CACHE"] = str(folder / CACHE)
    process = start([*command, *options], environment, log, cwd=folder)
    # It would ask a dead server again and again, for minutes.
    server.ended.add_done_callback(lambda _: process.kill())
    try:
        code = process.wait()
    finally:
        stop(process)
        shutil.rmtree(folder / CACHE, ignore_errors=True)
    if code != 0:
        with suppress(TimeoutError):
            server.ended.result(timeout=1)  # the clients of a dying server notice its end first
        server.check()
        raise failure(f"lm_eval ended, {how_ended(code)}", log)
    return read_evaluation(output)


def read_evaluation(output: Path) -> Evaluation:
    """Read lm_eval's files under ``output``. Raises RunFailed where one is missing."""
    results = sorted(output.rglob("results_*.json"))
    if len(results) != 1:
        raise RunFailed(f"lm_eval left {len(results)} results in {output}, not one.")
    found: dict[str, Any] = json.loads(results[0].read_text(encoding="utf-8"))["results"]
    scores = {
        f"{task}, {key}": float(value)
        for task, numbers in sorted(found.items())
        for key, value in numbers.items()
        # It writes "N/A" where it knows none.
        if "," in key and isinstance(value, float | int)
    }
    answers = {}
    for path in sorted(output.rglob("samples_*.jsonl")):
        # samples_TASK_DATE.jsonl; the date has no underscore.
        task = path.stem.removeprefix("samples_").rpartition("_")[0]
        with path.open(encoding="utf-8") as lines:
            for sample in map(json.loads, lines):
                # Once for each filter, with the same answers.
                answers[task, int(sample["doc_id"])] = _flat(sample["resps"])
    if not answers or not scores:
        raise RunFailed(f"lm_eval reported no sample or no score in {output}.")
    return Evaluation(scores, answers)


def _flat(responses: Any) -> list[str]:
    """The texts in lm_eval's nested lists of responses."""
    if isinstance(responses, list):
        return [text for each in responses for text in _flat(each)]
    return [str(responses)]
