"""The tier's KV events, as routers decode them: Dynamo's own indexer, and llm-d's rules by field.

Ray Serve's KV-aware router decodes them by Dynamo's code too (ray-project/ray,
llm/_internal/serve/routing_policies/kv_aware/kv_event_publisher.py at 156836d).
"""

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import pytest
import zmq
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from examples.serving import free_port
from tests.conftest import PATIENCE_SECONDS
from tests.scheduler.conftest import MakeDriver
from tests.scheduler.driver import Driver, prompt
from tests.scheduler.test_events import start
from tests.scheduler.tiers import BLOCK_SIZE
from tests.wheels import CACHE, Wheel

PROMPT = prompt(3 * BLOCK_SIZE)
LONGER = [*PROMPT, *prompt(2 * BLOCK_SIZE, family=1)]

DYNAMO = Wheel(
    "ai-dynamo-runtime",
    "1.6.1",
    CACHE / "ai-dynamo-runtime-1.6.1",
    download_mb=75,
    download_seconds=600,
    without="--ignore=tests/scheduler/test_event_consumers.py",
)
INDEXER = "import sys; from dynamo._core import run_kv_indexer; run_kv_indexer(sys.argv[1:])"
"""What ``python -m dynamo.indexer`` runs."""


class Published:
    """The events of a driver's engine as vLLM's ZMQ publisher writes them, one payload a step.

    Hashes are whole ones in these worlds (tests/simulation/router.py). They are published as vLLM
    does by default: as 64 bits of each.
    """

    def __init__(self, driver: Driver) -> None:
        self.payloads: list[bytes] = []
        apply = driver.world.router.publish

        def publish(batch: Any) -> None:
            apply(batch)
            fields = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
            for event in fields[1]:
                if event["type"] != "AllBlocksCleared":
                    shorten_hashes(event)
            self.payloads.append(msgspec.msgpack.encode([*fields[:2], 0]))

        driver.world.router.publish = publish  # type: ignore[method-assign]

    def take(self) -> list[bytes]:
        payloads, self.payloads = self.payloads, []
        return payloads


def shorten_hashes(event: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
        event["block_hashes"] = [maybe_convert_block_hash(each) for each in event["block_hashes"]]
        if event.get("parent_block_hash") is not None:
            event["parent_block_hash"] = maybe_convert_block_hash(event["parent_block_hash"])


# By field


MAIN_ATTENTION = {"full_attention", "mla_attention", "sink_full_attention"}
"""Kinds of groups whose events Dynamo indexes (lib/kv-router/src/zmq_wire/filter.rs at 17b173e)."""
KINDS = {*MAIN_ATTENTION, "sliding_window", "sliding_window_mla", "mamba"}
"""Kinds that llm-d knows (pkg/kvevents/events.go at ebab687), of the groups in these tests."""


def check_stored(event: dict[str, Any]) -> None:
    """What the decoders need of a block in host memory: llm-d/llm-d-router,
    pkg/kvevents/engineadapter/vllm_adapter.go at ebab687, and ai-dynamo/dynamo,
    lib/kv-router/src/zmq_wire/{deserialize,convert}.rs at 0917ca2 and 2bd0a36."""
    hashes, size = event["block_hashes"], event["block_size"]
    assert hashes
    # Dynamo drops an event in which a hash comes twice, the parent's included.
    chain = [*hashes, *(p for p in [event["parent_block_hash"]] if p is not None)]
    assert all(isinstance(each, int | bytes) and each for each in chain)
    assert len(set(chain)) == len(chain)
    # Dynamo publishes no block of another size than its own, and cuts tokens by this one. llm-d
    # takes an event without tokens for blocks that it knows from the device.
    assert size == BLOCK_SIZE
    assert len(event["token_ids"]) == size * len(hashes)
    assert all(isinstance(token, int) and 0 <= token < 2**32 for token in event["token_ids"])
    check_place(event)
    # llm-d and Dynamo hash these with the tokens: one entry a block, each nil or an array.
    assert len(event["extra_keys"]) == len(hashes)
    assert all(each is None or isinstance(each, list) for each in event["extra_keys"])
    assert event["kv_cache_spec_kind"] in KINDS
    window = event.get("kv_cache_spec_sliding_window")
    assert (window is not None) == event["kv_cache_spec_kind"].startswith("sliding_window")
    adapter = (event["lora_id"], event["lora_name"])
    assert adapter in ((None, None), (1, "poet"))


def check_place(event: dict[str, Any]) -> None:
    """Of a removal too: which tier, which group, and that it is this server's own."""
    assert event["medium"] == "CPU"  # "cpu" in llm-d, HostPinned in Dynamo
    assert isinstance(event["group_idx"], int)
    assert event["group_idx"] >= 0
    assert event["locality"] == "LOCAL"  # Dynamo drops all but LOCAL and none


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"windows": (0, 8)},
        {"num_states": 1},
        {"num_sub_blocks": 2},
        {"lazy": True, "num_device_blocks": 20},
    ],
    ids=str,
)
def test_events_have_what_decoders_need(drive: MakeDriver, shape: dict[str, Any]) -> None:
    driver = drive(**{"num_device_blocks": 80, "num_host_blocks": 200, "kv_events": True} | shape)
    published = Published(driver)
    start(driver, "adapter", [*PROMPT, 1], "talk")
    driver.run()
    driver.serve("first", [*LONGER, 1])
    driver.fill(4)
    driver.scheduler.reset_cache()
    driver.serve("last", [1])
    batches = [msgspec.msgpack.decode(payload) for payload in published.take()]
    # llm-d and Dynamo read a batch as an array, and an event as a map with its type.
    events = [event for _, events, _ in batches for event in events]
    on_host = [event for event in events if event.get("medium") == "CPU"]
    stored = [event for event in on_host if event["type"] == "BlockStored"]
    removed = [event for event in on_host if event["type"] == "BlockRemoved"]
    assert len(stored) + len(removed) == len(on_host)
    for event in stored:
        check_stored(event)
    for event in removed:
        check_place(event)
        assert event["block_hashes"]
    assert {event["kv_cache_spec_kind"] for event in stored} & MAIN_ATTENTION
    assert {event["lora_name"] for event in stored} == {None, "poet"}
    stored_hashes = {(e["group_idx"], h) for e in stored for h in e["block_hashes"]}
    assert stored_hashes == {(e["group_idx"], h) for e in removed for h in e["block_hashes"]}
    assert len(stored_hashes) >= 10
    check_parents(events)


