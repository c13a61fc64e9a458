"""KVEvents: the host tier's events are those that vLLM would publish."""

from collections.abc import Sequence
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    get_block_hash,
    get_request_block_hasher,
)
from vllm.v1.request import Request

from simple_offload.connector import SimpleCPUOffloadConnector
from simple_offload.scheduler.event_payload import payloads_of_host_block
from simple_offload.scheduler.kv_events import KVEvents
from simple_offload.scheduler.tier.cpu_tier import CpuTier
from simple_offload.scheduler.tier.run import PayloadsByKey, Run
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import LOAD, STORE, Driver, make_request, prompt
from tests.scheduler.tiers import (
    BLOCK_SIZE,
    begin,
    block,
    commit,
    commit_as,
    key,
    make_tier,
    store,
)
from tests.simulation.integrity import groups_of
from tests.simulation.world import World

PROMPT = prompt(3 * BLOCK_SIZE)


class Listener:
    """Records all events that a driver's engine publishes."""

    def __init__(self, driver: Driver) -> None:
        self.events: list[Any] = []
        publish = driver.world.router.publish

        def record(batch: Any) -> None:
            self.events += batch.events
            publish(batch)

        driver.world.router.publish = record  # type: ignore[method-assign]

    def of(self, kind: type[Any], medium: str) -> list[Any]:
        """The events of a kind about a tier."""
        return [e for e in self.events if isinstance(e, kind) and e.medium == medium]

    def stored(self, medium: str) -> dict[tuple[int | None, bytes], tuple[object, ...]]:
        """The fields of each stored block's event, by group and hash."""
        fields: dict[tuple[int | None, bytes], tuple[object, ...]] = {}
        for event in self.of(BlockStored, medium):
            parent = event.parent_block_hash
            for index, block_hash in enumerate(event.block_hashes):
                tokens = event.token_ids[index * event.block_size :][: event.block_size]
                assert len(tokens) == event.block_size
                fields[event.group_idx, block_hash] = (
                    *(parent, tokens, event.block_size, event.extra_keys[index]),
                    *(event.lora_id, event.lora_name, event.session_id),
                    *(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window),
                )
                parent = block_hash
        return fields


def make_events(tier: CpuTier) -> KVEvents:
    return KVEvents(tier, groups_of(tier))


def report(
    events: KVEvents,
    key: BlockHashWithGroupId,
    num_tokens: int,
    request: Request | None = None,
    inner_keys: Sequence[BlockHashWithGroupId] = (),
    payloads: PayloadsByKey | None = None,
) -> None:
    """Report a committed block of ``request``, or a block with ``payloads``."""
    run = Run((), (key,), None, num_tokens, request=request)
    run.payloads = [payloads] if payloads else ()
    run.inner_keys = [inner_keys] if inner_keys else ()
    events.on_committed(run, ())


def removed(events: KVEvents) -> list[Any]:
    return [event.block_hashes for event in events.drain() if isinstance(event, BlockRemoved)]


def hashes_of(request: Request) -> list[bytes]:
    return list(request.block_hashes)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"windows": (0, 8)},
        {"num_states": 1},
        {"num_states": 1, "match_unit": 2},
        {"num_sub_blocks": 2},
        {"lazy": True, "num_device_blocks": 20},
    ],
    ids=str,
)
def test_a_stored_block_has_the_fields_of_the_device_s_event(
    drive: MakeDriver, shape: dict[str, Any]
) -> None:
    """All fields are equal, except those of the tier."""
    driver = drive(**{"num_device_blocks": 80, "num_host_blocks": 200} | shape)
    listener = Listener(driver)
    for number in range(6):  # one block at a time: vLLM's own event of a run with gaps is ambiguous
        driver.serve("same", prompt(number * BLOCK_SIZE + 1), salt="red")
    if shape.get("lazy"):  # blocks stay on the device after their request's end
        for family in range(1, 6):
            driver.serve("other", prompt(5 * BLOCK_SIZE, family), salt="red")
    on_device, on_host = listener.stored(MEDIUM_GPU), listener.stored(MEDIUM_CPU)
    assert len(on_host) >= 4
    for where, fields in on_host.items():
        assert fields == on_device[where]
    assert {event.locality for event in listener.events if event.medium == MEDIUM_CPU} == {"LOCAL"}


