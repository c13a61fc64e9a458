"""``python -m examples.multi_turn``: run the benchmark, print and plot what it measured."""

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from rich.console import Console

from examples.multi_turn.arguments import INTERRUPTED, RUN_FAILED, WORTH_NOTHING, parse
from examples.multi_turn.bench import CONVERSATIONS, NUMBERS, Bench
from examples.multi_turn.client import MODEL
from examples.multi_turn.progress import Progress
from examples.multi_turn.report import PLOTS, save_plots, summary_table, turn_table
from examples.serving import Server, ServerFailed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or serve for somebody else's; return the exit code."""
    bench, serve_only = parse(argv)
    return serve(bench) if serve_only else run(bench)


def serve(bench: Bench) -> int:
    """Serve the first contender until interrupted; return the exit code."""
    console = Console()

    def on_ready(server: Server, model: str) -> None:
        console.print(
            f"{server.url} serves {MODEL!r}, until Ctrl-C. vLLM's own benchmark:\n\n"
            f"python benchmark_serving_multi_turn.py --url {server.url} --served-model-name {MODEL}"
            f" --model {model} --input-file {bench.output / CONVERSATIONS}"
            f" --num-clients {bench.plan.clients}"
            f" --max-active-conversations {bench.plan.active}",
            highlight=False,
            soft_wrap=True,
        )

    try:
        bench.serve(lambda who, what, _: console.print(f"{who}: {what}"), on_ready)
    except ServerFailed as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return RUN_FAILED
    except KeyboardInterrupt:
        console.print("Stopped.")
    return 0


def run(bench: Bench) -> int:
    """Run ``bench``, print what it measured and what is wrong with it; return the exit code."""
    console = Console()
    for name in (NUMBERS, CONVERSATIONS, *PLOTS):
        (bench.output / name).unlink(missing_ok=True)
    _introduce(console, bench)
    try:
        with Progress(console, bench.requests) as progress:
            bench.run(progress.show)
    except ServerFailed as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return RUN_FAILED
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return INTERRUPTED
    if summaries := bench.summaries:
        console.print(turn_table(summaries))
        title = (
            f"Medians of {bench.plan.rounds} rounds, and their ratios to {next(iter(summaries))}"
        )
        console.print(summary_table(summaries, title))
        _plot(console, bench)
    console.print(f"Numbers: {bench.output / NUMBERS}", highlight=False, soft_wrap=True)
    for problem in bench.problems:
        console.print(problem, style="bold red", markup=False, highlight=False, soft_wrap=True)
    return WORTH_NOTHING if bench.problems else 0


def _plot(console: Console, bench: Bench) -> None:
    try:
        paths = save_plots(bench.output, bench.summaries, _what(bench))
    except ImportError as error:
        console.print(f"No plots: {error}", highlight=False, soft_wrap=True)
    else:
        console.print(f"Plots: {', '.join(map(str, paths))}", highlight=False, soft_wrap=True)


def _introduce(console: Console, bench: Bench) -> None:
    plan = bench.plan
    tokens = sum(conversation.num_tokens for conversation in bench.conversations)
    blocks = plan.num_device_blocks(bench.conversations) - 1
    console.print(
        f"{_what(bench)}: {bench.requests} requests a round, {tokens:,} tokens at the end. The "
        f"device's KV space holds {blocks * plan.block_size:,}, the host tier "
        f"{plan.host_bytes / 2**30:.1f} GiB.",
        highlight=False,
    )


def _what(bench: Bench) -> str:
    plan = bench.plan
    return (
        f"{len(bench.conversations)} conversations, {plan.active} at a time, {plan.clients} clients"
    )


def _interrupt(_signal_number: int, _frame: FrameType | None) -> None:
    """As Ctrl-C does: leave through the ``finally`` blocks that stop the server and remove its
    files. asyncio ends its tasks in order for that signal only."""
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    sys.exit(main())
