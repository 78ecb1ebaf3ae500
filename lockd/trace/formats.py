"""Profiles as text: folded, stack by stack, as a table, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

from lockd.profile import Profile

TABLE_FRAMES = 3


def folded(profile: Profile) -> Iterator[str]:
    """A line for each stack: `comm;outermost;...;innermost value`. A semicolon in a name becomes a colon."""
    sums: dict[tuple[str, ...], int] = {}
    for sample in profile.sorted():
        names = tuple(name.replace(";", ":").replace("\n", " ") for name in (sample.comm, *sample.frames))
        sums[names] = sums.get(names, 0) + sample.values[0]
    for names, value in sums.items():
        yield f"{';'.join(names)} {value}\n"


def multiline(profile: Profile) -> Iterator[str]:
    """Each stack with its innermost function first, then the thread, then the value."""
    for sample in profile.sorted():
        yield from (f"    {name}\n" for name in reversed(sample.frames))
        yield f"    {'-':<16} {sample.comm} ({sample.tid})\n"
        yield f"        {sample.values[0]}\n\n"


def as_json(profile: Profile) -> Iterator[str]:
    """One object for each sample, on a line of its own."""
    for sample in profile.sorted():
        values = {value.name: number for value, number in zip(profile.values, sample.values, strict=True)}
        about = {"comm": sample.comm, "pid": sample.pid, "tid": sample.tid, "stack": sample.frames}
        yield json.dumps({**about, **values}) + "\n"


def table(profile: Profile) -> Iterator[str]:
    """The largest first, with the innermost functions."""
    heads = [f"{value.name.upper()}" for value in profile.values]
    rows = [
        [*map(str, sample.values), str(sample.pid), str(sample.tid), sample.comm,
         " < ".join(list(reversed(sample.frames))[:TABLE_FRAMES])]
        for sample in reversed(profile.sorted())
    ]  # fmt: skip
    head = [*heads, "PID", "TID", "COMM", "STACK"]
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head) - 1)]
    for row in [head, *rows]:
        cells = [
            cell.rjust(width) if at < len(heads) + 2 else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        yield "  ".join([*cells, row[-1]]).rstrip() + "\n"


FORMATS = {"folded": folded, "stacks": multiline, "json": as_json, "table": table}
