"""Mixed load against a server for minutes: ``python -m tests.faults.load_run --minutes 30``.

It compares every answer, samples memory, and looks for processes and files that the server leaves
behind. Prints one summary line; exit status 1 after a violation.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from examples.random_model import save_random_model
from tests.engine.harness import log_tail, processes_left
from tests.faults.load_book import VOCABULARY, LoadBook, Script, Tokens
from tests.faults.load_clients import Client, Connection, Gate, Operator
from tests.faults.load_memory import MemoryWatch
from tests.serve.server import HOST, Server, can_listen
from tests.serve.tokenizer import save_word_tokenizer

NUM_CLIENTS = 6
BLOCK_SIZE = 32
DEVICE_BLOCKS = 40
MAX_MODEL_LEN = 640
MAX_PROMPT_TOKENS = 560

PROBE_BLOCKS, NUM_PROBES = 17, 7
HOST_BLOCKS = PROBE_BLOCKS * NUM_PROBES + 1
"""Host blocks. One is vLLM's null block; the prompts of the final probe fill all others exactly."""

WARM = 0.2
"""Fraction of the run after which memory must not grow: the host tier is then full."""

SERVER = {
    "--dtype": "float32",
    "--block-size": BLOCK_SIZE,
    "--max-model-len": MAX_MODEL_LEN,
    "--max-num-seqs": 6,
    "--max-num-batched-tokens": 256,
    "--num-gpu-blocks-override": DEVICE_BLOCKS,
    # At 0, vLLM's default, the engine is killed without a shutdown.
    "--shutdown-timeout": 30,
}


@dataclass(frozen=True)
class Plan:
    """Length, size and limits of a run."""

    seconds: float
    seed: int
    max_growth: float = 0.02
    """Growth of resident memory, as a fraction, that counts as a leak."""
    sample_seconds: float = 5.0
    reset_seconds: tuple[float, float] = (4.0, 20.0)
    num_compared: int = 150
    """Number of prompts that a server without the connector answers afterwards, for comparison."""
    connector: bool = True
    """False: run vLLM alone, for comparison."""


@dataclass
class Outcome:
    """The findings of a run."""

    plan: Plan
    book: LoadBook
    memory: MemoryWatch
    hit_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    compared_with_plain: int = 0
    processes_left: int = 0
    files_left: int = 0

    @property
    def summary(self) -> str:
        """The findings in one line."""
        counts, memory = self.book.counts, self.memory
        sizes = " / ".join(f"{memory.at(part):.0f}" for part in (WARM, 0.6, 1.0))
        return (
            f"load run of {self.plan.seconds / 60:.1f} min, seed {self.plan.seed}"
            f"{'' if self.plan.connector else ', without the connector'}: "
            f"{counts['requests']} requests ({counts['completed']} completed, "
            f"{counts['hung up']} hung up on, {counts['cancelled']} cancelled), "
            f"{counts['compared']} answers seen before and {self.compared_with_plain} asked of a "
            f"server without the connector, {counts['ties']} ties; "
            f"{self.preemptions} preemptions; {counts['resets']} resets "
            f"({counts['resets of both']} of both tiers, {counts['resets refused']} refused under "
            f"load), {counts['pauses']} pauses; {self.hit_tokens} of {self.prompt_tokens} prompt "
            f"tokens from the host tier; "
            f"slowest request {self.book.slowest_seconds:.1f} s; "
            f"RSS {sizes} MiB at {WARM:.0%} / 60% / 100%, growth "
            f"{memory.growth(WARM):+.2%} (bound {self.plan.max_growth:.0%}); "
            f"left behind: {self.processes_left} processes, {self.files_left} files; "
            f"{len(self.book.violations)} violations"
        )


