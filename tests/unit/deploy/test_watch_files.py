"""Tests of what watches lockd: rules of Prometheus and of Alertmanager, and the scrape configuration.

Every metric and label in these files and in the dashboards must exist in the catalogue or a recording rule.
"""

from __future__ import annotations

import re

import pytest
import yaml

from lockd.export.catalog import CATALOG
from tests.support.watch_files import (
    ALERTMANAGER,
    ALERTS,
    ALL_FUTEX_ROWS,
    BOARDS,
    EXPRESSIONS,
    GRAFANA,
    MATCHING,
    MODE_CALLS,
    NAME,
    PANELS,
    PROMETHEUS,
    RECORDED,
    RECORDED_TESTS,
    RECORDING,
    RECORDINGS,
    ROOT,
    RULES,
    SCRAPE,
    SELECTOR,
    TARGET_LABELS,
    TESTS,
    aggregations,
    ids,
    is_counter,
    labels_of,
    metric_of,
    names,
    panel_queries,
    result_labels,
    selectors,
)

FILES = [*GRAFANA.glob("lockd-*.json"), *PROMETHEUS.glob("*.yml")]
RUNBOOKS = "https://example.com/lockd/docs/runbooks/"
UNUSED = {
    "lockd_config_keys_waiting": "`lockd check` says which",
    "lockd_config_last_reload_success_timestamp_seconds": "the dashboard shows whether, not when",
    "lockd_deadlock_locks_skipped_total": "the next search begins with them: nothing to do",
    "lockd_holder_refused_seconds_total": "for whoever asks how exact the shares of holders are",
    "lockd_holder_samples_refused_total": "the same",
    "lockd_holder_samples_total": "the same",
    "lockd_holder_seconds_per_sample": "the same",
    "lockd_interrupted_drains_total": "for whoever debugs lockd after a crash",
    "lockd_namer_refused_total": "for whoever asks why a lock is called anon",
    "lockd_overflow_events_total": "nothing is lost: the panel of full maps shows the cause",
    "lockd_retired_value": "for exact sums over series that were removed",
    "lockd_series_retired_total": "ordinary: processes end",
    "lockd_undecided_futex_calls": "lasts 5 s at most",
    "lockd_unseen_switches_total": "a limit of some kernels: nothing to do",
    "lockd_unit_info": "for joins with what others export: docs/kubernetes.md",
    "lockd_wait_refused_seconds_total": "for whoever asks how exact the profiles of waits are",
    "lockd_wait_samples_refused_total": "the same",
    "lockd_wait_samples_total": "the same",
    "lockd_wait_seconds_per_sample": "the same",
}
"""Metrics that no dashboard and no rule asks for, and why."""

# --- the catalogue -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_metric_is_in_the_catalogue_or_in_a_rule(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yml":
        text = re.sub(r"#.*", "", text)
    unknown = sorted({n for n in NAME.findall(text) if n not in RECORDED and metric_of(n) is None})
    assert unknown == []


def test_every_metric_is_used_or_there_is_a_reason():
    used = {metric_of(n).name for _, expr in EXPRESSIONS for n, _ in selectors(expr) if n not in RECORDED}
    assert set(CATALOG) - used == set(UNUSED)


@pytest.mark.parametrize("where, expr", EXPRESSIONS, ids=ids(EXPRESSIONS))
def test_every_label_exists(where, expr):
    used = selectors(expr)
    for name, pairs in used:
        assert set(pairs) <= labels_of(name) | (set() if name in RECORDED else TARGET_LABELS), (
            f"{where}: {name}"
        )
    by = aggregations(expr)
    assert len(by) == len(re.findall(r"\b(?:by|without)\b", expr)), f"{where}: write `sum by (label) (…)`"
    for labels, inner in by:
        for name, _ in selectors(inner):
            if name == "lockd_ticks_total" and "present_over_time(" in inner:
                continue  # says since when the host is scraped; see growth() in grafana/promql.py
            assert set(labels) <= labels_of(name) | TARGET_LABELS, f"{where}: {name}"
    for labels in MATCHING.findall(expr):
        for label in names(labels):
            assert label in TARGET_LABELS or any(label in labels_of(n) for n, _ in used), f"{where}: {label}"


