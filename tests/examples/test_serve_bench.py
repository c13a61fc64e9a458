"""The serving benchmark from end to end, mostly with fake servers, and its figures."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from prometheus_client.samples import Sample
from pydantic import TypeAdapter
from rich.console import Console

import simple_offload
from examples import serving
from examples.bench.child import ROOT
from examples.bench.command import (
    BAD_RESULT,
    CANNOT_START,
    INTERRUPTED,
    RUN_FAILED,
    RunFailed,
    exit_code_of,
)
from examples.bench.connectors import CONTENDERS, NONE, ON_CPU, OURS, Contender, before
from examples.bench.models import DEEPSEEK_LITE, ModelShape
from examples.serve_bench import __main__ as command
from examples.serve_bench.agents import requests_by_agent
from examples.serve_bench.bench import Bench
from examples.serve_bench.client import Reply, counters
from examples.serve_bench.plan import CPU, H200, PRESETS, WORKLOADS, Plan, Transport, generated
from examples.serve_bench.results import (
    floor_line,
    numbers_of,
    problems,
    summaries,
    ttft_of,
    workload_tables,
)
from examples.serve_bench.workloads import plays
from tests.examples.fake_server import COMMAND, assert_gone
from tests.examples.sessions import save_sessions

WARM_UP = 3
"""Number of requests of each server's warm-up."""
TURNS = 12
"""Number of requests of the tiny plan's conversations."""


def tiny_plan(**changes: Any) -> Plan:
    """The CPU preset with every workload as small as possible."""
    plan = replace(
        CPU,
        most_client_busy=100.0,  # a fake server answers at once: the client computes all the time
        settle_seconds=0.0,
        shape=ModelShape(256, 64, 2, 2, 1),
        device_tokens=512,
        host_bytes=64 << 20,
        prompt_tokens=128,
        new_tokens=(1, 32),
        idle_prompts=2,
        idle_prompt_tokens=64,
        idle_answer_tokens=4,
        mix_decodes=2,
        mix_answer_tokens=24,
        mix_hits=2,
        settings=generated(4, messages=6, common=32, prefix=(150, 200), question=16, answer=4),
        active=4,
        longest_conversation=320,
        agents=(2, 4),
        requests=16,
        scale=4,
        max_pause=0,
    )
    return replace(plan, **changes)


def bench(output: Path, *names: str, **changes: Any) -> Bench:
    return Bench(tiny_plan(**changes), [CONTENDERS[name] for name in names], output)


def code_of(one: Bench) -> int:
    return exit_code_of(lambda: command.run(one))


def result_of(output: Path) -> dict[str, Any]:
    found = json.loads((output / "result.json").read_text())
    assert isinstance(found, dict)
    return found


