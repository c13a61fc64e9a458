"""The simulation catches every bug that was made on purpose."""

from contextlib import ExitStack

import pytest

from tests.simulation.groups import PLAIN
from tests.simulation.mutations import (
    ENGINE_ONLY,
    INNER_HITS_ONLY,
    MIXED_PAGES_ONLY,
    MUTATIONS,
    PARTS_ONLY,
    STATES_ONLY,
    scripts_for,
)
from tests.simulation.script import Play, Script

_MAX_SEEDS = 150
_FEW_SEEDS = 8


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bug_is_caught(name: str) -> None:
    seed = _first_caught(name)
    Play(scripts_for(name, seed)).run()  # and nothing but the bug was wrong


def _first_caught(name: str) -> int:
    with MUTATIONS[name]():
        for seed in range(_MAX_SEEDS):
            try:
                Play(scripts_for(name, seed)).run()
            except (AttributeError, NameError, TypeError):
                raise  # the bug was planted wrongly
            except Exception:  # noqa: BLE001 - a violation, or a refusal by vLLM's or our own code
                return seed
    pytest.fail(f"{name}: nobody noticed in {_MAX_SEEDS} scripts")


@pytest.mark.parametrize("name", sorted(STATES_ONLY | MIXED_PAGES_ONLY | INNER_HITS_ONLY))
def test_other_models_do_not_show_it(name: str) -> None:
    """Those bugs are what the scripts with such models are there for."""
    with MUTATIONS[name]():
        for seed in range(_FEW_SEEDS):
            script = scripts_for(name, seed)
            plain = PLAIN | {"windows": (0, 8), "num_states": int(name in INNER_HITS_ONLY)}
            Play(script.with_model(**plain)).run()


@pytest.mark.parametrize("name", ENGINE_ONLY)
def test_ordinary_engines_do_not_show_it(name: str) -> None:
    """Those bugs are what the scripts with such engines are there for."""
    same = {key: value for key, value in ENGINE_ONLY[name].items() if key not in PLAIN}
    with MUTATIONS[name]():
        for seed in range(_FEW_SEEDS // 2):
            Play(scripts_for(name, seed).with_model(**PLAIN | same)).run()


def test_small_host_blocks_do_not_show_it() -> None:
    """What goes wrong with parts only does not with host blocks of one, not even all at once."""
    with ExitStack() as stack:
        for name in sorted(PARTS_ONLY):
            stack.enter_context(MUTATIONS[name]())
        for seed in range(_FEW_SEEDS):
            Play(Script.draw(seed).with_parts(1)).run()
