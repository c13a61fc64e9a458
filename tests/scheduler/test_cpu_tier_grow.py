"""CpuTier: the garbage collector is paused while the tier grows, and only then."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from simple_offload.scheduler.tier import block_pool
from tests.scheduler.tiers import make_tier

MANY = 20_000
"""Enough objects for many collections."""


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Restores the collector's state after each test."""
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


def count_collections(grow: Any) -> int:
    phases: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    try:
        grow()
    finally:
        gc.callbacks.remove(note)
    return phases.count("start")


def test_nothing_is_collected_while_blocks_are_made() -> None:
    tier = make_tier(2)
    gc.enable()
    assert count_collections(lambda: [[] for _ in range(MANY)]) > 1
    gc.collect()
    assert count_collections(lambda: tier.grow(MANY)) <= 1  # afterwards
    assert tier.num_blocks == MANY
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    tier = make_tier(2)
    gc.disable()
    tier.grow(MANY)
    assert not gc.isenabled()


def test_the_collector_is_on_again_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_tier(2)

    def no_memory(block_id: int) -> None:
        raise MemoryError

    monkeypatch.setattr(block_pool, "KVCacheBlock", no_memory)
    gc.enable()
    with pytest.raises(MemoryError):
        tier.grow(MANY)
    assert gc.isenabled()
    assert tier.num_blocks == 3
