"""What CpuTier promises in whatever order calls come, not by which rules it chooses a block."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from itertools import takewhile
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.kv_cache_utils import KVCacheBlock

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
    settle,
)
from tests.simulation.integrity import check_tier, pool_of, set_clock

_NUM_BLOCKS = 7
_MOST_BLOCKS = 12
_INDICES = st.integers(0, 99)
chains = st.sampled_from(["aaaaa", "aaabb", "abbbb", "abba", "aab", "bbb", "bb", "ba", "a"])
starts = st.sampled_from([0, 0, 1, 2, 3])


class _Store(NamedTuple):
    blocks: list[KVCacheBlock]
    names: list[str]


class Tier(RuleBasedStateMachine):
    """A tier behind a device that has whole prefixes, and loses their tails first.

    - Nothing pinned leaves, nor what a store must keep.
    - Of what the device lacks, what no request has found leaves before what one has found since.
      (That a tail leaves before its head is ``promises.TailsFirst``'s.)
    - What is released leaves first, what is expected last.
    - Counts agree, and a lookup finds what is there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0
        self.tier = make_tier(_NUM_BLOCKS)
        set_clock(self.tier, lambda: self.seconds)
        self.num_blocks = _NUM_BLOCKS
        self.on_device: set[str] = set()
        self.copies: set[str] = set()
        """Of these, what the tier has too, and knows that the device has."""
        self.tier.watch_device(lambda: {key(name) for name in self.on_device})
        self.references: Counter[int] = Counter()
        self.stores: list[_Store] = []
        self.hits: list[list[KVCacheBlock]] = []
        self.now = 0
        self.used: dict[str, int] = {}
        """By name, when it was last found, or the device lost it."""
        self.found: set[str] = set()
        self.expected: list[list[str]] = []
        """What requests in vLLM's queue want."""
        self.special: set[str] = set()
        """What has been expected, kept or released, or was on a device that was reset: other orders
        hold for it until it leaves."""
        self.released: set[str] = set()
        self.leased: set[str] = set()
        """What has been kept. That may leave before what is expected."""
        self.before = (contents(self.tier), self.tier.version)

    # Requests

    @initialize()
    def fill(self) -> None:
        self.store("aaabb")
        self.store("bbb")

    @rule(chain=chains)
    def store(self, chain: str) -> None:
        """Compute a chain, and store what the tier lacks of it."""
        num_stores = len(self.stores)
        self.begin_store(chain, kept="")
        if len(self.stores) > num_stores:
            self.end_store(num_stores, ok=True)

    @rule(chain=chains, kept=chains | st.just(""))
    def begin_store(self, chain: str, kept: str) -> None:
        """No block of ``kept`` may leave for it."""
        self.get_on_device(prefixes(chain))
        lacking = [name for name in prefixes(chain) if name not in contents(self.tier)]
        allocated = self.allocate(len(lacking), prefixes(kept))
        self.references.update(each.block_id for each in allocated)
        if allocated:
            self.stores.append(_Store(allocated, lacking[: len(allocated)]))

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
        new = [name for name in stored if name not in before]
        self.forget(new)
        self.use(new, found=False)
        (self.copies if is_there else self.special).update(new)
        self.special.update(name for name in new if name in self.all_expected)

    @rule(chain=chains)
    def find(self, chain: str) -> None:
        """A request finds a chain on the device, and behind that in the tier, and pins the hit."""
        self.tier.on_request(hashes(chain))
        there = list(takewhile(self.on_device.__contains__, prefixes(chain)))
        self.get_on_device(there)
        hit = self.tier.lookup(hashes(chain), len(there) * BLOCK_SIZE, 100)
        present = contents(self.tier)
        behind = list(takewhile(present.__contains__, prefixes(chain)[len(there) :]))
        assert hit.num_tokens == len(behind) * BLOCK_SIZE
        assert names(hit.pins) == behind
        if behind:
            self.tier.pin(hit.pins)
            self.hits.append(hit.pins)
            self.references.update(each.block_id for each in hit.pins)
            self.use(behind, found=True)
            self.copies.difference_update(behind)

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
        self.use(filter(None, found), found=True)
        if loaded:
            self.on_device.update(found)
            self.copies.update(found)

    # The device

    def get_on_device(self, chain: Sequence[str]) -> None:
        """It computes or finds the head of a chain."""
        self.on_device.update(chain)
        self.tier.add_copies([key(name) for name in chain])
        present = contents(self.tier).intersection(chain)
        self.use(present, found=True)
        self.copies |= present

    @rule(chain=chains, start=starts)
    def lose_on_device(self, chain: str, start: int) -> None:
        """The device lets go of the end of a chain, but for what other chains need."""
        for name in prefixes(chain)[start:][::-1]:
            has_more = any(other != name and other.startswith(name) for other in self.on_device)
            if name in self.on_device and not has_more:
                self.on_device.remove(name)
                self.copies.discard(name)
                if name in contents(self.tier):
                    self.tier.on_let_go(ids(self.tier, name))
                    self.use([name], found=False)
        settle(self.tier)

    @rule()
    def reset_device(self) -> None:
        self.special |= self.copies
        self.released -= self.copies
        self.copies.clear()
        self.on_device.clear()
        self.tier.remove_all_copies()

    # Wishes

    @rule(chain=chains)
    def expect(self, chain: str) -> None:
        """A request in vLLM's queue wants a chain, which the tier need not have."""
        self.tier.expect([key(name) for name in prefixes(chain)])
        self.expected.append(prefixes(chain))
        self.special |= contents(self.tier).intersection(prefixes(chain))
        self.released.difference_update(prefixes(chain))

    @precondition(lambda self: self.expected)
    @rule(index=_INDICES)
    def stop_expecting(self, index: int) -> None:
        chain = self.expected.pop(index % len(self.expected))
        self.tier.stop_expecting([key(name) for name in chain])

    @rule(
        chain=chains,
        start=starts,
        seconds=st.sampled_from([None, None, 0, 1, 5]),
        session=st.sampled_from([b"one", b"two"]),
    )
    def lease(self, chain: str, start: int, seconds: int | None, session: bytes) -> None:
        """A request wants the end of a chain kept for some time, or released."""
        present = [name for name in prefixes(chain)[start:] if name in contents(self.tier)]
        leased = [block(self.tier, name).block_id for name in present]
        may_be_released = set(present) - self.special if seconds is None else set()
        self.tier.lease(leased, self.tier.make_lease(seconds, session))
        self.special.update(present)
        self.leased.update(present if seconds is not None else ())
        for name, block_id in zip(present, leased, strict=True):
            is_released = self.tier.is_released(block_id)
            assert is_released or name not in may_be_released or self.references[block_id]
            (self.released.add if is_released else self.released.discard)(name)

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.seconds += seconds

    # All of it

    @rule(chain=chains, start=starts)
    def drop(self, chain: str, start: int) -> None:
        lost = [name for name in prefixes(chain)[start:] if name in contents(self.tier)]
        self.tier.drop([block(self.tier, name) for name in lost])
        assert contents(self.tier).isdisjoint(lost)
        self.forget(lost)

    @precondition(lambda self: self.num_blocks < _MOST_BLOCKS)
    @rule(more=st.integers(0, 2))
    def grow(self, more: int) -> None:
        self.num_blocks += more
        self.tier.grow(self.num_blocks + 1)  # with the null block

    @rule()
    def reset(self) -> None:
        self.forget(contents(self.tier))
        self.tier.reset()
        assert not contents(self.tier)

    # What leaves

    def allocate(self, count: int, keep: Collection[str]) -> list[KVCacheBlock]:
        """Allocate, and compare what has left with what stays."""
        before = contents(self.tier)
        free = {name for name in before if not self.references[block(self.tier, name).block_id]}
        most = min(count, self.num_blocks - len(+self.references))
        allocated = self.tier.allocate(count, {key(name) for name in keep})
        assert names(allocated) == [""] * len(allocated)
        lost = before - contents(self.tier)
        assert lost <= free - set(keep), "something pinned or kept has left"
        if not before.intersection(keep):
            assert len(allocated) == most, "free blocks are not allocated"
            self.compare(lost, free - lost)
        self.forget(lost)
        return allocated

    def compare(self, lost: Set[str], free: Set[str]) -> None:
        """``free``: what stays although it could have left."""
        expected = self.all_expected - self.copies - self.leased
        stays = {name for name in free if name not in expected}
        assert not (stays and expected.intersection(lost)), "something expected has left"
        released = {name for name in free if name in self.released - self.copies}
        assert not (released and lost - self.released), "something released stays"
        plain = {name for name in stays if name not in self.special | self.copies}
        for name in lost - self.special - self.copies:
            if name in self.found:
                unfound = [each for each in plain - self.found if self.used[each] < self.used[name]]
                assert not unfound, f"{name}, which was found, has left before {unfound}"

    def use(self, used: Iterable[str], *, found: bool) -> None:
        self.now += 1
        for name in used:
            self.used[name] = self.now
            if found:
                self.found.add(name)
                self.released.discard(name)

    def forget(self, lost: Iterable[str]) -> None:
        """These have left, or are new."""
        for name in [*lost]:
            for each in (self.found, self.special, self.released, self.leased, self.copies):
                each.discard(name)

    @property
    def all_expected(self) -> set[str]:
        return {name for chain in self.expected for name in chain}

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
        for each in (*self.hits, *(store.blocks for store in self.stores)):
            self.tier.unpin(each)
        while self.expected:
            self.stop_expecting(0)
        assert self.tier.num_expected == 0
        assert self.tier.num_free == self.num_blocks
        assert len(self.tier.allocate(self.num_blocks)) == self.num_blocks
        check_tier(self.tier)


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
