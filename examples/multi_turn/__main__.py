"""``python -m examples.multi_turn``: run the benchmark, print and plot its results."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from examples.bench.arguments import MAX_SEED, BenchParser, exit_codes
from examples.bench.command import BAD_RESULT, exit_code_of, print_lines, run_program
from examples.bench.connectors import CONTENDERS, ON_CPU
from examples.bench.progress import Progress
from examples.bench.results_file import NUMBERS, prepare_output
from examples.bench.served import MODEL, ON_GPU, add_options, vocabulary_of, with_options
from examples.multi_turn.bench import CONVERSATIONS, Bench
from examples.multi_turn.conversations import InputError, make_conversations, read_input
from examples.multi_turn.plan import PRESETS, Plan
from examples.multi_turn.results import PLOTS, save_plots, summary_table, turn_table
from examples.serving import Server

INPUT = f"""\
The input file is that of vLLM's benchmarks/multi_turn/benchmark_serving_multi_turn.py: a list of \
conversations, or settings with "filetype": "generate_conversations". The words of generated \
conversations follow from the seed; their "text_files" are not read. All prompts of a run are \
written to {CONVERSATIONS}, which vLLM's script reads in turn.

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or serve for another client; return the exit code."""
    bench, serve_only = parse(argv)
    return exit_code_of(lambda: serve(bench) if serve_only else run(bench))


def serve(bench: Bench) -> int:
    """Serve the first contender until interrupted; return the exit code."""
    console = Console()

    def on_ready(server: Server, model: str) -> None:
        print_lines(
            console,
            f"{server.url} serves {MODEL!r}, until Ctrl-C. vLLM's own benchmark:\n",
            f"python benchmark_serving_multi_turn.py --url {server.url} --served-model-name {MODEL}"
            f" --model {model} --input-file {bench.output / CONVERSATIONS}"
            f" --num-clients {bench.plan.clients}"
            f" --max-active-conversations {bench.plan.active}",
        )

    prepare_output("--output", bench.output)
    try:
        with Progress() as progress:
            bench.serve(progress.show, on_ready)
    except KeyboardInterrupt:
        print_lines(console, "Stopped.")
    return 0


def run(bench: Bench) -> int:
    """Run ``bench``, print its numbers and its problems; return the exit code."""
    prepare_output("--output", bench.output, NUMBERS, CONVERSATIONS, *PLOTS)
    console, plan = Console(), bench.plan
    what = (
        f"{len(bench.conversations)} conversations, {plan.active} at a time, {plan.clients} clients"
    )
    tokens = sum(conversation.num_tokens for conversation in bench.conversations)
    blocks = plan.num_device_blocks(bench.conversations) - 1
    print_lines(
        console,
        f"{what}: {bench.requests} requests a round, {tokens:,} tokens at the end. The "
        f"device's KV space holds {blocks * plan.block_size:,}, the host tier "
        f"{plan.host_bytes / 2**30:.1f} GiB.",
    )
    with Progress() as progress:
        bench.run(progress.show)
    if summaries := bench.summaries:
        title = f"Medians of {plan.rounds} rounds, and their ratios to {next(iter(summaries))}"
        console.print(turn_table(summaries), summary_table(summaries, title))
        try:
            plots = save_plots(bench.output, summaries, what)
            print_lines(console, f"Plots: {', '.join(map(str, plots))}")
        except ImportError as error:
            print_lines(console, f"No plots: {error}")
    print_lines(console, f"Numbers: {bench.output / NUMBERS}")
    print_lines(console, *bench.problems, style="bold red")
    return BAD_RESULT if bench.problems else 0


def parse(argv: Sequence[str] | None) -> tuple[Bench, bool]:
    """The benchmark, and True if it is only to serve. Exits if an argument is wrong."""
    parser = BenchParser(
        "multi_turn",
        "vLLM serves one model with one KV connector after another, and each server gets the same "
        "conversations over HTTP. Compare ratios: times hold on one machine only.",
        INPUT
        + exit_codes(
            "measured",
            "a request was lost, answers differ, or a connector got no hits",
            "a server failed",
        ),
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="cpu",
        help="model, sizes and conversations. cpu: a small model. h200: 8 billion parameters, for "
        "a GPU of 80 GB or more. fits: one of those two, by the machine, with room for everything "
        "on the device. seed: Qwen3-14B's shape and vLLM's own conversations (default: cpu)",
    )
    parser.add_names(
        "--contenders",
        "connectors, the first being the base of ratios",
        CONTENDERS,
        f"{', '.join(ON_GPU)}; on the CPU {' and '.join(ON_CPU)}",
    )
    parser.add_number(
        "--rounds",
        "replays of all conversations by each contender, from empty caches each time "
        "(default: 3; 1 on the CPU)",
    )
    parser.add_argument(
        "--input-file", type=Path, metavar="FILE", help="conversations other than the preset's"
    )
    parser.add_number("--num-clients", "clients that ask at the same time (default: the preset's)")
    parser.add_number(
        "--max-active-conversations",
        "begun and not ended, of all clients together (default: the preset's)",
    )
    add_options(parser)
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the first contender until Ctrl-C and send no request: for vLLM's own script, "
        "whose command line is printed",
    )
    parser.add_number("--port", "where to serve (default: a free one)", most=65535)
    parser.add_number(
        "--seed", "of the conversations (default: the preset's)", least=0, most=MAX_SEED
    )
    parser.add_output("--output", "multi-turn-out", "numbers, plots and logs")
    arguments = parser.parse_args(argv)
    plan = _plan(arguments)
    contenders = parser.contenders(arguments.contenders, plan.device, ON_GPU)
    vocabulary = vocabulary_of(parser, plan)
    try:
        data = plan.settings if arguments.input_file is None else read_input(arguments.input_file)
        conversations = make_conversations(data, vocabulary, plan.seed)
    except InputError as error:
        parser.error(f"argument --input-file: {error}")
    # By default, no more clients than the conversations keep busy.
    active = arguments.max_active_conversations or min(plan.active, len(conversations))
    clients = arguments.num_clients or min(plan.clients, active)
    if not clients <= active <= len(conversations):
        parser.error(
            f"{clients} clients, {active} active conversations, {len(conversations)} "
            "conversations: none of the first may be more than the next"
        )
    plan = replace(plan, active=active, clients=clients)
    bench = Bench(plan, conversations, vocabulary, contenders, arguments.output, arguments.port)
    return bench, arguments.serve


def _plan(arguments: argparse.Namespace) -> Plan:
    import torch

    # The other presets must not touch a device that a server of the run will fill.
    on_gpu = arguments.preset == "fits" and torch.cuda.is_available()
    plan = PRESETS[arguments.preset]("cuda" if on_gpu else "cpu")
    return with_options(plan, arguments, rounds=arguments.rounds)


if __name__ == "__main__":
    run_program(main)
