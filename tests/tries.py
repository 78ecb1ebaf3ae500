"""Tests that may try again, because something outside lockd can disturb what they measure.

A second try can hide a fault that shows in one run of three. So every try beyond a test's first is counted,
shown at the end of the run, and a run that needs more of them than MOST has failed (tests/conftest.py).
"""

from __future__ import annotations

from collections.abc import Iterator

FURTHER_TRIES = "further tries"
"""The property of a test's report that counts them."""
MOST = 12
"""Of one run, in all its tests together."""

_count = 0


def further() -> int:
    """How many there were since the last call."""
    global _count  # one test runs at a time, and helpers do not know which
    count, _count = _count, 0
    return count


def tries(most: int) -> Iterator[int]:
    """The numbers of so many tries from 0 on; to be left as soon as one is right."""
    global _count  # noqa: PLW0603
    for number in range(most):
        _count += number > 0
        yield number
