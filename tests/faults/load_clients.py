"""Clients of a load run: asyncio tasks that send requests to one server."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from tests.engine.spec import Answer
from tests.faults.load_book import LoadBook, Script, Tokens

NUM_CLIENTS = 6

REQUEST_SECONDS = 120.0
"""Time limit of a request, in seconds; a longer one counts as one that never ends."""

RESET_SECONDS = 60.0
"""Time in seconds during which an idle server may refuse to reset its prefix cache, since stores
are still in flight."""

MAX_TOKENS = (4, 40)
SALTS = (None, None, None, "a", "b")


class Connection:
    """One server's completions, greedy and never stopping early, and its switches."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def complete(self, prompt: Tokens, max_tokens: int, salt: str | None = None) -> Answer:
        """The whole answer at once."""
        answer = Answer([], [], [])
        async with self._complete(prompt, max_tokens, salt, stream=False) as response:
            _append(answer, await response.read())
        return answer

    async def stream(
        self, prompt: Tokens, max_tokens: int, salt: str | None, hang_up_after: int
    ) -> Answer:
        """The streamed answer. Closes the connection after ``hang_up_after`` tokens."""
        answer = Answer([], [], [])
        async with self._complete(prompt, max_tokens, salt, stream=True) as response:
            while len(answer.tokens) < hang_up_after:
                line = (await response.content.readline()).strip()
                if line == b"data: [DONE]":
                    return answer
                if line:
                    _append(answer, line.removeprefix(b"data: "))
                elif response.content.at_eof():
                    raise aiohttp.ClientPayloadError("the stream ended without [DONE]")
            response.close()  # else aiohttp reads on, to reuse the connection
        return answer

    async def reset(self, *, external: bool, running: bool) -> bool:
        """Reset the device's prefix cache, with ``external`` the host tier too; ``running``
        requests are preempted. Whether that was possible."""
        wishes = {"reset_external": external, "reset_running_requests": running}
        query = {key: str(wish).lower() for key, wish in wishes.items()}
        async with self._session.post("/reset_prefix_cache", params=query) as response:
            if running and response.status == 500:
                return False  # vLLM's refusal while blocks wait for a transfer
            response.raise_for_status()
            return bool((await response.json())["success"])

    async def pause(self, *, mode: str, seconds: float) -> None:
        """Pause the scheduler for a while."""
        # vLLM cannot clear the cache while it keeps requests that wait for a load.
        query = {"mode": mode, "clear_cache": str(mode == "wait").lower()}
        async with self._session.post("/pause", params=query) as response:
            response.raise_for_status()
        await asyncio.sleep(seconds)
        async with self._session.post("/resume") as response:
            response.raise_for_status()

    @asynccontextmanager
    async def _complete(
        self, prompt: Tokens, max_tokens: int, salt: str | None, *, stream: bool
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        request = {
            "model": "random",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            "stream": stream,
        }
        if salt is not None:
            request["cache_salt"] = salt
        async with self._session.post("/v1/completions", json=request) as response:
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"{response.status}: {await response.text()}")
            yield response


class Worker:
    """A task that uses the server until the end of the run."""

    def __init__(
        self, connection: Connection, slots: asyncio.Semaphore, book: LoadBook, seed: int
    ) -> None:
        """``slots``: one for each request that runs."""
        self._connection = connection
        self._slots = slots
        self._book = book
        self._rng = random.Random(seed)


