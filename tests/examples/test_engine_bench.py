"""The bench: on a tiny model with real engines, and what it makes of bad numbers."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytest.importorskip("rich")

from rich.console import Console

from examples.demo.child import ROOT
from examples.engine_bench import __main__ as command
from examples.engine_bench import bench as bench_module
from examples.engine_bench.bench import Bench, environment
from examples.engine_bench.contenders import CONTENDERS, LAYOUT, ON_CPU
from examples.engine_bench.parts import percentile, requests_of
from examples.engine_bench.plan import PARTS, PRESETS, Part, Plan, cpu_plan, h200_plan
from examples.engine_bench.report import bench_table
from examples.engine_bench.results import floor_seconds, medians, problems

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="runs a vLLM engine"
)


def tiny_plan() -> Plan:
    """The CPU preset, as small as each part can be."""
    plan = cpu_plan()
    return replace(
        plan,
        model=replace(plan.model, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2),
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
    )


@needs_vllm
def test_a_tiny_bench_measures_every_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tiny_plan()
    contenders = [CONTENDERS[name] for name in ON_CPU]
    bench = Bench(plan, contenders, list(PARTS), 1, tmp_path, repeats=2)
    code = command.run(bench)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "round 1/1 ours: done" in printed
    assert "TTFT, hit in the host tier" in printed

    result = json.loads((tmp_path / "result.json").read_text())
    assert Plan.from_json(result["plan"]) == plan
    assert result["problems"] == []
    assert result["peak_bytes_per_second"] is result["floor_seconds"] is None
    # All but a prompt's last block, which has a token that must be computed.
    cached = plan.prompt_tokens - plan.block_size
    said = set()
    for none, ours in zip(*(result["runs"][name] for name in ON_CPU), strict=True):
        assert none["machine"]["vllm"]
        assert none["external_hits"] == 0
        assert ours["external_hits"] >= (plan.num_hits + plan.mix_hits) * cached
        for run in (none, ours):
            assert run["lost"] == []
            assert set(run["numbers"]) == set(PARTS)
            assert run["numbers"]["ttft"]["device_hit_cached"] == cached
            assert all(value > 0 for key, value in positive(run["numbers"]))
        assert none["numbers"]["ttft"]["host_hit_cached"] == 0
        assert ours["numbers"]["ttft"]["host_hit_cached"] == cached
        said |= {tuple(reply["tokens"]) for reply in ours["replies"]}
    # A model that ignores its prompt would say the same after each.
    assert len(said) == bench.num_runs * plan.num_hits
    of_ours = [run["numbers"]["mix"]["gap_p99"] for run in result["runs"]["ours"]]
    assert result["medians"]["ours"]["mix.gap_p99"] == median(of_ours)
    assert {path.name for path in tmp_path.iterdir()} == {
        "result.json",
        "none-1.log",
        "ours-1.log",
    }


def positive(numbers: Mapping[str, Mapping[str, float]]) -> list[tuple[str, float]]:
    """Every number that cannot be zero."""
    return [
        (f"{part}.{key}", value)
        for part, each in numbers.items()
        for key, value in each.items()
        if not key.endswith("_cached")
    ]


@needs_vllm
def test_an_interrupted_bench_leaves_no_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-u", "-m", "examples.engine_bench", "--preset", "cpu"),
            *("--parts", "idle", "--output", str(tmp_path)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Started in the background by a shell, the tests themselves ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no lock taken
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "warming up" in line:  # the engine core has a process of its own by now
                group = engine_group(str(tmp_path))
                assert len(processes_of(group)) >= 2
                process.send_signal(signal.SIGINT)
                break
        else:
            pytest.fail("the engine never came to its warm-up")
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == command.INTERRUPTED
    assert processes_of(group) == []
    assert [path.name for path in tmp_path.iterdir()] == ["none-1.log"]


def engine_group(text: str) -> int:
    """The process group of the one ``engine_run`` whose command line has ``text``."""
    groups = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if "engine_run" in line and text in line:
                    groups.add(os.getpgid(int(entry.name)))
            except OSError:
                continue
    (group,) = groups
    return group


def processes_of(group: int) -> list[int]:
    """Live processes of a group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if os.getpgid(int(entry.name)) == group and state != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def told(
    ttft: float = 0.2,
    *,
    hits: float = 100,
    lost: Sequence[str] = (),
    tokens: Sequence[int] = (7, 8),
    cached: int = 0,
) -> dict[str, Any]:
    """What a run tells."""
    return {
        "numbers": {"ttft": {"cold": ttft, "host_hit": ttft / 4, "device_hit": ttft / 16}},
        "lost": list(lost),
        "external_hits": hits,
        "replies": [{"id": "ttft 0", "cached": cached, "tokens": list(tokens)}],
    }


