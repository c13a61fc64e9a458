"""Clients of an engine in this process, or of a server: requests, their times and the engine's
counters: prompt tokens by source, and what connectors report."""

import asyncio
import itertools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
from prometheus_client import REGISTRY
from prometheus_client.samples import Sample

from examples.bench.child import Report
from examples.bench.command import RunFailed
from examples.serve_bench.plan import Plan
from examples.serving import RESET_SECONDS, Endpoint, Server

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

REQUEST_DEADLINE = 300.0
"""Seconds. A request that takes longer is lost."""
POLL_SECONDS = 0.2
"""vLLM refuses to reset its caches while blocks are in use, and reports no end of that."""

SOURCES = {
    "local_cache_hit": "device_hit_tokens",
    "external_kv_transfer": "external_hit_tokens",
    "local_compute": "computed_tokens",
}
"""vLLM's names of the sources of prompt tokens, and ours."""
_OURS, _OFFLOADING = "vllm:simple_offload_", "vllm:kv_offload_"
SERIES: Sequence[tuple[str, Mapping[str, str], str]] = (
    *(
        ("vllm:prompt_tokens_by_source_total", {"source": source}, name)
        for source, name in SOURCES.items()
    ),
    ("vllm:num_preemptions_total", {}, "preemptions"),
    (f"{_OURS}bytes_total", {"direction": "load"}, "loaded_bytes"),
    (f"{_OURS}bytes_total", {"direction": "store"}, "stored_bytes"),
    (f"{_OURS}transfer_seconds_sum", {"direction": "load"}, "loaded_seconds"),
    (f"{_OURS}transfer_seconds_sum", {"direction": "store"}, "stored_seconds"),
    (f"{_OFFLOADING}load_bytes_total", {}, "loaded_bytes"),
    (f"{_OFFLOADING}store_bytes_total", {}, "stored_bytes"),
    (f"{_OFFLOADING}load_time_total", {}, "loaded_seconds"),
    (f"{_OFFLOADING}store_time_total", {}, "stored_seconds"),
    *(
        (f"{_OURS}second_tier_lookups_total", {"result": result}, f"lookups_{result}")
        for result in ("hit", "miss", "late", "slower")
    ),
)
"""Series, their labels, and our names. Bytes, and seconds of copies, are those of all ranks of this
connector, or of vLLM's OffloadingConnector."""


@dataclass
class Reply:
    """One request, as its client saw it. Times in seconds."""

    kind: str
    """What its TTFT is reported under."""
    id: str
    """The same for the same prompt."""
    prompt_tokens: int
    answer_tokens: int
    compared: bool
    """True if its answer has to be the same for every contender."""
    at: float
    """From the start of the measurement until it was sent."""
    ttft: float = 0.0
    latency: float = 0.0
    """To the last token."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed, from any source."""
    answer: str = ""
    sources: dict[str, float] = field(default_factory=dict)
    """Prompt tokens by source, of conversations with the engine's own answers."""
    tokens: Sequence[int] = ()
    """Of the answer, from an engine in this process."""
    arrivals: list[float] = field(default_factory=list)
    """When tokens came, from the moment that it was sent."""

    @property
    def tpot(self) -> float | None:
        """From token to token, after the first."""
        if self.answer_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.answer_tokens - 1)


class RequestLost(Exception):
    """A request that was refused, was cut off, did not end in time, or got an answer of the wrong
    length."""


@dataclass(frozen=True)
class Start:
    """What an engine begins with."""

    folder: str | None = None
    """Of its files, which outlive it; None: it has none."""
    again: bool = False
    """Whether an engine before has left them."""


