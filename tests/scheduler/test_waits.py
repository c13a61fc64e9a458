"""What is said waits for more of it, what was asked does not."""

import pytest
from vllm.v1.request import Request

from simple_offload.scheduler.waits import Waits
from tests.scheduler.driver import make_request, prompt
from tests.scheduler.tiers import BLOCK_SIZE, make_tier


@pytest.fixture
def said() -> Request:
    """A request whose prompt has three full blocks."""
    return make_request("a", prompt(3 * BLOCK_SIZE + 1))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_prompt_waits_for_nothing(said: Request, index: int) -> None:
    waits = Waits(make_tier(4).groups)
    assert waits.next_at(said, [index]) == (index + 1) * BLOCK_SIZE


def test_what_is_said_waits_unless_it_may_not(said: Request) -> None:
    waits = Waits(make_tier(4).groups)
    assert waits.next_at(said, [3]) == (3 + 8) * BLOCK_SIZE
    assert waits.next_at(said, [3], may_wait=False) == (3 + 1) * BLOCK_SIZE


def test_what_leaves_a_window_does_not_wait(said: Request) -> None:
    waits = Waits(make_tier(4, windows=(0, 8)).groups)
    assert waits.next_at(said, [3, 5]) == (5 + 1) * BLOCK_SIZE
    assert waits.next_at(said, [3, 12]) == (3 + 8) * BLOCK_SIZE
