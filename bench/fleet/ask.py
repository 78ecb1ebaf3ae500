"""The time that Prometheus takes to answer the queries of the dashboards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from bench.fleet.panels import Query
from bench.fleet.server import Answer, Prometheus

TIMES = 3
"""The number of times that a query is sent; the median of its times counts."""
SLOW = 2.0
"""A query that takes this many seconds or more is sent only once."""
CONNECTIONS = 6
"""The number of connections that a browser opens to one server."""


def ask(server: Prometheus, query: Query, chosen: Mapping[str, str], end: float, hours: float) -> Answer:
    """The answer to a query over the `hours` before `end`, with the `chosen` values of the variables."""
    seconds = hours * 3600
    expr = query.filled(chosen, seconds)
    if query.is_instant:
        return server.instant(expr, end)
    step = query.step(seconds)
    return server.range(expr, end - seconds, end, step)


def one_by_one(
    server: Prometheus, queries: list[Query], chosen: Mapping[str, str], end: float, hours: float
) -> list[Answer]:
    """The answer with the median time to each query. The queries are sent one after another."""
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
    """The median of the seconds until all queries of a dashboard are answered, if sent as a browser does."""
    taken = []
    while len(taken) < TIMES and sum(taken) < SLOW * TIMES:
        began = time.monotonic()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(lambda query: ask(server, query, chosen, end, hours), queries))
        taken.append(time.monotonic() - began)
    return statistics.median(taken)
