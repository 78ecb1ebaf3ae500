"""What records of locks say, in sentences and tables: as text for a terminal, and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from lockd.analyze import statistics
from lockd.analyze.records import Records
from lockd.analyze.statistics import LockPeriod, Total
from lockd.printable import printable

Cells = tuple[str, ...]
"""The cells of a row of a table."""

UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))
FRAMES = 6
"""The most functions of a stack that are shown: the innermost ones that are not part of the lock itself."""


STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; color: #222; }
body { max-width: 1200px; margin: 2em auto; padding: 0 1em; }
h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; }
th, td { text-align: right; padding: 2px 10px; white-space: nowrap; border-bottom: 1px solid #ddd; }
th:last-child, td:last-child { text-align: left; white-space: normal; font-family: monospace; }
th { font-weight: 600; }
svg { width: 100%; height: auto; }
"""
"""The style sheet of the page."""


@dataclass(frozen=True)
class Table:
    title: str
    head: Cells
    rows: list[Cells]


def summary(records: Records) -> list[str]:
    """Sentences about all records: their number, the time they span, and waits that had not ended."""
    rows = records.rows
    waited, accesses, ongoing = (int(rows[name].sum()) for name in ("wait_ns", "accesses", "ongoing"))
    sentences = [
        f"{len(rows):,} records: {len(np.unique(rows['lock'])):,} locks, "
        f"{len(np.unique(rows['thread'])):,} threads, {accesses:,} accesses that waited {duration(waited)}"
    ]
    starts = statistics.period_starts(records)
    if len(starts):
        seconds = len(starts) * records.period_ns / 1e9
        sentences.append(f"{seconds:.1f} s in periods of {records.period_ns / 1e6:g} ms")
    if ongoing:
        sentences.append(f"{ongoing:,} waits had not ended; they count with their time until then")
    return sentences


def all_tables(records: Records, lock: int, most: int) -> list[Table]:
    """All tables, with at most `most` rows each. `lock` is the position in `records.locks` of the
    lock that is shown in detail."""
    totals = statistics.totals(records, "lock")
    of_lock = records.where(records.rows["lock"] == lock)
    label = printable(f"{records.label(lock)} ({records.types[lock]})")
    tables = [
        Table("Locks by time waited", *_locks(records, totals[:most])),
        Table("Locks by distinct threads", *_locks(records, statistics.sort_by_threads(totals)[:most])),
    ]
    if periods := statistics.lock_periods(records):
        tables.append(Table("Worst periods of one lock", *_periods(records, periods[:most])))
    tables.append(Table(f"Threads at {label}", *_threads(of_lock, most)))
    tables.append(Table(f"Stacks at {label}", *_stacks(of_lock, most)))
    return tables


def lines(records: Records, lock: int, most: int) -> Iterator[str]:
    """The summary and all tables as lines of text. The arguments are those of all_tables()."""
    yield from (f"{sentence}\n" for sentence in summary(records))
    for table in all_tables(records, lock, most):
        yield f"\n{table.title}\n"
        widths = [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)][:-1]
        for *cells, last in (table.head, *table.rows):
            padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
            yield f"  {'  '.join([*padded, last])}".rstrip() + "\n"


def page(title: str, sentences: list[str], picture: str, tables: list[Table]) -> Iterator[str]:
    """The lines of an HTML page that needs no other files. `picture` is an SVG element, or empty."""
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield f"<title>{escape(title)}</title>\n"
    yield f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
    yield from (f"<p>{escape(sentence)}</p>\n" for sentence in sentences)
    yield picture
    for table in tables:
        yield f"<h2>{escape(table.title)}</h2>\n<table>\n<tr>{_cells('th', table.head)}</tr>\n"
        yield from (f"<tr>{_cells('td', row)}</tr>\n" for row in table.rows)
        yield "</table>\n"
    yield "</body>\n</html>\n"


def _cells(tag: str, cells: Cells) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)


def duration(ns: float) -> str:
    """A time in the largest unit in which it is at least 1, such as `1.23 ms`, or in whole nanoseconds."""
    for size, unit in UNITS:
        if ns >= size:
            return f"{ns / size:.2f} {unit}"
    return f"{ns:.0f} ns"


def _sum_cells(total: Total) -> Cells:
    wait = duration(total.wait_ns) + (f" ({total.ongoing} open)" if total.ongoing else "")
    return wait, f"{total.accesses:,}", duration(total.average_ns)


def _locks(records: Records, totals: list[Total]) -> tuple[Cells, list[Cells]]:
    return ("WAITED", "ACCESSES", "AVERAGE", "THREADS", "TYPE", "LOCK"), [
        (
            *_sum_cells(total), f"{total.threads:,}", records.types[total.subject],
            printable(records.label(total.subject)),
        )
        for total in totals
    ]  # fmt: skip


def _periods(records: Records, periods: list[LockPeriod]) -> tuple[Cells, list[Cells]]:
    at = statistics.seconds(records, np.array([period.start_ns for period in periods], np.int64)).tolist()
    return ("AT", "AVERAGE", "WAITED", "ACCESSES", "THREADS", "TYPE", "LOCK"), [
        (
            f"{seconds:.3f} s", duration(period.average_ns), duration(period.wait_ns),
            f"{period.accesses:,}", f"{period.threads:,}", records.types[period.lock],
            printable(records.label(period.lock)),
        )
        for seconds, period in zip(at, periods, strict=True)
    ]  # fmt: skip


def _threads(records: Records, most: int) -> tuple[Cells, list[Cells]]:
    totals = statistics.totals(records, "thread")[:most]
    threads = [records.threads[total.subject] for total in totals]
    return ("WAITED", "ACCESSES", "AVERAGE", "PID", "TID", "COMM"), [
        (
            *_sum_cells(total), str(thread.pid), str(thread.tid),
            printable(records.comms[total.subject]),
        )
        for total, thread in zip(totals, threads, strict=True)
    ]  # fmt: skip


def _stacks(records: Records, most: int) -> tuple[Cells, list[Cells]]:
    return ("WAITED", "ACCESSES", "AVERAGE", "THREADS", "STACK"), [
        (*_sum_cells(total), f"{total.threads:,}", printable(stack(records, total.subject)))
        for total in statistics.totals(records, "stack")[:most]
    ]


def stack(records: Records, number: int) -> str:
    """The text `FUNCTION < CALLER < ...` for the stack at the position `number` in `records.stacks`.

    The functions that implement the lock are left out.
    """
    functions = records.callers(number)
    more = " < ..." if len(functions) > FRAMES else ""
    return " < ".join(functions[:FRAMES]) + more or "not known"
