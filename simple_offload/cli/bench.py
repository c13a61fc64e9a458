"""``simple-offload bench``: runs the benchmarks and the demo of examples/."""

import argparse
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from simple_offload.cli.arguments import CommandError, Parser

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Bench:
    """A program among the examples."""

    module: str
    summary: str
    output_option: str
    """Names the folder for its results."""
    output: str
    """The default of that option."""


BENCHES = {
    "copy": Bench(
        "examples.copy_bench",
        "copies by descriptor size, direction and path, against the bus",
        "--out",
        "copy-bench-out",
    ),
    "turns": Bench(
        "examples.multi_turn",
        "conversations of several turns, with and without the connector",
        "--output",
        "multi-turn-out",
    ),
    "agents": Bench(
        "examples.agent_bench",
        "recorded agents, each contender in turn: throughput and TTFT by number of agents",
        "--output",
        "agent-bench-out",
    ),
    "engines": Bench(
        "examples.engine_bench",
        "engines with this connector, vLLM's own ones and none, over the same work",
        "--output",
        "engine-bench-out",
    ),
    "scheduler": Bench(
        "examples.scheduler_bench",
        "cost, memory and hit rate in vLLM's scheduler, beside vLLM's own connector",
        "--out",
        "scheduler-bench-out",
    ),
    "demo": Bench(
        "examples.demo",
        "a small model on the CPU, with and without the connector",
        "--output",
        "demo-out",
    ),
}
NUMBERS = "result.json"


def add_to(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "bench",
        help="measure: " + ", ".join(BENCHES),
        description="Runs a benchmark in a process of its own. Needs the extra 'bench'.",
        epilog="exit codes: the benchmark's own (see its --help); 2 wrong usage",
    )
    parser.set_defaults(parser=parser)
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, bench in BENCHES.items():
        each = benches.add_parser(name, help=bench.summary, add_help=False)
        each.set_defaults(run=run, parser=each, rest=[])


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark with the arguments after its name; return its exit code. With ``--json``
    among them, its output goes to stderr, and its result.json to stdout."""
    bench = BENCHES[arguments.bench]
    rest: list[str] = arguments.rest
    as_json = "--json" in rest
    rest = [argument for argument in rest if argument != "--json"]
    root = examples_root(bench.module)
    # PYTHONSAFEPATH: never import a folder `examples` of the user's working directory.
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", bench.module, *rest]
    if not as_json:
        sys.stdout.flush()
        os.execve(sys.executable, command, environment)  # noqa: S606 - signals reach it directly
    numbers = _output_folder(bench, rest) / NUMBERS
    before = _written_at(numbers)
    code = _run_to_stderr(command, environment)
    if _written_at(numbers) not in (None, before):
        print(numbers.read_text(encoding="utf-8"), end="")
    return code


def examples_root(module: str) -> Path:
    """The folder to import ``module`` from: the checkout, else the wheel's copy. CommandError if
    neither has it."""
    relative = Path(*module.split("."), "__main__.py")
    roots = [PACKAGE.parent, PACKAGE / "bundled"]
    for root in roots:
        if (root / relative).is_file():
            return root
    raise CommandError(
        f"{module} is not in this installation (looked for in {' and '.join(map(str, roots))}). "
        "Run it from a checkout, or install the wheel"
    )


def _run_to_stderr(command: list[str], environment: dict[str, str]) -> int:
    """Run ``command`` with its stdout in our stderr; return its exit code. Termination signals are
    passed on, so that it can stop its own processes."""
    process = subprocess.Popen(
        command, env=environment, stdout=sys.stderr.fileno(), start_new_session=True
    )

    def pass_on(signal_number: int, _frame: FrameType | None) -> None:
        process.send_signal(signal_number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _written_at(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


def _output_folder(bench: Bench, rest: list[str]) -> Path:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(bench.output_option, dest="output", default=bench.output)
    return Path(parser.parse_known_args(rest)[0].output)