def test_blocks_of_a_chain_are_one_event(drive: MakeDriver) -> None:
    driver = drive(num_device_blocks=40, num_host_blocks=40)
    listener = Listener(driver)
    request = driver.start("r", PROMPT, salt="red")
    driver.run()
    (event,) = listener.of(BlockStored, MEDIUM_CPU)
    assert event.block_hashes == hashes_of(request)[:3]
    assert event.parent_block_hash is None
    assert event.token_ids == PROMPT
    assert event.block_size == BLOCK_SIZE
    assert event.extra_keys == [("red",), None, None]
    driver.serve("s", PROMPT + prompt(BLOCK_SIZE, family=1), salt="red")
    last = listener.of(BlockStored, MEDIUM_CPU)[-1]
    assert last.parent_block_hash == request.block_hashes[2]
    assert last.token_ids == prompt(BLOCK_SIZE, family=1)


@pytest.mark.proves("I1")
def test_nothing_is_stored_before_every_rank_has_it(drive: MakeDriver) -> None:
    driver = drive(num_device_blocks=40, num_host_blocks=40, num_ranks=2)
    listener = Listener(driver)
    driver.start("r", PROMPT)
    driver.step(4)
    driver.copy(STORE, rank=0)
    driver.step()
    assert listener.of(BlockStored, MEDIUM_CPU) == []
    driver.run()
    assert len(listener.stored(MEDIUM_CPU)) == 3


def test_an_eviction_is_a_removal(drive: MakeDriver) -> None:
    driver = drive(num_device_blocks=40, num_host_blocks=4)
    listener = Listener(driver)
    first = driver.start("r", PROMPT)
    driver.run()
    driver.serve("s", prompt(3 * BLOCK_SIZE, family=1))
    removed = listener.of(BlockRemoved, MEDIUM_CPU)
    evicted = {block_hash for event in removed for block_hash in event.block_hashes}
    assert evicted == set(hashes_of(first)[:3])
    assert {event.group_idx for event in removed} == {0}
    assert {event.locality for event in removed} == {"LOCAL"}


def test_a_load_that_fails_a_second_time_removes_its_blocks(drive: MakeDriver) -> None:
    driver = drive(num_device_blocks=40, num_host_blocks=40)
    driver.serve("r", PROMPT)
    listener = Listener(driver)
    for turn in range(2):
        driver.empty_device_cache()
        request = driver.start(f"s{turn}", [*PROMPT, 1])
        driver.step()
        driver.copy(LOAD, fail=True)
        driver.step(2)
        removed = [set(event.block_hashes) for event in listener.of(BlockRemoved, MEDIUM_CPU)]
        assert removed == [set(hashes_of(request)[:3])] * turn
    driver.run()


def test_a_reset_removes_each_block_and_clears_nothing_else(drive: MakeDriver) -> None:
    """An AllBlocksCleared event of the tier would also remove the device's blocks, which stay."""
    driver = drive(num_device_blocks=40, num_host_blocks=40)
    request = driver.start("r", PROMPT)
    driver.run()
    listener = Listener(driver)
    driver.scheduler.reset_cache()
    driver.serve("s", prompt(BLOCK_SIZE, family=2))
    removed, *others = listener.of(BlockRemoved, MEDIUM_CPU)
    assert set(removed.block_hashes) == set(hashes_of(request)[:3])
    assert others == []
    assert not any(isinstance(event, AllBlocksCleared) for event in listener.events)


def test_a_key_that_two_blocks_have_is_removed_with_the_second() -> None:
    tier = make_tier(2)
    events = make_events(tier)
    inner = key("half")
    for name in ("a", "b"):
        commit_as(tier, begin(tier, name), key(name), None, BLOCK_SIZE, [inner])
    tier.drop([block(tier, "a")])
    assert removed(events) == [[get_block_hash(key("a"))]]
    tier.drop([block(tier, "b")])
    assert removed(events) == [[get_block_hash(key("b")), get_block_hash(inner)]]


def test_a_group_at_a_time_is_removed() -> None:
    tier = make_tier(8, windows=(0, 8))
    events = make_events(tier)
    for group in (0, 1):
        store(tier, "ab", group=group)
    tier.reset()
    removals = [(e.group_idx, len(e.block_hashes)) for e in events.drain()]
    assert sorted(removals) == [(0, 2), (1, 2)]


def test_a_block_of_an_unknown_request_is_stored_without_tokens() -> None:
    """So is a block with other tokens than the request has there."""
    tier = make_tier(4)
    events = make_events(tier)
    commit(tier, begin(tier, "a"), "a")
    other = make_request("other", PROMPT)
    for request in (None, other):
        report(events, key("a"), BLOCK_SIZE, request)
        (event,) = events.drain()
        assert isinstance(event, BlockStored)
        assert event.block_hashes == [get_block_hash(key("a"))]
        assert event.token_ids == []
        assert event.parent_block_hash is None
        assert event.block_size == BLOCK_SIZE
        assert event.kv_cache_spec_kind == "full_attention"


