"""The Grafana dashboard asks for nothing that the controller does not export."""

import json
import re
from pathlib import Path
from typing import Any

from laminar.controller.prometheus import METRICS, of_step
from tests.test_telemetry import documented

FILE = Path(__file__).parent.parent / "configs" / "grafana" / "laminar.json"
SUFFIXES = {"gauge": ("",), "counter": ("",), "histogram": ("_bucket", "_sum", "_count")}
PER_STEP = tuple(f"laminar_{name}" for name in (
    "train_steps", "trained_tokens", "trainer_busy", "trajectory_s_", "trajectory_residence", "trajectory_seconds",
    "reward_seconds",
))  # fmt: skip


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def exported() -> dict[str, tuple[str, ...]]:
    """Every series that can be queried, with its labels."""
    series = {of_step(name)[0]: () for name in documented()} | {"laminar_step": ()}
    for metric in METRICS:
        for suffix in SUFFIXES[metric.kind]:
            series[metric.exported + suffix] = metric.labels + (("le",) if suffix == "_bucket" else ())
    return series


def queries() -> list[str]:
    targets = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    return targets + [variable.get("definition", "") for variable in dashboard()["templating"]["list"]]


def test_every_metric_that_is_queried_is_exported_with_the_labels_that_are_used() -> None:
    asked = 0
    for query in queries():
        names = re.findall(r"\blaminar_\w+", query)
        asked += len(names)
        assert set(names) <= exported().keys(), query
        known = {label for name in names for label in exported()[name]} | {"instance"}
        used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", query))
        used |= {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
        assert used <= known, query
    assert asked > 50


def test_counters_are_looked_at_as_rates_and_gauges_are_not() -> None:
    kinds = {metric.exported + suffix: metric.kind for metric in METRICS for suffix in SUFFIXES[metric.kind]}
    shown_as_they_are = {"laminar_alarms_total", "laminar_worker_restarts_total"}
    for query in queries():
        for function, name in re.findall(r"(\w+)\((laminar_\w+)", query):
            counts = kinds.get(name, "gauge") != "gauge"
            assert counts or function not in ("rate", "increase"), query
            assert not counts or function in ("rate", "increase") or name in shown_as_they_are, query


def test_what_is_counted_when_a_step_ends_is_not_looked_at_over_less_than_a_step() -> None:
    """A rate over seconds of what grows once in minutes is zero, then far too much. Heat maps show when it grew."""
    for query in queries():
        for function, name, window in re.findall(r"(rate|increase)\((laminar_\w+){[^}]*}\[([^\]]+)\]", query):
            if name.startswith(PER_STEP):
                assert window == "$window" or function == "increase", query


def test_panels_have_titles_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                [kept] = [set(exported()[name]) for name in re.findall(r"\blaminar_\w+", target["expr"])]
                assert label in kept, panel["title"]
