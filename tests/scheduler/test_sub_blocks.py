"""Host blocks of several sub-blocks: stored as a whole, loaded from any sub-block to any other."""

from typing import Any, NamedTuple

import pytest
import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from simple_offload.config import ConfigError
from simple_offload.metadata import RankCapacity, Transfer
from simple_offload.scheduler.rank_reports import Ended
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, make_request, prompt
from tests.scheduler.test_manager import make_scheduler
from tests.scheduler.tiers import commit_as, get, make_tier
from tests.simulation.groups import MODELS
from tests.simulation.integrity import check_loads, check_tier, groups_of, pool_of

# Location of the sub-blocks


class Layout(NamedTuple):
    """The groups of a model, and the number of device blocks in a host block."""

    groups: tuple[AttentionSpec, ...]
    num_sub_blocks: int

    @property
    def block_size(self) -> int:
        """Tokens of the scheduler's block."""
        return max(spec.block_size for spec in self.groups)


def spec(kind: Any, block_size: int, **kind_has: int) -> Any:
    return kind(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, **kind_has)


def full(block_size: int = 4) -> Any:
    return spec(FullAttentionSpec, block_size)


def window(size: int, block_size: int = 4) -> Any:
    return spec(SlidingWindowSpec, block_size, sliding_window=size)


def chunked(size: int) -> Any:
    return spec(ChunkedLocalAttentionSpec, 4, attention_chunk_size=size)


GROUPS = {
    "full": (full(),),
    "window": (window(10),),
    "full and window": (full(), window(6)),
    "full and chunks": (full(), chunked(8)),
    "full and long chunks": (full(), chunked(32)),
    "full and chunks of three sub-blocks": (full(), chunked(12)),
    "blocks of two sizes": (full(4), full(8)),
    "large blocks and a window": (full(8), window(6, block_size=4)),
    "a window of large blocks": (full(4), window(10, block_size=8)),
}
NUM_TOKENS = 64


