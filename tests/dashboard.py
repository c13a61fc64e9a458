"""The Grafana dashboard as its queries see it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).resolve().parents[1] / "dashboards" / "simple-offload.json"

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


def load(path: Path) -> dict[str, Any]:
    """The dashboard."""
    dashboard: dict[str, Any] = json.loads(path.read_text())
    return dashboard


def queries_in(path: Path) -> Iterator[Query]:
    """Every panel's queries."""
    for panel in load(path)["panels"]:
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


def names_in(path: Path) -> set[str]:
    """The names of series in queries."""
    return {name for query in queries_in(path) for name, _ in query.selected}
