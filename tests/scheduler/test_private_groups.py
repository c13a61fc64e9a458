"""A tier that ranks share, but not in all KV cache groups: blocks that stand for others."""

from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, get_group_id

from simple_offload.scheduler.policy.protections import Protections
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from tests.scheduler.tiers import block, commit, contents, get, key, make_tier
from tests.simulation.integrity import check_tier, pool_of

SHARED, PRIVATE = 0, 1
"""The tier's groups."""
both_numbers_of_places = pytest.mark.parametrize("num_places", [2, 4])


def make_private_tier(num_blocks: int, num_places: int, num_sub_blocks: int = 1) -> CpuTier:
    """A tier of ``num_blocks`` blocks that ranks at ``num_places`` places share, but for the
    contents of group ``PRIVATE``."""
    tier = make_tier(0, (0, 0), num_sub_blocks)
    tier.share(frozenset({PRIVATE}), num_places)
    tier.grow(num_blocks + 1)  # vLLM's null block is one
    return tier


def allocate(
    tier: CpuTier, *names: str, group: int, keep: Set[int] = frozenset()
) -> list[KVCacheBlock]:
    """Allocate a block for each name."""
    allocated = tier.allocate_for([key(name, group) for name in names], keep)
    check_tier(tier)
    return allocated


def store(tier: CpuTier, *names: str, group: int) -> list[KVCacheBlock]:
    """Store contents with these names, and return their blocks, which are free."""
    filled = allocate(tier, *names, group=group)
    assert len(filled) == len(names)
    assert commit(tier, filled, names, group) == []
    check_tier(tier)
    return filled


def ids_by_place(tier: CpuTier, blocks: Iterable[KVCacheBlock]) -> list[list[int]]:
    """By block, the id of the block that the rank at each place has for it."""
    by_place = tier.slots_by_place(np.array(tier.slots(blocks), np.int64))
    assert by_place is not None
    assert by_place.dtype == np.int64
    ids: list[list[int]] = by_place.T.tolist()
    return ids


def check_sum(tier: CpuTier, num_pinned: int) -> None:
    """Every block is free, pinned, or one that another stands for."""
    check_tier(tier)
    assert tier.num_free + tier.num_replicas + num_pinned == tier.num_blocks - 1


# Blocks by place


@both_numbers_of_places
def test_private_contents_take_a_block_for_each_place(num_places: int) -> None:
    tier = make_private_tier(20, num_places)
    keys = [key("a", SHARED), key("a", PRIVATE), key("ab", PRIVATE), key("ab", SHARED)]
    allocated = tier.allocate_for(keys, set())
    ids = ids_by_place(tier, allocated)
    assert [of_block[0] for of_block in ids] == [each.block_id for each in allocated]
    assert [len(set(of_block)) for of_block in ids] == [1, num_places, num_places, 1]
    num_taken = 2 + 2 * num_places
    assert len({each for of_block in ids for each in of_block}) == num_taken
    assert (tier.num_free, tier.num_replicas) == (20 - num_taken, 2 * (num_places - 1))
    check_sum(tier, num_pinned=4)
    for each, stored in zip(allocated, keys, strict=True):
        commit(tier, [each], ["a" if stored in keys[:2] else "ab"], get_group_id(stored))
    assert contents(tier, SHARED) == contents(tier, PRIVATE) == {"a", "ab"}
    assert (tier.num_free, tier.num_used) == (20 - 2 * (num_places - 1), 4)
    check_sum(tier, num_pinned=0)
    assert ids_by_place(tier, allocated) == ids


def test_a_tier_without_private_groups() -> None:
    """All ranks have contents at one place, however many share the tier."""
    tier = make_tier(0, (0, 0))
    tier.share(frozenset(), 4)
    tier.grow(9)
    allocated = tier.allocate_for([key(name, PRIVATE) for name in ("a", "ab", "abc")], set())
    assert len(allocated) == 3
    assert tier.slots_by_place(np.array(tier.slots(allocated), np.int64)) is None
    assert (tier.num_free, tier.num_replicas) == (5, 0)


@both_numbers_of_places
def test_places_of_blocks_that_come_later(num_places: int) -> None:
    """Ranks open host memory chunk by chunk."""
    tier = make_private_tier(num_places + 1, num_places)
    early = [*store(tier, "a", group=PRIVATE), *store(tier, "a", group=SHARED)]
    before = ids_by_place(tier, early)
    tier.grow(4 * num_places + 2)
    check_sum(tier, num_pinned=0)
    late = [*store(tier, "ab", group=PRIVATE), *store(tier, "ab", group=SHARED)]
    ids = ids_by_place(tier, [*early, *late])
    assert ids[:2] == before
    assert [len(set(of_block)) for of_block in ids] == [num_places, 1, num_places, 1]
    assert len({each for of_block in ids for each in of_block}) == 2 * num_places + 2