class Bench:
    """A scheduler side with its own device. Its tier has all host blocks of a prompt."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        groups = [KVCacheGroupSpec([f"{i}"], group) for i, group in enumerate(layout.groups)]
        config = KVCacheConfig(num_blocks=99, kv_cache_tensors=[], kv_cache_groups=groups)
        size = layout.block_size * layout.num_sub_blocks
        self.scheduler = make_scheduler(config, num_cpu_blocks=400, cpu_block_size=size)
        self.scheduler.agree_on_capacity([RankCapacity("r", 400, 400, 64)])
        self.tier = self.scheduler.tier
        self.hash_size = groups_of(self.tier).hash_block_size
        self.slots: list[dict[int, int]] = []
        """By group and first token, the slot of a device block in the tier."""
        self.fill()
        self.pool = pool_of(make_tier(90))

    def fill(self) -> None:
        request = self.request(NUM_TOKENS)
        num_sub_blocks = self.layout.num_sub_blocks
        for group, device_spec in enumerate(self.layout.groups):
            size = device_spec.block_size
            parent, slots = None, {}
            for end in range(size * num_sub_blocks, NUM_TOKENS + 1, size * num_sub_blocks):
                (block,) = self.tier.allocate(1)
                key = groups_of(self.tier).key_at(request.block_hashes, group, end)
                commit_as(self.tier, block, key, parent, num_tokens=end)
                parent = key
                for place in range(num_sub_blocks):
                    begin = end - size * (num_sub_blocks - place)
                    slots[begin] = block.block_id * num_sub_blocks + place
            self.slots.append(slots)
        check_tier(self.tier)

    def request(self, num_tokens: int) -> Request:
        return make_request("a", prompt(num_tokens), hash_size=self.hash_size)

    def tables(self, num_tokens: int) -> list[list[KVCacheBlock]]:
        """The block tables of ``num_tokens`` tokens; null blocks where attention does not read."""
        tables = []
        for group, device_spec in enumerate(self.layout.groups):
            size = device_spec.block_size
            num_skipped = groups_of(self.tier).num_unread_tokens(num_tokens, group) // size
            new = self.pool.get_new_blocks(-(-num_tokens // size) - num_skipped)
            tables.append([self.pool.null_block] * num_skipped + new)
        return tables


ALL_GROUPS = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)


@pytest.mark.parametrize("num_sub_blocks", [1, 2, 3, 4])
@ALL_GROUPS
def test_each_device_block_is_loaded_from_its_own_sub_block(
    groups: tuple[AttentionSpec, ...], num_sub_blocks: int
) -> None:
    """For any end of the device's prefix, and any end of the request."""
    layout = Layout(groups, num_sub_blocks)
    block_size = layout.block_size
    host_block_size = block_size * num_sub_blocks
    chunk_sizes = [
        group.attention_chunk_size
        for group in groups
        if isinstance(group, ChunkedLocalAttentionSpec)
    ]
    if any(size % host_block_size and host_block_size % size for size in chunk_sizes):
        with pytest.raises(ConfigError, match="attention_chunk_size"):
            Bench(layout)
        return
    bench = Bench(layout)
    num_loads = 0
    for num_tokens in range(1, NUM_TOKENS + 1, 1 if len(groups) == 1 else 3):
        # The hit ends with the last complete host block, and before the request's last token.
        known = num_tokens // host_block_size * host_block_size
        end = min(num_tokens - 1, known) // block_size * block_size
        for num_computed in range(0, num_tokens, block_size):
            request = bench.request(num_tokens)
            start = num_computed // host_block_size * host_block_size
            offered, _ = bench.scheduler.get_num_new_matched_tokens(request, num_computed)
            can_start = all(start % size == 0 for size in chunk_sizes)
            assert offered == (max(0, end - num_computed) if can_start else 0)
            if not offered:
                continue
            tables = bench.tables(num_computed + offered)
            bench.scheduler._loads.plan(request, tables, offered, bench.pool)
            (load,) = bench.scheduler._loads.submit(lambda blocks: False)
            expected = [
                (block.block_id, slots[index * device_spec.block_size])
                for table, slots, device_spec in zip(tables, bench.slots, groups, strict=True)
                for index, block in enumerate(table)
                if index * device_spec.block_size >= num_computed and not block.is_null
            ]
            assert pairs(load) == expected
            check_tier(bench.tier)
            check_loads(bench.scheduler._loads)
            assert bench.scheduler._loads.on_ended(Ended(load.id, ok=True), bench.pool)
            bench.pool.free_blocks([b for table in tables for b in table if not b.is_null])
            num_loads += 1
    assert num_loads > 5
    assert bench.tier.num_free == bench.tier.num_blocks - 1


def pairs(transfer: Transfer) -> list[tuple[int, int]]:
    device, host = transfer.device_blocks.tolist(), transfer.host_blocks.tolist()
    return list(zip(device, host, strict=True))


def test_the_slots_of_blocks_are_neighbours(drive: MakeDriver) -> None:
    tier = drive(num_sub_blocks=4).tier
    first, second = tier.allocate(2)
    assert tier.slots([second, first]) == [8, 9, 10, 11, 4, 5, 6, 7]
    assert tier.blocks_at([11, 4, 9, 5]) == [second, first]
    tier.unpin([first, second])
    plain = drive().tier
    (block,) = plain.allocate(1)
    assert plain.slots([block]) == [block.block_id] == [1]
    assert plain.blocks_at([1]) == [block]
    plain.unpin([block])


def test_only_host_blocks_that_are_open_as_a_whole_are_used(drive: MakeDriver) -> None:
    """Slots 0 to 3 belong to the null block, and the last 2 to no block."""
    driver = drive(num_sub_blocks=4, num_host_blocks=14)
    assert driver.tier.num_blocks == 3
    driver.serve("a", prompt(60))
    assert (driver.num_kept, driver.found(prompt(60))) == (2, 32)
    driver.empty_device_cache()
    driver.start("b", prompt(60))
    driver.step()
    (load,) = driver.pending(LOAD)
    assert load.host_blocks.tolist() == list(range(4, 12))
    driver.run()


