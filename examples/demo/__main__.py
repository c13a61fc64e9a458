"""``python -m examples.demo``: run the demo, print what it showed."""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from examples.demo.child import RunFailed, engine_command, engine_environment, listen
from examples.demo.plan import Plan, full_plan, quick_plan
from examples.demo.progress import Progress
from examples.demo.results import Answer, compare, rows_by_turn

NOT_SHOWN = 1
RUN_FAILED = 3
INTERRUPTED = 128 + signal.SIGINT

EXIT_CODES = f"""\
exit codes: 0 the same tokens, some from host memory; {NOT_SHOWN} a token differs, or none came
from host memory; 2 wrong usage; {RUN_FAILED} an engine process failed; {INTERRUPTED} interrupted"""

PLOT = "ttft.png"
NUMBERS = "result.json"

MOST_USERS = 16
MOST_TURNS = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    arguments = _parse(argv)
    make_plan = quick_plan if arguments.quick else full_plan
    plan = make_plan(arguments.users, arguments.turns, arguments.seed)
    console = Console()
    start = time.monotonic()
    for name in (PLOT, NUMBERS):
        (arguments.output / name).unlink(missing_ok=True)
    try:
        _introduce(console, plan)
        without, with_host = _both_runs(console, plan, arguments.output)
        return _conclude(console, plan, without, with_host, arguments.output, start)
    except RunFailed as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return RUN_FAILED
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return INTERRUPTED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=(
            "Conversations over a small random model, whose KV does not fit the engine's KV "
            "space: without the connector every turn recomputes its history, with it the "
            "history comes back from host memory."
        ),
        epilog=EXIT_CODES,
    )
    parser.add_argument(
        "--users",
        metavar="N",
        type=partial(_whole_number, least=2, most=MOST_USERS),
        help=f"conversations, 2 to {MOST_USERS}, that take turns (default: 4)",
    )
    parser.add_argument(
        "--turns",
        metavar="N",
        type=partial(_whole_number, least=2, most=MOST_TURNS),
        help=f"questions a user asks, 2 to {MOST_TURNS} (default: 5)",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=partial(_whole_number, least=0, most=2**32 - 1),
        default=0,
        help="of the model's weights and of what the users say (default: 0)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-out"),
        metavar="DIR",
        help="where the plot, the numbers and the logs go (default: demo-out)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny model and, unless given, fewer users and turns: shows that it works, "
        "not that it pays",
    )
    arguments = parser.parse_args(argv)
    if arguments.users is None:
        arguments.users = 3 if arguments.quick else 4
    if arguments.turns is None:
        arguments.turns = 3 if arguments.quick else 5
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=arguments.output).close()
    except OSError as error:
        parser.error(f"argument --output: cannot write to {arguments.output}: {error.strerror}")
    return arguments


def _whole_number(text: str, *, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{number} is not within {least} and {most}")
    return number


def _end(signal_number: int, _frame: FrameType | None) -> None:
    """Leave through the ``finally`` blocks that stop the engine and remove its files."""
    sys.exit(128 + signal_number)


def _introduce(console: Console, plan: Plan) -> None:
    kv_bytes = plan.conversation_tokens * plan.model.kv_bytes_per_token
    console.print(
        f"{plan.users} users, {plan.turns} turns each, one request at a time. Their "
        f"conversations grow to {plan.conversation_tokens} tokens ({kv_bytes >> 20} MiB of KV); "
        f"the engine's KV space holds {plan.device_tokens}, "
        f"the host tier {plan.host_bytes >> 20} MiB.",
        highlight=False,
    )


def _both_runs(console: Console, plan: Plan, output: Path) -> tuple[list[Answer], list[Answer]]:
    """The answers without and with the connector, in the order in which they were given."""
    runs: dict[str, list[Answer]] = {"without": [], "with": []}
    with (
        tempfile.TemporaryDirectory(prefix="work-", dir=output) as work,
        tempfile.TemporaryDirectory(prefix="offload-demo-") as scratch,
        Progress(console, plan.requests) as progress,
    ):
        model = Path(work).absolute() / "model"
        environment = engine_environment(Path(scratch))
        for name, answers in runs.items():

            def on_event(event: dict[str, Any], answers: list[Answer] = answers) -> None:
                progress.event(event)
                if "answer" in event:
                    answers.append(Answer.from_json(event["answer"]))

            progress.start_run(f"{name:>7} connector")
            command = engine_command(plan, model, connector=name == "with")
            listen(command, environment, output / f"{name}.log", on_event)
            progress.end_run()
    return runs["without"], runs["with"]


def _conclude(
    console: Console,
    plan: Plan,
    without: list[Answer],
    with_host: list[Answer],
    output: Path,
    start: float,
) -> int:
    # Takes a second to import, which the first words of the demo need not wait for.
    from examples.demo.report import save_plot, turn_table

    rows = rows_by_turn(without, with_host)
    verdict = compare(without, with_host)
    plot, numbers = output / PLOT, output / NUMBERS
    save_plot(plot, rows, without, with_host)
    result = {
        "plan": plan.to_json(),
        "without": [answer.to_json() for answer in without],
        "with": [answer.to_json() for answer in with_host],
        "turns": [{**asdict(row), "speedup": row.speedup} for row in rows],
        "verdict": {**asdict(verdict), "passed": verdict.passed, "sentence": verdict.sentence},
        "seconds": time.monotonic() - start,
    }
    numbers.write_text(json.dumps(result, indent=1) + "\n")

    console.print(turn_table(rows))
    console.print(f"Plot: {plot}\nNumbers: {numbers}", highlight=False, soft_wrap=True)
    console.print(
        verdict.sentence,
        style="bold green" if verdict.passed else "bold red",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if verdict.passed else NOT_SHOWN


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    sys.exit(main())
