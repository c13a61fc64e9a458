"""What an engine counts: prompt tokens by source, and what connectors report."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.samples import Sample

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
SOURCES = {
    "local_cache_hit": "device_hit_tokens",
    "external_kv_transfer": "external_hit_tokens",
    "local_compute": "computed_tokens",
}
"""vLLM's names of the sources of prompt tokens, and ours."""
_WAYS = {"load": "loaded", "store": "stored"}
SERIES: Sequence[tuple[str, Mapping[str, str], str]] = (
    *((BY_SOURCE, {"source": source}, name) for source, name in SOURCES.items()),
    ("vllm:num_preemptions_total", {}, "preemptions"),
    *(
        each
        for way, done in _WAYS.items()
        for each in (
            ("vllm:simple_offload_bytes_total", {"direction": way}, f"{done}_bytes"),
            ("vllm:simple_offload_transfer_seconds_sum", {"direction": way}, f"{done}_seconds"),
            (f"vllm:kv_offload_{way}_bytes_total", {}, f"{done}_bytes"),
            (f"vllm:kv_offload_{way}_time_total", {}, f"{done}_seconds"),
        )
    ),
    *(
        ("vllm:simple_offload_second_tier_lookups_total", {"result": result}, f"lookups_{result}")
        for result in ("hit", "miss", "late", "slower")
    ),
)
"""Series, their labels, and our names. Bytes, and seconds of copies, are those of all ranks of this
connector, or of vLLM's OffloadingConnector."""
SPEEDS = {
    "vllm:simple_offload_second_tier_tokens_per_second": "fetch_speed",
    "vllm:simple_offload_compute_tokens_per_second": "compute_speed",
}
"""Gauges by which our second tier decides, in tokens a second."""


def counters(samples: Iterable[Sample]) -> dict[str, float]:
    """Running totals of those series that there are, and the speeds."""
    found: dict[str, float] = {}
    for sample in samples:
        if sample.name in SPEEDS:
            found[SPEEDS[sample.name]] = sample.value
        for series, labels, name in SERIES:
            if series == sample.name and labels.items() <= sample.labels.items():
                found[name] = found.get(name, 0) + sample.value
    return found


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The difference of two totals, and the speeds after. A series that is new began at 0."""
    return {
        name: value - (0 if name in SPEEDS.values() else before.get(name, 0))
        for name, value in after.items()
    }
