"""The load run: its comparisons, and a short run."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.faults.load_book import Answer, LoadBook, Script
from tests.faults.load_memory import MIB, MemoryWatch
from tests.faults.load_run import MAX_PROMPT_TOKENS, Plan, load_run

PROMPT = (5, 6, 7)
FIRST = Answer([10, 11, 12], [-1.0, -1.1, -1.2], [0.5, 1e-6, 0.5])


@pytest.fixture
def book() -> LoadBook:
    book = LoadBook()
    book.check(PROMPT, FIRST, keep=True)
    return book


@pytest.mark.parametrize(
    ("answer", "ok"),
    [
        (Answer([10, 11], [-1.0, -1.1], [0.5, 1e-6]), True),
        (Answer([10, 11, 12, 13], [-1.0, -1.1, -1.2, -1.3], [0.5, 1e-6, 0.5, 0.5]), True),
        (Answer([], [], []), True),
        (Answer([20, 11], [-1.0, -1.1], [0.5, 1e-6]), False),
        (Answer([10, 11, 22], [-1.0, -1.1, -1.2], [0.5, 1e-6, 0.5]), False),
        (Answer([10, 11], [-1.0, -1.2], [0.5, 1e-6]), False),
    ],
    ids=["shorter", "longer", "nothing", "first token", "last token", "logprob"],
)
def test_answers_are_compared_with_the_first(book: LoadBook, answer: Answer, ok: bool) -> None:
    assert book.check(PROMPT, answer, keep=True) is ok
    assert len(book.violations) == (0 if ok else 1)


def test_a_tie_that_rounding_decides_is_no_violation(book: LoadBook) -> None:
    assert book.check(PROMPT, Answer([10, 99, 98], [-1.0, -1.1, -9.0], [0.5] * 3), keep=True)
    assert not book.violations
    assert book.counts["ties"] == 1


def test_the_longest_right_answer_is_remembered(book: LoadBook) -> None:
    longer = Answer([10, 11, 12, 13], [-1.0, -1.1, -1.2, -1.3], [0.5, 1e-6, 0.5, 0.5])
    book.check(PROMPT, longer, keep=False)
    assert book.known(PROMPT) == FIRST
    book.check(PROMPT, longer, keep=True)
    assert book.known(PROMPT) == longer


def test_conversations_go_on_and_are_replaced() -> None:
    script = Script(0, MAX_PROMPT_TOKENS)
    asked = set()
    for _ in range(400):
        turn = script.pick()
        assert len(turn.prompt) <= MAX_PROMPT_TOKENS
        asked.add(turn.prompt)
        script.go_on(turn, Answer([7, 8, 9], [], []))
    assert 150 < len(asked) < 300, "neither all new nor all the same"
    assert any(longer[: len(prompt)] == prompt for prompt in asked for longer in asked - {prompt})


def test_growth_of_memory() -> None:
    flat_after_warm_up = [(float(at), (100 if at < 15 else 200) * MIB) for at in range(101)]
    watch = MemoryWatch(flat_after_warm_up)
    assert watch.at(0.2) == watch.at(1.0) == 200
    assert watch.growth(0.2) == 0
    growing = MemoryWatch([(float(at), (100 + at) * MIB) for at in range(101)])
    assert growing.growth(0.2) == pytest.approx(197.5 / 120 - 1)
    sparse = MemoryWatch([(0.0, 100 * MIB), (100.0, 200 * MIB)])
    assert (sparse.at(0.2), sparse.at(0.6)) == (100, 200)


@pytest.mark.slow
def test_twenty_seconds_of_load(tmp_path: Path) -> None:
    """Too short for a limit on memory: vLLM's own grows by a tenth while shapes are new."""
    plan = Plan(20.0, seed=1, max_growth=1.0, reset_seconds=(1.0, 4.0), num_compared=40)
    outcome = load_run(plan, tmp_path, Console(file=StringIO()))
    assert outcome.book.violations == []
    counts = outcome.book.counts
    assert counts["completed"] > 20
    assert counts["compared"] > 20
    assert counts["hung up"] > 0
    assert counts["cancelled"] > 0
    assert counts["resets"] + counts["pauses"] > 2
    assert outcome.compared_with_plain == 40
    assert outcome.hit_tokens > 0
    assert outcome.summary.endswith("0 violations")