# Stores


def test_single_sub_blocks_are_not_stored(drive: MakeDriver) -> None:
    """They wait until the conversation has filled the host block."""
    driver = drive(num_sub_blocks=4, num_device_blocks=60)
    history = driver.serve("a", prompt(17), max_tokens=14)  # 30 tokens computed
    assert (driver.num_stored, driver.found(history)) == (4, 16)
    history = driver.serve("b", [*history, *prompt(2, family=1)])
    assert (driver.num_stored, driver.found([*history, 1])) == (8, 32)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_no_host_block_is_stored_before_its_last_sub_block_is_computed(
    drive: MakeDriver, async_scheduling: bool
) -> None:
    driver = drive(num_sub_blocks=2, async_scheduling=async_scheduling, max_num_batched_tokens=6)
    request = driver.start("a", prompt(50), max_tokens=5)
    for _ in range(9):
        before = request.num_computed_tokens - request.num_output_placeholders
        driver.step()
        driver.copy_all()
        assert driver.num_stored // 2 > before // 8 - 4
        assert driver.num_stored // 2 <= (request.num_tokens - 1) // 8
    assert driver.num_stored >= 8
    driver.run()


def test_host_blocks_are_stored_eight_device_blocks_at_a_time(drive: MakeDriver) -> None:
    driver = drive(num_sub_blocks=2)
    driver.start("a", prompt(9), max_tokens=66)
    driver.step(24)
    assert driver.num_stored == 0
    driver.step()
    assert driver.num_stored == 8
    driver.copy_all()
    driver.run()


def test_a_host_block_that_lacks_a_sub_block_is_not_stored(drive: MakeDriver) -> None:
    """The window has left the block, and the device has allocated it to another request."""
    driver = drive(
        num_sub_blocks=4,
        windows=(0, 4),
        num_device_blocks=120,
        max_num_batched_tokens=4,
        retention=None,
    )
    request = driver.start("a", prompt(33), max_tokens=3)
    table = driver.world.scheduler.kv_cache_manager.coordinator.single_type_managers[1]
    while request.num_computed_tokens < 12:
        driver.step()
    assert table.req_to_blocks["a"][0].is_null
    lost = driver.device_pool.get_cached_block(request.block_hashes[0], [1])
    assert lost is not None
    driver.device_pool.evict_blocks({lost[0].block_id})
    driver.run()
    groups = driver.scheduler.groups
    full_keys, window_keys = (groups.keys(request.block_hashes, group) for group in (0, 1))
    assert [get(driver.tier, key) is not None for key in full_keys] == [True, True]
    assert [get(driver.tier, key) is not None for key in window_keys] == [False, True]


@pytest.mark.proves("I2")
def test_a_store_holds_all_sub_blocks_until_its_end(drive: MakeDriver) -> None:
    driver = drive(num_sub_blocks=4)
    driver.start("a", prompt(17))
    while not driver.pending(STORE):
        driver.step()
    (store,) = driver.pending(STORE)
    assert len(store.device_blocks) == 4
    assert driver.num_held == (4, 1)
    assert driver.scheduler.has_pending_block_frees()
    driver.copy(STORE)
    driver.step()
    assert driver.num_held == (0, 0)
    assert driver.found(prompt(17)) == 16
    # The tail of a prefix is the first to be evicted from the device.
    free = [block.block_id for block in driver.device_pool.free_block_queue.get_all_free_blocks()]
    assert free[-4:] == store.device_blocks.tolist()[::-1]


# Loads


