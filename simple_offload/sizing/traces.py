"""Traces of real requests: lengths and block identities, no text.

Three formats are read, also compressed by xz or gzip:

- Mooncake's JSONL (github kvcache-ai/Mooncake, FAST25-release/traces): a request a line, with
  ``timestamp`` in ms, ``input_length``, ``output_length`` and ``hash_ids`` of 512 tokens each.
- Sessions of agents in one JSON object (recorded by github callanjfox/kv-cache-tester), made
  compact: ``block_size`` tokens have one id, local to the session; a row has the time in s, input
  and output tokens, think time, time of the answer, the number of ids that it shares with the row
  before, and runs of further ids, each the first one and their number.
- LMCache's lookup log (``lmcache server --lookup-hash-log-dir``): a lookup a line, with
  ``timestamp`` in s, ``model_name``, ``seq_len`` tokens and ``chunk_hashes`` of ``chunk_size``
  tokens each. It has no answers.
"""

import gzip
import json
import lzma
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from simple_offload.config import ConfigError

_MOONCAKE_TOKENS = 512
_XZ, _GZIP = b"\xfd7zXZ\0", b"\x1f\x8b"
_MALFORMED = (ValueError, TypeError, LookupError, OverflowError)
"""Raised for a row of another form."""
_ALLOWED = (
    "Allowed: lines of Mooncake's format (timestamp, input_length, output_length, hash_ids) or of "
    "LMCache's lookup log (timestamp, seq_len, chunk_size, chunk_hashes), or one object with "
    "sessions of agents (block_size, traces)"
)


