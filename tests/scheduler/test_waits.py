"""Blocks wait for more of their request."""

from simple_offload.scheduler.policies.pacing import Waits
from tests.scheduler.tiers import BLOCK_SIZE, make_tier


def test_blocks_wait_unless_they_may_not() -> None:
    waits = Waits(make_tier(4).groups)
    assert waits.next_at([3]) == (3 + 8) * BLOCK_SIZE
    assert waits.next_at([3], may_wait=False) == (3 + 1) * BLOCK_SIZE


def test_what_leaves_a_window_does_not_wait() -> None:
    waits = Waits(make_tier(4, windows=(0, 8)).groups)
    assert waits.next_at([3, 5]) == (5 + 1) * BLOCK_SIZE
    assert waits.next_at([3, 12]) == (3 + 8) * BLOCK_SIZE


def test_what_a_prompt_still_has() -> None:
    waits = Waits(make_tier(4, windows=(0, 8)).groups)
    num_tokens = 5 * BLOCK_SIZE + 1
    assert waits.are_past(num_tokens, [5, 5])
    assert not waits.are_past(num_tokens, [5, 4])
    assert not waits.are_past(num_tokens, [4, 5])


def test_what_has_been_found_is_not_waited_for() -> None:
    waits = Waits(make_tier(4).groups)
    assert waits.first_at(3 * BLOCK_SIZE + 1) == (3 + 8) * BLOCK_SIZE
    assert waits.first_at(0) == 8 * BLOCK_SIZE