TTFT: list[Part] = ["ttft"]


def test_medians_are_over_rounds_by_contender() -> None:
    runs = {"none": [told(3), told(1), told(8)], "ours": [told(4), told(2)]}
    found = medians(runs)
    assert found["none"]["ttft.cold"] == 3
    assert found["ours"]["ttft.cold"] == 3
    assert found["ours"]["ttft.host_hit"] == 0.75


def test_rounds_without_a_number_do_not_count() -> None:
    found = medians({"none": [told(3), told(1) | {"numbers": {}}]})
    assert found["none"]["ttft.cold"] == 3


def test_all_is_well() -> None:
    runs = {"none": [told(hits=0), told(hits=0)], "ours": [told(), told()]}
    assert problems(runs, cpu_plan(), TTFT, 2) == []


def test_a_lost_request_is_a_problem() -> None:
    runs = {"none": [told(hits=0)], "ours": [told(lost=["mix: 'mix 3' ended by error"])]}
    assert problems(runs, cpu_plan(), TTFT, 1) == [
        "ours, run 1: lost a request: mix: 'mix 3' ended by error"
    ]


def test_a_connector_without_hits_is_a_problem() -> None:
    runs = {"none": [told(hits=0)] * 2, "ours": [told(), told(hits=0)]}
    assert problems(runs, cpu_plan(), TTFT, 2) == ["ours, run 2: the connector got no hits"]
    assert problems(runs, cpu_plan(), ["idle"], 2) == []


def test_a_missing_round_is_a_problem() -> None:
    runs = {"none": [told(hits=0)] * 2, "ours": [told()]}
    assert problems(runs, cpu_plan(), TTFT, 2) == ["ours: 1 of 2 runs"]


def test_differing_tokens_are_a_problem() -> None:
    runs = {"none": [told(hits=0)], "ours": [told(tokens=[7, 9])]}
    (problem,) = problems(runs, h200_plan(), TTFT, 1)
    assert problem == (
        "ours in run 1 answered 'ttft 0' (0 cached tokens) with [7, 9], none in run 1 with [7, 8]"
    )


def test_differing_tokens_of_one_contender_are_a_problem() -> None:
    runs = {"ours": [told(), told(tokens=[1, 8])]}
    (problem,) = problems(runs, h200_plan(), TTFT, 2)
    assert problem.startswith("ours in run 2 answered")


def test_repeats_have_prompts_of_their_own() -> None:
    runs = {"ours": [told(), {**told(tokens=[1, 8]), "repeat": 1}]}
    assert problems(runs, h200_plan(), TTFT, 2) == []
    plan = h200_plan()
    other = plan.with_other_texts(1)
    assert plan.text(9, "a") == plan.with_other_texts(0).text(9, "a") != other.text(9, "a")
    assert other.text(9, "a") == plan.with_other_texts(1).text(9, "a")


def test_other_numbers_of_cached_tokens_excuse_ties_of_dummy_weights_only() -> None:
    runs = {"none": [told(hits=0)], "ours": [told(tokens=[7, 9], cached=96)]}
    assert problems(runs, h200_plan(), TTFT, 1) == []
    assert len(problems(runs, cpu_plan(), TTFT, 1)) == 1


def test_the_floor_is_a_device_hit_and_the_bytes() -> None:
    plan = h200_plan()
    by_contender = medians({"none": [told(0.16)], "ours": [told(0.32)]})
    assert plan.hit_bytes == 1 << 30
    assert floor_seconds(by_contender, plan, 2.0**30) == pytest.approx(0.01 + 1)
    split = replace(plan, tensor_parallel=2)
    assert floor_seconds(by_contender, split, 2.0**30) == pytest.approx(0.01 + 0.5)
    assert floor_seconds(by_contender, plan, None) is None
    assert floor_seconds({"none": {}}, plan, 2.0**30) is None


