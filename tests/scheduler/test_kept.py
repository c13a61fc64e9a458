"""What must not leave the tier."""

from simple_offload.scheduler.kept import Kept
from tests.scheduler.driver import make_request, prompt
from tests.scheduler.tiers import BLOCK_SIZE, make_tier

GROUPS = make_tier(8, windows=(0, 0)).groups
REQUEST = make_request("r", prompt(4 * BLOCK_SIZE))
KEYS = [GROUPS.keys(REQUEST.block_hashes, group) for group in range(2)]


def kept_of(kept: Kept) -> list[list[int]]:
    return [[i for i, key in enumerate(keys) if key in kept.collect()] for keys in KEYS]


def test_the_first_blocks_of_each_group_and_some_more() -> None:
    kept = Kept(GROUPS, REQUEST.block_hashes)
    assert kept_of(kept) == [[], []]
    kept.keep_first(0, 2)
    kept.keep_first(1, 1)
    kept.keep((KEYS[1][3],))
    assert kept_of(kept) == [[0, 1], [0, 3]]
    kept.keep_first(0, 3)
    assert kept_of(kept) == [[0, 1, 2], [0, 3]]


def test_it_only_grows() -> None:
    kept = Kept(GROUPS, REQUEST.block_hashes)
    kept.keep_first(0, 2)
    kept.keep_first(0, 1)
    assert kept_of(kept) == [[0, 1], []]


def test_nothing_is_kept_at_first() -> None:
    assert Kept(GROUPS, REQUEST.block_hashes).collect() == set()
