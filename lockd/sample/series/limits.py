"""Limits on what is exported, and how the lines of /metrics are shared out among the families of series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RESERVED_LINES = 400
"""Lines for metrics about lockd itself, and for HELP and TYPE."""

OPEN_SHARE = 0.75
"""Up to this share of all lines, every label set gets a series at once. The rest is for processes that last
(ranking.LASTING), and for locks whose merit reaches ranking.EARNED_NS."""

SHARES = {
    "futex": 0.20,
    "futex_process": 0.04,
    "futex_error": 0.02,
    "futex_lock": 0.06,
    "futex_lock_holder": 0.015,
    "futex_lock_cause": 0.01,
    "offcpu": 0.165,
    "offcpu_runqueue": 0.04,
    "offcpu_waker": 0.03,
    "kernel_lock": 0.05,
    "kernel_lock_site": 0.03,
    "kernel_lock_holder": 0.01,
    "kernel_lock_cause": 0.005,
    "kernel_hold": 0.03,
    "go_mutex": 0.01,
    "unit": 0.03,
}
"""The share of the lines that each family has for itself. What is left over is for families that need
more."""


@dataclass(frozen=True)
class Limits:
    """Bounds on what is exported and remembered."""

    max_lines: int = 10_000
    """Most lines of /metrics."""
    idle_seconds: float = 3600.0
    """Seconds without an event after which the series of an ended process is retired."""
    top_locks: int = 50
    """Most locks with series of their own, in each family of series of locks."""
    buckets_us: Sequence[int] = tuple(4**i for i in range(14))
    """Upper edges of the buckets of histograms, in microseconds."""
    windows: tuple[tuple[str, float], ...] = (("1m", 60.0), ("5m", 300.0))
    """Name and length, in seconds, of the windows of time for which maxima are exported."""

    @property
    def histogram_lines(self) -> int:
        """Lines of one histogram: every bucket, +Inf, sum and count."""
        return len(self.buckets_us) + 3

    @property
    def max_gauges(self) -> int:
        return len(self.windows)


class LineBudget:
    """The lines of /metrics that the families of series share.

    A family has its share for itself, whatever others take. Beyond its share it may take common lines, which
    are no family's share: what one host needs for locks, another needs for wakers.
    """

    def __init__(self, limits: Limits) -> None:
        self._all = max(limits.max_lines - RESERVED_LINES, 0)
        self._taken: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        """How many lines each family lacks."""

    def enter(self, family: str, others: int) -> None:
        """Add a family, before any takes lines. It always gets `others` lines, for its series called
        `other`."""
        self._all = max(self._all - others, 0)
        self._taken[family] = 0

    def share(self, family: str) -> float:
        """The lines that a family has for itself, whatever others take."""
        return self._all * SHARES[family]

    def take(self, family: str, lines: int) -> None:
        """Take lines, or give them back if `lines` is negative."""
        self._taken[family] += lines

    def room(self, family: str, part: float = 1.0) -> float:
        """How many more lines `family` could take if all lines and shares were reduced to this `part`."""
        common = part * (self._all - sum(map(self.share, self._taken)))
        overdrawn = sum(max(lines - part * self.share(name), 0) for name, lines in self._taken.items())
        own = max(part * self.share(family) - self._taken[family], 0)
        return own + max(common - overdrawn, 0)

    def note_lack(self, family: str, lines: int) -> None:
        """Note how many lines a family lacks."""
        self._wanted[family] = lines

    def due_to_others(self, family: str) -> int:
        """How many lines beyond its share a family has to give up because other families lack lines."""
        wanted = sum(lines for name, lines in self._wanted.items() if name != family)
        return max(min(wanted, int(self._taken[family] - self.share(family))), 0)
