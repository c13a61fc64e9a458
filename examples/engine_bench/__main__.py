"""``python -m examples.engine_bench``: run the bench, print what it measured."""

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.status import Status

from examples.arguments import known_names, positive_count
from examples.demo.child import RunFailed
from examples.engine_bench.bench import NUMBERS, Bench
from examples.engine_bench.contenders import CONTENDERS, ON_CPU
from examples.engine_bench.plan import PARTS, PRESETS, ROUNDS, Plan
from examples.engine_bench.report import bench_table

WORTH_NOTHING = 1
RUN_FAILED = 3
INTERRUPTED = 128 + signal.SIGINT

EXIT_CODES = f"""\
exit codes: 0 measured; {WORTH_NOTHING} a request was lost, answers differ, or a connector got no
hits; 2 wrong usage; {RUN_FAILED} a process failed; {INTERRUPTED} interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit code."""
    return run(_parse(argv))


def run(bench: Bench) -> int:
    """Run ``bench``, print its table and what is wrong with it; return the exit code."""
    console = Console()
    (bench.output / NUMBERS).unlink(missing_ok=True)
    try:
        with Progress(console) as progress:
            bench.run(progress.show)
    except RunFailed as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return RUN_FAILED
    except subprocess.CalledProcessError as error:
        console.print(f"The copy to the device could not be measured: {error}", soft_wrap=True)
        return RUN_FAILED
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return INTERRUPTED
    bench.save()
    title = f"Medians of {bench.num_runs}, and their ratios to {bench.contenders[0].name}"
    console.print(bench_table(bench.medians, bench.floor, title))
    console.print(f"Numbers: {bench.output / NUMBERS}", highlight=False, soft_wrap=True)
    for problem in bench.problems:
        console.print(problem, style="bold red", markup=False, highlight=False, soft_wrap=True)
    return WORTH_NOTHING if bench.problems else 0


class Progress:
    """What the user sees meanwhile: a line that changes on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = Status("", console=console) if console.is_terminal else None
        self._last = ""

    def __enter__(self) -> "Progress":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, who: str, what: str) -> None:
        """``who`` is at work on ``what``, which may end in a count."""
        if self._status is not None:
            self._status.update(f"{who}: {what}")
        phase = f"{who}: {what.rstrip('0123456789/ ')}"
        if self._status is None and phase != self._last:
            self._console.print(f"{who}: {what}", highlight=False, soft_wrap=True)
        self._last = phase


def _parse(argv: Sequence[str] | None) -> Bench:
    parser = argparse.ArgumentParser(
        prog="python -m examples.engine_bench",
        description=(
            "One vLLM engine after another, each with another KV connector and all with the "
            "same work. Compare ratios: times hold on one machine only."
        ),
        epilog=EXIT_CODES,
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="h200",
        help="model and sizes: h200 for a GPU of 80 GB or more, cpu to see that it works "
        "(default: h200)",
    )
    parser.add_argument(
        "--contenders",
        type=known_names(CONTENDERS),
        metavar="A,B",
        help=f"which, the first being the base of ratios: {', '.join(CONTENDERS)} (default: "
        f"all; on the CPU {' and '.join(ON_CPU)})",
    )
    parser.add_argument(
        "--parts",
        type=known_names(PARTS),
        default=list(PARTS),
        metavar="A,B",
        help=f"of the work: {', '.join(PARTS)} (default: all)",
    )
    parser.add_argument(
        "--rounds",
        type=positive_count,
        metavar="N",
        help="engines of each contender (default: 3; 2 on the CPU)",
    )
    parser.add_argument(
        "--repeats",
        type=positive_count,
        default=1,
        metavar="N",
        help="how many times each engine does the work, with other prompts each time (default: 1)",
    )
    parser.add_argument(
        "--kv-heads",
        type=positive_count,
        metavar="N",
        help="KV heads of the model; 1 is what each of eight ranks has",
    )
    parser.add_argument(
        "--host-gib",
        type=positive_count,
        metavar="N",
        help="size of the host tier (default: the preset's)",
    )
    parser.add_argument(
        "--tensor-parallel", type=positive_count, default=1, metavar="N", help="ranks (default: 1)"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of what is asked (default: 0)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("engine-bench-out"),
        metavar="DIR",
        help="where numbers and logs go (default: engine-bench-out)",
    )
    arguments = parser.parse_args(argv)
    plan: Plan = PRESETS[arguments.preset]()
    allowed = ON_CPU if plan.device == "cpu" else tuple(CONTENDERS)
    names = arguments.contenders or list(allowed)
    for name in names:
        if name not in allowed:
            parser.error(
                f"argument --contenders: {name!r} does not run on the CPU: choose from "
                f"{', '.join(allowed)}"
            )
    kv_heads = arguments.kv_heads or plan.model.num_kv_heads
    if plan.model.num_heads % kv_heads:
        parser.error(
            f"argument --kv-heads: {kv_heads} does not divide {plan.model.num_heads} heads"
        )
    plan = replace(
        plan,
        model=replace(plan.model, num_kv_heads=kv_heads),
        host_bytes=arguments.host_gib << 30 if arguments.host_gib else plan.host_bytes,
        graphs=plan.graphs and not arguments.eager,
        tensor_parallel=arguments.tensor_parallel,
        seed=arguments.seed,
    )
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=arguments.output).close()
    except OSError as error:
        parser.error(f"argument --output: cannot write to {arguments.output}: {error.strerror}")
    contenders = [CONTENDERS[name] for name in names]
    rounds = arguments.rounds or ROUNDS[arguments.preset]
    return Bench(plan, contenders, arguments.parts, rounds, arguments.output, arguments.repeats)


def _end(signal_number: int, _frame: FrameType | None) -> None:
    """Leave through the ``finally`` blocks that stop the engine and remove its files."""
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    sys.exit(main())