def check_parents(events: Sequence[dict[str, Any]]) -> None:
    """llm-d skips a block whose parent no tier of the server has, whatever the group."""
    places: defaultdict[int | bytes, set[tuple[str, int]]] = defaultdict(set)
    for event in events:
        place = event["medium"], event["group_idx"]
        if event["type"] == "BlockStored":
            assert event["parent_block_hash"] is None or places[event["parent_block_hash"]]
            for each in event["block_hashes"]:
                places[each].add(place)
        else:
            for each in event["block_hashes"]:
                places[each].discard(place)


# Dynamo's indexer


class Indexer:
    """Dynamo's standalone indexer, which listens to one engine."""

    def __init__(self, socket: "zmq.Socket[bytes]", port: int, log: Path) -> None:
        self._socket, self._port, self._log = socket, port, log
        self._number = 0

    def send(self, payloads: Sequence[bytes]) -> None:
        """Publish batches as vLLM's publisher does: topic, number, payload."""
        for payload in payloads:
            self._socket.send_multipart([b"", self._number.to_bytes(8, "big"), payload])
            self._number += 1

    def matched(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Tokens of a prompt that the engine has on its device, and there or in host memory."""
        answer = self._ask("query", {"model_name": "model", "token_ids": list(tokens)})
        of_worker = answer["instances"].get("1", {})
        return of_worker.get("gpu", 0), of_worker.get("cpu", 0)

    def wait_for(self, tokens: Sequence[int], matched: tuple[int, int]) -> None:
        self._until(lambda: self.matched(tokens) == matched, lambda: self.matched(tokens))

    def wait_until_ready(self) -> None:
        """Until it listens to the engine and answers."""
        assert self._socket.poll(int(PATIENCE_SECONDS * 1e3)), self._log.read_text()
        assert self._socket.recv() == b"\x01"  # it has subscribed
        self._until(self._answers, self._log.read_text)

    def _answers(self) -> bool:
        try:
            return bool(self._ask("workers"))
        except OSError:
            return False

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self._port}/{path}"
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(url, data, headers), timeout=PATIENCE_SECONDS) as answer:
            return json.load(answer)

    def _until(self, condition: Callable[[], bool], found: Callable[[], object]) -> None:
        """The indexer tells no one when it has applied an event, so it is asked again."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < give_up, found()
            time.sleep(0.05)


@contextmanager
def indexer(folder: Path) -> Iterator[Indexer]:
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.XPUB)
    socket.setsockopt(zmq.LINGER, 0)
    engine = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    port, log = free_port(), folder / "indexer.log"
    options = {"port": port, "block-size": BLOCK_SIZE, "workers": f"1={engine}"}
    words = [f"--{name}={value}" for name, value in (options | {"model-name": "model"}).items()]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", INDEXER, *words],
            env={"PYTHONPATH": str(DYNAMO.fetch()), "DYNAMO_SKIP_PYTHON_LOG_INIT": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        made = Indexer(socket, port, log)
        made.wait_until_ready()
        yield made
    finally:
        process.kill()
        process.wait()
        context.destroy()


@pytest.mark.slow
@pytest.mark.timeout(DYNAMO.download_seconds + 300)
@pytest.mark.parametrize(
    ("shape", "num_on_host"),
    [({}, 20), ({"windows": (0, 8)}, 20), ({"num_sub_blocks": 2}, 16), ({"lazy": True}, 20)],
    ids=str,
)
def test_dynamo_finds_what_the_tier_has(
    drive: MakeDriver, tmp_path: Path, shape: dict[str, Any], num_on_host: int
) -> None:
    """Through the life of a prefix: on the device, on the host alone, and nowhere."""
    size = {"num_device_blocks": 24, "num_host_blocks": 400, "kv_events": True}
    driver = drive(**size | shape)
    published = Published(driver)
    with indexer(tmp_path) as router:
        driver.serve("first", [*PROMPT, 1])
        router.send(published.take())
        router.wait_for(PROMPT, (len(PROMPT), len(PROMPT)))
        driver.serve("second", [*LONGER, 1])  # goes on where the first one ended
        driver.fill(12)
        router.send(published.take())
        router.wait_for(LONGER, (0, num_on_host))
        driver.scheduler.reset_cache()
        driver.serve("last", [1])
        router.send(published.take())
        router.wait_for(LONGER, (0, 0))
