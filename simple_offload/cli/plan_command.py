"""``simple-offload plan``: arguments in, tables or JSON out."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from simple_offload.cli.arguments import CommandError, Parser, count, number, size
from simple_offload.cli.kv_shape import KV_DTYPES, KVShape, kv_shape, read_config
from simple_offload.cli.output import make_console
from simple_offload.cli.plan import (
    GIB,
    Server,
    Tier,
    Times,
    device_kv_bytes,
    measured_bandwidth,
    tiers,
    times,
    weight_bytes,
)

NOTES = tuple(
    " ".join(note.split())
    for note in (
        """KV of a token: layers x 2 x KV heads of a rank x head size x bytes of an element; MLA:
        layers x (kv_lora_rank + qk_rope_head_dim) x bytes (vLLM's AttentionSpec and
        MLAAttentionSpec).""",
        """Layers are grouped as vLLM's get_kv_cache_groups does; a block belongs to one group. On
        the device a layer with a window keeps the window; the host tier gets every full block, so
        its figures are the least it holds.""",
        """Device KV: GPU memory x utilization - weights / ranks - overhead. vLLM measures the real
        figure at start and logs it ("Available KV cache memory"): give it as --gpu-kv-memory.""",
        """Hit: bytes of the conversation on a rank / bandwidth + TTFT of a device hit, for one
        request alone. Recompute: tokens / prefill speed.""",
    )
)


def add_to(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "plan",
        help="what GPU and host memory hold of a model's KV, and what a hit saves",
        description=(
            "From a model's config.json: bytes of KV a token, tokens and conversations that each "
            "tier holds, and the expected time to first token of a hit beside recomputing."
        ),
        epilog="exit codes: 0 planned; 2 wrong input, or a model that cannot be sized",
    )
    parser.set_defaults(run=run, parser=parser)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="a model's folder, or its config.json")
    add("--gpu-memory", type=size, metavar="SIZE", help='of each GPU, such as "80GiB"')
    add(
        "--gpu-memory-utilization",
        type=number(most=1),
        default=0.9,
        metavar="PART",
        help="as vLLM's option of that name (default: 0.9)",
    )
    add(
        "--weights",
        type=size,
        metavar="SIZE",
        help="of the whole model (default: of the safetensors files beside config.json)",
    )
    add(
        "--overhead",
        type=size,
        default=4 * GIB,
        metavar="SIZE",
        help="activations and graphs on each GPU (default: 4GiB, an assumption)",
    )
    add(
        "--gpu-kv-memory",
        type=size,
        metavar="SIZE",
        help="KV space of each GPU, in place of the four options above",
    )
    add(
        "--host-memory",
        type=size,
        required=True,
        metavar="SIZE",
        help="of the whole server's host tier (cpu_bytes_to_use)",
    )
    add("--tensor-parallel", type=count, default=1, metavar="N", help="ranks (default: 1)")
    add("--kv-cache-dtype", choices=list(KV_DTYPES), default="auto", help="default: auto")
    add("--block-size", type=count, default=16, metavar="TOKENS", help="default: 16")
    add(
        "--conversation",
        type=count,
        default=8192,
        metavar="TOKENS",
        help="length of a conversation (default: 8192)",
    )
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument(
        "--bandwidth", type=number(), metavar="GB/S", help="of loads, in 10^9 bytes a second"
    )
    speed.add_argument(
        "--copy-bench",
        type=Path,
        metavar="FILE",
        help="result.json of `simple-offload bench copy`, in place of --bandwidth",
    )
    add(
        "--prefill-speed",
        type=number(),
        metavar="TOKENS/S",
        help="of recomputing, to compare a hit with",
    )
    add(
        "--device-hit-ms",
        type=number(),
        default=15.0,
        metavar="MS",
        help="TTFT of a hit in device memory (default: 15, an assumption)",
    )
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. CommandError."""
    config = read_config(arguments.model)
    ranks = arguments.tensor_parallel
    shape = kv_shape(config, tensor_parallel=ranks, kv_dtype=arguments.kv_cache_dtype)
    server = Server(ranks, _device_kv_bytes(arguments), arguments.host_memory, arguments.block_size)
    held = tiers(shape, server, arguments.conversation)
    bandwidth = _bandwidth(arguments, shape.block_bytes(arguments.block_size))
    expected = None
    if bandwidth is not None:
        expected = times(
            shape,
            arguments.block_size,
            arguments.conversation,
            bandwidth,
            arguments.device_hit_ms / 1e3,
            arguments.prefill_speed,
        )
    if arguments.json:
        print(json.dumps(_to_json(shape, server, arguments, held, bandwidth, expected), indent=1))
    else:
        _show(make_console(), shape, server, arguments, held, bandwidth, expected)
    return 0