def test_a_load_begins_where_the_device_stops(drive: MakeDriver) -> None:
    driver = drive(num_sub_blocks=4, num_device_blocks=60)
    driver.serve("before", prompt(40))
    driver.empty_device_cache()
    driver.serve("short", prompt(23))  # loads a host block, computes a block and a bit
    driver.start("long", prompt(40))
    driver.step()
    (load,) = driver.pending(LOAD)
    (_, second) = driver.tier.blocks_at(range(4, 12))
    assert load.host_blocks.tolist() == driver.tier.slots([second])[1:]
    driver.run()
    assert driver.world.finished["long"] == driver.world.finished["before"]


@pytest.mark.parametrize("num_sub_blocks", [2, 4, 8])
@pytest.mark.parametrize("windows", [(0,), (0, 6), (9,)], ids=str)
def test_a_repeated_prompt_loses_one_device_block(
    drive: MakeDriver, windows: tuple[int, ...], num_sub_blocks: int
) -> None:
    """Its last token is computed again, with the whole block of that token."""
    driver = drive(
        num_sub_blocks=num_sub_blocks,
        windows=windows,
        num_device_blocks=120,
        num_host_blocks=120,
        retention=None,
    )
    driver.serve("before", prompt(32))
    driver.empty_device_cache()
    request = driver.start("again", prompt(32))
    driver.step()
    assert request.num_computed_tokens == 28
    driver.run()
    assert driver.world.finished["again"] == driver.world.finished["before"]


@pytest.mark.parametrize("windows", [(0,), (0, 8), (8,)], ids=str)
def test_a_drafter_costs_one_device_block(drive: MakeDriver, windows: tuple[int, ...]) -> None:
    driver = drive(
        num_sub_blocks=4,
        windows=windows,
        draft=True,
        num_device_blocks=120,
        num_host_blocks=200,
        retention=None,
    )
    driver.serve("before", prompt(36))
    driver.empty_device_cache()
    assert driver.found(prompt(36)) == 28
    request = driver.start("again", [*prompt(36), *prompt(3, family=2)])
    driver.step()
    assert request.num_computed_tokens == 28
    driver.run()


@pytest.mark.parametrize("num_sub_blocks", [2, 4])
@pytest.mark.parametrize("model", [m for m in MODELS.values() if not m.get("num_states")], ids=str)
def test_a_host_hit_is_as_long_as_its_whole_host_blocks_allow(
    drive: MakeDriver, model: dict[str, Any], num_sub_blocks: int
) -> None:
    driver = drive(
        num_device_blocks=200,
        num_host_blocks=400,
        num_sub_blocks=num_sub_blocks,
        retention=None,
        **model,
    )
    tokens = driver.serve("a", prompt(35), max_tokens=12)
    coordinator = driver.world.scheduler.kv_cache_manager.coordinator
    size = driver.world.shape.scheduler_block_size * num_sub_blocks
    for length in range(1, len(tokens)):
        request = make_request("looker", tokens[:length])
        _, on_device, _ = coordinator.find_longest_cache_hit(request.block_hashes, length - 1)
        whole = length // size * size
        if model.get("draft"):
            whole -= 4
        found = driver.tier.lookup(request.block_hashes, 0, length - 1).num_tokens
        assert found == max(0, min(on_device, whole))


def test_a_group_may_lack_the_last_host_block(drive: MakeDriver) -> None:
    driver = drive(
        num_sub_blocks=4, windows=(0, 16), num_device_blocks=90, num_host_blocks=90, retention=None
    )
    driver.serve("before", prompt(33))
    driver.empty_device_cache()
    request = make_request("looker", prompt(32))
    assert driver.tier.lookup(request.block_hashes, 0, 31).num_tokens == 28
    (last_key,) = driver.scheduler.groups.keys(request.block_hashes, 1, 1, 2)
    last = get(driver.tier, last_key)
    assert last is not None
    driver.tier.drop([last])
    assert driver.tier.lookup(request.block_hashes, 0, 31).num_tokens == 16
    driver.serve("again", prompt(32))


