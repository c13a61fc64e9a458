"""What a server counts of itself, read from its /metrics."""

import re
from collections.abc import Iterable, Mapping

from prometheus_client.samples import Sample

Counters = dict[str, float]
"""Running totals: prompt tokens by source, and bytes moved if the connector tells them."""

SOURCES: Mapping[str, str] = {
    "local_compute": "computed_tokens",
    "local_cache_hit": "device_hit_tokens",
    "external_kv_transfer": "external_hit_tokens",
}
"""vLLM's names and ours."""

# vLLM's OffloadingConnector says vllm:kv_offload_load_bytes_total and ..._store_bytes_total.
_BYTES = re.compile(r"(load|store)(ed)?_bytes_total")


def counters(samples: Iterable[Sample]) -> Counters:
    """The totals in ``samples``. Those of bytes are missing if no series holds them."""
    found: Counters = dict.fromkeys(SOURCES.values(), 0)
    for sample in samples:
        if sample.name == "vllm:prompt_tokens_by_source_total":
            name = SOURCES.get(sample.labels["source"])
        elif match := _BYTES.search(sample.name):
            name = {"load": "loaded_bytes", "store": "stored_bytes"}[match[1]]
        else:
            continue
        if name is not None:
            found[name] = found.get(name, 0) + sample.value
    return found


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> Counters:
    """What was added. A series that appeared meanwhile began at 0."""
    return {name: value - before.get(name, 0) for name, value in after.items()}
