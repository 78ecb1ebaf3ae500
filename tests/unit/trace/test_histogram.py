"""Histograms: every value is in the slot that says so, and what is printed can be read back."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd.trace.core.histogram import (
    LOG2,
    Group,
    Histogram,
    Linear,
    Scale,
    as_bcc,
    as_csv,
    as_json,
    bars,
    text,
)

NUMBER = r"(\(\.\.\.|\[-?\d+[KMGTPE]?)(?:, (-?\d+[KMGTPE]?|\.\.\.)\)|\])"
LINE = re.compile(NUMBER + r"\s+(\d+) \|(@*) *\|")

values = st.integers(-(2**63), 2**64 - 1)
scales = st.just(LOG2) | st.builds(
    lambda first, step, slots: Linear(first, first + step * slots, step),
    st.integers(-(2**40), 2**40), st.integers(1, 2**20), st.integers(1, 50),
)  # fmt: skip


def read(word: str) -> int | None:
    """Return the bound that a word such as 512 or 4K stands for, None for `...`."""
    word = word.strip("[(")
    if word == "...":
        return None
    return int(word[:-1]) << 10 * ("KMGTPE".index(word[-1]) + 1) if word[-1].isalpha() else int(word)


def read_bars(printed: str) -> dict[tuple[int | None, int | None], tuple[int, int]]:
    """Return the count and the length of each bar, by its bounds."""
    found: dict[tuple[int | None, int | None], tuple[int, int]] = {}
    for line in printed.splitlines():
        match = LINE.fullmatch(line)
        assert match, line
        low = read(match[1])
        high = read(match[2]) if match[2] else (low or 0) + 1
        assert (low, high) not in found
        found[low, high] = int(match[3]), len(match[4])
    return found


def filled(scale: Scale, some: list[int]) -> Histogram:
    histogram = Histogram(scale)
    for value in some:
        histogram.add_value(value)
    return histogram


def is_in(value: int, low: int | None, high: int | None) -> bool:
    return (low is None or low <= value) and (high is None or value < high)


@given(scales, values)
def test_a_value_is_within_the_bounds_of_its_slot(scale: Scale, value: int) -> None:
    low, high = scale.bounds(scale.slot(value))
    assert is_in(value, low, high)


@given(scales, st.lists(values, min_size=1, max_size=20))
def test_printed_bars_read_back(scale: Scale, some: list[int]) -> None:
    if isinstance(scale, Linear):
        some = [min(max(value, scale.first - 1), scale.last + 1) for value in some]
    read_back = read_bars("".join(bars(filled(scale, some))))
    for (low, high), (count, _) in read_back.items():
        assert count == sum(is_in(value, low, high) for value in some)
    assert sum(count for count, _ in read_back.values()) == len(some)
    edges = list(read_back)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))


def test_bars_are_those_of_bpftrace() -> None:
    """bpftrace 0.17 printed the expected lines for these values."""
    printed = "".join(bars(filled(LOG2, [-3, 0, 1, 3, 1500]))).splitlines()
    full = "@" * 52
    assert printed[0] == f"(..., 0)               1 |{full}|"
    assert printed[1] == f"[0]                    1 |{full}|"
    assert printed[2] == f"[1]                    1 |{full}|"
    assert printed[3] == f"[2, 4)                 1 |{full}|"
    assert printed[10] == f"[256, 512)             0 |{' ' * 52}|"
    assert printed[11] == f"[512, 1K)              0 |{' ' * 52}|"
    assert printed[12] == f"[1K, 2K)               1 |{full}|"
    printed = "".join(bars(filled(Linear(0, 10, 2), [-3, 4, 4, 10]))).splitlines()
    assert printed[0] == f"(..., 0)               1 |{'@' * 26:<52}|"
    assert printed[3] == f"[4, 6)                 2 |{full}|"
    assert printed[6] == f"[10, ...)              1 |{'@' * 26:<52}|"


def test_text_tells_what_it_is_about() -> None:
    groups = [Group({"comm": "cat", "stack": ("read", "main"), "ret": -11}, filled(LOG2, [5, 6, 1000]))]
    lines = "".join(text(groups, "us")).splitlines()
    assert lines[:3] == ["comm cat, ret -11, 3 values, mean 337.0 us, max 1,000 us", "    read", "    main"]
    assert read_bars("\n".join(lines[3:-1]))[4, 8] == (2, 52)


def test_sums_that_are_not_known_are_not_told() -> None:
    histogram = filled(LOG2, [1])
    histogram.add(5, 3)
    histogram.add_value(7)
    assert (histogram.count, histogram.sum, histogram.max) == (5, None, None)
    assert next(iter(text([Group({"lock": "a"}, histogram)]))) == "lock a, 5 values\n"


@given(scales, st.lists(values, min_size=1, max_size=20))
def test_json_and_csv_read_back(scale: Scale, some: list[int]) -> None:
    if isinstance(scale, Linear):
        some = [min(max(value, scale.first - 1), scale.last + 1) for value in some]
    labels = {"comm": 'a,"b"\n', "stack": ("f<a, b>", "main")}
    groups = [Group(labels, filled(scale, some))]
    (line,) = "".join(as_json(groups, "us")).splitlines()
    found = json.loads(line)
    assert found["key"] == {"comm": 'a,"b"\n', "stack": ["main", "f<a, b>"]}
    assert (found["unit"], found["count"], found["sum"], found["max"]) == (
        "us", len(some), sum(some), max(some),
    )  # fmt: skip
    rows = list(csv.DictReader(io.StringIO("".join(as_csv(groups, "us")), newline="")))
    assert len(rows) == len(found["buckets"])
    for row, bucket in zip(rows, found["buckets"], strict=True):
        assert (row["comm"], row["stack"]) == ('a,"b"\\n', "main;f<a, b>")  # no control characters
        assert row["bucket_from"] == str("" if bucket["from"] is None else bucket["from"])
        assert row["bucket_below"] == str("" if bucket["below"] is None else bucket["below"])
        assert int(row["bucket_count"]) == bucket["count"]
        assert bucket["count"] == sum(is_in(value, bucket["from"], bucket["below"]) for value in some)


def test_semicolons_in_names_divide_no_functions() -> None:
    stack = ("<[u8; 16] as Hash>::hash", "main")
    (row,) = csv.DictReader(as_csv([Group({"stack": stack}, filled(LOG2, [1]))]))
    assert row["stack"] == "main;<[u8: 16] as Hash>::hash"


@pytest.mark.parametrize("some", [[0, 1, 1, 5, 300], [2**40]])
def test_bars_of_bcc(some: list[int]) -> None:
    head, *lines = "".join(as_bcc(filled(LOG2, some))).splitlines()
    assert head.split() == ["usecs", ":", "count", "distribution"]
    found = {}
    for line in lines:
        low, high, count, stars = re.fullmatch(r" *(\d+) -> (\d+) *: (\d+) *\|(\**) *\|", line).groups()  # type: ignore[union-attr]
        found[int(low), int(high)] = int(count)
        assert bool(stars) == bool(int(count))
        assert line.index(":") == head.index(":")
    assert next(iter(found)) == (0, 1)
    for (low, high), count in found.items():
        assert count == sum(low <= value <= high for value in some)
    assert sum(found.values()) == len(some)
