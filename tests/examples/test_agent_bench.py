"""The agents benchmark from end to end, mostly with fake servers."""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client")
pytest.importorskip("rich")

from examples import serving
from examples.agent_bench import __main__ as command
from examples.agent_bench import play as play_module
from examples.agent_bench import results
from examples.agent_bench.bench import Bench
from examples.agent_bench.plan import CPU, H200, Plan
from examples.agent_bench.play import Answered, Played, play
from examples.agent_bench.results import numbers, problems
from examples.bench.agents import Request, requests_by_agent
from examples.bench.client import RequestLost, Target
from examples.bench.command import BAD_RESULT, CANNOT_START, RUN_FAILED, exit_code_of
from examples.bench.connectors import CONTENDERS
from examples.bench.models import ModelShape
from examples.bench.replies import Reply
from tests.examples.sessions import save_sessions

WARM_UP = 3
"""Number of requests of each server's warm-up."""


def tiny_plan(folder: Path, **changes: Any) -> Plan:
    """Two or four agents, each with a session of four requests and of up to 225 tokens. Those of
    four agents do not fit the device."""
    folder.mkdir(exist_ok=True)
    plan = replace(
        CPU,
        shape=ModelShape(256, 64, 2, 2, 1),
        trace=save_sessions(folder, sessions=4),
        device_tokens=512,
        host_bytes=64 << 20,
        agents=(2, 4),
        requests=16,
        scale=4,
        max_pause=0,
    )
    return replace(plan, **changes)


def bench(output: Path, *names: str, **changes: Any) -> Bench:
    plan = tiny_plan(output / "trace", **changes)
    return Bench(plan, plan.vocabulary(), [CONTENDERS[name] for name in names], output)


def code_of(one: Bench) -> int:
    return exit_code_of(lambda: command.run(one))


def result_of(output: Path) -> dict[str, Any]:
    found = json.loads((output / "result.json").read_text())
    assert isinstance(found, dict)
    return found


# From end to end


