"""Profiles as text: folded, stack by stack, as a table, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from lockd.views.profile import Profile, Sample

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
    sums: dict[tuple[str, int, tuple[str, ...]], int] = {}
    for sample in profile.sorted():
        key = sample.comm, sample.tid, sample.frames
        sums[key] = sums.get(key, 0) + sample.values[0]
    for (comm, tid, frames), value in sorted(sums.items(), key=lambda item: (item[1], item[0])):
        yield from (f"    {name}\n" for name in reversed(frames))
        yield f"    {'-':<16} {comm} ({tid})\n"
        yield f"        {value}\n\n"


def as_json(profile: Profile) -> Iterator[str]:
    """One object for each sample, on a line of its own."""
    for sample in profile.sorted():
        values = {value.name: number for value, number in zip(profile.values, sample.values, strict=True)}
        about = {"comm": sample.comm, "pid": sample.pid, "tid": sample.tid, "stack": sample.frames}
        yield json.dumps({**about, **sample.labels, **values}) + "\n"


def innermost(sample: Sample) -> Sequence[str]:
    return sample.frames[: -TABLE_FRAMES - 1 : -1]


def table(profile: Profile, brief: Callable[[Sample], Sequence[str]] = innermost) -> Iterator[str]:
    """The largest first, with the functions that `brief` picks, the innermost first."""
    labels = list(dict.fromkeys(name for sample in profile.samples for name in sample.labels))
    numbers = [value.name.upper() for value in profile.values] + ["PID", "TID"]
    head = [*numbers, "COMM", *(name.upper() for name in labels), "STACK"]
    rows = [
        [*map(str, sample.values), str(sample.pid), str(sample.tid), sample.comm,
         *(sample.labels.get(name, "") for name in labels), " < ".join(brief(sample))]
        for sample in reversed(profile.sorted())
    ]  # fmt: skip
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head) - 1)]
    for row in [head, *rows]:
        cells = [
            cell.rjust(width) if at < len(numbers) else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        yield "  ".join([*cells, row[-1]]).rstrip() + "\n"


FORMATS = {"folded": folded, "stacks": multiline, "json": as_json, "table": table}
