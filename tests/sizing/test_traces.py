"""Readers of traces, and the order in which their requests are played."""

import gzip
import json
import lzma
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from simple_offload.config import ConfigError
from simple_offload.sizing.playback import in_order, play
from simple_offload.sizing.traces import Request, Trace, read_trace

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1536, "output_length": 70, "hash_ids": [0, 1, 3]},
]
SESSION = [
    [0.0, 200, 30, 0.0, 2.5, 0, [[1, 3]]],
    [10.0, 330, 40, None, None, 2, [[7, 2], [12, 1]]],
]
AGENTS: dict[str, Any] = {
    "block_size": 64,
    "traces": [
        {"rows": SESSION},
        {"rows": [[0.0, 70, 1, 0.0, 1.0, 0, [[1, 1]]]]},
        {"rows": [*SESSION, [30.0, 400, 1, 0.0, 1.0, 5, []]][:2]},  # a fork of the first
    ],
}
LOOKUP: dict[str, Any] = {
    "timestamp": 1711929600.5,
    "request_id": "req-1",
    "model_name": "DeepSeek-V3",
    "chunk_size": 256,
    "seq_len": 520,
    "dtypes": ["float8_e4m3fn"],
    "shapes": [[32, 256, 128]],
    "chunk_hashes": ["0x1f", "0x20"],
}
LOOKUPS = [LOOKUP, LOOKUP | {"timestamp": 1711929602.0, "chunk_hashes": ["0x1f", "0xff"]}]


def lines(rows: Sequence[Any]) -> str:
    return "\n".join(map(json.dumps, rows))


def plain(content: bytes) -> bytes:
    return content


# Formats


