"""What is known of mutexes as text: histograms as bpftrace prints them, a table, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator

from lockd.trace.core.histogram import bars, buckets
from lockd.trace.mutex.rows import Found, Measured, Place

TABLE_FRAMES = 3
COLUMNS = (
    "pid", "comm", "address", "lock", "count", "total_ns", "max_ns", "errors", "state", "stack",
)  # fmt: skip


def _sorted(found: Found) -> list[tuple[Place, Measured]]:
    """The largest sum last, as bpftrace prints them: at the end of a terminal."""
    return sorted(
        found.items(),
        key=lambda one: (one[1].total, one[1].times.count, one[0].lock, one[0].comm, one[0].frames),
    )


def as_histograms(found: Found, name: str) -> Iterator[str]:
    """`@NAME[lock, stack, comm]:` and a line for each slot; then the calls that failed."""
    has_pids = len({place.pid for place in found}) > 1
    for place, measured in _sorted(found):
        for error, count in sorted(measured.errors.items()):
            yield f"@failed[{_key(place, has_pids, error)}]: {count}\n\n"
    for place, measured in _sorted(found):
        if measured.times.counts:
            yield f"@{name}[{_key(place, has_pids, place.state)}]: \n"
            yield from bars(measured.times)
            yield "\n"


def _key(place: Place, has_pids: bool, more: str) -> str:
    """As bpftrace writes it, with the blanks at the end of lines."""
    stack = "".join(f"\n    {function}" for function in place.frames) + "\n" if place.frames else ""
    pid = f", pid {place.pid}" if has_pids else ""
    return f"{place.lock}, {stack}{', ' if stack else ''}{place.comm}{pid}{more and f', {more}'}"


def as_table(found: Found) -> Iterator[str]:
    """The largest sum first; times in microseconds."""
    heads = ("COUNT", "TOTAL_US", "MEAN_US", "MAX_US", "ERRORS", "PID", "COMM", "LOCK", "STACK")
    rows: list[tuple[str, ...]] = [heads]
    for place, measured in reversed(_sorted(found)):
        times = measured.times
        mean = measured.total / times.count if times.count else 0
        where = " < ".join((*(f"[{text}]" for text in (place.state,) if text), *place.frames[:TABLE_FRAMES]))
        rows.append((
            str(times.count), *(f"{ns / 1000:.1f}" for ns in (measured.total, mean, times.max or 0)),
            str(sum(measured.errors.values())), str(place.pid), place.comm, place.lock, where,
        ))  # fmt: skip
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[:6], widths[:6], strict=True)]
        names = [cell.ljust(width) for cell, width in zip(row[6:], widths[6:], strict=True)]
        yield "  ".join((*numbers, *names)).rstrip() + "\n"


def as_csv(found: Found) -> Iterator[str]:
    """Text is quoted, a stack is one field with its outermost function first; the largest sum first."""
    line = io.StringIO()
    writer = csv.writer(line, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    yield ",".join(COLUMNS) + "\n"
    for place, measured in reversed(_sorted(found)):
        stack = ";".join(name.replace(";", ":") for name in reversed(place.frames))
        writer.writerow((
            place.pid, place.comm, f"{place.mutex:#x}", place.lock, measured.times.count, measured.total,
            measured.times.max or 0, sum(measured.errors.values()), place.state, stack,
        ))  # fmt: skip
        yield line.getvalue()
        line.seek(0)
        line.truncate()


def as_json(found: Found) -> Iterator[str]:
    """An object for each row, on a line of its own; the largest sum first."""
    for place, measured in reversed(_sorted(found)):
        yield json.dumps({
            "pid": place.pid, "comm": place.comm, "address": f"{place.mutex:#x}", "lock": place.lock,
            "stack": list(reversed(place.frames)), "state": place.state, "unit": "ns",
            "count": measured.times.count, "sum": measured.total, "max": measured.times.max or 0,
            "errors": measured.errors, "buckets": buckets(measured.times),
        }) + "\n"  # fmt: skip
