"""Tests of sliding maxima: each is the largest value of the last LENGTH seconds, and of hardly any more."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockd.sample.series.maxima import PARTS, Maxima

LENGTH = 60.0
ROWS = 200
"""The number of rows, more than the 64 for which there is memory at first."""

STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.05, 1.0, 1.9, 2.0, 7.3, 59.0, 60.0, 61.9, 62.0, 1000.0]),
        st.dictionaries(st.integers(0, ROWS - 1), st.integers(0, 1000), max_size=5),
    )
)
"""Steps: the seconds that pass, and then the values by row."""


def note(maxima: Maxima, values: dict[int, int]) -> None:
    maxima.note(np.array(list(values), np.int64), np.array(list(values.values()), np.int64))


@given(st.floats(0, 1e7), STEPS)
def test_it_is_what_a_list_of_all_values_says(
    start: float, steps: list[tuple[float, dict[int, int]]]
) -> None:
    maxima, now, noted = Maxima(LENGTH), start, []
    maxima.advance(now)
    for passed, values in steps:
        now += passed
        maxima.advance(now)
        note(maxima, values)
        noted += [(now, row, value) for row, value in values.items()]
        found = maxima.values(np.arange(ROWS))
        for row in range(ROWS):
            mine = [(at, value) for at, one, value in noted if one == row]
            surely = max((value for at, value in mine if now - at <= LENGTH), default=0)
            slack = LENGTH / PARTS + 1e-6
            perhaps = max((value for at, value in mine if now - at <= LENGTH + slack), default=0)
            assert surely <= found[row] <= perhaps


def test_nothing_lasts() -> None:
    maxima = Maxima(LENGTH)
    maxima.advance(0)
    note(maxima, {3: 7})
    for now in np.arange(0, LENGTH, 0.05):
        maxima.advance(float(now))
        assert maxima.values(np.array([3])) == 7
    maxima.advance(LENGTH * (1 + 1 / PARTS))
    assert maxima.values(np.array([3])) == 0


def test_what_is_moved_is_in_the_other_row_for_its_time() -> None:
    """A row that is moved into itself, and a row for which nothing was noted, leave nothing behind."""
    maxima = Maxima(LENGTH)
    maxima.advance(5)
    note(maxima, {0: 1, 3: 7, 4: 8, 150: 9})
    maxima.move(np.array([3, 4, 150, 10_000]), np.array([300, 300, 150, 10_000]))
    assert maxima.values(np.array([0, 3, 4, 150, 300, 10_000])).tolist() == [1, 0, 0, 0, 8, 0]
    maxima.advance(5 + LENGTH * (1 + 1 / PARTS))
    assert maxima.values(np.array([300])).tolist() == [0]


def test_a_clock_that_stands_still_changes_nothing() -> None:
    maxima = Maxima(LENGTH)
    maxima.advance(100)
    note(maxima, {0: 5})
    for _ in range(3):
        maxima.advance(100)
        note(maxima, {0: 4})
    assert maxima.values(np.array([0])) == 5
