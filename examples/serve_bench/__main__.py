"""``python -m examples.serve_bench``: run the benchmark, print and plot its results."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from examples.bench.arguments import MAX_SEED, BenchParser, exit_codes
from examples.bench.command import BAD_RESULT, exit_code_of, print_lines, run_program
from examples.bench.connectors import CONTENDERS, ON_CPU, PACKAGE, Contender, before
from examples.bench.models import DEEPSEEK_LITE
from examples.bench.progress import Progress
from examples.bench.results_file import NUMBERS, prepare_output
from examples.serve_bench.bench import CONVERSATIONS, MODEL, Bench
from examples.serve_bench.conversations import InputError
from examples.serve_bench.plan import H200, PRESETS, TRANSPORTS, WORKLOADS, Plan
from examples.serve_bench.results import PLOT, save_plot, start_line, summaries, workload_tables
from examples.serving import Endpoint

DEFAULT = ("none", "ours", "builtin", "builtin-lazy", "offloading")
"""Contenders, unless others are named."""
ENDPOINT_TOKENS = 30_000
"""Most models have more."""
PIPE_COLUMNS = 160
"""Width of tables that go to no terminal."""

_NUMBERS = (
    ("--rounds", "engines of each contender (default: 1)", 1, None),
    ("--repeats", "of the work by each engine, with other prompts (default: 3; CPU 1)", 1, None),
    ("--seed", "of all prompts (default: the preset's)", 0, MAX_SEED),
    ("--kv-heads", "of a made model; 1 is the share of each of 8 ranks", 1, None),
    ("--device-tokens", "capacity of the device's KV space (default: the preset's)", 1, None),
    ("--host-gib", "size of the host tier (default: the preset's)", 1, None),
    ("--tensor-parallel", "ranks (default: 1)", 1, None),
    ("--prompt-tokens", "of prompts that come back as hits (default: 8192; CPU 1024)", 1, None),
    ("--num-clients", "that ask at the same time in turns (default: the preset's)", 1, None),
    ("--max-active-conversations", "begun and not ended, of all clients together", 1, None),
    ("--seconds", "of agents (default: 60; CPU 20; no limit with --requests)", 1, None),
    ("--requests", "of all agents in each measurement (default: no limit)", 1, None),
    ("--scale", "recorded tokens for each one that is sent (default: 8; CPU 64)", 1, None),
    ("--think-scale", "recorded seconds for each one of a pause (default: --scale)", 1, None),
    ("--max-pause", "longest pause of an agent, s (default: 5; CPU 2)", 0, None),
    ("--vocab-size", f"of the model at --url (default: {ENDPOINT_TOKENS})", 16, None),
    ("--port", "where to serve (default: a free one)", 1, 65535),
)
"""Options with a whole number: text, least and most."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or serve for another client; return the exit code."""
    bench, serve_only = parse(argv)
    return exit_code_of(lambda: serve(bench) if serve_only else run(bench))


def serve(bench: Bench) -> int:
    """Serve the first contender until interrupted; return the exit code."""
    console = Console()
    prepare_output("--output", bench.output)
    try:
        with Progress() as progress, bench.serve(progress.show) as (server, model):
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
    prepare_output("--output", bench.output, NUMBERS, CONVERSATIONS, PLOT)
    console = Console()
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    try:
        with Progress() as progress:
            bench.run(progress.show)
    finally:
        report(bench, console)
    return BAD_RESULT if bench.problems else 0


def report(bench: Bench, console: Console) -> None:
    """Print all results so far, if there are any, and save the plot."""
    if not any(bench.runs.values()):
        return
    plan, found = bench.plan, summaries(bench.runs)
    title = f"Medians of {plan.rounds * plan.repeats}, and ratios to {bench.contenders[0].name}"
    for name in dict.fromkeys(name for by_workload in found.values() for name in by_workload):
        console.print(*workload_tables(found, name, title))
    host = f", host tier {plan.host_bytes / 2**30:.1f} GiB" if bench.endpoint is None else ""
    print_lines(console, f"Device's KV space {plan.device_tokens:,} tokens{host}.")
    start = None if bench.endpoint else start_line(bench.runs)
    facts = (bench.floor, bench.directory, start)
    print_lines(console, *(str(fact) for fact in facts if fact is not None))
    try:
        print_lines(console, f"Plot: {save_plot(bench.output, found)}" if found else "No plot")
    except ImportError as error:
        print_lines(console, f"No plot: {error}")
    print_lines(console, f"Numbers: {bench.output / NUMBERS}")
    print_lines(console, *bench.problems, style="bold red")


