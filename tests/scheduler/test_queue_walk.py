"""QueueWalk: what the tier lacks of what stands at the front of the device's queue is stored."""

import pytest

from simple_offload.scheduler.policies.admission import Admission
from simple_offload.scheduler.policies.device_contents import Residents
from simple_offload.scheduler.policies.free_queue_walk import QueueWalk, StepLimits
from simple_offload.scheduler.rank_reports import InFlight
from simple_offload.scheduler.stores import Stores
from simple_offload.scheduler.tier.run import Run
from tests.scheduler.tiers import BLOCK_SIZE, allocate, key, make_tier, names, parent_of, prefixes

LIMITS = StepLimits(per_step=2, num_steps=2, longest=2, reserve=0)


class Bench:
    """A tier, and a device whose free queue has the blocks of a chain, tail first, and then
    some that hold nothing. One is ``spare``."""

    def __init__(self, chain: str) -> None:
        self.tier = make_tier(20)
        self.device = make_tier(20).pool
        self.stores = Stores(self.tier, InFlight(1))
        residents = Residents(self.stores, Admission(1), self.device)
        self.walk = QueueWalk(self.tier, self.stores, residents, LIMITS, self.device)
        blocks = self.device.get_new_blocks(len(chain))
        for block, name in zip(blocks, prefixes(chain), strict=True):
            self.device._insert_block_hash(key(name), block, len(name) * BLOCK_SIZE)
        residents.record(blocks, [key(name) for name in prefixes(chain)], None)
        (self.spare,) = self.device.get_new_blocks(1)
        empty = self.device.get_new_blocks(self.device.get_num_free_blocks())
        self.device.free_blocks(reversed(blocks))
        self.device.free_block_queue.append_n(empty)
        for block in empty:
            block.ref_cnt = 0

    def bring(self, name: str) -> None:
        """Commit a block to the tier."""
        filled = allocate(self.tier)
        assert filled is not None
        run = Run((), (key(name),), parent_of(name), len(name) * BLOCK_SIZE, early=True)
        assert self.tier.commit_all([(run, [filled])]) == [[]]

    @property
    def stored(self) -> list[str]:
        """What the planned stores copy."""
        return names(self.stores._planned.device_blocks)


def test_what_the_tier_lacks_is_stored_head_first() -> None:
    bench = Bench("abcd")
    bench.walk.go_on()
    assert bench.stored == ["a", "ab", "abc", "abcd"]


@pytest.mark.parametrize("there", ["", "a", "ab", "abc", "abcd"])
def test_what_it_has_is_not(there: str) -> None:
    bench = Bench("abcd")
    for name in prefixes(there):
        bench.bring(name)
    bench.walk.go_on()
    assert bench.stored == prefixes("abcd")[len(there) :]


def test_what_precedes_a_block_that_came_early_is() -> None:
    bench = Bench("abcd")
    bench.bring("abcd")
    bench.walk.go_on()
    assert bench.stored == ["a", "ab", "abc"]


def test_what_precedes_a_block_that_is_on_its_way_is() -> None:
    """Another block of the device holds the same, and is being copied."""
    bench = Bench("abcd")
    run = Run([bench.spare], [key("abcd")], key("abc"), 4 * BLOCK_SIZE, early=True)
    bench.stores.plan_run(run, frozenset, bench.device)
    bench.walk.go_on()
    assert bench.stored == ["", "a", "ab", "abc"]
