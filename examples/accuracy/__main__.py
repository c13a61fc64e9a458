"""``python -m examples.accuracy``: the same answers with the connector as without it?"""

import argparse
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.accuracy.evaluation import OUR_TASK, evaluate, find_python
from examples.accuracy.language import LONGEST, make_questions, write_questions
from examples.accuracy.results import METRICS, Outcome, Pass, outcome_table, verdict
from examples.bench.arguments import BenchParser, size, whole
from examples.bench.child import engine_environment
from examples.bench.command import BAD_RESULT, Show, exit_code_of, lines, print_lines, run_program
from examples.bench.connectors import NONE, OURS, SIMPLE, Contender
from examples.bench.results_file import NUMBERS, prepare_output, save_numbers
from examples.serving import Server, command_line

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
    prepare_output(output, NUMBERS)
    console = Console()
    outcomes: dict[str, Outcome] = {}
    arguments.lm_eval = arguments.lm_eval or [find_python(), "-m", "lm_eval"]
    show = lines()
    for model in arguments.model:
        name = Path(model).name
        print_lines(console, f"{name}: {', '.join(arguments.tasks)}", style="bold")
        outcomes[name] = _evaluate_thrice(arguments, model, show)
        console.print(outcome_table(outcomes[name]))
        save_numbers(output, {each: found.to_json() for each, found in outcomes.items()})
    passed = not any(outcome.problems for outcome in outcomes.values())
    print_lines(console, f"Numbers: {output / NUMBERS}")
    print_lines(console, verdict(outcomes), style=f"bold {'green' if passed else 'red'}")
    return 0 if passed else BAD_RESULT


def _evaluate_thrice(arguments: argparse.Namespace, model: str, show: Show) -> Outcome:
    """Serve one model without the connector, and with it, and evaluate it once and twice. Raises
    RunFailed; however it returns, no process is left."""
    recall = OUR_TASK in arguments.tasks
    engine = FOR_RECALL if recall else FOR_OTHERS
    is_cpu = arguments.device == "cpu"
    block_size = 32 if is_cpu else 16
    output = arguments.output / Path(model).name

    @contextmanager
    def serving(name: str, contender: Contender) -> Iterator[Server]:
        """A server whose log lies in the output folder under ``name``."""
        config = contender.transfer_config(cpu_bytes_to_use=arguments.host_bytes)
        options: dict[str, Any] = {
            "block_size": block_size,
            "num_gpu_blocks_override": engine.device_tokens // block_size,
            "max_model_len": engine.max_model_len,
            "dtype": engine.dtype,
            "seed": 0,
            "enable_prefix_caching": True,
            "enforce_eager": is_cpu,
            "kv_transfer_config": config,
        }
        with tempfile.TemporaryDirectory(prefix="offload-accuracy-") as scratch:
            offline = {"HF_HUB_OFFLINE": str(int(recall))}
            environment = engine_environment(arguments.device, Path(scratch), **offline)
            log = output / f"serve-{name}.log"
            with Server(model, command_line(options), environment, log) as server:
                yield server

    def evaluated(name: str, server: Server) -> Pass:
        """All samples once; lm_eval's files lie in a folder of their own."""
        folder = output / name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        command = [*arguments.lm_eval, "run", "--tasks", ",".join(arguments.tasks)]
        if recall:
            questions = make_questions(arguments.samples or 512, seed=0)
            write_questions(questions, folder / f"{OUR_TASK}.jsonl")
        elif arguments.samples:
            command += ["--limit", str(arguments.samples)]
        before = {key: int(server.metric(metric)) for key, metric in METRICS.items()}
        begin = time.monotonic()
        show(Path(model).name, name)
        evaluation = evaluate(
            command, server, folder, concurrency=engine.concurrency, offline=recall
        )
        seconds = time.monotonic() - begin
        tokens = {key: int(server.metric(METRICS[key])) - known for key, known in before.items()}
        return Pass(name, evaluation, tokens, seconds)

    output.mkdir(parents=True, exist_ok=True)
    with serving("without", NONE) as server:
        without = evaluated("without", server)
    with serving("with", CORRUPTED if arguments.corrupt else OURS) as server:
        first = evaluated("first pass", server)
        server.reset_prefix_cache(external=False)
        second = evaluated("second pass", server)
    return Outcome(without, first, second, LEAST_ACCURACY if recall else 0.0)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = BenchParser(
        "accuracy",
        "Evaluates a model by lm_eval over `vllm serve`: without the connector, with it, and once "
        "more with it when the device's prefix cache has been emptied, so that prompts come from "
        "the host tier. PASSED if every answer is the same each time.",
    )
    text = "a folder or a name that vLLM can download, may be repeated (default: both of ours)"
    parser.add_argument("--model", action="append", metavar="NAME", help=text)
    parser.add_argument(
        "--tasks",
        type=lambda text: text.split(","),
        default=[OUR_TASK],
        metavar="A,B",
        help=f"lm_eval's tasks, of which answers are generated (default: {OUR_TASK})",
    )
    text = "of each task (default: 512 of ours, all of others)"
    parser.add_argument("--samples", type=whole(), metavar="N", help=text)
    text = "corrupt every host block: the run must end with FAILED"
    parser.add_argument("--corrupt", action="store_true", help=text)
    default = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    text = f"the engine's (default: {default})"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help=text)
    text = "of the host tier (default: 4GiB)"
    parser.add_argument("--host-bytes", type=size, default="4GiB", metavar="SIZE", help=text)
    text = "command that runs lm_eval"
    parser.add_argument("--lm-eval", type=shlex.split, metavar="ARGS", help=text)
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model or [str(MODELS / name) for name in OUR_MODELS]
    for model in arguments.model:
        # A name that vLLM downloads reads ORGANISATION/MODEL.
        if not (Path(model) / "config.json").is_file() and (
            Path(model).is_dir() or model.count("/") != 1 or model.startswith((".", "/"))
        ):
            parser.error(f"argument --model: {model} is no folder with a config.json")
    names = [Path(model).name for model in arguments.model]
    if len(set(names)) < len(names):
        parser.error("argument --model: results go by the last part of a name, and two are alike")
    if OUR_TASK in arguments.tasks and len(arguments.tasks) > 1:
        parser.error(f"argument --tasks: {OUR_TASK} goes with no other task")
    return arguments


if __name__ == "__main__":
    run_program(main)
