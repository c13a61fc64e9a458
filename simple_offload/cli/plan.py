"""What the tiers of a server hold, and what a hit saves: numbers only."""

import json
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simple_offload.cli.arguments import CommandError
from simple_offload.cli.kv_shape import KVShape

GIB = 1 << 30


@dataclass(frozen=True)
class Server:
    """Where the model runs. Sizes are in bytes."""

    ranks: int
    """Tensor parallel ranks, each with a device of its own."""
    device_kv_bytes: int
    """Of each device, for KV blocks."""
    host_bytes: int
    """Of the whole server (cpu_bytes_to_use)."""
    block_size: int
    """Tokens of a block."""


@dataclass(frozen=True)
class Tier:
    """What one tier holds."""

    name: str
    bytes_per_rank: int
    blocks: int
    """Of each rank."""
    tokens: int
    """Whose KV fits in all layers, however many conversations they belong to."""
    conversations: int
    """Of the asked length, whole."""


@dataclass(frozen=True)
class Times:
    """Time to first token of a request whose conversation is found, in seconds."""

    hit_bytes_per_rank: int
    load: float
    """Bytes over bandwidth."""
    hit: float
    """The load and what a device hit takes."""
    recompute: float | None
    """None where no prefill speed is given."""


def device_kv_bytes(
    gpu_bytes: int, utilization: float, weight_bytes: int, ranks: int, overhead_bytes: int
) -> int:
    """What is left of a device for KV. CommandError when that is nothing."""
    left = int(gpu_bytes * utilization) - weight_bytes // ranks - overhead_bytes
    if left <= 0:
        raise CommandError(
            f"--gpu-memory={gpu_bytes}: {gpu_bytes * utilization / GIB:.1f} GiB of it "
            f"(--gpu-memory-utilization {utilization:g}) do not hold {weight_bytes / GIB:.1f} GiB "
            f"of weights on {ranks} ranks and {overhead_bytes / GIB:.1f} GiB of activations. "
            "Allowed: more memory, or more ranks (--tensor-parallel)"
        )
    return left


def tiers(shape: KVShape, server: Server, conversation_tokens: int) -> list[Tier]:
    """The device tier and the host tier."""
    host = server.host_bytes // server.ranks
    return [
        _tier("device", shape, server.device_kv_bytes, server.block_size, conversation_tokens),
        _tier("host", shape, host, server.block_size, conversation_tokens),
    ]


def _tier(
    name: str, shape: KVShape, num_bytes: int, block_size: int, conversation_tokens: int
) -> Tier:
    # The pool's first block is vLLM's null block, in either tier.
    blocks = max(0, num_bytes // shape.block_bytes(block_size) - 1)
    stored = name == "host"  # what left a window was stored before it did
    each = shape.blocks(conversation_tokens, block_size, stored=stored)
    return Tier(name, num_bytes, blocks, blocks * block_size // len(shape.groups), blocks // each)


def times(
    shape: KVShape,
    block_size: int,
    conversation_tokens: int,
    bytes_per_second: float,
    device_hit_seconds: float,
    prefill_tokens_per_second: float | None,
) -> Times:
    """Of one request alone. Ranks load at the same time, each over a bus of its own."""
    hit_bytes = shape.blocks(conversation_tokens, block_size) * shape.block_bytes(block_size)
    load = hit_bytes / bytes_per_second
    speed = prefill_tokens_per_second
    return Times(
        hit_bytes,
        load,
        load + device_hit_seconds,
        None if speed is None else conversation_tokens / speed,
    )


def weight_bytes(model: Path) -> int | None:
    """Of the safetensors files in a model's folder; None where there are none."""
    folder = model if model.is_dir() else model.parent
    index = folder / "model.safetensors.index.json"
    try:
        return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def measured_bandwidth(results: Path, descriptor_bytes: int) -> float:
    """Bytes a second of loads of descriptors of that size, by the copy benchmark's JSON: those of
    the largest size measured that is not larger. CommandError."""
    try:
        measured: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
        rates = {
            int(row["size"]): float(row["contenders"]["auto"]["gb_per_s"]) * 1e9
            for row in measured["rows"]
            if row["way"] == "load" and "auto" in row["contenders"]
        }
    except OSError as error:
        raise CommandError(f"--copy-bench={str(results)!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"--copy-bench={str(results)!r}: not what `simple-offload bench copy` writes "
            f"(result.json): {type(error).__name__}: {error}"
        ) from None
    sizes = sorted(rates)
    if not sizes or descriptor_bytes < sizes[0]:
        raise CommandError(
            f"--copy-bench={str(results)!r}: no loads of descriptors as small as "
            f"{descriptor_bytes} bytes among {sizes}; give --bandwidth instead"
        )
    return rates[sizes[bisect_right(sizes, descriptor_bytes) - 1]]
