"""Reports of futex calls as a table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence

from lockd.printable import printable
from lockd.trace.futex.report_groups import Report, judged_stack
from lockd.trace.futex.rows import LockRow

SHOWN_FRAMES = 4


def as_table(report: Report) -> Iterator[str]:
    """Times with their units; of stacks where the threads were."""
    heads = ["this%", "cum%", *report.columns]
    rows = [[*(_shown(name, value) for name, value in values.items())] for _, values in report.lines]
    widths = [max(len(row[at]) for row in [heads, *rows]) for at in range(len(heads))]
    abouts = [[printable(_word(value)) for value in about.values()] for about, _ in report.lines]
    names = list(report.lines[0][0]) if report.lines else [report.by]
    about_widths = [max(len(one[at]) for one in [names, *abouts]) for at in range(len(names))]
    for numbers, about in zip([heads, *rows], [names, *abouts], strict=True):
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths, strict=True)]
        cells += [cell.ljust(width) for cell, width in zip(about, about_widths, strict=True)]
        yield "  ".join(cells).rstrip() + "\n"
    if report.left_out:
        yield f"and {report.left_out:,} more\n"


def as_csv(report: Report) -> Iterator[str]:
    """Times in microseconds; a stack is one field, its outermost function first, semicolons between."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for at, (about, values) in enumerate(report.lines):
        if at == 0:
            writer.writerow([*about, *values])
        writer.writerow([_field(value) for value in about.values()] + [*values.values()])
        yield text.getvalue()
        text.seek(0)
        text.truncate()


def as_json(report: Report) -> Iterator[str]:
    """An object for each group, on a line of its own; times in microseconds."""
    for about, values in report.lines:
        yield json.dumps({**about, **values}) + "\n"


def left_out(rows: Sequence[LockRow], shown: Sequence[LockRow], hint: str) -> Iterator[str]:
    """A line about the rows that are not `shown`, if there are such."""
    waits, blocked = (
        sum(getattr(row, name) for row in rows) - sum(getattr(row, name) for row in shown)
        for name in ("wait_count", "blocked_ns")
    )
    if waits:
        yield f"left out: {waits:,} waits of other kinds, {_shown('blocked', blocked / 1000)}{hint}\n"


FORMATS = {"table": as_table, "csv": as_csv, "json": as_json}


def _field(value: object) -> str:
    return printable(";".join(value)) if isinstance(value, tuple) else printable(str(value))


def _word(value: object) -> str:
    """Of a stack the functions that wait, innermost first, without those of the locking itself."""
    if not isinstance(value, tuple):
        return str(value)
    names = list(reversed(value))
    site = judged_stack(value).site
    names = names[names.index(site) :] if site in names else names
    return " < ".join([*names[:SHOWN_FRAMES], *(["..."] if len(names) > SHOWN_FRAMES else [])])


def _shown(name: str, value: float) -> str:
    """A time with its unit, a share, or a count."""
    if name.endswith("%"):
        return f"{value:.1f}"
    if name.partition(".")[0] not in ("blocked", "sys") or name.endswith(".count"):
        return f"{value:,.0f}"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} us"