@pytest.mark.parametrize("num_sub_blocks", [2, 4])
@both_numbers_of_places
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
    assert [len(set(of_block)) for of_block in ids[:, :, 0].T.tolist()] == [
        num_places,
        1,
        num_places,
    ]
    assert len(np.unique(by_place)) == (2 * num_places + 1) * num_sub_blocks
    chosen = [num_sub_blocks - 1, num_sub_blocks, 2 * num_sub_blocks + 1]
    some = tier.slots_by_place(slots[chosen])
    assert some is not None
    assert some.tolist() == by_place[:, chosen].tolist()


# Eviction


@both_numbers_of_places
def test_an_evicted_block_brings_those_that_it_stands_for(num_places: int) -> None:
    tier = make_private_tier(2 * num_places, num_places)
    store(tier, "a", "x", group=PRIVATE)
    assert (tier.num_free, tier.num_empty) == (2, 0)
    names = [f"s{number}" for number in range(num_places)]
    store(tier, *names, group=SHARED)
    assert contents(tier, SHARED) == {*names}
    assert len(contents(tier, PRIVATE)) == 1  # one was enough
    check_sum(tier, num_pinned=0)
    store(tier, *names[:1], group=PRIVATE)
    assert contents(tier, PRIVATE) == {names[0]}
    assert len(contents(tier, SHARED)) == num_places
    check_sum(tier, num_pinned=0)


@both_numbers_of_places
def test_private_contents_evict_as_many_shared_ones_as_they_have_places(num_places: int) -> None:
    tier = make_private_tier(6, num_places)
    store(tier, *"abcdef", group=SHARED)
    store(tier, "a", group=PRIVATE)
    assert len(contents(tier, SHARED)) == 6 - num_places
    check_sum(tier, num_pinned=0)


@both_numbers_of_places
def test_what_must_stay_keeps_all_of_its_blocks(num_places: int) -> None:
    tier = make_private_tier(2 * num_places, num_places)
    blocks = store(tier, "a", "x", group=PRIVATE)
    before = ids_by_place(tier, blocks[:1])
    keep = {blocks[0].block_id}
    names = [f"s{number}" for number in range(num_places + 1)]
    assert len(allocate(tier, *names, group=SHARED, keep=keep)) == num_places
    assert allocate(tier, "y", group=PRIVATE, keep=keep) == []
    assert contents(tier, PRIVATE) == {"a"}
    assert ids_by_place(tier, blocks[:1]) == before
    check_sum(tier, num_pinned=num_places)


# Room that ends


@both_numbers_of_places
def test_where_the_room_ends_nothing_leaks(num_places: int) -> None:
    """The contents that there is room for are the first ones."""
    for room in range(3 * num_places + 2):
        tier = make_private_tier(room, num_places)
        groups = [SHARED, PRIVATE, PRIVATE, SHARED, PRIVATE]
        keys = [key(name, group) for name, group in zip("abcde", groups, strict=True)]
        ends = np.cumsum([num_places if group == PRIVATE else 1 for group in groups])
        allocated = tier.allocate_for(keys, set())
        assert len(allocated) == np.searchsorted(ends, room, side="right")
        taken = {each for of_block in ids_by_place(tier, allocated) for each in of_block}
        assert tier.num_free == room - len(taken)
        check_sum(tier, num_pinned=len(allocated))
        tier.unpin(allocated)
        assert len(tier.allocate_for([key(str(n), SHARED) for n in range(room + 1)], set())) == room
        check_sum(tier, num_pinned=room)


@both_numbers_of_places
def test_where_the_room_ends_before_pinned_blocks(num_places: int) -> None:
    tier = make_private_tier(2 * num_places + 1, num_places)
    held = store(tier, "a", group=PRIVATE)
    tier.pin(held)
    before = ids_by_place(tier, held)
    allocated = allocate(tier, "x", "y", group=PRIVATE)
    assert len(allocated) == 1
    assert ids_by_place(tier, held) == before
    assert (tier.num_free, tier.num_empty) == (1, 0 if tier.num_used else 1)
    check_sum(tier, num_pinned=2)


# Contents that are lost


@both_numbers_of_places
@pytest.mark.parametrize("how", ["reset", "drop"])
def test_blocks_come_back_when_contents_are_lost(num_places: int, how: str) -> None:
    tier = make_private_tier(3 * num_places, num_places)
    stored = store(tier, "a", "ab", "abc", group=PRIVATE)
    tier.reset() if how == "reset" else tier.drop(stored)
    check_sum(tier, num_pinned=0)
    assert tier.num_used == 0
    assert len(tier.allocate_for([key(str(n), SHARED) for n in range(99)], set())) == 3 * num_places
    assert tier.num_replicas == 0
    check_sum(tier, num_pinned=3 * num_places)


