"""One contender in a process of its own: start an engine, play the parts, shut it down.

Reports ``{"phase": ...}``, ``{"done": n, "of": m}``, and after each repeat ``{"run": ...}``.
An engine with files goes on until nothing more is written.

Without a plan it measures one contiguous pinned copy to the device, which the bench's own process
must not touch, and reports ``{"bytes_per_second": ...}``.
"""

import asyncio
import faulthandler
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from examples.bench.child import Report, run_child
from examples.bench.connectors import Contender
from examples.bench.results_file import machine
from examples.engine_bench import parts as work
from examples.engine_bench.files import num_bytes
from examples.engine_bench.parts import Client, RequestLost
from examples.engine_bench.plan import Part, Plan

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

COPY_BYTES, COPIES = 1 << 30, 8
COPY_DEADLINE = 120
"""Seconds, after which the process ends with its stacks in the log."""
QUIET_LOOKS, LOOK_SECONDS, WRITE_DEADLINE = 3, 0.5, 120.0
"""Nothing more is written if that many looks at the files, so far apart, see the same. The longest
wait for it, in seconds."""

_COUNTERS = {
    "vllm:external_prefix_cache_hits": "external_hits",
    "vllm:num_preemptions": "preemptions",
}
"""vLLM's counters, and their names in a run."""


def run(arguments: dict[str, Any], report: Report) -> None:
    """Play the parts ``repeats`` times, each time with prompts of their own."""
    if not arguments:
        report({"bytes_per_second": _peak()})
        return
    plan = TypeAdapter(Plan).validate_python(arguments["plan"])
    contender = TypeAdapter(Contender).validate_python(arguments["contender"])
    model, folder = Path(arguments["model"]), Path(arguments["folder"])
    parts, repeats = arguments["parts"], arguments["repeats"]
    asyncio.run(_run(plan, contender, parts, repeats, model, folder, report))


async def _run(
    plan: Plan,
    contender: Contender,
    parts: Sequence[Part],
    repeats: int,
    model: Path,
    folder: Path,
    report: Report,
) -> None:
    report({"phase": "starting the engine"})
    before = time.perf_counter()
    engine = _engine(plan, contender, model)
    start_seconds = time.perf_counter() - before
    try:
        report({"phase": "warming up"})
        client = Client(engine, plan.settle_seconds, lambda: None)
        await _warm_up(plan, client, "restart" if "restart" in parts else "start")
        for repeat in range(repeats):
            counted = {name: _counter(name) for name in _COUNTERS}
            copied = {way: _copied(way) for way in ("store", "load")}
            looked_up = _lookups()
            numbers, replies, lost = await _play(
                plan.with_other_texts(repeat), engine, parts, report
            )
            if "ttft" in numbers:
                numbers["ttft"] |= _copies(plan, copied) | {"start": start_seconds}
            if "restart" in numbers:
                numbers["restart"] |= _second_tier(looked_up)
            result = {
                "repeat": repeat,
                "start_seconds": start_seconds,
                "numbers": numbers,
                "lost": lost,
                "replies": replies,
                "machine": {**machine(), "device": _device()},
            } | {key: _counter(name) - counted[name] for name, key in _COUNTERS.items()}
            report({"run": result})
            if lost:
                break  # the engine still works on the lost request, which disturbs what follows
        report({"phase": "writing files"})
        await _write_files(plan, client, folder)
    finally:
        engine.shutdown()


async def _play(
    plan: Plan, engine: "AsyncLLM", parts: Sequence[Part], report: Report
) -> tuple[dict[str, work.Numbers], list[dict[str, Any]], list[str]]:
    """Numbers by part, replies on which all contenders have to agree, and lost requests."""
    of = sum(work.num_requests(part, plan) for part in parts)
    done = 0

    def on_reply() -> None:
        nonlocal done
        done += 1
        report({"done": done, "of": of})

    client = Client(engine, plan.settle_seconds, on_reply)
    numbers: dict[str, work.Numbers] = {}
    lost: list[str] = []
    for part in parts:
        report({"phase": part, "done": done, "of": of})
        await client.settle()
        try:
            numbers[part] = await work.RUN[part](client, plan)
        except RequestLost as error:
            lost.append(f"{part}: {error}")
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
        "load_format": plan.model.load_format,
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


