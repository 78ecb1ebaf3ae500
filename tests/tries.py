"""Tests that may try again, because something outside lockd can disturb what they measure.

A second try can hide a fault that shows in one run of three. So every try is counted; tries beyond the first
are shown at the end of a run, and a run that needs too many of them has failed (tests/conftest.py).
"""

from __future__ import annotations

from collections.abc import Iterator

TRIES = "tries"
"""The property of a test's report that says how many it used, if it may use several."""
LOST = "lost machine"
"""The property that says where the words of a machine are that was lost, so that the test had another one."""
ALWAYS, SHARE = 3, 0.1
"""So many further tries may be in a run, or this share of the tests that may try again."""

_used: list[int] = []


def used() -> list[int]:
    """The number of tries of each loop over tries(), and of each note(), since this was last called."""
    global _used  # one test runs at a time, and helpers do not know which
    found, _used = _used, []
    return found


def tries(most: int) -> Iterator[int]:
    """The numbers of so many tries from 0 on; to be left as soon as one is right."""
    mine = len(_used)
    _used.append(0)
    for number in range(most):
        _used[mine] = number + 1
        yield number


def note(number: int, is_new: bool) -> None:
    """Count a run of a program that several tests share: which try it is, from 0 on, and whether this test
    is the first to need it. A further try is counted for that test alone."""
    _used.append(2 if number and is_new else 1)


def allowance(tests: int) -> int:
    """How many further tries a run may need in which so many tests may try again."""
    return max(ALWAYS, int(SHARE * tests))
