"""CpuTier compared with a model that has chains, pins and times, but no queues."""

from collections import Counter, deque
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from tests.scheduler.tiers import (
    allocate,
    begin,
    block,
    commit,
    contents,
    hashes,
    hold,
    key,
    make_tier,
    prefixes,
    refresh,
)
from tests.simulation.integrity import check_tier, groups_of, pool_of

_NUM_BLOCKS = 3
_MOST_BLOCKS = 8
chains = st.text("ab", min_size=1, max_size=5)


@dataclass(eq=False)
class _Filling:
    block: KVCacheBlock
    name: str
    abandoned: bool = False


@dataclass(eq=False)
class _Hold:
    blocks: list[KVCacheBlock]
    names: list[str]


class Tier(RuleBasedStateMachine):
    """A tier as the scheduler side uses it. Pins go from a chain's head on. Stores end in the order
    of their begin. No key is in two stores at once."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = make_tier(_NUM_BLOCKS)
        self.num_blocks = _NUM_BLOCKS
        self.kept: dict[str, int] = {}
        """By name of each block that can be found, its id."""
        self.ages: dict[str, int] = {}
        """The time when each block without references was freed. A block has its parent's time if
        that was free already."""
        self.demoted: set[str] = set()
        self.clock = 0
        self.filling: deque[_Filling] = deque()
        self.holds: list[_Hold] = []

    # Calls of a tier

    @rule(chain=chains)
    def begin_store(self, chain: str) -> None:
        """Begin to store the first block of a chain that is neither in the tier nor in a store."""
        under_way = {filling.name for filling in self.filling if not filling.abandoned}
        lacking = [name for name in prefixes(chain) if name not in {*self.kept, *under_way}]
        if not lacking:
            return
        name, victims = lacking[0], set()
        if self.num_empty() == 0:
            victims = self.next_to_leave()
        if name[:-1] in victims or not self.num_empty() | len(victims):
            assert allocate(self.tier, name[:-1]) is None
            return
        self.filling.append(_Filling(begin(self.tier, name), name))
        left = set(self.kept) - contents(self.tier)
        assert left <= victims
        assert len(left) == bool(victims)
        self.remove(*left)

    @precondition(lambda self: self.filling)
    @rule(ok=st.sampled_from([True, True, True, False]))
    def end_store(self, ok: bool) -> None:
        filling = self.filling.popleft()
        name = filling.name
        if not ok or filling.abandoned:
            self.tier.unpin([filling.block])
            return
        kept = commit(self.tier, filling.block, name)
        assert kept == (len(name) == 1 or name[:-1] in self.kept)
        if kept:
            self.kept[name] = filling.block.block_id
            self.free(name)

    @rule(chain=chains)
    def pin(self, chain: str) -> None:
        """Look a chain up, and pin the hit."""
        found = [name for name in prefixes(chain) if name in self.kept]
        hit = self.tier.lookup(hashes(chain), 0, 100)
        assert hit.num_tokens == len(found) * groups_of(self.tier).hash_block_size
        if found:
            (held,) = hit.blocks
            hold(self.tier, held)
            self.holds.append(_Hold(held, found))
            for name in found:
                self.ages.pop(name, None)
                self.demoted.discard(name)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        pinned = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.tier.unpin(pinned.blocks)
        for held, name in zip(pinned.blocks, pinned.names, strict=True):
            if self.kept.get(name) == held.block_id:
                self.free(name)

    @rule(chain=chains)
    def refresh(self, chain: str) -> None:
        refresh(self.tier, hashes(chain), 0, len(chain))
        found = [name for name in prefixes(chain) if name in self.kept]
        found = list(takewhile(lambda name: name not in self.demoted, found))
        for name in found:
            self.ages.pop(name, None)
        self.free(*found)

    @rule(chain=chains)
    def demote(self, chain: str) -> None:
        """As when the device has loaded the chain's blocks."""
        found = [name for name in prefixes(chain) if name in self.kept]
        self.tier.demote([block(self.tier, name) for name in found])
        if self.num_empty():
            return
        going: set[str] = set()
        references = self.num_references()
        for name in reversed(found):
            children = {other for other in self.kept if other[:-1] == name}
            if not references[self.kept[name]] and children <= going:
                going.add(name)
        self.clock += 1
        self.ages.update(dict.fromkeys(going, -self.clock))
        self.demoted |= going

    @rule(name=chains)
    def promote(self, name: str) -> None:
        self.tier.promote([key(name)])
        self.renew(name)

    @rule(name=chains)
    def drop(self, name: str) -> None:
        if name in self.kept:
            self.tier.drop([block(self.tier, name)])
            self.remove(*(kept for kept in self.kept if kept.startswith(name)))

    @precondition(lambda self: self.num_blocks < _MOST_BLOCKS)
    @rule(more=st.integers(0, 2))
    def grow(self, more: int) -> None:
        self.num_blocks += more
        self.tier.grow(self.num_blocks + 1)  # with the null block

    @rule()
    def reset(self) -> None:
        self.tier.reset()
        self.remove(*self.kept)
        for filling in self.filling:
            filling.abandoned = True

    # The model

    def num_references(self) -> Counter[int]:
        """The number of references by block."""
        held = Counter(filling.block.block_id for filling in self.filling)
        held.update(block.block_id for each in self.holds for block in each.blocks)
        return held

    def num_empty(self) -> int:
        """Number of blocks without references and contents."""
        return self.num_blocks - len({*self.num_references(), *self.kept.values()})

    def next_to_leave(self) -> set[str]:
        """The tails among the blocks with the earliest time."""
        oldest = {name for name, age in self.ages.items() if age == min(self.ages.values())}
        return {name for name in oldest if not any(other[:-1] == name for other in self.kept)}

    def free(self, *names: str) -> None:
        references = self.num_references()
        for name in names:
            if not references[self.kept[name]]:
                self.renew(name[:-1])
                self.clock += 1
                self.ages[name] = self.ages.get(name[:-1], self.clock)

    def renew(self, name: str) -> None:
        """A demoted block and its ancestors become the most recently used."""
        if name in self.demoted:
            self.clock += 1
            self.demoted -= set(prefixes(name))
            self.ages.update(dict.fromkeys(self.ages.keys() & prefixes(name), self.clock))

    def remove(self, *names: str) -> None:
        for name in names:
            del self.kept[name]
            self.demoted.discard(name)
            self.ages.pop(name, None)

    # Invariants

    @invariant()
    def check_consistency(self) -> None:
        check_tier(self.tier)

    @invariant()
    def check_findable_blocks(self) -> None:
        assert contents(self.tier) == set(self.kept)
        assert all(block(self.tier, name).block_id == kept for name, kept in self.kept.items())

    @invariant()
    def check_heads(self) -> None:
        assert all(len(name) == 1 or name[:-1] in self.kept for name in self.kept)

    @invariant()
    def check_references(self) -> None:
        references = self.num_references()
        assert pool_of(self.tier).get_num_free_blocks() == self.num_blocks - len(references)
        for held in pool_of(self.tier).blocks[1:]:
            assert held.ref_cnt == references[held.block_id]

    def teardown(self) -> None:
        """Without references, all blocks are free and no bookkeeping is left."""
        for filling in self.filling:
            self.tier.unpin([filling.block])
        for pinned in self.holds:
            self.tier.unpin(pinned.blocks)
        check_tier(self.tier)
        assert pool_of(self.tier).get_num_free_blocks() == self.num_blocks
        self.tier.reset()
        assert contents(self.tier) == set()
        assert not any(self.tier._order.parents)
        assert self.tier._order.num_children == {}


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=60, stateful_step_count=40)
