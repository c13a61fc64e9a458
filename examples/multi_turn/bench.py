"""Bench: serves each contender in turn, replays the conversations, keeps the results."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client.samples import Sample

from examples.bench.connectors import Contender
from examples.bench.models import save_model
from examples.bench.results_file import machine, save_numbers
from examples.multi_turn.client import MODEL, replay
from examples.multi_turn.conversations import Conversation, Turn, to_messages
from examples.multi_turn.plan import Plan
from examples.multi_turn.results import Summary, problems, summaries
from examples.multi_turn.tokens import Vocabulary, WordVocabulary
from examples.serving import Server, command_line, server_environment, serving

CONVERSATIONS = "conversations.json"

Show = Callable[[str, str, int, int | None], None]
"""Gets who is at work, the work, and the number of requests: done, and of all."""

SOURCES = {
    "local_compute": "computed_tokens",
    "local_cache_hit": "device_hit_tokens",
    "external_kv_transfer": "external_hit_tokens",
}
"""vLLM's names of the sources of prompt tokens, and ours."""
SERIES: Sequence[tuple[str, Mapping[str, str], str]] = (
    *(
        ("vllm:prompt_tokens_by_source_total", {"source": source}, name)
        for source, name in SOURCES.items()
    ),
    ("vllm:simple_offload_bytes_total", {"direction": "load"}, "loaded_bytes"),
    ("vllm:simple_offload_bytes_total", {"direction": "store"}, "stored_bytes"),
    ("vllm:kv_offload_load_bytes_total", {}, "loaded_bytes"),
    ("vllm:kv_offload_store_bytes_total", {}, "stored_bytes"),
)
"""Series, their labels, and our names. Bytes are those of this connector, and those of vLLM's
OffloadingConnector."""


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
        bytes_per_token = self.plan.shape.kv_bytes_per_token if self.plan.shape else None
        return summaries(self.runs, bytes_per_token)

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
        """The model, by folder or by name. One that is made is removed at the end."""
        if self.plan.shape is None:
            assert self.plan.model is not None
            yield self.plan.model
            return
        with tempfile.TemporaryDirectory(prefix="work-", dir=self.output) as work:
            folder = Path(work).absolute() / "model"
            show("bench", "making the model", 0, None)
            longest = self.plan.max_model_len(self.conversations)
            save_model(self.plan.shape, longest, self.plan.seed, folder)
            WordVocabulary(self.plan.shape.vocab_size).save(folder)
            yield str(folder)

    @contextmanager
    def _serving(self, contender: Contender, model: str, show: Show) -> Iterator[Server]:
        show(contender.name, "starting the server", 0, self.requests)
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
        show(contender.name, "warming up", 0, self.requests)
        self._warm_up(server)
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
            # A series that is new began at 0.
            counted = {name: value - before.get(name, 0) for name, value in after.items()}
            self.runs[contender.name].append(
                {
                    "round": number,
                    "seconds": result.seconds,
                    "lost": result.lost,
                    "counters": counted,
                    "replies": [asdict(reply) for reply in result.replies],
                }
            )
        show(contender.name, "stopping the server", self.requests, self.requests)

    def _warm_up(self, server: Server) -> None:
        """One-time costs fall due: a short prompt, the longest, and that one as a hit of the
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
        """Write the conversations as a file that vLLM's own benchmark reads."""
        messages = to_messages(self.conversations, self._vocabulary)
        (self.output / CONVERSATIONS).write_text(json.dumps(messages, indent=1) + "\n")


def counters(samples: Iterable[Sample]) -> dict[str, float]:
    """Running totals: prompt tokens by source, and bytes if a connector reports them."""
    found = dict.fromkeys(SOURCES.values(), 0.0)
    for sample in samples:
        for series, labels, name in SERIES:
            if series == sample.name and labels.items() <= sample.labels.items():
                found[name] = found.get(name, 0) + sample.value
    return found
