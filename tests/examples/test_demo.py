"""The demo: as a whole on a tiny model, and how it behaves when something goes wrong."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from examples.bench.child import ROOT
from examples.demo.plan import FULL, QUICK, Plan
from examples.demo.results import Answer, compare, compare_restarted, rows_by_turn


def test_quick_demo_gives_the_same_tokens_with_kv_from_host_memory(tmp_path: Path) -> None:
    """tests/docs/test_readme.py runs the whole demo, with a restart too."""
    done = subprocess.run(
        [sys.executable, "-u", "-m", "examples.demo", "--quick", "--output", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output = done.stdout
    plan = QUICK
    tokens = plan.requests * plan.answer_tokens
    assert f"All {tokens} tokens of {plan.requests} answers are the same" in output
    assert "with connector: turn 3, user 3: " in done.stderr

    result = json.loads((tmp_path / "result.json").read_text())
    assert TypeAdapter(Plan).validate_python(result["plan"]) == plan
    without, with_host = ([Answer(**a) for a in result[k]] for k in ("without", "with"))
    assert [a.tokens for a in without] == [a.tokens for a in with_host]
    # A model that ignores its context would give every user the same answer.
    assert len({tuple(a.tokens) for a in with_host}) == plan.requests
    assert sum(a.from_host for a in without) == 0
    returning = [a for a in with_host if a.turn > 0]
    assert all(a.from_host > 0 for a in returning)
    found = sum(a.from_host for a in with_host)
    assert f"; {found:.0f} prompt tokens came from host memory." in output
    for a in (*without, *with_host):
        assert a.from_device + a.from_host + a.recomputed == a.prompt_tokens
        assert 0 < a.ttft < a.seconds

    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"result.json", "ttft.png", "engines.log"}


def answers(from_host: int = 64) -> list[Answer]:
    return [
        Answer(
            user=user,
            turn=turn,
            prompt_tokens=100,
            from_device=0,
            from_host=from_host if turn else 0,
            recomputed=100 - from_host if turn else 100,
            ttft=1.0 + turn,
            seconds=2.0 + turn,
            tokens=[10 * turn + user, 7, 8],
            logprobs=[-1.0, -2.0, -3.0],
        )
        for turn in range(2)
        for user in range(2)
    ]


def altered(index: int, **changes: Any) -> list[Answer]:
    found = answers()
    found[index] = replace(found[index], **changes)
    return found


@pytest.mark.parametrize(
    ("with_host", "passed", "words"),
    [
        (answers(), True, "All 12 tokens of 4 answers are the same (logprobs within 0.0e+00); 128"),
        (altered(2, logprobs=[-1.0, -2.25, -3.0]), True, "logprobs within 2.5e-01"),
        (
            altered(3, tokens=[11, 7, 9]),
            False,
            "NOT the same: turn 2, user 2, token 3 of the answer is 8 (logprob -3.000000) without",
        ),
        (altered(1, tokens=[1, 7]), False, "is 8 (logprob -3.000000) without and missing with"),
        (answers()[:3], False, "4 answers without and 3 with the connector"),
        (answers()[::-1], False, "user 1, turn 1 without the connector met user 2, turn 2 with it"),
        (answers(from_host=0), False, "no token came from host memory"),
    ],
)
def test_verdicts(with_host: list[Answer], passed: bool, words: str) -> None:
    verdict = compare(answers(from_host=0), with_host)
    assert verdict.passed is passed
    assert words in verdict.sentence


@pytest.mark.parametrize(
    ("restarted", "passed", "words"),
    [
        (answers(), False, "0 of the 200 tokens of first messages"),
        (altered(0, from_host=64), True, "64 of the 200 tokens of first messages came from files"),
        (altered(3, tokens=[11, 7, 9]), False, "After the restart NOT the same: turn 2, user 2"),
    ],
)
def test_verdicts_on_a_restart(restarted: list[Answer], passed: bool, words: str) -> None:
    verdict = compare_restarted(answers(), restarted)
    assert verdict.passed is passed
    assert words in verdict.sentence


def test_rows_are_means_over_users() -> None:
    fast = [replace(answer, ttft=answer.ttft / 4) for answer in answers()]
    fast[0] = replace(fast[0], ttft=0.75)
    first, second = rows_by_turn(answers(from_host=0), fast)
    assert (first.turn, first.ttft_without, first.ttft_with, first.speedup) == (0, 1.0, 0.5, 2.0)
    assert (second.prompt_tokens, second.from_host, second.recomputed) == (100, 64, 36)
    assert second.speedup == 4.0


@pytest.mark.parametrize("preset", [FULL, QUICK])
@pytest.mark.parametrize("users", [2, 16])
@pytest.mark.parametrize("turns", [2, 12])
def test_one_conversation_fits_the_device_and_all_do_not(
    preset: Plan, users: int, turns: int
) -> None:
    plan = replace(preset, users=users, turns=turns)
    assert plan.longest_context <= plan.max_model_len < plan.device_tokens
    assert plan.conversation_tokens > plan.device_tokens
    assert plan.conversation_tokens * plan.model.kv_bytes_per_token <= plan.host_bytes
