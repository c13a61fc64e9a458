"""Sources: a device block is what its own hash says, wherever it lies."""

from dataclasses import dataclass

import pytest
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

from simple_offload.scheduler.policies.request_walk import Sources
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, prompt

NUM_BLOCKS = 6
"""Device blocks of the request's prompt."""


@dataclass
class Bench:
    """A request whose prompt has been computed."""

    driver: Driver
    request: Request

    def __post_init__(self) -> None:
        manager = self.driver.world.scheduler.kv_cache_manager
        (tables,) = manager.coordinator.single_type_managers
        self.sources = Sources(self.driver.tier.groups, manager)
        self.table: list[KVCacheBlock] = tables.req_to_blocks["a"][:NUM_BLOCKS]

    def matching(self, first: int = 0) -> list[BlockHashWithGroupId]:
        parts = self.table[first * self.driver.tier.groups.num_parts :]
        return self.sources.matching(self.request.block_hashes, 0, first, parts)

    @property
    def keys(self) -> list[BlockHashWithGroupId]:
        """Of the host blocks of the prompt."""
        num_host_blocks = NUM_BLOCKS // self.driver.tier.groups.num_parts
        return self.driver.tier.groups.keys(self.request.block_hashes, 0, stop=num_host_blocks)


@pytest.fixture(params=[1, 2], ids=lambda num_parts: f"{num_parts} parts")
def bench(drive: MakeDriver, request: pytest.FixtureRequest) -> Bench:
    driver = drive(num_parts=request.param)
    asking = driver.start("a", prompt(NUM_BLOCKS * 4 + 1), max_tokens=4)
    driver.step(2)
    return Bench(driver, asking)


def test_blocks_that_hold_what_they_should_match(bench: Bench) -> None:
    assert bench.matching() == bench.keys
    assert bench.matching(first=1) == bench.keys[1:]
    # The device's own keys: to look those up again takes no comparison.
    num_parts = bench.driver.tier.groups.num_parts
    last_parts = bench.table[num_parts - 1 :: num_parts]
    assert all(
        key is block.block_hash for key, block in zip(bench.matching(), last_parts, strict=True)
    )


@pytest.mark.parametrize("place", range(NUM_BLOCKS))
def test_a_block_without_a_hash_ends_them(bench: Bench, place: int) -> None:
    bench.table[place] = KVCacheBlock(bench.table[place].block_id)
    assert bench.matching() == bench.keys[: place // bench.driver.tier.groups.num_parts]


@pytest.mark.parametrize("place", range(NUM_BLOCKS))
def test_a_block_with_another_hash_ends_them(bench: Bench, place: int) -> None:
    """Of other tokens, or of the same ones in another group."""
    own = bench.table[place]
    assert own.block_hash is not None
    in_other_group = make_block_hash_with_group_id(get_block_hash(own.block_hash), 1)
    for other in (bench.table[place - 1].block_hash, in_other_group):
        bench.table[place] = KVCacheBlock(own.block_id, _block_hash=other)
        assert bench.matching() == bench.keys[: place // bench.driver.tier.groups.num_parts]


def test_no_block_matches_without_a_hash(bench: Bench) -> None:
    bench.table = [KVCacheBlock(block.block_id) for block in bench.table]
    assert bench.matching() == []
