"""``python -m examples.scheduler_bench``: measure, print the results."""

import argparse
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.console import Console

from examples.bench.arguments import BenchParser, exit_codes
from examples.bench.command import (
    BAD_RESULT,
    RUN_FAILED,
    CannotStart,
    exit_code_of,
    print_lines,
    run_program,
)
from examples.bench.progress import Progress
from examples.bench.results_file import NUMBERS, machine, prepare_output, save_numbers
from examples.scheduler_bench.hybrids import MODELS
from examples.scheduler_bench.plan import QUICK, FootprintPlan, Part, Plan

if TYPE_CHECKING:
    from examples.scheduler_bench.contenders import Contender
    from examples.scheduler_bench.results import Results

NAMES = ("ours", "ours-128", "ours-unlimited", "builtin", "builtin-lazy", "offloading")
"""Those of the contenders, whose module takes seconds to import."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    arguments = _parse(argv)
    return exit_code_of(lambda: _start(arguments))


def _start(arguments: argparse.Namespace) -> int:
    plan: Plan = arguments.plan
    if Part.FOOTPRINT in arguments.parts:
        _require_memory(plan.footprint)
    for path in plan.traces.files:
        _require_scalable(path, plan)
    prepare_output("--out", arguments.output, NUMBERS)
    # Takes seconds, as it brings vLLM: wrong usage is reported without it.
    from examples.scheduler_bench.contenders import CONTENDERS

    names = arguments.contenders or NAMES
    contenders = [contender for name, contender in CONTENDERS.items() if name in names]
    return run(plan, contenders, arguments.parts, arguments.output)


def _require_memory(plan: FootprintPlan) -> None:
    available = psutil.virtual_memory().available
    if plan.bytes_needed > available:
        raise CannotStart(
            f"A tier of {plan.tier_blocks} blocks may take {plan.bytes_needed / 2**30:.1f} GiB of "
            f"memory; {available / 2**30:.1f} are available. --quick takes less"
        )


def _require_scalable(path: Path, plan: Plan) -> None:
    """Read a trace before anything is measured."""
    from examples.bench.traces import read_trace

    block_tokens, scale = read_trace(path).block_tokens, plan.traces.scale
    if block_tokens % scale or block_tokens < scale:
        raise CannotStart(
            f"--traces: {path} has ids of {block_tokens} tokens. Allowed: a multiple of {scale}"
        )


def run(
    plan: Plan, contenders: "Sequence[Contender]", parts: Collection[Part], output: Path
) -> int:
    """Measure ``parts``, print the results, and return the exit code."""
    from examples.scheduler_bench import bench
    from examples.scheduler_bench.results import Results

    results, start = Results(plan, machine()), time.monotonic()
    with Progress() as progress:

        def on_step(step: str) -> None:
            results.seconds = time.monotonic() - start
            save_numbers(output, results.to_json())
            progress.show("scheduler_bench", step)

        bench.run(contenders, parts, results, on_step)
    _report(results, output)
    if results.problems:
        return BAD_RESULT
    return RUN_FAILED if results.failures else 0


def _report(results: "Results", output: Path) -> None:
    from examples.scheduler_bench import report

    console = Console(width=report.WIDTH)
    print_lines(console, f"{results.machine['processor']}, vLLM {results.machine['vllm']}")
    if results.rows:
        console.print(report.cost_table(results))
    if results.footprints:
        console.print(report.footprint_table(results))
    if results.plays:
        console.print(report.found_table(results.plays), report.wait_table(results.plays))
    if results.sizes:
        console.print(report.sizes_table(results.sizes))
    if results.bytes:
        console.print(report.bytes_table(results.bytes))
    lines = [f"Numbers: {output / NUMBERS}"]
    lines += [f"Left out: {name}: {reason}" for name, reason in results.left_out.items()]
    print_lines(console, *lines)
    problems = [f"Proves nothing: {where}: {why}" for where, why in results.problems.items()]
    problems += [f"{name} failed: {failure}" for name, failure in results.failures.items()]
    print_lines(console, *problems, style="bold red")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = BenchParser(
        "scheduler_bench",
        "Runs vLLM's scheduler, without engine or model, with one KV connector after another: "
        "time in the connector's hooks, memory and start-up time of a large tier, what requests "
        "find, and how long they wait. Compare ratios: times hold on one machine only.",
        exit_codes(
            "measured",
            "a connector did not load everything that it had stored",
            "a connector failed",
            "wrong usage, or too little memory",
        ),
    )
    parser.add_names("--parts", "measurements", [part.value for part in Part])
    parser.add_names("--contenders", "connectors and settings", NAMES)
    parser.add_argument("--quick", action="store_true", help="small, to see that it works")
    parser.add_argument(
        "--traces",
        dest="files",
        help="recorded requests to replay: Mooncake's JSONL or Claude Code sessions, also .xz",
        type=Path,
        metavar="FILE",
        nargs="+",
    )
    parser.add_argument(
        "--memory",
        dest="memories",
        help="device and host memory of a replay, in millions of tokens (default: 0.5/1 1/1 0.5/2)",
        type=_memory,
        metavar="D/H",
        nargs="+",
    )
    parser.add_number("--agents", "concurrent sessions of a replay (default: 32)", most=4096)
    parser.add_number(
        "--working-sets", "sets of such agents, one after another; the last counts (default: 1)"
    )
    parser.add_number("--requests", "of a replay (default: 3000)")
    parser.add_number(
        "--step-ms", "engine step of a replay (default: 50)", most=60_000, metavar="MS"
    )
    parser.add_number(
        "--tokens-per-second",
        "tokens that the engine of a replay computes in a second, beside the time of its steps "
        "(default: 40000)",
    )
    parser.add_number("--max-pause", "longest pause of a replay, s (default: 300)", least=0)
    parser.add_names("--models", "hybrid models, for bytes and models", MODELS)
    parser.add_number(
        "--seeds", "runs of each chat and replay (default: 5; of a model: 3)", most=100
    )
    parser.add_output("--out", "scheduler-bench-out", "all numbers")
    arguments = parser.parse_args(argv)
    if arguments.parts is None:
        arguments.parts = [part.value for part in Part]
        for part in (Part.SIZES, Part.MODELS, Part.BYTES):
            arguments.parts.remove(part.value)
        if arguments.files is None:
            arguments.parts.remove(Part.TRACES.value)
    arguments.parts = [Part(name) for name in arguments.parts]
    for part in {Part.TRACES, Part.SIZES} & set(arguments.parts):
        if arguments.files is None:
            parser.error(f"argument --parts: {part.value} needs --traces FILE")
    arguments.plan = _plan(arguments)
    return arguments


def _plan(arguments: argparse.Namespace) -> Plan:
    plan = QUICK if arguments.quick else Plan()
    given = vars(arguments)
    if arguments.step_ms is not None:
        given["step_seconds"] = arguments.step_ms / 1000
    names = (field.name for field in fields(plan.traces))
    traces = {name: given[name] for name in names if given.get(name) is not None}
    return replace(
        plan,
        traces=replace(plan.traces, **traces),
        models=tuple(MODELS[name] for name in arguments.models or MODELS),
        agents=replace(plan.agents, seeds=arguments.seeds or plan.agents.seeds),
        seeds=arguments.seeds or plan.seeds,
    )


def _memory(text: str) -> tuple[float, float]:
    try:
        device, host = (float(each) for each in text.split("/"))
    except ValueError:
        device = host = 0.0
    if not (0.01 <= device <= 1000 and 0.01 <= host <= 1000):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not device/host in millions of tokens, each from 0.01 to 1000"
        )
    return device, host


if __name__ == "__main__":
    # Each engine would log the same about the CPU.
    logging.disable(logging.WARNING)
    run_program(main)
