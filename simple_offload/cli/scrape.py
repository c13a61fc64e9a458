"""A server's /metrics, read once. Samples of engines, ranks and processes are summed."""

import http.client
import math
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from simple_offload.config import ConfigError, nearest

PREFIX = "vllm:simple_offload_"
PROMPT_TOKENS = f"{PREFIX}prompt_tokens_total"
TTFT = "vllm:time_to_first_token_seconds"
_HIT_RATIO = f"{PREFIX}predicted_hit_ratio"
_SCHEMES = ("http", "https")
_TIMEOUT = 10.0
"""Seconds without a byte. A busy API server answers within a second."""

Key = tuple[str, frozenset[tuple[str, str]]]
"""Name and labels of a sample."""


class ScrapeError(Exception):
    """The server cannot be reached, or has none of this connector's series. The message says what
    to do."""


@dataclass(frozen=True)
class Scrape:
    """Samples of this connector, and of vLLM's time to first token. Labels that a caller does not
    name do not matter. What is not there counts as 0."""

    counters: Mapping[Key, float]
    """Also the parts of histograms."""
    gauges: Mapping[Key, float]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels."""
        return sum(self._select(name, labels).values())

    def mean(self, name: str) -> float:
        """The mean over engines, of a gauge that does not add up."""
        values = self._select(name, {}).values()
        return sum(values) / len(values) if values else 0.0

    def by(self, label: str, name: str) -> dict[str, float]:
        """The sums by value of a label."""
        sums: dict[str, float] = defaultdict(float)
        for (_, own), value in self._select(name, {}).items():
            sums[dict(own).get(label, "")] += value
        return dict(sums)

    def quantile(self, name: str, share: float) -> float:
        """An estimate from a histogram's buckets, as Prometheus' histogram_quantile makes it; nan
        if it is empty."""
        below = sorted((float(le), n) for le, n in self.by("le", f"{name}_bucket").items())
        if not below or below[-1][1] <= 0:
            return math.nan
        wanted, lower, num_lower = share * below[-1][1], 0.0, 0.0
        for bound, num in below:
            if num >= wanted:
                if math.isinf(bound) or num == num_lower:
                    return lower
                return lower + (bound - lower) * (wanted - num_lower) / (num - num_lower)
            lower, num_lower = bound, num
        return lower

    def hit_ratios(self) -> dict[float, float]:
        """The predicted share of prompt tokens that are found, by multiple of the host memory, in
        ascending order. Engines count by their prompt tokens. Empty before a prediction."""
        engines: dict[str, dict[float, float]] = defaultdict(dict)
        for (_, own), ratio in self._select(_HIT_RATIO, {}).items():
            labels = dict(own)
            times = float(labels["host_memory"].rstrip("x"))
            engines[labels.get("engine", "")][times] = ratio
        # Before its first prediction an engine has 0 or -1 everywhere.
        known = {engine: each for engine, each in engines.items() if max(each.values()) > 0}
        weights = {engine: self.total(PROMPT_TOKENS, engine=engine) for engine in known}
        total = sum(weights.values())
        all_times = sorted({times for ratios in known.values() for times in ratios})
        return {
            times: sum(weights[engine] * known[engine].get(times, 0) for engine in known) / total
            for times in all_times
            if total
        }

    def since(self, earlier: "Scrape") -> "Scrape | None":
        """What was counted after an earlier scrape; None if a counter has fallen: the server has
        started anew."""
        grown = {key: value - earlier.counters.get(key, 0) for key, value in self.counters.items()}
        if earlier.counters.keys() - grown.keys() or any(value < 0 for value in grown.values()):
            return None
        return Scrape(grown, self.gauges)

    def _select(self, name: str, labels: Mapping[str, str]) -> dict[Key, float]:
        return {
            key: value
            for samples in (self.counters, self.gauges)
            for key, value in samples.items()
            if key[0] == name and labels.items() <= key[1]
        }


def metrics_url(text: str) -> str:
    """The address of /metrics; scheme and path may be left out. Raises ConfigError."""
    scheme, separator, rest = text.rpartition("://")
    scheme = scheme.lower() if separator else "http"
    if scheme not in _SCHEMES:
        raise ConfigError(
            f"URL {text!r}: scheme {scheme!r} is none of http, https{nearest(scheme, _SCHEMES)}"
        )
    form = "must be HOST:PORT, with or without http:// and /metrics"
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        _ = parts.port
    except ValueError as problem:
        raise ConfigError(f"URL {text!r} {form}: {problem}") from None
    if not parts.hostname or "@" in parts.netloc or any(letter.isspace() for letter in text):
        raise ConfigError(f"URL {text!r} {form}")
    path = parts.path.rstrip("/").removesuffix("/metrics")
    return urlunsplit((scheme, parts.netloc, f"{path}/metrics", parts.query, ""))


def scrape(url: str) -> Scrape:
    """Read /metrics. Raises ScrapeError."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as reply:  # noqa: S310 - metrics_url
            content = reply.read()
    except urllib.error.HTTPError as problem:
        raise ScrapeError(
            f"{url} answers HTTP {problem.code} {problem.reason}. Is it a vLLM server's address?"
        ) from None
    except (OSError, http.client.HTTPException, UnicodeError) as problem:
        reason = getattr(problem, "reason", None) or problem
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise ScrapeError(f"{url} cannot be reached: {text}. Is the server up?") from None
    try:
        families = list(text_string_to_metric_families(content.decode()))
    except ValueError as problem:
        raise ScrapeError(f"{url} is not a page of Prometheus metrics: {problem}") from None
    found = _read(families)
    names = {name for samples in (found.counters, found.gauges) for name, _ in samples}
    if not any(name.startswith(PREFIX) for name in names):
        raise ScrapeError(
            f"{url} has no series of this connector. To switch it on, start the server with "
            """--kv-transfer-config '{"kv_connector": "SimpleCPUOffloadConnector", """
            """"kv_connector_module_path": "simple_offload", "kv_role": "kv_both", """
            """"kv_load_failure_policy": "recompute"}'"""
        )
    if PROMPT_TOKENS not in names:
        raise ScrapeError(
            f"{url} has no {PROMPT_TOKENS}: the server's simple_offload is older than this command"
        )
    return found


def _read(families: Iterable[Metric]) -> Scrape:
    counters: dict[Key, float] = {}
    gauges: dict[Key, float] = {}
    for family in families:
        if family.name.startswith((PREFIX, TTFT)):
            samples = gauges if family.type == "gauge" else counters
            for sample in family.samples:
                samples[sample.name, frozenset(sample.labels.items())] = sample.value
    return Scrape(counters, gauges)
