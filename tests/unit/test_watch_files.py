"""What watches lockd: the Grafana dashboard, the Prometheus alerts and the scrape configuration.

Every metric and label in these files must exist in the catalogue, every panel must show something when lockd
exports something, and no idle worker may appear as contention.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from lockd.export.catalog import CATALOG

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "grafana" / "lockd-host.json"
PROMETHEUS = ROOT / "deploy" / "prometheus"
SCRAPE = PROMETHEUS / "scrape.yml"
RULES = PROMETHEUS / "lockd.rules.yml"
RULE_TESTS = PROMETHEUS / "lockd.rules.test.yml"

TARGET_LABELS = {"job", "instance"}
ALL_FUTEX_ROW = "All futex calls, idle waits included"
NAME = re.compile(r"lockd_[a-z0-9_]+")
SELECTOR = re.compile(r"(?<![\w:])(lockd_[a-z0-9_]+)(?:\{([^{}]*)\})?")
MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*(?:,|$)')
AGGREGATION = re.compile(r"\b(?:sum|min|max|avg|count|group|topk|bottomk)\s+by\s*\(([^()]*)\)\s*\(")
MATCHING = re.compile(r"\b(?:on|ignoring|group_left|group_right)\s*\(([^()]*)\)")


# --- reading the files -------------------------------------------------------------------------------------


def dashboard():
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def panels_by_row():
    """(title of the row, panel) for each panel that is not a row."""
    row = None
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            for inner in panel["panels"]:
                yield row, inner
        else:
            yield row, panel


PANELS = list(panels_by_row())
VARIABLES = dashboard()["templating"]["list"]
ALERTS = [
    rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]
]
TESTS = yaml.safe_load(RULE_TESTS.read_text(encoding="utf-8"))["tests"]


def panel_queries():
    return [(row, panel, target) for row, panel in PANELS for target in panel["targets"]]


def expressions():
    """(where, PromQL) of every query in the files; label_values() of a variable counts as its selector."""
    found = [(f"panel {p['title']!r} {t['refId']}", t["expr"]) for _, p, t in panel_queries()]
    found += [(f"alert {r['alert']}", r["expr"]) for r in ALERTS]
    for variable in VARIABLES:
        if variable["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()
            found.append((f"variable {variable['name']}", f"count by ({label}) ({selector})"))
    return found


EXPRESSIONS = expressions()


def ids(items):
    return [where for where, _ in items]


def metric_of(name):
    """The catalogue's metric behind a name in PromQL, and None if there is none."""
    if name in CATALOG:
        # The bare name of a histogram is no series.
        return None if CATALOG[name].kind == "histogram" else CATALOG[name]
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    if base != name and base in CATALOG and CATALOG[base].kind == "histogram":
        return CATALOG[base]
    return None


def labels_of(name):
    metric = metric_of(name)
    assert metric is not None, f"{name} is not in the catalogue"
    return set(metric.labels) | ({"le"} if name.endswith("_bucket") and metric.kind == "histogram" else set())


def matchers(text):
    pairs, end = {}, 0
    for m in MATCHER.finditer(text or ""):
        assert m.start() == end, f"cannot read the matchers {text!r}"
        pairs[m[1]], end = m[3], m.end()
    assert end == len(text or ""), f"cannot read the matchers {text!r}"
    return pairs


def selectors(expr):
    return [(m[1], matchers(m[2])) for m in SELECTOR.finditer(expr)]


def operand(expr, start):
    """The text from start to the parenthesis that closes the one before start."""
    depth = 1
    for i in range(start, len(expr)):
        depth += {"(": 1, ")": -1}.get(expr[i], 0)
        if depth == 0:
            return expr[start:i]
    raise AssertionError(f"unbalanced: {expr}")


def names(text):
    return [n.strip() for n in text.split(",") if n.strip()]


def aggregations(expr):
    return [(names(m[1]), operand(expr, m.end())) for m in AGGREGATION.finditer(expr)]


def result_labels(expr):
    found = aggregations(expr)
    if found:
        return set(found[0][0]) - {"le"}
    result = set(TARGET_LABELS)
    for name, _ in selectors(expr)[:1]:
        result |= labels_of(name)
    return result


