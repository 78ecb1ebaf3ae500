"""Reads what watches lockd: the Grafana dashboards, the Prometheus rules and the scrape configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from lockd.export.catalog import CATALOG

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "grafana"
PROMETHEUS = ROOT / "deploy" / "prometheus"
SCRAPE = PROMETHEUS / "scrape.yml"
RULES = PROMETHEUS / "lockd.rules.yml"
RECORDING = PROMETHEUS / "lockd.recording.yml"
OBJECTIVES = PROMETHEUS / "objectives.example.yml"
RULE_TESTS = PROMETHEUS / "lockd.rules.test.yml"
OBJECTIVE_TESTS = PROMETHEUS / "lockd.objectives.test.yml"
RECORDING_TESTS = PROMETHEUS / "lockd.recording.test.yml"
ALERTMANAGER = PROMETHEUS / "alertmanager.yml"
MIXIN = PROMETHEUS / "mixin.libsonnet"

TARGET_LABELS = {"cluster", "job", "instance"}
ALL_FUTEX_ROWS = ("All futex waits, idle ones included", "Every futex call (mode calls)")
"""The titles of the rows whose panels show idle workers too."""
OR_ZERO = " or vector(0)"
"""The end of the query of each number: without a result, Grafana would show an old one."""
MODE_CALLS = "Only in mode calls"
"""What the HELP text of a metric of mode calls says, and the description of a panel that shows it."""
METRIC = r"(?:[a-z_]+:)?lockd_[a-z0-9_]+(?::[a-z0-9_]+)?"
"""The name of a metric, or of the series of a recording rule: level:metric:operations."""
NAME = re.compile(rf"(?<![\w:]){METRIC}")
SELECTOR = re.compile(rf"(?<![\w:])({METRIC})(?:\{{([^{{}}]*)\}})?")
MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*(?:,|$)')
AGGREGATION = re.compile(
    r"\b(?:sum|min|max|avg|count|group|topk|bottomk|quantile)\s+by\s*\(([^()]*)\)\s*\((?:[0-9.]+,\s+)?"
)
OTHER_OPERAND = re.compile(r"\sand on |\sgroup_left ")
"""The beginning of an operand that gives the result no labels."""
WITHOUT_LABELS = re.compile(r"\(*(?:sum|min|max|avg|count|quantile)\(")
MATCHING = re.compile(r"\b(?:on|ignoring|group_left|group_right)\s*\(([^()]*)\)")


def rules(path):
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


BOARDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in GRAFANA.glob("lockd-*.json")}
"""The dashboards by uid, which is the name of the file too."""
ALERTS = rules(RULES)
RECORDINGS = rules(RECORDING)
RECORDED = {rule["record"]: rule for rule in RECORDINGS + rules(OBJECTIVES)}
TESTS = [
    test
    for path in (RULE_TESTS, OBJECTIVE_TESTS)
    for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]
]
RECORDED_TESTS = yaml.safe_load(RECORDING_TESTS.read_text(encoding="utf-8"))["tests"]


def panels_by_row():
    """Yield (uid of the dashboard, title of the row, panel) for each panel that is not a row."""
    for uid, board in BOARDS.items():
        row = None
        for panel in board["panels"]:
            if panel["type"] == "row":
                row = panel["title"]
                for inner in panel["panels"]:
                    yield uid, row, inner
            else:
                yield uid, row, panel


PANELS = list(panels_by_row())
VARIABLES = [(uid, variable) for uid, board in BOARDS.items() for variable in board["templating"]["list"]]


def panel_queries():
    """Return (uid of the dashboard, title of the row, panel, target) for each query of a panel."""
    return [(uid, row, panel, target) for uid, row, panel in PANELS for target in panel["targets"]]


def found_by(target):
    """Return the query of a panel without the zero that a number shows if nothing is found."""
    return target["expr"].removesuffix(OR_ZERO)


def expressions():
    """Return (where, PromQL) of every query in the files.

    A label_values() counts as its selector, and the query of a number is without its zero.
    """
    found = [(f"panel {uid} {p['title']!r} {t['refId']}", found_by(t)) for uid, _, p, t in panel_queries()]
    found += [(f"alert {r['alert']}", r["expr"]) for r in ALERTS]
    found += [(f"rule {name}", r["expr"]) for name, r in RECORDED.items()]
    for uid, board in BOARDS.items():
        found += [(f"annotation {uid} {a['name']}", a["expr"]) for a in board["annotations"]["list"]]
    for uid, variable in VARIABLES:
        if variable["type"] == "query":
            selector, label = re.fullmatch(
                r"label_values\((.*), (\w+)\)", variable["query"]["query"]
            ).groups()
            found.append((f"variable {uid} {variable['name']}", f"count by ({label}) ({selector})"))
    return found


EXPRESSIONS = expressions()
DOCUMENTED = [
    (f"page {path.relative_to(ROOT)} {number}", expr)
    for path in sorted((ROOT / "docs").rglob("*.md"))
    for number, expr in enumerate(re.findall(r"```promql\n(.*?)```", path.read_text("utf-8"), re.DOTALL), 1)
]
"""The place and the PromQL of every promql block in the documents."""
RUNBOOKS = {path.stem: path for path in (ROOT / "docs/runbooks").glob("Lockd*.md")}
"""The paths of the runbooks, by the names of their alerts."""


def commands(page):
    """The commands in a runbook, in their order."""
    return [
        line.removeprefix("$ ")
        for block in re.findall(r"```console\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        for line in block.splitlines()
        if line.startswith("$ ")
    ]


def filled(expr, choices):
    """The query with the values of `choices` in place of its variables.

    Other variables match everything (`.*`), except that `="$name"` becomes `="some-name"`.
    """
    for variable, value in choices.items():
        expr = re.sub(rf"\${variable}\b", value, expr)
    expr = re.sub(r'="\$(\w+)"', r'="some-\1"', expr)
    return re.sub(r"\$\w+", ".*", expr)


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


def is_counter(name):
    return name not in RECORDED and metric_of(name).kind in ("counter", "histogram")


def is_microseconds(name):
    """Whether the values of a series are microseconds. Those of a recording rule that counts are not."""
    return re.fullmatch(r"(?:\w+:)?lockd_\w+_us(?::(?!count)\w+)?", name) is not None


def labels_of(name):
    """Return the labels of a metric of the exporter, or the labels that a recording rule leaves.

    The latter may include labels of targets.
    """
    if name in RECORDED:
        rule = RECORDED[name]
        kept = aggregations(rule["expr"])
        return set(kept[0][0]) if kept else set(rule.get("labels", {}))
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
    if WITHOUT_LABELS.match(expr):
        return set()
    if not AGGREGATION.match(re.sub(r"^(?:topk\(\d+, |[(\s])+", "", expr)):
        expr, *_ = OTHER_OPERAND.split(expr)
    found = aggregations(expr)
    if found and "group_right" not in expr:
        return set(found[0][0]) - {"le"}
    used = selectors(expr)
    name, _ = used[-1 if "group_right" in expr else 0]
    return labels_of(name) | (set() if name in RECORDED else TARGET_LABELS)


def columns():
    """Yield (panel, field, title) of each column that a table names."""
    for _, _, panel in PANELS:
        for transformation in panel.get("transformations", []):
            if transformation["id"] == "organize":
                for field, title in transformation["options"]["renameByName"].items():
                    yield panel, field, title