@pytest.mark.parametrize("where, expr", EXPRESSIONS, ids=ids(EXPRESSIONS))
def test_counters_are_rated_and_gauges_are_not(where, expr):
    for m in SELECTOR.finditer(expr):
        name, before = m[1], expr[: m.start()]
        rated = re.search(r"\b(?:rate|increase)\($", before) is not None
        # Variables read only labels. `unless` and `offset` are for the first value of a counter.
        if where.startswith("variable") or " unless " in expr or " offset " in expr:
            continue
        assert rated == is_counter(name), f"{where}: {name}"


def test_contention_is_about_locks_only():
    """In every rule, and outside of the rows for all futex waits, only waits of kind lock or pi count."""
    queries = [(p["title"], t["expr"]) for _, row, p, t in panel_queries() if row not in ALL_FUTEX_ROWS]
    queries += [(r["alert"], r["expr"]) for r in ALERTS] + [(r["record"], r["expr"]) for r in RECORDINGS]
    for where, expr in queries:
        if expr.startswith("count(") and "lockd_offcpu_runqueue_" in expr:
            continue  # counts hosts on which threads run or wait, for whatever
        for name, pairs in selectors(expr):
            if "kind" in labels_of(name):
                assert pairs.get("kind") == "lock|pi", f"{where}: {name}"


def test_what_only_mode_calls_counts_is_asked_for_where_it_is_said():
    """Metrics of mode `calls` are absent by default: no rule needs them, and a panel says why it is empty."""
    only = {name for name, metric in CATALOG.items() if MODE_CALLS in metric.help}
    assert len(only) == 5
    asked = {f"panel {uid} {p['title']!r} {t['refId']}": p["description"] for uid, _, p, t in panel_queries()}
    for where, expr in EXPRESSIONS:
        says = MODE_CALLS in asked.get(where, "")
        assert any(name in only for name, _ in selectors(expr)) == says, where


def test_maxima_name_their_window():
    for where, expr in EXPRESSIONS:
        for name, pairs in selectors(expr):
            if "window" in labels_of(name):
                assert pairs.get("window") == "1m", f"{where}: {name}"


# --- the rules ---------------------------------------------------------------------------------------------


def test_alerts_say_what_to_do():
    titles = {p["title"] for _, _, p in PANELS} | {row for _, row, _ in PANELS}
    for rule in ALERTS:
        assert set(rule) <= {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"runbook_url", "summary", "description"}
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}{rule['alert']}.md"
        assert "Next: " in rule["annotations"]["description"]
        text = " ".join(rule["annotations"].values())
        # The panels, rows and dashboards to which a text sends the reader exist.
        assert set(re.findall(r'"([A-Z][^"{]*)"', text)) <= titles, rule["alert"]
        boards = {board["title"] for board in BOARDS.values()}
        assert set(re.findall(r'"(lockd: [^"{]*)"', text)) <= boards, rule["alert"]
        result = TARGET_LABELS if "lockd_" not in rule["expr"] else result_labels(rule["expr"])
        if "cluster_job_unit:" in rule["expr"]:
            result = labels_of("cluster_job_unit:lockd_futex_blocked_seconds_sum:avg_rate5m")
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= result, rule["alert"]


def test_rules_have_the_promised_alerts():
    assert {(r["alert"], r["labels"]["severity"]) for r in ALERTS} == {
        ("LockdLockWaitLong", "warning"),
        ("LockdLockWaitLong", "critical"),
        ("LockdKernelLockWaitLong", "warning"),
        ("LockdKernelLockWaitLong", "critical"),
        ("LockdThreadStuck", "critical"),
        ("LockdDeadlock", "critical"),
        ("LockdRunQueueLong", "warning"),
        ("LockdLockOnManyHosts", "warning"),
        ("LockdObjectiveBurn", "warning"),
        ("LockdObjectiveBurn", "critical"),
        ("LockdDown", "warning"),
        ("LockdRestarts", "warning"),
        ("LockdHookMissing", "warning"),
        ("LockdDroppedEvents", "warning"),
        ("LockdRestraint", "warning"),
        ("LockdTicksLate", "warning"),
        ("LockdConfigurationRefused", "warning"),
    }


