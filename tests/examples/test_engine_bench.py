"""The engine benchmark: on a tiny model with real engines, and its verdict on bad numbers."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

import pytest
from pydantic import TypeAdapter

pytest.importorskip("rich")

from rich.console import Console

import simple_offload
from examples.bench.agents import requests_by_agent
from examples.bench.child import ROOT
from examples.bench.command import BAD_RESULT, CANNOT_START, RUN_FAILED, exit_code_of
from examples.bench.connectors import (
    CONTENDERS,
    NONE,
    ON_CPU,
    OURS,
    WITH_FILES,
    Contender,
    before,
)
from examples.engine_bench import __main__ as command
from examples.engine_bench import engine_run, parts
from examples.engine_bench.bench import Bench
from examples.engine_bench.parts import Client, Reply, RequestLost
from examples.engine_bench.plan import CPU, H200, PARTS, PRESETS, Part, Plan
from examples.engine_bench.results import bench_table, floor_seconds, medians_by_contender, problems
from tests.examples.sessions import save_sessions


def code_of(one: Bench) -> int:
    return exit_code_of(lambda: command.run(one))


def tiny_plan() -> Plan:
    """The CPU preset with every part as small as possible."""
    return replace(
        CPU,
        model=replace(CPU.model, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2),
        device_tokens=1024,
        host_bytes=64 << 20,
        prompt_tokens=256,
        idle_prompts=2,
        idle_prompt_tokens=64,
        idle_answer_tokens=4,
        mix_decodes=2,
        mix_answer_tokens=24,
        mix_hits=2,
        users=3,
        users_at_once=3,
        turns=2,
        system_tokens=32,
        history_tokens=(300, 400),
        turn_answer_tokens=4,
        agents=3,
        trace_requests=12,
        trace_scale=2,
        trace_pause=0.1,
        rounds=1,
    )


def with_trace(folder: Path, plan: Plan | None = None) -> Plan:
    """``plan``, else the tiny one, with three sessions of four requests. Their prompts grow from 8
    to 14 ids of 32 tokens, and together do not fit the tiny plan's device."""
    return replace(plan or tiny_plan(), trace=str(save_sessions(folder)))