def test_a_load_that_fails_a_second_time_drops_whole_host_blocks(drive: MakeDriver) -> None:
    driver = drive(num_sub_blocks=4, num_device_blocks=60, load_failures="recompute")
    driver.serve("before", prompt(60))
    for turn in range(2):
        driver.empty_device_cache()
        driver.serve(f"short {turn}", prompt(23))
        driver.start(f"long {turn}", prompt(60))
        driver.step()
        driver.copy(LOAD, fail=True)
        driver.step()
        assert driver.found(prompt(60)) == (16 if turn else 48)
        driver.run()
    assert driver.found(prompt(60)) == 48  # computed and stored again


def test_a_pinned_hit_pins_its_ancestors_too(drive: MakeDriver) -> None:
    """It pins each block of the chain once, up to the host block in which it begins."""
    driver = drive(num_sub_blocks=2, num_device_blocks=60)
    driver.serve("before", prompt(33))
    request = make_request("a", prompt(33))
    assert driver.scheduler.get_num_new_matched_tokens(request, 12) == (20, True)
    held = [get(driver.tier, key) for key in driver.scheduler.groups.keys(request.block_hashes, 0)]
    assert [block.ref_cnt for block in held if block is not None] == [1, 1, 1, 1]
    driver.scheduler.request_finished(request)
    assert driver.num_held == (0, 0)


# Refused sizes


@pytest.mark.parametrize(
    ("size", "nearest"),
    [(1, 8), (11, 8), (12, 8), (13, 16), (20, 16), (21, 24), (1000001, 1000000)],
)
def test_a_size_that_is_no_multiple(size: int, nearest: int) -> None:
    config = KVCacheConfig(
        num_blocks=9,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["a"], full(4)), KVCacheGroupSpec(["b"], full(8))],
    )
    with pytest.raises(
        ConfigError,
        match=f"cpu_block_size={size}: must be a multiple of the 8 tokens .* nearest is {nearest}$",
    ):
        make_scheduler(config, num_cpu_blocks=8, cpu_block_size=size)
    make_scheduler(config, num_cpu_blocks=8, cpu_block_size=nearest)


@pytest.mark.parametrize(
    ("chunk_size", "size", "nearest"),
    [(12, 8, 12), (12, 16, 12), (12, 20, 24), (8192, 48, 64), (8192, 8196, 8192)],
)
def test_a_size_that_chunks_do_not_fit(chunk_size: int, size: int, nearest: int) -> None:
    """With chunked attention, a lookup would end inside a host block (Llama 4: 8192 tokens)."""
    config = KVCacheConfig(
        num_blocks=9,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(["a"], full()),
            KVCacheGroupSpec(["b"], chunked(chunk_size)),
        ],
    )
    with pytest.raises(
        ConfigError,
        match=f"cpu_block_size={size}: .*attention_chunk_size={chunk_size}.* nearest is {nearest}$",
    ):
        make_scheduler(config, num_cpu_blocks=9000, cpu_block_size=size)
    make_scheduler(config, num_cpu_blocks=9000, cpu_block_size=nearest)


@pytest.mark.parametrize("num_blocks", [2, 7])
def test_room_for_less_than_two_host_blocks(num_blocks: int) -> None:
    config = Bench(Layout((full(),), 1)).scheduler._device_config
    scheduler = make_scheduler(config, num_cpu_blocks=8, cpu_block_size=16)
    with pytest.raises(ConfigError, match=r"cpu_block_size=16: .* room for [01] host blocks of 16"):
        scheduler.agree_on_capacity([RankCapacity("r", num_blocks, num_blocks, 64)])
    scheduler.agree_on_capacity([RankCapacity("r", 8, 8, 64)])
    assert scheduler.tier.num_blocks == 2


def test_the_log_counts_host_blocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bench = Bench(Layout((full(),), 4))
    assert bench.tier.num_blocks == 100
    assert "Host tier: 100 blocks of 16 tokens" in caplog.text
