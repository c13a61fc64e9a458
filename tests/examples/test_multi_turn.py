"""The multi-turn benchmark from end to end, mostly with fake servers."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client")
pytest.importorskip("rich")

from prometheus_client.samples import Sample

from examples import serving
from examples.bench.child import ROOT
from examples.bench.client import RequestLost
from examples.bench.command import BAD_RESULT, INTERRUPTED, RUN_FAILED, RunFailed, exit_code_of
from examples.bench.connectors import CONTENDERS
from examples.bench.counters import counters
from examples.bench.models import ModelShape
from examples.bench.replies import Reply
from examples.bench.tables import cells_with_ratios, digits
from examples.bench.tokens import WordVocabulary
from examples.multi_turn import __main__ as command
from examples.multi_turn import client as client_module
from examples.multi_turn.bench import Bench
from examples.multi_turn.client import Replayed, replay
from examples.multi_turn.conversations import Conversation, Turn, make_conversations
from examples.multi_turn.plan import CPU, Plan, generated
from examples.multi_turn.results import ROWS, summaries
from tests.examples.fake_server import COMMAND
from tests.examples.processes import assert_gone


def code_of(one: Bench) -> int:
    return exit_code_of(lambda: command.run(one))


def tiny_plan(**changes: Any) -> Plan:
    plan = replace(
        CPU,
        shape=ModelShape(256, 64, 2, 2, 1),
        device_tokens=512,
        host_bytes=64 << 20,
        settings=generated(4, messages=6, common=32, prefix=(150, 200), question=16, answer=4),
        clients=2,
        active=4,
    )
    return replace(plan, **changes)


def bench(output: Path, *names: str, port: int | None = None, **changes: Any) -> Bench:
    plan = tiny_plan(**changes)
    assert plan.shape is not None
    vocabulary = WordVocabulary(plan.shape.vocab_size)
    conversations = make_conversations(plan.settings, vocabulary, plan.seed)
    contenders = [CONTENDERS[name] for name in names]
    return Bench(plan, conversations, vocabulary, contenders, output, port)


WARM_UP = 3
"""Number of requests of each server's warm-up."""


def servers(output: Path) -> list[psutil.Process]:
    """The servers of a run, and what they have started."""
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if str(output) in " ".join(each.info["cmdline"] or ())]


def err(fake: pytest.MonkeyPatch, **faults: Any) -> None:
    fake.setenv("FAKE_SERVER", json.dumps(faults))