def test_every_alert_has_a_runbook_and_every_runbook_an_alert():
    runbooks = {path.stem for path in (ROOT / "docs" / "runbooks").glob("*.md")} - {"README"}
    assert runbooks == {rule["alert"] for rule in ALERTS}


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
    # LockdHookMissing gets its label `program` from the metric, not from the rule.
    rules = {(r["alert"], r["labels"]["severity"], r["labels"].get("program", "")) for r in ALERTS}
    assert {(a, s, "" if a == "LockdHookMissing" else p) for a, s, p in fires} == rules
    assert silent == {r["alert"] for r in ALERTS}


def test_names_of_recording_rules_say_what_they_keep():
    for rule in RECORDINGS:
        level, metric, operations = rule["record"].split(":")
        (labels, _), *_ = aggregations(rule["expr"])
        assert level == "_".join(label for label in labels if label != "le"), rule["record"]
        assert ("le" in labels) == metric.endswith("_bucket"), rule["record"]
        assert {labels[0], labels[1]} == {"cluster", "job"}, rule["record"]
        last, *_ = operations.partition("_")
        assert last == rule["expr"].partition(" ")[0] or rule["expr"].startswith("sum "), rule["record"]


def test_every_recording_rule_has_a_value_on_busy_hosts_and_says_nothing_of_idle_ones():
    busy, idle = RECORDED_TESTS
    for test in (busy, idle):
        assert {case["expr"] for case in test["promql_expr_test"]} == {rule["record"] for rule in RECORDINGS}
    assert all(case["exp_samples"] and all(s["value"] > 0 for s in case["exp_samples"])
               for case in busy["promql_expr_test"])  # fmt: skip
    always = ("lockd_start_time_seconds", "lockd_cpu_ratio")
    for case in idle["promql_expr_test"]:
        is_always = case["expr"].split(":")[1] in always
        assert is_always or all(sample["value"] == 0 for sample in case["exp_samples"])


def test_what_a_large_fleet_may_drop_is_read_by_one_panel_only():
    """docs/sizing.md says that one panel reads this metric, and how to drop it."""
    bucket = "lockd_offcpu_blocked_seconds_bucket"
    assert f"regex: {bucket}\n" in (ROOT / "docs/sizing.md").read_text()
    asking = [where for where, expr in EXPRESSIONS if bucket in expr]
    assert len(asking) == 1 and asking[0].startswith("panel lockd-host ")


def test_the_series_of_the_rule_tests_are_real():
    for test in TESTS + RECORDED_TESTS:
        for entry in test["input_series"]:
            for name, pairs in selectors(entry["series"]):
                assert set(pairs) | {"cluster"} == labels_of(name) | TARGET_LABELS, entry["series"]


def test_inhibition_is_about_alerts_that_there_are():
    rules = yaml.safe_load(ALERTMANAGER.read_text(encoding="utf-8"))["inhibit_rules"]
    alerts = {rule["alert"] for rule in ALERTS}
    for rule in rules:
        for matchers in rule["source_matchers"], rule["target_matchers"]:
            named = set()
            for matcher in matchers:
                label, value = re.fullmatch(r'(\w+)=~?"([^"]+)"', matcher).groups()
                named.add(label)
                values = alerts if label == "alertname" else {one["labels"].get(label) for one in ALERTS}
                for alternative in value.split("|"):
                    assert any(re.fullmatch(alternative, one or "") for one in values), matcher
            assert "alertname" in named, f"{matchers} would also match the alerts of others"


def test_inhibition_by_an_alert_about_the_same_locks_is_by_their_kind():
    """A thread that is stuck on a mutex says nothing of the waits for a rwsem."""
    rules = yaml.safe_load(ALERTMANAGER.read_text(encoding="utf-8"))["inhibit_rules"]
    by_kind = [rule["equal"] for rule in rules if "unit" in rule["equal"] and "Deadlock" not in str(rule)]
    assert len(by_kind) == 2
    assert all({"kind", "lock_type"} <= set(equal) for equal in by_kind)


def test_scrape_config():
    config = yaml.safe_load(SCRAPE.read_text(encoding="utf-8"))
    assert config["rule_files"] == [RULES.name, RECORDING.name]
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "lockd"
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:9776"]