async def _warm_up(plan: Plan, client: Client, start: str) -> None:
    """One-time costs fall due: a short prompt, and a long one, new and as a hit. After a restart,
    one more is a hit in the files."""
    await client.ask("short", plan.text(64, "warm-up"), 2)
    for name in (start, start, "start"):
        await client.ask(name, plan.text(plan.prompt_tokens, "warm-up", name), plan.first_tokens)
    await client.settle()


async def _write_files(plan: Plan, client: Client, folder: Path) -> None:
    """Wait until no more is written. Connectors go on when the engine steps, so it gets a prompt
    that is too short to be stored."""
    seen, quiet, deadline = num_bytes(folder), 0, time.monotonic() + WRITE_DEADLINE
    while seen and quiet < QUIET_LOOKS and time.monotonic() < deadline:
        await client.ask("nudge", plan.text(plan.block_size // 2, "nudge"), 1, compared=False)
        await asyncio.sleep(LOOK_SECONDS)
        before, seen = seen, num_bytes(folder)
        quiet = quiet + 1 if seen == before else 0


def _counter(name: str) -> float:
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    return sum(
        metric.value
        for metric in get_metrics_snapshot()
        if isinstance(metric, Counter) and metric.name == name
    )


def _copied(way: str) -> tuple[float, float]:
    """Bytes that all ranks have copied between device and host, and the seconds that it took them,
    as our series and OffloadingConnector's have it. ``way``: "store" or "load"."""
    from vllm.v1.metrics.reader import Counter, Histogram, get_metrics_snapshot

    num_bytes = seconds = 0.0
    for metric in get_metrics_snapshot():
        name, direction = metric.name, metric.labels.get("direction", way)
        if isinstance(metric, Counter):
            if name == f"vllm:kv_offload_{way}_time":
                seconds += metric.value
            elif name == f"vllm:kv_offload_{way}_bytes" or (
                name == "vllm:simple_offload_bytes" and direction == way
            ):
                num_bytes += metric.value
        elif isinstance(metric, Histogram) and (
            name == "vllm:simple_offload_transfer_seconds" and direction == way
        ):
            seconds += metric.sum
    return num_bytes, seconds


def _copies(plan: Plan, before: Mapping[str, tuple[float, float]]) -> work.Numbers:
    """What has been copied since ``before`` in the part ``ttft``: bytes stored for each token of
    its prompts, the tokens for which 64 GiB have room at that rate, and bytes a second on each
    rank."""
    numbers: work.Numbers = {}
    for way, (bytes_before, seconds_before) in before.items():
        num_bytes, seconds = _copied(way)
        num_bytes, seconds = num_bytes - bytes_before, seconds - seconds_before
        if num_bytes and seconds:
            numbers[f"{way}_rate"] = num_bytes / seconds
        if num_bytes and way == "store":
            per_token = num_bytes / (plan.num_hits * plan.prompt_tokens)
            numbers["stored_per_token"] = per_token
            numbers["tokens_in_64_gib"] = (64 << 30) / per_token
    return numbers


def _lookups() -> dict[str, float]:
    """Requests for which our second tier was considered, by result."""
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    return {
        metric.labels["result"]: metric.value
        for metric in get_metrics_snapshot()
        if isinstance(metric, Counter) and metric.name == "vllm:simple_offload_second_tier_lookups"
    }


def _second_tier(before: Mapping[str, float]) -> work.Numbers:
    """What has become of the lookups since ``before``, and the two speeds in tokens per second that
    decide it, where our second tier has measured them."""
    from vllm.v1.metrics.reader import Gauge, get_metrics_snapshot

    numbers = {
        f"lookups_{result}": value - before.get(result, 0.0) for result, value in _lookups().items()
    }
    names = {"second_tier_tokens_per_second": "fetch", "compute_tokens_per_second": "compute"}
    for metric in get_metrics_snapshot():
        key = names.get(metric.name.removeprefix("vllm:simple_offload_"))
        if isinstance(metric, Gauge) and key is not None and metric.value:
            numbers[key] = metric.value
    return numbers


def _device() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name() or current_platform.device_type)


def _peak() -> float:
    """Bytes a second."""
    import torch

    faulthandler.dump_traceback_later(COPY_DEADLINE, exit=True)
    host = torch.zeros(COPY_BYTES, dtype=torch.int8).pin_memory()
    device = torch.empty(COPY_BYTES, dtype=torch.int8, device="cuda")
    seconds: list[float] = []
    for _ in range(COPIES + 1):  # the first is a warm-up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return COPY_BYTES / median(seconds[1:])


if __name__ == "__main__":
    run_child(run)
