"""Sums with more than 64 bits, compared with the integers of Python."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockd.columns.index import Groups
from lockd.columns.wide_sums import MOST, UNIT, WIDE, add, to_floats, to_ints

U64 = st.integers(0, 2**64 - 1) | st.integers(2**63 - 9, 2**63 + 9) | st.integers(0, 9)
ROWS = 4
ADDED = st.lists(st.lists(st.tuples(st.integers(0, ROWS - 1), U64), max_size=9), max_size=9)


def numbers(of: list[tuple[int, int]]) -> tuple[Groups, np.ndarray]:
    return Groups(np.array([row for row, _ in of], np.int64)), np.array([one for _, one in of], np.uint64)


def sums_of(values: list[int]) -> np.ndarray:
    return np.array([divmod(value, UNIT) for value in values], np.int64).reshape(-1, 2)


@given(ADDED)
def test_what_is_added_is_there_to_the_nanosecond(steps: list[list[tuple[int, int]]]) -> None:
    sums, truth = np.zeros(ROWS, WIDE), Counter[int]()
    for added in steps:
        before = to_floats(sums)
        add(sums, *numbers(added))
        for row, one in added:
            truth[row] += one
        expected = [truth[row] for row in range(ROWS)]
        assert to_ints(sums) == expected
        assert to_floats(sums).tolist() == [float(one) for one in expected]
        assert (to_floats(sums) >= before).all()


@given(st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, MOST)), max_size=9))
def test_wide_sums_can_be_added_to_wide_sums(added: list[tuple[int, int]]) -> None:
    sums, truth = np.zeros(ROWS, WIDE), Counter[int]()
    for row, one in added:
        truth[row] += one
    add(sums, numbers([(row, 0) for row, _ in added])[0], sums_of([one for _, one in added]))
    assert to_ints(sums) == [truth[row] for row in range(ROWS)]


@given(st.lists(st.integers(0, MOST)))
def test_a_float_never_falls_while_the_sum_grows(values: list[int]) -> None:
    found = to_floats(sums_of(sorted(values))).tolist()
    assert found == [float(value) for value in sorted(values)]
    assert all(one <= other for one, other in pairwise(found))
