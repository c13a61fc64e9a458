"""Bench: serves each contender in turn, replays the conversations, keeps the results."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.bench.connectors import Contender
from examples.bench.counters import counted, counters
from examples.bench.results_file import machine, save_numbers
from examples.bench.served import made_model, served, warm_up
from examples.bench.tokens import Vocabulary
from examples.multi_turn.client import replay
from examples.multi_turn.conversations import Conversation, to_messages
from examples.multi_turn.plan import Plan
from examples.multi_turn.results import Summary, problems, summaries
from examples.serving import Server

CONVERSATIONS = "conversations.json"

Show = Callable[[str, str, int, int | None], None]
"""Gets who is at work, the work, and the number of requests: done, and of all."""


class Bench:
    """Each of ``contenders`` once, with all rounds on one server. Results are written to
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
        self._machine = machine()

    @property
    def summaries(self) -> dict[str, Summary]:
        return summaries(self.runs, self.plan.kv_bytes_per_token)

    @property
    def problems(self) -> list[str]:
        connected = [each.name for each in self.contenders if each.connector is not None]
        return problems(self.runs, self.plan, self.requests, connected)

    def run(self, show: Show) -> None:
        """Raises RunFailed if a server does not start, ends early or does not answer. No process
        is left, however this ends."""
        self._save_conversations()
        with self._model(show) as model:
            for contender in self.contenders:
                with self._serving(contender, model, show) as server:
                    self._measure(contender, server, show)
                self.save()

    def serve(self, show: Show, on_ready: Callable[[Server, str], None]) -> None:
        """Serve the first contender's model for other clients until this is interrupted;
        ``on_ready`` gets the server and the model.

        Raises RunFailed if the server does not start, or ends early.
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
        """Write all results so far."""
        result = {
            "began": self._machine["date"],
            "machine": self._machine,
            "plan": self.plan,
            "conversations": len(self.conversations),
            "tokens": sum(each.num_tokens for each in self.conversations),
            "requests": self.requests,
            "summaries": self.summaries,
            "problems": self.problems,
            "runs": self.runs,
        }
        save_numbers(self.output, result)

    @contextmanager
    def _model(self, show: Show) -> Iterator[str]:
        show("bench", "making the model", 0, None)
        longest = self.plan.max_model_len(self.conversations)
        with made_model(self.plan, longest, self.output) as model:
            yield model

    @contextmanager
    def _serving(self, contender: Contender, model: str, show: Show) -> Iterator[Server]:
        show(contender.name, "starting the server", 0, self.requests)
        arguments = self.plan.server_arguments(contender, self.conversations)
        with served(self.plan, contender, model, arguments, self.output, self._port) as server:
            yield server

    def _measure(self, contender: Contender, server: Server, show: Show) -> None:
        show(contender.name, "warming up", 0, self.requests)
        longest = max(len(each.prompt(len(each.turns) - 1)) for each in self.conversations)
        warm_up(server, self._vocabulary, self.plan.seed, longest)
        for number in range(1, self.plan.rounds + 1):
            phase = f"round {number}/{self.plan.rounds}"
            show(contender.name, phase, 0, self.requests)
            done = 0

            def on_reply(phase: str = phase) -> None:
                nonlocal done
                done += 1
                show(contender.name, phase, done, self.requests)

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
                    "counters": counted(before, after),
                    "replies": [asdict(reply) for reply in result.replies],
                }
            )
        show(contender.name, "stopping the server", self.requests, self.requests)

    def _save_conversations(self) -> None:
        """Write the conversations as a file that vLLM's own benchmark reads."""
        messages = to_messages(self.conversations, self._vocabulary)
        (self.output / CONVERSATIONS).write_text(json.dumps(messages, indent=1) + "\n")
