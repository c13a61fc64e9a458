"""KVEvents: what a router is told, and that it is what vLLM would say."""

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
from vllm.v1.core.kv_cache_utils import get_block_hash, get_request_block_hasher
from vllm.v1.request import Request

from simple_offload.connector import SimpleCPUOffloadConnector
from simple_offload.scheduler.event_payload import contents_of_host_block
from simple_offload.scheduler.kv_events import KVEvents
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
from tests.simulation.world import World

PROMPT = prompt(3 * BLOCK_SIZE)


class Listener:
    """Notes everything that a driver's engine publishes."""

    def __init__(self, driver: Driver) -> None:
        self.events: list[Any] = []
        publish = driver.world.router.publish

        def note(batch: Any) -> None:
            self.events += batch.events
            publish(batch)

        driver.world.router.publish = note  # type: ignore[method-assign]

    def of(self, kind: type[Any], medium: str) -> list[Any]:
        """The events of a kind about a tier."""
        return [e for e in self.events if isinstance(e, kind) and e.medium == medium]

    def stored(self, medium: str) -> dict[tuple[int | None, bytes], tuple[object, ...]]:
        """What was said of each stored block, by group and hash."""
        said: dict[tuple[int | None, bytes], tuple[object, ...]] = {}
        for event in self.of(BlockStored, medium):
            parent = event.parent_block_hash
            for index, block_hash in enumerate(event.block_hashes):
                tokens = event.token_ids[index * event.block_size :][: event.block_size]
                assert len(tokens) == event.block_size
                said[event.group_idx, block_hash] = (
                    *(parent, tokens, event.block_size, event.extra_keys[index]),
                    *(event.lora_id, event.lora_name, event.session_id),
                    *(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window),
                )
                parent = block_hash
        return said


def hashes_of(request: Request) -> list[bytes]:
    return list(request.block_hashes)


@pytest.mark.parametrize(
    "shape",
    [{}, {"windows": (0, 8)}, {"num_states": 1}, {"num_states": 1, "match_unit": 2}],
    ids=["full", "window", "states", "fine hashes"],
)
def test_a_stored_block_is_described_as_the_device_s(
    drive: MakeDriver, shape: dict[str, Any]
) -> None:
    """Field by field, but for where it is."""
    driver = drive(num_device_blocks=80, num_host_blocks=200, **shape)
    listener = Listener(driver)
    for number in range(6):  # one block at a time: a run with gaps is ambiguous in vLLM's own
        driver.say("same", prompt(number * BLOCK_SIZE + 1), salt="red")
    on_device, on_host = listener.stored(MEDIUM_GPU), listener.stored(MEDIUM_CPU)
    assert len(on_host) >= 5
    for where, said in on_host.items():
        assert said == on_device[where]
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
    driver.say("s", PROMPT + prompt(BLOCK_SIZE, family=1), salt="red")
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
    driver.say("s", prompt(3 * BLOCK_SIZE, family=1))
    removed = listener.of(BlockRemoved, MEDIUM_CPU)
    gone = {block_hash for event in removed for block_hash in event.block_hashes}
    assert gone == set(hashes_of(first)[:3])
    assert {event.group_idx for event in removed} == {0}
    assert {event.locality for event in removed} == {"LOCAL"}


def test_a_load_that_fails_again_removes_its_blocks(drive: MakeDriver) -> None:
    driver = drive(num_device_blocks=40, num_host_blocks=40)
    driver.say("r", PROMPT)
    listener = Listener(driver)
    for turn in range(2):
        driver.forget_device()
        request = driver.start(f"s{turn}", [*PROMPT, 1])
        driver.step()
        driver.copy(LOAD, fail=True)
        driver.step(2)
        removed = [set(event.block_hashes) for event in listener.of(BlockRemoved, MEDIUM_CPU)]
        assert removed == [set(hashes_of(request)[:3])] * turn
    driver.run()


def test_a_reset_removes_each_block_and_clears_nothing_else(drive: MakeDriver) -> None:
    """AllBlocksCleared of the tier would be taken for the device's too, which go on."""
    driver = drive(num_device_blocks=40, num_host_blocks=40)
    request = driver.start("r", PROMPT)
    driver.run()
    listener = Listener(driver)
    driver.scheduler.reset_cache()
    driver.say("s", prompt(BLOCK_SIZE, family=2))
    removed, *others = listener.of(BlockRemoved, MEDIUM_CPU)
    assert set(removed.block_hashes) == set(hashes_of(request)[:3])
    assert others == []
    assert not any(isinstance(event, AllBlocksCleared) for event in listener.events)


def test_a_block_that_two_hold_is_removed_with_the_second() -> None:
    tier = make_tier(2)
    events = KVEvents(tier)
    inner = key("half")
    for name in ("a", "b"):
        commit_as(tier, begin(tier, name), key(name), None, BLOCK_SIZE, [inner])
    tier.drop([block(tier, "a")])
    assert removed(events) == [[get_block_hash(key("a"))]]
    tier.drop([block(tier, "b")])
    assert removed(events) == [[get_block_hash(key("b")), get_block_hash(inner)]]


def removed(events: KVEvents) -> list[Any]:
    return [event.block_hashes for event in events.take() if isinstance(event, BlockRemoved)]


