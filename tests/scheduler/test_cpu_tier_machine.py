"""What CpuTier promises in whatever order calls come, not by which rules it chooses a block."""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from itertools import takewhile

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from tests.scheduler.tiers import (
    BLOCK_SIZE,
    block,
    check_links,
    commit,
    contents,
    hashes,
    ids,
    key,
    make_tier,
    names,
    prefixes,
)
from tests.simulation.integrity import check_tier, pool_of

_NUM_BLOCKS = 8
_MOST_BLOCKS = 10
_MOST_ON_DEVICE = 5
_INDICES = st.integers(0, 99)
chains = st.sampled_from(["aaaaa", "aaabb", "abbbb", "abba", "aab", "bbb", "bb", "ba", "a"])
starts = st.sampled_from([0, 0, 1, 2, 3])


def keys(stored: Iterable[str]) -> list[BlockHashWithGroupId]:
    return [key(name) for name in stored]


class Tier(RuleBasedStateMachine):
    """A tier behind a device that has whole prefixes, and loses their tails first.

    - Nothing pinned leaves, nor what a store must keep.
    - Of what the device lacks, what no request has hit leaves before what one has hit since. (That
      a tail leaves before its head is ``promises.TailsFirst``'s.)
    - What is released leaves before others that no request has hit, what is reserved last.
    - Counts agree, and a lookup finds what is there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tier = make_tier(_NUM_BLOCKS)
        self.num_blocks = _NUM_BLOCKS
        self.references: Counter[int] = Counter()
        self.stores: list[tuple[list[KVCacheBlock], list[str]]] = []
        self.hits: list[list[KVCacheBlock]] = []
        self.on_device: set[str] = set()
        self.hit_there: set[str] = set()
        self.duplicates: set[str] = set()
        """What tier and device have."""
        self.now = 0
        self.used: dict[str, int] = {}
        """By name, when it was last used, or lost by the device."""
        self.hit: set[str] = set()
        """What a request has hit, reserved or computed again, of what the tier has."""
        self.released: set[str] = set()
        self.reserved: list[list[str]] = []
        self.before = (contents(self.tier), self.tier.version)

    # Requests

    @initialize()
    def fill(self) -> None:
        for chain in ("aaabb", "bbb"):
            self.store(chain, kept="", computed=True, ends=True)

    @precondition(lambda self: len(self.stores) < 2)
    @rule(chain=chains, kept=st.just("") | chains, computed=st.booleans(), ends=st.booleans())
    def store(self, chain: str, kept: str, computed: bool, ends: bool) -> None:
        """Store what the tier lacks of a chain: computed by the device, or from a second tier. No
        block of ``kept`` may leave for it."""
        if computed:
            self.get_on_device(prefixes(chain))
        lacking = [name for name in prefixes(chain) if name not in contents(self.tier)]
        allocated = self.allocate(len(lacking), contents(self.tier).intersection(prefixes(kept)))
        self.references.update(each.block_id for each in allocated)
        if allocated:
            self.stores.append((allocated, lacking[: len(allocated)]))
            if ends:
                self.end_store(-1, ok=True)

    @precondition(lambda self: self.stores)
    @rule(index=_INDICES, ok=st.sampled_from([True, True, True, False]))
    def end_store(self, index: int, ok: bool) -> None:
        filled, stored = self.stores.pop(index % len(self.stores))
        self.references.subtract(each.block_id for each in filled)
        if not ok:
            self.tier.unpin(filled)
            return
        before = contents(self.tier)
        useless = [place for place, name in enumerate(stored) if name in before]
        # The device may have lost some meanwhile: then it will lose no more of them.
        is_there = self.on_device.issuperset(stored)
        assert commit(self.tier, filled, stored, on_device=is_there) == useless
        self.use(contents(self.tier) - before)
        self.duplicates.update(contents(self.tier) - before if is_there else ())

    @precondition(lambda self: len(self.hits) < 2)
    @rule(chain=chains)
    def find(self, chain: str) -> None:
        """A request hits a chain on the device, and behind that in the tier, and pins the hit."""
        there = list(takewhile(self.on_device.__contains__, prefixes(chain)))
        self.hit_there.update(there)
        found = self.tier.lookup(hashes(chain), len(there) * BLOCK_SIZE, 100)
        present = contents(self.tier)
        behind = list(takewhile(present.__contains__, prefixes(chain)[len(there) :]))
        assert found.num_tokens == len(behind) * BLOCK_SIZE
        assert names(found.pins) == behind
        if behind:
            self.tier.pin(found.pins)
            self.hits.append(list(found.pins))
            self.references.update(each.block_id for each in found.pins)
            self.duplicates.difference_update(behind)
            self.use_hit(behind)

    @precondition(lambda self: self.hits)
    @rule(index=_INDICES, loaded=st.booleans())
    def unpin(self, index: int, loaded: bool) -> None:
        """``loaded``: the device has loaded the hit, if nothing was dropped meanwhile."""
        pins = self.hits.pop(index % len(self.hits))
        self.references.subtract(each.block_id for each in pins)
        found = names(pins)
        head = [name for each in found for name in prefixes(each)[:-1] if name not in found]
        loaded = loaded and all(found) and self.on_device.issuperset(head)
        (self.tier.unpin_loaded if loaded else self.tier.unpin)(pins)
        self.use_hit(filter(None, found))
        if loaded:
            self.on_device.update(found)
            self.duplicates.update(found)

    # The device

    def get_on_device(self, chain: Sequence[str]) -> None:
        """It computes what it lacks of a chain, and hits the rest."""
        self.lose_on_device(chain[-1], len(self.on_device.union(chain)) - _MOST_ON_DEVICE)
        new = [name for name in chain if name not in self.on_device]
        self.hit_there.update(name for name in chain if name in self.on_device)
        self.on_device.update(new)
        self.tier.device_got(keys(new))
        present = contents(self.tier).intersection(new)
        self.use_hit(present)
        self.duplicates |= present

    def lose_on_device(self, spared: str, count: int) -> None:
        """The device loses up to ``count`` blocks, but none of a chain."""
        others = self.on_device.difference(prefixes(spared))
        lost = sorted(others, key=len, reverse=True)[: max(0, count)]
        there = [name for name in lost if name in contents(self.tier)]
        is_hit = [name in self.hit_there for name in there]
        self.tier.device_lost(ids(self.tier, *there), np.array(is_hit, np.bool_))
        self.use(self.duplicates.intersection(lost))
        self.hit |= self.duplicates.intersection(lost) & self.hit_there
        for each in (self.on_device, self.hit_there, self.duplicates):
            each.difference_update(lost)

    # Wishes

    @precondition(lambda self: len(self.reserved) < 2)
    @rule(chain=chains)
    def reserve(self, chain: str) -> None:
        """For a request in vLLM's queue. The tier need not have the chain."""
        self.tier.reserve(keys(prefixes(chain)))
        self.reserved.append(prefixes(chain))
        self.use_hit(contents(self.tier).intersection(prefixes(chain)))

    @precondition(lambda self: self.reserved)
    @rule(index=_INDICES)
    def unreserve(self, index: int) -> None:
        chain = self.reserved.pop(index % len(self.reserved))
        self.tier.unreserve(keys(chain))
        self.use_hit(contents(self.tier).intersection(chain) - self.all_reserved)

    @rule(chain=chains, start=starts)
    def release(self, chain: str, start: int) -> None:
        self.tier.release(keys(prefixes(chain)[start:]))
        released = self.free.intersection(prefixes(chain)[start:]) - self.duplicates
        self.released |= released - self.all_reserved
        self.hit -= released - self.all_reserved

    # All of it

    @rule(
        what=st.sampled_from(["drop", "grow", "reset", "reset device"]), chain=chains, start=starts
    )
    def upset(self, what: str, chain: str, start: int) -> None:
        """Rare events, as one rule: others should come more often."""
        if what == "drop":
            lost = contents(self.tier).intersection(prefixes(chain)[start:])
            self.tier.drop([block(self.tier, name) for name in lost])
            assert contents(self.tier).isdisjoint(lost)
            self.forget(lost)
        elif what == "grow" and self.num_blocks < _MOST_BLOCKS:
            self.num_blocks += 1
            self.tier.grow(self.num_blocks + 1)  # with the null block
        elif what == "reset":
            self.forget(contents(self.tier))
            self.tier.reset()
            assert not contents(self.tier)
        elif what == "reset device":
            self.tier.on_device_reset()
            self.use(self.duplicates)
            self.hit -= self.duplicates - self.all_reserved
            for each in (self.duplicates, self.on_device, self.hit_there):
                each.clear()

    # What leaves

    @property
    def free(self) -> set[str]:
        return {n for n in contents(self.tier) if not self.references[block(self.tier, n).block_id]}

    @property
    def all_reserved(self) -> set[str]:
        return {name for chain in self.reserved for name in chain}

    def allocate(self, count: int, keep: Set[str]) -> list[KVCacheBlock]:
        """Allocate, and compare what has left with what stays."""
        before, free = contents(self.tier), self.free
        most = min(count, self.num_blocks - len(+self.references))
        allocated = self.tier.allocate(count, set(ids(self.tier, *keep).tolist()))
        assert names(allocated) == [""] * len(allocated)
        lost = before - contents(self.tier)
        assert lost <= free - keep, "something pinned or kept has left"
        if not keep:
            assert len(allocated) == most, "free blocks are not allocated"
            self.compare(lost, free - lost)
        self.forget(lost)
        return allocated

    def compare(self, lost: Set[str], free: Set[str]) -> None:
        """``free``: what stays although it could have left."""
        last = self.all_reserved - self.duplicates
        assert not (lost & last and free - last), "something reserved has left"
        lost, free = lost - last - self.duplicates, free - last - self.duplicates
        assert not (free & self.released and lost - self.released), "something released stays"
        unhit = free - self.hit
        for name in lost & self.hit:
            older = [each for each in unhit if self.used[each] < self.used[name]]
            assert not older, f"{name}, which was hit, has left before {older}"

    def use(self, used: Iterable[str]) -> None:
        self.now += 1
        self.used.update(dict.fromkeys(used, self.now))

    def use_hit(self, used: Iterable[str]) -> None:
        used = {*used}
        self.use(used)
        self.hit |= used
        self.released -= used

    def forget(self, lost: Set[str]) -> None:
        for each in (self.hit, self.released, self.duplicates):
            each.difference_update(lost)

    # Invariants

    @invariant()
    def check_blocks(self) -> None:
        check_links(self.tier)
        check_tier(self.tier)
        assert self.tier.num_used == len(contents(self.tier))
        assert self.tier.num_free == self.num_blocks - len(+self.references)
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
        for blocks in (*self.hits, *(filled for filled, _ in self.stores)):
            self.tier.unpin(blocks)
        while self.reserved:
            self.unreserve(0)
        assert self.tier.num_reserved == 0
        assert self.tier.num_free == self.num_blocks
        assert len(self.tier.allocate(self.num_blocks)) == self.num_blocks
        check_tier(self.tier)


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
