"""CpuTier compared with a model: lists of names in the order of eviction."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.scheduler.tier import ghosts, leases, segments
from tests.scheduler.tiers import (
    BLOCK_SIZE,
    block,
    check_links,
    commit,
    contents,
    hashes,
    key,
    make_tier,
    names,
    prefixes,
    queues,
    segments_of,
    special,
)
from tests.simulation.integrity import check_tier, pool_of, set_clock

_NUM_BLOCKS = 7
_MOST_BLOCKS = 12
_CONSTANTS: dict[str, Any] = dict(
    COPIES_SHARE=0.3,
    PROTECTED_AGE=2,
    _MOST_LOOKED_AT=2,
)
_NUM_AVERAGED = 3
_PROBATION, _PROTECTED, _COPY, _FOUND_COPY, _KEPT, _RELEASED, _KEPT_COPY, _RELEASED_COPY = range(8)
_EXPECTED, _EXPECTED_COPY = 8, 9
_AS_COPY = {
    _PROBATION: _COPY,
    _PROTECTED: _FOUND_COPY,
    _KEPT: _KEPT_COPY,
    _RELEASED: _RELEASED_COPY,
    _EXPECTED: _EXPECTED_COPY,
}
_AS_OTHER = {copy: other for other, copy in _AS_COPY.items()}
_COPIES = {*_AS_OTHER}
_QUEUES = {_PROBATION: 0, _PROTECTED: 1, _KEPT: 3, _RELEASED: 4, _EXPECTED: 5}
_QUEUES |= dict.fromkeys(_COPIES, 2)
"""By segment, the place of its queue."""
_INDICES = st.integers(0, 99)
chains = st.sampled_from(["aaaaa", "aaabb", "abbbb", "abba", "aab", "bbb", "bb", "ba", "a"])
starts = st.sampled_from([0, 0, 1, 2, 3])


def if_found(segment: int) -> int:
    """Where a block belongs that is no copy, when a request has found it."""
    segment = _AS_OTHER.get(segment, segment)
    return segment if segment in (_KEPT, _EXPECTED) else _PROTECTED


class _Store(NamedTuple):
    blocks: list[KVCacheBlock]
    names: list[str]
    on_device: bool


class Tier(RuleBasedStateMachine):
    """A tier with any calls that the scheduler side could make, except that all requests share
    prefixes of a few chains."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            patch.multiple(segments, **_CONSTANTS),
            patch.object(leases, "_MAX_STALE", 1000),
            patch.object(ghosts, "NUM_AVERAGED", _NUM_AVERAGED),
        ]
        for each in self.patches:
            each.start()
        self.now = 0
        self.tier = make_tier(_NUM_BLOCKS)
        set_clock(self.tier, lambda: self.now)
        self.num_blocks = _NUM_BLOCKS
        self.kept: dict[str, KVCacheBlock] = {}
        """The blocks that can be found."""
        self.segment: dict[str, int] = {}
        """Of these blocks, pinned or free."""
        self.queues: list[list[str]] = [[], [], [], [], [], []]
        """The free ones on probation, protected, copies, kept, released and expected, the next to
        leave first."""
        self.expected: list[list[str]] = []
        """What requests in vLLM's queue want."""
        self.leases: dict[str, leases.Lease] = {}
        """Of those that are kept."""
        self.ends: list[tuple[float, list[int]]] = []
        """Ends of leases, with the blocks that got them."""
        self.let_go: list[list[int]] = []
        self.twins: dict[int, None] = {}
        """Ids of blocks that the device has let go of, and has in another block."""
        """Ids of blocks that the device has let go of and that have not been moved, by call."""
        self.on_device = {*prefixes("aaab")}
        """What the device finds, though it has let go of it."""
        self.tier.watch_device(lambda: {key(name) for name in self.on_device})
        self.references: Counter[int] = Counter()
        self.stores: list[_Store] = []
        self.hits: list[list[KVCacheBlock]] = []
        self.num_evicted = 0
        """Contents that were no copies."""
        self.since: dict[int, int] = {}
        """By block id, how many had been evicted when the contents were used last."""
        self.ghosts: dict[str, int] = {}
        """By name of what has left lately and was no copy, how many had been evicted before it."""
        self.share_wanted = 0.0
        """Of the last ghosts: a moving average."""
        """Copies that may leave in any case."""
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
        if num_empty < len(wanted):
            self.settle()
            self.end_leases()
        count = num_empty + self.evict(len(wanted) - num_empty, len(wanted), keep)
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
        self.move([*reversed(new)], _COPY if on_device else _PROBATION)
        self.become_expected([name for name in new if name in self.all_expected])

    @rule(chain=chains)
    def request(self, chain: str) -> None:
        """A request for a chain gets its blocks."""
        self.tier.on_request(hashes(chain))
        self.end_ghosts([name for name in prefixes(chain) if name in self.ghosts], wanted=True)

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
            self.segment.update({name: if_found(self.segment[name]) for name in behind})

    @precondition(lambda self: self.hits)
    @rule(index=_INDICES, loaded=st.booleans())
    def unpin(self, index: int, loaded: bool) -> None:
        """A block that was dropped meanwhile has no name any more: then a load counts for nothing.
        ``loaded``: the device has loaded the hit."""
        pins = self.hits.pop(index % len(self.hits))
        (self.tier.unpin_loaded if loaded else self.tier.unpin)(pins)
        self.references.subtract(each.block_id for each in pins)
        names = self.names_at(each.block_id for each in pins)
        if loaded and len(names) == len(pins):
            self.become_found_copies(names)
            return
        for name in names:
            if self.segment[name] in _COPIES:
                self.move([name], self.segment[name], first=True)
        for name in reversed(names):
            if self.segment[name] not in _COPIES:
                self.move([name], self.segment[name])
        self.limit_kept()

    @rule(chain=chains, start=starts)
    def add_copies(self, chain: str, start: int) -> None:
        """The device has got the end of a chain."""
        got = prefixes(chain)[start:]
        found = self.tier.add_copies([key(name) for name in got])
        present = self.present(got)
        assert found == ([self.kept.get(name) for name in got] if present else [])
        self.become_found_copies(present)

    @rule(indices=st.lists(_INDICES, max_size=8))
    def find_copies(self, indices: list[int]) -> None:
        """Requests have found the contents of any blocks on the device."""
        ids = [1 + index % self.num_blocks for index in indices]
        self.tier.on_copies_found(np.array(ids, np.int64))
        for name in self.names_at(ids):
            if self.segment[name] in _COPIES:
                self.segment[name] = _AS_COPY[if_found(self.segment[name])]

    @rule(chain=chains, start=starts)
    def let_go_of_chain(self, chain: str, start: int) -> None:
        """The device lets go of the end of a chain."""
        lost = self.present(prefixes(chain)[start:])[::-1]
        self.let_go_of([self.kept[name].block_id for name in lost])

    @rule(indices=st.lists(_INDICES, max_size=8))
    def let_go_of_any(self, indices: list[int]) -> None:
        """The device lets go of any blocks, which may be empty or no copies. If it had the contents
        of one twice in the same step, the first time counts."""
        self.let_go_of([1 + index % self.num_blocks for index in indices])

    def let_go_of(self, ids: list[int]) -> None:
        """Nothing moves yet, but what the device let go of first, if too many blocks wait for it.
        A block that waits already does so in its new place."""
        self.tier.on_let_go(np.array(ids, np.int64))
        self.let_go.append(ids)
        while sum(map(len, self.let_go)) > self.num_blocks + 1:
            self.settle_oldest()

    @rule(chain=chains)
    def change_device(self, chain: str) -> None:
        """The device has other contents in further blocks."""
        self.on_device = {*prefixes(chain)}

    @rule()
    def remove_all_copies(self) -> None:
        """The device's cache has been reset."""
        self.tier.remove_all_copies()
        self.let_go.clear()
        self.twins.clear()
        copies = [name for name, segment in self.segment.items() if segment in _COPIES]
        pinned = [name for name in copies if name not in self.queues[2]]
        for name in [*self.queues[2], *pinned]:
            other = _AS_OTHER[self.segment[name]]
            self.move([name], other if other in (_KEPT, _EXPECTED) else _PROBATION)
        self.limit_kept()

    @rule(chain=chains)
    def expect(self, chain: str) -> None:
        """A request in vLLM's queue wants a chain, which the tier need not have."""
        self.tier.expect([key(name) for name in prefixes(chain)])
        self.expected.append(prefixes(chain))
        self.become_expected(self.present(prefixes(chain)))

    @precondition(lambda self: self.expected)
    @rule(index=_INDICES)
    def stop_expecting(self, index: int) -> None:
        names = self.expected.pop(index % len(self.expected))
        self.tier.stop_expecting([key(name) for name in names])
        over = [name for name in self.present(names) if name not in self.all_expected]
        for name in reversed(over):
            if self.segment[name] == _EXPECTED_COPY:
                self.segment[name] = _FOUND_COPY
            elif self.segment[name] == _EXPECTED:
                self.move([name], _PROTECTED)
        self.limit_kept()

    @rule(
        chain=chains,
        start=starts,
        seconds=st.sampled_from([None, None, 0, 1, 5]),
        session=st.sampled_from([b"one", b"two"]),
    )
    def lease(self, chain: str, start: int, seconds: int | None, session: bytes) -> None:
        """A request wants the end of a chain kept for some time, or released."""
        lease = self.tier.make_lease(seconds, session)
        names = self.present(prefixes(chain)[start:])
        self.tier.lease([self.kept[name].block_id for name in names], lease)
        if seconds is None:
            names = [
                name
                for name in names
                if not self.references[self.kept[name].block_id]
                and self.segment[name] not in (_EXPECTED, _EXPECTED_COPY)
                and self.leases.get(name, lease).session == session
            ]
            for name in names:
                self.leases.pop(name, None)
        else:
            known = self.leases
            longer = [n for n in names if n not in known or known[n].until < lease.until]
            self.leases.update(dict.fromkeys(longer, lease))
            self.ends.append((lease.until, [self.kept[name].block_id for name in longer]))
        segment = _KEPT if seconds is not None else _RELEASED
        for name in reversed(names):
            if self.segment[name] in _COPIES:
                self.segment[name] = _AS_COPY[segment]
            else:
                self.move([name], segment)
        self.limit_kept()

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.now += seconds

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
    def all_expected(self) -> set[str]:
        return {name for names in self.expected for name in names}

    @property
    def num_empty(self) -> int:
        """Number of blocks without references and contents."""
        return self.num_blocks - len(
            {*(+self.references), *(b.block_id for b in self.kept.values())}
        )

    @property
    def num_copies(self) -> int:
        return sum(segment in _COPIES for segment in self.segment.values())

    @property
    def max_copies(self) -> int:
        if self.share_wanted < segments.FEW_WANTED:
            return self.num_blocks
        return self.copies_share if self.share_wanted < segments.MANY_WANTED else 0

    @property
    def copies_share(self) -> int:
        return int(_CONSTANTS["COPIES_SHARE"] * self.num_blocks)

    def names_at(self, ids: Iterable[int]) -> list[str]:
        """The names of the contents of those of these blocks that have any."""
        name_of = {each.block_id: name for name, each in self.kept.items()}
        return [name_of[block_id] for block_id in ids if block_id in name_of]

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
        used = [self.kept[name].block_id for name in moved]
        self.since.update(dict.fromkeys(used, self.num_evicted))
        queue = self.queues[_QUEUES[segment]]
        place = 0 if first else len(queue)
        queue[place:place] = [n for n in moved if not self.references[self.kept[n].block_id]]

    def become_expected(self, names: Sequence[str]) -> None:
        """Those that are not kept."""
        for name in names:
            if self.segment[name] in _COPIES - {_KEPT_COPY, _EXPECTED_COPY}:
                self.segment[name] = _EXPECTED_COPY
            elif self.segment[name] in (_PROBATION, _PROTECTED, _RELEASED):
                self.move([name], _EXPECTED, first=True)

    def become_found_copies(self, names: Sequence[str]) -> None:
        segments = {name: _AS_COPY[if_found(self.segment[name])] for name in names}
        self.move(names[::-1], _FOUND_COPY, first=True)
        self.segment.update(segments)

    def lose(self, lost: Sequence[str]) -> None:
        self.take(lost)
        for name in lost:
            del self.kept[name], self.segment[name]
            self.leases.pop(name, None)

    def end_leases(self) -> None:
        over: dict[str, None] = {}
        for until, ids in sorted(self.ends):
            for name in self.names_at(ids) if until <= self.now else ():
                if name in self.leases and self.leases[name].until == until:
                    over[name] = None
        self.ends = [(until, ids) for until, ids in self.ends if until > self.now]
        for name in reversed(over):
            del self.leases[name]
            if self.segment[name] == _KEPT_COPY:
                self.segment[name] = _FOUND_COPY
            else:
                self.move([name], _PROTECTED)
        self.limit_kept()

    def evict(self, count: int, limit: int, keep: Collection[str]) -> int:
        """Copies leave first, or those on probation, then whole queues, up to a block to keep.
        Copies to keep become the last instead, of the first few."""
        lost: list[str] = []
        others: list[str] = []
        order: tuple[tuple[int, Callable[[], int]], ...] = (
            (_RELEASED, lambda: count),
            (_COPY, lambda: self.num_copies - self.max_copies),
            (_PROTECTED, self.count_old),
            (_PROBATION, lambda: count),
            (_COPY, lambda: self.num_copies - self.copies_share),
            (_PROTECTED, lambda: count),
            (_KEPT, lambda: count),
            (_COPY, lambda: count),
            (_EXPECTED, lambda: count),
        )
        for segment, wanted in order:
            most = max(0, min(wanted(), count - len(lost)))
            queue = self.queues[_QUEUES[segment]]
            if segment == _COPY:
                left: list[str] = []
                for name in queue[: _CONSTANTS["_MOST_LOOKED_AT"] * limit]:
                    if len(left) == most:
                        break
                    if name in keep:
                        self.move([name], self.segment[name])
                    else:
                        left.append(name)
            else:
                left = list(takewhile(lambda name: name not in keep, queue[:most]))
                others += left
            self.lose(left)
            lost += left
        for name in others:
            self.ghosts.setdefault(name, self.num_evicted)
            self.num_evicted += 1
        oldest = self.num_evicted - max(self.num_copies, self.copies_share)
        self.end_ghosts([n for n, since in self.ghosts.items() if since < oldest], wanted=False)
        return len(lost)

    def end_ghosts(self, names: Sequence[str], *, wanted: bool) -> None:
        for name in names:
            del self.ghosts[name]
            self.share_wanted += (wanted - self.share_wanted) / _NUM_AVERAGED

    def count_old(self) -> int:
        """Protected blocks that are so much older than the first one on probation."""
        probation, protected, *_ = self.queues
        if not probation:
            return 0
        first, *ages = (
            self.num_evicted - self.since[self.kept[name].block_id]
            for name in (probation[0], *protected)
        )
        first += max(0, self.num_copies - self.copies_share)
        return len(list(takewhile(lambda age: age > _CONSTANTS["PROTECTED_AGE"] * first, ages)))

    def settle(self) -> None:
        while self.let_go:
            self.settle_oldest()
        self.let_go.append([*self.twins])
        self.twins.clear()

    def settle_oldest(self) -> None:
        """What the device has let go of, has not got again and has in no other block. If it has,
        the tier looks again when it settles next."""
        oldest = self.let_go.pop(0)
        again = {block_id for ids in self.let_go for block_id in ids}
        for name in self.names_at(each for each in dict.fromkeys(oldest) if each not in again):
            if self.segment[name] in _COPIES and name in self.on_device:
                self.twins[self.kept[name].block_id] = None
            elif self.segment[name] in _COPIES:
                self.move([name], _AS_OTHER[self.segment[name]])
        self.limit_kept()

    def limit_kept(self) -> None:
        kept = self.queues[_QUEUES[_KEPT]]
        for name in kept[: max(0, len(kept) - self.num_blocks // 4)]:
            del self.leases[name]
            self.move([name], _PROTECTED)

    # Invariants

    @invariant()
    def check_consistency(self) -> None:
        check_links(self.tier)
        check_tier(self.tier)

    @invariant()
    def check_queues(self) -> None:
        probation, protected, copies, *others = self.queues
        assert queues(self.tier) == [[""] * self.num_empty + probation, protected, copies]
        assert special(self.tier) == others
        kept_ids = {self.kept[name].block_id: lease for name, lease in self.leases.items()}
        ids = range(1, self.num_blocks + 1)
        assert {i: lease for i in ids if (lease := self.tier.lease_of(i))} == kept_ids
        assert segments_of(self.tier) == self.segment
        for name, kept in self.kept.items():
            segment = _AS_OTHER.get(self.segment[name], self.segment[name])
            was_found = segment in {_PROTECTED, _KEPT, _EXPECTED}
            assert self.tier.was_found(kept.block_id) == was_found
            unfound = self.tier.unfound(np.array([kept.block_id]))
            assert unfound == ([] if was_found else [key(name)])

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
        while self.expected:
            self.stop_expecting(0)
        check_tier(self.tier)
        assert self.tier.num_expected == 0
        assert self.tier.num_free == self.num_blocks
        assert len(self.tier.allocate(self.num_blocks)) == self.num_blocks
        check_tier(self.tier)
        for each in self.patches:
            each.stop()


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
