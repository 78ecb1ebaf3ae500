"""How long Prometheus takes for what the dashboards ask."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench.fleet.panels import Query
from bench.fleet.server import Answer, Prometheus

TIMES = 3
"""That each query is asked; the median counts."""
SLOW = 2.0
"""Seconds after which once is enough."""
CONNECTIONS = 6
"""That a browser opens to one server."""


@dataclass(frozen=True)
class Asked:
    """One query, of one fleet, over one time range."""

    query: Query
    hosts: int
    hours: float
    answer: Answer


def ask(server: Prometheus, query: Query, chosen: Mapping[str, str], end: float, hours: float) -> Answer:
    """The answer to it with what somebody has chosen, over the hours before `end`."""
    seconds = hours * 3600
    expr = query.filled(chosen, seconds)
    if query.is_instant:
        return server.instant(expr, end)
    step = query.step(seconds)
    return server.range(expr, end - seconds, end, step)


def one_by_one(
    server: Prometheus, queries: list[Query], chosen: Mapping[str, str], end: float, hours: float
) -> list[Answer]:
    """The answers, each with the median of some tries."""
    found = []
    for query in queries:
        answers = [ask(server, query, chosen, end, hours)]
        while len(answers) < TIMES and answers[0].seconds < SLOW:
            answers.append(ask(server, query, chosen, end, hours))
        found.append(sorted(answers, key=lambda one: one.seconds)[len(answers) // 2])
    return found


def whole_board(
    server: Prometheus, queries: list[Query], chosen: Mapping[str, str], end: float, hours: float
) -> float:
    """Seconds until all queries of a dashboard are answered that a browser sends at once; the median."""
    taken = []
    while len(taken) < TIMES and sum(taken) < SLOW * TIMES:
        began = time.monotonic()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(lambda query: ask(server, query, chosen, end, hours), queries))
        taken.append(time.monotonic() - began)
    return statistics.median(taken)
