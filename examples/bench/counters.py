"""What a server counts: prompt tokens by source, and the bytes of connectors that report them."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.samples import Sample

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
SOURCES = {
    "local_compute": "computed_tokens",
    "local_cache_hit": "device_hit_tokens",
    "external_kv_transfer": "external_hit_tokens",
}
"""vLLM's names of the sources of prompt tokens, and ours."""
SERIES: Sequence[tuple[str, Mapping[str, str], str]] = (
    *((BY_SOURCE, {"source": source}, name) for source, name in SOURCES.items()),
    ("vllm:simple_offload_bytes_total", {"direction": "load"}, "loaded_bytes"),
    ("vllm:simple_offload_bytes_total", {"direction": "store"}, "stored_bytes"),
    ("vllm:kv_offload_load_bytes_total", {}, "loaded_bytes"),
    ("vllm:kv_offload_store_bytes_total", {}, "stored_bytes"),
)
"""Series, their labels, and our names. Bytes are those of this connector, and those of vLLM's
OffloadingConnector."""


def counters(samples: Iterable[Sample]) -> dict[str, float]:
    """Running totals: prompt tokens by source, and bytes if a connector reports them."""
    found = dict.fromkeys(SOURCES.values(), 0.0)
    for sample in samples:
        for series, labels, name in SERIES:
            if series == sample.name and labels.items() <= sample.labels.items():
                found[name] = found.get(name, 0) + sample.value
    return found


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The difference of two totals. A series that is new began at 0."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


def with_loaded_bytes(
    counted: Mapping[str, float], bytes_per_token: int | None
) -> dict[str, float]:
    """``counted``. Where a connector does not report its loads, they are computed from its hits;
    ``bytes_per_token`` (KV of all layers) is None if not known."""
    numbers = dict(counted)
    if bytes_per_token is not None and counted.get("external_hit_tokens"):
        numbers.setdefault("loaded_bytes", counted["external_hit_tokens"] * bytes_per_token)
    return numbers
