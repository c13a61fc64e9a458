"""``python -m examples.accuracy``: the same answers with the connector as without it?"""

import argparse
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.accuracy.evaluation import OUR_TASK, evaluate, find_python
from examples.accuracy.language import LONGEST, make_questions, write_questions
from examples.accuracy.results import METRICS, Outcome, Pass, outcome_json, outcome_table, verdict
from examples.bench.arguments import MAX_SEED, BenchParser, exit_codes, size
from examples.bench.command import BAD_RESULT, exit_code_of, print_lines, run_program
from examples.bench.connectors import NONE, OURS, SIMPLE, Contender
from examples.bench.progress import Progress
from examples.bench.results_file import NUMBERS, prepare_output, save_numbers
from examples.serving import Server, command_line, server_environment

MODELS = Path(__file__).parent / "models"
OUR_MODELS = ("llama-recall", "window-recall")
CORRUPTED = Contender("corrupted", SIMPLE, "examples.accuracy.corrupt")
LEAST_ACCURACY = 0.9
"""Of our models, without the connector: a model that recalls nothing proves nothing."""


@dataclass(frozen=True)
class Engine:
    """Settings of the engine, which depend on the task."""

    device_tokens: int
    """Capacity of the device's KV space: too small for prompts that come far apart."""
    max_model_len: int
    concurrency: int
    dtype: str