@both_numbers_of_places
def test_a_load_of_lost_contents_keeps_all_of_its_blocks(num_places: int) -> None:
    """They are given to others after it only."""
    tier = make_private_tier(3 * num_places, num_places)
    stored = store(tier, "a", "x", group=PRIVATE)
    tier.pin(stored[:1])
    before = ids_by_place(tier, stored[:1])
    tier.reset()
    others = tier.allocate_for([key(str(n), SHARED) for n in range(99)], set())
    assert len(others) == 2 * num_places
    assert not {each.block_id for each in others}.intersection(*before)
    assert ids_by_place(tier, stored[:1]) == before
    check_sum(tier, num_pinned=2 * num_places + 1)
    tier.unpin(stored[:1])
    assert len(allocate(tier, "a", group=PRIVATE)) == 1


@both_numbers_of_places
def test_a_failed_store_gives_all_blocks_back(num_places: int) -> None:
    tier = make_private_tier(2 * num_places, num_places)
    for name in "abc":
        filled = allocate(tier, name, group=PRIVATE)
        tier.unpin(filled)
        check_sum(tier, num_pinned=0)
        assert tier.num_used == 0
    filled = allocate(tier, *"xyz", group=PRIVATE)
    assert (
        len({each for of_block in ids_by_place(tier, filled) for each in of_block})
        == 2 * num_places
    )


@both_numbers_of_places
def test_a_useless_store_gives_all_blocks_back(num_places: int) -> None:
    """Two requests have stored the same contents."""
    tier = make_private_tier(2 * num_places, num_places)
    one, other = (allocate(tier, "a", group=PRIVATE) for _ in range(2))
    assert commit(tier, one, ["a"], PRIVATE) == []
    before = ids_by_place(tier, one)
    assert commit(tier, other, ["a"], PRIVATE) == [0]
    check_sum(tier, num_pinned=0)
    assert (
        len(tier.allocate_for([key(str(n), SHARED) for n in range(num_places)], set()))
        == num_places
    )
    assert block(tier, "a", PRIVATE) is one[0]
    assert ids_by_place(tier, one) == before
    check_sum(tier, num_pinned=num_places)


# All of it in any order

_KEYS = [key(name, group) for name in ("a", "ab", "abc", "x", "xy") for group in (SHARED, PRIVATE)]
_CALLS = ("store", "commit", "fail", "pin", "unpin", "drop", "reset", "grow")
_picks = st.lists(st.integers(0, len(_KEYS) - 1), min_size=1, max_size=5, unique=True)


class _Run:
    """A tier, and what the test knows of it."""

    def __init__(self, num_blocks: int, num_places: int) -> None:
        self.num_places = num_places
        self.tier = make_private_tier(num_blocks, num_places)
        self.in_flight: list[tuple[list[KVCacheBlock], list[BlockHashWithGroupId]]] = []
        self.pinned: list[KVCacheBlock] = []
        self.places: dict[int, list[int]] = {}
        """By id of a block that has been allocated, the blocks of each place."""

    def call(self, name: str, picks: Sequence[int]) -> None:
        getattr(self, name)([_KEYS[pick] for pick in picks])
        self.check()

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
        if self.in_flight:
            blocks, keys = self.in_flight.pop(0)
            for each, stored in zip(blocks, keys, strict=True):
                commit_key(self.tier, each, stored)

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
        """No block serves two purposes, and what is in use stays where it is."""
        pinned = [*self.pinned, *(each for blocks, _ in self.in_flight for each in blocks)]
        check_sum(self.tier, num_pinned=len({each.block_id for each in pinned}))
        full = [each for each in pool_of(self.tier).blocks if each.block_hash is not None]
        in_use = list({each.block_id: each for each in (*pinned, *full)}.values())
        ids = ids_by_place(self.tier, in_use)
        assert ids == [self.places[each.block_id] for each in in_use]
        taken = [each for of_block in ids for each in set(of_block)]
        assert len(taken) == len(set(taken))
        assert 0 not in taken  # vLLM's null block

    def _found(self, keys: Iterable[BlockHashWithGroupId]) -> list[KVCacheBlock]:
        return [found for each in keys if (found := get(self.tier, each)) is not None]


def commit_key(tier: CpuTier, filled: KVCacheBlock, stored: BlockHashWithGroupId) -> None:
    name = next(
        each for each in ("a", "ab", "abc", "x", "xy") if stored in (key(each, 0), key(each, 1))
    )
    commit(tier, [filled], [name], get_group_id(stored))


@given(
    num_blocks=st.integers(1, 12),
    num_places=st.sampled_from([2, 3, 4]),
    calls=st.lists(st.tuples(st.sampled_from(_CALLS), _picks), max_size=40),
)
def test_blocks_of_all_places_in_any_order_of_calls(
    num_blocks: int, num_places: int, calls: list[tuple[str, list[int]]]
) -> None:
    run = _Run(num_blocks, num_places)
    for name, picks in calls:
        run.call(name, picks)


def test_replicas_are_no_room_for_protections() -> None:
    """A quarter of the contents may be protected, not of the blocks."""
    tier = make_private_tier(16, 4)  # room for four contents
    store(tier, "a", "b", "c", "d", group=PRIVATE)
    Protections(tier).add(b"session", 60, [key(name, PRIVATE) for name in "abcd"])
    check_tier(tier)
    assert tier.num_reserved == 1
