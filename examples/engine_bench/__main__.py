"""``python -m examples.engine_bench``: run the bench, print its results."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from examples.bench.arguments import MAX_SEED, BenchParser, exit_codes
from examples.bench.command import BAD_RESULT, exit_code_of, print_lines, run_program
from examples.bench.connectors import CONTENDERS, ON_CPU, PACKAGE, WITH_FILES, before
from examples.bench.models import DEEPSEEK_LITE
from examples.bench.progress import Progress
from examples.bench.results_file import NUMBERS, prepare_output
from examples.engine_bench.bench import Bench
from examples.engine_bench.plan import PARTS, PRESETS
from examples.engine_bench.results import bench_table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit code."""
    bench = parse(argv)
    return exit_code_of(lambda: run(bench))


def run(bench: Bench) -> int:
    """Run ``bench``, print its table and its problems; return the exit code."""
    prepare_output("--output", bench.output, NUMBERS)
    with Progress() as progress:
        bench.run(progress.show)
    bench.save()
    console = Console()
    title = f"Medians of {bench.num_runs}, and their ratios to {bench.contenders[0].name}"
    console.print(bench_table(bench.medians, bench.floor, title))
    for fact in (bench.working_set, bench.directory):
        if fact is not None:
            print_lines(console, str(fact))
    print_lines(console, f"Numbers: {bench.output / NUMBERS}")
    print_lines(console, *bench.problems, style="bold red")
    return BAD_RESULT if bench.problems else 0


def parse(argv: Sequence[str] | None) -> Bench:
    """The bench that the command line describes. Exits if it is wrong."""
    parser = BenchParser(
        "engine_bench",
        "One vLLM engine after another, each with another KV connector and all with the same "
        "work. Compare ratios: times hold on one machine only.",
        exit_codes(
            "measured",
            "a request was lost, answers differ, or a connector got no hits",
            "a process failed",
        ),
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="h200",
        help="model and sizes: h200 for a GPU of 80 GB or more, cpu to see that it works "
        "(default: h200)",
    )
    parser.add_names(
        "--contenders",
        "connectors, the first being the base of ratios",
        (*CONTENDERS, *WITH_FILES),
        f"all; on the CPU {', '.join(ON_CPU)}; those with files with --files only",
    )
    parser.add_argument(
        "--files",
        type=Path,
        metavar="DIR",
        help="where contenders with a second tier have their files, in folders that are removed",
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="DIR",
        help=f"add the contender before: ours with the package {PACKAGE} of DIR, for example a "
        "checkout of another commit",
    )
    parser.add_names(
        "--parts",
        "parts of the work",
        PARTS,
        "all; traces with --traces only, restart with --files only",
    )
    parser.add_argument(
        "--traces",
        help="recorded Claude Code sessions for the part traces, also .xz",
        type=Path,
        metavar="FILE",
    )
    parser.add_number("--agents", "sessions at the same time (default: 16; 8 on the CPU)", most=256)
    parser.add_number("--trace-requests", "of all agents together (default: 200; 40 on the CPU)")
    parser.add_number(
        "--trace-scale",
        "recorded tokens for each token that is sent; pauses shrink alike (default: 8; 64 on the "
        "CPU)",
    )
    parser.add_number(
        "--trace-pause",
        "longest pause of an agent (default: 5; 1 on the CPU)",
        least=0,
        metavar="SECONDS",
    )
    parser.add_number("--rounds", "engines of each contender (default: 3; 2 on the CPU)")
    parser.add_number(
        "--repeats",
        "times that each engine does the work, with other prompts each time (default: 1)",
        default=1,
    )
    parser.add_argument(
        "--mla",
        action="store_true",
        help="a model of latent attention, whose KV all ranks have alike (GPU only)",
    )
    parser.add_number("--kv-heads", "KV heads of the model; 1 is the share of each of eight ranks")
    parser.add_number(
        "--prompt-tokens",
        "length of prompts that come back as hits (default: 8192; 1024 on the CPU)",
    )
    parser.add_number("--host-gib", "size of the host tier (default: the preset's)")
    parser.add_number("--tensor-parallel", "ranks (default: 1)", default=1)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_number(
        "--seed",
        "of the prompts and of the order of sessions (default: 0)",
        least=0,
        most=MAX_SEED,
        default=0,
    )
    parser.add_output("--output", "engine-bench-out", "numbers and logs")
    arguments = parser.parse_args(argv)
    plan = PRESETS[arguments.preset]
    needs = {
        "traces": ("--traces FILE", arguments.traces),
        "restart": ("--files DIR", arguments.files),
    }
    missing = {part: option for part, (option, value) in needs.items() if value is None}
    parts = arguments.parts or [part for part in PARTS if part not in missing]
    for part in parts:
        if part in missing:
            parser.error(f"argument --parts: {part} needs {missing[part]}")
    if "restart" in parts and "ttft" not in parts:
        parser.error("argument --parts: restart needs ttft, whose prompts it asks again")
    every = CONTENDERS if arguments.files is None else CONTENDERS | WITH_FILES
    contenders = parser.contenders(arguments.contenders, plan.device, tuple(every))
    for contender in contenders:
        if contender.has_files and arguments.files is None:
            parser.error(f"argument --contenders: {contender.name} needs --files DIR")
    if arguments.before is not None:
        if not (arguments.before / PACKAGE / "__init__.py").is_file():
            parser.error(f"argument --before: {arguments.before} has no package {PACKAGE}")
        contenders.append(before(arguments.before))
    if arguments.mla:
        plan = replace(plan, model=DEEPSEEK_LITE)
    plan = plan.with_prompts_of(arguments.prompt_tokens or plan.prompt_tokens)
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
        rounds=arguments.rounds or plan.rounds,
        agents=arguments.agents or plan.agents,
        trace_requests=arguments.trace_requests or plan.trace_requests,
        trace_scale=arguments.trace_scale or plan.trace_scale,
        trace_pause=plan.trace_pause if arguments.trace_pause is None else arguments.trace_pause,
        trace=str(arguments.traces.resolve()) if "traces" in parts else None,
        trace_seed=arguments.seed,
        seed=arguments.seed,
    )
    return Bench(
        plan, contenders, parts, arguments.output, arguments.repeats, files=arguments.files
    )


if __name__ == "__main__":
    run_program(main)
