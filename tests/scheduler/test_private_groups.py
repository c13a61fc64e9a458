"""A tier that ranks share, but not in all KV cache groups: blocks that stand for others."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, get_group_id

from simple_offload.scheduler.policy.protections import Protections
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import commit, get, key, make_tier
from tests.simulation.integrity import check_tier, pool_of

SHARED, PRIVATE = 0, 1
"""The tier's groups."""


def make_private_tier(num_blocks: int, num_places: int, num_sub_blocks: int = 1) -> CpuTier:
    """A tier of ``num_blocks`` blocks that ranks at ``num_places`` places share, but for the
    contents of group ``PRIVATE``."""
    tier = make_tier(0, (0, 0), num_sub_blocks)
    tier.share(frozenset({PRIVATE}), num_places)
    tier.grow(num_blocks + 1)  # vLLM's null block is one
    return tier


def ids_by_place(tier: CpuTier, blocks: Iterable[KVCacheBlock]) -> list[list[int]]:
    """By block, the id of the block that the rank at each place has for it."""
    by_place = tier.slots_by_place(np.array(tier.slots(blocks), np.int64))
    assert by_place is not None
    assert by_place.dtype == np.int64
    ids: list[list[int]] = by_place.T.tolist()
    return ids


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


# All of it in any order

_NAMES = ("a", "ab", "abc", "x", "xy")
_KEYS = {key(name, group): name for name in _NAMES for group in (SHARED, PRIVATE)}
_CALLS = ("store", "commit", "fail", "pin", "unpin", "drop", "reset", "grow")
_picks = st.lists(st.sampled_from([*_KEYS]), min_size=1, max_size=5, unique=True)


class _Run:
    """A tier, and what the test knows of it."""

    def __init__(self, num_blocks: int, num_places: int) -> None:
        self.num_places = num_places
        self.tier = make_private_tier(num_blocks, num_places)
        self.in_flight: list[tuple[list[KVCacheBlock], list[BlockHashWithGroupId]]] = []
        self.pinned: list[KVCacheBlock] = []
        self.places: dict[int, list[int]] = {}
        """By id of a block that has been allocated, the blocks of each place."""

    def width(self, stored: BlockHashWithGroupId) -> int:
        return self.num_places if get_group_id(stored) == PRIVATE else 1

    def store(self, keys: list[BlockHashWithGroupId]) -> None:
        kept = [each for each in keys[3:] if self.tier.has(each)]
        keep = set(self.tier.ids_of(kept))
        wanted = keys[:3]
        allocated = self.tier.allocate_for(wanted, keep)
        assert not self.tier.absent(kept)
        for each, ids, stored in zip(
            allocated, ids_by_place(self.tier, allocated), wanted, strict=False
        ):
            assert len(set(ids)) == self.width(stored)
            self.places[each.block_id] = ids
        if len(allocated) < len(wanted) and not keep:
            assert self.tier.num_free < self.width(wanted[len(allocated)])
        if allocated:
            self.in_flight.append((allocated, wanted[: len(allocated)]))

    def commit(self, _: Any) -> None:
        """Contents may have been stored twice meanwhile: then the second store is useless."""
        if self.in_flight:
            for filled, stored in zip(*self.in_flight.pop(0), strict=True):
                has_it = self.tier.has(stored)
                useless = commit(self.tier, [filled], [_KEYS[stored]], get_group_id(stored))
                assert useless == [0] * has_it

    def fail(self, _: Any) -> None:
        if self.in_flight:
            self.tier.unpin(self.in_flight.pop()[0])

    def pin(self, keys: list[BlockHashWithGroupId]) -> None:
        blocks = self._found(keys)
        self.tier.pin(blocks)
        self.pinned += blocks

    def unpin(self, _: Any) -> None:
        self.tier.unpin(self.pinned)
        self.pinned = []

    def drop(self, keys: list[BlockHashWithGroupId]) -> None:
        self.tier.drop(self._found(keys[:2]))

    def reset(self, _: Any) -> None:
        self.tier.reset()

    def grow(self, keys: list[BlockHashWithGroupId]) -> None:
        self.tier.grow(min(self.tier.num_blocks + len(keys), 30))

    def check(self) -> None:
        """No block serves two purposes, what is in use stays where it is, and nothing leaks."""
        check_tier(self.tier)
        pinned = [*self.pinned, *(each for blocks, _ in self.in_flight for each in blocks)]
        num_pinned = len({each.block_id for each in pinned})
        assert self.tier.num_free + num_pinned == self.tier.max_contents
        full = [each for each in pool_of(self.tier).blocks if each.block_hash is not None]
        in_use = list({each.block_id: each for each in (*pinned, *full)}.values())
        ids = ids_by_place(self.tier, in_use)
        assert ids == [self.places[each.block_id] for each in in_use]
        taken = [each for of_block in ids for each in set(of_block)]
        assert len(taken) == len(set(taken))
        assert 0 not in taken  # vLLM's null block

    def end(self) -> None:
        """All blocks can have shared contents again."""
        while self.in_flight:
            self.fail(None)
        self.unpin(None)
        num_blocks = self.tier.num_blocks - 1
        names = [str(number) for number in range(num_blocks + 1)]
        assert len(self.tier.allocate_for([key(name) for name in names], set())) == num_blocks
        assert self.tier.max_contents == num_blocks

    def _found(self, keys: Iterable[BlockHashWithGroupId]) -> list[KVCacheBlock]:
        return [found for each in keys if (found := get(self.tier, each)) is not None]


@given(
    num_blocks=st.integers(1, 12),
    num_places=st.sampled_from([2, 3, 4]),
    calls=st.lists(st.tuples(st.sampled_from(_CALLS), _picks), max_size=40),
)
def test_blocks_of_all_places_in_any_order_of_calls(
    num_blocks: int, num_places: int, calls: list[tuple[str, list[BlockHashWithGroupId]]]
) -> None:
    run = _Run(num_blocks, num_places)
    for name, keys in calls:
        getattr(run, name)(keys)
        run.check()
    run.end()


def test_replicas_are_no_room_for_protections() -> None:
    """A quarter of the contents may be protected, not of the blocks."""
    tier = make_private_tier(16, 4)  # room for four contents
    keys = [key(name, PRIVATE) for name in "abcd"]
    assert commit(tier, tier.allocate_for(keys, set()), "abcd", PRIVATE) == []
    Protections(tier).add(b"session", 60, keys)
    check_tier(tier)
    assert tier.num_reserved == 1
