"""All workloads with one engine: warm-up, repeats and what is measured.

As a program, it does so in an engine of its own.
"""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
from pydantic import TypeAdapter

from examples.bench.child import Report, run_child, without_collection
from examples.bench.connectors import Contender
from examples.serve_bench.client import Client, EngineClient, HttpClient, RequestLost, Start
from examples.serve_bench.plan import Plan
from examples.serve_bench.results import numbers_of, ttft_of
from examples.serve_bench.workloads import plays
from examples.serving import Endpoint

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

COPY_BYTES, COPIES = 1 << 30, 8
QUIET_LOOKS, LOOK_SECONDS, WRITE_DEADLINE = 3, 0.5, 120.0
"""Nothing more is written if that many looks at the files, so far apart, see the same. The longest
wait for it, in seconds."""
WARMING_UP = "warming up"


async def play(client: Client) -> None:
    """Play the plan's workloads, or those of an engine that is started again over the files of an
    earlier one.

    Reports ``{"phase": ...}``, and ``{"measured": ...}`` after each workload. A lost request ends
    the play: an engine that still works on it disturbs what follows. One with files goes on until
    nothing more is written.
    """
    plan, start, report = client.plan, client.start, client.report
    report({"phase": WARMING_UP})
    if plan.url is None:  # a server that runs already is warm
        await _warm_up(client)
    for repeat in range(plan.repeats):
        client.repeat = repeat
        for name, work in plays(plan, again=start.again).items():
            report({"phase": f"{name}, repeat {repeat + 1}/{plan.repeats}"})
            await client.settle()
            client.begin()
            found, lost = {}, []
            try:
                found = await work(client)
            except* RequestLost as losses:
                lost = [str(loss) for loss in losses.exceptions]
            if plan.transport == "http":
                found["client_busy"] = client.busy()
            await client.settle()
            replies = [asdict(reply) for reply in client.replies]
            for reply in replies:
                del reply["arrivals"], reply["tokens"]
            measured = {
                "repeat": repeat,
                "workload": name,
                "lost": lost,
                "numbers": numbers_of(client.replies, found, client.counted(), plan),
                "ttft": ttft_of(client.replies),
                "replies": replies,
            }
            report({"measured": measured})
            if lost:
                return
    if start.folder is not None:
        report({"phase": "writing files"})
        await _write_files(client, Path(start.folder))


async def play_over_http(server: Endpoint, plan: Plan, start: Start, report: Report) -> None:
    """``play`` with a server."""
    # Without aiohttp's own limits. A connection that was idle is closed before the server closes
    # it, after 5 seconds (VLLM_HTTP_TIMEOUT_KEEP_ALIVE): a request on it would be lost.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await play(HttpClient(session, server, plan, start, report))


def run(arguments: dict[str, Any], report: Report) -> None:
    """Play with an engine in this process."""
    plan, start, contender = (
        TypeAdapter[Any](kind).validate_python(arguments[name])
        for name, kind in (("plan", Plan), ("start", Start), ("contender", Contender))
    )

    async def play_in_process() -> None:
        engine = _engine(plan, contender, arguments["model"])
        try:
            await play(EngineClient(engine, plan, start, report))
        finally:
            engine.shutdown()

    asyncio.run(play_in_process())


def _engine(plan: Plan, contender: Contender, model: str) -> "AsyncLLM":
    with without_collection():
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        if current_platform.is_cpu():  # elsewhere its import replaces functions of torch
            from vllm.v1.worker import cpu_worker  # noqa: F401 - which the engine core then has

    given = plan.engine_arguments(contender)
    if given["kv_transfer_config"] is not None:
        given["kv_transfer_config"] = KVTransferConfig(**given["kv_transfer_config"])
    arguments = {key: value for key, value in given.items() if value is not None}
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=model, skip_tokenizer_init=True, disable_log_stats=False, **arguments)
    )


async def _warm_up(client: Client) -> None:
    """One-time costs fall due: a short prompt, and the longest, new and as a hit of the connector.
    After a restart, one more is a hit in the files."""
    longest, again = client.plan.max_model_len - client.plan.block_size, client.start.again
    new = "restart" if again else "start"
    for name in ("short", new, new, *(["start"] if again else [])):
        length = min(64, longest) if name == "short" else longest
        prompt = client.text(length, "warm-up", name)
        try:
            await client.ask(None, f"warm-up, {name}", prompt, 1)
        except RequestLost as error:
            raise client.failure(f"answers nothing: {error}") from None
        await client.settle()
        await client.reset(external=False)


async def _write_files(client: Client, folder: Path) -> None:
    """Wait until no more is written. Connectors go on when the engine steps, so it gets a prompt
    that is too short to be stored."""
    seen, quiet, deadline = _num_bytes(folder), 0, time.monotonic() + WRITE_DEADLINE
    while seen and quiet < QUIET_LOOKS and time.monotonic() < deadline:
        await client.ask(None, "nudge", client.text(client.plan.block_size // 2, "nudge"), 1)
        await asyncio.sleep(LOOK_SECONDS)
        before, seen = seen, _num_bytes(folder)
        quiet = quiet + 1 if seen == before else 0


def _num_bytes(folder: Path) -> int:
    """Of all objects below ``folder``. A file may vanish meanwhile."""
    total = 0
    for path in folder.rglob("*.bin"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def answer(file: Path) -> None:
    """Of ``child.ask``: bytes a second of one contiguous pinned copy to the device, which the
    bench's own process must not touch."""
    import torch

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
    file.write_text(json.dumps(COPY_BYTES / median(seconds[1:])))


if __name__ == "__main__":
    run_child(run)
