"""The reports of a live server on its work: on /metrics, in its log, and through KV events."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from simple_offload import metrics
from tests.dashboard import DASHBOARD, names_in
from tests.serve.events import EventPorts, Feed
from tests.serve.server import Samples, Server

BLOCK_SIZE = 32
HOST_BYTES = 64 << 20
LONG = list(range(3, 163))  # five blocks
SHORT = list(range(200, 270))  # two blocks and some
LAST = list(range(300, 340))  # one block and some


@pytest.fixture(scope="module")
def worked(server: Server) -> Samples:
    """The samples on /metrics once the new server has stored LONG, loaded it, and stored SHORT."""
    send_work(server)
    wait_for_metric(server, metrics.USED, 7)
    return server.samples()


@pytest.fixture
def feed(event_ports: EventPorts) -> Iterator[Feed]:
    feed = Feed(event_ports)
    yield feed
    feed.close()


def send_work(server: Server) -> None:
    """Store LONG, load it, store SHORT."""
    server.complete(LONG, 1)
    server.reset_prefix_cache()
    server.complete([*LONG, *range(400, 408)], 1)
    server.complete(SHORT, 1)


def wait_for_metric(server: Server, name: str, value: float) -> None:
    server.wait_for(lambda: server.metric(name) == value, 30, f"{name} to be {value}")


@pytest.fixture
def block_bytes(model: Path) -> int:
    """Bytes of a block: keys and values of all layers, in float32."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * head_size * 4 * BLOCK_SIZE)


def test_metrics_count_the_work(worked: Samples, block_bytes: int) -> None:
    def read(name: str, **labels: str) -> float:
        return worked.sum(name, model_name="random", engine="0", **labels)

    assert read(metrics.STORED) == 7
    assert read(metrics.LOADED) == 5
    assert read(metrics.HIT_TOKENS) == 5 * BLOCK_SIZE
    assert read(metrics.HIT_TOKENS) == read("vllm:external_prefix_cache_hits_total")
    assert read(metrics.LOOKUPS, result="hit") == 1
    assert read(metrics.LOOKUPS, result="miss") == 2
    assert read(metrics.LOADS) == 1
    assert read(metrics.SKIPPED, reason="already_stored") == 5
    assert read(metrics.BYTES, direction="load", path="host") == 5 * block_bytes
    assert read(metrics.BYTES, direction="store", path="host") == 7 * block_bytes
    assert read(metrics.BYTES) == 12 * block_bytes
    assert read(f"{metrics.SECONDS}_count", direction="load") == 1
    assert read(f"{metrics.SECONDS}_sum", direction="load") > 0
    assert read(f"{metrics.WAIT_SECONDS}_count", direction="load") == 1
    assert read(f"{metrics.BANDWIDTH}_count", direction="store") == 2
    assert read(metrics.CAPACITY) == HOST_BYTES // block_bytes - 1
    assert read(metrics.PINNED) == 0
    for name in (metrics.DROPPED, metrics.EVICTED, metrics.FAILED):
        assert read(name) == 0


@pytest.mark.usefixtures("worked")
def test_the_log_has_the_same_numbers(server: Server) -> None:
    """The numbers may be in several lines: each line counts the work since the one before."""

    def logged(what: str) -> int:
        lines = [line for line in server.log.read_text().splitlines() if "KV Transfer" in line]
        return sum(
            int(re.findall(r"\d+", part)[0]) for line in lines for part in line.split(what)[1:]
        )

    server.wait_for(
        lambda: logged("Stored=") >= 7 and logged("Loaded=") >= 5 and logged("Hit tokens=") > 0,
        30,
        "the periodic log",
    )
    assert (logged("Stored="), logged("Loaded=")) == (7, 5)


def test_the_dashboard_s_series_are_served(worked: Samples) -> None:
    assert set(names_in(DASHBOARD)) <= worked.names


@pytest.mark.usefixtures("worked")
def test_a_subscriber_knows_the_blocks_of_the_tier(server: Server, feed: Feed) -> None:
    stored = feed.events()
    assert {type(event) for event in stored} == {BlockStored}
    assert [event.token_ids for event in stored] == [LONG, SHORT[: 2 * BLOCK_SIZE]]
    hashes = {block_hash for event in stored for block_hash in event.block_hashes}
    assert len(hashes) == 7
    for event in stored:
        assert event.block_size == BLOCK_SIZE
        assert event.parent_block_hash is None
        assert event.kv_cache_spec_kind == "full_attention"
    # Events travel with the next step.
    with server._post("/reset_prefix_cache?reset_external=true", {}):
        pass
    server.complete(LAST, 1)
    wait_for_metric(server, metrics.USED, 1)
    removed, last = feed.events()[len(stored) :]
    assert isinstance(removed, BlockRemoved)
    assert set(removed.block_hashes) == hashes
    assert last.token_ids == LAST[:BLOCK_SIZE]
    assert server.metric(metrics.EVICTED, reason="reset") == 7
