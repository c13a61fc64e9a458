"""CpuTier against a model that knows chains, pins and times, and nothing of queues."""

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
    key,
    make_tier,
    prefixes,
)

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
    """As the scheduler side uses it: pins go from a chain's head on, stores end in the order in
    which they began, and no key is on its way twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = make_tier(_NUM_BLOCKS)
        self.num_blocks = _NUM_BLOCKS
        self.kept: dict[str, int] = {}
        """What can be found, and the block that holds it."""
        self.ages: dict[str, int] = {}
        """When each of them that nobody holds was let go of: with its parent, if that was free
        by then."""
        self.demoted: set[str] = set()
        self.clock = 0
        self.filling: deque[_Filling] = deque()
        self.holds: list[_Hold] = []

    # What happens to a tier

    @rule(chain=chains)
    def begin_store(self, chain: str) -> None:
        """Start to fill the first block of a chain that is neither there nor on its way."""
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
        self.forget(*left)

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
            self.let_go(name)

    @rule(chain=chains)
    def pin(self, chain: str) -> None:
        """Look a chain up, and hold what there is of it."""
        found = [name for name in prefixes(chain) if name in self.kept]
        hit = self.tier.lookup.hit(hashes(chain), 0, 100)
        assert hit.num_tokens == len(found) * self.tier.groups.hash_block_size
        if found:
            (held,) = hit.blocks
            self.tier.pin(held)
            self.holds.append(_Hold(held, found))
            for name in found:
                self.ages.pop(name, None)
                self.demoted.discard(name)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.tier.unpin(hold.blocks)
        for held, name in zip(hold.blocks, hold.names, strict=True):
            if self.kept.get(name) == held.block_id:
                self.let_go(name)

    @rule(chain=chains)
    def refresh(self, chain: str) -> None:
        self.tier.refresh(hashes(chain), 0, len(chain))
        found = [name for name in prefixes(chain) if name in self.kept]
        found = list(takewhile(lambda name: name not in self.demoted, found))
        for name in found:
            self.ages.pop(name, None)
        self.let_go(*found)

    @rule(chain=chains)
    def demote(self, chain: str) -> None:
        """As when the device has got what there is of a chain."""
        found = [name for name in prefixes(chain) if name in self.kept]
        self.tier.demote([block(self.tier, name) for name in found])
        if self.num_empty():
            return
        going: set[str] = set()
        references = self.num_references()
        for name in reversed(found):
            followers = {other for other in self.kept if other[:-1] == name}
            if not references[self.kept[name]] and followers <= going:
                going.add(name)
        self.clock += 1
        self.ages.update(dict.fromkeys(going, -self.clock))
        self.demoted |= going

    @rule(name=chains)
    def promote(self, name: str) -> None:
        self.tier.promote(key(name))
        self.renew(name)

    @rule(name=chains)
    def drop(self, name: str) -> None:
        if name in self.kept:
            self.tier.drop([block(self.tier, name)])
            self.forget(*(kept for kept in self.kept if kept.startswith(name)))

    @precondition(lambda self: self.num_blocks < _MOST_BLOCKS)
    @rule(more=st.integers(0, 2))
    def grow(self, more: int) -> None:
        self.num_blocks += more
        self.tier.grow(self.num_blocks + 1)  # with the null block

    @rule()
    def reset(self) -> None:
        self.tier.reset()
        self.forget(*self.kept)
        for filling in self.filling:
            filling.abandoned = True

    # The model

    def num_references(self) -> Counter[int]:
        """By block."""
        held = Counter(filling.block.block_id for filling in self.filling)
        held.update(block.block_id for hold in self.holds for block in hold.blocks)
        return held

    def num_empty(self) -> int:
        """Blocks that nobody holds and that hold nothing."""
        return self.num_blocks - len({*self.num_references(), *self.kept.values()})

    def next_to_leave(self) -> set[str]:
        """The tails among what was let go of the longest ago."""
        oldest = {name for name, age in self.ages.items() if age == min(self.ages.values())}
        return {name for name in oldest if not any(other[:-1] == name for other in self.kept)}

    def let_go(self, *names: str) -> None:
        references = self.num_references()
        for name in names:
            if not references[self.kept[name]]:
                self.renew(name[:-1])
                self.clock += 1
                self.ages[name] = self.ages.get(name[:-1], self.clock)

    def renew(self, name: str) -> None:
        """A demoted one is worth as much as what was let go of last, with all before it."""
        if name in self.demoted:
            self.clock += 1
            self.demoted -= set(prefixes(name))
            self.ages.update(dict.fromkeys(self.ages.keys() & prefixes(name), self.clock))

    def forget(self, *names: str) -> None:
        for name in names:
            del self.kept[name]
            self.demoted.discard(name)
            self.ages.pop(name, None)

    # What must hold

    @invariant()
    def it_holds_together(self) -> None:
        self.tier.check_integrity()

    @invariant()
    def it_finds_what_it_should(self) -> None:
        assert contents(self.tier) == set(self.kept)
        assert all(block(self.tier, name).block_id == kept for name, kept in self.kept.items())

    @invariant()
    def no_tail_without_a_head(self) -> None:
        assert all(len(name) == 1 or name[:-1] in self.kept for name in self.kept)

    @invariant()
    def references_are_as_given(self) -> None:
        references = self.num_references()
        assert self.tier.pool.get_num_free_blocks() == self.num_blocks - len(references)
        for held in self.tier.pool.blocks[1:]:
            assert held.ref_cnt == references[held.block_id]

    def teardown(self) -> None:
        """Everything let go of, nothing is left behind."""
        for filling in self.filling:
            self.tier.unpin([filling.block])
        for hold in self.holds:
            self.tier.unpin(hold.blocks)
        self.tier.check_integrity()
        assert self.tier.pool.get_num_free_blocks() == self.num_blocks
        self.tier.reset()
        assert contents(self.tier) == set()
        assert not any(self.tier.order.parents)
        assert self.tier.order.num_followers == {}


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=60, stateful_step_count=40)
