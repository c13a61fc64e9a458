"""A tier that ranks share, but not in all KV cache groups: blocks that stand for others."""

import numpy as np
import pytest

from simple_offload.scheduler.policy.protections import Protections
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import commit, key, make_tier
from tests.simulation.integrity import check_tier

SHARED, PRIVATE = 0, 1
"""The tier's groups."""


def make_private_tier(num_blocks: int, num_places: int, num_sub_blocks: int = 1) -> CpuTier:
    """A tier of ``num_blocks`` blocks that ranks at ``num_places`` places share, but for the
    contents of group ``PRIVATE``."""
    tier = make_tier(0, (0, 0), num_sub_blocks)
    tier.share(frozenset({PRIVATE}), num_places)
    tier.grow(num_blocks + 1)  # vLLM's null block is one
    return tier


def test_a_tier_without_private_groups() -> None:
    """All ranks have contents at one place, however many share the tier."""
    tier = make_tier(0, (0, 0))
    tier.share(frozenset(), 4)
    tier.grow(9)
    allocated = tier.allocate_for([key(name, PRIVATE) for name in ("a", "ab", "abc")], set())
    assert len(allocated) == 3
    assert tier.slots_by_place(np.array(tier.slots(allocated), np.int64)) is None
    assert (tier.num_free, tier.max_contents) == (5, 8)


@pytest.mark.parametrize("num_sub_blocks", [2, 4])
@pytest.mark.parametrize("num_places", [2, 4])
def test_slots_of_sub_blocks(num_places: int, num_sub_blocks: int) -> None:
    """A rank's slots are those of its own block, in the same order. A load may need some only."""
    tier = make_private_tier(20, num_places, num_sub_blocks)
    blocks = tier.allocate_for([key("a", PRIVATE), key("a", SHARED), key("ab", PRIVATE)], set())
    slots = np.array(tier.slots(blocks), np.int64)
    by_place = tier.slots_by_place(slots)
    assert by_place is not None
    assert by_place[0].tolist() == slots.tolist()
    whole = by_place.reshape(num_places, 3, num_sub_blocks)
    assert (whole % num_sub_blocks == np.arange(num_sub_blocks)).all()
    ids = whole // num_sub_blocks
    assert (ids == ids[:, :, :1]).all()  # neighbours, as the slots of every block
    widths = [len(set(of_block)) for of_block in ids[:, :, 0].T.tolist()]
    assert widths == [num_places, 1, num_places]
    chosen = [num_sub_blocks - 1, num_sub_blocks, 2 * num_sub_blocks + 1]
    some = tier.slots_by_place(slots[chosen])
    assert some is not None
    assert some.tolist() == by_place[:, chosen].tolist()


def test_replicas_are_no_room_for_protections() -> None:
    """A quarter of the contents may be protected, not of the blocks."""
    tier = make_private_tier(16, 4)  # room for four contents
    keys = [key(name, PRIVATE) for name in "abcd"]
    assert commit(tier, tier.allocate_for(keys, set()), "abcd", PRIVATE) == []
    Protections(tier).add(b"session", 60, keys)
    check_tier(tier)
    assert tier.num_reserved == 1
