"""What watches lockd: the Grafana dashboard, the Prometheus alerts and the scrape configuration.

Every metric and label in these files must exist in the catalogue.
"""

from __future__ import annotations

import json
import re

import pytest
import yaml

from lockd.export.catalog import CATALOG
from tests.support.watch_files import (
    ALERTS,
    ALL_FUTEX_ROWS,
    DASHBOARD,
    EXPRESSIONS,
    MATCHING,
    MODE_CALLS,
    NAME,
    PANELS,
    RULE_TESTS,
    RULES,
    SCRAPE,
    SELECTOR,
    TARGET_LABELS,
    TESTS,
    VARIABLES,
    aggregations,
    columns,
    dashboard,
    ids,
    labels_of,
    metric_of,
    names,
    panel_queries,
    result_labels,
    selectors,
)

# --- the catalogue -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [DASHBOARD, RULES, RULE_TESTS, SCRAPE], ids=lambda p: p.name)
def test_every_metric_is_in_the_catalogue(path):
    text = path.read_text(encoding="utf-8")
    unknown = sorted({n for n in NAME.findall(text) if metric_of(n) is None})
    assert unknown == []


@pytest.mark.parametrize("where, expr", EXPRESSIONS, ids=ids(EXPRESSIONS))
def test_every_label_exists(where, expr):
    used = selectors(expr)
    for name, pairs in used:
        assert set(pairs) <= labels_of(name) | TARGET_LABELS, f"{where}: {name}"
    by = aggregations(expr)
    assert len(by) == len(re.findall(r"\b(?:by|without)\b", expr)), f"{where}: write `sum by (label) (…)`"
    for labels, inner in by:
        for name, _ in selectors(inner):
            assert set(labels) <= labels_of(name) | TARGET_LABELS, f"{where}: {name}"
    for labels in MATCHING.findall(expr):
        for label in names(labels):
            assert label in TARGET_LABELS or any(label in labels_of(n) for n, _ in used), f"{where}: {label}"


@pytest.mark.parametrize("where, expr", EXPRESSIONS, ids=ids(EXPRESSIONS))
def test_counters_are_rated_and_gauges_are_not(where, expr):
    for m in SELECTOR.finditer(expr):
        name, before, after = m[1], expr[: m.start()], expr[m.end() :]
        rated = re.search(r"\b(?:rate|increase)\($", before) is not None
        counter = metric_of(name).kind == "counter" or metric_of(name).kind == "histogram"
        if where.startswith("variable") or " unless " in expr or "offset" in after[:8]:
            continue
        assert rated == counter, f"{where}: {name}"


# --- the dashboard -----------------------------------------------------------------------------------------


def test_dashboard_is_tidy():
    text = DASHBOARD.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"
    rows = [p for p in dashboard()["panels"] if p["type"] == "row"]
    every = rows + [p for _, p in PANELS]
    assert len({p["id"] for p in every}) == len(every)
    assert len({p["title"] for p in every}) == len(every)
    assert all(len(p["description"]) >= 20 for p in every)
    taken = {}
    for p in every:
        g = p["gridPos"]
        assert g["x"] + g["w"] <= 24, p["title"]
        for cell in ((x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])):
            assert cell not in taken, f"{p['title']} lies on {taken.get(cell)}"
            taken[cell] = p["title"]


def test_dashboard_variables():
    variables = {v["name"]: v for v in VARIABLES}
    assert {"datasource", "instance", "unit", "comm"} <= set(variables)
    # The label `unit` is empty for threads of no known unit: All must match them.
    assert variables["unit"]["allValue"] == ".*" and variables["comm"]["allValue"] == ".*"
    own = {"uid": "${datasource}", "type": "prometheus"}
    assert all(v["datasource"] == own for v in VARIABLES if v["type"] == "query")
    assert all(p["datasource"] == own for _, p in PANELS)
    used = set()
    for _, panel, target in panel_queries():
        assert target["datasource"] == own, panel["title"]
        used |= set(re.findall(r"\$(\w+)", target["expr"] + panel["title"]))
    assert used - {"__rate_interval", "__range"} == set(variables) - {"datasource"}


@pytest.mark.parametrize(
    "panel, target",
    [(p, t) for _, p, t in panel_queries()],
    ids=[f"{p['title']} {t['refId']}" for _, p, t in panel_queries()],
)
def test_panel_query(panel, target):
    expr = target["expr"]
    used = selectors(expr)
    assert used
    for name, pairs in used:
        assert pairs["instance"] == "$instance", name
        if {"unit", "comm"} <= labels_of(name):
            assert (pairs["unit"], pairs["comm"]) == ("$unit", "$comm"), name
    assert set(re.findall(r"\[([^\]]+)\]", expr)) <= (
        {"$__range"} if target["instant"] else {"$__rate_interval"}
    )
    if panel["type"] == "heatmap":
        assert target["format"] == "heatmap" and target["legendFormat"] == "{{le}}"
        assert re.fullmatch(
            r"sum by \(le\) \(increase\(lockd_\w+_bucket\{[^}]*\}\[\$__rate_interval\]\)\)", expr
        )
        assert panel["options"]["calculate"] is False and panel["options"]["yAxis"]["unit"] == "s"
    elif panel["type"] != "table":
        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert legend == result_labels(expr) or (legend <= result_labels(expr) and not aggregations(expr))
        microseconds = any(name.endswith("_us") for name, _ in used)
        assert (panel["fieldConfig"]["defaults"]["unit"] == "µs") == microseconds