class Client(Worker):
    """Sends one request after another."""

    async def work(self, script: Script, until: asyncio.Event) -> None:
        """Send requests of all kinds. Returns when ``until`` is set and the last request has
        ended."""
        while not until.is_set():
            turn = script.pick()
            start = time.monotonic()
            answer = None
            try:
                async with self._slots, asyncio.timeout(REQUEST_SECONDS):
                    answer = await self._ask(turn.prompt)
            except TimeoutError:
                self._book.violations.append(f"a request has not ended in {REQUEST_SECONDS:.0f} s")
            except (aiohttp.ClientError, OSError) as error:
                self._book.violations.append(f"a request failed: {error!r}")
            self._book.slowest_seconds = max(self._book.slowest_seconds, time.monotonic() - start)
            if answer is not None:
                script.go_on(turn, answer)

    async def _ask(self, prompt: Tokens) -> Answer | None:
        """Send one request. Returns its answer, or None if it was wrong or was abandoned."""
        max_tokens = self._rng.randint(*MAX_TOKENS)
        salt = self._rng.choice(SALTS)
        kinds = ("whole", "streamed", "hung up", "cancelled")
        (kind,) = self._rng.choices(kinds, weights=(45, 30, 15, 10))
        self._book.counts.update(("requests", kind))
        if kind == "cancelled":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rng.uniform(0.0, 0.6)):
                    await self._connection.complete(prompt, max_tokens, salt)
            return None
        if kind == "whole":
            answer = await self._connection.complete(prompt, max_tokens, salt)
        elif kind == "streamed":
            answer = await self._connection.stream(prompt, max_tokens, salt, max_tokens + 1)
        else:
            num_tokens = self._rng.randrange(max_tokens)
            answer = await self._connection.stream(prompt, max_tokens, salt, num_tokens)
        is_whole = kind != "hung up"
        self._book.counts["completed"] += is_whole
        if is_whole and len(answer.tokens) != max_tokens:
            self._book.violations.append(f"{len(answer.tokens)} tokens, not {max_tokens}")
            return None
        self._book.check(prompt, answer, keep=is_whole)
        return answer if is_whole else None


class Operator(Worker):
    """Resets caches and pauses the server now and then, under load and between requests."""

    async def work(self, seconds_between: tuple[float, float], until: asyncio.Event) -> None:
        """Reset and pause in all ways, until ``until`` is set."""
        while not until.is_set():
            try:
                async with asyncio.timeout(self._rng.uniform(*seconds_between)):
                    await until.wait()
                return
            except TimeoutError:
                pass
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    await self._rng.choice((self._reset, self._reset, self._pause))()
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                self._book.violations.append(f"a reset or pause failed: {error!r}")

    async def reset_idle(self, *, external: bool) -> bool:
        """Reset an idle server, which has to succeed once its stores have ended."""
        deadline = time.monotonic() + RESET_SECONDS
        while not await self._connection.reset(external=external, running=False):
            if time.monotonic() > deadline:
                self._book.violations.append(
                    f"an idle server still holds device blocks after {RESET_SECONDS:.0f} s"
                )
                return False
            await asyncio.sleep(0.05)
        return True

    async def _reset(self) -> None:
        external = self._rng.random() < 0.5
        if self._rng.random() < 0.5:
            async with self._all_slots():
                done = await self.reset_idle(external=external)
        else:
            running = self._rng.random() < 0.5
            done = await self._connection.reset(external=external, running=running)
        self._book.counts["resets"] += 1
        self._book.counts["resets refused"] += not done
        self._book.counts["resets of both"] += external

    async def _pause(self) -> None:
        mode = self._rng.choice(("keep", "wait"))
        await self._connection.pause(mode=mode, seconds=self._rng.uniform(0.0, 1.0))
        self._book.counts["pauses"] += 1

    @asynccontextmanager
    async def _all_slots(self) -> AsyncIterator[None]:
        """Waits for the end of all requests, and admits none during the context."""
        num_taken = 0
        try:
            while num_taken < NUM_CLIENTS:
                await self._slots.acquire()
                num_taken += 1
            yield
        finally:
            for _ in range(num_taken):
                self._slots.release()


def _append(answer: Answer, encoded: bytes) -> None:
    """Add one chunk of an answer, or all of it."""
    (choice,) = json.loads(encoded)["choices"]
    if not choice["token_ids"]:
        return
    answer.tokens.extend(choice["token_ids"])
    answer.logprobs.extend(choice["logprobs"]["token_logprobs"])
    for ranked in choice["logprobs"]["top_logprobs"]:
        best, second, *_ = sorted(ranked.values(), reverse=True)
        answer.leads.append(best - second)
