"""``python -m examples.scheduler_bench``: measure, print what was measured."""

import argparse
import json
import logging
import signal
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.console import Console

from examples.arguments import known_names
from examples.scheduler_bench.plan import CostPlan, FootprintPlan, HitPlan, Mix, Part, Plan

if TYPE_CHECKING:
    from examples.scheduler_bench.contenders import Contender
    from examples.scheduler_bench.results import Results

WORTH_NOTHING = 1
CANNOT_START = 2
RUN_FAILED = 3
INTERRUPTED = 128 + signal.SIGINT

EXIT_CODES = f"""\
exit codes: 0 measured, goals reached or not; {WORTH_NOTHING} a connector did not load what it
should have; {CANNOT_START} wrong usage, or too little memory; {RUN_FAILED} a connector failed;
{INTERRUPTED} interrupted"""

COST_PLOT, HIT_PLOT, NUMBERS = "cost.png", "hits.png", "result.json"
NAMES = ("ours", "ours-128", "ours-lazy", "ours-threshold", "builtin", "builtin-lazy")

QUICK = Plan(
    cost=CostPlan(
        running=(1, 8),
        context_tokens=256,
        steps=16,
        serving=Mix(prompt_tokens=128, answer_tokens=16),
        conversations=Mix(prompt_tokens=512, answer_tokens=32),
        lengths=(256, 4096),
        tiers=(1024, 4096),
        tier_tokens=1024,
        repeats=2,
    ),
    footprint=FootprintPlan(tier_blocks=100_000, filled_blocks=0, repeats=1),
    hits=HitPlan(conversations=16, turns=4, host_parts=(0.5, 1.0), seeds=1),
)
"""To see that it works."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    arguments = _parse(argv)
    plan: Plan = arguments.plan
    if Part.FOOTPRINT in arguments.parts:
        from examples.scheduler_bench.footprint import bytes_needed

        needed = bytes_needed(plan.footprint)
        available = int(psutil.virtual_memory().available)
        if needed > available:
            return _complain(
                CANNOT_START,
                f"--tier-blocks {plan.footprint.tier_blocks} may take {needed / 2**30:.1f} GiB of "
                f"memory, of which {available / 2**30:.1f} are available",
            )
    output: Path = arguments.out
    try:
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()
        for name in (COST_PLOT, HIT_PLOT, NUMBERS):
            (output / name).unlink(missing_ok=True)
    except OSError as error:
        return _complain(CANNOT_START, f"--out: cannot write to {output}: {error.strerror}")
    # Takes seconds, as it brings vLLM: wrong usage is told without it.
    from examples.scheduler_bench.bench import named

    try:
        return run(plan, named(arguments.contenders), arguments.parts, output)
    except KeyboardInterrupt:
        return _complain(INTERRUPTED, "interrupted")


def run(
    plan: Plan, contenders: "Sequence[Contender]", parts: Collection[Part], output: Path
) -> int:
    """Measure ``parts``, print what was measured, and return the exit code."""
    from examples.scheduler_bench import bench
    from examples.scheduler_bench.results import Results

    results = Results(plan, bench.machine())

    def tell(step: str) -> None:
        _save(output / NUMBERS, results)
        if step:
            print(f"{results.seconds:5.1f} s  {step}", file=sys.stderr)

    bench.run(contenders, parts, results, tell)
    _report(results, output)
    for where, problem in results.problems.items():
        _complain(WORTH_NOTHING, f"WORTH NOTHING: {where}: {problem}")
    for name, failure in results.failures.items():
        _complain(RUN_FAILED, f"{name} failed: {failure}")
    if results.problems:
        return WORTH_NOTHING
    return RUN_FAILED if results.failures else 0


def _report(results: "Results", output: Path) -> None:
    from examples.scheduler_bench import report
    from examples.scheduler_bench.results import goals

    console = Console(width=report.WIDTH)
    told = f"{results.machine['processor']}, vLLM {results.machine['vllm']}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    lines = []
    if results.rows:
        console.print(report.cost_table(results))
        console.print(report.hook_table(results))
        report.save_cost_plot(output / COST_PLOT, results)
        lines.append(f"Plot: {output / COST_PLOT}")
    if results.footprints:
        console.print(report.footprint_table(results))
    if results.hit_rows:
        console.print(report.hit_table(results))
        report.save_hit_plot(output / HIT_PLOT, results)
        lines.append(f"Plot: {output / HIT_PLOT}")
    lines.append(f"Numbers: {output / NUMBERS}")
    missed = [goal for goal, reached in goals(results).items() if not reached]
    lines += [f"Not reached: {goal}" for goal in missed]
    lines += [f"Left out: {name}: {reason}" for name, reason in results.left_out.items()]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.scheduler_bench",
        description=(
            "Runs vLLM's scheduler, without engine or model, with one KV connector after another: "
            "time in the connector's hooks, memory and start-up time of a large tier, and hit "
            "rates. Compare ratios: times hold on one machine only."
        ),
        epilog=EXIT_CODES,
    )
    parts = [part.value for part in Part]
    parser.add_argument(
        "--parts",
        type=known_names(parts),
        default=parts,
        metavar="A,B",
        help=f"what to measure: {', '.join(parts)} (default: all)",
    )
    parser.add_argument(
        "--contenders",
        type=known_names(NAMES),
        default=list(NAMES),
        metavar="A,B",
        help=f"which: {', '.join(NAMES)} (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="small, to see that it works")
    parser.add_argument(
        "--running",
        metavar="N",
        nargs="+",
        type=partial(_whole_number, least=1, most=256),
        help="requests that run at the same time (default: 1 64 256)",
    )
    parser.add_argument(
        "--lengths",
        metavar="TOKENS",
        nargs="+",
        type=partial(_whole_number, least=32, most=131_072),
        help="prompts that are stored and loaded (default: 2048 16384 131072)",
    )
    parser.add_argument(
        "--tiers",
        metavar="BLOCKS",
        nargs="+",
        type=partial(_whole_number, least=64, most=4_000_000),
        help="full tiers, at least as large as what is stored into them (default: 16384 131072 "
        "524288)",
    )
    parser.add_argument(
        "--tier-blocks",
        metavar="BLOCKS",
        type=partial(_whole_number, least=1024, most=100_000_000),
        help="whose memory and start-up time are measured (default: 4000000)",
    )
    parser.add_argument(
        "--repeats",
        metavar="N",
        type=partial(_whole_number, least=1, most=100),
        help="of each measurement of time (default: 5; quick: 2)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of what is asked (default: 0)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("scheduler-bench-out"),
        metavar="DIR",
        help="where plots and numbers go (default: scheduler-bench-out)",
    )
    arguments = parser.parse_args(argv)
    arguments.parts = [Part(name) for name in arguments.parts]
    arguments.plan = _plan(arguments)
    smallest = arguments.plan.cost.tier_tokens // 16 + 2
    for blocks in arguments.plan.cost.tiers:
        if blocks < smallest:
            parser.error(
                f"argument --tiers: {blocks} is less than the {smallest} blocks stored into it"
            )
    return arguments


def _plan(arguments: argparse.Namespace) -> Plan:
    plan = QUICK if arguments.quick else Plan()
    cost, footprint = plan.cost, plan.footprint
    if arguments.running is not None:
        cost = replace(cost, running=_ascending(arguments.running))
    if arguments.lengths is not None:
        cost = replace(cost, lengths=_ascending(arguments.lengths))
    if arguments.tiers is not None:
        cost = replace(cost, tiers=_ascending(arguments.tiers))
    if arguments.repeats is not None:
        cost = replace(cost, repeats=arguments.repeats)
    if arguments.tier_blocks is not None:
        filled = min(footprint.filled_blocks, arguments.tier_blocks // 4)
        footprint = replace(footprint, tier_blocks=arguments.tier_blocks, filled_blocks=filled)
    return replace(plan, cost=cost, footprint=footprint, seed=arguments.seed)


def _ascending(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _whole_number(text: str, *, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{number} is not within {least} and {most}")
    return number


def _save(path: Path, results: "Results") -> None:
    path.write_text(json.dumps(results.to_json(), indent=1) + "\n")


def _complain(code: int, text: str) -> int:
    print(f"scheduler_bench: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    # Each engine would say the same of the CPU that it finds.
    logging.disable(logging.WARNING)
    sys.exit(main())
