"""Traces of real requests: lengths and block identities, no text.

Two formats are read, both also compressed (.xz):

- Mooncake's JSONL (github kvcache-ai/Mooncake, FAST25-release/traces): a request a line, with
  ``timestamp`` in ms, ``input_length``, ``output_length`` and ``hash_ids`` of 512 tokens each.
- Claude Code sessions in one JSON object (recorded by github callanjfox/kv-cache-tester), made
  compact: ``block_size`` tokens have one id, local to the session; a row has the time in s, input
  and output tokens, think time, time of the answer, the number of ids that it shares with the row
  before, and runs of further ids, each the first one and their number.
"""

import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from examples.bench.command import CannotStart


class Turn(NamedTuple):
    """A request. Equal ids at the start of two requests are a common prefix."""

    at: float
    """Seconds from the start of the trace, or of the session."""
    pause: float
    """Seconds from the end of the session's turn before, in a closed loop."""
    ids: Sequence[int]
    """Identities of the prompt's blocks, unique in the trace."""
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """Sessions of requests."""

    name: str
    block_tokens: int
    """Tokens that share an id."""
    sessions: Sequence[Sequence[Turn]]
    """In the order of the file. A request that belongs to no session is one of its own."""

    @property
    def has_sessions(self) -> bool:
        """Whether agents can take turns at its sessions; else requests come at their times."""
        return any(len(session) > 1 for session in self.sessions)

    def shuffled(self, seed: int) -> list[Sequence[Turn]]:
        """The sessions in another order."""
        return Random(f"{seed} sessions").sample(self.sessions, len(self.sessions))


_MOONCAKE_TOKENS = 512


@cache
def read_trace(path: Path) -> Trace:
    """Raises CannotStart, which names the file and the line or session, for anything else."""
    try:
        content = path.read_bytes()
        text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise CannotStart(f"--traces: {path} cannot be read: {error}") from None
    name = path.name.split(".")[0]
    first = text.lstrip()[:2000]
    if '"traces"' in first:
        return _claude_code(path, name, text)
    return _mooncake(path, name, text)


def _mooncake(path: Path, name: str, text: str) -> Trace:
    sessions: list[list[Turn]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            # The last id may stand for fewer tokens: no other prompt can have that block.
            complete = int(row["input_length"]) // _MOONCAKE_TOKENS
            ids = tuple(int(each) for each in row["hash_ids"][:complete])
            turn = Turn(float(row["timestamp"]) / 1000, 0.0, ids, int(row["output_length"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CannotStart(
                f"--traces: {path}, line {number} is no request of Mooncake's format with "
                f"timestamp, input_length, output_length and hash_ids: {error!r}"
            ) from None
        sessions.append([turn])
    if not sessions:
        raise CannotStart(f"--traces: {path} has no requests")
    return Trace(name, _MOONCAKE_TOKENS, sessions)


def _claude_code(path: Path, name: str, text: str) -> Trace:
    try:
        data = json.loads(text)
        block_tokens = int(data["block_size"])
        rows = [session["rows"] for session in data["traces"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CannotStart(f"--traces: {path} lacks block_size or traces: {error!r}") from None
    sessions: list[list[Turn]] = []
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
            turns = _turns(session, first_id)
        except (ValueError, IndexError, TypeError) as error:
            raise CannotStart(
                f"--traces: {path}, session {number} has a row of another form: {error!r}"
            ) from None
        sessions.append(turns)
        first_id = 1 + max((max(turn.ids, default=first_id) for turn in turns), default=first_id)
    return Trace(name, block_tokens, [session for session in sessions if session])


def _turns(rows: Sequence[Any], first_id: int) -> list[Turn]:
    turns: list[Turn] = []
    ids: tuple[int, ...] = ()
    ended = 0.0
    for at, _, output_tokens, _, answer_seconds, num_kept, runs in rows:
        new = chain.from_iterable(range(start, start + count) for start, count in runs)
        ids = ids[:num_kept] + tuple(first_id + each for each in new)
        pause = max(0.0, float(at) - ended) if turns else 0.0
        ended = float(at) + float(answer_seconds or 0)
        turns.append(Turn(float(at), pause, ids, int(output_tokens)))
    return turns
