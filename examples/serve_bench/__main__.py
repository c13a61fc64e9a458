"""``python -m examples.serve_bench``: run the benchmark, print and plot its results."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from examples.bench.arguments import BenchParser, changed
from examples.bench.command import (
    BAD_RESULT,
    CannotStart,
    exit_code_of,
    lines,
    print_lines,
    run_program,
)
from examples.bench.connectors import CONTENDERS, ON_CPU, PACKAGE, Contender, before
from examples.bench.models import DEEPSEEK_LITE, SMALL
from examples.bench.race import WIDTH
from examples.bench.results_file import NUMBERS, prepare_output
from examples.serve_bench.bench import CONVERSATIONS, MODEL, Bench
from examples.serve_bench.plan import CPU, H200, PRESETS, WORKLOADS, Plan
from examples.serve_bench.results import (
    floor_line,
    save_plot,
    start_line,
    summaries,
    workload_tables,
)

DEFAULT = ("none", "ours", "builtin", "builtin-lazy", "offloading")
"""Contenders, unless others are named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or serve for another client; return the exit code."""

    def start() -> int:
        bench, serve_only = parse(argv)
        return serve(bench) if serve_only else run(bench)

    return exit_code_of(start)


def serve(bench: Bench) -> int:
    """Serve the first contender until interrupted; return the exit code."""
    console = Console()
    prepare_output(bench.output)
    try:
        with bench.serve(lines()) as (server, model):
            print_lines(
                console,
                f"{server.url} serves {MODEL!r}, until Ctrl-C. vLLM's own benchmark:\n",
                f"python benchmark_serving_multi_turn.py --url {server.url} --served-model-name "
                f"{MODEL} --model {model} --input-file {bench.output / CONVERSATIONS} "
                f"--num-clients {bench.plan.clients} "
                f"--max-active-conversations {bench.plan.active}",
            )
            server.ended.result()
            server.check()
    except KeyboardInterrupt:
        print_lines(console, "Stopped.")
    return 0


def run(bench: Bench) -> int:
    """Run ``bench``, print its numbers and its problems; return the exit code."""
    try:
        bench.run(lines())
    finally:
        report(bench, Console(width=WIDTH))
    return BAD_RESULT if bench.problems else 0


def report(bench: Bench, console: Console) -> None:
    """Print all results so far, if there are any, and save the plot."""
    if not any(bench.runs.values()):
        return
    plan, found, base = bench.plan, summaries(bench.runs), bench.contenders[0].name
    title = f"Medians of {plan.rounds * plan.repeats}, and ratios to {base}"
    for name in dict.fromkeys(name for by_workload in found.values() for name in by_workload):
        console.print(*workload_tables(found, name, title, base))
    host = f", host tier {plan.host_bytes / 2**30:.1f} GiB" if bench.endpoint is None else ""
    print_lines(console, f"Device's KV space {plan.device_tokens:,} tokens{host}.")
    start = None if bench.endpoint else start_line(bench.runs)
    print_lines(console, *filter(None, [floor_line(found, plan, bench.peak), start]))
    try:
        print_lines(console, f"Plot: {save_plot(bench.output, found)}" if found else "No plot")
    except ImportError as error:
        print_lines(console, f"No plot: {error}")
    print_lines(console, f"Numbers: {bench.output / NUMBERS}")
    print_lines(console, *bench.problems, style="bold red")


def parse(argv: Sequence[str] | None) -> tuple[Bench, bool]:
    """The benchmark, and True if it is only to serve. Raises CannotStart, or exits with the same
    code, if an argument is wrong."""
    arguments = _parser().parse_args(argv)
    plan = _plan(arguments)
    contenders = [] if plan.url else _contenders(arguments, plan)
    return Bench(plan, contenders, arguments.output), arguments.serve


def _parser() -> BenchParser:
    parser = BenchParser(
        "serve_bench",
        "vLLM with one KV connector after another, and all with the same work: an engine in a "
        "process of its own, or `vllm serve` and its clients. Compare ratios: times hold on one "
        "machine only. Conversations are those of the preset, or of a file as for vLLM's "
        "benchmarks/multi_turn/benchmark_serving_multi_turn.py. All prompts of a run are written "
        f"to {CONVERSATIONS}, which vLLM's script reads in turn.",
    )
    text = "model, sizes and conversations: see docs/benchmarks.md (default: cpu)"
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help=text)
    text = "turns; with --traces traces. restart needs --files"
    parser.add_names("--workloads", "what is sent", WORKLOADS, text)
    parser.add_names(
        "--contenders",
        "connectors, the first being the base of ratios",
        CONTENDERS,
        f"{', '.join(DEFAULT)}; with --files those with files too; on the CPU "
        f"{', '.join(ON_CPU)} of these",
    )
    text = f"add the contender before: ours with the package {PACKAGE} of another checkout"
    parser.add_argument("--before", type=Path, metavar="DIR", help=text)
    text = "serve the first contender until Ctrl-C, for vLLM's own script: its command is printed"
    parser.add_argument("--serve", action="store_true", help=text)
    parser.add_plan(CPU, "the preset's")
    return parser


def _plan(arguments: argparse.Namespace) -> Plan:
    """The preset, changed by the options of its fields, and by others."""
    preset = PRESETS[arguments.preset]
    if preset.fits:
        import torch

        if torch.cuda.is_available():
            preset = replace(H200, fits=True)
    if arguments.requests:
        preset = replace(preset, seconds=None)
    workloads = tuple(arguments.workloads or (["traces"] if arguments.traces else ["turns"]))
    plan = changed(replace(preset, workloads=workloads), arguments)
    if plan.url or plan.model:
        plan = replace(plan, shape=None)
    shape = DEEPSEEK_LITE if plan.mla else plan.shape or SMALL
    heads = plan.kv_heads or shape.num_kv_heads
    asked = set(workloads)
    refusals = {
        "--workloads: traces needs --traces": "traces" in asked and not plan.traces,
        "--workloads: restart needs --files": "restart" in asked and not plan.files,
        "--workloads: restart needs ttft": "restart" in asked and "ttft" not in asked,
        "--serve: needs the workload turns": arguments.serve and "turns" not in asked,
        "--preset: fits has turns and idle alone": plan.fits and asked - {"turns", "idle"},
        f"--mla: the preset {arguments.preset} runs on the CPU": plan.mla and plan.device == "cpu",
        f"--kv-heads: {heads} does not divide {shape.num_heads} heads": shape.num_heads % heads,
    }
    if plan.files and plan.input_file:
        refusals["--repeats: 1 with --files and --input-file"] = plan.repeats > 1
    if plan.url:
        refusals["--transport: not engine with --url, but http"] = plan.transport == "engine"
        for name in ("contenders", "before", "files", "model", "rounds", "serve"):
            text = f"--{name}: not with --url, whose server runs already"
            refusals[text] = getattr(arguments, name)
    for text, is_wrong in refusals.items():
        if is_wrong:
            raise CannotStart(text)
    if plan.shape is not None:
        plan = replace(plan, shape=replace(shape, num_kv_heads=heads))
    if arguments.prompt_tokens:
        plan = plan.with_prompts_of(plan.prompt_tokens)
    try:
        plan.vocabulary()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CannotStart(f"--model: {plan.model!r} cannot be read: {reason}") from None
    return plan.with_conversations() if "turns" in workloads else plan


def _contenders(arguments: argparse.Namespace, plan: Plan) -> list[Contender]:
    allowed = ON_CPU if plan.device == "cpu" else tuple(CONTENDERS)
    for name in (named := arguments.contenders or ()):
        if name not in allowed:
            raise CannotStart(
                f"--contenders: {name!r} does not run on the CPU: choose from {', '.join(allowed)}"
            )
        if CONTENDERS[name].has_files and plan.files is None:
            raise CannotStart(f"--contenders: {name} needs --files DIR")
    files = [name for name, each in CONTENDERS.items() if each.has_files and plan.files]
    contenders = [CONTENDERS[name] for name in named or (*DEFAULT, *files) if name in allowed]
    if arguments.before is not None:
        if not (arguments.before / PACKAGE / "__init__.py").is_file():
            raise CannotStart(f"--before: {arguments.before} has no package {PACKAGE}")
        contenders.append(before(arguments.before))
    return contenders


if __name__ == "__main__":
    run_program(main)
