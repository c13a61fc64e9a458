"""The demo: as a whole on a tiny model, and its verdict on answers that differ."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from examples.bench.child import ROOT
from examples.bench.command import BAD_RESULT
from examples.demo.__main__ import FULL, QUICK, main
from examples.serve_bench.client import Reply
from examples.serve_bench.plan import Plan


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
    result = json.loads((tmp_path / "result.json").read_text())
    ((without,), (found,)) = ([run["replies"] for run in each] for each in result["runs"].values())
    # A model that ignores its context would give every user the same answer.
    assert len({reply["answer"] for reply in found}) == len(found) == 9
    assert [reply["answer"] for reply in without] == [reply["answer"] for reply in found]
    assert all(sum(r["sources"].values()) == r["prompt_tokens"] for r in (*without, *found))
    hits = [reply["sources"].get("external_hit_tokens", 0) for reply in found]
    assert f"All 72 tokens of 9 answers are the same; {sum(hits):.0f} prompt" in done.stdout
    assert hits[:3] == [0, 0, 0]
    assert all(hits[3:])
    ttft = [f"{fmean(each['ttft'] for each in replies[6:]):.2f} s" for replies in (without, found)]
    (row,) = (line.split() for line in done.stdout.splitlines() if line.startswith("    3 "))
    assert row[:4] == ["3", "400", "64", f"{fmean(hits[6:]):.0f}"]
    assert " ".join(row[5:9]) == " ".join(ttft)
    names = {path.name for path in tmp_path.iterdir()}
    logs = {"none-1.log", "ours-1.log"}
    assert names == {"result.json", "ttft.png", "conversations.json"} | logs


@pytest.mark.parametrize(
    ("answer", "hits", "complaint"),
    [("w1", 0.0, "the connector got no hits"), ("w2", 1.0, "1 of 20 answers differ: 0 (0 cached")],
)
def test_no_hits_or_another_token_fail(
    answer: str,
    hits: float,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def play(arguments: list[str], _environment: Any, log: Path, on_event: Any) -> None:
        replies = [Reply("turn 1", str(number), 9, 2, True, 0.0) for number in range(20)]
        replies[0].answer = answer if log.stem == "ours-1" else "w1"
        numbers = {"requests": 20, "external_hit_tokens": hits if log.stem == "ours-1" else 0}
        one = {"repeat": 0, "workload": "turns", "lost": [], "numbers": numbers, "ttft": {}}
        on_event({"measured": one | {"replies": list(map(asdict, replies))}})

    monkeypatch.setattr("examples.serve_bench.bench.listen", play)
    assert main(["--quick", "--output", str(tmp_path)]) == BAD_RESULT
    assert complaint in capsys.readouterr().out


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_one_conversation_fits_the_device_and_all_do_not(plan: Plan) -> None:
    plan = plan.with_conversations()
    conversations = plan.conversations(plan.vocabulary())
    everything = sum(each.num_tokens for each in conversations)
    assert plan.kv_bytes_per_token is not None
    assert plan.max_model_len < plan.device_tokens < everything / 2
    assert everything * plan.kv_bytes_per_token <= plan.host_bytes
