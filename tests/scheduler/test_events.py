"""KVEvents: the host tier's events are those that vLLM would publish. In each world, a router
derives the tier's keys from them (tests/simulation/router.py)."""

from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU, AllBlocksCleared, BlockStored

from simple_offload.connector import SimpleCPUOffloadConnector
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import STORE, Driver, prompt
from tests.scheduler.tiers import BLOCK_SIZE
from tests.simulation.inputs import ADAPTERS
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

    def stored_events(self, medium: str = MEDIUM_CPU) -> list[BlockStored]:
        return [e for e in self.events if isinstance(e, BlockStored) and e.medium == medium]

    def stored(self, medium: str) -> dict[tuple[int | None, bytes], tuple[object, ...]]:
        """The fields of each stored block's event, by group and hash."""
        fields: dict[tuple[int | None, bytes], tuple[object, ...]] = {}
        for event in self.stored_events(medium):
            parent: Any = event.parent_block_hash
            for index, block_hash in enumerate(event.block_hashes):
                tokens = event.token_ids[index * event.block_size :][: event.block_size]
                assert len(tokens) == event.block_size
                assert event.extra_keys is not None
                fields[event.group_idx, block_hash] = (  # type: ignore[index]
                    *(parent, tokens, event.block_size, event.extra_keys[index]),
                    *(event.lora_id, event.lora_name, event.session_id),
                    *(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window),
                )
                parent = block_hash
        return fields


def start(driver: Driver, request_id: str, tokens: list[int], session: str) -> None:
    """Start a request with a salt, an adapter and a session."""
    driver.world.add_request(request_id, tokens, 1, "red", 0, None, session, adapter=ADAPTERS[0])


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
    driver = drive(**{"num_device_blocks": 80, "num_host_blocks": 200, "kv_events": True} | shape)
    listener = Listener(driver)
    for number in range(6):  # one block at a time: vLLM's own event of a run with gaps is ambiguous
        start(driver, "same", prompt(number * BLOCK_SIZE + 1), "talk")
        driver.run()
    if shape.get("lazy"):  # blocks stay on the device after their request's end
        for family in range(1, 6):
            driver.serve("other", prompt(5 * BLOCK_SIZE, family))
    on_device, on_host = listener.stored(MEDIUM_GPU), listener.stored(MEDIUM_CPU)
    assert len(on_host) >= 4
    for where, fields in on_host.items():
        assert fields == on_device[where]


@pytest.mark.parametrize(("second_session", "num_events"), [("talk", 1), ("another", 2)])
def test_blocks_of_a_chain_and_a_session_are_one_event(
    drive: MakeDriver, second_session: str, num_events: int
) -> None:
    driver = drive(kv_events=True, num_device_blocks=40)
    listener = Listener(driver)
    start(driver, "first", PROMPT, "talk")
    driver.step_until(lambda: driver.pending(STORE))
    start(driver, "second", [*PROMPT, *prompt(BLOCK_SIZE + 1, family=1)], second_session)
    driver.step_until(lambda: len(driver.pending(STORE)) >= 2)
    driver.copy_all()
    driver.run()
    events = listener.stored_events()
    assert len(events) == num_events
    assert [t for event in events for t in event.token_ids] == [
        *PROMPT,
        *prompt(BLOCK_SIZE, family=1),
    ]
    assert [event.session_id for event in events] == ["talk", "another"][:num_events]
    assert events[0].extra_keys is not None
    assert events[0].extra_keys[:2] == [("poet", "red"), ("poet",)]


@pytest.mark.parametrize("length", [1024, 1025])
def test_a_long_session_id_is_left_out(drive: MakeDriver, length: int) -> None:
    """It would be kept after its request has ended."""
    driver = drive(kv_events=True)
    listener = Listener(driver)
    start(driver, "first", PROMPT, "s" * length)
    driver.run()
    ids = [event.session_id for event in listener.stored_events()]
    assert ids == ["s" * length if length == 1024 else None]


@pytest.mark.proves("I1")
def test_nothing_is_stored_before_every_rank_has_it(drive: MakeDriver) -> None:
    driver = drive(kv_events=True, num_ranks=2)
    listener = Listener(driver)
    driver.start("r", PROMPT)
    driver.step(4)
    driver.copy(STORE, rank=0)
    driver.step()
    assert listener.stored_events() == []
    driver.run()
    assert len(listener.stored(MEDIUM_CPU)) == 3


def test_a_reset_clears_nothing_else(drive: MakeDriver) -> None:
    """An AllBlocksCleared event of the tier would also remove the device's blocks, which stay."""
    driver = drive(kv_events=True)
    driver.serve("r", PROMPT)
    assert len(driver.world.router.keys) == 3
    listener = Listener(driver)
    driver.scheduler.reset_cache()
    driver.serve("s", [1])
    assert not driver.world.router.keys
    assert not any(isinstance(event, AllBlocksCleared) for event in listener.events)


@pytest.mark.parametrize("config", [None, KVEventsConfig(enable_kv_cache_events=False)])
def test_nothing_is_collected_unless_vllm_is_configured_for_events(
    drive: MakeDriver, monkeypatch: pytest.MonkeyPatch, config: KVEventsConfig | None
) -> None:
    monkeypatch.setattr(World, "kv_events_config", lambda self: config)
    driver = drive(num_host_blocks=4)
    driver.serve("r", PROMPT)
    driver.serve("s", prompt(3 * BLOCK_SIZE, family=1))
    connector: SimpleCPUOffloadConnector = driver.world.connector
    assert list(connector.take_events()) == []
