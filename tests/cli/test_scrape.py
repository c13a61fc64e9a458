"""Addresses, and what is computed of samples."""

import math

import pytest

from simple_offload.cli.scrape import Scrape, metrics_url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("http://host:8000", "http://host:8000/metrics"),
        ("HTTPS://host/", "https://host/metrics"),
        ("host:8000/metrics/", "http://host:8000/metrics"),
        ("https://gateway/model-a", "https://gateway/model-a/metrics"),
        ("[::1]:8000", "http://[::1]:8000/metrics"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert metrics_url(text) == url


def histogram(*buckets: tuple[str, float]) -> Scrape:
    """Of two engines with the same counts."""
    return Scrape(
        {
            ("t_bucket", frozenset({("le", le), ("engine", engine)})): num
            for le, num in buckets
            for engine in "01"
        },
        {},
    )


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.7, 3.0), (0.8, 4.0), (0.9, 4.0)]
)
def test_quantiles_are_those_of_prometheus(share: float, value: float) -> None:
    scrape = histogram(("1.0", 5), ("2.0", 6), ("4.0", 8), ("+Inf", 10))
    assert scrape.quantile("t", share) == value


def test_a_quantile_of_nothing() -> None:
    assert math.isnan(histogram(("1.0", 0), ("+Inf", 0)).quantile("t", 0.5))
    assert math.isnan(Scrape({}, {}).quantile("t", 0.5))
    assert histogram(("0.0", 3), ("1.0", 4), ("+Inf", 4)).quantile("t", 0.5) == 0
