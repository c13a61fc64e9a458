"""Metrics: the Prometheus series, and the payload that carries counts to vLLM's loggers.

The scheduler and every rank count with a Meter, which gives vLLM a payload for each step with
news. vLLM aggregates the payloads of all of them.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
)

from simple_offload.miss_reason import MissReason
from simple_offload.sizing.forecast import FACTORS

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
    """A Prometheus series. ``labels``: label -> its possible values, without vLLM's own labels
    model_name and engine."""

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
    "Bytes copied between device and host memory, summed over ranks. Path: DMA or kernel (CUDA), "
    "batches or single descriptors (NPU), plain memory (CPU).",
    _DIRECTION | {"path": ("dma", "kernel", "batch", "single", "host")},
)
SECONDS = _series(
    "transfer_seconds",
    "histogram",
    "Duration of a transfer's copy on one rank.",
    _DIRECTION,
    _SECONDS,
)
WAIT_SECONDS = _series(
    "transfer_wait_seconds",
    "histogram",
    "Time from a transfer's submission on a rank to the start of its copy.",
    _DIRECTION,
    _SECONDS,
)
BANDWIDTH = _series(
    "transfer_bytes_per_second",
    "histogram",
    "Bytes per second of a transfer's copy on one rank.",
    _DIRECTION,
    _BYTES_PER_SECOND,
)
FAILED = _series(
    "failed_transfers_total",
    "counter",
    "Failed transfers, counted on each rank.",
    _DIRECTION | {"reason": ("copy_error", "no_such_block", "thread_died", "switched_off")},
)
LOOKUPS = _series(
    "lookups_total",
    "counter",
    "Requests that asked the caches and received device blocks, each once. Hit: the host tier "
    "loaded more of their prompt than the device had.",
    {"result": ("hit", "miss")},
)
PROMPT_TOKENS = _series(
    "prompt_tokens_total",
    "counter",
    "Prompt tokens of requests that received device blocks, each request once, by where they came "
    "from. Those of a failed load count as computed.",
    {"source": ("device", "host", "second_tier", "compute")},
)
MISSED_TOKENS = _series(
    "missed_tokens_total",
    "counter",
    "Prompt tokens that were computed, by the reason why no cache had them "
    "(simple_offload/miss_reason.py).",
    {"reason": tuple(reason.label for reason in MissReason)},
)
UNSEEN_FROM = _series(
    "unseen_from_tokens",
    "histogram",
    "By prompt whose first missing token was never seen: number of tokens before it.",
    {},
    (0, *(4.0**power for power in range(2, 11))),
)
LOADS = _series(
    "loads_total",
    "counter",
    "Loads that ended on all ranks. Sync: announced before the end; compute waited for the rest "
    "on the device.",
    {"kind": ("sync", "async")},
)
OVERLAPPED = _series(
    "overlapped_steps_total",
    "counter",
    "Steps on a rank whose first layers computed without waiting for the last layers' loaded KV.",
)
LOADED = _series(
    "loaded_blocks_total", "counter", "Host blocks loaded; all ranks together count once."
)
STORED = _series(
    "stored_blocks_total", "counter", "Blocks stored on all ranks; lookups can find them."
)
SKIPPED = _series(
    "skipped_blocks_total",
    "counter",
    "Blocks that needed no store, or were not worth one.",
    {"reason": ("already_stored", "below_threshold", "overload")},
)
DROPPED = _series(
    "dropped_blocks_total",
    "counter",
    "Blocks that should have been stored but were lost.",
    {"reason": ("tier_full", "too_late", "copy_failed", "reset", "obsolete")},
)
EVICTED = _series(
    "evicted_blocks_total",
    "counter",
    "Host blocks whose contents were removed. Copy: the device had them too.",
    {"reason": ("copy", "lru", "load_failed", "reset")},
)


def times(factor: float) -> str:
    """A label of ``PREDICTED``."""
    return f"{factor:g}x"


PREDICTED = _series(
    "predicted_hit_ratio",
    "gauge",
    "Share of the last hour's prompt tokens that would have been found with so many times the host "
    "memory, and this device.",
    {"host_memory": tuple(map(times, FACTORS))},
)
HOST_BYTES = _series("host_memory_bytes", "gauge", "Host memory of all ranks together.")
CAPACITY = _series("capacity_blocks", "gauge", "Host blocks opened so far, full or empty.")
USED = _series("used_blocks", "gauge", "Host blocks with contents.")
PINNED = _series(
    "pinned_blocks", "gauge", "Host blocks held by a transfer, or by a request about to load."
)
SECOND_TIER_LOOKUPS = _series(
    "second_tier_lookups_total",
    "counter",
    "Requests for which the second tier was considered. Hit: it had more of their prefix than host "
    "memory, in time. Slower: a fetch would take longer than computing.",
    {"result": ("hit", "miss", "late", "slower")},
)
SECOND_TIER_BYTES = _series(
    "second_tier_bytes_total",
    "counter",
    "Bytes of objects read into host memory, or written behind it.",
    {"direction": ("read", "write")},
)
FETCHED = _series(
    "fetched_blocks_total",
    "counter",
    "Host blocks filled from the second tier; lookups can find them.",
)
SECOND_TIER_FAILED = _series(
    "second_tier_failed_total",
    "counter",
    "Objects that could not be read or were damaged, and writes that failed.",
    {"direction": ("read", "write")},
)
SECOND_TIER_DROPPED = _series(
    "second_tier_dropped_blocks_total",
    "counter",
    "Host blocks that were not written: too many waited (busy), or their contents left first.",
    {"reason": ("busy", "evicted")},
)
SECOND_TIER_ON = _series(
    "second_tier_pays",
    "gauge",
    "1 while the second tier is used, 0 while computing is quicker, or after it was switched off.",
)
FETCH_SPEED = _series(
    "second_tier_tokens_per_second",
    "gauge",
    "Tokens per second that fetches from the second tier bring, as measured.",
)
COMPUTE_SPEED = _series(
    "compute_tokens_per_second",
    "gauge",
    "Prompt tokens per second of compute, as measured; 0 before.",
)

_TYPES, _DATA, _SAMPLES = "types", "data", "samples"


@dataclass
class OffloadStats(KVConnectorStats):
    """The payload: ``{"types": {name: kind}, "data": {name: {labels: number}}, "samples":
    {name: {labels: [number]}}}``, the latter for histograms.

    Under MultiConnector vLLM looks the class up by the connector's name and finds its built-in
    connector's. That one reads "types" and "data" in this format, and ignores "samples".
    """

    def __post_init__(self) -> None:
        for key in (_TYPES, _DATA, _SAMPLES):
            self.data.setdefault(key, {})

    def reset(self) -> None:
        self.data = {}
        self.__post_init__()

    def is_empty(self) -> bool:
        return not self.data[_DATA] and not self.data[_SAMPLES]

    def aggregate(self, other: KVConnectorStats) -> "OffloadStats":
        """Add ``other``'s counters and samples to these, and take over its gauges."""
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
        """Name -> value for the line of the interval in vLLM's periodic log."""
        line: dict[str, Any] = {}
        if hits := self._sum(LOOKUPS, "hit"):
            line["Host hits"] = f"{hits:.0f} of {self._sum(LOOKUPS):.0f} lookups"
            loaded = (self._sum(PROMPT_TOKENS, source) for source in ("host", "second_tier"))
            line["Hit tokens"] = round(sum(loaded))
        for name, verb, direction in ((LOADED, "Loaded", "load"), (STORED, "Stored", "store")):
            num_bytes = self._sum(BYTES, direction)
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

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add ``value`` to a counter."""
        values = self._values(name)
        values[labels] = values.get(labels, 0) + value

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._values(name)[labels] = value

    def sample(self, name: str, value: float, *labels: str) -> None:
        """Add ``value`` to a histogram."""
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

    def _samples(self, name: str, direction: str) -> list[float]:
        samples: list[float] = self.data[_SAMPLES].get(name, {}).get((direction,), [])
        return samples


class Meter:
    """Counts until the next payload. Not thread-safe."""

    def __init__(self) -> None:
        self._stats = OffloadStats()
        self._counts: dict[str, dict[Labels, float]] = {}
        """Of counters. They are OffloadStats' data, without a call, since requests count here."""
        self._gauges: dict[str, float] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add ``value`` to a counter; 0 makes no payload."""
        if value:
            values = self._counts.get(name)
            if values is None:
                values = self._counts[name] = {}
            values[labels] = values.get(labels, 0) + value

    def set(self, name: str, value: float, *labels: str) -> None:
        self._stats.set(name, value, *labels)

    def sample(self, name: str, value: float, *labels: str) -> None:
        self._stats.sample(name, value, *labels)

    def drain(self, gauges: Mapping[str, float] = {}) -> OffloadStats | None:
        """Return the counts since the last call, and all ``gauges`` if one has changed. None if
        both are empty."""
        if self._counts:
            self._stats.data[_DATA].update(self._counts)
            self._stats.data[_TYPES].update(dict.fromkeys(self._counts, "counter"))
            self._counts = {}
        if gauges != self._gauges:
            self._gauges = dict(gauges)
            for name, value in gauges.items():
                self._stats.set(name, value)
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadStats()
        return stats


class OffloadPromMetrics(KVConnectorPromMetrics):
    """The series in the process that serves /metrics. Each exists from the start, at 0, for every
    combination of its labels' values."""

    def __init__(
        self,
        vllm_config: VllmConfig,
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
        """Add a payload to the series. KeyError for an unknown label value."""
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
            # With several API servers: the latest value that any of them received.
            keywords["multiprocess_mode"] = "mostrecent"
        elif series.kind == "histogram":
            keywords["buckets"] = series.buckets
        return self._classes[series.kind](**keywords)