def test_a_prefix_that_ends_inside_a_block_has_the_tokens_of_its_last_hash(
    drive: MakeDriver,
) -> None:
    driver = drive(num_device_blocks=80, num_host_blocks=40, num_states=1, match_unit=2)
    events = make_events(driver.tier)
    request = make_request("r", PROMPT, hash_size=2)
    six, eight = (driver.scheduler.groups.key_at(request.block_hashes, 1, end) for end in (6, 8))
    report(events, six, 6, request)
    report(events, eight, 8, request, inner_keys=[six])
    stored = [(e.token_ids, e.block_size) for e in events.drain() if isinstance(e, BlockStored)]
    assert stored == [(PROMPT[4:6], 2), (PROMPT[4:8], 4), (PROMPT[4:6], 2)]


def test_a_host_block_is_reported_as_its_sub_blocks() -> None:
    tier = make_tier(4)
    groups_of(tier).hash_block_size = BLOCK_SIZE // 2
    groups_of(tier).num_sub_blocks = 2
    events = make_events(tier)
    request = make_request("r", PROMPT, salt="red", hash_size=BLOCK_SIZE // 2)
    blocks = [begin(tier, "a") for _ in range(2)]
    for index, filled in enumerate(blocks, 1):
        whole = groups_of(tier).key_at(request.block_hashes, 0, index * BLOCK_SIZE)
        commit_as(tier, filled, whole, None, index * BLOCK_SIZE)
        report(events, whole, index * BLOCK_SIZE, request)
    (stored,) = events.drain()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == request.block_hashes[:4]
    assert stored.token_ids == PROMPT[: 2 * BLOCK_SIZE]
    assert stored.block_size == BLOCK_SIZE // 2
    tier.drop(blocks[1:])
    assert removed(events) == [request.block_hashes[2:4]]
    tier.reset()
    assert removed(events) == [request.block_hashes[:2]]
    assert not events._sub_block_keys
    assert not events._num_with


def test_each_block_has_its_own_extra_keys() -> None:
    """A block's hash covers LoRA adapter, images and salt."""
    tier = make_tier(8)
    events = make_events(tier)
    feature = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier="cat",
        mm_position=PlaceholderRange(offset=5, length=5),
    )
    request = Request(
        request_id="r",
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[feature],
        lora_request=LoRARequest("poet", 3, "/nowhere"),
        cache_salt="red",
        session_id="talk",
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )
    for outlived in (False, True):
        for index in range(3):
            (key_of,) = groups_of(tier).keys(request.block_hashes, 0, index, index + 1)
            end = (index + 1) * BLOCK_SIZE
            payloads = payloads_of_host_block(groups_of(tier), key_of, (), end, request)
            if outlived:
                report(events, key_of, end, payloads=payloads)
            else:
                report(events, key_of, end, request)
        (event,) = events.drain()
        assert isinstance(event, BlockStored)
        assert event.block_hashes == request.block_hashes
        assert event.token_ids == PROMPT
        assert event.extra_keys == [("poet", "red"), ("poet", ("cat", 1)), ("poet", ("cat", -3))]
        assert (event.lora_id, event.lora_name, event.session_id) == (3, "poet", "talk")


def test_a_block_of_another_session_has_an_event_of_its_own() -> None:
    """vLLM's events have the session of each block."""
    tier = make_tier(8)
    events = make_events(tier)
    for name, end in (("r", 1), ("s", 2)):
        request = make_request(name, PROMPT)
        request.session_id = name
        (key_of,) = groups_of(tier).keys(request.block_hashes, 0, end - 1, end)
        report(events, key_of, end * BLOCK_SIZE, request)
    first, second = (event for event in events.drain() if isinstance(event, BlockStored))
    assert second.parent_block_hash == first.block_hashes[0]
    assert (first.session_id, second.session_id) == ("r", "s")


@pytest.mark.parametrize("config", [None, KVEventsConfig(enable_kv_cache_events=False)])
def test_nothing_is_collected_unless_vllm_is_configured_for_events(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch, config: KVEventsConfig | None
) -> None:
    monkeypatch.setattr(World, "kv_events_config", lambda self: config)
    monkeypatch.setattr(World, "check_events", lambda self: None)
    driver = drive(num_device_blocks=40, num_host_blocks=4)
    driver.serve("r", PROMPT)
    driver.serve("s", prompt(3 * BLOCK_SIZE, family=1))
    connector: SimpleCPUOffloadConnector = driver.world.connector
    assert list(connector.take_events()) == []
    assert "_emit_block_removed_events" not in vars(driver.host_pool)
