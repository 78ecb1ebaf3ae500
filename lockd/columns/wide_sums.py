"""Wide sums: sums of nanoseconds that have no bound.

An int64 has room for 292 years, but a sum over threads grows by one second per second for each thread that
waits. It would be full after 26 hours if 100,000 threads wait. Even a single addition may be larger than an
int64, when threads that have waited for weeks are all woken at once.

A column of wide sums is an array with two int64 in each row: the sum divided by 2^62 ns, and the remainder.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Groups

WIDE = (np.int64, (2,))
"""The dtype of a column of wide sums. They are in ns, without bound: each is two numbers (UNIT)."""
UNIT = 1 << 62
"""The nanoseconds in one unit. A row of a column of wide sums is divmod(sum, UNIT)."""
MOST = UNIT << 22
"""Up to this sum, which is 600 million years in nanoseconds, to_floats() returns the nearest float."""

_HALF = 32
_LOW = (1 << _HALF) - 1

WideSums: TypeAlias = "npt.NDArray[np.int64]"
"""A column of wide sums, or some of its rows."""


def add(sums: WideSums, groups: Groups, numbers: npt.NDArray[Any]) -> None:
    """Add `numbers` to the rows of `sums` that `groups` gives.

    `numbers` are non-negative integers of 64 bits, or wide sums themselves: one for each item of the `rows`
    from which `groups` was made.
    """
    # The two numbers are separate columns here: numpy takes four times as long to index rows of two.
    units, rest, rows = sums[:, 0], sums[:, 1], groups.rows
    if numbers.ndim == 2:
        units[rows] += groups.sum(numbers[:, 0])
        numbers = numbers[:, 1]
    if int(numbers.max(initial=0)) * len(numbers) < UNIT:
        more = groups.sum(numbers)
    else:  # the sum may have more than 64 bits; the sums of all upper and all lower halves do not
        high, low = groups.sum(numbers >> _HALF), groups.sum(numbers & _LOW)
        high += low >> _HALF
        units[rows] += high >> 30
        more = (high << _HALF | low & _LOW) & (UNIT - 1)
    more += rest[rows]
    if more.max(initial=0) >= UNIT:
        units[rows] += more >> 62
        more &= UNIT - 1
    rest[rows] = more


def to_floats(sums: WideSums) -> npt.NDArray[np.float64]:
    """Return the float that is nearest to each sum, in ns. So no result falls while its sum grows."""
    units, rest = sums[:, 0], sums[:, 1]
    # Both floats are exact, so that only their sum is rounded.
    return (units << 30 | rest >> _HALF) * float(1 << _HALF) + (rest & _LOW)


def to_ints(sums: WideSums) -> list[int]:
    """Return the sums as integers of Python."""
    return [units * UNIT + rest for units, rest in sums.tolist()]