def load_run(plan: Plan, directory: Path, console: Console) -> Outcome:
    """Run the load. Logs and the model stay in ``directory``."""
    model = save_random_model(directory / "model")
    save_word_tokenizer(model, vocab_size=512)
    outcome = Outcome(plan, LoadBook(), MemoryWatch())
    with _server(model, directory / "loaded", plan.connector) as server:
        asyncio.run(_load(server, outcome, console))
        _shut_down(server, outcome)
    if plan.connector and plan.num_compared:
        console.print("The same prompts, without the connector ...")
        with _server(model, directory / "plain", connector=False) as server:
            outcome.compared_with_plain = asyncio.run(_compare(server, outcome.book, plan))
    return outcome


async def _load(server: Server, outcome: Outcome, console: Console) -> None:
    plan, book = outcome.plan, outcome.book
    until, gate = asyncio.Event(), Gate()
    script = Script(plan.seed, MAX_PROMPT_TOKENS)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session:
        connection = Connection(session, f"http://{HOST}:{server.port}")
        operator = Operator(connection, gate, book, plan.seed, plan.reset_seconds)
        clients = [
            Client(connection, gate, book, script, plan.seed * 1000 + number)
            for number in range(NUM_CLIENTS)
        ]
        workers = [asyncio.create_task(client.work(until)) for client in clients]
        workers.append(asyncio.create_task(operator.work(until)))
        try:
            await _watch(server, outcome, console)
        finally:
            until.set()
            await asyncio.gather(*workers)
        if server.process.poll() is None:
            await asyncio.to_thread(_read_metrics, server, outcome)
            await operator.reset_idle(external=True)
            if plan.connector:
                await _probe_host_tier(server, connection, operator, plan.seed, book)


async def _watch(server: Server, outcome: Outcome, console: Console) -> None:
    """Sample memory until the end of the run or of the server."""
    plan, book = outcome.plan, outcome.book
    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=plan.seconds)
        next_line = 60.0
        while (passed := time.monotonic() - start) < plan.seconds:
            if (status := server.process.poll()) is not None:
                book.violations.append(f"the server ended with status {status}")
                return
            size = await asyncio.to_thread(outcome.memory.sample, server.family())
            line = (
                f"{book.counts['requests']} requests, {len(book.violations)} violations, "
                f"{size / 2**20:.0f} MiB"
            )
            progress.update(task, completed=passed, description=line)
            if not console.is_terminal and passed >= next_line:
                console.print(f"{passed / 60:.1f} min: {line}")
                next_line += 60
            await asyncio.sleep(min(plan.sample_seconds, plan.seconds / 20))


async def _probe_host_tier(
    server: Server, connection: Connection, operator: Operator, seed: int, book: LoadBook
) -> None:
    """Fill the empty host tier to its last block and load all of it. A block that is lost, or that
    a transfer still references, is missing then."""
    rng = random.Random(seed)
    length = PROBE_BLOCKS * BLOCK_SIZE + 1
    prompts: list[Tokens] = [tuple(rng.choices(VOCABULARY, k=length)) for _ in range(NUM_PROBES)]
    for prompt in prompts:
        book.check(prompt, await connection.complete(prompt, 1), keep=True)
    await operator.reset_idle(external=False)
    before = await asyncio.to_thread(_hit_tokens, server)
    for prompt in prompts:
        book.check(prompt, await connection.complete(prompt, 1), keep=True)
    found = await asyncio.to_thread(_hit_tokens, server) - before
    expected = NUM_PROBES * PROBE_BLOCKS * BLOCK_SIZE
    if found != expected:
        book.violations.append(
            f"the host tier gave {found} tokens back of {expected} that just fill it"
        )


async def _compare(server: Server, book: LoadBook, plan: Plan) -> int:
    """Compare the answers of ``server`` to some of the prompts; the number of prompts."""
    rng = random.Random(plan.seed)
    prompts = rng.sample(book.prompts, min(plan.num_compared, len(book.prompts)))
    slots = asyncio.Semaphore(NUM_CLIENTS)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        connection = Connection(session, f"http://{HOST}:{server.port}")

        async def compare(prompt: Tokens) -> None:
            known = book.known(prompt)
            assert known is not None
            async with slots:
                answer = await connection.complete(prompt, len(known.tokens))
            book.check(prompt, answer, keep=False)

        await asyncio.gather(*map(compare, prompts))
    return len(prompts)