def test_table_columns():
    for panel, field, title in columns():
        values = (
            {f"Value #{t['refId']}" for t in panel["targets"]} if len(panel["targets"]) > 1 else {"Value"}
        )
        labels = set.union(*(result_labels(t["expr"]) for t in panel["targets"]))
        assert field in values | labels, panel["title"]
        if not field.startswith("Value"):
            continue
        target = next(t for t in panel["targets"] if field in ("Value", f"Value #{t['refId']}"))
        microseconds = any(name.endswith("_us") for name, _ in selectors(target["expr"]))
        units = {
            prop["value"]
            for o in panel["fieldConfig"]["overrides"]
            if o["matcher"]["options"] == title
            for prop in o["properties"]
            if prop["id"] == "unit"
        }
        assert (units == {"µs"}) == microseconds, f"{panel['title']}: {title}"


def test_contention_is_about_locks_only():
    """Outside the row that says so, and in every alert, a wait has kind lock or pi."""
    queries = [(p["title"], t["expr"]) for row, p, t in panel_queries() if row not in ALL_FUTEX_ROWS]
    queries += [(r["alert"], r["expr"]) for r in ALERTS]
    for where, expr in queries:
        for name, pairs in selectors(expr):
            if "kind" in labels_of(name):
                assert pairs.get("kind") == "lock|pi", f"{where}: {name}"


def test_what_only_mode_calls_counts_is_asked_for_where_it_is_said():
    """By default these metrics are absent: no alert needs them, and a panel of them says why it is empty."""
    only = {name for name, metric in CATALOG.items() if MODE_CALLS in metric.help}
    assert len(only) == 5
    asked = [(p["title"], p["description"], t["expr"]) for _, p, t in panel_queries()]
    asked += [(r["alert"], "", r["expr"]) for r in ALERTS]
    for where, said, expr in asked:
        assert any(name in only for name, _ in selectors(expr)) == (MODE_CALLS in said), where
    assert not any(name in only for where, expr in EXPRESSIONS if where.startswith("variable")
                   for name, _ in selectors(expr))  # fmt: skip


def test_maxima_name_their_window():
    for where, expr in EXPRESSIONS:
        for name, pairs in selectors(expr):
            if "window" in labels_of(name):
                assert pairs.get("window") == "1m", f"{where}: {name}"


# --- the alerts --------------------------------------------------------------------------------------------


def test_alerts_say_what_to_do():
    titles = {p["title"] for _, p in PANELS}
    for rule in ALERTS:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "Next: " in rule["annotations"]["description"]
        text = " ".join(rule["annotations"].values())
        # Panels that a text sends the reader to.
        assert set(re.findall(r'"([A-Z][^"{]*)"', text)) <= titles, rule["alert"]
        result = TARGET_LABELS if "lockd_" not in rule["expr"] else result_labels(rule["expr"])
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= result, rule["alert"]


def test_rules_have_the_promised_alerts():
    assert {(r["alert"], r["labels"]["severity"]) for r in ALERTS} == {
        ("LockdLockWaitLong", "warning"),
        ("LockdLockWaitLong", "critical"),
        ("LockdKernelLockWaitLong", "warning"),
        ("LockdKernelLockWaitLong", "critical"),
        ("LockdThreadStuck", "critical"),
        ("LockdDeadlock", "critical"),
        ("LockdDown", "warning"),
        ("LockdHookMissing", "warning"),
        ("LockdDroppedEvents", "warning"),
        ("LockdRestraint", "warning"),
        ("LockdTicksLate", "warning"),
        ("LockdTicksLate", "critical"),
        ("LockdConfigurationRefused", "warning"),
    }


def test_every_alert_fires_in_one_test_and_is_silent_in_another():
    fires, silent = set(), set()
    for test in TESTS:
        loud = {
            (c["alertname"], a["exp_labels"]["severity"], a["exp_labels"].get("program", ""))
            for c in test["alert_rule_test"]
            for a in c["exp_alerts"]
        }
        quiet = {c["alertname"] for c in test["alert_rule_test"] if not c["exp_alerts"]}
        fires |= loud
        silent |= quiet - {name for name, _, _ in loud}
    # LockdHookMissing has a label `program` of its own.
    rules = {(r["alert"], r["labels"]["severity"], r["labels"].get("program", "")) for r in ALERTS}
    assert {(a, s, "" if a == "LockdHookMissing" else p) for a, s, p in fires} == rules
    assert silent == {r["alert"] for r in ALERTS}


def test_the_series_of_the_rule_tests_are_real():
    for test in TESTS:
        for entry in test["input_series"]:
            for name, pairs in selectors(entry["series"]):
                assert set(pairs) == labels_of(name) | TARGET_LABELS, entry["series"]


def test_scrape_config():
    config = yaml.safe_load(SCRAPE.read_text(encoding="utf-8"))
    assert config["rule_files"] == [RULES.name]
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "lockd"
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:9776"]
