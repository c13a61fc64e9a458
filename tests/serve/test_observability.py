"""The reports of a live server on its work: on /metrics, and through KV events."""

import json
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from simple_offload import metrics
from tests.serve.server import HOST, Server
from tests.test_dashboard import names_in_queries

BLOCK_SIZE = 32
HOST_BYTES = 16 << 20
LONG = list(range(3, 163))  # five blocks
SHORT = list(range(200, 270))  # two blocks and some
LAST = list(range(300, 340))  # one block and some


def wait_for_metric(server: Server, name: str, value: float) -> None:
    server.wait_for(lambda: server.metric(name) == value, 30, f"{name} to be {value}")


def work(server: Server) -> None:
    """Store LONG, load it, and store SHORT."""
    server.complete(LONG, 1)
    server.reset_prefix_cache(external=False)
    server.complete([*LONG, *range(400, 408)], 1)
    server.complete(SHORT, 1)
    wait_for_metric(server, metrics.USED, 7)


def check_work(server: Server, model: Path, *, num_ranks: int = 1) -> None:
    """Check the numbers of a new server after ``work``."""

    def read(name: str, **labels: str) -> float:
        return server.metric(name, model_name="random", engine="0", **labels)

    config = json.loads((model / "config.json").read_text())
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]  # keys and values
    block_bytes = BLOCK_SIZE * heads * head_size * 4  # on all ranks together
    assert read(metrics.STORED) == 7
    assert read(metrics.LOADED) == 5
    assert read(metrics.PROMPT_TOKENS, source="host") == 5 * BLOCK_SIZE
    assert read(metrics.LOOKUPS, result="hit") == 1
    assert read(metrics.LOOKUPS, result="miss") == 2
    assert read(metrics.LOADS) == 1
    assert read(metrics.SKIPPED, reason="already_stored") == 5
    # A rank has its share of a block's heads: the bytes add up, the blocks do not.
    assert read(metrics.BYTES, direction="load", path="host") == 5 * block_bytes
    assert read(metrics.BYTES, direction="store", path="host") == 7 * block_bytes
    assert read(metrics.BYTES) == 12 * block_bytes
    assert read(f"{metrics.SECONDS}_count", direction="load") == num_ranks
    assert read(f"{metrics.SECONDS}_sum", direction="load") > 0
    assert read(f"{metrics.WAIT_SECONDS}_count", direction="load") == num_ranks
    assert read(f"{metrics.BANDWIDTH}_count", direction="store") == 2 * num_ranks
    assert read(metrics.CAPACITY) == HOST_BYTES // block_bytes - 1
    for name in (metrics.DROPPED, metrics.EVICTED, metrics.FAILED, metrics.PINNED):
        assert read(name) == 0


@pytest.fixture(scope="module")
def worked(server: Server) -> Server:
    """The new server after ``work``."""
    work(server)
    return server


def test_metrics_count_the_work(worked: Server, model: Path) -> None:
    check_work(worked, model)
    hit_tokens = worked.metric("vllm:external_prefix_cache_hits_total")
    assert worked.metric(metrics.PROMPT_TOKENS, source="host") == hit_tokens
    # The dashboard's series are served.
    assert names_in_queries() <= {sample.name for sample in worked.samples()}


def host_events(replay_port: int) -> list[Any]:
    """All events about host memory, as a late subscriber requests them from the first on."""
    events: list[Any] = []
    with cast(Any, zmq.Context.instance().socket(zmq.DEALER)) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 30_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://{HOST}:{replay_port}")
        socket.send_multipart((b"", (0).to_bytes(8, "big")))
        while True:
            *_, number, batch = socket.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return [e for e in events if getattr(e, "medium", "") == MEDIUM_CPU]
            events += msgspec.msgpack.decode(batch, type=KVEventBatch).events


def test_a_subscriber_knows_the_blocks_of_the_tier(worked: Server, replay_port: int) -> None:
    stored = host_events(replay_port)
    assert {type(event) for event in stored} == {BlockStored}
    assert [event.token_ids for event in stored] == [LONG, SHORT[: 2 * BLOCK_SIZE]]
    hashes = {block_hash for event in stored for block_hash in event.block_hashes}
    assert len(hashes) == 7
    for event in stored:
        assert event.block_size == BLOCK_SIZE
        assert event.parent_block_hash is None
        assert event.kv_cache_spec_kind == "full_attention"
    # Events travel with the next step.
    worked.reset_prefix_cache(external=True)
    worked.complete(LAST, 1)
    wait_for_metric(worked, metrics.USED, 1)
    removed, last = host_events(replay_port)[len(stored) :]
    assert isinstance(removed, BlockRemoved)
    assert set(removed.block_hashes) == hashes
    assert last.token_ids == LAST[:BLOCK_SIZE]
    assert worked.metric(metrics.EVICTED, reason="reset") == 7
