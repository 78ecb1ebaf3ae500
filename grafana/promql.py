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


def select(metric: str, *matchers: str) -> str:
    return f"{metric}{{{', '.join(matchers)}}}"


def rate(selector: str) -> str:
    return f"rate({selector}[$__rate_interval])"


def range_rate(selector: str) -> str:
    """The rate over the whole time range of the dashboard, for tables."""
    return f"rate({selector}[$__range])"


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