@pytest.mark.parametrize("compress", [plain, lzma.compress, gzip.compress])
def test_requests_of_mooncakes_format(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "talks.jsonl"  # whatever the name says
    path.write_bytes(compress(lines(MOONCAKE).encode()))
    # The last id of the first one stands for 76 tokens.
    first, second = Request(0.0, 0.0, (0, 1), 1100, 9), Request(1.5, 0.0, (0, 1, 3), 1536, 70)
    trace = read_trace(path)
    assert trace == Trace("talks", 512, [[first], [second]])
    assert not trace.has_sessions
    assert (trace.num_references, trace.num_blocks) == (5, 3)


@pytest.mark.parametrize("indent", [None, 1])
def test_sessions_of_agents(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "agents.json"
    path.write_text(json.dumps(AGENTS, indent=indent))
    trace = read_trace(path)
    first = [Request(0.0, 0.0, (1, 2, 3), 200, 30), Request(10.0, 7.5, (1, 2, 7, 8, 12), 330, 40)]
    # Ids are local to a session. A fork is left out.
    assert trace == Trace("agents", 64, [first, [Request(0.0, 0.0, (14,), 70, 1)]])
    assert trace.has_sessions


def test_lmcaches_lookup_log(tmp_path: Path) -> None:
    path = tmp_path / "lookup_hashes_20260401_143025_000003.jsonl"
    path.write_text(lines(LOOKUPS))
    requests = [Request(0.0, 0.0, (31, 32), 520, 0), Request(1.5, 0.0, (31, 255), 520, 0)]
    assert read_trace(path) == Trace(path.stem, 256, [[each] for each in requests])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, " cannot be read: .*No such file"),
        ("\n", " has no requests. Allowed: lines of Mooncake's format"),
        ("hello", ", line 1 is no request: .*Allowed: lines of Mooncake's"),
        ("[1, 2]", ", line 1 is no request: no object with keys. Allowed"),
        ('{"timestamp": 0, "ids": []}', ", line 1 is no request: has timestamp, ids. Allowed"),
        ('{"id": 1}\n{"id": 2}', ", line 1 is no request: has id. Allowed"),
        ('{\n"a": 1,\n}', ", line 3 is no request"),
        (f"{lines(MOONCAKE)}\n7", ", line 3 is no request of Mooncake's format .*TypeError"),
        (f"{lines(MOONCAKE)}\n{{}}", ", line 3 is no request of .*KeyError.'input_length'"),
        (lines([MOONCAKE[0] | {"input_length": 9}]), ", line 1 .*3 hash_ids for 9 tokens.*512"),
        (lines([MOONCAKE[0] | {"hash_ids": [7, 7, 8]}]), ", line 1 .*one of them twice"),
        (
            lines([MOONCAKE[0] | {"input_length": 0, "hash_ids": []}]),
            ", line 1 .*0 tokens at 0.0",
        ),
        (lines([MOONCAKE[0] | {"timestamp": math.nan}]), ", line 1 .*1100 tokens at nan"),
        (lines([MOONCAKE[0] | {"input_length": math.inf}]), ", line 1 .*OverflowError"),
        (lines([LOOKUP | {"chunk_size": 512}]), ", line 1 .*2 chunk_hashes for 520 tokens"),
        (lines([LOOKUP, LOOKUP | {"model_name": "Qwen"}]), ", line 2 .*model_name is 'Qwen', and"),
        (lines([LOOKUP | {"chunk_hashes": ["x", "y"]}]), ", line 1 is no request of LMCache's"),
        ('{"traces": [], "blocks": 3}', " lacks block_size or traces: KeyError"),
        ('{"block_size": 64, "traces": []}', " has no requests"),
        ('{"block_size": 0, "traces": []}', " lacks block_size or traces: .*0 tokens"),
        ('{"block_size": 64, "traces": [{"rows": [{"a": 1}]}]}', ", session 1 .*KeyError"),
        (json.dumps(AGENTS | {"block_size": 128}), ", session 1 .*200 tokens have not 2 blocks"),
        (
            json.dumps(AGENTS | {"traces": [{"rows": [[0, 99, 1, 0, 1, 0, [[0, 2**99]]]]}]}),
            ", session 1 .*99 tokens have not 2 blocks",
        ),
        ('{"block_size": 64, "traces": [{"rows": [[1, 2, 3]]}]}', ", session 1 has a row of anoth"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path}{message}"):
        read_trace(path)


@pytest.mark.parametrize("compress", [lzma.compress, gzip.compress])
def test_a_cut_file_is_refused(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(compress(lines(MOONCAKE).encode())[:-9])
    with pytest.raises(ConfigError, match=f"{path} cannot be read"):
        read_trace(path)


# Playback


def request(at: float, *ids: int) -> Request:
    return Request(at, 0.0, ids, 64 * len(ids) + 1, 1)


def test_requests_come_at_their_times() -> None:
    requests = [request(3.0, 1), request(1.0, 2), request(2.0, 3)]
    trace = Trace("", 64, [[each] for each in requests])
    assert [each.at for each in in_order(trace, 1)] == [1.0, 2.0, 3.0]


def test_agents_take_turns_at_sessions() -> None:
    sessions = [
        [request(0.0, 1), request(6.5, 1, 2)],
        [request(0.0, 11), request(4.0, 11, 12), request(6.0, 11, 12, 13)],
        [request(5.0, 21), request(6.0, 21, 22)],
    ]
    trace = Trace("", 64, sessions)
    alone = [each.ids[-1] for each in in_order(trace, 1)]
    assert alone == [1, 2, 11, 12, 13, 21, 22]
    # The third session begins when the second ends, after 6 s, and goes on 1 s later.
    assert [each.ids[-1] for each in in_order(trace, 2)] == [1, 11, 12, 13, 21, 2, 22]
    assert [each.ids[-1] for each in in_order(trace, 2**70)] == [1, 11, 21, 22, 12, 13, 2]


def test_a_cache_of_each_size() -> None:
    """By hand: three prompts of two blocks and a token, the first one again at the end."""
    prompts = [(1, 2), (3, 4), (5, 6), (1, 2)]
    trace = Trace("", 64, [[request(at, *ids)] for at, ids in enumerate(prompts)])
    curve = play(trace, 1)
    assert [curve.hit_ratio(size) for size in (0, 4, 5, 6, math.inf)] == [
        pytest.approx(share) for share in (0, 0, 64 / 516, 128 / 516, 128 / 516)
    ]
