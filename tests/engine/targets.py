"""The targets, engines and requests of the tests on a GPU."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from tests.engine.compare import Rounding
from tests.engine.shrunk import RANDOM_WEIGHTS
from tests.engine.spec import Ask, Round
from tests.engine.workloads import follow_ups, shared_prefix_asks

COLD, AGAIN, TOGETHER, FOLLOW_UPS, CORRUPTED = range(5)
"""Numbers of the rounds."""

ONE_BY_ONE = (COLD, AGAIN)

PLENTY, FEW = 2048, 10
"""Device blocks: more than all rounds fill; of LARGE ones, one and a quarter of the longest
requests."""
LARGE: dict[str, Any] = {"block_size": 128}
"""Loads of such blocks are divided by layer group."""

EAGER: dict[str, Any] = {"enforce_eager": True}
COMPILED: dict[str, Any] = {"enforce_eager": False}
"""vLLM's default: torch.compile and piecewise CUDA graphs. Takes long to start."""
DECODE_GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}
"""Nothing is compiled, and each decode step is one graph. Starts as fast as an eager engine."""


class Target(NamedTuple):
    """A model, a device, and the rounding there."""

    kind: str
    """For ``save_device_model``."""
    arguments: Mapping[str, Any]
    """For EngineArgs."""
    rounding: Rounding
    few_blocks: int | None = None
    """Device blocks of the engines with a connector; None: PLENTY."""
    same_hits: bool = True
    """Whether host hits are as long as device hits. Each tier keeps other states and windows."""


GPU: dict[str, Any] = {
    "dtype": "float16",
    # vLLM then measures no memory, so that several tests may share a GPU.
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 8 << 30,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "num_gpu_blocks_override": PLENTY,
    "enable_prefix_caching": True,
}
CPU: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": PLENTY // 2}
SINGLE = Rounding(5e-4, lead=1e-3)
HALF = Rounding(0.05, lead=0.1)
"""In float16 the logprobs of these models differ by 0.02 at most. In bfloat16 they differ by ten
times as much, which would hide a wrong block."""
COARSE = Rounding(0.5, lead=1.0, same_shape=0.05)
"""For models that vLLM serves in bfloat16 only."""


def _shrunk(
    kind: str, rounding: Rounding, host: Mapping[str, Any] = GPU, **arguments: Any
) -> Target:
    """A model of ``tests.engine.shrunk``."""
    usual = {**host, "load_format": RANDOM_WEIGHTS}
    return Target(kind, usual | arguments, rounding, same_hits=False)


def _drafts(method: str, tokens: int) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": tokens}}


_PAIR: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}

TARGETS: dict[str, Target] = {
    "llama": Target("llama", GPU | LARGE, HALF, few_blocks=FEW),
    # vLLM serves Gemma in no float16. In float32 Triton computes attention, with as few digits.
    "gemma3": Target("gemma3", GPU | LARGE | {"dtype": "float32"}, HALF),
    "mla": Target("mla", GPU | LARGE, HALF),
    "hybrid": Target("hybrid", GPU, HALF, same_hits=False),
    # FlashAttention 3 takes attention sinks in bfloat16 only.
    "gpt-oss-eagle3": _shrunk("gpt-oss-eagle3", COARSE, dtype="bfloat16", **_drafts("eagle3", 3)),
    "drafted-gemma3": _shrunk("drafted-gemma3", HALF, dtype="float32", **_drafts("draft_model", 3)),
    "step3p5-mtp": _shrunk("step3p5-mtp", HALF, **_drafts("mtp", 3)),
    "llama4": _shrunk("llama4", HALF, **LARGE),
    "minimax-m3": _shrunk("minimax-m3", COARSE, dtype="bfloat16", block_size=128),
    "kimi-k3": _shrunk("kimi-k3", COARSE, dtype="bfloat16", **_drafts("mtp", 1)),
    "llama-pair": Target("llama", GPU | LARGE | _PAIR, HALF),
    "mla-pair": Target("mla", GPU | _PAIR, HALF),
    "one-kv-head-pair": Target("llama-one-kv-head", GPU | _PAIR | {"block_size": 16}, HALF),
    "mimo-mtp-pair": _shrunk("mimo-mtp", HALF, **_PAIR, **_drafts("mtp", 1)),
    # Attention that both ranks have alike, and states, which they share out. (vLLM's Kimi-K3, which
    # has MLA instead, needs CUTLASS's Python package with several ranks.)
    "hybrid-pair": Target("hybrid-one-kv-head", GPU | _PAIR, HALF, same_hits=False),
    "llama4-on-cpu": _shrunk("llama4", SINGLE, CPU),
    "mimo-mtp-on-cpu": _shrunk("mimo-mtp", SINGLE, CPU, **_drafts("mtp", 1)),
    "gpt-oss-eagle3-on-cpu": _shrunk("gpt-oss-eagle3", SINGLE, CPU, **_drafts("eagle3", 3)),
}

SIZED = {"cpu_bytes_to_use": "512MiB", "keep_on_device_reset": True}
KERNEL = SIZED | {"copy_path": "kernel", "kv_layout": "auto", "sync_load_ms": 8}
DMA_KEEP = SIZED | {"copy_path": "dma", "kv_layout": "keep", "sync_load_ms": 8}
KERNEL_KEEP = SIZED | {"copy_path": "kernel", "kv_layout": "keep", "sync_load_ms": 0}
DMA = SIZED | {"copy_path": "dma", "kv_layout": "auto", "sync_load_ms": 0}


class Engine(NamedTuple):
    """One engine with the connector."""

    connector: Mapping[str, Any]
    mode: Mapping[str, Any]
    """For EngineArgs: eager, or the kind of graphs."""


_DEFAULTS = {"defaults": Engine(SIZED, EAGER)}
_GRAPHS = _DEFAULTS | {"graphs": Engine(SIZED, DECODE_GRAPHS)}

ENGINES: dict[str, dict[str, Engine]] = {
    **dict.fromkeys((name for name in TARGETS if not name.endswith("-pair")), _DEFAULTS),
    "llama": {
        **_DEFAULTS,
        "compiled": Engine(SIZED, COMPILED),
        "kernel": Engine(KERNEL, EAGER),
        "dma-keep": Engine(DMA_KEEP, EAGER),
        "kernel-keep": Engine(KERNEL_KEEP, EAGER),
        "dma": Engine(DMA, DECODE_GRAPHS),
    },
    **dict.fromkeys(("gemma3", "mla", "hybrid"), _GRAPHS),
}
"""Engines that combine each pair of copy path, layout and announcement at least once, with
Llama."""


@cache
def asks() -> tuple[Ask, ...]:
    """Prompts of a few hundred tokens: several blocks even where a block has 64 or 128 tokens."""
    return shared_prefix_asks(
        "a", seed=3, system_lengths=(420, 290, 550), tails=3, tail_lengths=(66, 200), max_tokens=24
    )


def rounds(*, connector: bool) -> tuple[Round, ...]:
    """With the connector, the device is reset before each round that has to hit in the host tier.
    The last round loads a corrupted host block."""
    reset: Any = "device" if connector else "none"
    turns = follow_ups(asks(), "turn", seed=4)
    # Long answers outgrow a small device pool, whose requests then preempt one another.
    long = tuple(ask._replace(max_tokens=72) for ask in reversed(asks()))
    return (
        Round(asks=asks(), together=False),
        Round(asks=asks(), together=False, reset=reset),
        Round(asks=long, together=True, reset=reset),
        Round(asks=turns, together=True, reset=reset),
        Round(asks=asks(), together=False, reset=reset, corrupt_a_block=connector),
    )
