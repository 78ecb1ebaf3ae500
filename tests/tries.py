"""Counts the tries of tests that may try again, as something outside lockd can disturb what they measure.

A second try can hide a fault that shows in one run of three. So every try is counted; tries beyond the first
are shown at the end of a run, and a run that needs too many of them has failed (tests/conftest.py).
"""

from __future__ import annotations

from collections.abc import Iterator

TRIES = "tries"
"""The property of a test's report with the number of tries used, if the test may use several."""
LOST = "lost machine"
"""The property with the file of the output of a lost machine, after which the test took another machine."""
ALWAYS, SHARE = 3, 0.1
"""The further tries that a run may need: ALWAYS, or SHARE of the tests that may try again if that is more."""

_used: list[int] = []


def used() -> list[int]:
    """Return the numbers of tries of each loop over tries(), and of each note(), since the last call."""
    global _used  # one test runs at a time, and helpers do not know which
    found, _used = _used, []
    return found


def tries(most: int) -> Iterator[int]:
    """Yield the numbers of `most` tries, from 0 on. The caller leaves the loop as soon as a try is right."""
    mine = len(_used)
    _used.append(0)
    for number in range(most):
        _used[mine] = number + 1
        yield number


def note(number: int, is_new: bool) -> None:
    """Count a try of a program whose runs several tests share. `number` is that of the try, from 0 on.
    `is_new`: this test is the first to need it. A further try is counted for the first test alone."""
    _used.append(2 if number and is_new else 1)


def allowance(tests: int) -> int:
    """Return how many further tries a run may need, by the number of tests in it that may try again."""
    return max(ALWAYS, int(SHARE * tests))
