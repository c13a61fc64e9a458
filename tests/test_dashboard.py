"""The Grafana dashboard queries exported series only, and shows all of them."""

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from vllm.v1.metrics import loggers

from simple_offload.metrics import SERIES
from tools.set_up import ROOT

DASHBOARD: dict[str, Any] = json.loads((ROOT / "dashboards" / "simple-offload.json").read_text())

_SELECTOR = re.compile(r"(vllm:[a-z_]+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'([a-z_]+)\s*(=~|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"by \(([^)]*)\)")
_TEMPLATE = re.compile(r"\{\{(\w+)\}\}")


class Query(NamedTuple):
    """A query of a panel. ``selected``: by series, the labels that it filters by. ``grouped``: the
    labels that it groups by. ``shown``: the labels in its legend."""

    text: str
    selected: list[tuple[str, dict[str, str]]]
    grouped: set[str]
    shown: set[str]


def queries() -> Iterator[Query]:
    """Every panel's queries."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            selected = [
                (name, {label: value for label, _, value in _MATCHER.findall(matchers)})
                for name, matchers in _SELECTOR.findall(text)
            ]
            grouped = {
                label.strip() for labels in _GROUPING.findall(text) for label in labels.split(",")
            }
            yield Query(text, selected, grouped, set(_TEMPLATE.findall(target["legendFormat"])))


def names_in_queries() -> set[str]:
    """The names of series in queries."""
    return {name for query in queries() for name, _ in query.selected}


COMMON = {"model_name", "engine"}
PREFIX = "vllm:simple_offload_"
QUERIES = list(queries())


@pytest.mark.parametrize("query", QUERIES, ids=[query.text[:60] for query in QUERIES])
def test_queries_name_existing_series_and_labels_and_show_rates_of_counters(query: Query) -> None:
    assert query.selected
    for name, labels in query.selected:
        assert labels.keys() >= COMMON, "one model and one engine can be chosen"
        own: dict[str, Any] = {}
        if name.startswith(PREFIX):
            series = SERIES[name.removesuffix("_bucket")]
            assert (series.kind == "histogram") == name.endswith("_bucket")
            own = dict(series.labels)
            assert query.grouped <= {*own, *COMMON, "le"}
        for label, value in labels.items() - {(of, f"${of}") for of in COMMON}:
            assert value in own[label]
        grows = name.endswith(("_total", "_bucket"))
        assert grows == ("rate(" in query.text or "increase(" in query.text)
    assert query.shown <= query.grouped


def test_every_series_is_shown() -> None:
    shown = {name.removesuffix("_bucket") for name in names_in_queries()}
    assert {name for name in shown if name.startswith(PREFIX)} == set(SERIES)


def test_all_other_series_are_vllm_s() -> None:
    source = inspect.getsource(loggers)
    rest = {name for name in names_in_queries() if not name.startswith(PREFIX)}
    for name in rest:
        assert f'"{name.removesuffix("_total")}"' in source, name


def test_variables_are_asked_of_a_series_that_is_always_there() -> None:
    variables = DASHBOARD["templating"]["list"]
    assert {variable["name"] for variable in variables} == {"datasource", *COMMON}
    for variable in variables:
        if variable["type"] == "query":
            assert f"({PREFIX}capacity_blocks" in variable["definition"]
            assert variable["query"]["query"] == variable["definition"]