def columns():
    """(panel, field, title) of each column that a table names."""
    for _, panel in PANELS:
        for transformation in panel.get("transformations", []):
            if transformation["id"] == "organize":
                for field, title in transformation["options"]["renameByName"].items():
                    yield panel, field, title


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
    queries = [(p["title"], t["expr"]) for row, p, t in panel_queries() if row != ALL_FUTEX_ROW]
    queries += [(r["alert"], r["expr"]) for r in ALERTS]
    for where, expr in queries:
        for name, pairs in selectors(expr):
            if "kind" in labels_of(name):
                assert pairs.get("kind") == "lock|pi", f"{where}: {name}"


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


# --- promtool ----------------------------------------------------------------------------------------------


@pytest.fixture
def promtool(capsys):
    if shutil.which("promtool") is None:
        reason = "promtool (Debian package prometheus) is not installed: rules and queries are not checked"
        if os.environ.get("CI"):
            pytest.fail(reason)
        with capsys.disabled():
            print(f"\nSKIPPED: {reason}")
        pytest.skip(reason)

    def run(*args, cwd=PROMETHEUS):
        done = subprocess.run(
            ["promtool", *map(str, args)],
            cwd=cwd,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


def test_promtool_accepts_the_scrape_config(promtool):
    assert "SUCCESS" in promtool("check", "config", SCRAPE.name)


def test_promtool_accepts_the_rules(promtool):
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool(
        "check", "rules", "--lint=all", "--lint-fatal", RULES.name
    )


def test_promtool_rule_tests_pass(promtool):
    assert "SUCCESS" in promtool("test", "rules", RULE_TESTS.name)


def synthetic(metric, **values):
    """Input series for one metric of the catalogue that grow at every step."""
    labels = {"job": "lockd", "instance": "a"}
    labels.update({label: values.get(label, f"some-{label}") for label in metric.labels})

    def series(suffix, step, **more):
        inner = ", ".join(f'{k}="{v}"' for k, v in {**labels, **more}.items())
        return {"series": f"{metric.name}{suffix}{{{inner}}}", "values": f"0+{step}x40"}

    if metric.kind == "histogram":
        return [
            series("_bucket", 6, le="0.001"),
            series("_bucket", 10, le="+Inf"),
            series("_sum", 1),
            series("_count", 10),
        ]
    return [series("", 10)]


def check_panels(promtool, tmp_path, metrics, expected, **values):
    """Evaluates every query of the dashboard over synthetic series; exactly `expected` have a result."""
    replace = {"$__rate_interval": "1m", "$__range": "10m", "$instance": "a"}
    rules = []
    for _, panel, target in panel_queries():
        expr = target["expr"]
        for variable, value in replace.items():
            expr = expr.replace(variable, value)
        expr = re.sub(r"\$\w+", ".*", expr)
        rules.append({"record": f"panel_{panel['id']}:{target['refId']}", "expr": expr})
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    test = {
        "rule_files": ["panels.yml"],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [s for m in metrics for s in synthetic(m, **values)],
                "promql_expr_test": [
                    {
                        "expr": 'group by (__name__) ({__name__=~"panel_.+"})',
                        "eval_time": "10m",
                        "exp_samples": [
                            {"labels": f'{{__name__="{name}"}}', "value": 1} for name in sorted(expected)
                        ],
                    }
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", "test.yml", cwd=tmp_path)


def record(panel, target):
    return f"panel_{panel['id']}:{target['refId']}"


def test_every_panel_shows_what_lockd_exports(promtool, tmp_path):
    everything = {record(p, t) for _, p, t in panel_queries()}
    check_panels(
        promtool, tmp_path, CATALOG.values(), everything, kind="lock", window="1m", state="uninterruptible"
    )


@pytest.mark.parametrize("kind", ["cond", "other"])
def test_idle_workers_appear_in_no_contention_panel(promtool, tmp_path, kind):
    metrics = [m for m in CATALOG.values() if "kind" in m.labels]
    shown = {
        record(p, t)
        for row, p, t in panel_queries()
        if row == ALL_FUTEX_ROW and all("kind" in labels_of(n) for n, _ in selectors(t["expr"]))
    }
    assert len(shown) == 2
    check_panels(promtool, tmp_path, metrics, shown, kind=kind, window="1m")