@pytest.mark.slow
@pytest.mark.usefixtures("light_engines")
@pytest.mark.parametrize("names", [["ours"], list(ON_CPU)], ids="+".join)
def test_a_tiny_bench_measures_every_part(
    names: Sequence[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = with_trace(tmp_path_factory.mktemp("trace"))
    contenders = [(CONTENDERS | WITH_FILES)[name] for name in names]
    files = tmp_path_factory.mktemp("files")
    bench = Bench(plan, contenders, list(PARTS), tmp_path, repeats=2, files=files)
    code = code_of(bench)
    captured = capsys.readouterr()
    printed = captured.out
    assert code == 0, captured
    assert "round 1/1 ours: done" in captured.err
    assert "TTFT, hit in the host tier" in printed
    assert "Agents: 12 requests, " in printed
    assert f"Files in {files}: " in printed
    assert not list(files.iterdir())

    result = json.loads((tmp_path / "result.json").read_text())
    assert TypeAdapter(Plan).validate_python(result["plan"]) == plan
    assert result["problems"] == []
    assert result["peak_bytes_per_second"] is result["floor_seconds"] is None
    # All but a prompt's last block, which has a token that must be computed.
    cached = plan.prompt_tokens - plan.block_size
    assert result["runs"].keys() == set(names)
    answers = set()
    for name, run in [(each, run) for each in names for run in result["runs"][each]]:
        assert run["machine"]["vllm"]
        assert run["lost"] == []
        has_files = name in WITH_FILES
        assert set(run["numbers"]) == set(PARTS) - (set() if has_files else {"restart"})
        if has_files:
            restart = run["numbers"]["restart"]
            assert set(restart) >= {"hit", "found", "first_ttft", "later_ttft"}
            lookups = {key: restart[key] for key in restart if key.startswith("lookups_")}
            assert sum(lookups.values()) >= plan.num_hits
            assert (lookups["lookups_hit"] > 0) == (restart["found"] > 0)
        for key, value in ((k, v) for each in run["numbers"].values() for k, v in each.items()):
            may_be_zero = key.endswith("_cached") or key.startswith("lookups_")
            assert value > 0 or may_be_zero or name == "ours-files"
        ttft = run["numbers"]["ttft"]
        assert ttft["device_hit_cached"] == cached
        if name == "none":
            assert run["external_hits"] == ttft["host_hit_cached"] == 0
        else:
            assert run["external_hits"] >= (plan.num_hits + plan.mix_hits) * cached
            assert ttft["host_hit_cached"] == cached
            answers |= {tuple(reply["tokens"]) for reply in run["replies"]}
    # A model that ignores its prompt would give the same answer to each.
    assert len(answers) == bench.num_runs * plan.num_hits
    of_ours = [run["numbers"]["mix"]["gap_p99"] for run in result["runs"]["ours"]]
    assert result["medians"]["ours"]["mix.gap_p99"] == median(of_ours)
    logs = {f"{name}-1.log" for name in names}
    logs |= {f"{name}-1-again.log" for name in names if name in WITH_FILES}
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", *logs}


def measured(
    ttft: float = 0.2,
    *,
    hits: float = 100,
    lost: Sequence[str] = (),
    tokens: Sequence[int] = (7, 8),
    cached: int = 0,
) -> dict[str, Any]:
    """The report of a run."""
    return {
        "numbers": {"ttft": {"cold": ttft, "host_hit": ttft / 4, "device_hit": ttft / 16}},
        "lost": list(lost),
        "external_hits": hits,
        "replies": [{"id": "ttft 0", "cached": cached, "tokens": list(tokens)}],
    }


TTFT: list[Part] = ["ttft"]


OTHER = "'ttft 0' (0 cached tokens) with [7, 9], none in run 1 with [7, 8]"


@pytest.mark.parametrize(
    ("ours", "plan", "parts", "found"),
    [
        ([measured(), measured()], CPU, TTFT, []),
        ([measured()], CPU, TTFT, ["ours: 1 of 2 runs"]),
        (
            [measured(), measured(lost=["mix: 'mix 3' ended by error"])],
            CPU,
            TTFT,
            ["ours, run 2: lost a request: mix: 'mix 3' ended by error"],
        ),
        ([measured(), measured(hits=0)], CPU, TTFT, ["ours, run 2: the connector got no hits"]),
        ([measured(), measured(hits=0)], CPU, ["idle"], []),
        ([measured(tokens=[7, 9]), measured()], H200, TTFT, [f"ours in run 1 answered {OTHER}"]),
        # Dummy weights decide ties by the number of cached tokens.
        ([measured(), measured(tokens=[7, 9], cached=96)], H200, TTFT, []),
        (
            [measured(), measured(tokens=[7, 9], cached=96)],
            CPU,
            TTFT,
            [f"ours in run 2 answered {OTHER}".replace("(0 cached", "(96 cached")],
        ),
        # Each repeat has prompts of its own.
        ([measured(), {**measured(tokens=[1, 8]), "repeat": 1}], H200, TTFT, []),
    ],
)
def test_problems(
    ours: list[dict[str, Any]], plan: Plan, parts: list[Part], found: list[str]
) -> None:
    runs = {"none": [measured(hits=0), measured(hits=0)], "ours": ours}
    assert problems(runs, plan, parts, 2) == found


def test_the_floor_is_a_device_hit_and_the_bytes() -> None:
    plan = H200
    by_contender = medians_by_contender({"none": [measured(0.16)], "ours": [measured(0.32)]})
    assert plan.hit_bytes == 1 << 30
    assert floor_seconds(by_contender, plan, 2.0**30) == pytest.approx(0.01 + 1)
    split = replace(plan, tensor_parallel=2)
    assert floor_seconds(by_contender, split, 2.0**30) == pytest.approx(0.01 + 0.5)
    assert floor_seconds(by_contender, plan, None) is None
    assert floor_seconds({"none": {}}, plan, 2.0**30) is None


def test_the_table_has_medians_ratios_and_the_floor() -> None:
    by_contender = medians_by_contender({"none": [measured(0.2, hits=0)], "ours": [measured(0.16)]})
    console = Console(width=160)
    with console.capture() as capture:
        console.print(bench_table(by_contender, 0.032, "Medians"))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert "TTFT, prompt never seen, ms 200 160 (0.80x)" in lines
    assert "TTFT, hit in the host tier, ms 50.0 40.0 (0.80x)" in lines
    assert "the same over its floor of 32.0 ms 1.56x 1.25x" in lines
    assert not any("throughput" in line for line in lines)


def test_a_failing_engine_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = [sys.executable, "-c", "import sys; print('no memory left'); sys.exit(7)"]
    monkeypatch.setattr("examples.engine_bench.bench.child_command", lambda *_, **__: failing)
    bench = Bench(tiny_plan(), [CONTENDERS["ours"]], TTFT, tmp_path)
    (tmp_path / "result.json").write_text("of an earlier bench")
    assert code_of(bench) == RUN_FAILED
    printed = capsys.readouterr().err
    assert "The process of ours-1 ended: exit code 7" in printed
    assert "no memory left" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["ours-1.log"]


def test_contenders_take_turns_and_each_repeat_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code and the output tell of problems, as the numbers do."""
    order: list[str] = []

    def play(command: list[str], _environment: Any, log: Path, on_event: Any) -> None:
        order.append(log.stem)
        for repeat in range(json.loads(command[-1])["repeats"]):
            on_event({"run": measured(hits=0) | {"repeat": repeat}})
            runs = json.loads((tmp_path / "result.json").read_text())["runs"]
            assert sum(map(len, runs.values())) == 2 * (len(order) - 1) + repeat + 1

    monkeypatch.setattr("examples.engine_bench.bench.listen", play)
    bench = Bench(replace(tiny_plan(), rounds=2), [NONE, OURS], TTFT, tmp_path, repeats=2)
    assert code_of(bench) == BAD_RESULT
    assert order == ["none-1", "ours-1", "none-2", "ours-2"]
    done = [(run["round"], run["repeat"]) for run in bench.runs["ours"]]
    assert done == [(1, 0), (1, 1), (2, 0), (2, 1)]
    found = json.loads((tmp_path / "result.json").read_text())["problems"]
    assert len(found) == 4
    printed = capsys.readouterr().out
    assert all(problem in printed for problem in found)


def test_an_engine_with_files_is_started_again_over_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers go to the run of the same round and repeat; the folder lasts until then."""
    files = tmp_path / "files"
    files.mkdir()
    seen: list[tuple[str, list[str]]] = []

    def play(command: list[str], _environment: Any, log: Path, on_event: Any) -> None:
        sent = json.loads(command[-1])
        seen.append((log.stem, sent["parts"]))
        folder = Path(sent["folder"])
        again = log.stem.endswith("again")
        assert list(folder.iterdir()) == ([folder / "one.bin"] if again else [])
        (folder / "one.bin").touch()
        assert sent["contender"]["extra"] == {} or str(folder) in json.dumps(sent["contender"])
        for repeat in range(sent["repeats"]):
            run = measured() | {"repeat": repeat}
            if again:
                run["numbers"] = {
                    "restart": {"hit": 0.1 + repeat, "found": 0.0},
                    "turns": {"first_ttft": 0.3},
                }
            on_event({"run": run})

    monkeypatch.setattr("examples.engine_bench.bench.listen", play)
    parts: list[Part] = ["ttft", "turns", "restart"]
    contenders = [OURS, WITH_FILES["ours-files"], WITH_FILES["offloading-files"]]
    bench = Bench(
        replace(tiny_plan(), rounds=1), contenders, parts, tmp_path, repeats=2, files=files
    )
    assert code_of(bench) == BAD_RESULT
    assert seen == [
        ("ours-1", ["ttft", "turns"]),
        *[
            (f"{name}-files-1{again}", parts)
            for name in ("ours", "offloading")
            for again, parts in (("", ["ttft", "turns"]), ("-again", ["turns", "restart"]))
        ],
    ]
    found = [run["numbers"]["restart"] for run in bench.runs["ours-files"]]
    assert found == [{"hit": 0.1 + i, "found": 0.0, "first_ttft": 0.3} for i in range(2)]
    assert [run["numbers"].keys() for run in bench.runs["ours"]] == [{"ttft"}] * 2
    assert len(bench.runs["ours-files"][0]["replies"]) == 2
    assert bench.problems == [
        f"offloading-files, run {number}: nothing was found in the files" for number in (1, 2)
    ]
    assert not list(files.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--parts restart,ttft", "restart needs --files DIR"),
        ("--contenders ours-files", "ours-files needs --files DIR"),
        ("--parts restart --files .", "restart needs ttft"),
    ],
)
def test_what_needs_files_says_so(
    options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.parse(options.split())
    assert said in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_stops_the_bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tiny_plan(), [OURS], TTFT, tmp_path, files=tmp_path / "missing")
    assert code_of(bench) == CANNOT_START
    assert "--files: cannot write to" in capsys.readouterr().err


@pytest.mark.parametrize("plan", [*PRESETS.values(), tiny_plan()])
def test_hits_of_a_plan_have_to_come_from_the_host_and_fit_it(plan: Plan) -> None:
    assert plan.num_hits * plan.prompt_tokens > plan.device_tokens
    assert plan.num_hits * plan.hit_bytes < plan.host_bytes
    assert plan.max_model_len <= plan.device_tokens
    chat = sum(plan.history_tokens) // 2
    chat += plan.turns * (plan.message_tokens + plan.turn_answer_tokens)
    assert plan.users_at_once * chat > plan.device_tokens
    assert plan.users >= plan.users_at_once
    assert min(plan.mix_hits, plan.num_hits // 2) > 0
    sent = json.loads(json.dumps(asdict(plan)))
    assert TypeAdapter(Plan).validate_python(sent) == plan, "it survives the way to the engine"


def test_arguments_make_the_bench_and_the_cpu_leaves_out_what_needs_cuda(tmp_path: Path) -> None:
    options = "--kv-heads 1 --host-gib 64 --eager --rounds 5 --parts turns,idle"
    options += f" --contenders ours,builtin --output {tmp_path}"
    bench = command.parse(options.split())
    model = replace(H200.model, num_kv_heads=1)
    assert bench.plan == replace(H200, model=model, host_bytes=64 << 30, graphs=False, rounds=5)
    assert [each.name for each in bench.contenders] == ["ours", "builtin"]
    assert list(bench.parts) == ["turns", "idle"]
    bench = command.parse(["--preset", "cpu", "--output", str(tmp_path)])
    assert [each.name for each in bench.contenders] == ["none", "ours"]
    with_files = command.parse(["--preset", "cpu", "--files", str(tmp_path)])
    assert [each.name for each in with_files.contenders] == list(ON_CPU)
    assert list(with_files.parts) == ["ttft", "grown", "idle", "mix", "turns", "restart"]
    assert (list(bench.parts), bench.plan.rounds) == (["ttft", "grown", "idle", "mix", "turns"], 2)
    long = command.parse(["--prompt-tokens", "100001", "--output", str(tmp_path)]).plan
    assert (long.prompt_tokens, long.num_hits) == (100_016, 4)
    assert long.device_tokens > 2 * (long.prompt_tokens + max(long.new_tokens))
    options = "--traces a.json --agents 4 --trace-requests 50 --trace-scale 16 --trace-pause 0"
    bench = command.parse([*options.split(), "--seed", "7"])
    assert list(bench.parts) == [part for part in PARTS if part != "restart"]
    assert bench.plan == replace(
        H200,
        agents=4,
        trace_requests=50,
        trace_scale=16,
        trace_pause=0,
        trace=str(Path("a.json").resolve()),
        trace_seed=7,
        seed=7,
    )
    assert bench.plan.max_model_len == H200.device_tokens // 2


def test_another_commit_takes_the_place_of_the_package_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the bench, which a checkout has too, wherever the bench is started."""
    monkeypatch.chdir(ROOT)
    source, output = tmp_path / "checkout", tmp_path / "out"
    for package in ("simple_offload", "examples"):
        (source / package).mkdir(parents=True)
        (source / package / "__init__.py").write_text("__version__ = 'another'")
    output.mkdir()
    options = ["--preset", "cpu", "--contenders", "none", "--rounds", "1", "--output", str(output)]
    bench = command.parse([*options, "--before", str(source)])
    found: dict[str, Any] = {}

    def look(command: list[str], environment: dict[str, str], log: Path, _: Any) -> None:
        code = "import simple_offload, examples.bench.child as child; "
        code += "print(simple_offload.__version__, child.ROOT)"
        sent = json.loads(command[-1])["contender"]
        printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        found[log.stem] = (TypeAdapter(Contender).validate_python(sent), printed)

    monkeypatch.setattr("examples.engine_bench.bench.listen", look)
    assert code_of(bench) == BAD_RESULT
    assert found == {
        "none-1": (NONE, f"{simple_offload.__version__} {ROOT}\n"),
        "before-1": (before(source), f"another {ROOT}\n"),
    }


# Agents


class FakeClient(Client):
    """Answers without an engine. Requests that open a session take ``open_seconds``."""

    def __init__(self, open_seconds: float = 0.0, lost: str | None = None) -> None:
        super().__init__(cast(Any, None), 0.0, lambda: None)
        self.asked: dict[str, tuple[list[int], int]] = {}
        self._open_seconds = open_seconds
        self._lost = lost
        self._busy: set[str] = set()

    async def ask(
        self,
        id: str,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        compared: bool = True,
        started: asyncio.Event | None = None,
    ) -> Reply:
        _, agent, index = id.split()
        assert agent not in self._busy, "an agent sends one request at a time"
        assert not compared
        self._busy.add(agent)
        opens = index == "0"
        await asyncio.sleep(self._open_seconds if opens else 0)
        if id == self._lost:
            raise RequestLost(f"{id!r} ended by abort")
        self._busy.remove(agent)
        self.asked[id] = (list(prompt), num_tokens)
        cached = 0 if opens else len(prompt) // 2
        return Reply(id, compared, 2.0 if opens else 0.5, [], [1] * num_tokens, cached)


class SlowStart(FakeClient):
    """Each decode computes its prompt in ten seconds, and the decodes before it wait."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds

    async def ask(self, *ask: Any, started: asyncio.Event | None = None, **options: Any) -> Reply:
        id, _, num_tokens = ask
        reply = Reply(id, False, 0.0, [], [1] * num_tokens, 0)
        if started is not None:
            self.seconds += 10
            reply.arrivals.append(self.seconds)
            started.set()
            await asyncio.sleep(0)  # all others begin
            reply.arrivals += [self.seconds + number for number in range(num_tokens)]
        return reply


def test_tokens_that_wait_for_the_prompts_of_other_decodes_do_not_count() -> None:
    plan = replace(tiny_plan(), mix_decodes=3)
    numbers = asyncio.run(parts.mix(SlowStart(), plan))
    assert numbers["gap_max"] == 1.0


def test_agents_send_the_same_sessions_however_fast_the_answers_are(tmp_path: Path) -> None:
    plan = with_trace(tmp_path)
    slow, fast = FakeClient(open_seconds=0.05), FakeClient()
    numbers = asyncio.run(parts.traces(slow, plan))
    asyncio.run(parts.traces(fast, plan))
    assert slow.asked == fast.asked
    assert len(slow.asked) == parts.num_requests("traces", plan) == 12
    firsts = set()
    for agent in range(3):
        prompts = [slow.asked[f"trace {agent} {index}"][0] for index in range(4)]
        assert [len(prompt) for prompt in prompts] == [32 * ids + 1 for ids in (8, 10, 12, 14)]
        firsts.add(tuple(prompts[0][:32]))
        for shorter, longer in pairwise(prompts):
            assert longer[: len(shorter) - 1] == shorter[:-1]
    assert len(firsts) == 3, "sessions have no tokens in common"
    assert {num_tokens for _, num_tokens in slow.asked.values()} == {4}
    # The first request of a session counts for all but the times.
    later, tokens = 3 * 32 * (10 + 12 + 14) + 9, 3 * 32 * (8 + 10 + 12 + 14) + 12
    assert (numbers["ttft_p50"], numbers["ttft_p99"]) == (0.5, 0.5)
    assert numbers["share_cached"] == pytest.approx(later / 2 / tokens, rel=0.01)
    assert numbers["requests_per_second"] == pytest.approx(12 / numbers["seconds"])
    assert numbers["tokens_per_second"] == pytest.approx((tokens + 48) / numbers["seconds"])


def test_repeats_send_the_same_sessions_with_other_tokens(tmp_path: Path) -> None:
    plan = with_trace(tmp_path)
    other_plan = plan.with_other_texts(1)
    first, second = (requests_by_agent(each.replay) for each in (plan, other_plan))
    assert first == second
    for request in chain(*first):
        prompt, other = request.prompt(plan.text), request.prompt(other_plan.text)
        assert prompt[:8] != other[:8]
        assert len(prompt) == len(other) == request.prompt_tokens


def test_the_working_set_is_what_an_endless_cache_computes(tmp_path: Path) -> None:
    plan = with_trace(tmp_path)
    bench = Bench(plan, [], ["traces"], tmp_path)
    bench.run(lambda *_: None)
    found = bench.working_set
    assert found is not None
    tokens = 3 * 32 * 14 + 12
    assert (found.requests, found.prompt_tokens) == (12, 3 * 32 * (8 + 10 + 12 + 14) + 12)
    assert (found.new_tokens, found.answer_tokens) == (tokens, 48)
    assert found.device_multiple == tokens / plan.device_tokens > 1
    assert found.host_multiple == tokens * plan.model.kv_bytes_per_token / plan.host_bytes
    assert f"{tokens:,} of them are new: 1.32 times the device's KV space" in str(found)


def test_sessions_end_before_a_request_that_does_not_fit(tmp_path: Path) -> None:
    """Then the agent takes the next session."""
    plan = replace(with_trace(tmp_path), device_tokens=2 * 32 * 13, agents=1, trace_requests=9)
    (requests,) = requests_by_agent(plan.replay)
    assert [each.prompt_tokens // 32 for each in requests] == [8, 10, 12] * 3
    assert [each.opens for each in requests] == [True, False, False] * 3
    # Of the recorded pauses of 9 s, halved, the longest allowed is left.
    assert [each.pause for each in requests] == [0.0, 0.1, 0.1] * 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"trace_scale": 3}, "scale: 3 does not divide the 64 tokens of an id"),
        ({"trace_requests": 13}, "12 for 3 agents. Wanted: 13"),
        ({"trace_requests": 1}, "one or more that continue a session"),
        ({"trace": "/no/such"}, "--traces: /no/such cannot be read"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused_before_anything_runs(
    changes: dict[str, Any],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = replace(with_trace(tmp_path), **changes)
    assert code_of(Bench(plan, [NONE], ["traces"], tmp_path / "out")) == CANNOT_START
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_requests_without_sessions_are_dealt_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}
    path.write_text("\n".join(json.dumps(row | {"hash_ids": [id, 1]}) for id in range(5)))
    plan = replace(tiny_plan(), trace=str(path), trace_requests=5, device_tokens=2048)
    requests = sorted(chain(*requests_by_agent(plan.replay)), key=lambda each: each.ids[0])
    assert [each.place for each in requests] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]
    assert [each.pause for each in requests[3:]] == [0.0, 0.0]
    assert not any(each.opens for each in requests)


def test_a_lost_request_of_an_agent_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_run, "Client", lambda *_: FakeClient(lost="trace 1 2"))
    plan, engine = with_trace(tmp_path), cast(Any, None)
    played = asyncio.run(engine_run._play(plan, engine, ["traces", "idle"], lambda _: None))
    assert played == ({}, [], ["traces: 'trace 1 2' ended by abort"])
