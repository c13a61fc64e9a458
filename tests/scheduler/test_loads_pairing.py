"""Loads.plan pairs each device block that attention reads with a host block, or refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from simple_offload.metrics import Meter
from simple_offload.scheduler.loads import Loads
from simple_offload.scheduler.rank_reports import Ended, TransferLedger
from tests.scheduler.tiers import BLOCK_SIZE, block, blocks, hashes, make_tier, names, store
from tests.simulation.integrity import check_loads, groups_of, pool_of


class Bench:
    """Loads from a host tier of groups 0 (full attention) and 1 (a window of two blocks) that
    holds "abcd" into a device of its own."""

    def __init__(self) -> None:
        self.tier = make_tier(20, windows=(0, 8))
        store(self.tier, "abcd")
        store(self.tier, "abcd", group=1)
        self.pool = pool_of(make_tier(16))
        self.loads = Loads(self.tier, groups_of(self.tier), TransferLedger(1), Meter())

    def lookup(self, request: Any, num_computed_blocks: int = 0) -> int:
        """The number of blocks in the hit."""
        num_tokens = self.loads.lookup(request, num_computed_blocks * BLOCK_SIZE)
        return num_tokens // BLOCK_SIZE

    def tables(self, full: str, window: str) -> list[list[KVCacheBlock]]:
        """Block tables of both groups: "x" is a new block, "." the null block."""
        return [
            [
                self.pool.get_new_blocks(1)[0] if entry == "x" else self.pool.null_block
                for entry in table
            ]
            for table in (full, window)
        ]

    def plan(self, request: Any, tables: list[list[KVCacheBlock]], num_blocks: int) -> None:
        self.loads.plan(request, tables, num_blocks * BLOCK_SIZE, self.pool)

    def references(self) -> dict[int, list[int]]:
        """References of the blocks of "abcd", by group."""
        return {
            group: [held.ref_cnt for held in blocks(self.tier, "abcd", group)] for group in (0, 1)
        }


@pytest.fixture
def bench() -> Bench:
    return Bench()


def ask(chain: str) -> Any:
    """A request for a chain and one more token."""
    return SimpleNamespace(
        request_id=chain, block_hashes=hashes(chain), num_tokens=len(chain) * BLOCK_SIZE + 1
    )


def test_blocks_outside_the_window_are_not_loaded(bench: Bench) -> None:
    request = ask("abcd")
    assert bench.lookup(request) == 4
    tables = bench.tables("xxxx", "..xx")
    bench.plan(request, tables, 4)
    check_loads(bench.loads)
    (load,) = bench.loads.submit(lambda blocks: False)
    device = [held.block_id for held in (*tables[0], *tables[1][2:])]
    host = [*blocks(bench.tier, "abcd"), *blocks(bench.tier, "abcd", group=1)[2:]]
    assert load.device_blocks.tolist() == device
    assert load.host_blocks.tolist() == [held.block_id for held in host]
    assert bench.references() == {0: [1, 1, 1, 1], 1: [0, 0, 1, 1]}
    assert bench.pool.null_block.ref_cnt == 0
    assert (bench.loads.idle, bench.loads.is_loading("abcd")) == (False, True)
    assert bench.loads.on_ended(Ended(load.id, ok=True), bench.pool)
    assert bench.references() == {0: [0, 0, 0, 0], 1: [0, 0, 0, 0]}
    assert (bench.loads.idle, bench.loads.is_loading("abcd")) == (True, False)
    assert not bench.loads.on_ended(Ended(load.id, ok=True), bench.pool)


def test_the_device_prefix_is_not_loaded(bench: Bench) -> None:
    request = ask("abcd")
    assert bench.lookup(request, num_computed_blocks=3) == 1
    tables = bench.tables("xxxx", "..xx")
    bench.plan(request, tables, 1)
    (load,) = bench.loads.submit(lambda blocks: False)
    assert load.device_blocks.tolist() == [tables[0][3].block_id, tables[1][3].block_id]
    loaded = [pool_of(bench.tier).blocks[block_id] for block_id in load.host_blocks.tolist()]
    assert names(loaded[:1]) == names(loaded[1:], group=1) == ["abcd"]


def test_blocks_behind_the_hit_are_left_alone(bench: Bench) -> None:
    request = ask("abcdxy")
    assert bench.lookup(request) == 4
    tables = bench.tables("xxxxxx", "..xxxx")
    bench.plan(request, tables, 4)
    (load,) = bench.loads.submit(lambda blocks: False)
    assert len(load.device_blocks) == 6


def test_vllm_may_use_less_than_the_hit(bench: Bench) -> None:
    request = ask("abcd")
    assert bench.lookup(request) == 4
    tables = bench.tables("xxxx", ".xxx")
    bench.plan(request, tables, 3)
    (load,) = bench.loads.submit(lambda blocks: False)
    host = [*blocks(bench.tier, "abc"), *blocks(bench.tier, "abc", group=1)[1:]]
    assert load.host_blocks.tolist() == [held.block_id for held in host]
    assert all(held.ref_cnt > 0 for held in host)
    assert all(bench.tier._queue.is_protected[held.block_id] for held in host)
    bench.loads.on_ended(Ended(load.id, ok=True), bench.pool)
    assert bench.references() == {0: [0, 0, 0, 0], 1: [0, 0, 0, 0]}


def test_some_shorter_loads_are_impossible(bench: Bench) -> None:
    pool_of(bench.tier).evict_blocks({block(bench.tier, "ab", group=1).block_id})
    request = ask("abcd")
    assert bench.lookup(request) == 4
    with pytest.raises(RuntimeError, match="takes 12 external tokens of 16"):
        bench.plan(request, bench.tables("xxxx", ".xxx"), 3)


def test_a_load_longer_than_the_hit_is_impossible(bench: Bench) -> None:
    request = ask("abcdx")
    assert bench.lookup(request) == 4
    with pytest.raises(RuntimeError, match="takes 20 external tokens of 16"):
        bench.plan(request, bench.tables("xxxxx", "..xxx"), 5)


def test_a_load_without_a_lookup_is_refused(bench: Bench) -> None:
    with pytest.raises(RuntimeError, match="16 external tokens that no lookup offered"):
        bench.plan(ask("abcd"), bench.tables("xxxx", "..xx"), 4)
    request = ask("abcd")
    bench.lookup(request)
    bench.loads.unpin_hit("abcd")
    bench.loads.unpin_hit("abcd")
    with pytest.raises(RuntimeError, match="no lookup offered"):
        bench.plan(request, bench.tables("xxxx", "..xx"), 4)


def test_a_device_block_without_a_host_block_is_refused(bench: Bench) -> None:
    request = ask("abcd")
    bench.lookup(request)
    tables = bench.tables("xxxx", ".xxx")
    with pytest.raises(RuntimeError, match=f"device block {tables[1][1].block_id} within the hit"):
        bench.plan(request, tables, 4)


def test_a_table_shorter_than_the_hit_is_refused(bench: Bench) -> None:
    request = ask("abcd")
    bench.lookup(request)
    with pytest.raises(RuntimeError, match=r"group 0 has 3 device blocks .* the host tier 4"):
        bench.plan(request, bench.tables("xxx", "..xx"), 4)


def test_a_load_frees_device_blocks_without_other_references(bench: Bench) -> None:
    request = ask("abcd")
    bench.lookup(request)
    tables = bench.tables("xxxx", "..xx")
    bench.plan(request, tables, 4)
    bench.loads.submit(lambda blocks: False)
    bench.loads.admit(["abcd"], bench.pool)
    assert not bench.loads.frees_device_blocks()  # the request holds them
    bench.pool.free_blocks(tables[0][3:])
    assert bench.loads.frees_device_blocks()


@pytest.mark.proves("I2")
def test_blocks_that_may_leave_a_table_are_held_from_the_plan_on(bench: Bench) -> None:
    """A request that waits for a load keeps its blocks, except those outside its window."""
    request = ask("abcd")
    bench.lookup(request)
    tables = bench.tables("xxxx", "..xx")
    bench.plan(request, tables, 4)
    (load,) = bench.loads.submit(lambda blocks: False)
    bench.pool.free_blocks(tables[1][2:])
    assert [held.ref_cnt for held in (*tables[0], *tables[1][2:])] == [1] * 6
    assert bench.loads.frees_device_blocks()
    check_loads(bench.loads)
    bench.loads.on_ended(Ended(load.id, ok=True), bench.pool)
    assert [held.ref_cnt for held in (*tables[0], *tables[1][2:])] == [1] * 4 + [0] * 2


@pytest.mark.proves("I2")
@pytest.mark.parametrize("ends_first", [False, True])
def test_blocks_that_a_request_keeps_are_held_from_the_announcement_on(
    bench: Bench, ends_first: bool
) -> None:
    """vLLM frees an ended request's blocks when the load is reported, and not before."""
    request = ask("abcd")
    bench.lookup(request)
    tables = bench.tables("xxxx", "..xx")
    bench.plan(request, tables, 4)
    (load,) = bench.loads.submit(lambda blocks: False)
    if ends_first:
        bench.loads.on_request_finished("abcd")
    bench.loads.admit(["abcd"], bench.pool)
    bench.pool.free_blocks([*tables[0], *tables[1][2:]])
    assert [held.ref_cnt for held in (*tables[0], *tables[1][2:])] == [1] * 6
    assert bench.loads.frees_device_blocks()
    bench.loads.admit(["abcd"], bench.pool)  # a second call would hold nothing more
    check_loads(bench.loads)
    bench.loads.on_ended(Ended(load.id, ok=True), bench.pool)
    assert [held.ref_cnt for held in (*tables[0], *tables[1][2:])] == [0] * 6