class Request(NamedTuple):
    """Equal ids at the start of two requests are a common prefix."""

    at: float
    """Seconds from the start of the trace, or of the session."""
    pause: float
    """Seconds from the end of the session's request before, in a closed loop."""
    ids: Sequence[int]
    """Identities of the prompt's full blocks, unique in the trace."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """Sessions of requests."""

    name: str
    block_tokens: int
    """Tokens that share an id."""
    sessions: Sequence[Sequence[Request]]
    """In the order of the file. A request that belongs to no session is one of its own."""

    @property
    def has_sessions(self) -> bool:
        """Whether agents can take turns at its sessions; else requests come at their times."""
        return any(len(session) > 1 for session in self.sessions)

    @property
    def num_references(self) -> int:
        """Full blocks of all prompts."""
        return sum(len(request.ids) for session in self.sessions for request in session)

    @cached_property
    def num_blocks(self) -> int:
        """Distinct ones of these."""
        ids = (request.ids for session in self.sessions for request in session)
        return len(set(chain.from_iterable(ids)))


def read_trace(path: Path) -> Trace:
    """The format is told by the contents. Raises ConfigError, which names the file and the line or
    session, if there is none."""
    try:
        content = path.read_bytes()
        if content.startswith(_XZ):
            content = lzma.decompress(content)
        elif content.startswith(_GZIP):
            content = gzip.decompress(content)
        text = content.decode()
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    name = path.name.split(".")[0]
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{path} has no requests. {_ALLOWED}")
    number, first = lines[0]
    try:
        found = json.loads(first)
    except ValueError:  # an object of several lines, or no JSON
        try:
            found = json.loads(text)
        except ValueError as error:
            number = getattr(error, "lineno", number)
            raise ConfigError(f"{path}, line {number} is no request: {error}. {_ALLOWED}") from None
    keys = list(found) if isinstance(found, dict) else []
    if "chunk_hashes" in keys:
        return _lookup_log(path, name, lines)
    if "hash_ids" in keys:
        return _mooncake(path, name, lines)
    if "traces" in keys:
        return _agents(path, name, found)
    has = f"has {', '.join(keys)}" if keys else "no object with keys"
    raise ConfigError(f"{path}, line {number} is no request: {has[:200]}. {_ALLOWED}")


def _mooncake(path: Path, name: str, lines: Sequence[tuple[int, str]]) -> Trace:
    def parse(row: Any) -> Request:
        num_tokens, ids = int(row["input_length"]), row["hash_ids"]
        if len(ids) != -(-num_tokens // _MOONCAKE_TOKENS):
            raise ValueError(
                f"{len(ids)} hash_ids for {num_tokens} tokens; each stands for {_MOONCAKE_TOKENS}"
            )
        # The last id may stand for fewer tokens: no other prompt can have that block.
        full = tuple(int(each) for each in ids[: num_tokens // _MOONCAKE_TOKENS])
        at = float(row["timestamp"]) / 1000
        return _request(at, full, num_tokens, row["output_length"], _MOONCAKE_TOKENS)

    form = "Mooncake's format (timestamp, input_length, output_length, hash_ids)"
    requests = _parse_lines(path, lines, parse, form)
    return Trace(name, _MOONCAKE_TOKENS, [[each] for each in requests])


def _lookup_log(path: Path, name: str, lines: Sequence[tuple[int, str]]) -> Trace:
    known: dict[str, Any] = {}

    def parse(row: Any) -> Request:
        for key in ("chunk_size", "model_name"):
            if known.setdefault(key, row[key]) != row[key]:
                raise ValueError(f"{key} is {row[key]!r}, and {known[key]!r} before; one a file")
        num_tokens, block_tokens = int(row["seq_len"]), int(row["chunk_size"])
        ids = tuple(int(each, 16) for each in row["chunk_hashes"])
        if block_tokens < 1 or len(ids) != num_tokens // block_tokens:
            raise ValueError(f"{len(ids)} chunk_hashes for {num_tokens} tokens")
        return _request(row["timestamp"], ids, num_tokens, 0, block_tokens)

    form = "LMCache's lookup log (timestamp, model_name, seq_len, chunk_size, chunk_hashes)"
    requests = _parse_lines(path, lines, parse, form)
    start = min(each.at for each in requests)
    return Trace(
        name, int(known["chunk_size"]), [[each._replace(at=each.at - start)] for each in requests]
    )


def _parse_lines(
    path: Path, lines: Sequence[tuple[int, str]], parse: Callable[[Any], Request], form: str
) -> list[Request]:
    requests = []
    for number, line in lines:
        try:
            requests.append(parse(json.loads(line)))
        except _MALFORMED as error:
            raise ConfigError(f"{path}, line {number} is no request of {form}: {error!r}") from None
    return requests


def _request(
    at: Any, ids: Sequence[int], prompt_tokens: Any, output_tokens: Any, block_tokens: int
) -> Request:
    """Raises ValueError for what no server can have been asked."""
    found = Request(float(at), 0.0, ids, int(prompt_tokens), int(output_tokens))
    if not math.isfinite(found.at) or found.prompt_tokens < 1:
        raise ValueError(f"{prompt_tokens} tokens at {at}")
    if len(ids) * block_tokens > found.prompt_tokens or len(set(ids)) < len(ids):
        raise ValueError(f"{prompt_tokens} tokens have not {len(ids)} blocks, or one of them twice")
    return found


def _agents(path: Path, name: str, data: Any) -> Trace:
    try:
        block_tokens = int(data["block_size"])
        if block_tokens < 1:
            raise ValueError(f"blocks of {block_tokens} tokens")
        rows = [session["rows"] for session in data["traces"]]
    except _MALFORMED as error:
        raise ConfigError(f"{path} lacks block_size or traces: {error!r}. {_ALLOWED}") from None
    sessions: list[list[Request]] = []
    starts: set[Any] = set()
    first_id = 0
    for number, session in enumerate(rows, 1):
        try:
            # A fork begins like another session, whose ids it does not share: it would be counted
            # as computed twice.
            start = tuple((row[1], row[2]) for row in session[:3])
            if start in starts:
                continue
            starts.add(start)
            requests = _session(session, first_id, block_tokens)
        except _MALFORMED as error:
            raise ConfigError(
                f"{path}, session {number} has a row of another form than time, input and output "
                "tokens, think time, time of the answer, number of ids kept, and runs [first id, "
                f"count]: {error!r}"
            ) from None
        sessions.append(requests)
        first_id = 1 + max((max(each.ids, default=first_id) for each in requests), default=first_id)
    if not any(sessions):
        raise ConfigError(f"{path} has no requests")
    return Trace(name, block_tokens, [session for session in sessions if session])


def _session(rows: Sequence[Any], first_id: int, block_tokens: int) -> list[Request]:
    requests: list[Request] = []
    ids: tuple[int, ...] = ()
    ended = 0.0
    for at, prompt_tokens, output_tokens, _, answer_seconds, num_kept, runs in rows:
        new = chain.from_iterable(range(start, start + count) for start, count in runs)
        # No more than one too many: a run of another kind of file may have any length.
        some = islice(new, int(prompt_tokens) // block_tokens + 1)
        ids = ids[:num_kept] + tuple(first_id + each for each in some)
        pause = max(0.0, float(at) - ended) if requests else 0.0
        ended = float(at) + float(answer_seconds or 0)
        request = _request(at, ids, prompt_tokens, output_tokens, block_tokens)
        requests.append(request._replace(pause=pause))
    return requests
