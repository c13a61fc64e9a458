"""Metrics: what is counted, how it travels to vLLM's loggers, and its Prometheus series.

Both sides count with a Meter and hand vLLM a payload with each step in which there was
something. vLLM adds up the payloads of the ranks and the scheduler's.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Labels = tuple[str, ...]

_SECONDS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_BYTES_PER_SECOND = tuple(
    gigabytes * 1e9
    for gigabytes in (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 200, 400)
)


class Series(NamedTuple):
    """A Prometheus series. ``labels``: its own, beside vLLM's model_name and engine, each with
    the values that it can have."""

    name: str
    kind: str
    """"counter", "gauge" or "histogram"."""
    text: str
    labels: Mapping[str, Labels] = {}
    buckets: tuple[float, ...] = ()


_DIRECTION = {"direction": ("load", "store")}

SERIES: dict[str, Series] = {}


def _series(name: str, *rest: Any) -> str:
    series = Series(f"vllm:simple_offload_{name}", *rest)
    SERIES[series.name] = series
    return series.name


BYTES = _series(
    "bytes_total",
    "counter",
    "Bytes copied between device and host memory, on all ranks together. Path: by DMA or by a "
    "kernel (CUDA), in batches or one descriptor a call (NPU), or in host memory (CPU).",
    _DIRECTION | {"path": ("dma", "kernel", "batch", "single", "host")},
)
SECONDS = _series(
    "transfer_seconds",
    "histogram",
    "Seconds that a transfer's copy took on a rank.",
    _DIRECTION,
    _SECONDS,
)
WAIT_SECONDS = _series(
    "transfer_wait_seconds",
    "histogram",
    "Seconds from a transfer's submission on a rank to the begin of its copy.",
    _DIRECTION,
    _SECONDS,
)
BANDWIDTH = _series(
    "transfer_bytes_per_second",
    "histogram",
    "Bytes per second of a transfer's copy on a rank.",
    _DIRECTION,
    _BYTES_PER_SECOND,
)
FAILED = _series(
    "failed_transfers_total",
    "counter",
    "Transfers that failed, counted on each rank.",
    _DIRECTION | {"reason": ("copy_error", "no_such_block", "thread_died", "switched_off")},
)
LOOKUPS = _series(
    "lookups_total",
    "counter",
    "Requests that were given device blocks, by whether the host tier had some of their prefix "
    "beyond the device's. A preempted request counts again.",
    {"result": ("hit", "miss")},
)
HIT_TOKENS = _series(
    "hit_tokens_total", "counter", "Tokens for which a load from the host tier was started."
)
LOADS = _series(
    "loads_total",
    "counter",
    "Loads that have ended on all ranks. Sync: announced before the end, so that compute waited "
    "for the rest on the device.",
    {"kind": ("sync", "async")},
)
LOADED = _series("loaded_blocks_total", "counter", "Host blocks loaded, on all ranks.")
STORED = _series(
    "stored_blocks_total", "counter", "Blocks stored on all ranks that can be found from now on."
)
SKIPPED = _series(
    "skipped_blocks_total",
    "counter",
    "Blocks of requests that were not stored because there was no need to.",
    {"reason": ("already_stored", "below_threshold")},
)
DROPPED = _series(
    "dropped_blocks_total",
    "counter",
    "Blocks that should have been stored and are not kept.",
    {"reason": ("tier_full", "too_late", "copy_failed", "reset", "obsolete")},
)
EVICTED = _series(
    "evicted_blocks_total",
    "counter",
    "Host blocks that lost what they held.",
    {"reason": ("lru", "load_failed", "reset")},
)
CAPACITY = _series("capacity_blocks", "gauge", "Host blocks there are.")
USED = _series("used_blocks", "gauge", "Host blocks that hold something.")
PINNED = _series(
    "pinned_blocks", "gauge", "Host blocks that a transfer or a request about to load holds."
)

_TYPES, _DATA, _SAMPLES = "types", "data", "samples"


@dataclass
class OffloadStats(KVConnectorStats):
    """The payload: ``{"types": {name: kind}, "data": {name: {labels: number}}, "samples":
    {name: {labels: [number]}}}``.

    Under MultiConnector vLLM looks the class up by the connector's name and finds its built-in
    connector's, which reads "types" and "data" like this, knows counters and gauges only, and
    leaves "samples", of histograms, alone.
    """

    def __post_init__(self) -> None:
        for part in (_TYPES, _DATA, _SAMPLES):
            self.data.setdefault(part, {})

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}
        self.__post_init__()

    def is_empty(self) -> bool:
        return not self.data[_DATA] and not self.data[_SAMPLES]

    def aggregate(self, other: KVConnectorStats) -> "OffloadStats":
        """Add ``other``'s numbers to these. Gauges become ``other``'s."""
        assert isinstance(other, OffloadStats)
        for name, values in other.data[_DATA].items():
            for labels, value in values.items():
                (self.set if SERIES[name].kind == "gauge" else self.add)(name, value, *labels)
        for name, samples in other.data[_SAMPLES].items():
            own = self.data[_SAMPLES].setdefault(name, {})
            for labels, values in samples.items():
                own.setdefault(labels, []).extend(values)
        return self

    def reduce(self) -> dict[str, Any]:
        """The line in vLLM's periodic log: what happened in the interval."""
        loaded, stored = (self._bytes(direction) for direction in ("load", "store"))
        line: dict[str, Any] = {}
        if hits := self._sum(LOOKUPS, "hit"):
            line["Host hits"] = f"{hits:.0f} of {self._sum(LOOKUPS):.0f} lookups"
            line["Hit tokens"] = round(self._sum(HIT_TOKENS))
        for name, verb, direction, num_bytes in (
            (LOADED, "Loaded", "load", loaded),
            (STORED, "Stored", "store", stored),
        ):
            if num_bytes or self._sum(name):
                line[verb] = f"{self._sum(name):.0f} blocks, {num_bytes / 2**20:.1f} MiB"
                if seconds := sum(self._samples(SECONDS, direction)):
                    line[f"{verb} at"] = f"{num_bytes / seconds / 1e9:.2f} GB/s"
        if waits := self._samples(WAIT_SECONDS, "load"):
            line["Load wait"] = f"{1e3 * sum(waits) / len(waits):.1f} ms"
        for name, text in (
            (DROPPED, "Dropped blocks"),
            (EVICTED, "Evicted blocks"),
            (FAILED, "Failed transfers"),
        ):
            if count := self._sum(name):
                line[text] = round(count)
        if CAPACITY in self.data[_DATA]:
            line["Host blocks"] = f"{self._sum(USED):.0f} of {self._sum(CAPACITY):.0f}"
        return line

    # Counting

    def add(self, name: str, value: float, *labels: str) -> None:
        """Let a counter grow."""
        values = self._values(name)
        values[labels] = values.get(labels, 0) + value

    def set(self, name: str, value: float, *labels: str) -> None:
        """Let a gauge stand there."""
        self._values(name)[labels] = value

    def sample(self, name: str, value: float, *labels: str) -> None:
        """Let a histogram see a value."""
        self.data[_SAMPLES].setdefault(name, {}).setdefault(labels, []).append(value)

    def _values(self, name: str) -> dict[Labels, float]:
        values: dict[Labels, float] | None = self.data[_DATA].get(name)
        if values is None:
            self.data[_TYPES][name] = SERIES[name].kind
            self.data[_DATA][name] = values = {}
        return values

    def _sum(self, name: str, first_label: str | None = None) -> float:
        values: dict[Labels, float] = self.data[_DATA].get(name, {})
        return sum(v for labels, v in values.items() if first_label in (None, *labels[:1]))

    def _bytes(self, direction: str) -> float:
        return self._sum(BYTES, direction)

    def _samples(self, name: str, direction: str) -> list[float]:
        samples: list[float] = self.data[_SAMPLES].get(name, {}).get((direction,), [])
        return samples