def test_every_contender_answers_all_that_is_asked(
    fake: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err(fake, resets_refused=2)
    code = code_of(bench(tmp_path, "none", "ours", rounds=2))
    captured = capsys.readouterr()
    printed = captured.out
    assert code == 0, captured
    assert "ours: round 2/2" in captured.err
    assert "TTFT by turn, ms" in printed
    assert "Medians of 2 rounds, and their ratios to none" in printed

    result = json.loads((tmp_path / "result.json").read_text())
    assert result["problems"] == []
    assert result["requests"] == 12
    asked: set[tuple[Any, ...]] = set()
    for rounds in result["runs"].values():
        assert [each["round"] for each in rounds] == [1, 2]
        for each in rounds:
            assert len(each["replies"]) == 12
            # The answers follow from the prompts.
            asked.add(tuple(sorted(reply["answer"] for reply in each["replies"])))
            assert sum(
                each["counters"][source]
                for source in ("computed_tokens", "device_hit_tokens", "external_hit_tokens")
            ) == sum(reply["prompt_tokens"] for reply in each["replies"])
            for reply in each["replies"]:
                assert 0 < reply["ttft"] <= reply["latency"] <= each["seconds"]
                assert reply["answer_tokens"] == 4
                assert reply["cached_tokens"] > 0 or reply["turn"] == 0
                assert reply["cached_tokens"] <= 32 or reply["turn"] > 0, "caches begin empty"
        assert rounds[0]["counters"] == rounds[1]["counters"]
    assert len(asked) == 1, "all contenders get the same prompts in every round"
    none, ours = (result["summaries"][name] for name in ("none", "ours"))
    assert none["numbers"]["external_hit_tokens"] == 0
    assert ours["numbers"]["external_hit_tokens"] > 0
    assert set(ours["by_turn"]) == {"0", "1", "2"}
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for turn, times in ours["by_turn"].items():
        assert " ".join(["ours", *(digits(each * 1e3) for each in times.values())]) in lines, turn
    for key, title, scale in (row for row in ROWS if "bytes" in row[0] or "TTFT" in row[1]):
        values = [each["numbers"].get(key) for each in (none, ours)]
        assert " ".join([title, *cells_with_ratios(values, scale)]) in lines
    assert "requests done 12 12" in lines
    for name in ("ttft_by_turn.png", "throughput.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {
        *("result.json", "conversations.json", "ttft_by_turn.png", "throughput.png"),
        *("none.log", "ours.log"),
    }
    assert_gone(servers(tmp_path))


@pytest.mark.parametrize(
    ("faults", "complaint"),
    [
        ({"refuse_at": WARM_UP}, "turn 1: ClientResponseError: 500"),
        ({"refuse_at": WARM_UP + 1}, "9 of 12 requests done"),
        ({"short_at": WARM_UP + 5}, "3 of 4 tokens"),
        ({"no_hits": True}, "ours, round 1: the connector got no hits"),
    ],
)
def test_problems_that_invalidate_a_run(
    faults: Mapping[str, Any],
    complaint: str,
    fake: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    err(fake, **faults)
    assert code_of(bench(tmp_path, "ours")) == BAD_RESULT
    assert complaint in capsys.readouterr().out
    problems = json.loads((tmp_path / "result.json").read_text())["problems"]
    assert any(complaint in each for each in problems)


def test_other_answers_invalidate_a_run(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    err(fake, other_from=WARM_UP + 11)
    both = bench(tmp_path, "none", "ours")
    both.run(lambda *_: None)
    assert both.problems == ["ours, round 1: 1 of 12 answers differ from none's"]
    assert both.plan.shape is not None
    both.plan = replace(both.plan, shape=replace(both.plan.shape, dtype="bfloat16"))
    assert both.problems == [], "dummy weights have ties, so answers may differ"


@pytest.mark.parametrize(
    ("faults", "complaint"),
    [
        ({"exit_at_start": 5}, "exit code 5"),
        ({"refuse_at": 0}, "The server answers nothing"),
        ({"resets_refused": 1000}, "The server did not reset its caches within"),
        ({"die_at": WARM_UP + 6, "child": True}, "killed by signal 9"),
    ],
)
def test_a_server_that_fails(
    faults: Mapping[str, Any],
    complaint: str,
    fake: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    err(fake, **faults)
    fake.setattr(serving, "RESET_SECONDS", 0.1)
    assert code_of(bench(tmp_path, "none", "ours")) == RUN_FAILED
    printed = capsys.readouterr().err
    assert complaint in printed
    assert f"The end of {tmp_path / 'ours.log'}:" in printed
    assert ("there is no such model" in printed) == ("exit_at_start" in faults)
    assert_gone(servers(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [], "no model is left"
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["runs"]["none"][0]["replies"]) == 12, "finished results are kept"
    assert result["problems"] == ["ours: 0 of 1 rounds"]


def test_a_port_in_use(tmp_path: Path) -> None:
    """The clients would ask another server than the contender's."""
    with socket.socket() as other:
        other.bind((serving.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RunFailed, match=f"Port {port} .* is in use"):
            bench(tmp_path, "ours", port=port).run(lambda *_: None)
    assert not (tmp_path / "ours.log").exists(), "nothing was started"


INTERRUPTED_RUN = f"""
import runpy, sys
from examples import serving
serving.COMMAND = {COMMAND!r}
sys.argv = ["examples.multi_turn", *sys.argv[1:]]
runpy.run_module("examples.multi_turn", run_name="__main__")
"""


def test_a_terminated_run_leaves_no_process(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It is ended during a request that never ends."""
    pipe = tmp_path_factory.mktemp("pipe") / "stalled"
    os.mkfifo(pipe)
    faults = {"stall_at": WARM_UP + 3, "stall_pipe": str(pipe), "child": True}
    command = [sys.executable, "-u", "-c", INTERRUPTED_RUN, "--contenders", "ours"]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "FAKE_SERVER": json.dumps(faults)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Started in the background by a shell, the tests themselves ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no lock taken
    )
    assert pipe.read_text() == "stalled"
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED
    assert "Interrupted." in rest
    assert "Traceback" not in rest
    assert len(family) == 2
    assert_gone(family)
    assert {path.name for path in tmp_path.iterdir()} == {"conversations.json", "ours.log"}


def test_a_server_for_other_clients(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server and its model are ready when the command line for vLLM's script is printed. Ctrl-C
    ends the server."""
    del fake
    paths: list[Path] = []

    def on_ready(server: serving.Server, model: str) -> None:
        assert server.metric("vllm:prompt_tokens_by_source_total") == 0
        assert (Path(model) / "tokenizer.json").is_file()
        paths.append(Path(model))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path, "ours").serve(lambda *_: None, on_ready)
    assert_gone(servers(tmp_path))
    assert not paths[0].exists()


def talk(name: str, turns: int) -> Conversation:
    return Conversation(name, [Turn([turn], [100 + turn]) for turn in range(turns)])


class Asked:
    """Replaces ``ask``: records each request, and the clients that ask at the same time."""

    def __init__(self, lost: Sequence[tuple[str, int]] = ()) -> None:
        self.order: list[tuple[str, int]] = []
        self.most_at_once = self.most_active = 0
        self._lost = lost
        self._now = 0
        self._active: set[str] = set()
        self._turns: dict[str, int] = {}

    async def __call__(
        self, _: object, _url: str, name: str, turn: int, prompt: Sequence[int], length: int
    ) -> Reply:
        self._now += 1
        self._active.add(name)
        self.most_at_once = max(self.most_at_once, self._now)
        self.most_active = max(self.most_active, len(self._active))
        self.order.append((name, turn))
        for _ in range(5):
            await asyncio.sleep(0)
        self._now -= 1
        lost = (name, turn) in self._lost
        if lost or turn == self._turns[name] - 1:
            self._active.remove(name)
        if lost:
            raise RequestLost(f"{name} {turn}")
        return Reply(name, turn, len(prompt), length, 0, 0.1, 0.2, "")

    def play(self, conversations: Sequence[Conversation], clients: int, active: int) -> Replayed:
        self._turns = {each.id: len(each.turns) for each in conversations}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client_module, "ask", self)
            return asyncio.run(
                replay(
                    "http://nowhere",
                    conversations,
                    clients=clients,
                    active=active,
                    on_reply=lambda: None,
                )
            )


def test_clients_ask_all_at_once_and_a_lost_request_ends_its_conversation_only() -> None:
    asked = Asked(lost=[("t2", 1)])
    conversations = [talk(f"t{number}", 3 + number % 2) for number in range(11)]
    result = asked.play(conversations, clients=3, active=7)
    assert (asked.most_at_once, asked.most_active) == (3, 7)
    assert result.lost == ["t2 1 (1 more turns were not asked)"]
    wanted = {(each.id, turn) for each in conversations for turn in range(len(each.turns))}
    assert sorted(asked.order) == sorted(wanted - {("t2", 2)})
    assert len(result.replies) == len(asked.order) - 1


def test_a_client_goes_round_its_conversations() -> None:
    asked = Asked()
    asked.play([talk("a", 2), talk("b", 1), talk("c", 2), talk("d", 1)], clients=1, active=2)
    assert asked.order == [("a", 0), ("b", 0), ("a", 1), ("c", 0), ("d", 0), ("c", 1)]


@pytest.mark.slow
@pytest.mark.usefixtures("light_engines")
def test_with_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fake server sends the same things as vLLM: streams, usage, metrics, resets, hits."""
    code = code_of(bench(tmp_path, "ours", rounds=2))
    assert code == 0, capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    for each in result["runs"]["ours"]:
        assert each["counters"]["external_hit_tokens"] > 0
        asked = sum(reply["prompt_tokens"] for reply in each["replies"])
        cached = sum(reply["cached_tokens"] for reply in each["replies"])
        counted = each["counters"]
        assert counted["device_hit_tokens"] + counted["external_hit_tokens"] == cached
        assert counted["computed_tokens"] + cached == asked
        # A busy server may send all tokens of some answers at once.
        assert all(0 < reply["ttft"] <= reply["latency"] for reply in each["replies"])
        assert any(reply["ttft"] < reply["latency"] for reply in each["replies"])
    assert len({reply["answer"] for reply in each["replies"]}) > 6, "answers follow from prompts"
    assert result["summaries"]["ours"]["numbers"]["loaded_bytes"] > 0


# Numbers


def reply(turn: int, ttft: float, latency: float = 2.0, tokens: int = 11) -> Reply:
    return Reply("c", turn, 100 * (turn + 1), tokens, 0, ttft, latency, "")


def one_round(
    number: int, replies: Sequence[Reply], seconds: float = 4.0, **counted: float
) -> Mapping[str, Any]:
    sources = {"computed_tokens": 1.0, "device_hit_tokens": 2.0, "external_hit_tokens": 3.0}
    return {
        "round": number,
        "seconds": seconds,
        "lost": [],
        "counters": {**sources, **counted},
        "replies": [asdict(each) for each in replies],
    }


def test_numbers_of_a_round() -> None:
    replies = [reply(0, 1.0), reply(0, 1.5), reply(1, 0.2, 1.2), reply(1, 0.4, 0.4, tokens=1)]
    (summary,) = summaries({"ours": [one_round(1, replies)]}, 1000).values()
    numbers = summary.numbers
    assert numbers["requests"] == 4
    assert numbers["requests_per_second"] == 1
    assert numbers["answer_tokens_per_second"] == 34 / 4
    assert numbers["tokens_per_second"] == (34 + 600) / 4
    assert numbers["ttft_mean"] == pytest.approx(3.1 / 4)
    assert numbers["ttft_p99"] == 1.5
    assert numbers["later_ttft_mean"] == pytest.approx(0.3)
    assert numbers["tpot_mean"] == pytest.approx((0.1 + 0.05 + 0.1) / 3), "one token has no gap"
    assert numbers["external_hit_tokens"] == 3
    assert summary.by_turn[0].mean == 1.25
    assert (summary.by_turn[1].p50, summary.by_turn[1].p99) == (0.4, 0.4)


def test_bytes_are_the_connectors_or_computed() -> None:
    def loaded(bytes_per_token: int | None, **counted: float) -> float | None:
        run = {"ours": [one_round(1, [reply(0, 1.0)], **counted)]}
        return summaries(run, bytes_per_token)["ours"].numbers.get("loaded_bytes")

    assert loaded(1000, loaded_bytes=7.0) == 7
    assert loaded(1000) == 3000
    assert loaded(None) is None
    assert loaded(1000, external_hit_tokens=0.0) is None
    assert summaries({"none": [], "ours": [one_round(1, [])]}, None) == {}


def sample(name: str, value: float, **labels: str) -> Sample:
    return Sample(name, labels, value, None, None)


def test_counters() -> None:
    samples = [
        sample("vllm:prompt_tokens_by_source_total", 5, source="local_compute", engine="0"),
        sample("vllm:prompt_tokens_by_source_total", 6, source="local_compute", engine="1"),
        sample("vllm:prompt_tokens_by_source_total", 7, source="external_kv_transfer"),
        sample("vllm:prompt_tokens_by_source_total", 9, source="something_new"),
        sample("vllm:kv_offload_load_bytes_total", 100),
        sample("vllm:kv_offload_store_bytes_total", 200, engine="0"),
        sample("vllm:kv_offload_store_bytes_total", 300, engine="1"),
        sample("vllm:simple_offload_bytes_total", 30, direction="load", path="dma"),
        sample("vllm:simple_offload_bytes_total", 4, direction="load", path="kernel"),
        sample("vllm:simple_offload_bytes_total", 1, direction="store", path="dma"),
    ]
    assert counters(samples) == {
        "computed_tokens": 11,
        "device_hit_tokens": 0,
        "external_hit_tokens": 7,
        "loaded_bytes": 134,
        "stored_bytes": 501,
    }
