"""``simple-offload size``: how much host memory, from a trace of requests and a model."""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from simple_offload.cli.arguments import Parser, number, whole_number
from simple_offload.cli.console import make_console
from simple_offload.config import ConfigError
from simple_offload.memory import GIB
from simple_offload.sizing.curve import MissRatioCurve
from simple_offload.sizing.model_bytes import ModelBytes, plan_model
from simple_offload.sizing.playback import play
from simple_offload.sizing.traces import Trace, read_trace

_NEARLY_ALL = 0.99
"""Of what host memory of any size adds. More memory than for this is waste."""
_LITTLE = 0.05
"""Likewise. Less memory than for this is not shown."""
_MAX_ROWS = 10
_POWERS = range(-10, 21)
"""Of two, in GiB: 1 MiB to 1 PiB."""
_gib = number("from 0 to 1e12", lambda each: 0 <= each <= 1e12)


@dataclass(frozen=True)
class _Size:
    """A row of the table."""

    host_memory_gib: float
    tokens: int
    """That fit."""
    found_tokens: int
    hit_ratio: float


@dataclass(frozen=True)
class _TokenBytes:
    """Bytes of a token, with its share of windows and states."""

    on_devices: float
    in_host: float


def add_arguments(parser: Parser) -> None:
    """Those of ``simple-offload size``, and its help."""
    parser.description = (
        "size plays the prompts of a trace, and shows how many of their tokens host memory of each "
        "size would have found. With --model alone it shows the KV bytes of a token."
    )
    parser.epilog = "exit codes: 0 done; 2 wrong usage, or a model that vLLM does not plan"
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="recorded requests: Mooncake's JSONL, sessions of agents, or LMCache's lookup log "
        "(.xz and .gz too)",
    )
    parser.add_argument(
        "--kv-bytes-per-token",
        type=number("from 1 to 1e12", lambda each: 1 <= each <= 1e12),
        metavar="N",
        help="of all ranks together",
    )
    parser.add_argument(
        "--model", type=Path, metavar="CONFIG.JSON", help="vLLM counts its KV bytes of a token"
    )
    parser.add_argument(
        "--tensor-parallel-size", "-tp", type=whole_number, default=1, metavar="N", help="as vLLM's"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", metavar="TYPE", help="as vLLM's")
    parser.add_argument("--block-size", type=whole_number, metavar="TOKENS", help="as vLLM's")
    parser.add_argument(
        "--speculative-config", "-sc", type=_drafter, metavar="JSON", help="as vLLM's"
    )
    parser.add_argument(
        "--device-memory",
        type=_gib,
        default=0.0,
        metavar="GIB",
        help="KV cache of all devices together, in front of the host memory (default: 0)",
    )
    parser.add_argument(
        "--host-memory",
        type=_gib,
        nargs="+",
        metavar="GIB",
        help="sizes (default: those that make a difference)",
    )
    parser.add_argument(
        "--agents",
        type=whole_number,
        default=8,
        metavar="N",
        help="sessions that run at a time, if the trace has sessions (default: 8)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the answer; return the exit code. Raises ConfigError for wrong input."""
    _check(arguments)
    trace = read_trace(arguments.trace) if arguments.trace else None
    model = None
    if arguments.model:
        model = plan_model(
            arguments.model,
            arguments.tensor_parallel_size,
            arguments.kv_cache_dtype,
            arguments.block_size,
            arguments.speculative_config,
        )
    console = make_console()
    answer: dict[str, Any] = {}
    if model:
        answer["model"] = _describe(model)
        if not arguments.json:
            _show_model(console, model)
    if trace:
        token = _token_bytes(arguments.kv_bytes_per_token, model, trace)
        curve = play(trace, arguments.agents)
        device_tokens = arguments.device_memory * GIB / token.on_devices
        sizes = _sizes(arguments.host_memory, curve, trace, token, device_tokens)
        most = curve.hit_ratio(math.inf)
        answer |= {
            "trace": _describe_trace(trace),
            "bytes_per_token": asdict(token),
            "device_tokens": int(device_tokens),
            "sizes": [asdict(each) for each in sizes],
            "hit_ratio_of_any_size": most,
        }
        if not arguments.json:
            _show_trace(console, answer, arguments.agents if trace.has_sessions else None)
            _show_sizes(console, sizes, most)
    if arguments.json:
        console.out(json.dumps(answer, indent=1))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.trace is None and arguments.model is None:
        raise ConfigError("nothing to size. Allowed: --trace FILE, --model CONFIG.JSON, or both")
    if arguments.model is not None and arguments.kv_bytes_per_token is not None:
        raise ConfigError("--kv-bytes-per-token and --model: one of them counts the KV bytes")
    if arguments.trace is None:
        for name in ("kv_bytes_per_token", "host_memory", "device_memory"):
            if getattr(arguments, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs --trace FILE")
    elif arguments.model is None and arguments.kv_bytes_per_token is None:
        raise ConfigError("--trace needs --kv-bytes-per-token N or --model CONFIG.JSON")


def _token_bytes(given: float | None, model: ModelBytes | None, trace: Trace) -> _TokenBytes:
    """Each prompt keeps windows and states at its end. The distinct tokens share their bytes."""
    if model is None:
        assert given is not None
        return _TokenBytes(given, given)
    num_tokens = max(1, trace.num_blocks) * trace.block_tokens
    ends = sum(map(len, trace.sessions)) / num_tokens
    on_devices = model.token_on_devices + ends * model.boundary_per_rank * model.num_ranks
    return _TokenBytes(on_devices, model.token_in_host + ends * model.boundary_in_host)


def _sizes(
    given: list[float] | None,
    curve: MissRatioCurve,
    trace: Trace,
    token: _TokenBytes,
    device_tokens: float,
) -> list[_Size]:
    prompt_tokens = _prompt_tokens(trace)

    def size(gib: float) -> _Size:
        tokens = gib * GIB / token.in_host
        ratio = curve.hit_ratio((device_tokens + tokens) / trace.block_tokens)
        return _Size(gib, int(tokens), round(ratio * prompt_tokens), ratio)

    if given:
        return [size(gib) for gib in sorted(set(given))]
    none, powers = size(0.0), [size(2.0**power) for power in _POWERS]
    gain = curve.hit_ratio(math.inf) - none.hit_ratio

    def first(share: float) -> int:
        """Place of the first power of two that brings this share of the gain."""
        least = none.hit_ratio + share * gain
        places = (place for place, each in enumerate(powers) if each.hit_ratio >= least)
        return next(places, len(powers) - 1)

    end = first(_NEARLY_ALL) + 1
    begin = max(min(first(_LITTLE), end - 1), end - _MAX_ROWS)
    return [none, *(powers[begin:end] if gain > 0 else [])]


def _describe(model: ModelBytes) -> dict[str, Any]:
    return asdict(model) | {
        "groups": [group._asdict() for group in model.groups],
        "bytes_of_a_token": {
            "on_each_rank": model.token_per_rank,
            "on_devices": model.token_on_devices,
            "in_host_memory": model.token_in_host,
        },
        "bytes_of_a_boundary": {
            "on_each_rank": model.boundary_per_rank,
            "in_host_memory": model.boundary_in_host,
        },
    }


def _describe_trace(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "requests": sum(map(len, trace.sessions)),
        "sessions": len(trace.sessions) if trace.has_sessions else None,
        "block_tokens": trace.block_tokens,
        "prompt_tokens": _prompt_tokens(trace),
        "distinct_tokens": trace.num_blocks * trace.block_tokens,
    }


def _prompt_tokens(trace: Trace) -> int:
    return sum(request.prompt_tokens for session in trace.sessions for request in session)


def _show_model(console: Console, model: ModelBytes) -> None:
    ranks = f"{model.num_ranks} ranks" if model.num_ranks > 1 else "1 rank"
    console.out(f"{model.architecture} on {ranks}, as vLLM plans it for {model.platform}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("KV cache groups", "layers", "tokens of a block", "kept for a hit"):
        table.add_column(column, justify="left" if column == "KV cache groups" else "right")
    kind = attrgetter("kind", "block_tokens", "num_boundary_blocks")
    for (name, block_tokens, num_blocks), groups in groupby(model.groups, kind):
        layers = "+".join(f"{group.num_layers}" for group in groups)
        kept = f"{num_blocks} blocks at its end" if num_blocks else "every block"
        table.add_row(name, layers, f"{block_tokens:,}", kept)
    console.print(table)
    text = f"A token has {model.token_per_rank:,.0f} bytes on each rank"
    if model.num_ranks > 1:
        text += f", {model.token_on_devices:,.0f} on all"
        text += f", {model.token_in_host:,.0f} in host memory"
        if model.num_sharing > 1:
            text += f" (one copy for {model.num_sharing} ranks)"
    console.out(f"{text}.")
    if model.boundary_in_host:
        console.out(
            f"The end of a prefix has {model.boundary_in_host:,} bytes of windows and states more "
            "in host memory. A hit ends only where they are kept.",
        )
    if model.token_in_host:
        console.out(f"A GiB of host memory holds {GIB / model.token_in_host:,.0f} tokens.")


def _show_trace(console: Console, answer: dict[str, Any], num_agents: int | None) -> None:
    trace, token = answer["trace"], answer["bytes_per_token"]
    text = f"{trace['name']}: {trace['requests']:,} requests"
    if num_agents is not None:
        text += f" of {trace['sessions']:,} sessions, {num_agents} at a time (--agents)"
    text += f"; {trace['prompt_tokens']:,} prompt tokens, {trace['distinct_tokens']:,} distinct"
    console.out(f"{text}.")
    text = f"A token takes {token['in_host']:,.0f} bytes of host memory"
    if answer["device_tokens"]:
        text += f"; the devices hold {answer['device_tokens']:,} tokens"
    console.out(f"{text}.")


def _show_sizes(console: Console, sizes: list[_Size], most: float) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("host memory", "tokens that fit", "prompt tokens found", "hit ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in sizes:
        cells = (
            f"{each.host_memory_gib:,.10g} GiB",
            f"{each.tokens:,}",
            f"{each.found_tokens:,}",
            f"{each.hit_ratio:.1%}",
        )
        plot = [Bar(1.0, 0.0, each.hit_ratio, width=30, color="cyan")] * console.is_terminal
        table.add_row(*cells, *plot)
    console.print(table)
    console.out(f"Memory of any size finds {most:.1%} at most.")


def _drafter(text: str) -> dict[str, Any]:
    try:
        drafter = json.loads(text)
    except ValueError:
        drafter = None
    if not isinstance(drafter, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return drafter
