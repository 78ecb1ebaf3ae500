"""A day on a busy host: thousands of comms come and go, and every service that waits has its series.

The clock and the processes are simulated. The aggregates, their series, and what they share are real.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockd.sample.series.limits import RESERVED_LINES, Limits
from lockd.sample.series.ranking import MEMORY_NS
from lockd.sample.series.series import OTHER
from tests.support.busy_host import HOT_MS, SECOND, STEP, BusyHost, Crowd, Process, numbers, services

MINUTE, HOUR = 60, 3600
FAMILIES = (
    "lockd_futex_blocked_seconds_count", "lockd_offcpu_blocked_seconds_count",
    "lockd_offcpu_runqueue_seconds_count", "lockd_offcpu_waker_seconds_total",
)  # fmt: skip
CALLS = {
    "lockd_futex_waits_total": "waits",
    "lockd_futex_wakes_total": "wakes",
    "lockd_futex_errors_total": "errors",
}
"""The metrics that only mode `calls` counts, each with the key of its total in BusyHost.truth."""
TRUTH = {
    "lockd_futex_blocked_seconds_count": "blocked",
    "lockd_futex_blocked_seconds_sum": "blocked_ns",
    "lockd_futex_lock_blocked_total": "blocked",
    "lockd_futex_lock_blocked_seconds_total": "blocked_ns",
    "lockd_offcpu_blocked_seconds_count": "offcpu",
    "lockd_offcpu_blocked_seconds_sum": "offcpu_ns",
    "lockd_offcpu_waker_seconds_total": "offcpu_ns",
    "lockd_offcpu_runqueue_seconds_count": "runqueue",
    "lockd_offcpu_runqueue_seconds_sum": "run_ns",
}


def lacking(exported: dict[str, dict[tuple[str, ...], float]], service: Process) -> set[str]:
    """Return the metrics in which a service lacks a series of its own for something that it waits for."""
    wanted = dict.fromkeys(FAMILIES, 1)
    if "lockd_futex_waits_total" in exported:
        wanted |= {"lockd_futex_waits_total": 2, "lockd_futex_wakes_total": 1}
    wanted |= {
        "lockd_offcpu_blocked_seconds_count": len(service.calls), "lockd_futex_blocked_seconds_count": 2
    }  # fmt: skip
    if service.blocked_ms == HOT_MS:
        wanted["lockd_futex_lock_blocked_total"] = service.locks
    mine = (service.unit, service.comm)
    return {
        metric
        for metric, count in wanted.items()
        if sum(labels[:2] == mine for labels in exported[metric]) < count
    }


def truth_of(host: BusyHost) -> dict[str, str]:
    return TRUTH | CALLS if host.mode == "calls" else TRUTH


def is_exact(host: BusyHost) -> None:
    exported, retired = host.exported(), host.retired()
    for metric, name in truth_of(host).items():
        scale = 1 if metric.endswith(("_total", "_count")) and "seconds_total" not in metric else 1e9
        total = sum(exported[metric].values()) + retired[metric]
        assert total * scale == pytest.approx(host.truth[name], rel=1e-9), metric


def live(host: BusyHost, seed: int, seconds: int) -> Crowd:
    """Run the host for `seconds`. A service must have its series a minute after its start, and keep them."""
    tgids, random = numbers(), np.random.default_rng(seed)
    crowd, starts = Crowd(seed, tgids), services(random, tgids, seconds)
    running: list[Process] = []
    since: dict[int, int] = {}
    most = host.limits.max_lines - RESERVED_LINES
    before: dict[str, dict[tuple[str, ...], float]] = {}
    for step in range(seconds // STEP):
        for service in starts.get(step, ()):
            running.append(service)
            since[service.tgid] = step
        there, ended = crowd.step(step * STEP)
        host.step(running + there, ended)
        assert host.lines() <= most
        old = [one for one in running if (step - since[one.tgid]) * STEP >= MINUTE]
        if step % 6 == 0:
            exported = host.exported()
            for service in old:
                assert not lacking(exported, service), (lacking(exported, service), service, step * STEP)
            for metric in truth_of(host):  # no value goes back
                for labels, value in exported[metric].items():
                    assert value >= before.get(metric, {}).get(labels, 0), (metric, labels)
            before = exported
        if step % 360 == 0:
            is_exact(host)
    is_exact(host)
    assert len(old) == len(running)
    return crowd


@pytest.mark.parametrize("mode", ["blocked", "calls"])
def test_every_service_has_its_series_within_a_minute(tmp_path: Path, mode: str) -> None:
    crowd = live(BusyHost(tmp_path, mode=mode), seed=1, seconds=HOUR)
    assert len(crowd.comms) > 700


def test_helpers_are_told_by_unit_where_there_is_no_room_for_each(tmp_path: Path) -> None:
    host = BusyHost(tmp_path, Limits(max_lines=5000), mode="calls")
    live(host, seed=2, seconds=HOUR // 2)
    assert ("cron.service", OTHER) in host.exported()["lockd_futex_wakes_total"]


@pytest.mark.thorough("8,640 looks at a host take minutes")
@pytest.mark.parametrize("seed", [3, 4])
def test_a_whole_day(tmp_path: Path, seed: int) -> None:
    host = BusyHost(tmp_path)
    crowd = live(host, seed, seconds=24 * HOUR)
    assert len(crowd.comms) > 10_000
    assert all(series.retired for series in host.series if series.family == "futex")


@pytest.mark.parametrize("mode", ["blocked", "calls"])
def test_no_wait_ranks_higher_than_a_thread_that_waits_all_the_time(tmp_path: Path, mode: str) -> None:
    """Else idle threads whose timers are of minutes would take turns for the places in a family."""
    host = BusyHost(tmp_path, mode=mode)
    host.step([Process(7, "shop.service", "shop", blocked_ms=8 * HOUR * 1000, call_ms=8 * HOUR * 1000)], [])
    waits = 10 + 5 + 3 + 2  # the futex calls of a process in a step
    waited = {series.family: series._entries["waited"].max() for series in host.series}
    assert 0 < max(waited.values()) <= waits * MEMORY_NS + SECOND, waited


def test_a_lock_that_had_no_name_has_it_once_it_is_known(tmp_path: Path) -> None:
    """The stack of the first waiter was not captured. What counts until another one is stays with `anon`."""
    host = BusyHost(tmp_path)
    service = Process(next(numbers()), "shop.service", "shop")
    anon, named = (("shop.service", "shop", "lock", lock) for lock in ("anon", "app:mutex_0"))

    def counted() -> dict[tuple[str, ...], float]:
        host.step([service], [])
        counts = host.exported()["lockd_futex_lock_blocked_total"]
        return {labels: count for labels, count in counts.items() if labels in (anon, named)}

    host.names.has_stacks = False
    while not counted():
        pass
    nameless = counted()[anon]
    host.names.ask_again()
    assert counted() == {anon: nameless + 10}
    assert counted() == {anon: nameless + 10, named: 10}
    is_exact(host)


def test_what_is_not_counted_is_absent_and_takes_no_line(tmp_path: Path) -> None:
    """A metric that is not counted is not zero, which would look like a host without failed calls."""
    by_mode = {mode: BusyHost(tmp_path, mode=mode) for mode in ("blocked", "calls")}
    service = Process(next(numbers()), "shop.service", "shop")
    for host in by_mode.values():
        host.step([service], [])
        is_exact(host)
    blocked, calls = by_mode["blocked"], by_mode["calls"]
    absent = calls.exported().keys() - blocked.exported().keys()
    assert absent == {*CALLS, "lockd_futex_sys_seconds_total", "lockd_futex_max_sys_us"}
    assert blocked.exported().keys() <= calls.exported().keys()
    assert calls.retired().keys() - blocked.retired().keys() == absent - {"lockd_futex_max_sys_us"}
    lines = {host.mode: {series.family: series.lines for series in host.series} for host in by_mode.values()}
    assert lines["calls"].keys() - lines["blocked"].keys() == {"futex_process", "futex_error"}
    assert lines["calls"]["futex"] == lines["blocked"]["futex"] + 1


def test_counts_of_one_mode_are_not_those_of_the_other(tmp_path: Path) -> None:
    """By the forms of its series, the sampler tells whether it can go on with what the last start left."""
    forms = [
        {series.family: series.form for series in BusyHost(tmp_path, mode=mode).series}
        for mode in ("blocked", "calls")
    ]
    assert forms[0]["futex"] != forms[1]["futex"]
    assert forms[0]["futex_lock"] == forms[1]["futex_lock"]
