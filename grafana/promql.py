"""Pieces of PromQL that the dashboards share."""

from __future__ import annotations

from lockd.export.catalog import CATALOG

CLUSTER = 'cluster=~"$cluster"'
FLEET = f'{CLUSTER}, job=~"$job"'
HOSTS = f'{FLEET}, instance=~"$instance"'
HOST = f'{FLEET}, instance="$instance"'
BY_HOST = "cluster, job, instance"
"""The labels that identify a host: hosts of different clusters or jobs may have the same `instance`."""
UNIT = 'unit=~"$unit"'
COMM = 'comm=~"$comm"'
PROCESSES = f"{UNIT}, {COMM}"
CONTENTION = 'kind=~"lock|pi"'
MINUTE = 'window="1m"'
EVENTS = tuple(f"lockd_{of}_seconds_count" for of in ("offcpu_runqueue", "futex_blocked", "kernel_lock_wait"))
"""Counters of all programs. Every process that lockd sees has series of at least one of them, whichever
program is turned off."""


def select(metric: str, *matchers: str) -> str:
    return f"{metric}{{{', '.join(matchers)}}}"


def rate(selector: str) -> str:
    return f"rate({selector}[$__rate_interval])"


def growth(counter: str, where: str) -> str:
    """How much a counter has grown over the whole time range of the dashboard.

    increase() takes care of counters that were reset, but it ignores the first value of a series. Many
    counters of lockd begin with their first event: the first value for a holder contains the time of its
    first sample. So a series that begins within the range counts with its whole value, even if it has ended
    since. It is recognised by two conditions. It has no sample in the day before the range: this excludes a
    series that was removed and comes back. It has fewer samples in the range than lockd_ticks_total of the
    same target: this excludes an old series of a host that was not scraped at the beginning of the range, or
    whose targets have got another label, such as the name of a pod, within the range.

    `where` has the label matchers of the hosts.
    """
    metric = counter.partition("{")[0].removesuffix("_sum")  # which a histogram has
    labels = ", ".join(CATALOG[metric].labels)
    samples = f"count_over_time({select('lockd_ticks_total', where)}[$__range])"
    is_new = f"count_over_time({counter}[$__range]) < ignoring ({labels}) group_left () {samples}"
    was_there = f"present_over_time({counter}[1d] offset $__range)"
    last = f"last_over_time({counter}[$__range])"
    return f"((({last} unless {was_there}) and {is_new}) or increase({counter}[$__range]))"


def range_rate_of_new(counter: str, where: str) -> str:
    """The rate over the whole time range of the dashboard, for tables.

    The counter, or the sum of a histogram, may begin with its first event. `where` has the label matchers of
    the hosts.
    """
    return f"{growth(counter, where)} / $__range_s"


def total(by: str, expr: str) -> str:
    return f"sum by ({by}) ({expr})"


def longest(by: str, expr: str) -> str:
    return f"max by ({by}) ({expr})"


def peak(selector: str) -> str:
    """The largest value of a gauge since the previous point of the graph, so that no short peak is missed."""
    return f"max_over_time({selector}[$__rate_interval])"


def top(expr: str, count: int = 10) -> str:
    return f"topk({count}, {expr})"


def peak_of_range(selector: str) -> str:
    """The largest value of a gauge over the whole time range of the dashboard, for tables."""
    return f"max_over_time({selector}[$__range])"


def quantiles(buckets: str) -> dict[str, str]:
    """Return queries of quantiles by legend, from rates of buckets that are summed by le."""
    return {
        name: f"histogram_quantile({quantile}, {buckets})"
        for name, quantile in (("median", 0.5), ("90%", 0.9), ("99%", 0.99))
    }
