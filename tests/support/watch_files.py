"""What watches lockd, read: the Grafana dashboard, the Prometheus alerts and the scrape configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from lockd.export.catalog import CATALOG

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "grafana" / "lockd-host.json"
PROMETHEUS = ROOT / "deploy" / "prometheus"
SCRAPE = PROMETHEUS / "scrape.yml"
RULES = PROMETHEUS / "lockd.rules.yml"
RULE_TESTS = PROMETHEUS / "lockd.rules.test.yml"

TARGET_LABELS = {"job", "instance"}
ALL_FUTEX_ROWS = ("All futex waits, idle ones included", "Every futex call (mode calls)")
"""Those that show idle workers too."""
MODE_CALLS = "Only in mode calls"
"""What a metric's HELP text says, and the description of a panel that shows it."""
NAME = re.compile(r"lockd_[a-z0-9_]+")
SELECTOR = re.compile(r"(?<![\w:])(lockd_[a-z0-9_]+)(?:\{([^{}]*)\})?")
MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*(?:,|$)')
AGGREGATION = re.compile(r"\b(?:sum|min|max|avg|count|group|topk|bottomk)\s+by\s*\(([^()]*)\)\s*\(")
MATCHING = re.compile(r"\b(?:on|ignoring|group_left|group_right)\s*\(([^()]*)\)")


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
