"""Metrics: the payload, its way to vLLM's loggers, the periodic log line and the series."""

import itertools
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector as BuiltinConnector,
)
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from simple_offload import metrics
from simple_offload.connector import SimpleCPUOffloadConnector
from simple_offload.metrics import SERIES, Meter, OffloadStats
from simple_offload.vllm_compat import vllm_version
from tests.conftest import MakeVllmConfig

NAME = "SimpleCPUOffloadConnector"


def worker_stats() -> OffloadStats:
    """A rank's numbers: a load of 2 MiB in 1 ms, and a failed store."""
    stats = OffloadStats()
    stats.add(metrics.BYTES, 1 << 20, "load", "dma")
    stats.add(metrics.BYTES, 1 << 20, "load", "kernel")
    stats.add(metrics.FAILED, 1, "store", "copy_error")
    stats.sample(metrics.SECONDS, 1e-3, "load")
    stats.sample(metrics.WAIT_SECONDS, 4e-3, "load")
    stats.sample(metrics.BANDWIDTH, 2 * (1 << 30), "load")
    return stats


def scheduler_stats() -> OffloadStats:
    stats = OffloadStats()
    for result in ("hit", "miss", "miss"):
        stats.add(metrics.LOOKUPS, 1, result)
    stats.add(metrics.PROMPT_TOKENS, 96, "host")
    stats.add(metrics.LOADED, 3)
    stats.add(metrics.DROPPED, 5, "tier_full")
    stats.set(metrics.CAPACITY, 100)
    stats.set(metrics.USED, 40)
    stats.set(metrics.PINNED, 3)
    stats.add(metrics.SECOND_TIER_LOOKUPS, 2, "late")
    stats.set(metrics.FETCH_SPEED, 25_000.5)
    return stats


def over_the_wire(stats: dict[str, Any]) -> dict[str, Any]:
    """Encode and decode, as between the engine and the process that serves /metrics."""
    sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=stats))
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    assert received.scheduler_stats is not None
    assert received.scheduler_stats.kv_connector_stats is not None
    data: dict[str, Any] = received.scheduler_stats.kv_connector_stats
    return data


# The payload


def test_counters_and_samples_add_up_and_gauges_are_replaced() -> None:
    other = worker_stats()
    later = OffloadStats()
    later.set(metrics.USED, 39)
    total = worker_stats().aggregate(other).aggregate(scheduler_stats()).aggregate(later)
    data, samples = total.data["data"], total.data["samples"]
    assert data[metrics.BYTES] == {("load", "dma"): 2 << 20, ("load", "kernel"): 2 << 20}
    assert data[metrics.FAILED] == {("store", "copy_error"): 2}
    assert data[metrics.USED] == {(): 39}
    assert data[metrics.LOOKUPS] == {("hit",): 1, ("miss",): 2}
    assert samples[metrics.SECONDS] == {("load",): [1e-3, 1e-3]}
    assert other == worker_stats()
    total.reset()
    assert total.is_empty()
    total.sample(metrics.SECONDS, 1.0, "load")
    assert not total.is_empty()


def test_a_meter_drains_counts_once_and_gauges_that_changed() -> None:
    meter = Meter()
    gauges: dict[str, float] = {metrics.USED: 3, metrics.PINNED: 0}
    for reason, count in (("lru", 2), ("reset", 1), ("lru", 3), ("load_failed", 0)):
        meter.add(metrics.EVICTED, count, reason)
    first, again = meter.drain(gauges), meter.drain(gauges)
    assert first is not None
    assert first.data["data"] == {
        metrics.EVICTED: {("lru",): 5, ("reset",): 1},
        metrics.USED: {(): 3},
        metrics.PINNED: {(): 0},
    }
    assert again is None
    gauges[metrics.PINNED] = 1
    changed = meter.drain(gauges)
    assert changed is not None
    assert changed.data["data"] == {metrics.USED: {(): 3}, metrics.PINNED: {(): 1}}


# The periodic log


def log_line(config: KVTransferConfig, *payloads: dict[str, Any]) -> str:
    lines: list[str] = []
    logging: Any = KVConnectorLogging(config)
    for payload in payloads:
        logging.observe(over_the_wire(payload))
    logging.log(lambda text, *arguments: lines.append(text % arguments))
    assert len(lines) == 1
    assert "\n" not in lines[0]
    return lines[0]


def test_the_line_in_the_log(make_vllm_config: MakeVllmConfig) -> None:
    both = worker_stats().aggregate(scheduler_stats()).to_dict()
    config = make_vllm_config().kv_transfer_config
    assert config is not None
    line = log_line(config, both, worker_stats().to_dict())
    assert line == (
        "KV Transfer metrics: Host hits=1 of 3 lookups, Hit tokens=96, "
        "Loaded=3 blocks, 4.0 MiB, Loaded at=2.10 GB/s, Load wait=4.0 ms, "
        "Dropped blocks=5, Failed transfers=2, Host blocks=40 of 100"
    )
    without_news = OffloadStats()
    without_news.set(metrics.CAPACITY, 8)
    without_news.set(metrics.USED, 2)
    assert without_news.reduce() == {"Host blocks": "2 of 8"}


# Prometheus


def test_every_series_exists_from_the_start(make_vllm_config: MakeVllmConfig) -> None:
    """Also with the name that /metrics shows: the client adds suffixes where a name lacks them."""
    registry = CollectorRegistry()
    types: dict[Any, Any] = {
        kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    engines: dict[int, list[object]] = {0: ["random", "0"], 1: ["random", "1"]}
    names = ["model_name", "engine"]
    made = SimpleCPUOffloadConnector.build_prom_metrics(make_vllm_config(), types, names, engines)

    def read(name: str, engine: int, **labels: str) -> float | None:
        common = {"model_name": "random", "engine": str(engine)}
        return registry.get_sample_value(name, common | labels)

    for series in SERIES.values():
        suffix = "_count" if series.kind == "histogram" else ""
        for values in itertools.product(*series.labels.values()):
            labels = dict(zip(series.labels, values, strict=True))
            assert read(series.name + suffix, 0, **labels) == 0
    made.observe(scheduler_stats().to_dict(), 1)
    assert [read(metrics.LOADED, engine) for engine in (0, 1)] == [0, 3]
    assert read(metrics.SECOND_TIER_LOOKUPS, 1, result="late") == 2
    assert read(metrics.FETCH_SPEED, 1) == 25_000.5
    unlisted = OffloadStats()
    unlisted.add(metrics.DROPPED, 1, "unlisted")
    with pytest.raises(KeyError):  # else its count would be lost
        made.observe(unlisted.to_dict())


# Beside another connector


@pytest.mark.skipif(vllm_version() < (0, 31), reason="this vLLM's built-in class has no statistics")
def test_beside_another_the_builtin_class_reads_the_payload() -> None:
    """MultiConnector finds that class by name; it aggregates and logs counters and gauges."""
    payload = over_the_wire({NAME: worker_stats().aggregate(scheduler_stats()).to_dict()})
    rebuilt = MultiConnector.build_kv_connector_stats(payload)
    assert rebuilt is not None
    builtin = BuiltinConnector.build_kv_connector_stats()
    assert type(rebuilt.data[NAME]) is type(builtin)
    config = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both")
    line = log_line(config, payload, {NAME: scheduler_stats().to_dict()})
    assert f"\"{metrics.PROMPT_TOKENS}:('host',)\": 192" in line
    assert f"'{metrics.USED}': 40" in line