@pytest.fixture
def fake(fake: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A fake server answers at once, so the client computes all the time."""
    fake.setattr(results, "MOST_CLIENT_BUSY", float("inf"))
    return fake


def test_every_contender_plays_the_same_requests(
    fake: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = code_of(bench(tmp_path, "none", "ours"))
    captured = capsys.readouterr()
    assert code == 0, captured
    assert "ours, 4 agents: measuring" in captured.err

    result = result_of(tmp_path)
    assert result["problems"] == []
    assert result["runs"].keys() == {"none", "ours"}
    asked: list[Any] = []
    for name, measured in result["runs"].items():
        assert [each["agents"] for each in measured] == [2, 4]
        for each in measured:
            replies, counted = each["replies"], each["numbers"]
            # Of the two agents' eight sessions with four requests, and of four agents' four.
            assert len(replies) == 16 - each["agents"] == counted["requests"]
            prompt_tokens = sum(reply["prompt_tokens"] for reply in replies)
            sources = ("computed_tokens", "device_hit_tokens", "external_hit_tokens")
            assert sum(counted[source] for source in sources) == prompt_tokens
            assert (counted["external_hit_tokens"] > 0) == (name == "ours")
            assert counted["device_hit_tokens"] > 0
            shares = ("computed_share", "device_hit_share", "external_hit_share")
            assert sum(counted[share] for share in shares) == pytest.approx(1)
            for reply in replies:
                assert 0 < reply["ttft"] <= reply["latency"] <= each["seconds"]
                assert reply["cached_tokens"] > 0 or reply["opens"]
        asked.append(
            [
                sorted((each["conversation"], each["turn"], each["prompt_tokens"]) for each in one)
                for one in (each["replies"] for each in measured)
            ]
        )
    assert asked[0] == asked[1]
    lines = [" ".join(line.split()) for line in captured.out.splitlines()]
    none, ours = (result["summaries"][name]["4"] for name in ("none", "ours"))
    ratio = ours["tokens_per_second"] / none["tokens_per_second"]
    assert any(
        line.startswith("all tokens/s ") and line.endswith(f"({ratio:.2f}x)") for line in lines
    )
    assert "requests 12 12" in lines
    assert (tmp_path / "agents.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {
        *("result.json", "agents.png", "none.log", "ours.log", "trace")
    }


def test_a_server_that_runs_already(
    fake: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With requests of Mooncake's format, which have no sessions. Those of more than 400 tokens,
    the server's limit, are left out."""
    row = {"timestamp": 0, "output_length": 64}
    trace = tmp_path / "talks.jsonl"
    with trace.open("w") as file:
        for ids in (2, 3, 4, 30):
            more = {"input_length": 512 * ids, "hash_ids": list(range(ids))}
            file.write(json.dumps(row | more) + "\n")
    options = ["--traces", str(trace), "--agents", "2", "--scale", "32", "--output", str(tmp_path)]
    log = tmp_path / "server.log"
    with serving.serving("model", [], dict(os.environ), log, name="theirs") as server:
        one = command.parse([*options, "--url", f"{server.url}/v1/"])
        assert code_of(one) == 0, capsys.readouterr()
    result = result_of(tmp_path)
    assert result["url"] == server.url
    (measured,) = result["runs"]["endpoint"]
    (reply,) = measured["replies"]
    assert (reply["prompt_tokens"], reply["answer_tokens"]) == (4 * 16 + 1, 2)
    assert measured["numbers"]["device_hit_tokens"] > 0
    assert "host_multiple" not in measured["numbers"]


def test_a_server_that_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://{serving.HOST}:{serving.free_port()}"
    options = ["--traces", str(save_sessions(tmp_path)), "--output", str(tmp_path)]
    assert code_of(command.parse([*options, "--url", url])) == RUN_FAILED
    assert f"{url} gave no answer to /v1/models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("faults", "complaint"),
    [
        ({"refuse_at": WARM_UP}, "ours, 2 agents: lost a request: conversation 'agent"),
        ({"short_at": WARM_UP + 5}, "1 of 2 tokens"),
        ({"no_hits": True}, "ours: the connector got no hits"),
    ],
)
def test_problems_that_invalidate_a_run(
    faults: Mapping[str, Any],
    complaint: str,
    fake: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.setenv("FAKE_SERVER", json.dumps(faults))
    assert code_of(bench(tmp_path, "ours")) == BAD_RESULT
    assert complaint in capsys.readouterr().out
    assert any(complaint in each for each in result_of(tmp_path)["problems"])


def test_a_server_that_dies_costs_its_own_results_only(
    fake: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.setenv("FAKE_SERVER", json.dumps({"die_at": WARM_UP + 20}))
    assert code_of(bench(tmp_path, "none", "ours")) == RUN_FAILED
    captured = capsys.readouterr()
    assert "killed by signal 9" in captured.err
    assert "2 agents, 20 s, and ratios to none" in captured.out
    measured = {name: len(each) for name, each in result_of(tmp_path)["runs"].items()}
    assert measured == {"none": 2, "ours": 1}


def test_a_trace_that_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(bench(tmp_path, "none", scale=3)) == CANNOT_START
    assert "scale: 3 does not divide the 64 tokens of an id" in capsys.readouterr().err
    assert code_of(bench(tmp_path, "none", agents=(5,), requests=None)) == CANNOT_START
    assert "16 for 5 agents. Wanted: one or more for each" in capsys.readouterr().err


def test_options_are_the_plan(tmp_path: Path) -> None:
    options = f"--traces a.json --agents 8 4 8 --seconds 20 --scale 32 --output {tmp_path}"
    one = command.parse([*options.split(), "--preset", "h200"])
    assert [each.name for each in one.contenders] == list(command.CONTENDERS_ON_GPU)
    assert one.plan == replace(H200, trace=Path("a.json"), agents=(4, 8), seconds=20, scale=32)
    assert [one.plan.replay(4).pause_scale, one.plan.replay(4).max_pause] == [32, 5]
    compiled = ["--compilation-config", '{"mode": 0}', "--think-scale", "2", "--device-tokens", "9"]
    one = command.parse([*options.split(), *compiled])
    assert [each.name for each in one.contenders] == ["none", "ours"]
    assert one.plan.replay(4).pause_scale == 2
    theirs = command.parse([*options.split(), "--url", "http://h:1", "--vocab-size", "16"])
    assert 8 < max(theirs.vocabulary.random(1000)) < 16
    arguments = one.plan.server_arguments(CONTENDERS["ours"])
    assert arguments["compilation_config"] == {"mode": 0}
    assert (arguments["max_num_seqs"], arguments["num_gpu_blocks_override"]) == (8, 2)


@pytest.mark.slow
def test_with_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The connector finds what the device has evicted, and without it all of that is computed."""
    code = code_of(bench(tmp_path, "none", "ours", scale=1, device_tokens=2048))
    assert code == 0, capsys.readouterr()
    none, ours = (result_of(tmp_path)["summaries"][name]["4"] for name in ("none", "ours"))
    assert none["device_multiple"] > 1
    assert none["external_hit_tokens"] == 0
    assert "loaded_bytes" not in none
    assert ours["external_hit_tokens"] > 0
    assert ours["loaded_bytes"] > 0
    assert ours["computed_share"] < none["computed_share"] / 2
    assert ours["ttft_p50"] < none["ttft_p50"]


# The agents


class Asked:
    """Replaces ``ask``: records each request, of which an agent has one at a time."""

    def __init__(self, lost: Sequence[tuple[str, int]] = ()) -> None:
        self.prompts: dict[tuple[str, int], Sequence[int]] = {}
        self.started = False
        self._lost = lost
        self._busy: set[str] = set()

    async def __call__(
        self, _: object, _target: Target, name: str, turn: int, prompt: Sequence[int], length: int
    ) -> Reply:
        assert name not in self._busy
        assert self.started or turn == 0
        self._busy.add(name)
        self.prompts[name, turn] = prompt
        for _ in range(5):
            await asyncio.sleep(0)
        self._busy.remove(name)
        if (name, turn) in self._lost:
            raise RequestLost(f"{name} {turn}")
        return Reply(name, turn, len(prompt), length, 0, 0.1, 0.2, "")

    def play(self, by_agent: Sequence[Sequence[Request]], seconds: float, salt: int = 0) -> Played:
        def text(length: int, *what: object) -> list[int]:
            return [hash((salt, *what, place)) for place in range(length)]

        def on_start() -> None:
            assert len(self.prompts) == len(by_agent)
            assert not self._busy
            self.started = True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(play_module, "ask", self)
            return asyncio.run(
                play(
                    Target("http://nowhere", "m"),
                    by_agent,
                    text,
                    seconds,
                    on_start=on_start,
                    on_reply=lambda: None,
                )
            )


def test_agents_go_on_after_all_have_their_first_answer(tmp_path: Path) -> None:
    by_agent = requests_by_agent(tiny_plan(tmp_path).replay(4))
    asked = Asked(lost=[("agent 1", 2), ("agent 3", 0)])
    played = asked.play(by_agent, seconds=60)
    lengths = {("agent 0", 0): 129, ("agent 0", 3): 225, ("agent 1", 2): 193, ("agent 2", 3): 225}
    assert {each: len(asked.prompts[each]) for each in lengths} == lengths
    assert ("agent 1", 3) not in asked.prompts
    assert ("agent 3", 1) not in asked.prompts
    assert sorted(played.lost) == ["agent 1 2", "agent 3 0"]
    assert len(played.answered) == 3 + 1 + 3
    for turns in pairwise(range(4)):
        shorter, longer = (asked.prompts["agent 0", turn] for turn in turns)
        assert longer[: len(shorter) - 1] == shorter[:-1], "a session's prompts grow"


def test_no_request_is_sent_when_the_time_is_over(tmp_path: Path) -> None:
    by_agent = requests_by_agent(tiny_plan(tmp_path, max_pause=4).replay(4))
    played = Asked().play(by_agent, seconds=0)
    assert played.answered == []
    (requests,) = requests_by_agent(tiny_plan(tmp_path, max_pause=4).replay(1))
    assert [each.pause for each in requests[:4]] == [0.0, 2.25, 2.25, 2.25]


def test_other_numbers_of_agents_send_other_tokens(
    fake: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that what one measurement leaves in the caches is no hit of the next."""
    sent: list[set[tuple[int, ...]]] = []

    async def play_nothing(
        _: Target, by_agent: Sequence[Sequence[Request]], text: Any, *_args: Any, **_kwargs: Any
    ) -> Played:
        sent.append({tuple(request.prompt(text)[:8]) for request in by_agent[0]})
        return Played(seconds=1.0)

    fake.setattr("examples.agent_bench.bench.play", play_nothing)
    bench(tmp_path, "none", "ours").run(lambda *_: None)
    none, ours = sent[:2], sent[2:]
    assert none == ours
    assert none[0].isdisjoint(none[1])


# Numbers


def answered(at: float, ttft: float, latency: float, tokens: int = 11) -> Answered:
    request = Request(0.0, False, [1, 2], 50, (0, 0), tokens)
    return Answered(request, at, Reply("a", 0, 101, tokens, 0, ttft, latency, ""))


def test_throughput_is_what_came_in_the_time(tmp_path: Path) -> None:
    played = Played(
        first=[Request(0.0, True, [1], 50, (0, 0), 1)],
        answered=[
            answered(0.0, 1.0, 2.0),
            answered(7.0, 1.0, 5.0),  # half of its time after the first token
            answered(9.5, 1.0, 2.0),  # its first token is late
            answered(5.0, 0.5, 0.5, tokens=1),
        ],
        seconds=10.0,
        client_busy=0.1,
    )
    plan = tiny_plan(tmp_path)
    counted = {"computed_tokens": 50.0, "device_hit_tokens": 0.0, "external_hit_tokens": 150.0}
    found = numbers(played, counted, plan)
    assert found["requests"] == 4
    assert found["requests_per_second"] == 0.3
    assert found["answer_tokens_per_second"] == pytest.approx((11 + 6 + 1) / 10)
    assert found["tokens_per_second"] == pytest.approx((3 * 101 + 18) / 10)
    assert (found["ttft_p50"], found["ttft_p99"]) == (1.0, 1.0)
    assert found["tpot_mean"] == pytest.approx((0.1 + 0.4 + 0.1) / 3)
    assert found["external_hit_share"] == 0.75
    assert found["loaded_bytes"] == 150 * (plan.kv_bytes_per_token or 0)
    # Two ids of 50 tokens, and the last token of each of five requests.
    assert found["working_set_tokens"] == 105
    assert found["device_multiple"] == 105 / 512
    # A request before the measurement had the first id.
    assert found["endless_share"] == 54 / (4 * 101)
    assert "computed_share" not in numbers(played, {}, plan)


def test_problems_of_numbers(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, agents=(2,))

    def found(contender: str, **changes: float) -> list[str]:
        good = {"requests": 5, "client_busy": 0.2, "device_multiple": 2.0}
        one = {"agents": 2, "lost": [], "numbers": good | {"external_hit_tokens": 0.0} | changes}
        return problems({contender: [one]}, plan, ["ours"])

    assert found("none") == found("ours", device_multiple=1.2) == []
    assert found("ours", external_hit_tokens=1.0) == []
    assert found("ours") == ["ours: the connector got no hits"]
    assert found("none", external_hit_tokens=1.0) == [
        "none, 2 agents: hits of a connector, and there is none"
    ]
    (slow,) = found("none", client_busy=results.MOST_CLIENT_BUSY + 0.1)
    assert slow.startswith("none, 2 agents: the client computed for 90% of the time")
    assert "nothing was asked" in found("none", requests=0)[0]
    assert problems({"none": []}, plan, []) == ["none: 0 of 1 measurements"]
