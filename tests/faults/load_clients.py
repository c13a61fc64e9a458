"""Clients of a load run: threads that send requests to one server."""

import json
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from threading import Event, Lock, Semaphore
from typing import Any
from urllib.parse import urlencode

import httpx

from examples.bench.command import RunFailed
from tests.engine.spec import Answer
from tests.faults.load_book import LoadBook, Script, Tokens
from tests.serve.server import Server, completion

NUM_CLIENTS = 6
MAX_TOKENS = (4, 40)
NO_SALT: Mapping[str, Any] = {}
SALTS = (*[NO_SALT] * 3, {"cache_salt": "a"}, {"cache_salt": "b"})
FAILURES = (OSError, HTTPException, httpx.HTTPError, AssertionError, RunFailed)
"""Of requests. One that takes longer than ``Server`` waits is a TimeoutError, hence an OSError."""


def complete(
    server: Server, prompt: Tokens, max_tokens: int, salt: Mapping[str, Any] = NO_SALT
) -> Answer:
    """The whole answer at once."""
    return Answer(*completion(server.answer(prompt, max_tokens, **salt)))


def stream(
    server: Server, prompt: Tokens, max_tokens: int, salt: Mapping[str, Any], hang_up_after: int
) -> Answer:
    """The streamed answer. Closes the connection after ``hang_up_after`` tokens."""
    answer = Answer([], [], [])
    with server.open_stream(prompt, max_tokens, **salt) as lines:
        while len(answer.tokens) < hang_up_after:
            event = next(lines, b"").strip()
            if event == b"data: [DONE]":
                break
            assert event, "the stream ended without [DONE]"
            data = json.loads(event.removeprefix(b"data: "))
            if data["choices"][0]["token_ids"]:
                more = completion(data)
                answer.tokens.extend(more.tokens)
                answer.logprobs.extend(more.logprobs)
                answer.leads.extend(more.leads)
    return answer


def post(server: Server, path: str, **query: object) -> dict[str, Any]:
    """The answer. vLLM refuses to reset running requests while blocks wait for a transfer."""
    answer = server.exchange("POST", f"{path}?{urlencode(query).lower()}")
    if answer.status_code == 500 and query.get("reset_running_requests"):
        return {"success": False}
    assert answer.status_code == 200, answer.text[:1000]
    found: dict[str, Any] = answer.json()
    return found


class Slots:
    """One for each request that runs."""

    def __init__(self) -> None:
        self._gate, self._free = Lock(), Semaphore(NUM_CLIENTS)

    @contextmanager
    def take(self, count: int = 1) -> Iterator[None]:
        """Wait for ``count`` slots. Nobody passes one that waits for all."""
        with self._gate:
            for _ in range(count):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(count)


class Worker:
    """Uses the server until the end of the run."""

    def __init__(self, server: Server, slots: Slots, book: LoadBook, seed: int) -> None:
        self._server = server
        self._slots = slots
        self._book = book
        self._rng = random.Random(seed)


class Client(Worker):
    """Sends one request after another."""

    def work(self, script: Script, until: Event) -> None:
        """Send requests of all kinds. Returns when ``until`` is set and the last request has
        ended."""
        while not until.is_set():
            with self._book.lock:
                turn = script.pick()
            start = time.monotonic()
            try:
                with self._slots.take():
                    kind, max_tokens, answer = self._ask(turn.prompt)
            except FAILURES as error:
                self._book.violations.append(f"a request failed: {error!r}")
                continue
            with self._book.lock:
                seconds = time.monotonic() - start
                self._book.slowest_seconds = max(self._book.slowest_seconds, seconds)
                if self._book.note(kind, turn.prompt, max_tokens, answer):
                    script.go_on(turn, answer)

    def _ask(self, prompt: Tokens) -> tuple[str, int, Answer]:
        """Send one request. Returns its kind, the length of a whole answer, and its answer."""
        max_tokens, salt = self._rng.randint(*MAX_TOKENS), self._rng.choice(SALTS)
        kinds = ("whole", "streamed", "hung up", "cancelled")
        (kind,) = self._rng.choices(kinds, weights=(45, 30, 15, 10))
        if kind == "cancelled":
            after = self._rng.uniform(0.0, 0.6)
            self._server.ask_and_hang_up(prompt, max_tokens, after=after, **salt)
            return kind, max_tokens, Answer([], [], [])
        asked = self._server, prompt, max_tokens, salt
        if kind == "whole":
            return kind, max_tokens, complete(*asked)
        after_tokens = max_tokens + 1 if kind == "streamed" else self._rng.randrange(max_tokens)
        return kind, max_tokens, stream(*asked, after_tokens)


class Operator(Worker):
    """Resets caches and pauses the server now and then, under load and between requests."""

    def work(self, seconds_between: tuple[float, float], until: Event) -> None:
        """Reset and pause in all ways, until ``until`` is set."""
        while not until.wait(self._rng.uniform(*seconds_between)):
            try:
                self._rng.choice((self._reset, self._reset, self._pause))()
            except FAILURES as error:
                self._book.violations.append(f"a reset or pause failed: {error!r}")

    def _reset(self) -> None:
        external, is_idle, running = (self._rng.random() < 0.5 for _ in range(3))
        if is_idle:  # it has to succeed once stores have ended
            with self._slots.take(NUM_CLIENTS):
                self._server.reset_prefix_cache(external=external)
        else:
            query = {"reset_external": external, "reset_running_requests": running}
            found = post(self._server, "/reset_prefix_cache", **query)
            self._book.counts["resets refused"] += not found["success"]
        self._book.counts["resets"] += 1
        self._book.counts["resets of both"] += external

    def _pause(self) -> None:
        mode = self._rng.choice(("keep", "wait"))
        # vLLM cannot clear the cache while it keeps requests that wait for a load.
        post(self._server, "/pause", mode=mode, clear_cache=mode == "wait")
        time.sleep(self._rng.uniform(0.0, 1.0))
        post(self._server, "/resume")
        self._book.counts["pauses"] += 1
