"""CpuTier compared with a model: lists of names in the order of eviction."""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.scheduler.tier import segmented_lru
from simple_offload.scheduler.tier.run import Run
from tests.scheduler.tiers import (
    BLOCK_SIZE,
    block,
    blocks_of,
    check_links,
    contents,
    finish,
    free_queue,
    hashes,
    key,
    make_tier,
    names,
    parent_of,
    prefixes,
    protected,
)
from tests.simulation.integrity import check_tier, pool_of

_NUM_BLOCKS = 7
_MOST_BLOCKS = 12
_EVICTIONS_PER_RETURN = 3
_INDICES = st.integers(0, 99)
chains = st.sampled_from(["aaaaa", "aaabb", "abbbb", "abba", "aab", "bbb", "bb", "ba", "a"])


class _Store(NamedTuple):
    blocks: list[KVCacheBlock]
    names: list[str]
    early: bool


class Tier(RuleBasedStateMachine):
    """A tier with any calls that the scheduler side could make, except that all requests share
    prefixes of a few chains."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = patch.object(segmented_lru, "EVICTIONS_PER_RETURN", _EVICTIONS_PER_RETURN)
        self.patch.start()
        self.tier = make_tier(_NUM_BLOCKS)
        self.num_blocks = _NUM_BLOCKS
        self.kept: dict[str, KVCacheBlock] = {}
        """The blocks that can be found."""
        self.demoted: list[str] = []
        """Free blocks, the next to leave first; and so the next two."""
        self.probation: list[str] = []
        self.protected: list[str] = []
        self.found: set[str] = set()
        """Names of the protected blocks, pinned or free."""
        self.references: Counter[int] = Counter()
        self.stores: list[_Store] = []
        self.hits: list[list[KVCacheBlock]] = []
        self.num_evicted = 0
        self.before = (contents(self.tier), self.tier.version)

    # Calls of a tier

    @initialize()
    def fill(self) -> None:
        self.store("aaabb")
        self.store("bbb")

    @rule(chain=chains)
    def store(self, chain: str) -> None:
        """Store what the tier lacks of a chain, at once."""
        if lacking := [name for name in prefixes(chain) if name not in self.kept]:
            self.begin_store(chain, len(lacking[0]) - 1, early=False)
            if self.stores:
                self.end_store(len(self.stores) - 1, ok=True)

    @rule(chain=chains, start=st.sampled_from([0, 0, 1, 2, 3]), early=st.booleans())
    def begin_store(self, chain: str, start: int, early: bool) -> None:
        """Begin to store the end of a chain. Its parent must not leave for it."""
        wanted = prefixes(chain)[start:]
        if not wanted:
            return
        parent = wanted[0][:-1]
        num_empty = min(self.num_empty, len(wanted))
        count = num_empty + self.evict(len(wanted) - num_empty, keep=parent)
        allocated = self.tier.allocate(len(wanted), lambda: {key(parent)})
        assert names(allocated) == [""] * count
        self.references.update(each.block_id for each in allocated)
        if allocated:
            self.stores.append(_Store(allocated, wanted[:count], early))

    @precondition(lambda self: self.stores)
    @rule(index=_INDICES, ok=st.sampled_from([True, True, True, False]))
    def end_store(self, index: int, ok: bool) -> None:
        filled, stored, early = self.stores.pop(index % len(self.stores))
        self.references.subtract(each.block_id for each in filled)
        if not ok:
            self.tier.unpin(filled)
            self.keep_limit()
            return
        keys = [key(name) for name in stored]
        run = Run((), keys, parent_of(stored[0]), len(stored[0]) * BLOCK_SIZE, BLOCK_SIZE, early)
        run.host_blocks = filled
        useless = self.useless(stored, early)
        assert self.tier.commit([run]) == [useless]
        if useless:
            self.keep_limit()
        awaited = {name[:-1] for name in self.kept} - self.kept.keys()
        for place, name in enumerate(stored):
            if place not in useless:
                self.kept[name] = filled[place]
                self.join(name)
        late = [name for name in stored if name in awaited and name in self.kept]
        for name in late:
            if any(child[:-1] == name for child in self.found):
                self.renew(name, protect=True)
                self.keep_limit()
        for name in late:
            self.renew(name)
            self.keep_limit()

    @rule(chain=chains, num_on_device=st.sampled_from([0, 0, 1, 2, 3]))
    def find(self, chain: str, num_on_device: int) -> None:
        """Look a chain up, and pin the hit."""
        hit = self.tier.lookup(hashes(chain), num_on_device * BLOCK_SIZE, 100)
        behind = list(takewhile(self.kept.__contains__, prefixes(chain)[num_on_device:]))
        assert hit.num_tokens == len(behind) * BLOCK_SIZE
        if behind:
            pins = [*self.present(chain[:num_on_device]), *behind]
            assert names(hit.pins) == pins
            self.tier.pin(hit.pins)
            self.hits.append(hit.pins)
            self.references.update(each.block_id for each in hit.pins)
            self.take(pins)
            self.found.update(pins)

    @precondition(lambda self: self.hits)
    @rule(index=_INDICES)
    def unpin(self, index: int) -> None:
        pins = self.hits.pop(index % len(self.hits))
        self.tier.unpin(pins)
        self.references.subtract(each.block_id for each in pins)
        ids = {each.block_id for each in pins}
        self.free([name for name in sorted(self.kept) if self.kept[name].block_id in ids])
        self.keep_limit()

    @rule(chain=chains, num_found=st.integers(0, 5), loaded=st.booleans())
    def finish(self, chain: str, num_found: int, loaded: bool) -> None:
        """A request for a chain ends. How a chain with a gap is renewed is not defined."""
        present = self.present(chain)
        found = [name in self.found for name in present]
        if present != prefixes(chain)[: len(present)] or found != sorted(found, reverse=True):
            return
        asked = prefixes(chain)[:num_found]
        finish(self.tier, chain, len(chain), len(asked), loaded=loaded)
        if not loaded:
            chain_ = list(takewhile(lambda name: name not in self.demoted, present))
            self.take(chain_)
            for is_found, piece in groupby(chain_, self.found.__contains__):
                free = [name for name in piece if not self.has_references(name)]
                (self.protected if is_found else self.probation).extend(reversed(free))
        if new := [name for name in asked if name not in self.found]:
            new = [name for name in new if name in self.kept]
            self.take(new)
            self.found.update(new)
            self.free(new)
            self.keep_limit()

    @rule(chain=chains)
    def demote(self, chain: str) -> None:
        """As when the device has loaded the chain's blocks."""
        present = self.present(chain)
        self.tier.demote(blocks_of(self.tier, present))
        if self.num_empty:
            return
        going: list[str] = []
        for name in reversed(present):
            children = {other for other in self.kept if other[:-1] == name}
            if not self.has_references(name) and children <= {*going}:
                going.append(name)
        self.take(going)
        self.found.difference_update(going)
        self.demoted[:0] = going

    @rule(name=chains)
    def promote(self, name: str) -> None:
        self.tier.promote([key(name)])
        if name in self.demoted:
            self.renew(name)
            self.keep_limit()

    @precondition(lambda self: not self.num_empty)
    @rule(name=chains)
    def drop(self, name: str) -> None:
        if name in self.kept:
            self.tier.drop([self.kept[name]])
            self.lose([lost for lost in self.kept if name in self.ancestors(lost)])

    @precondition(lambda self: self.num_blocks < _MOST_BLOCKS)
    @rule(more=st.integers(0, 2))
    def grow(self, more: int) -> None:
        self.num_blocks += more
        self.tier.grow(self.num_blocks + 1)  # with the null block

    @precondition(lambda self: not self.num_empty)
    @rule()
    def reset(self) -> None:
        self.tier.reset()
        self.lose([*self.kept])

    # The model

    def useless(self, stored: Sequence[str], early: bool) -> list[int]:
        """Places of blocks that another block has the key of, or whose parent is not there."""
        has_parent = early or stored[0][:-1] in {"", *self.kept}
        places = []
        for place, name in enumerate(stored):
            has_parent |= name in self.kept
            if name in self.kept or not has_parent:
                places.append(place)
        return places

    @property
    def num_empty(self) -> int:
        """Number of blocks without references and contents."""
        return self.num_blocks - len(
            {*(+self.references), *(b.block_id for b in self.kept.values())}
        )

    def has_references(self, name: str) -> bool:
        return self.references[self.kept[name].block_id] > 0

    def present(self, chain: str) -> list[str]:
        return [name for name in prefixes(chain) if name in self.kept]

    def ancestors(self, name: str) -> list[str]:
        """A block and its ancestors up to a gap, parents first."""
        return list(takewhile(self.kept.__contains__, reversed(prefixes(name))))[::-1]

    def take(self, gone: Collection[str]) -> None:
        """Take blocks out of the queue."""
        for segment in (self.demoted, self.probation, self.protected):
            segment[:] = [name for name in segment if name not in gone]

    def lose(self, lost: Sequence[str]) -> None:
        self.take(lost)
        self.found.difference_update(lost)
        for name in lost:
            del self.kept[name]

    def evict(self, count: int, keep: str) -> int:
        queue = [*self.demoted, *self.probation, *self.protected]
        lost = list(takewhile(lambda name: name != keep, queue[:count]))
        self.lose(lost)
        self.num_evicted += len(lost)
        while self.num_evicted >= _EVICTIONS_PER_RETURN:
            self.num_evicted -= _EVICTIONS_PER_RETURN
            self.return_to_probation()
        return len(lost)

    def free(self, freed: Sequence[str]) -> None:
        """Blocks lose a reference, parents before children."""
        for name in freed:
            if not self.has_references(name):
                parent = name[:-1]
                if name in self.found and parent in self.kept and parent not in self.found:
                    self.renew(parent, protect=True)
                self.join(name)

    def join(self, name: str) -> None:
        """A block without references joins the queue."""
        parent = name[:-1]
        if parent in self.demoted:
            self.renew(parent)
            self.keep_limit()
        segment = self.protected if name in self.found else self.probation
        place = segment.index(parent) if parent in segment else len(segment)
        segment.insert(place, name)

    def renew(self, name: str, protect: bool = False) -> None:
        """A block and its ancestors become the most recently used."""
        chain = self.ancestors(name)
        if protect or name in self.demoted:
            self.found.update(chain)
        self.take(chain)
        self.free(chain)

    def keep_limit(self) -> None:
        for _ in range(len(self.found) - self.num_blocks // 2):
            self.return_to_probation()

    def return_to_probation(self) -> None:
        if self.protected:
            self.probation.append(self.protected.pop(0))
            self.found.discard(self.probation[-1])

    # Invariants

    @invariant()
    def check_consistency(self) -> None:
        check_links(self.tier)
        check_tier(self.tier)

    @invariant()
    def check_queue(self) -> None:
        queue = [*self.demoted, *self.probation, *self.protected]
        assert free_queue(self.tier) == [""] * self.num_empty + queue
        assert protected(self.tier) == self.found

    @invariant()
    def check_blocks(self) -> None:
        assert contents(self.tier) == {*self.kept}
        assert all(block(self.tier, name) is kept for name, kept in self.kept.items())
        for each in pool_of(self.tier).blocks[1:]:
            assert each.ref_cnt == self.references[each.block_id]

    @invariant()
    def check_version(self) -> None:
        """It grows when a lookup may find something else."""
        contents_before, version_before = self.before
        self.before = (contents(self.tier), self.tier.version)
        assert self.before[0] == contents_before or self.before[1] > version_before

    def teardown(self) -> None:
        """Without references, all blocks are free. Without contents, no bookkeeping is left."""
        for each in (*self.hits, *(store.blocks for store in self.stores)):
            self.tier.unpin(each)
        check_tier(self.tier)
        assert self.tier.num_free == self.num_blocks
        self.tier.allocate(self.num_blocks)
        order = self.tier._order
        assert not any(order.parents)
        assert (order.num_children, order.early) == ({}, {})
        self.patch.stop()


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
