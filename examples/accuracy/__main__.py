"""``python -m examples.accuracy``: the same answers with the connector as without it?"""

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal

from pydantic_core import PydanticCustomError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.accuracy.evaluation import OUR_TASK, EvaluationFailed, Request, find_python
from examples.accuracy.recall import LONGEST
from examples.accuracy.report import outcome_json, outcome_table, verdict
from examples.accuracy.results import Outcome
from examples.accuracy.run import Plan, Show, run
from examples.serving import ServerFailed
from simple_offload.config import parse_size

MODELS = Path(__file__).parent / "models"
OUR_MODELS = ("llama-recall", "window-recall")

FAILED = 1
NOT_RUN = 3
INTERRUPTED = 128 + signal.SIGINT

EXIT_CODES = f"""\
exit codes: 0 PASSED; {FAILED} FAILED: an answer differs, or prompts were not found in the host
tier, or the model is not fit; 2 wrong usage; {NOT_RUN} a server or lm_eval failed;
{INTERRUPTED} interrupted"""

NUMBERS = "result.json"


@dataclass(frozen=True)
class Defaults:
    """Where the command line is silent."""

    device_tokens: int
    max_model_len: int
    concurrency: int
    dtype: str


FOR_RECALL = Defaults(4 * (LONGEST + 128), LONGEST + 128, 4, "float32")
"""Room for four prompts on the device, and rounding too small to turn an answer."""
FOR_OTHERS = Defaults(32768, 8192, 16, "auto")


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; return the exit code."""
    arguments = _parse(argv)
    console = Console()
    numbers = arguments.output / NUMBERS
    numbers.unlink(missing_ok=True)
    outcomes: dict[str, Outcome] = {}
    try:
        lm_eval = shlex.split(arguments.lm_eval) if arguments.lm_eval else _lm_eval()
        for model in arguments.model or [str(MODELS / name) for name in OUR_MODELS]:
            name = Path(model).name
            console.print(f"{name}: {', '.join(arguments.tasks)}", style="bold", highlight=False)
            plan = _plan(arguments, model, arguments.output / name, lm_eval)
            with _progress(console) as show:
                outcomes[name] = run(plan, show)
            console.print(outcome_table(outcomes[name]))
            result = {each: outcome_json(outcome) for each, outcome in outcomes.items()}
            numbers.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except (ServerFailed, EvaluationFailed) as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return NOT_RUN
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return INTERRUPTED
    passed = all(outcome.passed for outcome in outcomes.values())
    console.print(f"Numbers: {numbers}", highlight=False, soft_wrap=True)
    console.print(
        verdict(outcomes),
        style="bold green" if passed else "bold red",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0 if passed else FAILED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.accuracy",
        description=(
            "Evaluates a model by lm_eval over `vllm serve`: without the connector, with it, and "
            "once more with it when the device's prefix cache has been emptied, so that prompts "
            "come from the host tier. PASSED if every answer is the same each time."
        ),
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number = partial(_whole_number, least=1)
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
        help=f"tasks that lm_eval knows, of which answers are generated (default: {OUR_TASK})",
    )
    parser.add_argument(
        "--samples",
        type=number,
        metavar="N",
        help="of each task (default: 512 of ours, all of others)",
    )
    parser.add_argument(
        "--corrupt",
        action="store_true",
        help="spoil every host block: the run must end with FAILED",
    )
    parser.add_argument("--output", type=Path, default=Path("accuracy-out"), metavar="DIR")
    parser.add_argument(
        "--seed", type=partial(_whole_number, least=0), default=0, help="of our task's questions"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if Path("/dev/nvidiactl").exists() else "cpu",
        help="what vLLM runs on (default: %(default)s)",
    )
    engine.add_argument("--block-size", type=number, metavar="TOKENS")
    engine.add_argument(
        "--device-tokens", type=number, metavar="TOKENS", help="that the device's KV space holds"
    )
    engine.add_argument("--max-model-len", type=number, metavar="TOKENS")
    engine.add_argument("--host-bytes", type=_size, default="4GiB", metavar="SIZE")
    engine.add_argument("--concurrency", type=number, metavar="N", help="requests at a time")
    engine.add_argument("--dtype")
    engine.add_argument(
        "--serve", type=shlex.split, default=[], metavar="ARGS", help="more for `vllm serve`"
    )
    engine.add_argument(
        "--eval", type=shlex.split, default=[], metavar="ARGS", help="more for `lm_eval run`"
    )
    engine.add_argument("--lm-eval", metavar="COMMAND", help="that runs lm_eval")
    arguments = parser.parse_args(argv)
    _require_usable(parser, arguments)
    return arguments


def _require_usable(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a message where arguments do not fit each other or the machine."""
    for model in arguments.model or [str(MODELS / name) for name in OUR_MODELS]:
        # A name that vLLM downloads reads ORGANISATION/MODEL.
        if not (Path(model) / "config.json").is_file() and (
            Path(model).is_dir() or model.count("/") != 1 or model.startswith((".", "/"))
        ):
            parser.error(f"argument --model: {model} is no folder with a config.json")
    if OUR_TASK in arguments.tasks and len(arguments.tasks) > 1:
        parser.error(f"argument --tasks: {OUR_TASK} goes with no other task")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --output: cannot write to {arguments.output}: {error.strerror}")
    plan = _plan(arguments, "model", arguments.output, [])
    if plan.device_tokens < plan.max_model_len:
        parser.error(
            f"argument --device-tokens: {plan.device_tokens} do not hold one request of "
            f"{plan.max_model_len} tokens (--max-model-len)"
        )


def _plan(arguments: argparse.Namespace, model: str, output: Path, lm_eval: Sequence[str]) -> Plan:
    ours = OUR_TASK in arguments.tasks
    defaults = FOR_RECALL if ours else FOR_OTHERS
    device: Literal["cuda", "cpu"] = arguments.device
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
        device=device,
        block_size=arguments.block_size or (32 if device == "cpu" else 16),
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


def _lm_eval() -> list[str]:
    return [find_python(), "-m", "lm_eval"]


def _whole_number(text: str, *, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is less than {least}")
    return number


def _size(text: str) -> int:
    try:
        return parse_size(int(text) if text.isdigit() else text)
    except PydanticCustomError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error.message()}") from None


@contextmanager
def _progress(console: Console) -> Iterator[Show]:
    """A line that says which pass runs and how far it is."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        line = progress.add_task("starting the server", total=None)

        def show(name: str, done: int, total: int) -> None:
            progress.update(line, description=name, completed=done, total=total or None)

        yield show


def _end(signal_number: int, _frame: FrameType | None) -> None:
    """Leave through the ``finally`` blocks that stop the server and lm_eval."""
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    sys.exit(main())
