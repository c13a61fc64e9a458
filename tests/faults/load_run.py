"""Mixed load against a server for minutes: ``python -m tests.faults.load_run --minutes 30``.

It compares every answer, samples memory, and looks for processes and files that the server leaves
behind. Prints one summary line; exit status 1 after a violation.
"""

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Event

import psutil
from rich.console import Console

from examples.serving import is_free
from tests.engine.harness import log_tail, processes_left
from tests.engine.spec import THIS_CONNECTOR
from tests.engine.workloads import VOCABULARY
from tests.faults.load_book import LoadBook, Script
from tests.faults.load_clients import NUM_CLIENTS, Client, Operator, Slots, complete
from tests.serve.conftest import PLAIN, configured, save_model
from tests.serve.server import Server

BLOCK_SIZE = 32
DEVICE_BLOCKS = 40
MAX_PROMPT_TOKENS = 560

PROBE_BLOCKS, NUM_PROBES = 17, 7
HOST_BLOCKS = PROBE_BLOCKS * NUM_PROBES + 1
"""Host blocks. One is vLLM's null block; the prompts of the final probe fill all others exactly."""

WARM = 0.2
"""Fraction of the run after which memory must not grow: the host tier is then full."""

MAX_GROWTH = 0.02
"""Growth of resident memory, as a fraction, that counts as a leak."""
MIN_SECONDS_FOR_GROWTH = 300.0
"""In a shorter run, vLLM's own memory grows by a tenth, while shapes are new."""

MAX_COMPARED = 150
"""Number of prompts that a server without the connector answers afterwards, for comparison."""

ARGUMENTS = (
    *(*PLAIN, "--max-num-seqs", "6", "--max-num-batched-tokens", "256"),
    *("--num-gpu-blocks-override", str(DEVICE_BLOCKS)),
    # At 0, vLLM's default, the engine is killed without a shutdown.
    *("--shutdown-timeout", "30"),
)


