"""What watches lockd, as Prometheus itself reads it: rules, alerts, and every query of the dashboard.

Every panel must show something when lockd exports something, and no idle worker may appear as contention.
"""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from lockd.export.catalog import CATALOG
from tests.needs import need
from tests.support.watch_files import (
    ALERTS,
    ALL_FUTEX_ROWS,
    MODE_CALLS,
    PROMETHEUS,
    RULE_TESTS,
    RULES,
    SCRAPE,
    labels_of,
    panel_queries,
    selectors,
)


@pytest.fixture
def promtool():
    need("promtool")

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


def test_by_default_only_panels_that_say_so_are_empty(promtool, tmp_path):
    metrics = [m for m in CATALOG.values() if MODE_CALLS not in m.help]
    shown = {record(p, t) for _, p, t in panel_queries() if MODE_CALLS not in p["description"]}
    check_panels(promtool, tmp_path, metrics, shown, kind="lock", window="1m", state="uninterruptible")


@pytest.mark.parametrize("kind", ["cond", "other"])
def test_idle_workers_appear_in_no_contention_panel(promtool, tmp_path, kind):
    metrics = [m for m in CATALOG.values() if "kind" in m.labels]
    shown = {
        record(p, t)
        for row, p, t in panel_queries()
        if row in ALL_FUTEX_ROWS and all("kind" in labels_of(n) for n, _ in selectors(t["expr"]))
    }
    assert len(shown) == 3
    check_panels(promtool, tmp_path, metrics, shown, kind=kind, window="1m")