class Meter:
    """Counts between one payload and the next. Used by one thread."""

    def __init__(self) -> None:
        self._stats = OffloadStats()
        self._counts: dict[tuple[str, ...], float] = {}
        """By name and labels: a few are counted for each request."""
        self._gauges: dict[str, float] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Let a counter grow; 0 is nothing to speak of."""
        if value:
            series = (name, *labels)
            self._counts[series] = self._counts.get(series, 0) + value

    def sample(self, name: str, value: float, *labels: str) -> None:
        """Let a histogram see a value."""
        self._stats.sample(name, value, *labels)

    def take(self, gauges: Mapping[str, float] = {}) -> OffloadStats | None:
        """The payload since the last call, None when there is nothing in it. Of ``gauges`` it
        has all, if one has changed."""
        for (counter, *labels), value in self._counts.items():
            self._stats.add(counter, value, *labels)
        self._counts.clear()
        if gauges != self._gauges:
            self._gauges = dict(gauges)
            for name, value in gauges.items():
                self._stats.set(name, value)
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadStats()
        return stats


class OffloadPromMetrics(KVConnectorPromMetrics):
    """The series in the process that serves /metrics. Each is there from the start, at 0 with
    every value that its labels can have."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type[PromMetric], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._classes: dict[str, Any] = {
            "counter": self._counter_cls,
            "gauge": self._gauge_cls,
            "histogram": self._histogram_cls,
        }
        self._children: dict[tuple[int, str, Labels], Any] = {}
        for series in SERIES.values():
            metric = self._make(series)
            for engine, common in per_engine_labelvalues.items():
                for labels in itertools.product(*series.labels.values()):
                    self._children[engine, series.name, labels] = metric.labels(*common, *labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count a payload in."""
        for name, values in transfer_stats_data[_DATA].items():
            for labels, value in values.items():
                child = self._children[engine_idx, name, tuple(labels)]
                (child.set if SERIES[name].kind == "gauge" else child.inc)(value)
        for name, samples in transfer_stats_data[_SAMPLES].items():
            for labels, sampled in samples.items():
                child = self._children[engine_idx, name, tuple(labels)]
                for value in sampled:
                    child.observe(value)

    def _make(self, series: Series) -> Any:
        keywords: dict[str, Any] = dict(
            name=series.name,
            documentation=series.text,
            labelnames=[*self._labelnames, *series.labels],
        )
        if series.kind == "gauge":
            # With several API servers: what the one that heard last says.
            keywords["multiprocess_mode"] = "mostrecent"
        elif series.kind == "histogram":
            keywords["buckets"] = series.buckets
        return self._classes[series.kind](**keywords)
