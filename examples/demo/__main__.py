"""``python -m examples.demo``: run the demo, print its results."""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from examples.bench.arguments import MAX_SEED, BenchParser, exit_codes
from examples.bench.child import Event, child_command, engine_environment, listen
from examples.bench.command import BAD_RESULT, exit_code_of, print_lines, run_program
from examples.bench.connectors import CONTENDERS, NONE, OURS
from examples.bench.progress import Progress
from examples.bench.results_file import NUMBERS, machine, prepare_output, save_numbers
from examples.demo.plan import FULL, QUICK, Plan
from examples.demo.results import (
    Answer,
    compare,
    compare_restarted,
    rows_by_turn,
    save_plot,
    turn_table,
)

PLOT = "ttft.png"
MOST_USERS = 16
MOST_TURNS = 12
RUNS = ("without", "with")
RESTARTED = "restarted"
"""A third run: a new engine, with the files that the second one left."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    arguments = _parse(argv)
    given = {name: getattr(arguments, name) for name in ("users", "turns", "seed")}
    changes = {name: number for name, number in given.items() if number is not None}
    plan = replace(QUICK if arguments.quick else FULL, **changes)
    return exit_code_of(lambda: _run(plan, arguments.output, restart=arguments.restart))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = BenchParser(
        "demo",
        "Conversations over a small random model, whose KV does not fit the engine's KV space: "
        "without the connector every turn recomputes its history, with it the history comes back "
        "from host memory.",
        exit_codes(
            "the same tokens, some from host memory",
            "a token differs, or none came from host memory",
            "an engine process failed",
        ),
    )
    parser.add_number(
        "--users",
        f"conversations, 2 to {MOST_USERS}, that take turns (default: {FULL.users})",
        least=2,
        most=MOST_USERS,
    )
    parser.add_number(
        "--turns",
        f"questions of a user, 2 to {MOST_TURNS} (default: {FULL.turns})",
        least=2,
        most=MOST_TURNS,
    )
    parser.add_number(
        "--seed",
        "of the model's weights and of the users' messages (default: 0)",
        least=0,
        most=MAX_SEED,
    )
    parser.add_output("--output", "demo-out", "the plot, the numbers and the logs")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny model and, unless given, fewer users and turns: shows that it works, "
        "not that it pays",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="put files behind host memory (second_tier), start another engine in the end, and "
        "have the same conversations with it",
    )
    return parser.parse_args(argv)


def _run(plan: Plan, output: Path, *, restart: bool) -> int:
    prepare_output("--output", output, NUMBERS, PLOT)
    console = Console()
    kv_bytes = plan.conversation_tokens * plan.model.kv_bytes_per_token
    print_lines(
        console,
        f"{plan.users} users, {plan.turns} turns each, one request at a time. Their "
        f"conversations grow to {plan.conversation_tokens} tokens ({kv_bytes >> 20} MiB of KV); "
        f"the engine's KV space holds {plan.device_tokens}, "
        f"the host tier {plan.host_bytes >> 20} MiB.",
    )
    runs = (*RUNS, RESTARTED) if restart else RUNS
    answers = _all_runs(plan, output, runs)
    without, with_host = (answers[name] for name in RUNS)
    verdicts = [compare(without, with_host)]
    if restart:
        verdicts.append(compare_restarted(with_host, answers[RESTARTED]))
    rows = rows_by_turn(without, with_host)
    save_plot(output / PLOT, rows, without, with_host)
    numbers = {"machine": machine(), "plan": plan, **answers, "turns": rows, "verdicts": verdicts}
    save_numbers(output, numbers)
    console.print(turn_table(rows))
    print_lines(console, f"Plot: {output / PLOT}", f"Numbers: {output / NUMBERS}")
    for passed, sentence in verdicts:
        print_lines(console, sentence, style=f"bold {'green' if passed else 'red'}")
    return 0 if all(verdict.passed for verdict in verdicts) else BAD_RESULT


def _all_runs(plan: Plan, output: Path, runs: Sequence[str]) -> dict[str, list[Answer]]:
    """By run, the answers in the order in which they were given."""
    answers: dict[str, list[Answer]] = {name: [] for name in runs}
    with (
        tempfile.TemporaryDirectory(prefix="work-", dir=output) as work,
        tempfile.TemporaryDirectory(prefix="offload-demo-") as scratch,
        Progress() as progress,
    ):
        model = Path(work).absolute() / "model"
        environment = engine_environment(
            "cpu",
            Path(scratch),
            # The engine runs eagerly, yet vLLM compiles its helpers for logprobs: that would take
            # a C++ compiler, and longer than the demo's first prefill.
            TORCHDYNAMO_DISABLE="1",
            # One process, so that the run is one thing to start, to time and to stop.
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )
        # "always": a small model computes sooner than a slow disk reads.
        ours = CONTENDERS["ours-files-always"] if RESTARTED in runs else OURS
        ours = ours.with_files(Path(work).absolute() / "kv")

        def on_event(event: Event) -> None:
            name, phase = event["run"], event.get("phase")
            found = answers[name]
            if phase is None:
                found.append(answer := Answer(**event["answer"]))
                phase = (
                    f"turn {answer.turn + 1}, user {answer.user + 1}: "
                    f"{answer.prompt_tokens} tokens, first token after {answer.ttft:.2f} s"
                )
            who = "restarted engine" if name == RESTARTED else f"{name} connector"
            progress.show(who, phase, len(found), plan.requests)

        progress.show("all engines", "starting Python", 0, plan.requests)
        command = child_command(
            "examples.demo.engine_run",
            plan=asdict(plan),
            model=str(model),
            runs={name: asdict(NONE if name == "without" else ours) for name in runs},
        )
        listen(command, environment, output / "engines.log", on_event)
    return answers


if __name__ == "__main__":
    run_program(main)