def _device_kv_bytes(arguments: argparse.Namespace) -> int:
    if arguments.gpu_kv_memory is not None:
        return int(arguments.gpu_kv_memory)
    if arguments.gpu_memory is None:
        raise CommandError("--gpu-memory is missing. Allowed: that, or --gpu-kv-memory")
    weights = arguments.weights or weight_bytes(arguments.model)
    if weights is None:
        raise CommandError(
            "--weights is missing, and there are no safetensors files beside config.json to take "
            "their size. Allowed: --weights, or --gpu-kv-memory"
        )
    return device_kv_bytes(
        arguments.gpu_memory,
        arguments.gpu_memory_utilization,
        weights,
        arguments.tensor_parallel,
        arguments.overhead,
    )


def _bandwidth(arguments: argparse.Namespace, block_bytes: int) -> float | None:
    if arguments.copy_bench is not None:
        return measured_bandwidth(arguments.copy_bench, block_bytes)
    return None if arguments.bandwidth is None else arguments.bandwidth * 1e9


def _to_json(
    shape: KVShape,
    server: Server,
    arguments: argparse.Namespace,
    held: list[Tier],
    bandwidth: float | None,
    expected: Times | None,
) -> dict[str, Any]:
    groups = [{**asdict(group), "kind": group.kind.value} for group in shape.groups]
    return {
        "model_type": shape.model_type,
        "groups": groups,
        "token_bytes_per_rank": shape.token_bytes,
        "block_bytes_per_rank": shape.block_bytes(server.block_size),
        "server": asdict(server),
        "conversation_tokens": arguments.conversation,
        "tiers": [asdict(tier) for tier in held],
        "bytes_per_second": bandwidth,
        "ttft_seconds": None if expected is None else asdict(expected),
        "notes": NOTES,
    }


def _show(
    console: Console,
    shape: KVShape,
    server: Server,
    arguments: argparse.Namespace,
    held: list[Tier],
    bandwidth: float | None,
    expected: Times | None,
) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    kinds: dict[str, int] = {}
    for group in shape.groups:
        name = group.kind.value + (f" (window {group.window})" if group.window else "")
        kinds[name] = kinds.get(name, 0) + group.layers
    layers = ", ".join(f"{number} {name}" for name, number in kinds.items())
    say(f"{shape.model_type}: {layers} layers in {len(shape.groups)} groups, {server.ranks} ranks")
    say(
        f"KV: {shape.token_bytes} bytes a token and rank, "
        f"{_size(shape.block_bytes(server.block_size))} a block of {server.block_size} tokens"
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("tier")
    for heading in (
        "GiB a rank",
        "blocks a rank",
        "tokens",
        f"conversations of {arguments.conversation}",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for tier in held:
        table.add_row(
            tier.name,
            f"{tier.bytes_per_rank / GIB:.1f}",
            f"{tier.blocks:,}",
            f"{tier.tokens:,}",
            f"{tier.conversations:,}",
        )
    console.print(table)
    if expected is None or bandwidth is None:
        say("No TTFT: give --bandwidth or --copy-bench (and --prefill-speed).")
    else:
        say(
            f"TTFT of a hit of {arguments.conversation} tokens: {expected.hit * 1e3:.1f} ms "
            f"({_size(expected.hit_bytes_per_rank)} a rank at {bandwidth / 1e9:.1f} GB/s: "
            f"{expected.load * 1e3:.1f} ms)"
        )
        if expected.recompute is not None:
            say(
                f"Recomputed: {expected.recompute * 1e3:.1f} ms, "
                f"{expected.recompute / expected.hit:.1f} times as long"
            )
    say("")
    for note in NOTES:
        say(f"- {note}")


def _size(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} bytes"
