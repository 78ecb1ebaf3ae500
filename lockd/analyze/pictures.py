"""Diagrams of waits for locks over time. Only this module needs matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockd.analyze import statistics
from lockd.analyze.records import Records
from lockd.errors import HostError, LockdError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (12.0, 11.0)
DOTS_PER_INCH = 100
LINES = 5
"""The most locks that one diagram shows."""
HEADROOM = 1.1
"""The upper end of the vertical axis, as a multiple of the highest value."""


def figure(records: Records, lock: int) -> Figure:
    """Four diagrams with a value for each period. `lock` is the position of a lock in `records.locks`.

    The first shows how many threads wait on average for each of the locks with the most time waited (at most
    LINES), the second how many distinct threads waited for `lock`. The others show average access times, the
    time waited for each access: the highest of any lock, and that of `lock`. The figure needs no display
    (Agg), and matplotlib does not store a reference to it. Raises HostError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HostError(
            f"matplotlib: {error}; rule: to draw pictures, install the package python3-matplotlib, and run "
            "lockd with the system's own python3"
        ) from error
    drawn = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    waiting, threads, worst, average = drawn.subplots(4, 1, sharex=True)
    starts = statistics.period_starts(records)
    seconds = statistics.seconds(records, starts)
    of_lock = records.where(records.rows["lock"] == lock)
    name = f"{_plain(records.label(lock))} ({records.types[lock]})"
    for total in statistics.totals(records, "lock")[:LINES]:
        rows = records.where(records.rows["lock"] == total.subject)
        label = _plain(records.label(total.subject))
        _draw(waiting, seconds, statistics.waiting_threads(rows, starts)[1], label=label)
    waiting.legend(loc="upper right", fontsize="small")
    _describe(waiting, "Threads that wait, on average over a period", "threads")
    _draw(threads, seconds, statistics.waiting_threads(of_lock, starts)[0])
    _describe(threads, f"Distinct threads that waited for {name}", "threads")
    _draw(worst, seconds, statistics.worst_average_access(records, starts) / 1e6)
    _describe(worst, "Average access time, of the lock that has the highest in a period", "ms")
    _draw(average, seconds, statistics.average_access(of_lock, starts) / 1e6)
    _describe(average, f"Average access time of {name}", "ms")
    average.set_xlabel("seconds")
    return drawn


def write_png(drawn: Figure, path: Path) -> None:
    """Write the figure to a file. Raises LockdError if the file cannot be written."""
    try:
        drawn.savefig(path, format="png")
    except OSError as error:
        raise LockdError(f"{path}: cannot be written: {error.strerror}") from error


def as_svg(drawn: Figure) -> str:
    """The figure as an SVG element for an HTML page. Its text can be searched."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lockd"}):
        drawn.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _plain(name: str) -> str:
    """The name with its dollars escaped: matplotlib would show text between two of them as a formula."""
    return name.replace("$", r"\$")


def _draw(axes: Axes, seconds: Any, values: Any, **more: Any) -> None:
    """Draw a line that stays at each value for its period. NaN is not drawn.

    The last value has a mark, as the line ends where its period begins. Marks at all periods would make pages
    of long recordings too large for a browser.
    """
    marks = {"marker": ".", "markersize": 3, "markevery": slice(-1, None)}
    axes.plot(seconds, values, drawstyle="steps-post", linewidth=1, **marks, **more)


def _describe(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_ylabel(unit)
    highest = max((np.nanmax(line.get_ydata(), initial=0) for line in axes.lines), default=0)
    axes.set_ylim(0, HEADROOM * highest or 1)
    axes.grid(alpha=0.3)
