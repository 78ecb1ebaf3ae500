"""Futex waits: what lockd says against what the programs know of themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from checks import about
from conftest import Start
from lockd_process import Lockd, Metrics, lockd_or_reason

TRIES = 5
"""The programs time their calls from outside, so that being preempted in one adds to their
truth but, by definition, not to blocked time. Counts must be exact every time, blocked time
never more than the truth; that it is as much must hold in one undisturbed run of so many."""


@pytest.fixture(scope="module", params=["tracepoint", "fentry", "kprobe"])
def by(
    request: pytest.FixtureRequest, lockd: Lockd, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lockd]:
    """A daemon that sees futex calls by one mechanism. Skips where this kernel does not offer it."""
    if request.param == "tracepoint":
        yield lockd
        return
    off = {"enabled": False}
    programs = {"futex": {"mechanism": request.param}, "kernel_locks": off, "offcpu": off}
    daemon = lockd_or_reason(tmp_path_factory.mktemp(request.param), {"programs": programs})
    if isinstance(daemon, str):
        pytest.skip(f"host: {daemon}")
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


def check_counts(metrics: Metrics, comm: str, truth: dict[str, Any], lost: int) -> None:
    """Every count that the truth names, exactly, but for at most `lost`."""

    def check(seen: float, told: int, what: str) -> None:
        assert told - lost <= seen <= told, f"{what}: {seen:g}, truth {told}, lost {lost}"

    for kind, told in truth["futex"].items():
        labels = {"comm": comm, "kind": kind}
        check(metrics.sum("lockd_futex_waits_total", **labels), told["waits"], f"{kind} waits")
        check(metrics.sum("lockd_futex_blocked_seconds_count", **labels), told["blocked"], f"{kind} blocked")
    if "wakes" in truth:
        check(metrics.sum("lockd_futex_wakes_total", comm=comm), truth["wakes"], "wakes")
    for error, count in truth.get("errors", {}).items():
        check(metrics.sum("lockd_futex_errors_total", comm=comm, error=error), count, error)


def check_no_time_is_invented(metrics: Metrics, comm: str, truth: dict[str, Any]) -> None:
    """Unless something was lost: a call whose end was not seen lasts until the thread is seen elsewhere."""
    for kind, told in truth["futex"].items():
        assert blocked_us(metrics, comm=comm, kind=kind) <= told["blocked_us"] + told["blocked"], kind
        assert longest_us(metrics, comm=comm, kind=kind) <= told["max_us"] + 1, kind


def times_agree(metrics: Metrics, comm: str, truth: dict[str, Any]) -> bool:
    """Whether sums and maxima of blocked time are within tolerance for every kind."""
    return all(
        blocked_us(metrics, comm=comm, kind=kind) == about(told["blocked_us"], told["blocked"])
        and longest_us(metrics, comm=comm, kind=kind) == about(told["max_us"])
        for kind, told in truth["futex"].items()
    )


def blocked_us(metrics: Metrics, **labels: str) -> float:
    return metrics.sum("lockd_futex_blocked_seconds_sum", **labels) * 1e6


def longest_us(metrics: Metrics, **labels: str) -> float:
    return metrics.max("lockd_futex_max_blocked_us", window="1m", **labels)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("mutex_handover", (100, 2000)),
        ("mutex_handover", (10, 60_000)),
        ("pi_mutex", (50, 2000)),
        ("rwlock", (50, 2000)),
        ("semaphore", (50, 2000)),
        ("cond_pingpong", (500,)),
        ("idle_pool", (8, 3)),
        ("futex_errors", (100, 1000, 50, 1000)),
        ("requeue", (20,)),
        ("futex2", (50,)),
    ],
)
def test_counts_are_exact_and_times_right(
    by: Lockd,
    workload: Start,
    program: str,
    arguments: tuple[int, ...],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    mechanism = request.node.callspec.params["by"]
    record_property("futex calls", mechanism)
    seen = []
    for _ in range(TRIES):
        before = by.dropped("futex")
        one = workload(program, *arguments)
        one.hurry()
        truth = one.run()
        metrics = by.metrics()
        lost = int(metrics.sum("lockd_dropped_events_total", map="futex")) - before
        check_counts(metrics, one.comm, truth, lost)
        one.finish()
        if not lost:
            check_no_time_is_invented(metrics, one.comm, truth)
            if times_agree(metrics, one.comm, truth):
                return
        elif mechanism == "kprobe":  # and always, with more threads in a call than a kretprobe has room for
            return
        blocked, longest = blocked_us(metrics, comm=one.comm), longest_us(metrics, comm=one.comm)
        seen.append((truth["futex"], blocked, longest, lost))
    pytest.fail(f"{program} is off in each of {TRIES} runs (truth, blocked us, longest us, lost): {seen}")


def test_a_condition_variable_is_never_a_lock(lockd: Lockd, workload: Start) -> None:
    one = workload("idle_pool", 8, 3)
    one.run()
    metrics = lockd.metrics()
    assert longest_us(metrics, comm=one.comm, kind="cond") >= 3e6
    assert longest_us(metrics, comm=one.comm, kind="lock") == 0
    assert metrics.sum("lockd_futex_waits_total", comm=one.comm, kind="lock") == 0
