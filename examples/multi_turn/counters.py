"""A server's own counters, from its /metrics."""

from collections.abc import Iterable, Mapping

from prometheus_client.samples import Sample

Counters = dict[str, float]
"""Running totals: prompt tokens by source, and bytes moved if the connector reports them."""

SOURCES: Mapping[str, str] = {
    "local_compute": "computed_tokens",
    "local_cache_hit": "device_hit_tokens",
    "external_kv_transfer": "external_hit_tokens",
}
"""vLLM's names and ours."""

BYTES: tuple[tuple[str, Mapping[str, str], str], ...] = (
    ("vllm:simple_offload_bytes_total", {"direction": "load"}, "loaded_bytes"),
    ("vllm:simple_offload_bytes_total", {"direction": "store"}, "stored_bytes"),
    ("vllm:kv_offload_load_bytes_total", {}, "loaded_bytes"),
    ("vllm:kv_offload_store_bytes_total", {}, "stored_bytes"),
)
"""Series and labels of the connectors' bytes: of this one, and of vLLM's OffloadingConnector."""


def counters(samples: Iterable[Sample]) -> Counters:
    """The totals in ``samples``. Totals of bytes are missing if no series has them."""
    found: Counters = dict.fromkeys(SOURCES.values(), 0)
    for sample in samples:
        if (name := _name(sample)) is not None:
            found[name] = found.get(name, 0) + sample.value
    return found


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> Counters:
    """The increase of each total. A series that is new in ``after`` began at 0."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


def _name(sample: Sample) -> str | None:
    if sample.name == "vllm:prompt_tokens_by_source_total":
        return SOURCES.get(sample.labels["source"])
    return next(
        (
            name
            for series, labels, name in BYTES
            if series == sample.name and labels.items() <= sample.labels.items()
        ),
        None,
    )
