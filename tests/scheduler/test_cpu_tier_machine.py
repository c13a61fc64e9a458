"""CpuTier compared with a model: lists of names in the order of eviction."""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any, NamedTuple
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.scheduler.tier import segments
from tests.scheduler.tiers import (
    BLOCK_SIZE,
    block,
    check_links,
    commit,
    contents,
    hashes,
    in_segment,
    key,
    make_tier,
    names,
    prefixes,
    queues,
)
from tests.simulation.integrity import check_tier, pool_of

_NUM_BLOCKS = 7
_MOST_BLOCKS = 12
_CONSTANTS: dict[str, Any] = dict(COPIES_SHARE=0.3, PROTECTED_SHARE=0.5, EVICTIONS_PER_RETURN=3)
_PROBATION, _PROTECTED, _COPY = range(3)
_INDICES = st.integers(0, 99)
chains = st.sampled_from(["aaaaa", "aaabb", "abbbb", "abba", "aab", "bbb", "bb", "ba", "a"])
starts = st.sampled_from([0, 0, 1, 2, 3])


class _Store(NamedTuple):
    blocks: list[KVCacheBlock]
    names: list[str]
    on_device: bool


class Tier(RuleBasedStateMachine):
    """A tier with any calls that the scheduler side could make, except that all requests share
    prefixes of a few chains."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = patch.multiple(segments, **_CONSTANTS)
        self.patch.start()
        self.tier = make_tier(_NUM_BLOCKS)
        self.num_blocks = _NUM_BLOCKS
        self.kept: dict[str, KVCacheBlock] = {}
        """The blocks that can be found."""
        self.segment: dict[str, int] = {}
        """Of these blocks, pinned or free."""
        self.queues: list[list[str]] = [[], [], []]
        """By segment, the free ones, the next to leave first."""
        self.references: Counter[int] = Counter()
        self.stores: list[_Store] = []
        self.hits: list[list[KVCacheBlock]] = []
        self.num_evicted = 0
        self.before = (contents(self.tier), self.tier.version)

    # Calls of a tier

    @initialize()
    def fill(self) -> None:
        self.store("aaabb", on_device=True)
        self.store("bbb", on_device=False)

    @rule(chain=chains, on_device=st.booleans())
    def store(self, chain: str, on_device: bool) -> None:
        """Store what the tier lacks of a chain, at once."""
        if lacking := [name for name in prefixes(chain) if name not in self.kept]:
            num_stores = len(self.stores)
            self.begin_store(chain, len(lacking[0]) - 1, on_device, kept="")
            if len(self.stores) > num_stores:
                self.end_store(num_stores, ok=True)

    @rule(chain=chains, start=starts, on_device=st.booleans(), kept=chains | st.just(""))
    def begin_store(self, chain: str, start: int, on_device: bool, kept: str) -> None:
        """Begin to store the end of a chain. No block of ``kept`` may leave for it."""
        wanted = prefixes(chain)[start:]
        keep = set(prefixes(kept))
        num_empty = min(self.num_empty, len(wanted))
        count = num_empty + self.evict(len(wanted) - num_empty, keep)
        allocated = self.tier.allocate(len(wanted), {key(name) for name in keep})
        assert names(allocated) == [""] * count
        self.references.update(each.block_id for each in allocated)
        if allocated:
            self.stores.append(_Store(allocated, wanted[:count], on_device))

    @precondition(lambda self: self.stores)
    @rule(index=_INDICES, ok=st.sampled_from([True, True, True, False]))
    def end_store(self, index: int, ok: bool) -> None:
        filled, stored, on_device = self.stores.pop(index % len(self.stores))
        self.references.subtract(each.block_id for each in filled)
        if not ok:
            self.tier.unpin(filled)
            return
        useless = [place for place, name in enumerate(stored) if name in self.kept]
        assert commit(self.tier, filled, stored, on_device=on_device) == useless
        new = {n: b for n, b in zip(stored, filled, strict=True) if n not in self.kept}
        self.kept.update(new)
        if on_device:
            self.move([*new], _COPY)
        else:
            self.move([*reversed(new)], _PROBATION)

    @rule(chain=chains, num_on_device=starts)
    def find(self, chain: str, num_on_device: int) -> None:
        """Look a chain up, and pin the hit."""
        hit = self.tier.lookup(hashes(chain), num_on_device * BLOCK_SIZE, 100)
        behind = list(takewhile(self.kept.__contains__, prefixes(chain)[num_on_device:]))
        assert hit.num_tokens == len(behind) * BLOCK_SIZE
        assert names(hit.pins) == behind
        if behind:
            self.tier.pin(hit.pins)
            self.hits.append(hit.pins)
            self.references.update(each.block_id for each in hit.pins)
            self.take(behind)
            for name in behind:
                if self.segment[name] != _COPY:
                    self.segment[name] = _PROTECTED

    @precondition(lambda self: self.hits)
    @rule(index=_INDICES)
    def unpin(self, index: int) -> None:
        """A block that was dropped meanwhile has no name any more."""
        pins = self.hits.pop(index % len(self.hits))
        self.tier.unpin(pins)
        self.references.subtract(each.block_id for each in pins)
        name_of = {each.block_id: name for name, each in self.kept.items()}
        names = [name for each in pins if (name := name_of.get(each.block_id)) is not None]
        copies = [name for name in names if self.segment[name] == _COPY]
        self.move(copies, _COPY, first=True)
        for name in reversed(names):
            if name not in copies:
                self.move([name], self.segment[name])
        self.enforce_limit()

    @rule(chain=chains, start=starts)
    def add_copies(self, chain: str, start: int) -> None:
        """The device has got the end of a chain."""
        got = prefixes(chain)[start:]
        present = self.present(got)
        lacking = self.tier.add_copies([key(name) for name in got])
        assert lacking == [key(name) for name in got if name not in present]
        self.move(present, _COPY, first=True)

    @rule(chain=chains, start=starts, found=st.booleans())
    def remove_copies(self, chain: str, start: int, found: bool) -> None:
        """The device has let go of the end of a chain."""
        lost = prefixes(chain)[start:][::-1]
        self.tier.remove_copies([key(name) for name in lost], found=found)
        lost = [name for name in self.present(lost) if self.segment[name] == _COPY]
        self.move(lost, _PROTECTED if found else _PROBATION)
        self.enforce_limit()

    @rule()
    def remove_all_copies(self) -> None:
        """The device's cache has been reset. What would leave first was found last."""
        self.tier.remove_all_copies()
        self.move(self.queues[_COPY][::-1], _PROBATION)
        pinned = [name for name, segment in self.segment.items() if segment == _COPY]
        self.segment.update(dict.fromkeys(pinned, _PROBATION))

    @precondition(lambda self: not self.num_empty)
    @rule(chain=chains, start=starts)
    def drop(self, chain: str, start: int) -> None:
        lost = self.present(prefixes(chain)[start:])
        self.tier.drop([self.kept[name] for name in lost])
        self.lose(lost)

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

    @property
    def num_empty(self) -> int:
        """Number of blocks without references and contents."""
        return self.num_blocks - len(
            {*(+self.references), *(b.block_id for b in self.kept.values())}
        )

    def present(self, wanted: Sequence[str]) -> list[str]:
        return [name for name in wanted if name in self.kept]

    def take(self, gone: Collection[str]) -> None:
        """Take blocks out of the queues."""
        for queue in self.queues:
            queue[:] = [name for name in queue if name not in gone]

    def move(self, moved: Sequence[str], segment: int, *, first: bool = False) -> None:
        """Move blocks to a segment, the free ones to an end of its queue, in this order."""
        self.take(moved)
        self.segment.update(dict.fromkeys(moved, segment))
        queue = self.queues[segment]
        place = 0 if first else len(queue)
        queue[place:place] = [n for n in moved if not self.references[self.kept[n].block_id]]

    def lose(self, lost: Sequence[str]) -> None:
        self.take(lost)
        for name in lost:
            del self.kept[name], self.segment[name]

    def evict(self, count: int, keep: Collection[str]) -> int:
        """Copies beyond the share leave first, then whole queues, up to a block to keep."""
        num_copies = [*self.segment.values()].count(_COPY)
        num_excess = max(0, num_copies - int(_CONSTANTS["COPIES_SHARE"] * self.num_blocks))
        lost: list[str] = []
        rest = [(each, count) for each in (_PROBATION, _PROTECTED, _COPY)]
        for segment, most in ((_COPY, num_excess), *rest):
            front = self.queues[segment][: min(most, count - len(lost))]
            left = list(takewhile(lambda name: name not in keep, front))
            self.num_evicted += len(left) if segment != _COPY else 0
            self.lose(left)
            lost += left
        num_returned, self.num_evicted = divmod(self.num_evicted, 3)
        self.return_to_probation(num_returned)
        return len(lost)

    def enforce_limit(self) -> None:
        self.return_to_probation(len(self.queues[_PROTECTED]) - self.num_blocks // 2)

    def return_to_probation(self, count: int) -> None:
        self.move(self.queues[_PROTECTED][: max(0, count)], _PROBATION)

    # Invariants

    @invariant()
    def check_consistency(self) -> None:
        check_links(self.tier)
        check_tier(self.tier)

    @invariant()
    def check_queues(self) -> None:
        probation, *others = self.queues
        assert queues(self.tier) == [[""] * self.num_empty + probation, *others]
        for segment in range(3):
            expected = {name for name, of in self.segment.items() if of == segment}
            assert in_segment(self.tier, segment) == expected

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
        assert len(self.tier.allocate(self.num_blocks)) == self.num_blocks
        check_tier(self.tier)
        self.patch.stop()


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
