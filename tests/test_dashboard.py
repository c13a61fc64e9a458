"""The Grafana dashboard queries exported series only, and shows all of them."""

import inspect
from itertools import combinations
from typing import Any

import pytest
from vllm.v1.metrics import loggers

from simple_offload.metrics import SERIES, Series
from tests.dashboard import DASHBOARD, Query, load, names_in, queries_in

COMMON = {"model_name", "engine"}
PREFIX = "vllm:simple_offload_"
QUERIES = list(queries_in(DASHBOARD))


def series_of(name: str) -> Series:
    """The series that serves ``name`` on /metrics."""
    base = name.removesuffix("_bucket")
    series = SERIES[base]
    assert (series.kind == "histogram") == (base != name), f"{name} of a {series.kind}"
    return series


@pytest.mark.parametrize("query", QUERIES, ids=[query.text[:60] for query in QUERIES])
def test_queries_name_existing_series_and_labels(query: Query) -> None:
    assert query.selected
    for name, labels in query.selected:
        assert labels.keys() >= COMMON, "one model and one engine can be chosen"
        own: dict[str, Any] = {}
        if name.startswith(PREFIX):
            own = dict(series_of(name).labels)
            assert query.grouped <= {*own, *COMMON, "le"}
        for label, value in labels.items() - {(of, f"${of}") for of in COMMON}:
            assert value in own[label]
    assert query.shown <= query.grouped


def test_every_series_is_shown() -> None:
    shown = {name.removesuffix("_bucket") for name in names_in(DASHBOARD)}
    assert {name for name in shown if name.startswith(PREFIX)} == set(SERIES)


def test_all_other_series_are_vllm_s() -> None:
    source = inspect.getsource(loggers)
    rest = {name for name in names_in(DASHBOARD) if not name.startswith(PREFIX)}
    for name in rest:
        assert f'"{name.removesuffix("_total")}"' in source, name


def test_counters_are_rates() -> None:
    for query in QUERIES:
        for name, _ in query.selected:
            grows = name.endswith(("_total", "_bucket"))
            assert grows == ("rate(" in query.text or "increase(" in query.text), query.text


def test_variables_are_asked_of_a_series_that_is_always_there() -> None:
    variables = load(DASHBOARD)["templating"]["list"]
    assert {variable["name"] for variable in variables} == {"datasource", *COMMON}
    for variable in variables:
        if variable["type"] == "query":
            assert f"({PREFIX}capacity_blocks" in variable["definition"]
            assert variable["query"]["query"] == variable["definition"]


def test_panels_lie_beside_each_other() -> None:
    panels = load(DASHBOARD)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert all(place["x"] + place["w"] <= 24 for place in places)
