"""``python -m examples.scheduler_bench``: measure, print the results."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from examples.bench.arguments import BenchParser, changed
from examples.bench.command import CannotStart, exit_code_of, run_program
from examples.bench.connectors import Contender
from examples.bench.race import run_race
from examples.bench.results_file import NUMBERS, machine, prepare_output
from examples.bench.traces import read_trace
from examples.scheduler_bench.hybrids import MODELS
from examples.scheduler_bench.plan import CONTENDERS, CONTENDERS_OF, QUICK, Plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = BenchParser(
        "scheduler_bench",
        "Runs vLLM's scheduler, without engine or model, with one KV connector after another: "
        "time in the connector's hooks, what requests find, and how long they wait. Compare "
        "ratios: times hold on one machine only.",
    )
    default = "cost and chat; with --traces traces"
    parser.add_names("--parts", "measurements", CONTENDERS_OF, default)
    parser.add_names("--contenders", "connectors and settings", CONTENDERS)
    parser.add_argument("--quick", action="store_true", help="small, to see that it works")
    parser.add_names("--models", "hybrid models, for bytes and models", MODELS)
    parser.add_plan(Plan())
    parser.add_plan(Plan().traces)
    arguments = parser.parse_args(argv)
    plan = QUICK if arguments.quick else Plan()
    plan = changed(replace(plan, traces=changed(plan.traces, arguments)), arguments)
    plan = replace(plan, models=tuple(MODELS[name] for name in arguments.models or MODELS))
    by_default = ["cost", "chat", *(["traces"] if plan.traces.files else [])]
    parts = arguments.parts or by_default
    for part in ("traces", "sizes"):
        if part in parts and not plan.traces.files:
            parser.error(f"argument --parts: {part} needs --traces FILE")
    if "sizes" in parts and plan.traces.working_sets > 1:
        parser.error("argument --working-sets: sizes are of one")
    names = arguments.contenders or CONTENDERS
    for part in arguments.parts or ():
        if CONTENDERS_OF[part].isdisjoint(names):
            known = ", ".join(sorted(CONTENDERS_OF[part]))
            parser.error(f"argument --contenders: {part} needs one or more of {known}")
    contenders = [contender for name, contender in CONTENDERS.items() if name in names]
    return exit_code_of(lambda: run(plan, contenders, parts, arguments.output))


def run(plan: Plan, contenders: Sequence[Contender], parts: Collection[str], output: Path) -> int:
    """Measure ``parts``, print the results, and return the exit code."""
    for path in plan.traces.files:
        _require_scalable(path, plan)
    prepare_output(output, NUMBERS)
    # Takes seconds, as it brings vLLM: wrong usage is reported without it.
    from examples.scheduler_bench import bench
    from examples.scheduler_bench.results import Results

    results = Results(plan=plan, machine=machine())
    return run_race(
        "scheduler_bench", results, output, partial(bench.run, contenders, parts, results)
    )


def _require_scalable(path: Path, plan: Plan) -> None:
    """Read a trace before anything is measured. Raises CannotStart if it does not fit ``plan``."""
    trace = read_trace(path)
    block_tokens, scale = trace.block_tokens, plan.traces.scale
    if plan.traces.working_sets > 1 and not trace.has_sessions:
        raise CannotStart(f"--working-sets: {path} has no sessions, but requests at their times")
    if block_tokens % scale or block_tokens < scale:
        raise CannotStart(
            f"--traces: {path} has ids of {block_tokens} tokens. Allowed: a multiple of {scale}"
        )


if __name__ == "__main__":
    # Each engine would log the same about the CPU.
    logging.disable(logging.WARNING)
    run_program(main)