def servers(output: Path) -> list[psutil.Process]:
    """The servers of a run, and what they have started."""
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if str(output) in " ".join(each.info["cmdline"] or ())]


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def most_at_once(replies: Sequence[Mapping[str, Any]]) -> int:
    """Number of requests that were under way together."""
    spans = [(float(each["at"]), float(each["at"] + each["latency"])) for each in replies]
    return max(sum(begin <= start < end for begin, end in spans) for start, _ in spans)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Servers are fakes. FAKE_SERVER in the environment has their faults."""
    monkeypatch.setattr("examples.serving.COMMAND", COMMAND)
    return monkeypatch


# Whole runs


def test_every_contender_does_all_the_work(
    fake: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.setenv("FAKE_SERVER", json.dumps({"resets_refused": 2}))
    workloads = tuple(name for name in WORKLOADS if name != "restart")
    output, trace = tmp_path / "out", str(save_sessions(tmp_path, sessions=4))
    one = bench(output, "none", "ours", workloads=workloads, repeats=2, traces=trace)
    code = code_of(one)
    captured = capsys.readouterr()
    assert code == 0, captured
    assert "round 1/1 ours: traces, 4 agents, repeat 2/2" in captured.err

    result = result_of(output)
    assert result["problems"] == []
    names = [*workloads[:-1], "traces, 2 agents", "traces, 4 agents"]
    asked = []
    for contender, run in result["runs"].items():
        assert [(each["repeat"], each["workload"]) for each in run] == [
            (repeat, name) for repeat in range(2) for name in names
        ]
        for each in run:
            numbers, replies = each["numbers"], each["replies"]
            assert numbers["requests"] == len(replies)
            # Two prompts may begin with the same token by chance.
            assert (numbers["external_hit_tokens"] > 1) == (
                contender == "ours" and each["workload"] not in ("idle", "stores")
            )
            if each["workload"].startswith(("turns", "traces", "idle")):
                tokens = sum(reply["prompt_tokens"] for reply in replies)
                assert numbers["prompt_tokens"] == tokens, each["workload"]
            assert all(0 < reply["ttft"] <= reply["latency"] for reply in replies)
            if each["workload"] == "turns":
                assert len(replies) == TURNS
                assert most_at_once(replies) <= one.plan.clients
            if each["workload"] == "traces, 4 agents":
                require_closed_loops(numbers, replies)
        # The fake's answers follow from the prompts.
        asked.append(
            [{(reply["id"], reply["answer"]) for reply in each["replies"]} for each in run]
        )
    assert asked[0] == asked[1], "all contenders get the same prompts"
    answers = [{answer for _, answer in each} for each in asked[0]]
    turns, agents, later = names.index("turns"), len(names) - 1, len(names)
    for place, other in ((turns, turns + later), (agents, agents + later), (agents, agents - 1)):
        # Two sums of tokens may be the same by chance.
        same = answers[place] & answers[other]
        assert len(same) < 4, "repeats and numbers of agents have other prompts"

    ours = result["summaries"]["ours"]
    assert list(ours["turns"]["ttft"]) == ["all", "later turns", "turn 1", "turn 2", "turn 3"]
    lines = squeezed(captured.out)
    assert "turns: TTFT, ms. Medians of 2, and ratios to none" in lines
    assert f"requests {TURNS} {TURNS}" in lines
    assert any(line.startswith("Start, s: none ") for line in lines)
    assert (output / "ttft.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in output.iterdir()} == {
        *("result.json", "conversations.json", "ttft.png", "none-1.log", "ours-1.log")
    }
    assert_gone(servers(output))


def require_closed_loops(numbers: Mapping[str, float], replies: Sequence[dict[str, Any]]) -> None:
    """Of four agents. Each has four requests, of which the first is not measured."""
    lengths = [16 * ids + 1 for ids in (8, 10, 12, 14)]
    for agent in range(4):
        mine = [reply for reply in replies if reply["id"].startswith(f"agent {agent},")]
        assert most_at_once(mine) == 1
        assert [reply["prompt_tokens"] for reply in mine] == lengths[1:]
    new = 4 * (16 * 14 + 4)
    assert numbers["device_multiple"] == new / 512
    assert numbers["endless_share"] == (new - 4 * lengths[0]) / (4 * sum(lengths[1:]))


@pytest.mark.parametrize(
    ("faults", "code", "complaint"),
    [
        ({"refuse_at": WARM_UP + 1}, BAD_RESULT, "lost a request: conversation 'CONV_ID_"),
        ({"short_at": WARM_UP + 5}, BAD_RESULT, "3 of 4 tokens"),
        ({"exit_at_start": 5}, RUN_FAILED, "exit code 5"),
        ({"refuse_at": 0}, RUN_FAILED, "The server answers nothing"),
        ({"die_at": WARM_UP + 6, "child": True}, RUN_FAILED, "killed by signal 9"),
    ],
)
def test_a_fault_costs_its_own_results_only(
    faults: Mapping[str, Any],
    code: int,
    complaint: str,
    fake: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.setenv("FAKE_SERVER", json.dumps(faults))
    assert code_of(bench(tmp_path, "none", "ours")) == code
    printed = capsys.readouterr()
    result = result_of(tmp_path)
    if code == RUN_FAILED:
        assert complaint in printed.err
        assert f"The end of {tmp_path / 'ours-1.log'}:" in printed.err
        assert ("there is no such model" in printed.err) == ("exit_at_start" in faults)
        assert result["problems"] == ["ours, turns: 0 of 1 measurements"]
    else:
        assert complaint in printed.out
        assert any(complaint in each for each in result["problems"])
    assert "turns: TTFT, ms" in printed.out
    assert_gone(servers(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [], "no model is left"
    assert len(result["runs"]["none"][0]["replies"]) == TURNS, "finished results are kept"


def test_a_port_in_use(tmp_path: Path) -> None:
    """The clients would ask another server than the contender's."""
    with socket.socket() as other:
        other.bind((serving.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RunFailed, match=f"Port {port} .* is in use"):
            bench(tmp_path, "ours", port=port).run(lambda *_: None)
    assert not (tmp_path / "ours-1.log").exists(), "nothing was started"


INTERRUPTED_RUN = f"""
import runpy, sys
from examples import serving
serving.COMMAND = {COMMAND!r}
sys.argv = ["examples.serve_bench", *sys.argv[1:]]
runpy.run_module("examples.serve_bench", run_name="__main__")
"""


def test_a_terminated_run_leaves_no_process(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It is ended during a request that never ends."""
    pipe = tmp_path_factory.mktemp("pipe") / "stalled"
    os.mkfifo(pipe)
    faults = {"stall_at": WARM_UP + 3, "stall_pipe": str(pipe), "child": True}
    arguments = [sys.executable, "-u", "-c", INTERRUPTED_RUN, "--contenders", "ours"]
    process = subprocess.Popen(
        [*arguments, "--output", str(tmp_path)],
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
    assert {path.name for path in tmp_path.iterdir()} == {"conversations.json", "ours-1.log"}


def test_a_server_for_other_clients(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server, its model and the conversations are ready when the command line for vLLM's script
    is printed. The server ends with the context."""
    fake.setenv("FAKE_SERVER", json.dumps({"resets_refused": 1000}))
    with bench(tmp_path, "ours").serve(lambda *_: None) as (server, model):
        assert server.metric("vllm:prompt_tokens_by_source_total") == 0
        assert (Path(model) / "tokenizer.json").is_file()
        assert len(json.loads((tmp_path / "conversations.json").read_text())) == 4
        with pytest.raises(
            RunFailed, match="The server was waited for, 0 s, for its caches to be empty"
        ):
            server.reset_prefix_cache(external=False, seconds=0.1)
    assert_gone(servers(tmp_path))
    assert not Path(model).exists()


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
    options = ["--traces", str(trace), "--agents", "2", "--scale", "32", "--requests", "3"]
    options += ["--output", str(tmp_path)]
    log = tmp_path / "server.log"
    with serving.Server("model", [], dict(os.environ), log, name="theirs") as server:
        url = ["--url", f"{server.url}/v1/"]
        one, _ = command.parse([*options, *url])
        assert code_of(one) == 0, capsys.readouterr()
        result = result_of(tmp_path)
        long, _ = command.parse([*url, "--output", str(tmp_path)])
        assert code_of(long) == CANNOT_START
        assert "'theirs' takes requests of up to 400 tokens" in capsys.readouterr().err
    assert result["plan"]["url"] == server.url
    (measured,) = result["runs"]["endpoint"]
    (reply,) = measured["replies"]
    assert (reply["prompt_tokens"], reply["answer_tokens"]) == (4 * 16 + 1, 2)
    assert measured["numbers"]["device_hit_tokens"] > 0
    assert "host_multiple" not in measured["numbers"]
    assert code_of(command.parse([*options, *url])[0]) == RUN_FAILED
    assert f"{server.url} gave no answer to /v1/models" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("transport", "names"),
    [("engine", ["ours"]), ("http", ["ours"]), ("engine", ["none", "ours-files-always"])],
    ids=["engine", "http", "engine, files"],
)
def test_with_vllm(
    transport: Transport,
    names: Sequence[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM sends and counts what the fake server does. Files are found after a restart."""
    # A process fewer imports vLLM, and nothing is compiled.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    files, folder = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("trace")
    plan = tiny_plan(
        workloads=WORKLOADS,
        transport=transport,
        shape=ModelShape(2048, 128, 3, 4, 2),
        settle_seconds=0.2,
        repeats=2,
        traces=str(save_sessions(folder, sessions=4)),
        agents=(4,),
        files=str(files),
    )
    code = code_of(Bench(plan, [CONTENDERS[name] for name in names], tmp_path))
    captured = capsys.readouterr()
    assert code == 0, captured
    assert not list(files.iterdir())
    # All but a prompt's last block, which has a token that must be computed.
    whole = plan.prompt_tokens - plan.block_size
    for name, run in result_of(tmp_path)["runs"].items():
        again = ["restart", "turns, restarted"] if CONTENDERS[name].has_files else []
        workloads = sorted(each["workload"] for each in run)
        assert workloads == sorted(2 * [*plays(plan), *again])
        for each in run:
            numbers, replies = each["numbers"], each["replies"]
            cached = [(reply["kind"], reply["cached_tokens"]) for reply in replies]
            if each["workload"] == "ttft":
                hits = {("hit on the device", whole)}
                hits.add(("hit in the host tier", 0 if name == "none" else whole))
                assert {each for each in cached if each[0].startswith("hit")} == hits
                assert len({reply["answer"] for reply in replies}) == plan.num_hits
            if each["workload"] == "turns" and name != "none":
                assert numbers["loaded_bytes"] > 0
                found = numbers["device_hit_tokens"] + numbers["external_hit_tokens"]
                assert found == sum(tokens for _, tokens in cached)
            if each["workload"] == "restart":
                lookups = [numbers[key] for key in numbers if key.startswith("lookups_")]
                assert sum(lookups) >= plan.num_hits


# Engines in processes of their own, which are not started here


LISTEN = "examples.serve_bench.bench.listen"


def measured(workload: str = "ttft", **changes: Any) -> dict[str, Any]:
    """The report of a measurement."""
    reply = Reply("cold", "ttft 0", 128, 2, True, 0.0, 0.2, 0.3, 0, "w7 w8")
    hits = [replace(reply, kind="hit in the host tier", ttft=0.05, compared=False)]
    hits.append(replace(hits[0], kind="hit on the device", ttft=0.0125))
    return {
        "round": 1,
        "repeat": 0,
        "start_seconds": 1.5,
        "workload": workload,
        "lost": [],
        "numbers": {"requests": 3, "external_hit_tokens": 100.0},
        "ttft": ttft_of([reply, *hits]),
        "replies": [asdict(each) for each in (reply, *hits)],
    } | changes


def test_a_failing_engine_shows_its_log_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import subprocess, sys; pause = [sys.executable, '-c', 'import signal; signal.pause()'];"
    )
    code += "print(subprocess.Popen(pause).pid); print('no memory left'); sys.exit(7)"
    failing = [sys.executable, "-c", code]
    monkeypatch.setattr("examples.serve_bench.bench.child_command", lambda *_, **__: failing)
    (tmp_path / "result.json").write_text("of an earlier bench")
    assert code_of(bench(tmp_path, "ours", transport="engine", workloads=("ttft",))) == RUN_FAILED
    printed = capsys.readouterr().err
    assert "The process of ours-1 ended: exit code 7" in printed
    assert "no memory left" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["ours-1.log"]
    pid = int((tmp_path / "ours-1.log").read_text().split()[0])
    assert_gone([psutil.Process(pid)] if psutil.pid_exists(pid) else [])


def test_another_commit_takes_the_place_of_the_package_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the bench, which a checkout has too, wherever the bench is started."""
    monkeypatch.chdir(ROOT)
    source, output = tmp_path / "checkout", tmp_path / "out"
    shutil.copytree(ROOT / "simple_offload", source / "simple_offload")
    (source / "examples").mkdir()
    for package in ("simple_offload", "examples"):
        (source / package / "__init__.py").write_text("__version__ = 'another'")
    options = ["--transport", "engine", "--contenders", "none", "--rounds", "2"]
    one, _ = command.parse([*options, "--before", str(source), "--output", str(output)])
    found: dict[str, Any] = {}

    def look(arguments: list[str], environment: dict[str, str], log: Path, _: Any) -> None:
        code = "import simple_offload, examples.bench.child as child; "
        code += "print(simple_offload.__version__, child.ROOT)"
        sent = json.loads(arguments[-1])["contender"]
        printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        found[log.stem] = (TypeAdapter(Contender).validate_python(sent), printed)

    monkeypatch.setattr(LISTEN, look)
    assert code_of(one) == BAD_RESULT
    assert list(found) == ["none-1", "before-1", "none-2", "before-2"], "in turn"
    assert found["none-1"] == (NONE, f"{simple_offload.__version__} {ROOT}\n")
    assert found["before-1"] == (before(source), f"another {ROOT}\n")


def test_a_commit_without_what_the_client_imports_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the engine's process the client imports from that commit's package."""
    (tmp_path / "simple_offload").mkdir()
    (tmp_path / "simple_offload" / "__init__.py").touch()
    options = ["--transport", "engine", "--before", str(tmp_path), "--output", str(tmp_path)]
    assert code_of(command.parse(options)[0]) == CANNOT_START
    complaint = r"--before: .*No module named 'simple_offload\..*Allowed: --transport http"
    assert re.search(complaint, capsys.readouterr().err)


# The plan


def test_arguments_make_the_bench(tmp_path: Path) -> None:
    def parsed(options: str) -> Bench:
        return command.parse([*options.split(), "--output", str(tmp_path)])[0]

    options = "--preset h200 --transport engine --workloads ttft,idle --contenders ours,builtin "
    one = parsed(options + "--kv-heads 1 --host-gib 64 --eager --rounds 5 --seed 7")
    assert H200.shape is not None
    assert one.plan == replace(
        H200,
        workloads=("ttft", "idle"),
        transport="engine",
        kv_heads=1,
        shape=replace(H200.shape, num_kv_heads=1),
        host_bytes=64 << 30,
        graphs=False,
        rounds=5,
        seed=7,
    )
    assert [each.name for each in one.contenders] == ["ours", "builtin"]
    assert [each.name for each in parsed("").contenders] == ["none", "ours"]
    assert [each.name for each in parsed("--files .").contenders] == list(ON_CPU)
    long = parsed("--preset h200 --workloads ttft --prompt-tokens 100001").plan
    assert (long.prompt_tokens, long.num_hits) == (100_016, 4)
    assert long.device_tokens > 2 * (long.prompt_tokens + max(long.new_tokens))
    options = '--traces a.json --agents 8 4 --scale 32 --compilation-config {"mode":0}'
    agents = parsed(f"{options} --requests 50").plan
    assert (agents.workloads, agents.agents, agents.seconds) == (("traces",), (8, 4), None)
    assert agents.pause_scale == 32
    arguments = agents.engine_arguments(OURS)
    assert (arguments["compilation_config"], arguments["max_num_seqs"]) == ({"mode": 0}, 8)
    assert parsed(f"{options} --seconds 9 --think-scale 2").plan.pause_scale == 2
    theirs = parsed(f"{options} --url http://h:1 --vocab-size 16").plan
    assert 8 < max(theirs.vocabulary().random(1000)) < 16


@pytest.mark.parametrize("preset", PRESETS)
def test_a_presets_hits_have_to_come_from_the_host_and_fit_it(preset: str) -> None:
    plan = command.parse(["--preset", preset])[0].plan
    assert plan.kv_bytes_per_token is not None
    conversations = plan.conversations(plan.vocabulary())
    everything = sum(conversation.num_tokens for conversation in conversations)
    assert plan.clients <= plan.active <= len(conversations)
    assert everything * plan.kv_bytes_per_token < 0.8 * plan.host_bytes
    assert plan.longest_conversation <= plan.max_model_len <= plan.device_tokens
    sent = json.loads(json.dumps(asdict(plan)))
    assert TypeAdapter(Plan).validate_python(sent) == plan, "it survives the way to the engine"
    if plan.fits:
        assert everything <= plan.device_tokens
        return
    assert plan.device_tokens < 0.5 * everything
    assert plan.num_hits * plan.prompt_tokens > plan.device_tokens
    assert plan.num_hits * plan.prompt_tokens * plan.kv_bytes_per_token < plan.host_bytes
    assert plan.num_mix_hits > 0


# Traces


def test_sessions_end_before_a_request_that_does_not_fit(tmp_path: Path) -> None:
    """Then the agent takes the next session."""
    trace = str(save_sessions(tmp_path))
    plan = tiny_plan(traces=trace, device_tokens=2 * 16 * 13, requests=9, max_pause=2)
    (requests,) = requests_by_agent(plan, 1)
    assert [each.prompt_tokens // 16 for each in requests] == [8, 10, 12] * 3
    assert [each.opens for each in requests] == [True, False, False] * 3
    # Of the recorded pauses of 9 s, a quarter, and no more than is allowed.
    assert [each.pause for each in requests] == [0.0, 2.0, 2.0] * 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"scale": 3}, "scale: 3 does not divide the 64 tokens of an id"),
        ({"requests": 17}, "16 for 2 agents. Wanted: 17"),
        ({"agents": (5,), "requests": None}, "16 for 5 agents. Wanted: one or more for each"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused_before_anything_runs(
    changes: dict[str, Any], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(save_sessions(tmp_path, sessions=4))
    (tmp_path / "result.json").write_text("of an earlier run")
    one = bench(tmp_path, "none", workloads=("traces",), traces=trace, **changes)
    assert code_of(one) == CANNOT_START
    assert complaint in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "result.json").read_text() == "of an earlier run"


def test_agents_that_run_dry_are_named(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The requests of others would be faster for it."""
    plan = {"traces": str(save_sessions(tmp_path)), "requests": None, "agents": (3,)}
    one = bench(tmp_path, "none", workloads=("traces",), **plan)
    assert code_of(one) == BAD_RESULT
    (problem,) = one.problems
    assert problem.endswith("repeat 1: 3 agents had no request left before the time was over")


# Figures


def reply(kind: str, at: float, ttft: float, latency: float, tokens: int = 11) -> Reply:
    return Reply(kind, kind, 101, tokens, False, at, ttft, latency)


def test_numbers_of_a_measurement() -> None:
    """Throughput counts what came in the time."""
    plan = tiny_plan()
    replies = [
        reply("turn 1", 0.0, 1.0, 2.0),
        reply("turn 1", 7.0, 1.0, 5.0),  # half of its time after the first token
        reply("turn 2", 9.5, 1.0, 2.0),  # its first token is late
        reply("turn 2", 5.0, 0.5, 0.5, tokens=1),
    ]
    sources = {"computed_tokens": 50.0, "device_hit_tokens": 0.0, "external_hit_tokens": 150.0}
    numbers = numbers_of(replies, {"seconds": 10.0}, sources, plan)
    assert numbers["requests"] == 4
    assert numbers["requests_per_second"] == 0.3
    assert numbers["answer_tokens_per_second"] == pytest.approx((11 + 6 + 1) / 10)
    assert numbers["tokens_per_second"] == pytest.approx((3 * 101 + 18) / 10)
    assert numbers["tpot_mean"] == pytest.approx((0.1 + 0.4 + 0.1) / 3), "one token has no gap"
    assert numbers["external_hit_share"] == 0.75
    assert numbers["loaded_bytes"] == 150 * cast(int, plan.kv_bytes_per_token)
    copied = {"loaded_bytes": 8.0, "loaded_seconds": 2.0}
    numbers = numbers_of(replies, {}, sources | copied, plan)
    assert (numbers["loaded_bytes"], numbers["load_rate"]) == (8.0, 4.0)
    assert "requests_per_second" not in numbers
    ttft = ttft_of(replies)
    assert list(ttft) == ["all", "later turns", "turn 1", "turn 2"]
    assert ttft["all"] == {"mean": 0.875, "p50": 1.0, "p90": 1.0, "p99": 1.0, "worst": 1.0}
    assert ttft["turn 2"]["mean"] == 0.75


def sample(name: str, value: float, **labels: str) -> Sample:
    return Sample(name, labels, value, None, None)


def test_counters() -> None:
    samples = [
        sample("vllm:prompt_tokens_by_source_total", 5, source="local_compute", engine="0"),
        sample("vllm:prompt_tokens_by_source_total", 6, source="local_compute", engine="1"),
        sample("vllm:prompt_tokens_by_source_total", 7, source="external_kv_transfer"),
        sample("vllm:kv_offload_load_bytes_total", 100),
        sample("vllm:kv_offload_store_time_total", 3),
        sample("vllm:simple_offload_bytes_total", 30, direction="load", path="dma"),
        sample("vllm:simple_offload_bytes_total", 4, direction="store", path="kernel"),
        sample("vllm:simple_offload_second_tier_lookups_total", 2, result="late"),
    ]
    assert counters(samples) == {
        "computed_tokens": 11,
        "external_hit_tokens": 7,
        "loaded_bytes": 130,
        "stored_bytes": 4,
        "stored_seconds": 3,
        "lookups_late": 2,
    }


NONE_RUN = [measured(numbers={"requests": 3})]
OTHER = "'w7 w9', in none, ttft, round 1, repeat 1 'w7 w8'"


def other(cached: int) -> dict[str, Any]:
    one = measured()
    one["replies"][0] |= {"answer": "w7 w9", "cached_tokens": cached}
    return one


@pytest.mark.parametrize(
    ("ours", "changes", "found"),
    [
        ([measured()], {}, None),
        ([], {}, "ours, ttft: 0 of 1 measurements"),
        ([measured(lost=["mix 3: gone"])], {}, "{who}: lost a request: mix 3: gone"),
        (NONE_RUN, {}, "{who}: the connector got no hits"),
        (NONE_RUN, {"fits": True}, None),
        ([measured(numbers={"requests": 3, "device_multiple": 1.2})], {}, None),
        (
            [measured(numbers={"requests": 0, "external_hit_tokens": 1})],
            {},
            "{who}: nothing was asked after the agents' first requests",
        ),
        (
            [measured(numbers={"requests": 3, "external_hit_tokens": 1, "client_busy": 0.9})],
            {},
            "{who}: the client computed for 90% of the time, and measured itself",
        ),
        (
            [other(0)],
            {},
            f"{{who}}: 1 of 1 answers differ: ttft 0 (0 cached tokens) got {OTHER}",
        ),
        # Dummy weights decide ties by the number of cached tokens.
        ([other(96)], {"shape": H200.shape}, None),
        # Each repeat has prompts of its own.
        ([other(0) | {"repeat": 1}], {}, None),
    ],
)
def test_problems(
    ours: list[dict[str, Any]], changes: Mapping[str, Any], found: str | None
) -> None:
    plan = tiny_plan(workloads=("ttft",), most_client_busy=0.8, **changes)
    wanted = [found.replace("{who}", "ours, ttft, round 1, repeat 1")] if found else []
    assert problems({"none": NONE_RUN, "ours": ours}, plan, [NONE, OURS]) == wanted
    hits = {"requests": 3, "external_hit_tokens": 1}
    (phantom,) = problems({"none": [measured(numbers=hits)]}, plan, [NONE])
    assert phantom.endswith("hits of a connector, and there is none")


def test_without_its_base_a_report_has_no_ratios() -> None:
    """They would be those to the next contender."""
    console = Console(width=160)
    with console.capture() as capture:
        found = summaries({"none": [], "ours": [measured()], "builtin": [measured()]})
        console.print(*workload_tables(found, "ttft", "Medians", "none"))
    lines = squeezed(capture.get())
    assert "builtin 200 200 200 200 200" in lines
    assert "requests - 3 3" in lines


def test_the_report_has_medians_ratios_and_the_floor() -> None:
    fast = measured()
    fast["ttft"]["cold"]["p50"] = 0.1
    fast["ttft"]["hit on the device"]["p50"] = 0.01
    found = summaries({"none": NONE_RUN, "ours": [measured(), fast, fast], "builtin": []})
    console = Console(width=160)
    with console.capture() as capture:
        console.print(*workload_tables(found, "ttft", "Medians", "none"))
    lines = squeezed(capture.get())
    assert "cold none 200 200 200 200 200" in lines
    assert "ours 200 (1.00x) 100 (0.50x) 200 (1.00x) 200 (1.00x) 200 (1.00x)" in lines
    assert "requests 3 3" in lines
    assert not any("gap" in line for line in lines)
    plan = replace(H200, workloads=("ttft",))
    assert plan.prompt_tokens * cast(int, plan.kv_bytes_per_token) == 1 << 30
    assert floor_line(found, plan, 25 * 2.0**30) == (
        "Least time of a hit in the host tier: 50.0 ms, with a copy at 26.8 GB/s. none 1.00x, "
        "ours 1.00x"
    )
    assert H200.shape is not None
    one_head = replace(H200.shape, num_kv_heads=1)
    # Two ranks share eight heads, but each needs the one head, and the latents.
    for shape, least in ((H200.shape, "30.0"), (one_head, "15.0"), (DEEPSEEK_LITE, "19.5")):
        on_two = replace(plan, shape=shape, tensor_parallel=2)
        assert f"{least} ms" in str(floor_line(found, on_two, 25 * 2.0**30)), shape
    assert floor_line(found, plan, None) is None
