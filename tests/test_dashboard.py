"""The Grafana dashboard queries exported series only, and shows all of them."""

import json
import re
from typing import Any

import pytest

from simple_offload.metrics import SERIES
from tools.set_up import ROOT

DASHBOARD: dict[str, Any] = json.loads((ROOT / "dashboards" / "simple-offload.json").read_text())

_SELECTOR = re.compile(r"(vllm:[a-z_]+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'([a-z_]+)\s*(=~|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"by \(([^)]*)\)")
_TEMPLATE = re.compile(r"\{\{(\w+)\}\}")


COMMON = {"model_name", "engine"}
PREFIX = "vllm:simple_offload_"
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def names_in_queries() -> set[str]:
    """The names of series in queries."""
    return {name for target in TARGETS for name, _ in _SELECTOR.findall(target["expr"])}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["expr"][:60])
def test_queries_name_existing_series_and_labels_and_show_rates_of_counters(
    target: dict[str, Any],
) -> None:
    text = target["expr"]
    grouped = {each.strip() for group in _GROUPING.findall(text) for each in group.split(",")}
    selected = _SELECTOR.findall(text)
    assert selected
    for name, matchers in selected:
        labels = {label: value for label, _, value in _MATCHER.findall(matchers)}
        assert labels.keys() >= COMMON, "one model and one engine can be chosen"
        own: dict[str, Any] = {}
        if name.startswith(PREFIX):
            series = SERIES[name.removesuffix("_bucket")]
            assert (series.kind == "histogram") == name.endswith("_bucket")
            own = dict(series.labels)
            assert grouped <= {*own, *COMMON, "le"}
        for label, value in labels.items() - {(of, f"${of}") for of in COMMON}:
            assert value in own[label]
        grows = name.endswith(("_total", "_bucket"))
        assert grows == ("rate(" in text or "increase(" in text)
    assert set(_TEMPLATE.findall(target["legendFormat"])) <= grouped


def test_every_series_is_shown() -> None:
    shown = {name.removesuffix("_bucket") for name in names_in_queries()}
    assert {name for name in shown if name.startswith(PREFIX)} == set(SERIES)


def test_variables_are_asked_of_a_series_that_is_always_there() -> None:
    variables = DASHBOARD["templating"]["list"]
    assert {variable["name"] for variable in variables} == {"datasource", *COMMON}
    for variable in variables:
        if variable["type"] == "query":
            assert f"({PREFIX}capacity_blocks" in variable["definition"]
            assert variable["query"]["query"] == variable["definition"]
