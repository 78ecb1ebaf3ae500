"""Tests of what watches lockd, with promtool and amtool: metrics, rules, every query of the dashboards.

Every panel must show something when lockd exports something, and no idle worker may appear as contention.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.exposition import choose_encoder

from lockd.export.catalog import CATALOG
from lockd.export.exposition import Exposition
from lockd.messages import unpack
from tests.needs import found, libraries, need
from tests.support.exporter_process import full_block
from tests.support.watch_files import (
    ALERTMANAGER,
    ALERTS,
    ALL_FUTEX_ROWS,
    BOARDS,
    EXPRESSIONS,
    MODE_CALLS,
    OBJECTIVE_TESTS,
    OBJECTIVES,
    PROMETHEUS,
    RECORDING,
    RECORDING_TESTS,
    RECORDINGS,
    RULE_TESTS,
    RULES,
    SCRAPE,
    filled,
    found_by,
    labels_of,
    panel_queries,
    selectors,
)

HANG_SECONDS = 240
"""After this time promtool is taken to hang. It needs ten seconds of a processor for the tests of the rules,
but may have to share the processor."""


@pytest.fixture
def promtool():
    need("promtool")

    def run(*args, cwd=PROMETHEUS, given=None, code=0):
        done = subprocess.run(
            ["promtool", *map(str, args)],
            cwd=cwd,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            input=given,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    return run


# --- the files ---------------------------------------------------------------------------------------------


def test_promtool_accepts_the_scrape_config(promtool):
    assert "SUCCESS" in promtool("check", "config", SCRAPE.name)


@pytest.mark.parametrize("path, count", [(RULES, len(ALERTS)), (RECORDING, len(RECORDINGS)), (OBJECTIVES, 1)])
def test_promtool_accepts_the_rules(promtool, path, count):
    assert f"SUCCESS: {count} rules found" in promtool(
        "check", "rules", "--lint=all", "--lint-fatal", path.name
    )


@pytest.mark.parametrize("path", [RULE_TESTS, OBJECTIVE_TESTS, RECORDING_TESTS], ids=lambda path: path.name)
def test_promtool_rule_tests_pass(promtool, path):
    assert "SUCCESS" in promtool("test", "rules", path.name)


def test_metrics_are_named_by_the_conventions_except_for_maxima(promtool):
    """Maxima in microseconds keep their names, because names of metrics do not change (CONTRIBUTING.md)."""
    block = full_block()
    text = Exposition(choose_encoder("")[0], Path("/proc")).text(*unpack(memoryview(block))).decode()
    complaints = promtool("check", "metrics", given=text, code=3).splitlines()
    maxima = [name for name in CATALOG if name.endswith("_us")]
    assert len(maxima) == 5 and all("_max_" in name for name in maxima)
    assert sorted(complaints) == sorted(
        f"{name} metric names should not contain abbreviated units" for name in maxima
    )


def test_amtool_accepts_the_inhibition():
    need("amtool")
    done = subprocess.run(
        [found("amtool"), "check-config", ALERTMANAGER],
        check=False,
        capture_output=True,
        text=True,
        env=libraries(),
        timeout=60,
    )
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


def test_every_query_parses(promtool, tmp_path):
    """Queries of annotations are parsed too, and the selectors in label_values() of variables."""
    rules = [{"record": f"query:{n}", "expr": asked(expr)} for n, (_, expr) in enumerate(EXPRESSIONS)]
    path = tmp_path / "all.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    assert f"SUCCESS: {len(EXPRESSIONS)} rules found" in promtool("check", "rules", "--lint=none", path)


def test_old_drops_are_no_alert_when_targets_get_another_label(promtool, tmp_path):
    series = []
    for rack, dropped, ticks in (
        ("", "7x40 stale", "0+300x40 stale"),
        (', rack="r"', "_x41 7x40", "_x41 12300+300x40"),
    ):
        target = f'job="lockd", instance="h"{rack}'
        series.append({"series": f"lockd_ticks_total{{{target}}}", "values": ticks})
        name = f'lockd_dropped_events_total{{{target}, map="futex", reason="full"}}'
        series.append({"series": name, "values": dropped})
    queries = [('ALERTS{alertname="LockdDroppedEvents"}', f"{minute}m", []) for minute in (11, 14, 19)]
    check(promtool, tmp_path, [RULES], series, queries)


def test_a_lock_on_few_of_many_hosts_is_no_alert(promtool, tmp_path):
    """Three of sixty hosts are 5%, for which there is no alert: it needs more.

    There is none for `anon` either, which is the sum of all locks that have no name.
    """
    series = []
    for host in range(60):
        target = f'job="lockd", instance="{host}"'
        series.append({"series": f"lockd_start_time_seconds{{{target}}}", "values": "1x60"})
        for lock, hosts in (("few", 3), ("many", 4), ("anon", 10), ("other", 10)):
            if host < hosts:
                labels = f'{target}, unit="u", comm="c", kind="lock", lock="{lock}"'
                name = f"lockd_futex_lock_blocked_seconds_total{{{labels}}}"
                series.append({"series": name, "values": "0+30x60"})
                labels = f'{target}, unit="u", comm="c", lock_type="mutex", lock="{lock}", site="s"'
                name = f"lockd_kernel_lock_site_wait_seconds_total{{{labels}}}"
                series.append({"series": name, "values": "0+30x60"})
    firing = 'count by (lock) (ALERTS{alertname="LockdLockOnManyHosts", alertstate="firing"})'
    recorded = 'count by (lock) ({__name__=~"cluster_job_(comm|lock_type)_lock:.+:rate5m"})'
    queries = [
        (firing, "14m", [{"labels": '{lock="many"}', "value": 2}]),
        (recorded, "14m", [{"labels": f'{{lock="{lock}"}}', "value": 2} for lock in ("few", "many")]),
    ]
    check(promtool, tmp_path, [RULES, RECORDING], series, queries)


# --- the panels --------------------------------------------------------------------------------------------

EMPTY = {
    ("lockd-fleet", "Hosts that do not answer"): "all of them answer",
    ("lockd-fleet", "Hosts with a wait over a minute"): "no wait is so long",
    ("lockd-fleet", "Hooks that are missing"): "none is missing",
    ("lockd-fleet", "Configurations not in force"): "no reload found an error",
}
"""The panels that show nothing if a host is well, by dashboard and title, and the reason."""
OBJECTIVE = {
    "record": "unit:lockd_blocked_objective:ratio",
    "expr": "vector(0.05)",
    "labels": {"unit": "some-unit"},
}


def asked(expr):
    """The query with what a user has chosen in place of the variables."""
    return filled(expr, {"__rate_interval": "1m", "__range": "10m", "__range_s": "600"})


def synthetic(metric, **values):
    """Input series for one metric of the catalogue that grow at every step."""
    labels = {"cluster": values.get("cluster", "some-cluster"), "job": "lockd", "instance": "some-instance"}
    labels.update({label: values.get(label, f"some-{label}") for label in metric.labels})

    def series(suffix, step, **more):
        inner = ", ".join(f'{k}="{v}"' for k, v in {**labels, **more}.items() if v)
        return {"series": f"{metric.name}{suffix}{{{inner}}}", "values": f"0+{step}x40"}

    if metric.kind == "histogram":
        return [
            series("_bucket", 6, le="0.001"),
            series("_bucket", 10, le="+Inf"),
            series("_sum", 1),
            series("_count", 10),
        ]
    return [series("", 10)]


def check(promtool, tmp_path, rule_files, series, queries):
    """Have promtool compare the result of each query, at its time, with the expected samples."""
    test = {
        "rule_files": [str(path) for path in rule_files],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": series,
                "promql_expr_test": [
                    {"expr": expr, "eval_time": time, "exp_samples": samples}
                    for expr, time, samples in queries
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", "test.yml", cwd=tmp_path)


def check_panels(promtool, tmp_path, series, expected, objectives=(OBJECTIVE,)):
    """Check that of all queries of the dashboards exactly `expected` have a result on the series."""
    queries = [
        {"record": record(uid, panel, target), "expr": asked(found_by(target))}
        for uid, _, panel, target in panel_queries()
    ]
    panels = tmp_path / "panels.yml"
    groups = [{"name": "objectives", "rules": list(objectives)}, {"name": "panels", "rules": queries}]
    panels.write_text(yaml.safe_dump({"groups": groups}))
    samples = [{"labels": f'{{__name__="{name}"}}', "value": 1} for name in sorted(expected)]
    query = 'group by (__name__) ({__name__=~"panel_.+"})'
    check(promtool, tmp_path, [RECORDING, panels], series, [(query, "10m", samples)])


def record(uid, panel, target):
    return f"panel_{uid.replace('-', '_')}_{panel['id']}:{target['refId']}"


def shown(is_shown):
    return {record(uid, p, t) for uid, row, p, t in panel_queries() if is_shown(uid, row, p, t)}


CHOSEN = {"kind": "lock", "window": "1m", "state": "uninterruptible"}


def growing(metrics, **values):
    return [s for m in metrics for s in synthetic(m, **CHOSEN | values)]


@pytest.mark.parametrize("cluster", ["some-cluster", ""], ids=["cluster", "no cluster"])
def test_every_panel_shows_what_lockd_exports(promtool, tmp_path, cluster):
    everything = shown(lambda uid, row, p, t: (uid, p["title"]) not in EMPTY)
    check_panels(promtool, tmp_path, growing(CATALOG.values(), cluster=cluster), everything)


def test_what_is_empty_on_a_host_that_is_well_shows_one_that_is_not(promtool, tmp_path):
    target = 'cluster="some-cluster", job="lockd", instance="some-instance"'
    series = [
        {"series": f"up{{{target}}}", "values": "0x40"},
        {
            "series": f'lockd_hook_attached{{{target}, program="p", hook="h", mechanism="m"}}',
            "values": "0x40",
        },
        {"series": f"lockd_config_last_reload_successful{{{target}}}", "values": "0x40"},
        {
            "series": f'lockd_futex_max_blocked_us{{{target}, unit="u", comm="c", kind="lock", window="1m"}}',
            "values": "70000000x40",
        },
    ]
    with_them = {"lockd_hook_attached", "lockd_futex_max_blocked_us"}
    recorded = {
        "cluster_job_instance:lockd_futex_max_blocked_us:max",
        "cluster_job_unit:lockd_futex_max_blocked_us:max",
        "cluster_job:lockd_futex_max_blocked_us:max",
    }
    expected = shown(
        lambda uid, row, p, t: (
            (uid, p["title"]) in EMPTY or ({n for n, _ in selectors(t["expr"])} & (with_them | recorded))
        )
    )
    check_panels(promtool, tmp_path, series, expected, objectives=())


def test_by_default_only_panels_that_say_so_are_empty(promtool, tmp_path):
    metrics = [m for m in CATALOG.values() if MODE_CALLS not in m.help]
    full = shown(lambda uid, row, p, t: MODE_CALLS not in p["description"] and (uid, p["title"]) not in EMPTY)
    check_panels(promtool, tmp_path, growing(metrics), full)


@pytest.mark.parametrize("kind", ["cond", "other"])
def test_idle_workers_appear_in_no_contention_panel(promtool, tmp_path, kind):
    metrics = [m for m in CATALOG.values() if "kind" in m.labels]
    idle = shown(
        lambda uid, row, p, t: (
            (row in ALL_FUTEX_ROWS and all("kind" in labels_of(n) for n, _ in selectors(t["expr"])))
            or (uid, p["title"]) == ("lockd-service", "Hosts")  # where threads run or wait, for whatever
        )
    )
    assert len(idle) == 4
    check_panels(promtool, tmp_path, growing(metrics, kind=kind), idle, objectives=())


def panel_query(uid, title, ref="A"):
    """The query of a panel, with what a user has chosen in place of the variables."""
    (expr,) = [
        target["expr"]
        for board, _, panel, target in panel_queries()
        if (board, panel["title"], target["refId"]) == (uid, title, ref)
    ]
    return asked(expr)


def test_blocked_time_and_its_objective_is_by_cluster_as_in_the_alert(promtool, tmp_path):
    """A cluster that misses its objective is not hidden by another one whose hosts wait little."""
    series = []
    for cluster, host, step in (("north", "a", 30), ("south", "b", 3), ("south", "c", 3), ("south", "d", 3)):
        labels = f'cluster="{cluster}", job="lockd", instance="{host}", unit="some-unit", comm="c"'
        name = f'lockd_futex_blocked_seconds_sum{{{labels}, kind="lock"}}'
        series.append({"series": name, "values": f"0+{step}x60"})
    name = "cluster_job_unit:lockd_futex_blocked_seconds_sum:avg_rate5m"
    expected = [
        {"labels": f'{name}{{cluster="{cluster}", job="lockd", unit="some-unit"}}', "value": value}
        for cluster, value in (("north", 2), ("south", 0.2))
    ]
    objectives = tmp_path / "objectives.yml"
    objectives.write_text(yaml.safe_dump({"groups": [{"name": "objectives", "rules": [OBJECTIVE]}]}))
    query = panel_query("lockd-service", "Blocked time and its objective")
    check(promtool, tmp_path, [RECORDING, objectives], series, [(query, "14m", expected)])


@pytest.mark.parametrize(
    ("waiting", "median", "times"),
    [(1, 0, []), (3, 1, [1, 1, 1])],
    ids=["one of four hosts waits", "three of four hosts wait"],
)
def test_hosts_that_do_not_wait_are_in_the_median(promtool, tmp_path, waiting, median, times):
    """While the median is 0, the column 'Times median' is empty: no host is infinitely far above it."""
    more = {"futex_blocked": ', kind="lock"', "kernel_lock_wait": ', lock_type="mutex"'}
    more["offcpu_runqueue"] = ""
    series = []
    for host in range(4):
        target = f'job="lockd", instance="{host}"'
        series.append({"series": f"lockd_start_time_seconds{{{target}}}", "values": "1700000000x60"})
        for metric, label in more.items() if host < waiting else ():
            name = f'lockd_{metric}_seconds_sum{{{target}, unit="u", comm="c"{label}}}'
            series.append({"series": name, "values": "0+15x60"})
    names = [f"cluster_job:lockd_{metric}_seconds_sum:quantile_rate5m" for metric in more]
    queries = [(name, "14m", [{"labels": f'{name}{{job="lockd"}}', "value": median}]) for name in names]
    expected = [
        {"labels": f'{{job="lockd", instance="{host}"}}', "value": value} for host, value in enumerate(times)
    ]
    queries.append((panel_query("lockd-fleet", "Hosts", "B"), "14m", expected))
    check(promtool, tmp_path, [RECORDING], series, queries)


def test_times_median_with_a_median_of_each_shard(promtool, tmp_path):
    """Thanos and Mimir add a label of the shard to what each Prometheus has recorded."""
    series = []
    for shard in (1, 2):
        of = f'cluster="c", job="lockd", shard="{shard}"'
        name = f'cluster_job_instance:lockd_futex_blocked_seconds_sum:rate5m{{{of}, instance="{shard}"}}'
        series.append({"series": name, "values": f"{shard * 3}x60"})
        name = f"cluster_job:lockd_futex_blocked_seconds_sum:quantile_rate5m{{{of}}}"
        series.append({"series": name, "values": f"{shard}x60"})
    expected = [
        {"labels": f'{{cluster="c", job="lockd", instance="{shard}"}}', "value": shard * 2}
        for shard in (1, 2)
    ]
    query = panel_query("lockd-fleet", "Hosts", "B")
    check(promtool, tmp_path, [], series, [(query, "14m", expected)])


@pytest.mark.parametrize("metric", ["futex_blocked", "kernel_lock_wait", "offcpu_runqueue"])
@pytest.mark.parametrize(
    ("variable", "chosen"),
    [
        ("lockd-service unit", 'unit="shop.service"'),
        ("lockd-host unit", 'unit="shop.service"'),
        ("lockd-host comm", 'comm="shop"'),
    ],
)
def test_services_and_processes_can_be_chosen_whichever_program_is_on(
    promtool, tmp_path, metric, variable, chosen
):
    labels = 'job="lockd", instance="some-instance", unit="shop.service", comm="shop"'
    labels += {"futex_blocked": ', kind="lock"', "kernel_lock_wait": ', lock_type="mutex"'}.get(metric, "")
    series = [
        {"series": f"lockd_{metric}_seconds_{of}{{{labels}}}", "values": "0+1x60"} for of in ("sum", "count")
    ]
    ((_, query),) = [one for one in EXPRESSIONS if one[0] == f"variable {variable}"]
    queries = [
        (asked(query), "14m", [{"labels": f"{{{chosen}}}", "value": 1}]),
        (panel_query("lockd-service", "Hosts"), "14m", [{"labels": "{}", "value": 1}]),
    ]
    check(promtool, tmp_path, [RECORDING], series, queries)


def test_a_number_without_a_result_now_is_zero(promtool, tmp_path):
    """Grafana shows the last value in the time range: a deadlock that has ended would stay."""
    numbers = [t["expr"] for _, _, p, t in panel_queries() if p["type"] == "stat"]
    assert len(numbers) > 15
    labels = 'cluster="c", job="lockd", instance="some-instance", unit="u", comm="c"'
    series = [{"series": f"lockd_deadlocks{{{labels}}}", "values": "1x20 stale"}]
    queries = [(asked(expr), "14m", [{"labels": "{}", "value": 0}]) for expr in numbers]
    check(promtool, tmp_path, [RECORDING], series, queries)


@pytest.mark.parametrize(
    ("of", "seconds"),
    [
        ("_x90 30x30", 30),  # its first hold took 30 s
        ("_x90 30x10 60x20", 60),
        ("0x90 30x30", 30),
        ("30x20 stale 40+0x60 45x40", 5),  # it had no series for some time
    ],
)
def test_the_first_hold_of_a_holder_is_in_the_tables(promtool, tmp_path, of, seconds):
    """The range of ten minutes begins at the 81st of 121 samples."""
    target = 'cluster="c", job="lockd", instance="some-instance"'
    user = f'{target}, unit="u", comm="c", kind="lock", lock="some-lock", holder="h"'
    kernel = f'{target}, unit="u", comm="c", lock_type="mutex", lock="some-lock", holder="h"'
    series = [
        {"series": f"lockd_ticks_total{{{target}}}", "values": "0+300x120"},
        {"series": f"lockd_futex_lock_holder_seconds_total{{{user}}}", "values": of},
        {"series": f"lockd_kernel_lock_holder_seconds_total{{{kernel}}}", "values": of},
    ]
    by = 'holder="h", lock="some-lock", unit="u", comm="c"'
    queries = [
        (panel_query("lockd-host", "Code that held user locks"), by),
        (panel_query("lockd-host", "Code that held kernel locks"), by + ', lock_type="mutex"'),
        (panel_query("lockd-lock", "Code that held it"), 'holder="h", comm="c"'),
    ]
    check(
        promtool,
        tmp_path,
        [],
        series,
        [(f"round(({q}) * 600)", "30m", [{"labels": f"{{{labels}}}", "value": seconds}])
         for q, labels in queries],
    )  # fmt: skip


SITE = "lockd_kernel_lock_site_wait_seconds_total"
USER_LOCK = "lockd_futex_lock_blocked_seconds_total"
PROCESS = "lockd_futex_blocked_seconds_sum"
WAKER = "lockd_offcpu_waker_seconds_total"


@pytest.mark.parametrize(
    ("metric", "board", "panel", "labels"),
    [
        (SITE, "lockd-lock", "Processes that wait", ("job", "instance", "unit", "comm")),
        (SITE, "lockd-lock", "Where the kernel asks for it", ("lock_type", "site")),
        (SITE, "lockd-service", "Kernel locks of the service", ("lock_type", "lock", "site")),
        (SITE, "lockd-host", "Top kernel-lock sites", ("unit", "comm", "lock_type", "lock", "site")),
        (USER_LOCK, "lockd-lock", "Processes that wait", ("job", "instance", "unit", "comm")),
        (USER_LOCK, "lockd-service", "Locks of the service", ("comm", "kind", "lock")),
        (USER_LOCK, "lockd-host", "Top user locks", ("unit", "comm", "kind", "lock")),
        (PROCESS, "lockd-service", "The service on its hosts", ("job", "instance")),
        (WAKER, "lockd-host", "Who waits for whom", ("unit", "comm", "waker")),
    ],
)
@pytest.mark.parametrize(
    ("waited", "seconds"),
    [
        ({"": "_x90 30x30"}, 30),  # the first wait took 30 s
        ({', pod="1"': "_x83 30x6 stale", ', pod="2"': "_x95 30x25"}, 60),  # a new lockd in another pod
        ({', pod="1"': "30x89 stale", ', pod="2"': "_x90 30x30"}, 0),  # the same lockd, with another label
    ],
)
def test_the_first_wait_is_in_the_tables(promtool, tmp_path, metric, board, panel, labels, waited, seconds):
    """The range of ten minutes begins at the 81st of 121 samples."""
    known = {"unit": "u", "comm": "c", "lock_type": "mutex", "kind": "lock", "lock": "some-lock"}
    known |= {"site": "s", "waker": "w", "reason": "other", "state": "interruptible"}
    own = {label: known[label] for label in labels_of(metric)}
    own |= {"job": "lockd", "instance": "some-instance"}
    ticks = {"": "0+300x120", ', pod="1"': "0+300x89 stale", ', pod="2"': "_x90 0+300x30"}
    series = []
    for more, values in waited.items():
        target = f'job="lockd", instance="some-instance"{more}'
        series.append({"series": f"lockd_ticks_total{{{target}}}", "values": ticks[more]})
        pairs = ", ".join(f'{label}="{value}"' for label, value in own.items())
        series.append({"series": f"{metric}{{{pairs}{more}}}", "values": values})
    query = panel_query(board, panel)
    pairs = ", ".join(f'{label}="{own[label]}"' for label in labels)
    shows_zeros = metric in (PROCESS, WAKER)
    expected = [{"labels": f"{{{pairs}}}", "value": seconds}] if seconds or shows_zeros else []
    check(promtool, tmp_path, [], series, [(f"round(({query}) * 600)", "30m", expected)])


@pytest.mark.parametrize(
    ("found", "ticks", "new"),
    [
        (["1x90 4x30"], "0+1x120", 3),
        (["3x120"], "0+1x120", 0),
        (["1x90 4x30", "7x90 2x30"], "0+1x120", 5),  # lockd of the second host began anew: 3, and 2
        (["3x79 stale 3x40"], "0+1x79 stale 80+1x40", 0),  # no scrape at the beginning of the range
        (["_x90 2x30"], "0+1x120", 2),  # the first deadlocks of this service
        (["_x90 2x9 5x20"], "0+1x120", 5),
        (["_x90 2x9 stale"], "0+1x120", 2),  # lockd or the host was restarted since
        (["_x100 2x20"], "_x85 0+1x35", 2),  # the same on a host that is new
        (["_x85 2x35"], "_x85 0+1x35", 0),  # a host that is new to Prometheus, and whose deadlocks are older
    ],
)
def test_deadlocks_found_in_the_time_range(promtool, tmp_path, found, ticks, new):
    """The range of ten minutes begins at the 81st of 121 samples."""
    series = []
    for host, values in enumerate(found):
        target = f'job="lockd", instance="{host}"'
        name = f'lockd_deadlocks_found_total{{{target}, unit="u", comm="c"}}'
        series.append({"series": name, "values": values})
        series.append({"series": f"lockd_ticks_total{{{target}}}", "values": ticks})
    query = panel_query("lockd-service", "Deadlocks found in the time range")
    check(promtool, tmp_path, [], series, [(query, "30m", [{"labels": "{}", "value": new}])])


def test_the_dashboards_were_read():
    assert {uid for uid, *_ in panel_queries()} == set(BOARDS)
