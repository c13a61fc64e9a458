"""The simulation catches every bug that was made on purpose."""

import pytest

from tests.simulation.mutations import MUTATIONS, scripts_for
from tests.simulation.script import Play

_MAX_SEEDS = 150


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
