"""The simulation catches every bug made on purpose."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import pytest

from tests.conftest import daily
from tests.simulation.mutations import MUTATIONS
from tests.simulation.mutations.registry import Mutation
from tests.simulation.mutations.situations import SUB_BLOCKS, Situation
from tests.simulation.script import Play, Script

_MAX_SEEDS = 150
_LOADING_SEEDS = (6, 13)
"""Scripts whose requests load as they are drawn. Those before the first one load nothing."""

OF_ENGINES = [bug for bug in MUTATIONS.values() if bug.shown_by.otherwise is not None]
OF_SUB_BLOCKS = [bug for bug in MUTATIONS.values() if bug.shown_by is SUB_BLOCKS]


@pytest.mark.parametrize("name", daily(MUTATIONS, 10))
def test_planted_bug_is_caught(name: str) -> None:
    _assert_passes(MUTATIONS[name].shown_by, _first_caught(name))


@cache
def _assert_passes(shown_by: Situation, seed: int) -> None:
    """Without the bug the script passes. Many bugs show in the same one."""
    Play(shown_by.draw(seed)).run()


def _first_caught(name: str) -> int:
    bug = MUTATIONS[name]
    first = bug.shown_by.first_seed
    with bug.planted():
        for seed in range(first, first + _MAX_SEEDS):
            try:
                Play(bug.shown_by.draw(seed)).run()
            except (AttributeError, NameError, TypeError):
                raise  # the patch itself is wrong
            except Exception:  # noqa: BLE001 - a violation, or a refusal by vLLM's or our own code
                return seed
    pytest.fail(f"{name}: not caught in {_MAX_SEEDS} scripts")


def test_other_engines_do_not_show_it() -> None:
    """Bugs of an engine do not show without it: a script passes with all of its bugs."""
    by_script: dict[Script, list[Mutation]] = {}
    for bug in OF_ENGINES:
        script = bug.shown_by.without(Script.draw(_LOADING_SEEDS[0]).with_sub_blocks(1))
        by_script.setdefault(script, []).append(bug)
    for script, bugs in by_script.items():
        with _planted(bugs):
            assert Play(script).run().num_blocks_loaded


def test_small_host_blocks_do_not_show_it() -> None:
    """Bugs of sub-blocks do not show with host blocks of one device block, even all at once."""
    with _planted(OF_SUB_BLOCKS):
        plays = [Play(Script.draw(seed).with_sub_blocks(1)) for seed in _LOADING_SEEDS]
        assert all(play.run().num_blocks_loaded for play in plays)


@contextmanager
def _planted(bugs: Iterable[Mutation]) -> Iterator[None]:
    with ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(bug.planted())
        yield