def test_device_blocks_leave_tail_first_after_a_load(bench: Bench) -> None:
    request = ask("abcd")
    bench.lookup(request)
    tables = bench.tables("xxxx", "....")
    bench.pool.get_new_blocks(bench.pool.get_num_free_blocks())
    bench.plan(request, tables, 4)
    (load,) = bench.loads.submit(lambda blocks: False)
    bench.loads.admit(["abcd"], bench.pool)
    bench.pool.free_blocks(tables[0])
    for held, key in zip(tables[0], blocks(bench.tier, "abcd"), strict=True):
        assert key.block_hash is not None
        bench.pool._insert_block_hash(key.block_hash, held, num_tokens=0)
    bench.loads.on_ended(Ended(load.id, ok=True), bench.pool)
    assert bench.pool.free_block_queue.get_all_free_blocks() == tables[0][::-1]


def test_check_loads_raises(bench: Bench) -> None:
    request = ask("abcd")
    bench.lookup(request)
    check_loads(bench.loads)
    first = block(bench.tier, "a")
    first.ref_cnt = 0
    with pytest.raises(AssertionError, match="pinned hit is free"):
        check_loads(bench.loads)
    first.ref_cnt = 1
    tables = bench.tables("xxxx", "..xx")
    bench.plan(request, tables, 4)
    for submitted in (False, True):
        if submitted:
            bench.loads.submit(lambda blocks: False)
        for held in (first, tables[1][3]):
            count, held.ref_cnt = held.ref_cnt, 0
            with pytest.raises(AssertionError, match="abcd: block is free"):
                check_loads(bench.loads)
            held.ref_cnt = count
        check_loads(bench.loads)
