"""One contender in a process of its own: an engine, its parts, an end.

``python -m examples.engine_bench.engine_run --plan JSON --contender NAME --parts A,B
--repeats R --model DIR --results-fd N``. What happens goes to file descriptor N, one JSON object a
line: ``{"phase": ...}``, ``{"done": n, "of": m}``, and after each repeat ``{"run": ...}``. The
engine's own log goes to the standard streams.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from examples.engine_bench import parts as work
from examples.engine_bench.client import Client, RequestLost
from examples.engine_bench.contenders import CONTENDERS, Contender
from examples.engine_bench.plan import Part, Plan

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Tell = Callable[[dict[str, Any]], None]

_COUNTERS = {
    "vllm:external_prefix_cache_hits": "external_hits",
    "vllm:num_preemptions": "preemptions",
}
"""vLLM's, and what they are called in a run."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", required=True)
    parser.add_argument("--contender", required=True)
    parser.add_argument("--parts", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--results-fd", type=int, required=True)
    arguments = parser.parse_args()
    os.set_inheritable(arguments.results_fd, False)
    # So that the engine's process is ended in order when the parent wants an end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    plan = Plan.from_json(json.loads(arguments.plan))
    names = cast(list[Part], arguments.parts.split(","))
    with os.fdopen(arguments.results_fd, "w", buffering=1) as results:

        def tell(event: dict[str, Any]) -> None:
            results.write(json.dumps(event) + "\n")

        contender = CONTENDERS[arguments.contender]
        asyncio.run(run(plan, contender, names, arguments.repeats, arguments.model, tell))


async def run(
    plan: Plan, contender: Contender, names: Sequence[Part], repeats: int, model: Path, tell: Tell
) -> None:
    """Start the engine, play the parts so many times, each time with prompts of their own, tell
    what came out, shut the engine down."""
    tell({"phase": "starting the engine"})
    before = time.perf_counter()
    engine = _engine(plan, contender, model)
    start_seconds = time.perf_counter() - before
    try:
        tell({"phase": "warming up"})
        await _warm_up(plan, Client(engine, plan.settle_seconds, lambda: None))
        for repeat in range(repeats):
            counted = {name: _counter(name) for name in _COUNTERS}
            numbers, replies, lost = await _play(plan.with_other_texts(repeat), engine, names, tell)
            result = {
                "repeat": repeat,
                "start_seconds": start_seconds,
                "numbers": numbers,
                "lost": lost,
                "replies": replies,
                "machine": _machine(),
            } | {key: _counter(name) - counted[name] for name, key in _COUNTERS.items()}
            tell({"run": result})
            if lost:
                break  # what else runs is not what was to be measured
    finally:
        engine.shutdown()


async def _play(
    plan: Plan, engine: "AsyncLLM", names: Sequence[Part], tell: Tell
) -> tuple[dict[str, work.Numbers], list[dict[str, Any]], list[str]]:
    """Numbers by part, replies that everybody has to agree on, and what was lost."""
    of = sum(work.requests_of(name, plan) for name in names)
    done = 0

    def on_reply() -> None:
        nonlocal done
        done += 1
        tell({"done": done, "of": of})

    client = Client(engine, plan.settle_seconds, on_reply)
    numbers: dict[str, work.Numbers] = {}
    lost: list[str] = []
    for name in names:
        tell({"phase": name})
        await client.settle()
        try:
            numbers[name] = await work.RUN[name](client, plan)
        except RequestLost as error:
            lost.append(f"{name}: {error}")
            break
    return numbers, work.to_json(client.replies), lost


def _engine(plan: Plan, contender: Contender, model: Path) -> "AsyncLLM":
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = contender.transfer_config(plan.host_bytes)
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": plan.model.dtype,
        "load_format": "dummy" if plan.device == "cuda" else "auto",
        "enforce_eager": not plan.graphs,
        "enable_prefix_caching": True,
        "block_size": plan.block_size,
        "num_gpu_blocks_override": plan.device_tokens // plan.block_size + 1,  # vLLM's null block
        "max_model_len": plan.max_model_len,
        "max_num_batched_tokens": max(plan.prompt_tokens, 2048),
        "tensor_parallel_size": plan.tensor_parallel,
        "disable_log_stats": False,
    }
    if transfer is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def _warm_up(plan: Plan, client: Client) -> None:
    """Let one-time costs fall due: a short and a long prompt, and the long one as a hit."""
    await client.ask("short", plan.text(64, "warm-up"), 2)
    long = plan.text(plan.prompt_tokens, "warm-up", "long")
    for _ in range(2):
        await client.ask("long", long, plan.first_tokens)
    await client.settle()


def _counter(name: str) -> float:
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    return sum(
        metric.value
        for metric in get_metrics_snapshot()
        if isinstance(metric, Counter) and metric.name == name
    )


def _machine() -> dict[str, Any]:
    import torch
    import vllm
    from vllm.platforms import current_platform

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": current_platform.get_device_name() or current_platform.device_type,
        "cores": len(os.sched_getaffinity(0)),
    }


if __name__ == "__main__":
    main()