def test_a_group_at_a_time_is_removed() -> None:
    tier = make_tier(8, windows=(0, 8))
    events = KVEvents(tier)
    for group in (0, 1):
        store(tier, "ab", group=group)
    tier.reset()
    taken = [(e.group_idx, len(e.block_hashes)) for e in events.take()]
    assert sorted(taken) == [(0, 2), (1, 2)]


def test_a_block_whose_request_nobody_knows() -> None:
    """It is in the tier, and that is said. So it is when the request has other tokens there."""
    tier = make_tier(4)
    events = KVEvents(tier)
    commit(tier, begin(tier, "a"), "a")
    other = make_request("other", PROMPT)
    for request in (None, other):
        events.stored(key("a"), (), BLOCK_SIZE, request)
        (event,) = events.take()
        assert isinstance(event, BlockStored)
        assert event.block_hashes == [get_block_hash(key("a"))]
        assert event.token_ids == []
        assert event.parent_block_hash is None
        assert event.block_size == BLOCK_SIZE
        assert event.kv_cache_spec_kind == "full_attention"


def test_a_part_of_a_block_is_its_last_hash(drive: MakeDriver) -> None:
    driver = drive(num_device_blocks=80, num_host_blocks=40, num_states=1, match_unit=2)
    events = KVEvents(driver.tier)
    request = make_request("r", PROMPT, hash_size=2)
    six, eight = (driver.tier.groups.key_at(request.block_hashes, 1, end) for end in (6, 8))
    events.stored(six, (), 6, request)
    events.stored(eight, (six,), 8, request)
    said = [(e.token_ids, e.block_size) for e in events.take() if isinstance(e, BlockStored)]
    assert said == [(PROMPT[4:6], 2), (PROMPT[4:8], 4), (PROMPT[4:6], 2)]


def test_a_host_block_of_several_parts_is_told_of_as_those() -> None:
    """By which the device knows them."""
    tier = make_tier(4)
    tier.groups.hash_block_size = BLOCK_SIZE // 2
    tier.groups.num_parts = 2
    events = KVEvents(tier)
    request = make_request("r", PROMPT, salt="red", hash_size=BLOCK_SIZE // 2)
    blocks = [begin(tier, "a") for _ in range(2)]
    for index, filled in enumerate(blocks, 1):
        whole = tier.groups.key_at(request.block_hashes, 0, index * BLOCK_SIZE)
        commit_as(tier, filled, whole, None, index * BLOCK_SIZE)
        events.stored(whole, (), index * BLOCK_SIZE, request)
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == request.block_hashes[:4]
    assert stored.token_ids == PROMPT[: 2 * BLOCK_SIZE]
    assert stored.block_size == BLOCK_SIZE // 2
    tier.drop(blocks[1:])
    assert removed(events) == [request.block_hashes[2:4]]
    tier.reset()
    assert removed(events) == [request.block_hashes[:2]]
    assert events._parts == {}


def test_what_else_is_in_a_hash() -> None:
    """LoRA, pictures and salt: each block's own."""
    tier = make_tier(8)
    events = KVEvents(tier)
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
    for remembered in (False, True):
        for index in range(3):
            (key_of,) = tier.groups.keys(request.block_hashes, 0, index, index + 1)
            end = (index + 1) * BLOCK_SIZE
            contents = contents_of_host_block(tier.groups, key_of, (), end, request)
            events.stored(key_of, (), end, contents if remembered else request)
        (event,) = events.take()
        assert isinstance(event, BlockStored)
        assert event.block_hashes == request.block_hashes
        assert event.token_ids == PROMPT
        assert event.extra_keys == [("poet", "red"), ("poet", ("cat", 1)), ("poet", ("cat", -3))]
        assert (event.lora_id, event.lora_name, event.session_id) == (3, "poet", "talk")


def test_another_s_block_does_not_join_a_chain() -> None:
    """The same parent, another session: vLLM says for each whose it is."""
    tier = make_tier(8)
    events = KVEvents(tier)
    for name, end in (("r", 1), ("s", 2)):
        request = make_request(name, PROMPT)
        request.session_id = name
        (key_of,) = tier.groups.keys(request.block_hashes, 0, end - 1, end)
        events.stored(key_of, (), end * BLOCK_SIZE, request)
    first, second = (event for event in events.take() if isinstance(event, BlockStored))
    assert second.parent_block_hash == first.block_hashes[0]
    assert (first.session_id, second.session_id) == ("r", "s")


@pytest.mark.parametrize("config", [None, KVEventsConfig(enable_kv_cache_events=False)])
def test_nothing_is_collected_unless_asked_for(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch, config: KVEventsConfig | None
) -> None:
    monkeypatch.setattr(World, "kv_events_config", lambda self: config)
    monkeypatch.setattr(World, "check_events", lambda self: None)
    driver = drive(num_device_blocks=40, num_host_blocks=4)
    driver.say("r", PROMPT)
    driver.say("s", prompt(3 * BLOCK_SIZE, family=1))
    connector: SimpleCPUOffloadConnector = driver.world.connector
    assert list(connector.take_events()) == []
    assert driver.scheduler._stores.origins is None
    assert "_emit_block_removed_events" not in vars(driver.tier.pool)
