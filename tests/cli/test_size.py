"""``simple-offload size``: the table, JSON, the model's bytes, and wrong input."""

import argparse
import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from simple_offload.cli import size
from simple_offload.cli.arguments import Parser
from simple_offload.sizing.model_bytes import GroupBytes, ModelBytes
from tests.cli.test_watch import COMMAND

KIB, GIB = 1024, 2**30
LLAMA = ModelBytes(
    "LlamaForCausalLM", "cuda", 2, 1, 16 * 64 * KIB, (GroupBytes("chain", 32, 16, 0, 2),)
)
GEMMA = ModelBytes(
    "Gemma3ForCausalLM",
    "cuda",
    4,
    4,
    16 * 64 * KIB,
    (
        GroupBytes("window", 8, 16, 64, 1),
        GroupBytes("window", 8, 16, 64, 1),
        GroupBytes("chain", 8, 16, 0, 1),
    ),
)


def arguments_of(*words: str) -> argparse.Namespace:
    parser = Parser(prog="simple-offload size")
    size.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten prompts of eight blocks and a token, three times in turns."""
    rows = [
        {
            "timestamp": 10 * turn + prompt,
            "input_length": 8 * 512 + 1,
            "output_length": 1,
            "hash_ids": [*range(100 * prompt, 100 * prompt + 8), 10_000 + 10 * turn + prompt],
        }
        for turn in range(3)
        for prompt in range(10)
    ]
    path = tmp_path / ":turtle:.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


TOKENS, PROMPT_TOKENS = 10 * 8 * 512, 30 * (8 * 512 + 1)
FOUND = 20 * 8 * 512
"""By a cache that has room for ``TOKENS``; one that has not finds none, as in any cycle."""


def answer_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert size.run(arguments_of(*words, "--json")) == 0
    return json.loads(capsys.readouterr().out)


# A trace


def test_tokens_that_each_size_finds(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_bytes = f"{2**30 // 4096}"  # a GiB holds 4,096 tokens
    words = ("--trace", f"{trace}", "--kv-bytes-per-token", num_bytes)
    answer = answer_of(capsys, *words, "--host-memory", "10", "2.5", "9.99", "0")
    rows = [
        (each["host_memory_gib"], each["tokens"], each["found_tokens"]) for each in answer["sizes"]
    ]
    assert rows[:2] == [(0, 0, 0), (2.5, 10240, 0)]
    assert rows[3] == (10, TOKENS, FOUND)
    assert rows[2][2] < FOUND
    assert answer["hit_ratio_of_any_size"] == pytest.approx(FOUND / PROMPT_TOKENS)
    assert answer["trace"]["prompt_tokens"] == PROMPT_TOKENS
    assert answer["trace"]["distinct_tokens"] == TOKENS


def test_the_devices_find_their_part(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--trace", f"{trace}", "--kv-bytes-per-token", f"{2**30 // 4096}")
    answer = answer_of(capsys, *words, "--device-memory", "6", "--host-memory", "3", "4")
    assert answer["device_tokens"] == 6 * 4096
    assert [each["found_tokens"] == FOUND for each in answer["sizes"]] == [False, True]


@pytest.mark.parametrize("tokens_of_gib", [4096, 2**20])
def test_sizes_are_those_that_make_a_difference(
    trace: Path, capsys: pytest.CaptureFixture[str], tokens_of_gib: int
) -> None:
    words = ("--trace", f"{trace}", "--kv-bytes-per-token", f"{2**30 / tokens_of_gib}")
    answer = answer_of(capsys, *words)
    none, *others = answer["sizes"]
    assert none["host_memory_gib"] == none["hit_ratio"] == 0
    assert 1 <= len(others) <= 10
    assert others[-1]["hit_ratio"] >= 0.99 * answer["hit_ratio_of_any_size"]
    assert all(each["hit_ratio"] < 0.99 * answer["hit_ratio_of_any_size"] for each in others[:-1])
    assert all(2 * a["host_memory_gib"] == b["host_memory_gib"] for a, b in pairwise(others))


def test_a_table_in_a_pipe(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--trace", f"{trace}", "--kv-bytes-per-token", f"{2**30 // 4096}")
    assert size.run(arguments_of(*words, "--host-memory", "10")) == 0
    text = capsys.readouterr().out
    assert ":turtle:: 30 requests; 122,910 prompt tokens, 40,960 distinct." in text
    (row,) = (line.split() for line in text.splitlines() if "10 GiB" in line)
    assert row == ["10", "GiB", "40,960", "81,920", "66.7%"]
    assert "Memory of any size finds 66.7% at most." in text
    assert text.isascii() or not set(text) & set("█▌▎")


@pytest.mark.parametrize("form", ["--json", "--agents=1"])
def test_a_pipe_that_nobody_reads(trace: Path, form: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = ("size", "--trace", f"{trace}", "--kv-bytes-per-token", "9", form)
    buffered = {key: each for key, each in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [*COMMAND, *words], stdout=writer, stderr=subprocess.PIPE, env=buffered, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_sessions_say_how_many_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[0.0, 65, 1, 0.0, 1.0, 0, [[1, 1]]], [9.0, 129, 1, 0.0, 1.0, 1, [[2, 1]]]]
    path = tmp_path / "agents.json"
    path.write_text(json.dumps({"block_size": 64, "traces": [{"rows": rows}]}))
    assert size.run(arguments_of("--trace", f"{path}", "--kv-bytes-per-token", "9")) == 0
    assert "2 requests of 1 sessions, 8 at a time (--agents)" in capsys.readouterr().out


# A model


def test_a_models_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[object] = []

    def plan(*arguments: object) -> ModelBytes:
        given.extend(arguments)
        return LLAMA

    monkeypatch.setattr(size, "plan_model", plan)
    words = ("--model", "config.json", "-tp", "2", "--kv-cache-dtype", "fp8", "--block-size", "16")
    assert size.run(arguments_of(*words, "-sc", '{"method": "mtp"}')) == 0
    assert given == [Path("config.json"), 2, "fp8", 16, {"method": "mtp"}]
    text = capsys.readouterr().out
    assert "LlamaForCausalLM on 2 ranks" in text
    assert "65,536 bytes on each rank, 131,072 on all, 131,072 in host memory." in text
    assert "A GiB of host memory holds 8,192 tokens." in text
    assert "windows" not in text


def test_windows_are_said_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(size, "plan_model", lambda *_: GEMMA)
    assert size.run(arguments_of("--model", "config.json")) == 0
    text = capsys.readouterr().out
    assert "65,536 in host memory (one copy for 4 ranks)" in text
    assert f"{2 * 64 * 16 * 64 * KIB:,} bytes of windows and states more" in text
    (row,) = (line.split() for line in text.splitlines() if "window " in line)
    assert row[:3] == ["window", "8+8", "16"]


def test_windows_take_room_beside_the_tokens(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of 30 prompts keeps those at its end."""
    monkeypatch.setattr(size, "plan_model", lambda *_: GEMMA)
    answer = answer_of(capsys, "--model", "config.json", "--trace", f"{trace}")
    ends = 30 * 2 * 64 * 16 * 64 * KIB / TOKENS
    assert answer["bytes_per_token"]["in_host"] == pytest.approx(64 * KIB + ends)
    assert answer["bytes_per_token"]["on_devices"] == pytest.approx(4 * (64 * KIB + ends))
    assert answer["model"]["bytes_of_a_token"]["in_host_memory"] == 64 * KIB
