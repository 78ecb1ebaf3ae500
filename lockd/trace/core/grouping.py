"""The option --by: one histogram for each process, thread, stack or other label that the user chooses."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lockd.columns.structs import Columns
from lockd.errors import UsageError
from lockd.names.labels import processes
from lockd.trace.core.histogram import FORMATS, Group, Histogram, Label, Linear, Scale, Tally
from lockd.trace.core.output import csv_line
from lockd.trace.core.session import Session

OF_THREADS = ("comm", "pid", "tid", "stack")
"""The labels that --by takes in every tool."""
ID_OF_CPU = 1 << 63
"""The bit that marks the `id` of an idle thread. The other bits of such an id are the number of the CPU
(lockd/bpf/include/group.bpf.h)."""
MOST_STEPS = 1000
"""The greatest number of steps that --linear takes."""

Row = tuple[Any, int, float | None, float | None]
"""A slot (or a text, for a tally), the number of its values, their sum, and the greatest of them. Sum and
greatest value are None if they are not known."""


def names(text: str) -> tuple[str, ...]:
    """Parse the value of --by: different names with commas between, or `none` for no names."""
    labels = tuple(name.strip() for name in text.split(","))
    if not all(labels) or len(set(labels)) < len(labels) or ("none" in labels and len(labels) > 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names with commas between, each once")
    return () if labels == ("none",) else labels


def linear(text: str) -> Linear:
    """Parse the value of --linear: MIN,MAX,STEP."""
    try:
        first, last, step = (int(number, 0) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN,MAX,STEP") from None
    if step < 1 or last <= first or (last - first) % step or (last - first) // step > MOST_STEPS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: rule: MIN below MAX, and 1 to {MOST_STEPS:,} whole steps between them"
        )
    if first < -(2**63) or last >= (2**63 if first < 0 else 2**64):
        raise argparse.ArgumentTypeError(
            f"{text!r}: rule: MIN and MAX are numbers of 64 bits: -2^63 to 2^63 - 1, or 0 to 2^64 - 1"
        )
    return Linear(first, last, step)


def add_options(parser: argparse.ArgumentParser, by: str, default: str = "none") -> None:
    """Add --by and --linear. In --help, `by` describes the labels that the tool has, and `default` describes
    the labels that are used if --by is not given."""
    parser.add_argument(
        "--by", metavar="WHAT", type=names, default=(),
        help=f"print a histogram for each {by}; several labels are separated by commas; `none` prints one "
        f"histogram of all values (default: {default})",
    )  # fmt: skip
    parser.add_argument(
        "--linear", metavar="MIN,MAX,STEP", type=linear,
        help="make buckets of STEP values each from MIN to MAX, instead of powers of two",
    )  # fmt: skip


def defines(args: argparse.Namespace) -> dict[str, int | None]:
    """The values of the macros with which the BPF programs are compiled for these options, by name. A macro
    with the value None is defined as empty.

    Sets `args.wants_stacks`, which options.load_settings() reads.
    """
    args.wants_stacks = "stack" in args.by
    switches: dict[str, int | None] = {"BY_COMM": None} if "comm" in args.by else {}
    if args.linear:
        scale: Linear = args.linear
        for name, bound in (("FIRST", scale.first), ("LAST", scale.last)):
            switches |= {f"LINEAR_{name}": bound, f"LINEAR_{name}_NEGATIVE": int(bound < 0)}
        switches["LINEAR_STEP"] = scale.step
    return switches


def check(args: argparse.Namespace, more: tuple[str, ...]) -> None:
    """Raise UsageError if --by has a label that is neither in OF_THREADS nor in `more`, the tool's own."""
    for name in args.by:
        if name not in (*OF_THREADS, *more):
            raise UsageError(f"--by {name}: rule: {', '.join((*OF_THREADS, *more))} or none")


def columns_of(groups: Columns) -> dict[str, list[Any]]:
    """The values of the labels OF_THREADS, by label: one value for each row of `groups`.

    The rows are struct group (lockd/bpf/include/group.bpf.h).
    """
    pids, tids = ids_of(groups["id"])
    comms = list(map(processes.text, groups["comm"].tolist()))
    return {"comm": comms, "pid": pids, "tid": tids, "stack": stacks_of(groups["stacks"])}


def ids_of(ids: Columns) -> tuple[list[int], list[int]]:
    """Process ids and thread ids from members `id` of struct group; both are 0 for an idle thread."""
    numbers = [0 if number & ID_OF_CPU else number for number in ids.tolist()]
    return [number >> 32 for number in numbers], [number & 0xFFFFFFFF for number in numbers]


def stacks_of(numbers: Columns) -> list[tuple[int, int]]:
    """Numbers of the user side and the kernel side of each stack, from rows of struct call_stack_ids."""
    return list(zip(numbers["user"].tolist(), numbers["kernel"].tolist(), strict=True))


class Groups:
    """The values of a trace by group: a histogram for each group, or a tally of texts if `scale` is None.

    Values whose labels `by` are equal are one group.
    """

    def __init__(self, by: tuple[str, ...], scale: Scale | None, session: Session) -> None:
        self._by, self._scale = by, scale
        self._stacks = session.stacks if "stack" in by else None
        self._histograms: dict[tuple[Any, ...], Histogram | Tally] = {}
        """The histogram of each group, by the values of the labels `by`. The value of a stack is the pair of
        its numbers: user side and kernel side."""

    def add(self, columns: Mapping[str, Sequence[Any]], rows: Iterable[Row]) -> int:
        """Add rows of a window. `columns` has the value of every label for each row, by label name.

        Returns the number of values in the rows.
        """
        keys = zip(*(columns[name] for name in self._by), strict=True) if self._by else itertools.repeat(())
        values = 0
        for key, (slot, count, total, highest) in zip(keys, rows, strict=bool(self._by)):
            histogram = self._histograms.get(key)
            if histogram is None:
                histogram = self._histograms[key] = Histogram(self._scale) if self._scale else Tally()
            histogram.add(slot, count, total, highest)
            values += count
        return values

    def lines(self, form: str, unit: str = "") -> Iterator[str]:
        """The lines of all groups in a format of histogram.FORMATS; `unit` is the unit of the values.

        CSV has its head line even without groups.
        """
        groups = self.result()
        if form == "csv" and not groups:
            columns = ("from", "below") if self._scale else ("value",)
            yield csv_line([*self._by, *(f"bucket_{name}" for name in columns), "bucket_count"])
        yield from FORMATS[form](groups, unit)

    def result(self) -> list[Group]:
        """All groups with their labels. The largest comes last, where it is seen first on a terminal."""
        named: dict[tuple[Label, ...], Any] = {}
        for key, histogram in self._histograms.items():
            # Several stack numbers can stand for the same functions: their groups become one.
            labels = tuple(self._label(name, value) for name, value in zip(self._by, key, strict=True))
            if labels in named:
                named[labels].merge(histogram)
            else:
                named[labels] = histogram
        ordered = sorted(named.items(), key=lambda item: (item[1].count, str(item[0])))
        return [Group(dict(zip(self._by, labels, strict=True)), histogram) for labels, histogram in ordered]

    def _label(self, name: str, value: Any) -> Label:
        if not self._stacks or name != "stack":
            label: Label = value
            return label
        user, kernel = value
        return *self._stacks.kernel(kernel), *self._stacks.user(user)