class Client(ABC):
    """Sends requests, and collects their replies."""

    def __init__(self, plan: Plan, start: Start, report: Report) -> None:
        self.plan = plan
        self.start = start
        self.report = report
        self.vocabulary = plan.vocabulary()
        self.repeat = 0
        """Prompts are other ones for each."""
        self.replies: list[Reply] = []
        self._before: dict[str, float] = {}
        self._began = self._busy = 0.0

    def text(self, length: int, *what: object) -> list[int]:
        """Token ids, the same for the same ``what`` and repeat."""
        return self.vocabulary.random(length, self.plan.seed, self.repeat, *what)

    def begin(self) -> None:
        """Measure from now on, and forget what was before."""
        self.replies.clear()
        self._before = counters(self.samples())
        self._busy, self._began = time.process_time(), time.perf_counter()

    def elapsed(self) -> float:
        """Seconds of the measurement."""
        return time.perf_counter() - self._began

    def busy(self) -> float:
        """Processor time of this process for each second of the measurement."""
        return (time.process_time() - self._busy) / self.elapsed()

    def counted(self) -> dict[str, float]:
        """What the engine has counted in the measurement. A series that is new began at 0."""
        totals = counters(self.samples())
        return {name: value - self._before.get(name, 0) for name, value in totals.items()}

    async def settle(self) -> None:
        """Wait for stores, whose end no connector reports."""
        await asyncio.sleep(self.plan.settle_seconds)

    async def ask(
        self,
        kind: str | None,
        id: str,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        compared: bool = False,
        started: asyncio.Event | None = None,
    ) -> Reply:
        """Request ``num_tokens`` after ``prompt``; set ``started`` at the first of them, or when
        there will be none. Without a ``kind`` it is not measured.

        Raises RequestLost.
        """
        sent = time.perf_counter()
        reply = Reply(kind or "", id, len(prompt), num_tokens, compared, sent - self._began)

        def on_token() -> None:
            reply.arrivals.append(time.perf_counter() - sent)
            if started is not None:
                started.set()

        try:
            async with asyncio.timeout(REQUEST_DEADLINE):
                answered = await self._listen(reply, prompt, on_token)
        except TimeoutError:
            raise RequestLost(f"{id}: no end within {REQUEST_DEADLINE:.0f} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise RequestLost(f"{id}: {type(error).__name__}: {error}") from None
        finally:
            if started is not None:
                started.set()  # so that no task waits for a lost request
        if answered != num_tokens or not reply.arrivals:
            raise RequestLost(f"{id}: {answered} of {num_tokens} tokens")
        reply.ttft, reply.latency = reply.arrivals[0], reply.arrivals[-1]
        if kind is not None:
            self.replies.append(reply)
        return reply

    @abstractmethod
    def samples(self) -> Iterable[Sample]:
        """The engine's series. Raises RunFailed if a server does not answer."""

    @abstractmethod
    async def reset(self, *, external: bool) -> None:
        """Empty the device's prefix cache, and with ``external`` the connector's as well. Waits
        for what holds blocks. Raises RunFailed if that does not happen in time."""

    @abstractmethod
    def failure(self, text: str) -> RunFailed:
        """An error with ``text`` about the engine or the server."""

    @abstractmethod
    async def _listen(
        self, reply: Reply, prompt: Sequence[int], on_token: Callable[[], None]
    ) -> int:
        """Fill in the answer and its cached tokens; the number of the answer's tokens."""


class EngineClient(Client):
    """Of an engine in this process."""

    def __init__(self, engine: "AsyncLLM", plan: Plan, start: Start, report: Report) -> None:
        super().__init__(plan, start, report)
        self._engine = engine
        self._numbers = itertools.count()

    def samples(self) -> Iterable[Sample]:
        return [sample for family in REGISTRY.collect() for sample in family.samples]

    async def reset(self, *, external: bool) -> None:
        try:
            async with asyncio.timeout(RESET_SECONDS):
                while not await self._engine.reset_prefix_cache(reset_connector=external):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise self.failure(f"did not reset its caches in {RESET_SECONDS:.0f} s") from None

    def failure(self, text: str) -> RunFailed:
        return RunFailed(f"The engine {text}.")

    async def _listen(
        self, reply: Reply, prompt: Sequence[int], on_token: Callable[[], None]
    ) -> int:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(
            temperature=0, max_tokens=reply.answer_tokens, ignore_eos=True, detokenize=False
        )
        async for output in self._engine.generate(
            TokensPrompt(prompt_token_ids=list(prompt)),
            sampling,
            f"{next(self._numbers)} {reply.id}",
        ):
            on_token()
            reply.tokens = list(output.outputs[0].token_ids)
            reply.cached_tokens = output.num_cached_tokens or 0
        reply.answer = self.vocabulary.decode(reply.tokens)
        return len(reply.tokens)


class HttpClient(Client):
    """Of a server. Prompts go as token ids, so that no tokenizer changes their length."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: Endpoint,
        plan: Plan,
        start: Start,
        report: Report,
    ) -> None:
        super().__init__(plan, start, report)
        self._session = session
        self._server = server

    def samples(self) -> Iterable[Sample]:
        return self._server.samples()

    async def reset(self, *, external: bool) -> None:
        if isinstance(self._server, Server):  # others may have clients that need their caches
            self._server.reset_prefix_cache(external=external)

    def failure(self, text: str) -> RunFailed:
        return self._server.failure(text)

    async def _listen(
        self, reply: Reply, prompt: Sequence[int], on_token: Callable[[], None]
    ) -> int:
        body = {
            "model": self._server.model,
            "prompt": prompt,
            "max_tokens": reply.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answered = 0
        url = f"{self._server.url}/v1/completions"
        async with self._session.post(url, json=body, raise_for_status=True) as response:
            async for line in response.content:
                event = line.strip().removeprefix(b"data: ")
                if not event or event == b"[DONE]":
                    continue
                data = json.loads(event)
                if "error" in data:
                    raise ValueError(data["error"])
                for choice in data["choices"]:
                    on_token()  # vLLM sends nothing before there is one; its text may be withheld
                    reply.answer += choice["text"]
                if data.get("usage"):
                    answered = data["usage"]["completion_tokens"]
                    details = data["usage"].get("prompt_tokens_details") or {}
                    reply.cached_tokens = details.get("cached_tokens") or 0
        return answered


def counters(samples: Iterable[Sample]) -> dict[str, float]:
    """Running totals of those series that there are."""
    found: dict[str, float] = {}
    for sample in samples:
        for series, labels, name in SERIES:
            if series == sample.name and labels.items() <= sample.labels.items():
                found[name] = found.get(name, 0) + sample.value
    return found
