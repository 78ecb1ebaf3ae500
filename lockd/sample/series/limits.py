"""How the lines of exposition are shared out among the families, and the windows of the maxima."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RESERVED_LINES = 400
"""For lockd's own metrics and for HELP and TYPE."""

OPEN_SHARE = 0.75
"""Up to this part of what there is, every label set gets a series at once; the rest is for what lasts."""

SHARES = {
    "futex": 0.20,
    "futex_process": 0.04,
    "futex_error": 0.02,
    "futex_lock": 0.07,
    "offcpu": 0.18,
    "offcpu_runqueue": 0.04,
    "offcpu_waker": 0.03,
    "kernel_lock": 0.05,
    "kernel_lock_site": 0.03,
    "kernel_hold": 0.04,
    "go_mutex": 0.01,
}
"""Of what `series.max` leaves, each family's own; what is over is for those that need more."""


@dataclass(frozen=True)
class Limits:
    """Bounds on what is exported and remembered."""

    max_lines: int = 10_000
    idle_seconds: float = 3600.0
    top_locks: int = 50
    buckets_us: Sequence[int] = tuple(4**i for i in range(14))
    windows: tuple[tuple[str, float], ...] = (("1m", 60.0), ("5m", 300.0))

    @property
    def histogram_lines(self) -> int:
        """Every bucket, +Inf, sum and count."""
        return len(self.buckets_us) + 3

    @property
    def max_gauges(self) -> int:
        return len(self.windows)


class Budget:
    """Lines of exposition for all families together; one for each sampler.

    A family has its share for itself, whatever others take, and may take more from what is nobody's share:
    what one host needs for locks, another needs for wakers.
    """

    def __init__(self, limits: Limits) -> None:
        self._all = max(limits.max_lines - RESERVED_LINES, 0)
        self._taken: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        """Lines that families lack."""

    def enter(self, family: str, others: int) -> None:
        """Before anything is taken: a family that needs so many lines in any case, for its `other`."""
        self._all = max(self._all - others, 0)
        self._taken[family] = 0

    def take(self, family: str, lines: int) -> None:
        """Take lines, or give them back if `lines` is negative."""
        self._taken[family] += lines

    def room(self, family: str, part: float = 1.0) -> float:
        """How many lines more `family` may take, if there were only this part of everything."""
        common = part * (self._all - sum(map(self._share, self._taken)))
        overdrawn = sum(max(lines - part * self._share(name), 0) for name, lines in self._taken.items())
        own = max(part * self._share(family) - self._taken[family], 0)
        return own + max(common - overdrawn, 0)

    def want(self, family: str, lines: int) -> None:
        """Note what a family lacks."""
        self._wanted[family] = lines

    def asked_of(self, family: str) -> int:
        """How many of its lines other families lack, if it has more than its share."""
        wanted = sum(lines for name, lines in self._wanted.items() if name != family)
        return max(min(wanted, int(self._taken[family] - self._share(family))), 0)

    def _share(self, family: str) -> float:
        return self._all * SHARES[family]
