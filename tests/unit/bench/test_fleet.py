"""Tests of bench/fleet: the replay of recordings, the generated week, and the queries of the dashboards."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from bench.fleet import history, panels, record, recording, scrape
from bench.fleet.history import CLUSTERS, Fleet
from bench.fleet.recording import Recording
from bench.services import get
from tests.needs import needs

HEAD = """\
# HELP lockd_futex_blocked_seconds Blocked time of futex waits, in seconds.
# TYPE lockd_futex_blocked_seconds histogram
"""
GAUGE = """\
# HELP lockd_futex_waiting Threads blocked now.
# TYPE lockd_futex_waiting gauge
"""


def text(count: int, waiting: int, comms: tuple[str, ...]) -> str:
    """An exposition in which each process has blocked `count` times and has `waiting` threads that wait."""
    lines = [HEAD]
    for comm in comms:
        labels = f'comm="{comm}",kind="lock",unit="u.service"'
        lines.append(f'lockd_futex_blocked_seconds_bucket{{{labels},le="+Inf"}} {count}.0\n')
        lines.append(f"lockd_futex_blocked_seconds_count{{{labels}}} {count}.0\n")
        lines.append(f"lockd_futex_blocked_seconds_sum{{{labels}}} {count / 4}\n")
    lines.append(GAUGE)
    lines += [
        f'lockd_futex_waiting{{comm="{comm}",kind="lock",unit="u.service"}} {waiting}.0\n' for comm in comms
    ]
    return "".join([*lines, "# EOF\n"])


@pytest.fixture
def recorded() -> Recording:
    texts = [text(10, 1, ("shop",)), text(14, 2, ("shop", "job")), text(16, 3, ("shop", "job"))]
    return Recording.of("web", 15, texts)


def values(one: Recording, scrape_number: int) -> dict[tuple[str, str], float]:
    body = gzip.decompress(one.exposition(scrape_number)).decode()
    return {
        (sample.name, sample.labels["comm"]): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def test_the_first_round_is_what_was_recorded(recorded: Recording) -> None:
    for number, expected in enumerate([(10, 1), (14, 2), (16, 3)]):
        found = values(recorded, number)
        assert (
            found["lockd_futex_blocked_seconds_count", "shop"],
            found["lockd_futex_waiting", "shop"],
        ) == expected


def test_counters_go_on_and_gauges_come_again(recorded: Recording) -> None:
    counts = [values(recorded, number)["lockd_futex_blocked_seconds_count", "shop"] for number in range(7)]
    assert counts == [10, 14, 16, 16, 20, 22, 22]
    assert values(recorded, 4)["lockd_futex_waiting", "shop"] == 2


def test_who_came_comes_again_by_another_name(recorded: Recording) -> None:
    def names(number: int) -> set[str]:
        return {comm for _, comm in values(recorded, number)}

    assert [names(number) - {"shop"} for number in range(6)] == [
        set(), {"job~0"}, {"job~0"}, set(), {"job~1"}, {"job~1"},
    ]  # fmt: skip
    assert recorded.churn() == 4 * 3600 / 45
    assert recorded.lines == 8


def test_what_is_stored_is_read_again(recorded: Recording, tmp_path: Path) -> None:
    path = tmp_path / "web-10000.gz"
    recording.store(path, 15, [text(10, 1, ("shop",)).encode(), text(12, 1, ("shop",)).encode()])
    again = Recording.load(path)
    assert (again.name, again.step, len(again.scrapes)) == ("web-10000", 15, 2)
    assert values(again, 1)["lockd_futex_blocked_seconds_count", "shop"] == 12


def test_a_fleet_has_hosts_of_each_load() -> None:
    assert sum(stage.hosts for stage in record.STAGES) == 10
    assert len(record.paths(Path(), 2000)) == 10


@needs("prometheus")
def test_a_real_prometheus_scrapes_the_hosts_and_makes_what_rules_record(tmp_path: Path) -> None:
    path = tmp_path / "web-10000.gz"
    recording.store(path, 1, [text(count, 1, ("shop",)).encode() for count in range(10, 100)])
    with scrape.simulated(3, [path]) as (port, _):
        bodies = [gzip.decompress(get(f"http://127.0.0.1:{port}/{host}")) for host in range(3)]
        assert len(set(bodies)) == 3, "hosts of one load are at different places of it"
    names = {labels["__name__"] for labels in history.recorded(path)}
    assert "cluster_job_unit:lockd_futex_blocked_seconds_bucket:rate5m" in names
    assert "cluster_job_instance:lockd_futex_waiting:sum" in names


def test_the_week_has_what_dashboards_ask_for(recorded: Recording) -> None:
    fleet = Fleet(Recording.of("web", 15, [with_locks(), with_locks()]))
    assert (fleet.unit, fleet.lock) == ("shop.service", "shop:stock")
    rule = {"__name__": "cluster_job_instance:lockd_futex_waiting:sum", "job": "lockd", "instance": "host-0"}
    found = fleet.series([rule])
    names = [dict(labels) for labels in found]
    for cluster, hosts in CLUSTERS.items():
        of_cluster = [labels for labels in names if labels.get("cluster") == cluster]
        for name in (rule["__name__"], "lockd_futex_lock_waiting"):
            assert len([one for one in of_cluster if one["__name__"] == name]) == hosts
        assert {one["__name__"] for one in of_cluster if one.get("unit") == "idle.service"} == {
            "lockd_futex_waiting"
        }
    steps = {labels["__name__"]: pattern.step for labels, pattern in zip(names, found.values(), strict=True)}
    assert (steps["lockd_futex_lock_waiting"], steps[rule["__name__"]]) == (15_000, 60_000)


def with_locks() -> str:
    return (
        GAUGE
        + 'lockd_futex_waiting{comm="idle",kind="lock",unit="idle.service"} 1.0\n'
        + "# TYPE lockd_futex_lock_waiting gauge\n"
        + 'lockd_futex_lock_waiting{comm="shop",kind="lock",lock="shop:stock",unit="shop.service"} 1.0\n'
    )


def test_questions_are_those_of_the_dashboards_with_what_grafana_puts_in() -> None:
    queries = panels.queries()
    assert len({query.board for query in queries}) == 4
    (graph,) = [q for q in queries if (q.board, q.name) == ("lockd-host", "Ticks A")]
    assert (graph.step(3600), graph.step(7 * 86400)) == (15, 600)
    expr = graph.filled({"cluster": "one", "instance": "host-0"}, 7 * 86400)
    assert (
        'cluster=~"one"' in expr and 'job=~".*"' in expr and 'instance="host-0"' in expr and "[615s]" in expr
    )
    (table,) = [q for q in queries if (q.board, q.name) == ("lockd-host", "Top user locks A")]
    assert table.is_instant and "[3600s]" in table.filled({}, 3600)
    assert all("$" not in query.filled({}, 3600) for query in queries)


def test_an_exposition_is_made_once_for_many_hosts(recorded: Recording) -> None:
    assert recorded.exposition(1) is recorded.exposition(1)