def _read_metrics(server: Server, outcome: Outcome) -> None:
    outcome.hit_tokens = _hit_tokens(server)
    outcome.prompt_tokens = int(server.metric("vllm:prompt_tokens_total"))
    outcome.preemptions = int(server.metric("vllm:num_preemptions_total"))
    server.wait_for(server.is_idle, 60.0, "the server to be idle")


def _hit_tokens(server: Server) -> int:
    return int(server.metric("vllm:external_prefix_cache_hits_total"))


def _shut_down(server: Server, outcome: Outcome) -> None:
    """Stop the server as a service manager does, and look for leftovers."""
    violations = outcome.book.violations
    if server.process.poll() is None:
        server.terminate()
        try:
            status = server.wait_for_end()
        except AssertionError as error:
            violations.append(str(error).partition("\n")[0])
        else:
            if status != 0:
                violations.append(f"the server ended with status {status} when asked to")
    processes = processes_left(server.process.pid, within=10.0)
    files = outcome.memory.shared_files_left()
    violations.extend(f"left behind: {what}" for what in (*processes, *files))
    if not can_listen(server.port):
        violations.append(f"port {server.port} is still taken")
    outcome.processes_left, outcome.files_left = len(processes), len(files)
    if outcome.plan.connector and not outcome.hit_tokens:
        violations.append("nothing ever came from the host tier: the run proves nothing")
    if (growth := outcome.memory.growth(WARM)) > outcome.plan.max_growth:
        violations.append(f"memory has grown by {growth:.1%} after {WARM:.0%} of the time")
    for line in server.log.read_text(errors="replace").splitlines():
        if "simple_offload" in line and (" ERROR " in line or " WARNING " in line):
            violations.append(f"the log says: {line}")


@contextmanager
def _server(model: Path, directory: Path, connector: bool) -> Iterator[Server]:
    """A server that answers; it ends with the context."""
    directory.mkdir()
    arguments = [str(part) for option in SERVER.items() for part in option]
    arguments.append("--enforce-eager")
    if connector:
        transfer = {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_connector_module_path": "simple_offload",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"num_cpu_blocks": HOST_BLOCKS},
        }
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    # Not in ``directory``, whose path may be too long for the sockets among them.
    with tempfile.TemporaryDirectory(prefix="load-") as temporary:
        with _temporary_files(temporary):
            server = Server(model, directory, *arguments)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.kill()


@contextmanager
def _temporary_files(directory: str) -> Iterator[None]:
    """The folder for temporary files of processes that start in this context. vLLM leaves sockets
    there, with and without a connector."""
    before = {name: os.environ.get(name) for name in ("TMPDIR", "VLLM_RPC_BASE_PATH")}
    os.environ.update(dict.fromkeys(before, directory))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def main(arguments: list[str]) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.load_run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-growth", type=float, default=Plan.max_growth)
    parser.add_argument(
        "--without-connector", action="store_true", help="the same load on plain vLLM"
    )
    given = parser.parse_args(arguments)
    plan = Plan(
        given.minutes * 60,
        given.seed,
        max_growth=given.max_growth,
        connector=not given.without_connector,
    )
    console = Console(soft_wrap=True)
    directory = Path(tempfile.mkdtemp(prefix="load-run-"))
    outcome = load_run(plan, directory, console)
    for violation in outcome.book.violations[:30]:
        console.print(f"violation: {violation}", markup=False)
    console.print(outcome.summary, markup=False, highlight=False)
    if outcome.book.violations:
        console.print(log_tail(directory / "loaded" / "serve.log"), markup=False)
        console.print(f"Logs: {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
