"""CpuTier: blocks that come before their parent, which the device still has."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.run import Run
from tests.scheduler.tiers import (
    BLOCK_SIZE,
    allocate,
    block,
    commit_as,
    contents,
    hashes,
    key,
    leave,
    make_tier,
    names,
    parent_of,
)


def store_early(tier: CpuTier, *stored: str) -> None:
    """Store blocks, each with whatever of its chain is there."""
    for name in stored:
        filled = allocate(tier)
        assert filled is not None
        assert commit_early(tier, filled, name)
        tier.check_integrity()


def commit_early(tier: CpuTier, filled: KVCacheBlock, name: str) -> bool:
    num_tokens = len(name) * BLOCK_SIZE
    return commit_as(tier, filled, key(name), parent_of(name), num_tokens, early=True)


def test_it_is_kept() -> None:
    tier = make_tier(4)
    store_early(tier, "abc")
    assert contents(tier) == {"abc"}
    assert tier.lookup.hit(hashes("abc"), 0, 100).num_tokens == 0
    assert tier.lookup.hit(hashes("abc"), 2 * BLOCK_SIZE, 100).num_tokens == BLOCK_SIZE


@pytest.mark.proves("I9")
def test_a_chain_that_came_tail_first_leaves_tail_first() -> None:
    tier = make_tier(4)
    store_early(tier, "abcd", "abc", "ab", "a")
    assert leave(tier) == ["abcd", "abc", "ab", "a"]


def test_a_parent_that_comes_late_and_all_before_it_stay_as_long() -> None:
    """It would stand before its own parent, which is old."""
    tier = make_tier(6)
    store_early(tier, "a", "ab", "xy", "abcd", "x", "abc")
    assert leave(tier) == ["xy", "abcd", "x", "abc", "ab", "a"]


def test_a_chain_with_a_gap_is_found_up_to_it() -> None:
    tier = make_tier(8)
    store_early(tier, "a", "abcd", "abcde")
    for name in ("abcdef", "abcde", "abcd", "abc"):
        assert tier.lookup.hit(hashes(name), 0, 100).num_tokens == BLOCK_SIZE
    assert names(tier.lookup.lineage(hashes("abcdef"), 5 * BLOCK_SIZE)) == ["a", "abcd", "abcde"]


def test_what_is_there_already_is_not_committed_again_with_what_precedes_it() -> None:
    tier = make_tier(8)
    store_early(tier, "a", "abc")
    filled = tier.allocate(3)
    assert not tier.lookup.has_none([key("ab"), key("abc")])
    run = Run((), [key("ab"), key("abc"), key("abcd")], key("a"), 2 * BLOCK_SIZE, BLOCK_SIZE)
    assert tier.commit_all([(run, filled)]) == [[1]]
    tier.check_integrity()
    assert tier.lookup.hit(hashes("abcde"), 0, 100).num_tokens == 4 * BLOCK_SIZE


def test_what_is_no_part_of_a_chain_yet_is_evicted_as_all_else() -> None:
    tier = make_tier(2)
    store_early(tier, "abc", "x", "y")
    assert contents(tier) == {"x", "y"}
    store_early(tier, "ab")
    assert tier.order.early == {key("a"): {block(tier, "ab").block_id}}
    tier.reset()
    assert tier.order.early == {}


def test_what_precedes_a_hit_is_pinned_beyond_a_gap() -> None:
    tier = make_tier(6)
    store_early(tier, "abcd", "abc", "a")
    lineage = tier.lookup.lineage(hashes("abcd"), 3 * BLOCK_SIZE)
    assert [held.block_id for held in lineage] == [
        block(tier, name).block_id for name in ("a", "abc")
    ]


chains = st.text("ab", min_size=1, max_size=5)


def test_a_block_whose_parent_came_and_left_waits_for_it_again() -> None:
    """It was held meanwhile, by a load that knew of no parent."""
    tier = make_tier(2)
    store_early(tier, "ab")
    held = [block(tier, "ab")]
    tier.pin(held)
    store_early(tier, "a", "x")  # which displaces the parent
    assert contents(tier) == {"ab", "x"}
    tier.unpin(held)
    tier.check_integrity()
    store_early(tier, "a")  # displaces what was used least recently
    assert contents(tier) == {"a", "ab"}
    assert leave(tier) == ["ab", "a"]


def test_a_parent_that_comes_while_what_follows_it_is_held_stays_as_long() -> None:
    """More is protected than may be, so that the parent, which is free, goes back on probation."""
    tier = make_tier(6)
    store_early(tier, "abcd", "abc", "ab")
    held = [block(tier, name) for name in ("ab", "abc", "abcd")]
    tier.pin(held)
    tier.protect(held)
    store_early(tier, "a", "x")
    tier.unpin(held)
    tier.check_integrity()
    assert leave(tier) == ["x", "abcd", "abc", "ab", "a"]


class EarlyTier(RuleBasedStateMachine):
    """Blocks come in any order, and leave behind their children only."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = make_tier(7)
        self.filling: list[tuple[KVCacheBlock, str]] = []
        self.holds: list[list[KVCacheBlock]] = []

    @rule(name=chains)
    def begin_store(self, name: str) -> None:
        before = contents(self.tier)
        filled = allocate(self.tier)
        held = {each for hold in self.holds for each in names(hold)}
        for left in before - contents(self.tier):
            followers = {kept for kept in contents(self.tier) if kept[:-1] == left}
            assert followers <= held, f"{left} left first"
        if filled is not None:
            self.filling.append((filled, name))

    @precondition(lambda self: self.filling)
    @rule(ok=st.sampled_from([True, True, True, False]), data=st.data())
    def end_store(self, ok: bool, data: st.DataObject) -> None:
        filled, name = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        if ok:
            new = name not in contents(self.tier)
            assert commit_early(self.tier, filled, name) == new
        else:
            self.tier.unpin([filled])

    @rule(chain=chains, num_on_device=st.integers(0, 4), found=st.booleans())
    def pin(self, chain: str, num_on_device: int, found: bool) -> None:
        num_computed = min(num_on_device, len(chain)) * BLOCK_SIZE
        hit = self.tier.lookup.hit(hashes(chain), num_computed, 100)
        if hit.num_tokens:
            held = [*self.tier.lookup.lineage(hashes(chain), num_computed), *hit.blocks[0]]
            self.tier.pin(held)
            if found:
                self.tier.protect(held)
            self.holds.append(held)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.tier.unpin(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))))

    @rule(chain=chains)
    def refresh(self, chain: str) -> None:
        self.tier.refresh(hashes(chain), 0, len(chain))

    @rule(name=chains)
    def drop(self, name: str) -> None:
        before = contents(self.tier)
        if name not in before:
            return
        self.tier.drop([block(self.tier, name)])
        # Whatever follows it without a gap.
        lost = {each for each in before if each.startswith(name)}
        lost = {
            each for each in lost if before >= {each[:end] for end in range(len(name), len(each))}
        }
        assert contents(self.tier) == before - lost

    @invariant()
    def it_holds_together(self) -> None:
        self.tier.check_integrity()

    def teardown(self) -> None:
        for filled, _ in self.filling:
            self.tier.unpin([filled])
        for held in self.holds:
            self.tier.unpin(held)
        self.tier.check_integrity()
        leave(self.tier)
        assert not any(self.tier.order.parents)
        assert self.tier.order.early == {}


TestEarlyTier = EarlyTier.TestCase
TestEarlyTier.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
