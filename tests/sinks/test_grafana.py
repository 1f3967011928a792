"""The Grafana board asks for what /metrics gives."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from argosy.watch.prometheus import METRIC_HELP, exposition
from watch.test_prometheus import FULL

BOARD: dict[str, Any] = json.loads(files("argosy.sinks").joinpath("grafana.json").read_text())
NAME = re.compile(r"argosy_[a-z_]+")
MATCHER = re.compile(r"(argosy_[a-z_]+)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)\s*(?:=~|!=|!~|=)")


def queries() -> list[tuple[str, str]]:
    """Each query of the board with its legend."""
    return [(target["expr"], target["legendFormat"]) for panel in BOARD["panels"] for target in panel["targets"]]


def labels_by_name() -> dict[str, set[str]]:
    """Name -> the labels of its samples, as /metrics says them."""
    found: dict[str, set[str]] = {}
    for line in exposition([FULL]).splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', rest))
    return found


def test_every_query_asks_for_names_and_labels_that_there_are():
    labels = labels_by_name()
    assert len(queries()) > 20
    for query, legend in queries():
        names = NAME.findall(query)
        assert names, query
        for name in names:
            assert name in METRIC_HELP, query
        for name, matchers in MATCHER.findall(query):
            assert set(LABEL.findall(matchers)) <= labels[name], query
            assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels[name] | {"run"}, legend
    (variable,) = [v for v in BOARD["templating"]["list"] if v["name"] == "run"]
    assert variable["definition"] == "label_values(argosy_run_info, run)"
    assert "run" in labels["argosy_run_info"]


def test_panels_have_a_place_and_a_number_of_their_own():
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    places = {
        (x, y)
        for panel in BOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    }
    assert len(places) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in BOARD["panels"])
    assert all(x < 24 for x, _ in places)
