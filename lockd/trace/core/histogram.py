"""Histograms of measured values, by powers of two or in equal steps, printed as bars, JSON or CSV.

The bars look like bpftrace's: `[4, 8)  12 |@@@@|`, where K, M, G, ... are powers of 1024. Empty slots before
the first value and after the last are left out. lockd/bpf/include/histogram.bpf.h defines the slots.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lockd.printable import printable
from lockd.trace.core.output import csv_line, stack_field

BAR = 52
"""Width of the longest bar in characters."""
LETTERS = "KMGTPE"

Label = str | int | Sequence[str]
"""Value of a label of a group. A sequence is a stack, innermost function first."""


@dataclass(frozen=True)
class Log2:
    """Powers of two: slot 0 holds negative values, slot 1 zero, slot 2 one, and each slot s from 3 on the
    values in [2^(s-2), 2^(s-1))."""

    def slot(self, value: int) -> int:
        return value.bit_length() + 1 if value >= 0 else 0

    def bounds(self, slot: int) -> tuple[int | None, int | None]:
        """The least value in a slot, and the least value above the slot; None where the slot has no bound."""
        if slot == 0:
            return None, 0
        return 1 << slot - 2 if slot > 1 else 0, 1 << slot - 1

    def name(self, slot: int) -> str:
        """The slot as it is printed: `[4, 8)`."""
        low, high = self.bounds(slot)
        if low is None or high is None:
            return "(..., 0)"
        return f"[{low}]" if high == low + 1 else f"[{_short(low)}, {_short(high)})"


@dataclass(frozen=True)
class Linear:
    """Equal steps: slot 0 holds values below `first`, slot 1 [first, first + step), and so on; the last slot
    holds values of `last` or above. `step` is above 0 and divides the range without a remainder."""

    first: int
    last: int
    step: int

    def slot(self, value: int) -> int:
        return max((min(value, self.last) - self.first) // self.step + 1, 0)

    def bounds(self, slot: int) -> tuple[int | None, int | None]:
        """The least value in a slot, and the least value above the slot; None where the slot has no bound."""
        low = self.first + (slot - 1) * self.step
        return low if slot else None, low + self.step if low < self.last else None

    def name(self, slot: int) -> str:
        """The slot as it is printed: `[4, 8)`."""
        low, high = self.bounds(slot)
        left = "(..." if low is None else f"[{low}"
        return f"{left}, {'...' if high is None else high})"


Scale: TypeAlias = Log2 | Linear
LOG2 = Log2()


@dataclass(frozen=True)
class Bucket:
    """One printed line of a histogram or tally."""

    name: str
    """Which values are in the bucket, for people: a range such as `[4, 8)`, or a text."""
    values: dict[str, int | str | None]
    """Which values are in the bucket, for programs: the bounds of a range as `from` and `below`, or a text as
    `value`."""
    count: int


@dataclass
class Histogram:
    """Numbers of values by slot, with the sum and the maximum if these are known for all values."""

    scale: Scale = LOG2
    counts: dict[int, int] = field(default_factory=dict)
    """Number of values by slot."""
    sum: float | None = None
    """Sum of all values; None if it is unknown for some of them."""
    max: float | None = None
    """The greatest value; None if it is unknown for some values."""

    def add(
        self, slot: int, count: int = 1, total: float | None = None, highest: float | None = None
    ) -> None:
        """Add `count` values of one slot; `total` is their sum and `highest` the greatest of them.

        None for one of these means that it is not known.
        """
        self._add_extremes(total, highest)
        self.counts[slot] = self.counts.get(slot, 0) + count

    def merge(self, other: Histogram) -> None:
        """Add the values of another histogram, which has the same scale and is not empty."""
        self._add_extremes(other.sum, other.max)
        for slot, count in other.counts.items():
            self.counts[slot] = self.counts.get(slot, 0) + count

    def _add_extremes(self, total: float | None, highest: float | None) -> None:
        if not self.counts:
            self.sum, self.max = total, highest
        else:
            self.sum = None if total is None or self.sum is None else self.sum + total
            self.max = None if highest is None or self.max is None else max(self.max, highest)

    def add_value(self, value: int) -> None:
        self.add(self.scale.slot(value), 1, value, value)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets from the first slot with a value to the last."""
        slots = range(min(self.counts), max(self.counts) + 1) if self.counts else ()
        bounds = (self.scale.bounds(slot) for slot in slots)
        return [
            Bucket(self.scale.name(slot), {"from": low, "below": high}, self.counts.get(slot, 0))
            for slot, (low, high) in zip(slots, bounds, strict=True)
        ]


@dataclass
class Tally:
    """Numbers of equal texts, in place of a histogram where the values are texts."""

    counts: dict[str, int] = field(default_factory=dict)
    """Number of occurrences by text."""
    sum: None = None
    max: None = None

    def add(self, text: str, count: int = 1, *_: object) -> None:
        self.counts[text] = self.counts.get(text, 0) + count

    def merge(self, other: Tally) -> None:
        for text, count in other.counts.items():
            self.add(text, count)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def buckets(self) -> list[Bucket]:
        """A bucket for each text, the most frequent first."""
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        return [Bucket(printable(text), {"value": text}, count) for text, count in ordered]


