"""The load run: its comparisons, and a short run."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.engine.spec import Answer
from tests.faults.load_book import LoadBook
from tests.faults.load_run import LoadRun, MemoryWatch

PROMPT = (5, 6, 7)
FIRST = Answer([10, 11, 12], [-1.0, -1.1, -1.2], [0.5, 1e-6, 0.5])
LONGER = Answer([10, 11, 12, 13], [-1.0, -1.1, -1.2, -1.3], [0.5, 1e-6, 0.5, 0.5])


@pytest.mark.parametrize(
    ("answer", "is_right", "num_ties"),
    [
        pytest.param(FIRST.beginning(2), True, 0, id="shorter"),
        pytest.param(LONGER, True, 0, id="longer"),
        pytest.param(FIRST._replace(tokens=[10, 11, 22]), False, 0, id="last token"),
        pytest.param(FIRST._replace(logprobs=[-1.0, -1.2, -1.2]), False, 0, id="logprob"),
        pytest.param(FIRST._replace(tokens=[10, 99, 98]), True, 1, id="tie"),
    ],
)
def test_answers_are_compared_with_the_first(answer: Answer, is_right: bool, num_ties: int) -> None:
    book = LoadBook()
    book.check(PROMPT, FIRST, keep=True)
    assert book.check(PROMPT, answer, keep=False) is is_right
    assert len(book.violations) == (not is_right)
    assert book.counts["ties"] == num_ties
    assert book.answers[PROMPT] == FIRST
    book.check(PROMPT, answer, keep=True)
    assert book.answers[PROMPT] == (LONGER if answer == LONGER else FIRST)


def test_growth_of_memory() -> None:
    memory = MemoryWatch()
    memory.samples = [100] * 15 + [200] * 86
    assert memory.growth == 0
    memory.samples = [100 + at for at in range(101)]
    assert memory.growth == pytest.approx(197.5 / 120 - 1)


@pytest.mark.slow
def test_twenty_seconds_of_load(tmp_path: Path) -> None:
    run = LoadRun(20.0, 1, Console(file=StringIO()))
    run.play(tmp_path)
    assert run.book.violations == []
    counts = run.book.counts
    assert counts["completed"] > 20
    assert counts["compared"] > 20
    assert counts["hung up"] > 0
    assert counts["cancelled"] > 0
    assert counts["resets"] + counts["pauses"] > 2
    assert run.num_compared >= 40
    assert run.hit_tokens > 0
    assert run.summary.endswith("0 violations")
