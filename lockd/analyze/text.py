"""Tables of what records of locks say: for a terminal, and as cells for other forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockd.analyze import tables
from lockd.analyze.records import Records
from lockd.analyze.tables import Total
from lockd.printable import printable

UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))
FRAMES = 6
"""Of a stack, the innermost without those that only take the lock: they are the same for all."""


@dataclass(frozen=True)
class Table:
    """A title, the head, and the rows below it."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def summary(records: Records) -> list[str]:
    """What was read, in a few sentences."""
    rows = records.rows
    waited, accesses, open_ = (int(rows[name].sum()) for name in ("wait_ns", "accesses", "ongoing"))
    said = [
        f"{len(rows):,} records: {len(np.unique(rows['lock'])):,} locks, "
        f"{len(np.unique(rows['thread'])):,} threads, {accesses:,} accesses that waited {duration(waited)}"
    ]
    starts = tables.periods(records)
    if len(starts):
        seconds = len(starts) * records.period_ns / 1e9
        said.append(f"{seconds:.1f} s in periods of {records.period_ns / 1e6:g} ms")
    if open_:
        said.append(f"{open_:,} waits had not ended; they count with their time until then")
    return said


def all_tables(records: Records, lock: int, most: int) -> list[Table]:
    """Everything, with `most` rows in each table; `lock` is the one that is shown in detail."""
    found = tables.totals(records, "lock")
    of_lock = records.where(records.rows["lock"] == lock)
    label = f"{records.label(lock)} ({records.types[lock]})"
    shown = [
        Table("Locks by time waited", *_locks(records, found[:most])),
        Table("Locks by distinct threads", *_locks(records, tables.by_threads(found)[:most])),
    ]
    if windows := tables.windows(records):
        shown.append(Table("Worst periods of one lock", *_windows(records, windows[:most])))
    shown.append(Table(f"Threads at {label}", *_threads(of_lock, most)))
    shown.append(Table(f"Stacks at {label}", *_stacks(of_lock, most)))
    return shown


def lines(records: Records, lock: int, most: int) -> Iterator[str]:
    """All as text."""
    yield from (f"{sentence}\n" for sentence in summary(records))
    for table in all_tables(records, lock, most):
        yield f"\n{table.title}\n"
        widths = [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)][:-1]
        for *cells, last in (table.head, *table.rows):
            padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
            yield f"  {'  '.join([*padded, last])}".rstrip() + "\n"


def duration(ns: float) -> str:
    """In the largest unit of which there is one at least, as `1.23 ms`."""
    for size, unit in UNITS:
        if ns >= size:
            return f"{ns / size:.2f} {unit}"
    return f"{ns:.0f} ns"


def _sums(total: Total) -> tuple[str, ...]:
    wait = duration(total.wait_ns) + (f" ({total.ongoing} open)" if total.ongoing else "")
    return wait, f"{total.accesses:,}", duration(total.average_ns)


def _locks(records: Records, found: list[Total]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    return ("WAITED", "ACCESSES", "AVERAGE", "THREADS", "TYPE", "LOCK"), [
        (
            *_sums(one), f"{one.threads:,}", records.types[one.subject],
            printable(records.label(one.subject)),
        )
        for one in found
    ]  # fmt: skip


def _windows(records: Records, found: list[tables.Window]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    began = int(tables.periods(records)[0])
    return ("AT", "AVERAGE", "WAITED", "ACCESSES", "THREADS", "TYPE", "LOCK"), [
        (
            f"{(one.start_ns - began) / 1e9:.3f} s", duration(one.average_ns), duration(one.wait_ns),
            f"{one.accesses:,}", f"{one.threads:,}", records.types[one.lock],
            printable(records.label(one.lock)),
        )
        for one in found
    ]  # fmt: skip


def _threads(records: Records, most: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    return ("WAITED", "ACCESSES", "AVERAGE", "PID", "TID", "COMM"), [
        (
            *_sums(one), str(records.threads[one.subject].pid), str(records.threads[one.subject].tid),
            printable(records.comms[one.subject]),
        )
        for one in tables.totals(records, "thread")[:most]
    ]  # fmt: skip


def _stacks(records: Records, most: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    return ("WAITED", "ACCESSES", "AVERAGE", "THREADS", "STACK"), [
        (*_sums(one), f"{one.threads:,}", printable(stack(records, one.subject)))
        for one in tables.totals(records, "stack")[:most]
    ]


def stack(records: Records, number: int) -> str:
    """The innermost functions that do more than to take the lock, each called by the next."""
    functions = records.callers(number)
    more = " < ..." if len(functions) > FRAMES else ""
    return " < ".join(functions[:FRAMES]) + more or "not known"