@dataclass(frozen=True)
class Group:
    """A histogram or tally of a result, with the labels of its values."""

    labels: Mapping[str, Label]
    """Labels by name; all groups of a result have the same names."""
    histogram: Histogram | Tally


def text(groups: Iterable[Group], unit: str = "") -> Iterator[str]:
    """Lines of the format `text`: for each group its labels, its stacks, and a line for each bucket."""
    unit = f" {unit}" if unit else ""
    for group in groups:
        labels = group.labels.items()
        about = [
            f"{name} {printable(str(value))}"
            for name, value in labels
            if isinstance(value, str | int) and value != ""
        ]
        yield f"{', '.join([*about, *_statistics(group.histogram, unit)])}\n"
        for value in group.labels.values():
            if not isinstance(value, str | int):
                yield from (f"    {printable(function)}\n" for function in value)
        yield from bars(group.histogram)
        yield "\n"


def bars(histogram: Histogram | Tally) -> Iterator[str]:
    """A line with a bar for each bucket."""
    buckets = histogram.buckets
    most = max((bucket.count for bucket in buckets), default=1)
    width = max((len(bucket.name) for bucket in buckets), default=0)
    for bucket in buckets:
        bar = "@" * (bucket.count * BAR // most)
        yield f"{bucket.name:<{max(width, 16)}}{bucket.count:>8} |{bar:<{BAR}}|\n"


def as_json(groups: Iterable[Group], unit: str = "") -> Iterator[str]:
    """Lines of the format `json`, one object for each group."""
    for group in groups:
        histogram = group.histogram
        about = {"unit": unit, "count": histogram.count, "sum": histogram.sum, "max": histogram.max}
        key = {name: _outermost_first(label) for name, label in group.labels.items()}
        yield json.dumps({"key": key, **about, "buckets": buckets(histogram)}) + "\n"


def buckets(histogram: Histogram | Tally) -> list[dict[str, int | str | None]]:
    """The buckets as objects for JSON."""
    return [{**bucket.values, "count": bucket.count} for bucket in histogram.buckets]


def as_csv(groups: Iterable[Group], unit: str = "") -> Iterator[str]:
    """Lines of the format `csv`: a head, then a line for each bucket of each group.

    Stacks are as stack_field() returns them.
    """
    has_head = False
    for group in groups:
        values = [_field(_outermost_first(label)) for label in group.labels.values()]
        for bucket in group.histogram.buckets:
            if not has_head:
                yield csv_line([*group.labels, *(f"bucket_{name}" for name in bucket.values), "bucket_count"])
                has_head = True
            yield csv_line([*values, *map(_printable, bucket.values.values()), bucket.count])


def _field(label: str | int | list[str]) -> object:
    return stack_field(label) if isinstance(label, list) else _printable(label)


def _printable(value: object) -> object:
    return printable(value) if isinstance(value, str) else value


FORMATS = {"text": text, "json": as_json, "csv": as_csv}
"""Functions that return the lines of a result, by the name of the format."""


def as_bcc(histogram: Histogram) -> Iterator[str]:
    """The lines of a histogram by powers of two in the format of bcc's tools: `4 -> 7 : 12 |****|`.

    The values are microseconds, and none may be negative. Zero and one share a line. Programs that read the
    output of bcc's tools can read these lines too.
    """
    counts = {max(slot, 2): 0 for slot in histogram.counts}
    for slot, count in histogram.counts.items():
        counts[max(slot, 2)] += count
    last = max(counts, default=0)
    number, bar = (10, 40) if last <= 33 else (20, 20)
    yield f"{'':{number - 5}}{'usecs':<{number + 9}} : count     distribution\n"
    most = max(counts.values(), default=1)
    for slot in range(2, last + 1):
        low, high = (1 << slot - 2 if slot > 2 else 0), (1 << slot - 1) - 1
        count = counts.get(slot, 0)
        stars = "*" * (count * bar // most)
        yield f"{low:>{number}} -> {high:<{number}} : {count:<8} |{stars:<{bar}}|\n"


def _outermost_first(label: Label) -> str | int | list[str]:
    """A label as in all formats for programs: the outermost function of a stack comes first."""
    return label if isinstance(label, str | int) else list(reversed(label))


def _short(power: int) -> str:
    """A power of two as text: 512, 1K, 2K, ..."""
    thousands = (power.bit_length() - 1) // 10
    return f"{power >> 10 * thousands}{LETTERS[thousands - 1]}" if thousands else str(power)


def _statistics(histogram: Histogram | Tally, unit: str) -> Iterator[str]:
    yield f"{histogram.count:,} values" if histogram.count != 1 else "1 value"
    if histogram.sum is not None and histogram.count:
        yield f"mean {histogram.sum / histogram.count:,.1f}{unit}"
    if histogram.max is not None:
        yield f"max {histogram.max:{',' if isinstance(histogram.max, int) else ',.1f'}}{unit}"
