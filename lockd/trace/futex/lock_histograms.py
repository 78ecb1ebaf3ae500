"""Histograms of how long waits blocked, lock by lock, as locktrace writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockd.printable import printable
from lockd.trace.core.histogram import Histogram, as_bcc

Lock = tuple[int, int]
"""Process and address."""


def as_text(histograms: Mapping[Lock, Histogram], names: Mapping[Lock, str]) -> Iterator[str]:
    """The lock with the most waits that blocked first."""
    for lock, histogram in sorted(histograms.items(), key=lambda one: (-one[1].count, one[0])):
        name = printable(names.get(lock, ""))
        yield f"PID {lock[0]}, LOCK {lock[1]:#x}{name and ' '}{name}\n"
        yield from as_bcc(histogram)
        yield "\n"
