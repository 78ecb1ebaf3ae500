"""The option --interval: results that are printed again and again while a trace goes on."""

from __future__ import annotations

import time


class Intervals:
    """Intervals of `seconds` one after another, from now on; None: a single one that never ends.

    If this process was kept from running for several of them, they are one.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds or float("inf")
        self._due = time.monotonic() + self._seconds

    def has_ended(self) -> bool:
        """Whether an interval has ended since this was last true."""
        late = time.monotonic() - self._due
        if late < 0:
            return False
        self._due += self._seconds * (late // self._seconds + 1)
        return True