FOR_RECALL = Engine(4 * (LONGEST + 128), LONGEST + 128, 4, "float32")
"""Room for four prompts on the device, and rounding too small to change an answer."""
FOR_OTHERS = Engine(32768, 8192, 16, "auto")


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; return the exit code."""
    arguments = _parse(argv)
    return exit_code_of(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output
    prepare_output("--output", output, NUMBERS)
    console = Console()
    outcomes: dict[str, Outcome] = {}
    arguments.lm_eval = arguments.lm_eval or [find_python(), "-m", "lm_eval"]
    with Progress() as progress:
        for model in arguments.model:
            name = Path(model).name
            print_lines(console, f"{name}: {', '.join(arguments.tasks)}", style="bold")
            outcomes[name] = Evaluations(arguments, model, progress).run()
            console.print(outcome_table(outcomes[name]))
            save_numbers(output, {each: outcome_json(found) for each, found in outcomes.items()})
    passed = not any(outcome.problems for outcome in outcomes.values())
    print_lines(console, f"Numbers: {output / NUMBERS}")
    print_lines(console, verdict(outcomes), style=f"bold {'green' if passed else 'red'}")
    return 0 if passed else BAD_RESULT


class Evaluations:
    """One model: served without the connector and with it, evaluated once and twice."""

    def __init__(self, arguments: argparse.Namespace, model: str, progress: Progress) -> None:
        self._arguments = arguments
        self._recall = OUR_TASK in arguments.tasks
        self._engine = FOR_RECALL if self._recall else FOR_OTHERS
        self._model = model
        self._name = Path(model).name
        self._output = arguments.output / self._name
        self._progress = progress

    def run(self) -> Outcome:
        """Evaluate three times. Raises RunFailed; however it returns, no process is left."""
        self._output.mkdir(parents=True, exist_ok=True)
        with self._serving("without", NONE) as server:
            without = self._pass("without", server)
        with self._serving("with", CORRUPTED if self._arguments.corrupt else OURS) as server:
            first = self._pass("first pass", server)
            server.reset_prefix_cache(external=False)
            second = self._pass("second pass", server)
        return Outcome(without, first, second, LEAST_ACCURACY if self._recall else 0.0)

    @contextmanager
    def _serving(self, name: str, contender: Contender) -> Iterator[Server]:
        """A server whose log lies in the output folder under ``name``."""
        arguments, engine = self._arguments, self._engine
        is_cpu = arguments.device == "cpu"
        block_size = 32 if is_cpu else 16
        ours: dict[str, Any] = {
            "block_size": block_size,
            "num_gpu_blocks_override": arguments.device_tokens // block_size,
            "max_model_len": engine.max_model_len,
            "dtype": engine.dtype,
            "seed": 0,
            "enable_prefix_caching": True,
            "enforce_eager": is_cpu,
            "kv_transfer_config": contender.transfer_config(arguments.host_bytes),
        }
        with tempfile.TemporaryDirectory(prefix="offload-accuracy-") as scratch:
            offline = str(int(self._recall))
            environment = server_environment(
                arguments.device, Path(scratch), HF_HUB_OFFLINE=offline
            )
            log = self._output / f"serve-{name}.log"
            line = [*command_line(ours), *arguments.serve]
            with Server(self._model, line, environment, log) as server:
                yield server

    def _pass(self, name: str, server: Server) -> Pass:
        """All samples once; lm_eval's files lie in a folder of their own."""
        arguments = self._arguments
        folder = self._output / name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        command = [*arguments.lm_eval, "run", "--tasks", ",".join(arguments.tasks), *arguments.eval]
        if self._recall:
            questions = make_questions(arguments.samples or 512, arguments.seed)
            write_questions(questions, folder / f"{OUR_TASK}.jsonl")
        elif arguments.samples:
            command += ["--limit", str(arguments.samples)]
        before = {key: int(server.metric(metric)) for key, metric in METRICS.items()}
        begin = time.monotonic()
        self._progress.show(self._name, name)
        evaluation = evaluate(
            command,
            server,
            folder,
            partial(self._progress.show, self._name, name),
            concurrency=self._engine.concurrency,
            offline=self._recall,
        )
        seconds = time.monotonic() - begin
        tokens = {key: int(server.metric(METRICS[key])) - known for key, known in before.items()}
        return Pass(name, evaluation, tokens, seconds)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = BenchParser(
        "accuracy",
        "Evaluates a model by lm_eval over `vllm serve`: without the connector, with it, and once "
        "more with it when the device's prefix cache has been emptied, so that prompts come from "
        "the host tier. PASSED if every answer is the same each time.",
        exit_codes(
            "PASSED",
            "FAILED: an answer differs, or prompts were not found in the host tier, or the model "
            "is not fit",
            "a server or lm_eval failed",
        ),
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="a folder, or a name that vLLM can download; may be repeated (default: both models "
        "of this repository)",
    )
    parser.add_argument(
        "--tasks",
        type=lambda text: text.split(","),
        default=[OUR_TASK],
        metavar="A,B",
        help=f"lm_eval's tasks, of which answers are generated (default: {OUR_TASK})",
    )
    parser.add_number("--samples", "of each task (default: 512 of ours, all of others)")
    parser.add_argument(
        "--corrupt",
        action="store_true",
        help="corrupt every host block: the run must end with FAILED",
    )
    parser.add_output("--output", "accuracy-out", "numbers, logs and lm_eval's files")
    parser.add_number(
        "--seed", "of our task's questions (default: 0)", least=0, most=MAX_SEED, default=0
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if Path("/dev/nvidiactl").exists() else "cpu",
        help="the engine's device (default: %(default)s)",
    )
    parser.add_number("--device-tokens", "capacity of the device's KV space")
    parser.add_argument(
        "--host-bytes", type=size, default="4GiB", metavar="SIZE", help="of the host tier"
    )
    for option, default, text in (
        ("--serve", [], "more arguments for `vllm serve`, such as --max-model-len"),
        ("--eval", [], "more arguments for `lm_eval run`"),
        ("--lm-eval", None, "command that runs lm_eval"),
    ):
        parser.add_argument(option, type=shlex.split, default=default, metavar="ARGS", help=text)
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model or [str(MODELS / name) for name in OUR_MODELS]
    for model in arguments.model:
        # A name that vLLM downloads reads ORGANISATION/MODEL.
        if not (Path(model) / "config.json").is_file() and (
            Path(model).is_dir() or model.count("/") != 1 or model.startswith((".", "/"))
        ):
            parser.error(f"argument --model: {model} is no folder with a config.json")
    if OUR_TASK in arguments.tasks and len(arguments.tasks) > 1:
        parser.error(f"argument --tasks: {OUR_TASK} goes with no other task")
    engine = FOR_RECALL if OUR_TASK in arguments.tasks else FOR_OTHERS
    arguments.device_tokens = arguments.device_tokens or engine.device_tokens
    if arguments.device_tokens < engine.max_model_len:
        parser.error(
            f"argument --device-tokens: {arguments.device_tokens} do not hold one request of "
            f"{engine.max_model_len} tokens"
        )
    return arguments


if __name__ == "__main__":
    run_program(main)