def printed_table(by_contender: Mapping[str, Mapping[str, float]], floor: float | None) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(bench_table(by_contender, floor, "Medians"))
    return capture.get()


def test_the_table_has_medians_ratios_and_the_floor() -> None:
    by_contender = medians({"none": [told(0.2, hits=0)], "ours": [told(0.16)]})
    lines = printed_table(by_contender, 0.032).splitlines()
    assert row(lines, "TTFT, prompt never seen, ms") == ["200", "160", "(0.80x)"]
    assert row(lines, "TTFT, hit in the host tier, ms") == ["50.0", "40.0", "(0.80x)"]
    assert row(lines, "  the same over its floor of 32.0 ms") == ["1.56x", "1.25x"]
    assert not any("throughput" in line for line in lines)


def test_the_table_shows_what_is_missing() -> None:
    lines = printed_table(
        {"none": {}, "ours": {"idle.tokens_per_second": 33454}}, None
    ).splitlines()
    assert row(lines, "throughput without hits, tokens/s") == ["-", "33,454"]
    assert not any("floor" in line for line in lines)


def row(lines: Sequence[str], title: str) -> list[str]:
    (line,) = (line[1:] for line in lines if line[1:].startswith(title))
    return line.removeprefix(title).split()


class StandIn(Bench):
    """A bench whose engines have told what they are said to have told."""

    def __init__(self, output: Path, told_by: Mapping[str, dict[str, Any]]) -> None:
        contenders = [CONTENDERS[name] for name in told_by]
        super().__init__(cpu_plan(), contenders, TTFT, 1, output)
        self._told_by = told_by

    def run(self, show: bench_module.Show) -> None:
        for name, one in self._told_by.items():
            self.runs[name].append(one)


@pytest.mark.parametrize(
    ("ours", "code"),
    [
        (told(), 0),
        (told(lost=["ttft: x"]), command.WORTH_NOTHING),
        (told(tokens=[7, 1]), command.WORTH_NOTHING),
        (told(hits=0), command.WORTH_NOTHING),
    ],
    ids=["fine", "lost", "differing", "no-hits"],
)
def test_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ours: dict[str, Any], code: int
) -> None:
    assert command.run(StandIn(tmp_path, {"none": told(hits=0), "ours": ours})) == code
    found = json.loads((tmp_path / "result.json").read_text())["problems"]
    assert bool(found) == bool(code)
    assert all(problem in capsys.readouterr().out for problem in found[:1])


def test_a_failing_engine_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = [sys.executable, "-c", "import sys; print('no memory left'); sys.exit(7)"]
    monkeypatch.setattr(Bench, "_command", lambda *_: failing)
    bench = Bench(tiny_plan(), [CONTENDERS["ours"]], TTFT, 1, tmp_path)
    (tmp_path / "result.json").write_text("of an earlier bench")
    assert command.run(bench) == command.RUN_FAILED
    printed = capsys.readouterr().out
    assert "exited with code 7" in printed
    assert "no memory left" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["ours-1.log"]


def test_contenders_take_turns_and_each_repeat_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def play(command: list[str], _environment: Any, log: Path, on_event: Any) -> None:
        order.append(log.stem)
        for repeat in range(int(command[command.index("--repeats") + 1])):
            on_event({"run": told() | {"repeat": repeat}})
            runs = json.loads((tmp_path / "result.json").read_text())["runs"]
            assert sum(map(len, runs.values())) == 2 * (len(order) - 1) + repeat + 1

    monkeypatch.setattr("examples.engine_bench.bench.listen", play)
    contenders = [CONTENDERS[name] for name in ON_CPU]
    bench = Bench(tiny_plan(), contenders, TTFT, rounds=2, output=tmp_path, repeats=2)
    bench.run(lambda *_: None)
    assert order == ["none-1", "ours-1", "none-2", "ours-2"]
    assert [(run["round"], run["repeat"]) for run in bench.runs["ours"]] == [
        *[(1, 0), (1, 1)],
        *[(2, 0), (2, 1)],
    ]


def test_only_one_contender_has_another_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAYOUT, "LBHNC")
    layouts = {
        name: environment("cuda", contender.environment, tmp_path).get(LAYOUT)
        for name, contender in CONTENDERS.items()
    }
    assert {name for name, layout in layouts.items() if layout} == {"builtin-BLHNC"}
    assert layouts["builtin-BLHNC"] == "BLHNC"


