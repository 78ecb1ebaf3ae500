"""Tests of the saved state that a sampler leaves to the next: it is whole, whenever the first one ends."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd import messages
from lockd.columns.wide_sums import WIDE
from lockd.messages import DIGEST_BYTES
from lockd.sample import saved_state
from lockd.sample.drain import Backlog
from lockd.sample.saved_state import LARGEST, PLACE, SavedState
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.ranking import Presence
from lockd.sample.series.series import Series

ENTRIES = 8
KEY = np.dtype([("number", "u8")])


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("saved")
    yield fd
    os.close(fd)


def test_what_was_written_last_is_read(file: int) -> None:
    saved = SavedState(file)
    assert SavedState(file).read() is None
    for block in (b"one", b"two" * 1000, b"three"):
        saved.write(block)
        assert bytes(SavedState(file).read() or b"") == block


def test_a_write_that_does_not_end_leaves_the_last_one(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write ends as by SIGKILL: no code runs after it."""
    saved = SavedState(file)
    saved.write(b"whole")
    pwritev = os.pwritev

    def killed(fd: int, parts: list[bytes], at: int) -> int:
        pwritev(fd, [b"".join(parts)[:40]], at)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "pwritev", killed)
        saved.write(b"torn" * 100)
    assert bytes(SavedState(file).read() or b"") == b"whole"


