"""CpuTier: blocks committed before their parent, which only the device has."""

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
    hold,
    key,
    leave,
    make_tier,
    names,
    parent_of,
    protect,
    refresh,
)
from tests.simulation.integrity import check_tier


def store_early(tier: CpuTier, *stored: str) -> None:
    """Store blocks, with or without their parents in the tier."""
    for name in stored:
        filled = allocate(tier)
        assert filled is not None
        assert commit_early(tier, filled, name)
        check_tier(tier)


def commit_early(tier: CpuTier, filled: KVCacheBlock, name: str) -> bool:
    num_tokens = len(name) * BLOCK_SIZE
    return commit_as(tier, filled, key(name), parent_of(name), num_tokens, early=True)


def test_an_early_block_is_kept() -> None:
    tier = make_tier(4)
    store_early(tier, "abc")
    assert contents(tier) == {"abc"}
    assert tier.lookup(hashes("abc"), 0, 100).num_tokens == 0
    assert tier.lookup(hashes("abc"), 2 * BLOCK_SIZE, 100).num_tokens == BLOCK_SIZE


@pytest.mark.proves("I9")
def test_a_chain_stored_tail_first_leaves_tail_first() -> None:
    tier = make_tier(4)
    store_early(tier, "abcd", "abc", "ab", "a")
    assert leave(tier) == ["abcd", "abc", "ab", "a"]


def test_a_parent_stored_late_stays_as_long_as_its_ancestors() -> None:
    """Otherwise it would stand before its own parent, which is old."""
    tier = make_tier(6)
    store_early(tier, "a", "ab", "xy", "abcd", "x", "abc")
    assert leave(tier) == ["xy", "abcd", "x", "abc", "ab", "a"]


def test_a_chain_with_a_gap_is_found_up_to_it() -> None:
    tier = make_tier(8)
    store_early(tier, "a", "abcd", "abcde")
    for name in ("abcdef", "abcde", "abcd", "abc"):
        assert tier.lookup(hashes(name), 0, 100).num_tokens == BLOCK_SIZE
    hit = tier.lookup(hashes("abcde"), 4 * BLOCK_SIZE, 100)
    assert names(hit.pins) == ["a", "abcd", "abcde"]


def test_a_run_is_committed_without_the_blocks_in_the_tier() -> None:
    tier = make_tier(8)
    store_early(tier, "a", "abc")
    filled = tier.allocate(3)
    assert not tier.has_none([key("ab"), key("abc")])
    run = Run((), [key("ab"), key("abc"), key("abcd")], key("a"), 2 * BLOCK_SIZE, BLOCK_SIZE)
    run.host_blocks = filled
    assert tier.commit([run]) == [[1]]
    check_tier(tier)
    assert tier.lookup(hashes("abcde"), 0, 100).num_tokens == 4 * BLOCK_SIZE


def test_a_block_without_its_parent_is_evicted_like_others() -> None:
    tier = make_tier(2)
    store_early(tier, "abc", "x", "y")
    assert contents(tier) == {"x", "y"}
    store_early(tier, "ab")
    assert tier._order.early == {key("a"): {block(tier, "ab").block_id}}
    tier.reset()
    assert tier._order.early == {}


chains = st.text("ab", min_size=1, max_size=5)


def test_a_block_whose_parent_was_stored_and_evicted_is_early_again() -> None:
    """A load pinned it meanwhile, without its parent."""
    tier = make_tier(2)
    store_early(tier, "ab")
    held = [block(tier, "ab")]
    hold(tier, held)
    store_early(tier, "a", "x")  # "x" evicts the parent
    assert contents(tier) == {"ab", "x"}
    tier.unpin(held)
    check_tier(tier)
    store_early(tier, "a")  # evicts "x", the least recently used
    assert contents(tier) == {"a", "ab"}
    assert leave(tier) == ["ab", "a"]


def test_a_parent_stored_while_its_child_is_pinned_stays_as_long() -> None:
    """More blocks are protected than the limit, so the parent, which is free, returns to
    probation."""
    tier = make_tier(6)
    store_early(tier, "abcd", "abc", "ab")
    held = [block(tier, name) for name in ("ab", "abc", "abcd")]
    hold(tier, held)
    protect(tier, held)
    store_early(tier, "a", "x")
    tier.unpin(held)
    check_tier(tier)
    assert leave(tier) == ["x", "abcd", "abc", "ab", "a"]


class EarlyTier(RuleBasedStateMachine):
    """Blocks are stored in any order. None leaves before its children."""

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
            children = {kept for kept in contents(self.tier) if kept[:-1] == left}
            assert children <= held, f"{left} left first"
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
        hit = self.tier.lookup(hashes(chain), num_computed, 100)
        if hit.num_tokens:
            held = hit.pins
            hold(self.tier, held)
            if found:
                protect(self.tier, held)
            self.holds.append(held)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.tier.unpin(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))))

    @rule(chain=chains)
    def refresh(self, chain: str) -> None:
        refresh(self.tier, hashes(chain), 0, len(chain))

    @rule(name=chains)
    def drop(self, name: str) -> None:
        before = contents(self.tier)
        if name not in before:
            return
        self.tier.drop([block(self.tier, name)])
        # Its descendants up to a gap.
        lost = {each for each in before if each.startswith(name)}
        lost = {
            each for each in lost if before >= {each[:end] for end in range(len(name), len(each))}
        }
        assert contents(self.tier) == before - lost

    @invariant()
    def check_consistency(self) -> None:
        check_tier(self.tier)

    def teardown(self) -> None:
        for filled, _ in self.filling:
            self.tier.unpin([filled])
        for held in self.holds:
            self.tier.unpin(held)
        check_tier(self.tier)
        leave(self.tier)
        assert not any(self.tier._order.parents)
        assert self.tier._order.early == {}


TestEarlyTier = EarlyTier.TestCase
TestEarlyTier.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