def test_contenders_differ_in_the_connector_only() -> None:
    plan = h200_plan()
    configs = {name: each.transfer_config(plan.host_bytes) for name, each in CONTENDERS.items()}
    assert configs["none"] is None
    ours, builtin = configs["ours"], configs["builtin"]
    assert ours is not None
    assert ours.pop("kv_connector_module_path") == "simple_offload"
    assert ours == builtin == configs["builtin-BLHNC"]
    assert configs["offloading"] == {**ours, "kv_connector": "OffloadingConnector"}


@pytest.mark.parametrize("make_plan", [*PRESETS.values(), tiny_plan])
def test_hits_have_to_come_from_the_host_and_fit_it(make_plan: Any) -> None:
    plan: Plan = make_plan()
    assert plan.num_hits * plan.prompt_tokens > plan.device_tokens
    assert plan.num_hits * plan.hit_bytes < plan.host_bytes
    assert plan.max_model_len <= plan.device_tokens
    chat = sum(plan.history_tokens) // 2
    chat += plan.turns * (plan.message_tokens + plan.turn_answer_tokens)
    assert plan.users_at_once * chat > plan.device_tokens
    assert plan.users >= plan.users_at_once
    assert min(plan.mix_hits, plan.num_hits // 2) > 0


@pytest.mark.parametrize("make_plan", [*PRESETS.values(), tiny_plan])
def test_a_plan_survives_the_way_to_the_engine(make_plan: Any) -> None:
    plan = make_plan()
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_same_prompts_for_every_contender() -> None:
    plan = cpu_plan()
    assert plan.text(50, "ttft", 1) == cpu_plan().text(50, "ttft", 1)
    assert plan.text(50, "ttft", 1) != plan.text(50, "ttft", 2)
    assert plan.text(50, "ttft", 1) != replace(plan, seed=1).text(50, "ttft", 1)


def test_percentiles() -> None:
    ordered = [float(value) for value in range(1, 101)]
    assert percentile(ordered, 0.5) == 51
    assert percentile(ordered, 0.99) == 100
    assert percentile(ordered, 1.0) == 100
    assert percentile([3.0], 0.5) == 3


def test_every_part_has_a_number_of_requests() -> None:
    assert all(requests_of(part, h200_plan()) > 0 for part in PARTS)


def test_arguments_make_the_bench(tmp_path: Path) -> None:
    bench = command._parse(
        [
            *("--kv-heads", "1", "--host-gib", "64", "--eager", "--rounds", "5", "--seed", "3"),
            *("--parts", "turns,idle", "--contenders", "ours,builtin"),
            *("--output", str(tmp_path / "new")),
        ]
    )
    assert bench.plan == replace(
        h200_plan(),
        model=replace(h200_plan().model, num_kv_heads=1),
        host_bytes=64 << 30,
        graphs=False,
        seed=3,
    )
    assert [each.name for each in bench.contenders] == ["ours", "builtin"]
    assert (list(bench.parts), bench.rounds) == (["turns", "idle"], 5)


def test_the_cpu_preset_leaves_out_what_needs_cuda(tmp_path: Path) -> None:
    bench = command._parse(["--preset", "cpu", "--output", str(tmp_path)])
    assert [each.name for each in bench.contenders] == ["none", "ours"]
    assert (list(bench.parts), bench.rounds) == (list(PARTS), 2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--parts", "ttft,all"], "--parts: 'all' is none of ttft, idle, mix, turns"),
        (["--parts", "mix,mix"], "--parts: a name occurs twice in 'mix,mix'"),
        (["--contenders", "theirs"], "--contenders: 'theirs' is none of none, ours"),
        (["--rounds", "0"], "--rounds: '0' is not a whole number above 0"),
        (["--kv-heads", "5"], "--kv-heads: 5 does not divide 32 heads"),
        (
            ["--preset", "cpu", "--contenders", "offloading"],
            "--contenders: 'offloading' does not run on the CPU: choose from none, ours",
        ),
        (["--output", "/dev/null"], "--output: cannot write to /dev/null"),
    ],
)
def test_bad_arguments_are_named(
    arguments: Sequence[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err
