"""Bench: runs contenders in turn and keeps their measurements."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.bench.child import Event, child_command, engine_environment, listen
from examples.bench.command import CannotStart, RunFailed, Show
from examples.bench.connectors import PACKAGE, Contender
from examples.bench.models import save_model
from examples.bench.results_file import (
    NUMBERS,
    commit,
    gpu,
    machine,
    prepare_output,
    save_numbers,
)
from examples.serve_bench.agents import requests_by_agent
from examples.serve_bench.client import Start
from examples.serve_bench.conversations import to_messages
from examples.serve_bench.plan import Plan
from examples.serve_bench.play import WARMING_UP, play_over_http
from examples.serve_bench.results import PLOT, problems, summaries
from examples.serve_bench.tokens import WordVocabulary
from examples.serving import Endpoint, Server, command_line
from simple_offload.child import ask

PLAY = "examples.serve_bench.play"
CONVERSATIONS = "conversations.json"
MODEL = "bench"
"""The name under which models are served."""
ENDPOINT = Contender("endpoint")
"""A server that the bench did not start."""
COPY_SECONDS = 120
"""The longest time of the copy that is measured, with the imports of its process."""


class Bench:
    """The plan's rounds of each of ``contenders``, in turn; with its ``url`` that server alone.
    The workload ``restart``, and ``turns`` once more, are for another engine over the files of the
    first, which are in its ``files``. Results go to ``output`` after each measurement: an early end
    costs the rest only. Those of an earlier run go when this one begins."""

    def __init__(self, plan: Plan, contenders: Sequence[Contender], output: Path) -> None:
        self.plan = plan
        self.endpoint = None if plan.url is None else Endpoint(plan.url)
        self.contenders = [ENDPOINT] if self.endpoint else list(contenders)
        self.output = output
        self.files = None if plan.files is None else Path(plan.files)
        self.runs: dict[str, list[dict[str, Any]]] = {each.name: [] for each in self.contenders}
        self.peak: float | None = None
        """Bytes a second of a contiguous copy to the device."""
        self._machine = machine() | ({"gpu": gpu()} if plan.device == "cuda" else {})

    @property
    def problems(self) -> list[str]:
        return problems(self.runs, self.plan, self.contenders)

    def run(self, show: Show) -> None:
        """Raises CannotStart if the trace does not fit, ``files`` cannot be written, or a package
        lacks what the client imports, and RunFailed if a process fails or a server does not answer.
        No process and no file is left, however this ends."""
        plan = self.plan
        if self.files is not None:
            prepare_output(self.files, option="--files")
        for contender in self.contenders:
            if contender.source is not None and plan.transport == "engine":
                self._try_client(contender)
        if self.endpoint is not None:
            longest = self.endpoint.find_model()
            self.plan = plan = replace(plan, longest_request=longest)
            if longest is not None and plan.longest > longest:
                raise CannotStart(
                    f"--url: {self.endpoint.model!r} takes requests of up to {longest} tokens with "
                    f"their answers, and the workloads have some of {plan.longest}"
                )
        if "traces" in plan.workloads:
            show("bench", "reading the trace")
            for agents in plan.agents:
                requests_by_agent(plan, agents)
        prepare_output(self.output, NUMBERS, CONVERSATIONS, PLOT)
        self._save_conversations()
        if self.endpoint is not None:
            self._run_one(ENDPOINT, 1, "", show)
            return
        with self._model(show) as model:
            if plan.device == "cuda" and "ttft" in plan.workloads:
                show("bench", "measuring a contiguous copy")
                self.peak, end = ask(PLAY, {}, COPY_SECONDS)
                if self.peak is None:
                    raise RunFailed(f"No copy: {end}")
            for number in range(1, plan.rounds + 1):
                for contender in self.contenders:
                    self._run_one(contender, number, model, show)

    @contextmanager
    def serve(self, show: Show) -> Iterator[tuple[Server, str]]:
        """A server of the first contender for other clients, and its model, as long as the context.
        Raises RunFailed if it does not start."""
        self._save_conversations()
        contender = self.contenders[0].with_files(self.files or Path())
        with self._model(show) as model:
            show(contender.name, "starting the server")
            with self._serving(contender, model, self.output / f"{contender.name}.log") as server:
                yield server, model

    def save(self) -> None:
        """Write all results so far."""
        result = {
            "machine": self._machine,
            "plan": self.plan,
            "contenders": self.contenders,
            "commits": {
                each.name: commit(Path(each.source)) for each in self.contenders if each.source
            },
            "peak_bytes_per_second": self.peak,
            "summaries": summaries(self.runs),
            "problems": self.problems,
            "runs": self.runs,
        }
        save_numbers(self.output, result)

    def _save_conversations(self) -> None:
        """Write the conversations as a file that vLLM's own benchmark reads."""
        if "turns" in self.plan.workloads:
            vocabulary = self.plan.vocabulary()
            messages = to_messages(self.plan.conversations(vocabulary), vocabulary)
            (self.output / CONVERSATIONS).write_text(json.dumps(messages, indent=1) + "\n")

    @contextmanager
    def _model(self, show: Show) -> Iterator[str]:
        """The model, by folder or by name. One that is made is removed at the end."""
        plan = self.plan
        if plan.shape is None:
            assert plan.model is not None
            yield plan.model
            return
        show("bench", "making the model")
        with tempfile.TemporaryDirectory(prefix="work-", dir=self.output) as work:
            folder = Path(work).absolute() / "model"
            save_model(plan.shape, plan.max_model_len, plan.seed, folder)
            WordVocabulary(plan.shape.vocab_size).save(folder)
            yield str(folder)

    def _run_one(self, contender: Contender, number: int, model: str, show: Show) -> None:
        restarts = contender.has_files and "restart" in self.plan.workloads
        with tempfile.TemporaryDirectory(prefix="serve-bench-", dir=self.files) as name:
            for again in (False, True) if restarts else (False,):
                start = Start(folder=name if contender.has_files else None, again=again)
                self._play(contender, number, model, show, start)
                if any(each["lost"] for each in self.runs[contender.name]):
                    return
                _drop_from_page_cache(Path(name))

    def _play(
        self, contender: Contender, number: int, model: str, show: Show, start: Start
    ) -> None:
        """One engine from its start to its end."""
        who = f"round {number}/{self.plan.rounds} {contender.name}{' again' * start.again}"
        log = self.output / f"{contender.name}-{number}{'-again' * start.again}.log"
        started, start_seconds = time.perf_counter(), 0.0
        show(who, "starting")

        def on_event(event: Event) -> None:
            nonlocal start_seconds
            if "measured" in event:
                facts = {"round": number, "start_seconds": start_seconds}
                self.runs[contender.name].append(facts | event["measured"])
                self.save()
                return
            if event["phase"] == WARMING_UP:
                start_seconds = time.perf_counter() - started
            show(who, event["phase"])

        if start.folder is not None:
            contender = contender.with_files(Path(start.folder))
        if self.endpoint is not None:
            asyncio.run(play_over_http(self.endpoint, self.plan, start, on_event))
        elif self.plan.transport == "http":
            with self._serving(contender, model, log) as server:
                asyncio.run(play_over_http(server, self.plan, start, on_event))
        else:
            command = child_command(
                PLAY, plan=self.plan, start=start, contender=contender, model=model
            )
            with self._environment(contender, model) as environment:
                listen(command, environment, log, on_event)
        show(who, "done")

    @contextmanager
    def _serving(self, contender: Contender, model: str, log: Path) -> Iterator[Server]:
        arguments = self.plan.engine_arguments(contender) | {
            "enable_prompt_tokens_details": True,
            "disable_uvicorn_access_log": True,
        }
        line = command_line(arguments)
        with (
            self._environment(contender, model) as environment,
            Server(model, line, environment, log, port=self.plan.port, name=MODEL) as server,
        ):
            yield server

    def _try_client(self, contender: Contender) -> None:
        """In an engine's process, the client imports from the contender's package too. Raises
        CannotStart if it cannot."""
        with self._environment(contender, "") as environment:
            command = [sys.executable, "-c", f"import {PLAY}"]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
        if done.returncode != 0:
            raise CannotStart(
                f"--before: the client does not run with the package of {contender.source} "
                f"({done.stderr.strip().splitlines()[-1]}). Allowed: --transport http, whose "
                "client is in a process of its own, or a later commit"
            )

    @contextmanager
    def _environment(self, contender: Contender, model: str) -> Iterator[dict[str, str]]:
        offline = "1" if Path(model).exists() else "0"
        with tempfile.TemporaryDirectory(prefix="offload-bench-") as scratch:
            environment = engine_environment(
                self.plan.device, Path(scratch), HF_HUB_OFFLINE=offline, **contender.environment
            )
            if contender.source is not None:
                # A checkout has examples too. Its package alone goes before this one's, and the
                # current directory, where Python would look first, counts no more.
                alone = Path(scratch) / "package"
                alone.mkdir()
                (alone / PACKAGE).symlink_to(Path(contender.source) / PACKAGE)
                environment["PYTHONPATH"] = os.pathsep.join([str(alone), environment["PYTHONPATH"]])
                environment["PYTHONSAFEPATH"] = "1"
            yield environment


def _drop_from_page_cache(folder: Path) -> None:
    """The next reads come from the disk. Without effect on tmpfs."""
    for path in folder.rglob("*.bin"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
