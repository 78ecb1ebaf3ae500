"""Pictures of records of locks over time, by matplotlib, which nothing else needs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockd.analyze import tables
from lockd.analyze.records import Records
from lockd.errors import HostError, LockdError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (12.0, 11.0)
DOTS_PER_INCH = 100
LINES = 5
"""Locks in one picture."""
HEADROOM = 1.1


def figure(records: Records, lock: int) -> Figure:
    """Over time: threads that wait for each of the locks waited for longest, and for `lock`; the average
    access time of whichever lock has the worst, and of `lock`. Raises HostError without matplotlib.

    It is drawn without a display (Agg), and belongs to nobody: matplotlib keeps no reference to it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HostError(
            f"matplotlib: {error}: pictures need it; install the package python3-matplotlib, and run lockd "
            "with the system's own python3"
        ) from error
    drawn = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    waiting, threads, worst, average = drawn.subplots(4, 1, sharex=True)
    starts = tables.periods(records)
    seconds = (starts - starts[:1]) / 1e9
    of_lock = records.where(records.rows["lock"] == lock)
    name = f"{records.label(lock)} ({records.types[lock]})"
    for total in tables.totals(records, "lock")[:LINES]:
        rows = records.where(records.rows["lock"] == total.subject)
        _draw(waiting, seconds, tables.waiting(rows, starts)[1], label=records.label(total.subject))
    waiting.legend(loc="upper right", fontsize="small")
    _describe(waiting, "Threads that wait, on average over a period", "threads")
    _draw(threads, seconds, tables.waiting(of_lock, starts)[0])
    _describe(threads, f"Distinct threads that waited for {name}", "threads")
    _draw(worst, seconds, tables.worst_average(records, starts) / 1e6)
    _describe(worst, "Average access time, of the lock that has the highest in a period", "ms")
    _draw(average, seconds, tables.average_access(of_lock, starts) / 1e6)
    _describe(average, f"Average access time of {name}", "ms")
    average.set_xlabel("seconds")
    return drawn


def write_png(drawn: Figure, path: Path) -> None:
    """Raises LockdError that names the file."""
    try:
        drawn.savefig(path, format="png")
    except OSError as error:
        raise LockdError(f"{path}: cannot be written: {error.strerror}") from error


def as_svg(drawn: Figure) -> str:
    """To stand in a page; its words are text, which can be searched for."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lockd"}):
        drawn.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw(axes: Axes, seconds: Any, values: Any, **more: Any) -> None:
    """With a mark at each period, as one alone is no line. There is nothing where the value is NaN."""
    axes.plot(seconds, values, drawstyle="steps-post", marker=".", markersize=3, linewidth=1, **more)


def _describe(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_ylabel(unit)
    highest = max((np.nanmax(line.get_ydata(), initial=0) for line in axes.lines), default=0)
    axes.set_ylim(0, HEADROOM * highest or 1)
    axes.grid(alpha=0.3)
