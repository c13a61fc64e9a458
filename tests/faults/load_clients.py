"""Clients of a load run: asyncio tasks that send requests to one server."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.faults.load_book import Answer, LoadBook, Script, Tokens

REQUEST_SECONDS = 120.0
"""Time limit of a request, in seconds; a longer one counts as one that never ends."""

RESET_SECONDS = 60.0
"""Time in seconds during which an idle server may refuse to reset its prefix cache, since stores
are still in flight."""

MAX_TOKENS = (4, 40)
SALTS = (None, None, None, "a", "b")


class Gate:
    """Admits requests of clients, except while a task has closed it to get an idle server."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._num_inside = 0
        self._closed = False

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Admits one request; waits while the gate is closed."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._num_inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Waits for the end of all requests, and admits none during the context."""
        async with self._changed:
            self._closed = True
            await self._changed.wait_for(lambda: self._num_inside == 0)
        try:
            yield
        finally:
            async with self._changed:
                self._closed = False
                self._changed.notify_all()


class Connection:
    """One server's completions, greedy and never stopping early."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def complete(self, prompt: Tokens, max_tokens: int, salt: str | None = None) -> Answer:
        """The whole answer at once."""
        answer = Answer()
        async with self._post("/v1/completions", _request(prompt, max_tokens, salt)) as response:
            (choice,) = (await response.json())["choices"]
            _append(answer, choice)
        return answer

    async def stream(
        self, prompt: Tokens, max_tokens: int, salt: str | None, hang_up_after: int | None
    ) -> Answer:
        """The streamed answer. With ``hang_up_after``, closes the connection after that many
        tokens."""
        answer = Answer()
        body = _request(prompt, max_tokens, salt) | {"stream": True}
        async with self._post("/v1/completions", body) as response:
            while hang_up_after is None or len(answer.tokens) < hang_up_after:
                line = (await response.content.readline()).strip()
                if line == b"data: [DONE]":
                    return answer
                if line:
                    (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                    _append(answer, choice)
                elif response.content.at_eof():
                    raise aiohttp.ClientPayloadError("the stream ended without [DONE]")
            response.close()  # else aiohttp reads on, to reuse the connection
        return answer

    async def reset(self, *, external: bool, running: bool) -> bool:
        """Reset the device's prefix cache, with ``external`` the host tier too; ``running``
        requests are preempted. Whether that was possible."""
        wishes = {"reset_external": external, "reset_running_requests": running}
        query = {key: str(wish).lower() for key, wish in wishes.items()}
        async with self._session.post(f"{self._url}/reset_prefix_cache", params=query) as response:
            if running and response.status == 500:
                return False  # vLLM's refusal while blocks wait for a transfer
            response.raise_for_status()
            return bool((await response.json())["success"])

    async def pause(self, *, mode: str, clear: bool) -> None:
        """Pause the scheduler; returns when nothing is in flight."""
        query = {"mode": mode, "clear_cache": str(clear).lower()}
        async with self._session.post(f"{self._url}/pause", params=query) as response:
            response.raise_for_status()

    async def resume(self) -> None:
        """Go on after a pause."""
        async with self._session.post(f"{self._url}/resume") as response:
            response.raise_for_status()

    @asynccontextmanager
    async def _post(self, path: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._session.post(f"{self._url}{path}", json=body) as response:
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"{response.status}: {await response.text()}")
            yield response


class Client:
    """Sends one request after another until ``until`` is set."""

    def __init__(
        self, connection: Connection, gate: Gate, book: LoadBook, script: Script, seed: int
    ) -> None:
        self._connection = connection
        self._gate = gate
        self._book = book
        self._script = script
        self._rng = random.Random(seed)

    async def work(self, until: asyncio.Event) -> None:
        """Send requests of all kinds. Returns when ``until`` is set and the last request has
        ended."""
        while not until.is_set():
            turn = self._script.pick()
            max_tokens = self._rng.randint(*MAX_TOKENS)
            salt = self._rng.choice(SALTS)
            start = time.monotonic()
            async with self._gate.entered():
                answer = await self._ask(turn.prompt, max_tokens, salt)
            self._book.slowest_seconds = max(self._book.slowest_seconds, time.monotonic() - start)
            if answer is not None:
                self._script.go_on(turn, answer)

    async def _ask(self, prompt: Tokens, max_tokens: int, salt: str | None) -> Answer | None:
        """Send one request. Returns its answer, or None if it failed or was to be abandoned."""
        kind = self._rng.choices(
            ("whole", "streamed", "hung up", "cancelled"), weights=(45, 30, 15, 10)
        )[0]
        counts = self._book.counts
        counts["requests"] += 1
        counts[kind] += 1
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                if kind == "cancelled":
                    await self._cancel(prompt, max_tokens, salt)
                    return None
                if kind == "whole":
                    answer = await self._connection.complete(prompt, max_tokens, salt)
                else:
                    after = self._rng.randrange(max_tokens) if kind == "hung up" else None
                    answer = await self._connection.stream(prompt, max_tokens, salt, after)
        except TimeoutError:
            self._book.violations.append(f"a request has not ended in {REQUEST_SECONDS:.0f} s")
            return None
        except (aiohttp.ClientError, OSError) as error:
            self._book.violations.append(f"a request failed: {error!r}")
            return None
        if kind == "hung up":
            self._book.check(prompt, answer, keep=False)
            return None
        counts["completed"] += 1
        if len(answer.tokens) != max_tokens:
            self._book.violations.append(f"{len(answer.tokens)} tokens, not {max_tokens}")
            return None
        self._book.check(prompt, answer, keep=True)
        return answer

    async def _cancel(self, prompt: Tokens, max_tokens: int, salt: str | None) -> None:
        """Request a whole answer and disconnect a moment later."""
        try:
            async with asyncio.timeout(self._rng.uniform(0.0, 0.6)):
                await self._connection.complete(prompt, max_tokens, salt)
        except TimeoutError:
            return
        self._book.counts["too late to cancel"] += 1


class Operator:
    """Resets caches and pauses the server now and then, under load and between requests."""

    def __init__(
        self,
        connection: Connection,
        gate: Gate,
        book: LoadBook,
        seed: int,
        seconds_between: tuple[float, float],
    ) -> None:
        self._connection = connection
        self._gate = gate
        self._book = book
        self._rng = random.Random(seed)
        self._seconds_between = seconds_between

    async def work(self, until: asyncio.Event) -> None:
        """Reset and pause in all ways, until ``until`` is set."""
        while not until.is_set():
            try:
                async with asyncio.timeout(self._rng.uniform(*self._seconds_between)):
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
            async with self._gate.closed():
                done = await self.reset_idle(external=external)
        else:
            running = self._rng.random() < 0.5
            done = await self._connection.reset(external=external, running=running)
        self._book.counts["resets"] += 1
        self._book.counts["resets refused"] += not done
        self._book.counts["resets of both"] += external

    async def _pause(self) -> None:
        mode = self._rng.choice(("keep", "wait"))
        # vLLM cannot clear the cache while it keeps requests that wait for a load.
        await self._connection.pause(mode=mode, clear=mode == "wait")
        await asyncio.sleep(self._rng.uniform(0.0, 1.0))
        await self._connection.resume()
        self._book.counts["pauses"] += 1


def _request(prompt: Tokens, max_tokens: int, salt: str | None) -> dict[str, Any]:
    request = {
        "model": "random",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
    }
    return request if salt is None else request | {"cache_salt": salt}


def _append(answer: Answer, choice: Mapping[str, Any]) -> None:
    """Add one chunk of an answer (or all of it)."""
    if not choice["token_ids"]:
        return
    answer.tokens.extend(choice["token_ids"])
    answer.logprobs.extend(choice["logprobs"]["token_logprobs"])
    for ranked in choice["logprobs"]["top_logprobs"]:
        best, second, *_ = sorted(ranked.values(), reverse=True)
        answer.leads.append(best - second)