class MemoryWatch:
    """Resident memory of several processes together, and the shared memory files that they map."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        """Bytes, at equal distances in time."""
        self.shared_files: set[Path] = set()

    def sample(self, processes: Iterable[psutil.Process]) -> None:
        """Record the bytes of ``processes`` now; a process that has ended has none."""
        total = 0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
                paths = {Path(mapped.path) for mapped in process.memory_maps()}
                self.shared_files |= {path for path in paths if path.is_relative_to("/dev/shm")}
        self.samples.append(total)

    def at(self, fraction: float) -> float:
        """MiB at ``fraction`` of the recorded time: the median of the tenth around it."""
        place, reach = round(fraction * (len(self.samples) - 1)), len(self.samples) // 20
        return median(self.samples[max(place - reach, 0) : place + reach + 1]) / 2**20

    @property
    def growth(self) -> float:
        """Growth after WARM, as a fraction."""
        return self.at(1.0) / self.at(WARM) - 1


class LoadRun:
    """One run and its findings."""

    def __init__(self, seconds: float, seed: int, console: Console) -> None:
        self.book = LoadBook()
        self.num_compared = 0
        """Number of prompts that a server without the connector has answered."""
        self.hit_tokens = 0
        self._seconds = seconds
        self._seed = seed
        self._console = console
        self._memory = MemoryWatch()
        self._prompt_tokens = 0
        self._preemptions = 0

    @property
    def summary(self) -> str:
        """The findings in one line."""
        counts, memory = self.book.counts, self._memory
        sizes = " / ".join(f"{memory.at(part):.0f}" for part in (WARM, 0.6, 1.0))
        return (
            f"load run of {self._seconds / 60:.1f} min, seed {self._seed}: "
            f"{counts['requests']} requests ({counts['completed']} completed, "
            f"{counts['hung up']} hung up on, {counts['cancelled']} cancelled), "
            f"{counts['compared']} answers seen before and {self.num_compared} asked of a "
            f"server without the connector, {counts['ties']} ties; "
            f"{self._preemptions} preemptions; {counts['resets']} resets "
            f"({counts['resets of both']} of both tiers, {counts['resets refused']} refused under "
            f"load), {counts['pauses']} pauses; {self.hit_tokens} of {self._prompt_tokens} prompt "
            f"tokens from the host tier; slowest request {self.book.slowest_seconds:.1f} s; "
            f"RSS {sizes} MiB at {WARM:.0%} / 60% / 100%, growth {memory.growth:+.2%} "
            f"(bound {MAX_GROWTH:.0%}); {len(self.book.violations)} violations"
        )

    def play(self, directory: Path) -> None:
        """Run the load. Logs and the model stay in ``directory``."""
        model = save_model(directory / "model")
        with _server(model, directory / "loaded", connector=True) as server:
            self._load(server)
            if server.process.poll() is None:
                self._read_metrics(server)
                self._probe_host_tier(server)
            self._shut_down(server)
        self._console.print("The same prompts, without the connector ...")
        with _server(model, directory / "plain", connector=False) as server:
            self._compare(server)

    def _load(self, server: Server) -> None:
        until, slots = Event(), Slots()
        script = Script(self._seed, MAX_PROMPT_TOKENS)
        operator = Operator(server, slots, self.book, self._seed)
        seconds_between = (min(self._seconds / 20, 4.0), min(self._seconds / 5, 20.0))
        with ThreadPoolExecutor(NUM_CLIENTS + 1) as threads:
            workers = [threads.submit(operator.work, seconds_between, until)]
            for number in range(NUM_CLIENTS):
                client = Client(server, slots, self.book, self._seed * 1000 + number)
                workers.append(threads.submit(client.work, script, until))
            try:
                self._watch(server)
            finally:
                until.set()
            for worker in workers:
                worker.result()

    def _watch(self, server: Server) -> None:
        """Sample memory until the end of the run or of the server."""
        start = time.monotonic()
        next_line = 60.0
        while (passed := time.monotonic() - start) < self._seconds:
            if (status := server.process.poll()) is not None:
                self.book.violations.append(f"the server ended with status {status}")
                return
            self._memory.sample(server.family())
            if passed >= next_line:
                self._console.print(
                    f"{passed / 60:.1f} min: {self.book.counts['requests']} requests, "
                    f"{len(self.book.violations)} violations, {self._memory.at(1.0):.0f} MiB"
                )
                next_line += 60
            time.sleep(min(5.0, self._seconds / 20))

    def _read_metrics(self, server: Server) -> None:
        self.hit_tokens = _hit_tokens(server)
        self._prompt_tokens = int(server.metric("vllm:prompt_tokens_total"))
        self._preemptions = int(server.metric("vllm:num_preemptions_total"))
        server.wait_for(server.is_idle, 60.0, "the server to be idle")

    def _probe_host_tier(self, server: Server) -> None:
        """Fill the empty host tier to its last block and load all of it. A block that is lost, or
        that a transfer still references, is missing then."""
        rng = random.Random(self._seed)
        length = PROBE_BLOCKS * BLOCK_SIZE + 1
        prompts = [tuple(rng.choices(VOCABULARY, k=length)) for _ in range(NUM_PROBES)]
        before = 0
        for external in (True, False):
            server.reset_prefix_cache(external=external)
            before = _hit_tokens(server)
            for prompt in prompts:
                self.book.check(prompt, complete(server, prompt, 1), keep=True)
        found = _hit_tokens(server) - before
        expected = NUM_PROBES * PROBE_BLOCKS * BLOCK_SIZE
        if found != expected:
            self.book.violations.append(
                f"the host tier gave {found} tokens back of {expected} that just fill it"
            )

    def _shut_down(self, server: Server) -> None:
        """Stop the server as a service manager does, and look for leftovers."""
        violations = self.book.violations
        if server.process.poll() is None:
            server.terminate()
            try:
                status = server.wait_for_end()
            except AssertionError as error:
                violations.append(str(error).partition("\n")[0])
            else:
                if status != 0:
                    violations.append(f"the server ended with status {status} when asked to")
        files = [path for path in self._memory.shared_files if path.exists()]
        left = (*processes_left(server.process.pid, within=10.0), *files)
        violations.extend(f"left behind: {what}" for what in left)
        if not is_free(server.port):
            violations.append(f"port {server.port} is still taken")
        if not self.hit_tokens:
            violations.append("nothing ever came from the host tier: the run proves nothing")
        growth = self._memory.growth
        if self._seconds >= MIN_SECONDS_FOR_GROWTH and growth > MAX_GROWTH:
            violations.append(f"memory has grown by {growth:.1%} after {WARM:.0%} of the time")
        for line in server.log.read_text(errors="replace").splitlines():
            if "simple_offload" in line and (" ERROR " in line or " WARNING " in line):
                violations.append(f"the log says: {line}")

    def _compare(self, server: Server) -> None:
        """Compare the answers of a server without the connector to some of the prompts."""
        answers = dict(self.book.answers)
        prompts = random.Random(self._seed).sample(list(answers), min(MAX_COMPARED, len(answers)))
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            found = clients.map(
                lambda prompt: complete(server, prompt, len(answers[prompt].tokens)), prompts
            )
            for prompt, answer in zip(prompts, found, strict=True):
                self.book.check(prompt, answer, keep=False)
        self.num_compared = len(prompts)


def _hit_tokens(server: Server) -> int:
    return int(server.metric("vllm:external_prefix_cache_hits_total"))


def _server(model: Path, directory: Path, *, connector: bool) -> Server:
    directory.mkdir()
    extra = {"num_cpu_blocks": HOST_BLOCKS, "keep_on_device_reset": True}
    ours = configured(THIS_CONNECTOR | {"kv_connector_extra_config": extra})
    return Server(model, directory, *ARGUMENTS, *(ours if connector else ()))


def main(arguments: list[str]) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.load_run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    directory = Path(tempfile.mkdtemp(prefix="load-run-"))
    run = LoadRun(given.minutes * 60, given.seed, console)
    run.play(directory)
    for violation in run.book.violations[:30]:
        console.print(f"violation: {violation}", markup=False)
    console.print(run.summary, markup=False, highlight=False)
    if run.book.violations:
        console.print(log_tail(directory / "loaded" / "serve.log"), markup=False)
        console.print(f"Logs: {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
