"""The order of eviction, compared with a plain model: two lists of names and a set."""

from collections import Counter
from collections.abc import Collection
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from simple_offload.scheduler.tier import segmented_lru as segments
from tests.scheduler.tiers import (
    allocate,
    block,
    blocks,
    commit,
    contents,
    get,
    hashes,
    hold,
    key,
    make_tier,
    names,
    prefixes,
    protect,
    protect_first,
    refresh,
)
from tests.simulation.integrity import check_tier, pool_of

_NUM_BLOCKS = 9
_MOST_BLOCKS = 14
_EVICTIONS_PER_RETURN = 3
chains = st.text("ab", min_size=1, max_size=6)


class Order(RuleBasedStateMachine):
    """A tier as the scheduler side uses it, except that stores end at once."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = patch.object(segments, "EVICTIONS_PER_RETURN", _EVICTIONS_PER_RETURN)
        self.patch.start()
        self.tier = make_tier(_NUM_BLOCKS)
        self.num_blocks = _NUM_BLOCKS
        self.probation: list[str] = []
        """Free blocks, the next to leave first."""
        self.protected: list[str] = []
        self.found: set[str] = set()
        """Names of the protected blocks, held or free."""
        self.pins: Counter[str] = Counter()
        self.holds: list[list[str]] = []
        self.num_evicted = 0

    # What happens to a tier

    @rule(chain=chains)
    def store(self, chain: str) -> None:
        """Store the first block of a chain that is not in the tier."""
        lacking = [name for name in prefixes(chain) if name not in contents(self.tier)]
        if not lacking:
            return
        name, parent = lacking[0], lacking[0][:-1]
        front = [*self.probation, *self.protected][:1]
        has_room = len(contents(self.tier)) < self.num_blocks or front not in ([], [parent])
        evicts = has_room and len(contents(self.tier)) == self.num_blocks
        allocated = allocate(self.tier, parent)
        assert (allocated is not None) == has_room
        if allocated is None:
            return
        if evicts:
            self.evict()
        assert commit(self.tier, allocated, name)
        place = len(self.probation)
        if parent in self.probation:
            place = self.probation.index(parent)
        self.probation.insert(place, name)

    @rule(chain=chains)
    def find(self, chain: str) -> None:
        """Find the blocks of a chain that are in the tier, and hold them."""
        present = self.present(chain)
        held = blocks(self.tier, "".join(present[-1:]))
        hold(self.tier, held)
        protect(self.tier, held)
        self.holds.append(present)
        self.remove(present)
        self.pins.update(present)
        self.found.update(present)

    @precondition(lambda self: self.holds)
    @rule(index=st.integers(0, 99))
    def unpin(self, index: int) -> None:
        present = self.holds.pop(index % len(self.holds))
        self.tier.unpin(blocks(self.tier, "".join(present[-1:])))
        self.pins -= Counter(present)
        self.protected += [name for name in reversed(present) if not self.pins[name]]
        self.keep_limit()

    @rule(chain=chains, num_found=st.integers(0, 6))
    def refresh(self, chain: str, num_found: int) -> None:
        present = self.present(chain)
        num_found = min(num_found, len(present))
        protects = not self.found.issuperset(present[:num_found])
        refresh(self.tier, hashes(chain), 0, len(chain))
        protect_first(self.tier, hashes(chain), 0, num_found)
        free = [name for name in reversed(present) if not self.pins[name]]
        self.remove(present)
        self.found.update(present[:num_found])
        self.probation += [name for name in free if name not in self.found]
        self.protected += [name for name in free if name in self.found]
        if protects:
            self.keep_limit()

    @rule(name=chains)
    def drop(self, name: str) -> None:
        """Drop as after a failed load. References to the blocks remain, without effect."""
        lost = {kept for kept in contents(self.tier) if kept.startswith(name)}
        if name in lost and not any(self.pins[each] for each in lost):
            self.tier.drop([block(self.tier, name)])
            self.remove(lost)
            self.found -= lost

    @rule(more=st.integers(0, 2))
    def grow(self, more: int) -> None:
        self.num_blocks = min(self.num_blocks + more, _MOST_BLOCKS)
        self.tier.grow(self.num_blocks + 1)  # with the null block

    @precondition(lambda self: not self.holds)
    @rule()
    def reset(self) -> None:
        self.tier.reset()
        self.probation, self.protected, self.found = [], [], set()

    # The model

    def present(self, chain: str) -> list[str]:
        return [name for name in prefixes(chain) if name in contents(self.tier)]

    def remove(self, gone: Collection[str]) -> None:
        self.probation = [name for name in self.probation if name not in gone]
        self.protected = [name for name in self.protected if name not in gone]

    def evict(self) -> None:
        self.num_evicted += 1
        if self.num_evicted % _EVICTIONS_PER_RETURN == 0:
            self.give_back()
        gone = (self.probation or self.protected).pop(0)
        self.found.discard(gone)

    def keep_limit(self) -> None:
        while len(self.found) > self.num_blocks // 2 and self.protected:
            self.give_back()

    def give_back(self) -> None:
        if self.protected:
            self.probation.append(self.protected.pop(0))
            self.found.discard(self.probation[-1])

    # Invariants

    @invariant()
    def check_consistency(self) -> None:
        check_tier(self.tier)

    @invariant()
    def check_queue(self) -> None:
        free = names(pool_of(self.tier).free_block_queue.get_all_free_blocks())
        num_empty = self.num_blocks - len(contents(self.tier))
        assert free == [""] * num_empty + self.probation + self.protected

    @invariant()
    def check_protected(self) -> None:
        is_protected = self.tier._queue.is_protected
        assert self.found == {
            name for name in contents(self.tier) if is_protected[block(self.tier, name).block_id]
        }
        assert all(get(self.tier, key(name)) is not None for name in self.found)

    def teardown(self) -> None:
        self.patch.stop()


TestOrder = Order.TestCase
TestOrder.settings = settings(max_examples=100, stateful_step_count=40)
