"""How the lines of exposition are shared out among the families, and the windows of the maxima."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RESERVED_LINES = 400
"""For lockd's own metrics and for HELP and TYPE."""

OPEN_SHARE = 0.75
"""Up to this part of what there is, every label set gets a series at once."""

SHARES = {
    "futex": 0.31,
    "futex_process": 0.06,
    "futex_error": 0.02,
    "futex_lock": 0.08,
    "offcpu": 0.25,
    "offcpu_runqueue": 0.06,
    "offcpu_waker": 0.02,
    "kernel_lock": 0.08,
    "kernel_lock_site": 0.04,
    "kernel_hold": 0.08,
}
"""Of what `series.max` leaves."""


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
    """Lines of exposition left for all families together; one for each sampler.

    A family has its share for itself, and may take more while there is plenty: what one
    host needs for locks, another needs for wakers.
    """

    def __init__(self, limits: Limits) -> None:
        self._all = max(limits.max_lines - RESERVED_LINES, 0)
        self.left = self._all

    def quota(self, family: str) -> int:
        """Lines that `family` may take in any case."""
        return int(self._all * SHARES[family])

    @property
    def is_plentiful(self) -> bool:
        """Whether less than OPEN_SHARE of all lines are taken."""
        return self.left > (1 - OPEN_SHARE) * self._all