def test_what_cannot_be_written_leaves_nothing(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block before is not used: metrics that were exported meanwhile may be higher than in it."""
    saved = SavedState(file)
    saved.write(b"old")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="only 10 bytes"):
        patch.setattr(os, "pwritev", lambda *_: 10)
        saved.write(b"new")
    assert SavedState(file).read() is None


def test_what_is_too_large_leaves_nothing(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = SavedState(file)
    saved.write(b"old")
    monkeypatch.setattr(saved_state, "LARGEST", 10)
    with pytest.raises(OSError, match="11 bytes are more than 10"):
        saved.write(b"x" * 11)
    assert SavedState(file).read() is None


def test_damage_is_seen(file: int) -> None:
    SavedState(file).write(b"block" * 10)
    os.pwrite(file, b"x", 2 * PLACE + 50)
    with pytest.raises(ValueError, match="damaged"):
        SavedState(file).read()


class Table:
    """A stand-in for a map that programs have filled."""

    entries, key, value = ENTRIES, KEY, KEY

    def __init__(self) -> None:
        self.made = self.fresh = 0

    def drain_into(self, keys_at: int, values_at: int, room: int) -> int:
        count, self.fresh = self.fresh, 0
        assert count <= room
        rows = np.arange(self.made, self.made + count, dtype=np.uint64)
        for at in (keys_at, values_at):
            ctypes.memmove(at, rows.ctypes.data, rows.nbytes)
        self.made += count
        return count


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("drain"), st.integers(0, ENTRIES)),
            st.tuples(st.just("take"), st.integers(0, 2 * ENTRIES)),
            st.tuples(st.just("write"), st.just(0)),
            st.tuples(st.just("kill"), st.just(0)),
        )
    )
)
def test_every_row_is_counted_once_whenever_it_ends(steps: list[tuple[str, int]]) -> None:
    """Rows are counted, and the counts are written now and then. The next sampler goes on from there."""
    file = os.memfd_create("saved")
    table = Table()
    written: tuple[list[int], int] | None = None
    counted: list[int] = []
    backlog = Backlog(cast(Any, table), 4, SavedState(file))
    try:
        for what, number in [*steps, ("kill", 0)]:
            if what == "drain":
                if not backlog.has_room:
                    while not backlog.has_room_once_saved:
                        counted += backlog.take(5)[0]["number"].tolist()
                    written = list(counted), backlog.first
                    backlog.forget_folded()
                    assert backlog.has_room
                table.fresh = number
                backlog.drain(cast(Any, table))
            elif what == "take":
                counted += backlog.take(number)[0]["number"].tolist()
            elif what == "write":
                written = list(counted), backlog.first
                backlog.forget_folded()
            else:
                counted = list(written[0]) if written else []
                backlog = Backlog(cast(Any, table), 4, SavedState(file))
                if written:
                    backlog.go_back(written[1])
        counted += backlog.all()[1]["number"].tolist()
    finally:
        os.close(file)
    assert counted == list(range(table.made))


ANY = st.integers(-(2**63), 2**63 - 1)
NEAR = st.builds(
    lambda first, rows: (first, first + rows), st.integers(-2, 2**62), st.integers(-2, 3 * ENTRIES)
)


@given(st.tuples(ANY, ANY) | NEAR)
def test_rows_of_another_form_are_refused_or_fit(words: tuple[int, int]) -> None:
    """Whatever is in place of the numbers of rows, it never makes a backlog write outside of its memory."""
    file = os.memfd_create("saved")
    os.pwrite(file, np.array(words, np.int64).tobytes(), 3 * PLACE)
    table = Table()
    try:
        backlog = Backlog(cast(Any, table), 4, SavedState(file))
    except ValueError:
        return
    finally:
        os.close(file)
    if not backlog.has_room:
        backlog.take(len(backlog))
        backlog.forget_folded()
    table.fresh = ENTRIES
    assert backlog.drain(cast(Any, table)) == ENTRIES


def series(max_lines: int = 900) -> Series:
    return Series(
        "futex",
        {"waits": np.int64, "slots": (np.int64, (3,))},
        counters={"waits": "waits_total", "slots": "seconds_count"},
        names=(0, 1),
        lines=10,
        budget=LineBudget(Limits(max_lines=max_lines)),
        others=2,
        maxima=("blocked",),
        windows={"1m": 60.0},
    )


def count(of: Series, numbers: range, now: float) -> None:
    keys = np.array(numbers, np.uint64) + np.uint64(1)
    rows = of.rows(keys, lambda i: ("unit", f"comm{numbers[i]}", "lock"), np.ones(len(keys)), now)
    np.add.at(of["waits"], rows, 1)
    np.add.at(of["slots"], (rows, 1), 2)
    of.advance(now)
    for row in rows:
        of.note_max("blocked", np.array([row]), np.array([1000 + int(row)]))


def told(of: Series, now: float) -> dict[tuple[str, ...], Any]:
    of.advance(now)
    rows, labels = of.live()
    maxima = of.current_max("blocked", rows)["1m"].tolist()
    numbers = zip(of["waits"][rows].tolist(), of["slots"][rows].tolist(), maxima, strict=True)
    return dict(zip(labels, numbers, strict=True))


def test_series_go_on_as_they_were() -> None:
    """All series go on: those with rows, those that share one, and the retired ones that are remembered."""
    first = series()
    count(first, range(100), 1000.0)
    assert first.overflowed, "there was no room for all"
    first.rearrange(Presence(), 10.0, 1100.0)
    assert first.retired
    count(first, range(50, 90), 1101.0)
    head, arrays = first.save()
    fields, blocks = messages.unpack(memoryview(messages.pack(head, arrays)))
    second = series()
    assert second.form == first.form
    second.restore(fields, {name: np.asarray(block) for name, block in blocks.items()}, 1102.0)
    assert told(second, 1102.0) == told(first, 1102.0)
    assert second.retired_values() == first.retired_values()
    assert (second.retired, second.overflowed) == (first.retired, first.overflowed)
    shown = told(second, 1102.0)
    count(second, range(100), 1103.0)
    waits = {labels: numbers[0] for labels, numbers in told(second, 1103.0).items()}
    assert all(waits[labels] >= numbers[0] for labels, numbers in shown.items())
    assert sum(waits.values()) + second.retired_values()["waits_total"] == 100 + 40 + 100


MOST_LINES = 1_000_000
"""The largest value of `series.max`."""


@pytest.mark.parametrize("buckets", [1, 7])
@pytest.mark.parametrize("windows", [1, 4])
def test_there_is_room_for_as_many_series_as_the_configuration_allows(buckets: int, windows: int) -> None:
    limits = Limits(
        max_lines=MOST_LINES,
        buckets_us=[4**i for i in range(buckets)],
        windows=tuple((f"{i}m", 60.0 * i) for i in range(1, 1 + windows)),
    )
    full = Series(
        "offcpu",
        {"slots": (np.int64, (28,)), "sum_ns": WIDE, "waiting": np.int64, "waiting_ns": np.int64},
        counters={"slots": "seconds_count", "sum_ns": "seconds_sum"},
        names=(0, 1, 3),
        lines=limits.histogram_lines + limits.max_gauges,
        budget=LineBudget(limits),
        others=3,
        maxima=("blocked",),
        windows=dict(limits.windows),
    )
    numbers = np.arange(1, 1001)
    full.rows(
        numbers.astype(np.uint64),
        lambda i: (f"{'unit' * 16}{i:06}.service", f"comm{i:011}", "uninterruptible", "memory"),
        np.ones(len(numbers)),
        1.0,
    )
    assert len(full) == len(numbers)
    size = len(messages.pack(*full.save())) / full.exported_lines * MOST_LINES
    assert size <= LARGEST
    assert LARGEST + DIGEST_BYTES <= PLACE
