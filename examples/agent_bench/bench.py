"""Bench: serves each contender in turn, lets the agents work, keeps the results."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from examples.agent_bench.plan import Plan
from examples.agent_bench.play import Played, play
from examples.agent_bench.results import numbers, problems, summaries
from examples.bench.agents import Request, requests_by_agent
from examples.bench.client import Target
from examples.bench.connectors import Contender
from examples.bench.counters import BY_SOURCE, counted, counters
from examples.bench.results_file import machine, save_numbers
from examples.bench.served import MODEL, made_model, served, warm_up
from examples.bench.tokens import Vocabulary
from examples.serving import Endpoint

Show = Callable[[str, str, int, int | None], None]
"""Gets who is at work, the work, and the number of requests: done, and of all."""

Work = Mapping[int, Sequence[Sequence[Request]]]
"""By number of agents, the requests of each."""

ENDPOINT = "endpoint"
"""The name of a server that the bench did not start."""


class Bench:
    """Each of ``contenders`` once, with all numbers of agents on one server, or ``endpoint`` alone.
    Results are written to ``output`` after each measurement, so that an early end costs the rest
    only."""

    def __init__(
        self,
        plan: Plan,
        vocabulary: Vocabulary,
        contenders: Sequence[Contender],
        output: Path,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.plan = plan
        self.contenders = contenders
        self.output = output
        self.endpoint = endpoint
        names = [each.name for each in contenders] if endpoint is None else [ENDPOINT]
        self.runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        self.vocabulary = vocabulary
        self._machine = machine()

    @property
    def summaries(self) -> dict[str, dict[int, dict[str, float]]]:
        """Numbers by contender and number of agents."""
        return summaries(self.runs)

    @property
    def problems(self) -> list[str]:
        connected = [each.name for each in self.contenders if each.connector is not None]
        return problems(self.runs, self.plan, connected)

    def run(self, show: Show) -> None:
        """Raises CannotStart if the trace does not fit, and RunFailed if a server does not start,
        ends early or does not answer. No process is left, however this ends."""
        plan = self.plan
        show("bench", "reading the trace", 0, None)
        work = {agents: requests_by_agent(plan.replay(agents)) for agents in plan.agents}
        if self.endpoint is not None:
            target = Target(self.endpoint.url, self.endpoint.served_model()[0])
            self._measure_all(ENDPOINT, self.endpoint, target, work, show)
            return
        show("bench", "making the model", 0, None)
        with made_model(plan, plan.max_model_len, self.output) as model:
            for contender in self.contenders:
                show(contender.name, "starting the server", 0, None)
                arguments = plan.server_arguments(contender)
                with served(plan, contender, model, arguments, self.output) as server:
                    show(contender.name, "warming up", 0, None)
                    firsts = (requests[0] for mine in work.values() for requests in mine)
                    longest = max(first.prompt_tokens for first in firsts)
                    warm_up(server, self.vocabulary, plan.seed, longest)
                    target = Target(server.url, MODEL)
                    self._measure_all(contender.name, server, target, work, show)
                    show(contender.name, "stopping the server", 0, None)

    def save(self) -> None:
        """Write all results so far."""
        result = {
            "began": self._machine["date"],
            "machine": self._machine,
            "url": self.endpoint and self.endpoint.url,
            "plan": self.plan,
            "summaries": self.summaries,
            "problems": self.problems,
            "runs": self.runs,
        }
        save_numbers(self.output, result)

    def _measure_all(
        self, name: str, server: Endpoint, target: Target, work: Work, show: Show
    ) -> None:
        for agents, by_agent in work.items():
            played, counts = self._measure(
                server, target, by_agent, partial(show, f"{name}, {agents} agents")
            )
            replies = []
            for each in played.answered:
                reply = asdict(each.reply)
                del reply["answer"]
                replies.append({"at": each.at, "opens": each.request.opens, **reply})
            result = {
                "agents": agents,
                "seconds": played.seconds,
                "lost": played.lost,
                "numbers": numbers(played, counts, self.plan),
                "replies": replies,
            }
            self.runs[name].append(result)
            self.save()

    def _measure(
        self,
        server: Endpoint,
        target: Target,
        by_agent: Sequence[Sequence[Request]],
        show: Callable[[str, int, int | None], None],
    ) -> tuple[Played, dict[str, float]]:
        """The replies, and what the server has counted meanwhile."""
        before: dict[str, float] = {}
        done = 0

        def on_start() -> None:
            before.update(_counters(server))
            show("measuring", 0, None)

        def on_reply() -> None:
            nonlocal done
            done += 1
            show("measuring", done, None)

        @cache
        def text(length: int, *what: object) -> list[int]:
            # For another number of agents the same ids become other tokens, which no cache has.
            return self.vocabulary.random(length, self.plan.seed, len(by_agent), *what)

        show("first requests", 0, None)
        seconds = self.plan.seconds
        played = asyncio.run(
            play(target, by_agent, text, seconds, on_start=on_start, on_reply=on_reply)
        )
        return played, counted(before, _counters(server))


def _counters(server: Endpoint) -> dict[str, float]:
    """Running totals; none if the server does not count prompt tokens by source."""
    samples = server.samples()
    return counters(samples) if any(each.name == BY_SOURCE for each in samples) else {}
