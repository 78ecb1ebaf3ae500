"""Pieces of PromQL that the dashboards share."""

from __future__ import annotations

CLUSTER = 'cluster=~"$cluster"'
FLEET = f'{CLUSTER}, job=~"$job"'
HOSTS = f'{FLEET}, instance=~"$instance"'
HOST = f'{FLEET}, instance="$instance"'
BY_HOST = "cluster, job, instance"
"""The labels that tell hosts apart: those of several clusters may have the same names."""
UNIT = 'unit=~"$unit"'
COMM = 'comm=~"$comm"'
PROCESSES = f"{UNIT}, {COMM}"
CONTENTION = 'kind=~"lock|pi"'
MINUTE = 'window="1m"'
EVENTS = tuple(f"lockd_{of}_seconds_count" for of in ("offcpu_runqueue", "futex_blocked", "kernel_lock_wait"))
"""Counters of which every process that lockd sees has one, whichever programs are turned off."""


def select(metric: str, *matchers: str) -> str:
    return f"{metric}{{{', '.join(matchers)}}}"


def rate(selector: str) -> str:
    return f"rate({selector}[$__rate_interval])"


def range_rate(selector: str) -> str:
    """The rate over the whole time range of the dashboard, for tables."""
    return f"rate({selector}[$__range])"


def growth(counter: str, where: str) -> str:
    """How much a counter has grown over the whole time range of the dashboard.

    increase() takes care of counters that were reset. It does not see the first value of a series, and many
    counters of lockd begin with their first event: the series of a holder begins with all of its first hold.
    So a series that begins within the range counts with its whole value. Such a series was not there in the
    day before the range, and has fewer samples in the range than its host has. An old series of a host that
    was not scraped at the beginning has as many; a series that only comes back was there before.

    `where` selects the hosts.
    """
    samples = f"count_over_time({select('lockd_ticks_total', where)}[$__range])"
    is_new = f"count_over_time({counter}[$__range]) < on ({BY_HOST}) group_left () {samples}"
    was_there = f"present_over_time({counter}[1d] offset $__range)"
    return f"((({counter} unless {was_there}) and {is_new}) or increase({counter}[$__range]))"


def range_rate_of_new(counter: str, where: str) -> str:
    """The rate over the whole time range of the dashboard, for tables of counters that begin with their first
    event. `where` selects the hosts."""
    return f"{growth(counter, where)} / $__range_s"


def total(by: str, expr: str) -> str:
    return f"sum by ({by}) ({expr})"


def longest(by: str, expr: str) -> str:
    return f"max by ({by}) ({expr})"


def peak(selector: str) -> str:
    """The largest maximum between two points of a graph, so that no short one is left out."""
    return f"max_over_time({selector}[$__rate_interval])"


def top(expr: str, count: int = 10) -> str:
    return f"topk({count}, {expr})"


def peak_of_range(selector: str) -> str:
    """The largest maximum over the whole time range of the dashboard, for tables."""
    return f"max_over_time({selector}[$__range])"


def quantiles(buckets: str) -> dict[str, str]:
    """Return queries of quantiles by legend, from rates of buckets that are summed by le."""
    return {
        name: f"histogram_quantile({quantile}, {buckets})"
        for name, quantile in (("median", 0.5), ("90%", 0.9), ("99%", 0.99))
    }
