"""``python -m examples.agent_bench``: run the benchmark, print and plot its results."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from examples.agent_bench.bench import Bench
from examples.agent_bench.plan import PRESETS
from examples.agent_bench.results import PLOT, point_table, save_plot
from examples.bench.arguments import MAX_SEED, BenchParser, exit_codes
from examples.bench.command import BAD_RESULT, exit_code_of, print_lines, run_program
from examples.bench.connectors import CONTENDERS, ON_CPU
from examples.bench.progress import Progress
from examples.bench.results_file import NUMBERS, prepare_output
from examples.bench.served import add_options, vocabulary_of, with_options
from examples.bench.tokens import WordVocabulary
from examples.serving import Endpoint

CONTENDERS_ON_GPU = ("none", "ours", "builtin", "builtin-lazy", "offloading")
"""Unless others are named."""
ENDPOINT_TOKENS = 30_000
"""Most models have more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    bench = parse(argv)
    return exit_code_of(lambda: run(bench))


def run(bench: Bench) -> int:
    """Run ``bench``, print its numbers and its problems; return the exit code."""
    prepare_output("--output", bench.output, NUMBERS, PLOT)
    console, plan = Console(), bench.plan
    host = f", the host tier {plan.host_bytes / 2**30:.1f} GiB"
    if bench.endpoint is not None:
        bench.plan = plan = replace(plan, longest=bench.endpoint.served_model()[1])
        host = " (--device-tokens)"
    what = f"{plan.trace.name}, 1/{plan.scale} of its tokens"
    print_lines(
        console,
        f"{what}, pauses of 1/{plan.think_scale or plan.scale} and at most {plan.max_pause} s. "
        f"Prompts and answers of up to {plan.max_tokens:,} tokens. The device's KV space holds "
        f"{plan.device_tokens:,}{host}.",
    )
    try:
        with Progress() as progress:
            bench.run(progress.show)
    finally:
        report(bench, console, what)
    return BAD_RESULT if bench.problems else 0


def report(bench: Bench, console: Console, what: str) -> None:
    """Print all results so far."""
    summaries = bench.summaries
    if not summaries:
        return
    for agents in bench.plan.agents:
        title = f"{agents} agents, {bench.plan.seconds} s"
        if len(summaries) > 1:
            title += f", and ratios to {next(iter(summaries))}"
        console.print(point_table(summaries, agents, title))
    try:
        print_lines(console, f"Plot: {save_plot(bench.output, summaries, what)}")
    except ImportError as error:
        print_lines(console, f"No plot: {error}")
    print_lines(console, f"Numbers: {bench.output / NUMBERS}")
    print_lines(console, *bench.problems, style="bold red")


def parse(argv: Sequence[str] | None) -> Bench:
    """The benchmark. Exits if an argument is wrong."""
    parser = BenchParser(
        "agent_bench",
        "Recorded agents work with vLLM, which serves one model with one KV connector after "
        "another. Each agent sends a request, waits for the answer, pauses and goes on. Throughput "
        "and times by number of agents. Compare ratios: times hold on one machine only.",
        exit_codes(
            "measured",
            "a request was lost, a connector got no hits, or the client was too slow",
            "a server failed",
            "wrong usage, or the trace does not fit",
        ),
    )
    parser.add_argument(
        "--traces",
        required=True,
        type=Path,
        metavar="FILE",
        help="recorded requests: Claude Code sessions or Mooncake's JSONL, also .xz",
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="cpu",
        help="model and sizes. cpu: a small model. h200: 8 billion parameters, for a GPU of 80 GB "
        "or more (default: cpu)",
    )
    parser.add_names(
        "--contenders",
        "connectors, the first being the base of ratios",
        CONTENDERS,
        f"{', '.join(CONTENDERS_ON_GPU)}; on the CPU {' and '.join(ON_CPU[:2])}",
    )
    parser.add_argument(
        "--url",
        type=_endpoint,
        metavar="URL",
        help="measure a server that runs, instead of own ones with contenders. It must take "
        "prompts of token ids and ignore_eos, as vLLM does. Another --seed gives it other prompts",
    )
    parser.add_number(
        "--vocab-size",
        f"tokens of the model at --url (default: {ENDPOINT_TOKENS})",
        default=ENDPOINT_TOKENS,
        least=16,
    )
    parser.add_number(
        "--agents", "numbers of agents (default: 8 16 32; 4 8 on the CPU)", most=4096, nargs="+"
    )
    parser.add_number(
        "--seconds",
        "of each measurement, after every agent's first answer (default: 60; 20 on the CPU)",
    )
    parser.add_number("--requests", "at most in each measurement (default: no limit)")
    parser.add_number(
        "--scale", "recorded tokens for each token that is sent (default: 8; 64 on the CPU)"
    )
    parser.add_number(
        "--think-scale", "recorded seconds for each second of a pause (default: --scale)"
    )
    parser.add_number("--max-pause", "longest pause, s (default: 5; 2 on the CPU)", least=0)
    add_options(parser)
    parser.add_argument(
        "--compilation-config",
        type=_json,
        metavar="JSON",
        help='vLLM\'s. {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} starts sooner than the '
        "default: nothing is compiled, and decoding has CUDA graphs",
    )
    parser.add_number(
        "--seed", "of the prompts and of the sessions' order (default: 0)", least=0, most=MAX_SEED
    )
    parser.add_output("--output", "agent-bench-out", "numbers, a plot and logs")
    arguments = parser.parse_args(argv)
    plan = with_options(
        PRESETS[arguments.preset],
        arguments,
        trace=arguments.traces,
        agents=arguments.agents and tuple(sorted(set(arguments.agents))),
        seconds=arguments.seconds,
        requests=arguments.requests,
        scale=arguments.scale,
        think_scale=arguments.think_scale,
        max_pause=arguments.max_pause,
        compilation=arguments.compilation_config,
    )
    if arguments.url is not None:
        if arguments.contenders is not None:
            parser.error("argument --contenders: a server at --url has its own connector")
        plan = replace(plan, shape=None, model=None)
        vocabulary = WordVocabulary(arguments.vocab_size)
        return Bench(plan, vocabulary, [], arguments.output, arguments.url)
    contenders = parser.contenders(arguments.contenders, plan.device, CONTENDERS_ON_GPU)
    return Bench(plan, vocabulary_of(parser, plan), contenders, arguments.output)


def _endpoint(text: str) -> Endpoint:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address such as http://127.0.0.1:8000, with http or https"
        )
    return Endpoint(text.rstrip("/").removesuffix("/v1"))


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


if __name__ == "__main__":
    run_program(main)
