"""``python -m examples.accuracy``: the same answers with the connector as without it?"""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from examples.accuracy.evaluation import OUR_TASK, Request, find_python
from examples.accuracy.recall import LONGEST
from examples.accuracy.report import outcome_json, outcome_table, verdict
from examples.accuracy.results import Outcome
from examples.accuracy.run import Plan, run
from examples.bench.arguments import MAX_SEED, BenchParser, exit_codes, size
from examples.bench.command import BAD_RESULT, exit_code_of, print_lines, run_program
from examples.bench.progress import Progress
from examples.bench.results_file import NUMBERS, prepare_output, save_numbers

MODELS = Path(__file__).parent / "models"
OUR_MODELS = ("llama-recall", "window-recall")


@dataclass(frozen=True)
class Defaults:
    """The engine, where the command line does not say."""

    device_tokens: int
    max_model_len: int
    concurrency: int
    dtype: str


FOR_RECALL = Defaults(4 * (LONGEST + 128), LONGEST + 128, 4, "float32")
"""Room for four prompts on the device, and rounding too small to change an answer."""
FOR_OTHERS = Defaults(32768, 8192, 16, "auto")


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; return the exit code."""
    arguments = _parse(argv)
    return exit_code_of(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output
    prepare_output("--output", output, NUMBERS)
    console = Console()
    outcomes: dict[str, Outcome] = {}
    lm_eval = arguments.lm_eval or [find_python(), "-m", "lm_eval"]
    with Progress() as progress:
        for model in arguments.model:
            name = Path(model).name
            print_lines(console, f"{name}: {', '.join(arguments.tasks)}", style="bold")

            def show(step: str, done: int, total: int, name: str = name) -> None:
                progress.show(name, step, done, total or None)

            outcomes[name] = run(_plan(arguments, model, output / name, lm_eval), show)
            console.print(outcome_table(outcomes[name]))
            save_numbers(output, {each: outcome_json(found) for each, found in outcomes.items()})
    passed = all(outcome.passed for outcome in outcomes.values())
    print_lines(console, f"Numbers: {output / NUMBERS}")
    print_lines(console, verdict(outcomes), style=f"bold {'green' if passed else 'red'}")
    return 0 if passed else BAD_RESULT


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
    parser.add_number("--block-size", "tokens of a block (default: 32 on the CPU, else 16)")
    parser.add_number("--device-tokens", "capacity of the device's KV space")
    parser.add_number("--max-model-len", "tokens of the longest request")
    parser.add_argument(
        "--host-bytes", type=size, default="4GiB", metavar="SIZE", help="of the host tier"
    )
    parser.add_number("--concurrency", "requests at a time")
    parser.add_argument("--dtype", help="vLLM's --dtype")
    for option, default, text in (
        ("--serve", [], "more arguments for `vllm serve`"),
        ("--eval", [], "more arguments for `lm_eval run`"),
        ("--lm-eval", None, "command that runs lm_eval"),
    ):
        parser.add_argument(option, type=shlex.split, default=default, metavar="ARGS", help=text)
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model or [str(MODELS / name) for name in OUR_MODELS]
    _require_usable(parser, arguments)
    return arguments


def _require_usable(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit where arguments do not fit each other or the machine."""
    for model in arguments.model:
        # A name that vLLM downloads reads ORGANISATION/MODEL.
        if not (Path(model) / "config.json").is_file() and (
            Path(model).is_dir() or model.count("/") != 1 or model.startswith((".", "/"))
        ):
            parser.error(f"argument --model: {model} is no folder with a config.json")
    if OUR_TASK in arguments.tasks and len(arguments.tasks) > 1:
        parser.error(f"argument --tasks: {OUR_TASK} goes with no other task")
    plan = _plan(arguments, "model", arguments.output, [])
    if plan.device_tokens < plan.max_model_len:
        parser.error(
            f"argument --device-tokens: {plan.device_tokens} do not hold one request of "
            f"{plan.max_model_len} tokens (--max-model-len)"
        )


def _plan(arguments: argparse.Namespace, model: str, output: Path, lm_eval: Sequence[str]) -> Plan:
    ours = OUR_TASK in arguments.tasks
    defaults = FOR_RECALL if ours else FOR_OTHERS
    return Plan(
        model=model,
        request=Request(
            tasks=arguments.tasks,
            limit=None if ours else arguments.samples,
            concurrency=arguments.concurrency or defaults.concurrency,
            extra=arguments.eval,
            offline=ours,
        ),
        output=output,
        device=arguments.device,
        block_size=arguments.block_size or (32 if arguments.device == "cpu" else 16),
        device_tokens=arguments.device_tokens or defaults.device_tokens,
        max_model_len=arguments.max_model_len or defaults.max_model_len,
        host_bytes=arguments.host_bytes,
        corrupt=arguments.corrupt,
        samples=arguments.samples or 512,
        seed=arguments.seed,
        dtype=arguments.dtype or defaults.dtype,
        serve_arguments=arguments.serve,
        lm_eval=lm_eval,
    )


if __name__ == "__main__":
    run_program(main)