def parse(argv: Sequence[str] | None) -> tuple[Bench, bool]:
    """The benchmark, and True if it is only to serve. Exits if an argument is wrong."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    _check_what_goes_with_url(parser, arguments)
    plan = _plan(parser, arguments)
    bench = Bench(
        plan,
        [] if arguments.url else _contenders(parser, arguments, plan),
        arguments.output,
        files=arguments.files,
        endpoint=arguments.url,
        port=arguments.port,
    )
    return bench, arguments.serve


def _parser() -> BenchParser:
    parser = BenchParser(
        "serve_bench",
        "vLLM with one KV connector after another, and all with the same work: an engine in a "
        "process of its own, or `vllm serve` and its clients. Compare ratios: times hold on one "
        "machine only.",
        f"Conversations are those of the preset, or of a file as for vLLM's benchmarks/multi_turn/"
        f"benchmark_serving_multi_turn.py. All prompts of a run are written to {CONVERSATIONS}, "
        "which vLLM's script reads in turn.\n\n"
        + exit_codes(
            "measured",
            "a request was lost, answers differ, a connector got no hits, or the client was slow",
            "a process or a server failed",
            "wrong usage, or the trace does not fit",
        ),
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="cpu",
        help="model, sizes and conversations. cpu: a small model. h200: 8 billion parameters, for "
        "a GPU of 80 GB or more. fits: one of those two, by the machine, with room for all "
        "conversations on the device. seed: Qwen3-14B's shape and vLLM's own conversations "
        "(default: cpu)",
    )
    parser.add_names(
        "--workloads",
        "what is sent",
        WORKLOADS,
        "turns; with --traces traces. traces needs --traces, restart needs --files",
    )
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="http",
        help="engine: in the engine's process. http: `vllm serve` and its clients (default: http)",
    )
    parser.add_names(
        "--contenders",
        "connectors, the first being the base of ratios",
        CONTENDERS,
        f"{', '.join(DEFAULT)}; with --files those with files too; on the CPU "
        f"{', '.join(ON_CPU)} of these",
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="DIR",
        help=f"add the contender before: ours with the package {PACKAGE} of DIR, for example a "
        "checkout of another commit",
    )
    parser.add_argument(
        "--files",
        type=Path,
        metavar="DIR",
        help="where contenders with a second tier have their files, in folders that are removed",
    )
    parser.add_argument(
        "--url",
        type=_endpoint,
        metavar="URL",
        help="measure a server that runs, instead of own ones with contenders. It must take "
        "prompts of token ids and ignore_eos, as vLLM does. Another --seed gives it other prompts",
    )
    parser.add_output("--output", "serve-bench-out", "numbers, a plot and logs")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a model that exists, by folder or by name, instead of one that is made",
    )
    parser.add_argument(
        "--mla",
        action="store_true",
        help="a model of latent attention, whose KV all ranks have alike (GPU only)",
    )
    parser.add_argument(
        "--eager", dest="graphs", action="store_const", const=False, help="no CUDA graphs"
    )
    parser.add_argument(
        "--compilation-config",
        type=_json,
        metavar="JSON",
        help='vLLM\'s. {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} starts sooner than the '
        "default: nothing is compiled, and decoding has CUDA graphs",
    )
    parser.add_argument(
        "--input-file", type=_file, metavar="FILE", help="conversations other than the preset's"
    )
    parser.add_argument(
        "--traces",
        type=_file,
        metavar="FILE",
        help="recorded requests: Claude Code sessions or Mooncake's JSONL, also .xz",
    )
    parser.add_number(
        "--agents", "numbers of agents (default: 8 16 32; 4 8 on the CPU)", most=4096, nargs="+"
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the first contender until Ctrl-C and send no request: for vLLM's own script, "
        "whose command line is printed",
    )
    for option, text, least, most in _NUMBERS:
        parser.add_number(option, text, least=least, most=most)
    return parser


def _check_what_goes_with_url(parser: BenchParser, arguments: argparse.Namespace) -> None:
    if arguments.url is None:
        return
    for option in ("contenders", "before", "files", "model", "rounds", "serve"):
        if getattr(arguments, option):
            parser.error(f"argument --{option}: not with --url, whose server runs already")
    if arguments.transport != "http":
        parser.error("argument --transport: not engine with --url, but http")


def _plan(parser: BenchParser, arguments: argparse.Namespace) -> Plan:
    """The preset, changed by the options that have the names of its fields, and by others."""
    workloads = arguments.workloads or (["traces"] if arguments.traces else ["turns"])
    for workload, option in (("traces", "traces"), ("restart", "files")):
        if workload in workloads and getattr(arguments, option) is None:
            parser.error(f"argument --workloads: {workload} needs --{option}")
    if "restart" in workloads and "ttft" not in workloads:
        parser.error("argument --workloads: restart needs ttft, whose prompts it asks again")
    if arguments.serve and "turns" not in workloads:
        parser.error("argument --serve: needs the workload turns, for its conversations")
    plan = PRESETS[arguments.preset]
    if plan.fits:
        if not {"turns", "idle"}.issuperset(workloads):
            parser.error("argument --preset: fits has the workloads turns and idle alone")
        import torch

        if torch.cuda.is_available():
            plan = replace(H200, fits=True)
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    given["workloads"] = tuple(workloads)
    if arguments.agents:
        given["agents"] = tuple(sorted(set(arguments.agents)))
    if arguments.host_gib:
        given["host_bytes"] = arguments.host_gib << 30
    if arguments.requests:
        given.setdefault("seconds", None)
    prompt_tokens = given.pop("prompt_tokens", None)
    names = {field.name for field in fields(plan)}
    plan = replace(plan, **{name: value for name, value in given.items() if name in names})
    if arguments.files and arguments.input_file and plan.repeats > 1:
        parser.error("argument --repeats: 1 with --input-file, whose prompts stay in the files")
    if prompt_tokens is not None:
        plan = plan.with_prompts_of(prompt_tokens)
    plan = _with_model(parser, arguments, plan)
    return _with_conversations(parser, arguments, plan) if "turns" in workloads else plan


def _with_model(parser: BenchParser, arguments: argparse.Namespace, plan: Plan) -> Plan:
    if arguments.url or arguments.model:
        plan = replace(
            plan,
            shape=None,
            vocab_size=arguments.vocab_size or ENDPOINT_TOKENS,
        )
        try:
            plan.vocabulary()
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            parser.error(f"argument --model: {plan.model!r} cannot be read: {reason}")
        return plan
    shape = DEEPSEEK_LITE if arguments.mla else plan.shape
    assert shape is not None
    if arguments.mla and plan.device == "cpu":
        parser.error(f"argument --mla: the preset {arguments.preset} runs on the CPU")
    heads = arguments.kv_heads or shape.num_kv_heads
    if shape.num_heads % heads:
        parser.error(f"argument --kv-heads: {heads} does not divide {shape.num_heads} heads")
    return replace(plan, shape=replace(shape, num_kv_heads=heads))


def _with_conversations(parser: BenchParser, arguments: argparse.Namespace, plan: Plan) -> Plan:
    try:
        conversations = plan.conversations(plan.vocabulary())
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
    lengths = [conversation.num_tokens for conversation in conversations]
    plan = replace(plan, active=active, clients=clients, longest_conversation=max(lengths))
    return replace(plan, device_tokens=sum(map(plan.in_blocks, lengths))) if plan.fits else plan


def _contenders(parser: BenchParser, arguments: argparse.Namespace, plan: Plan) -> list[Contender]:
    allowed = ON_CPU if plan.device == "cpu" else tuple(CONTENDERS)
    for name in (named := arguments.contenders or ()):
        if name not in allowed:
            parser.error(
                f"argument --contenders: {name!r} does not run on the CPU: choose from "
                f"{', '.join(allowed)}"
            )
        if CONTENDERS[name].has_files and arguments.files is None:
            parser.error(f"argument --contenders: {name} needs --files DIR")
    files = [] if arguments.files is None else [n for n, c in CONTENDERS.items() if c.has_files]
    contenders = [CONTENDERS[name] for name in named or (*DEFAULT, *files) if name in allowed]
    if arguments.before is not None:
        if not (arguments.before / PACKAGE / "__init__.py").is_file():
            parser.error(f"argument --before: {arguments.before} has no package {PACKAGE}")
        contenders.append(before(arguments.before))
    return contenders


def _file(text: str) -> str:
    return str(Path(text).resolve())


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
