"""``python -m examples.multi_turn``: run the benchmark, print and plot its results."""

from collections.abc import Sequence

from rich.console import Console

from examples.bench.command import BAD_RESULT, exit_code_of, print_lines, run_program
from examples.bench.progress import Progress
from examples.bench.results_file import NUMBERS, prepare_output
from examples.multi_turn.arguments import parse
from examples.multi_turn.bench import CONVERSATIONS, Bench
from examples.multi_turn.client import MODEL
from examples.multi_turn.report import PLOTS, save_plots, summary_table, turn_table
from examples.serving import Server


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


if __name__ == "__main__":
    run_program(main)
