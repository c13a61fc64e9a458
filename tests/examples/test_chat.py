"""The scheduler benchmark's chat, and what its requests wait for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("vllm")

from rich.console import Console

from examples.scheduler_bench import __main__ as command
from examples.scheduler_bench.chat import run_chat
from examples.scheduler_bench.contenders import CONTENDERS, Contender, OurSide
from examples.scheduler_bench.engine import Engine, Shape, Wait
from examples.scheduler_bench.plan import ChatPlan, Part, Plan
from examples.scheduler_bench.report import wait_table
from examples.scheduler_bench.results import Outcome, Play, Waits

TINY = ChatPlan(
    users=4,
    active=2,
    turns=3,
    system_tokens=32,
    first_tokens=(100, 200),
    device_tokens=1024,
    host_factors=(2.0,),
    seeds=2,
)
SHAPE = Shape(
    device_blocks=40,
    host_blocks=80,
    max_running=8,
    delay=3,
    chunk_tokens=64,
    step_seconds=1.0,
    tokens_per_second=64.0,
)


class ReluctantSide(OurSide):
    """A connector that lets the first request ask again, three times."""

    def open(self, connector: Any, num_blocks: int, block_bytes: int) -> None:
        super().open(connector, num_blocks, block_bytes)
        answer, asked = connector.scheduler.get_num_new_matched_tokens, iter(range(3))

        def ask(request: Any, computed: int) -> Any:
            if request.request_id == "0" and next(asked, None) is not None:
                return None, False
            return answer(request, computed)

        connector.scheduler.get_num_new_matched_tokens = ask


def test_the_parts_of_a_wait() -> None:
    """A prompt of 97 tokens takes two steps, of 64 and 33 tokens. Its load is reported three steps
    later, and computed with the next."""
    engine = Engine(CONTENDERS["ours"], SHAPE)
    prompt = list(range(97))
    engine.add("cold", prompt, [7, 8], came=-1.0)
    engine.drain()
    assert engine.waits["cold"] == Wait(-1.0, 0.0, 0.0, 2.0 + 97 / 64)
    engine.reset_device()
    before = engine.now
    engine.add("loaded", prompt, [7, 8])
    engine.drain()
    wait = engine.waits["loaded"]
    assert (wait.came, wait.got_blocks) == (before, before)
    assert wait.began == before + 4.0
    assert wait.answered == wait.began + 1.0 + 1 / 64


def test_who_gets_blocks_first_is_counted() -> None:
    engine = Engine(Contender("reluctant", ReluctantSide()), SHAPE)
    for number in range(3):
        engine.add(f"{number}", list(range(100 * number, 100 * number + 20)), [7])
    engine.drain()
    assert [wait.num_passed for wait in engine.waits.values()] == [2, 0, 0]
    assert engine.waits["0"].got_blocks > engine.waits["2"].got_blocks


def test_figures_of_waits() -> None:
    """Seconds of two runs; one request has no answer."""
    waits = Waits.of([Wait(0, 1, 3, 4, 2), Wait(0, 1, 1, 2), Wait(5)])
    waits += Waits.of([Wait(10, 10, 10, 16, 1)])
    assert waits.figures() == {
        "requests": 3,
        "mean": 4.0,
        "p50": 4,
        "p99": 6,
        "worst": 6,
        "until_blocks": pytest.approx(2 / 3),
        "load": pytest.approx(2 / 3),
        "compute": pytest.approx(8 / 3),
        "least_mean": 3.0,
        "greatest_mean": 6.0,
        "least_worst": 4,
        "greatest_worst": 6,
        "passed_most": 2,
        "passed_sum": 3,
    }
    assert Waits.of([Wait(0)]).figures() == {}


@pytest.mark.parametrize("name", ["ours", "builtin", "none"])
@pytest.mark.parametrize("one_offs", [False, True])
def test_a_chat_counts_its_last_working_set(name: str, one_offs: bool) -> None:
    outcome = run_chat(CONTENDERS[name], TINY, 2.0, one_offs, seed=0)
    num_one_offs = TINY.users * TINY.turns // TINY.turns_per_one_off if one_offs else 0
    num_later = TINY.users * (TINY.turns - 1)
    assert len(outcome.later_turns.runs[0]) == num_later
    assert len(outcome.first_turns.runs[0]) == TINY.users + num_one_offs
    assert outcome.requests == num_later + TINY.users + num_one_offs
    assert (outcome.host > 0) == (name != "none")
    assert outcome.unstored > 0 or name != "none"
    assert outcome.later_turns.figures()["passed_sum"] == 0
    assert outcome.seconds > 0


def test_all_are_asked_the_same() -> None:
    """And the same as in the run before."""
    asked = [run_chat(CONTENDERS["none"], TINY, 2.0, True, seed=3) for _ in range(2)]
    assert replace(asked[0], hook_seconds=0.0) == replace(asked[1], hook_seconds=0.0)
    other = run_chat(CONTENDERS["builtin"], TINY, 2.0, True, seed=3)
    assert (other.prompt, other.requests) == (asked[0].prompt, asked[0].requests)


def test_a_run_reports_its_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contenders = [CONTENDERS[name] for name in ("ours", "builtin")]
    assert command.run(Plan(chat=TINY), contenders, {Part.CHAT}, tmp_path) == 0
    printed = capsys.readouterr().out
    assert "host 2 x device, one-offs" in printed
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    [plain, with_one_offs] = json.loads((tmp_path / "result.json").read_text())["chats"]
    assert (plain["name"], [*plain["contenders"]]) == ("host 2 x device", ["ours", "builtin"])
    ours = with_one_offs["contenders"]["ours"]
    assert ours["later_turns"]["requests"] == TINY.seeds * TINY.users * (TINY.turns - 1)
    assert ours["later_turns"]["least_mean"] <= ours["later_turns"]["mean"]


def test_the_table_of_waits() -> None:
    first, later = Waits.of([Wait(0, 0, 0, 2)]), Waits.of([Wait(0, 1, 2, 4, 5)])
    counts: dict[str, Any] = dict.fromkeys(Outcome.__dataclass_fields__, 0) | {"seconds": 9.0}
    outcome = Outcome(**counts | {"first_turns": first, "later_turns": later})
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(wait_table([Play("a chat", {"ours": outcome})]))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    ours = "1 {0} {0} - {0} {0} {0} {0} {0} - {0}"
    assert f"ours first {ours.format('2,000')} 0 0 2,000 0 0 9.0" in lines
    assert f"ours later {ours.format('4,000')} 1,000 1,000 2,000 5 5 9.0" in lines
