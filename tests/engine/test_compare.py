"""Differences that rounding may explain, and others."""

import math

import pytest

from tests.engine.compare import Rounding, compare
from tests.engine.spec import Answer

FINE = Rounding(0.05, lead=0.1)
COARSE = Rounding(0.5, lead=1.0, same_shape=0.05)

OURS = Answer([1, 2, 3], [-1.0, -1.0, -1.0], [1.0, 1.0, 1.0], 64)
TIED = OURS._replace(leads=[1.0, 0.09, 1.0])
OTHER_STEPS = 32
"""Cached tokens of an answer from steps of another shape."""
OTHER = OURS._replace(tokens=[1, 9, 8])


def off(logprob: float, num_cached_tokens: int = 64) -> Answer:
    """OURS with another logprob of the second token."""
    return Answer(OURS.tokens, [-1.0, logprob, -1.0], OURS.leads, num_cached_tokens)


@pytest.mark.parametrize(
    ("rounding", "exact", "ours", "theirs", "is_wrong"),
    [
        pytest.param(FINE, True, OURS, off(-1.04), False, id="close"),
        pytest.param(FINE, False, OURS, off(-1.06), True, id="distant"),
        pytest.param(FINE, False, OURS, off(math.nan), True, id="nan"),
        pytest.param(COARSE, True, OURS, off(-1.3), True, id="coarse"),
        pytest.param(COARSE, False, OURS, off(-1.3), False, id="coarse, not exact"),
        pytest.param(COARSE, True, OURS, off(-1.3, OTHER_STEPS), False, id="coarse, other steps"),
        pytest.param(FINE, False, OURS, OTHER, True, id="clear lead"),
        pytest.param(FINE, False, TIED, OTHER, False, id="tie"),
        pytest.param(FINE, True, TIED, OTHER, True, id="no ties"),
        pytest.param(
            FINE, True, TIED, OTHER._replace(num_cached_tokens=OTHER_STEPS), False, id="other steps"
        ),
        pytest.param(
            FINE, False, TIED, OTHER._replace(logprobs=[-2.0] * 3), True, id="wrong before a tie"
        ),
        pytest.param(FINE, False, OURS, OURS.beginning(2), True, id="too short"),
    ],
)
def test_which_differences_are_wrong(
    rounding: Rounding, exact: bool, ours: Answer, theirs: Answer, is_wrong: bool
) -> None:
    found = compare({"a": ours}, {"a": theirs}, rounding, exact=exact)
    assert len(found.wrong) == is_wrong
    assert found.whole == (ours.tokens == theirs.tokens)
    assert compare({"a": ours}, {}).wrong
