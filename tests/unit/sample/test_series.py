"""Tests of series: nothing is lost, nothing jumps, and there are never more lines than allowed.

Which label sets have a series, where there is not room for all, is tested in test_places.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd.sample.series import series as module
from lockd.sample.series.label_hash import hash_labels
from lockd.sample.series.limits import OPEN_SHARE, RESERVED_LINES, SHARES, Limits, LineBudget
from lockd.sample.series.ranking import EARNED_NS, Presence
from lockd.sample.series.series import OTHER, SHOWN_SECONDS, Series

KINDS = ("lock", "cond")
IDLE = 3600.0
Labels = tuple[str, ...]
LABELS = st.tuples(st.sampled_from(["a", "b", ""]), st.integers(0, 30).map(str), st.sampled_from(KINDS))
EVENTS = st.lists(
    st.tuples(LABELS, st.integers(0, 10**6), st.sampled_from([0, 1000, EARNED_NS, 10**9])), max_size=20
)
"""Events: the label set, the number that is counted, and the waiting that it showed, in nanoseconds."""
PRESENT = st.none() | st.sets(st.integers(0, 30), max_size=20)
"""The comms that have processes when rows are given out anew; None if rows are not given out."""
STEPS = st.lists(st.tuples(EVENTS, EVENTS, PRESENT, st.sampled_from([1, 10, 70, 4000])), max_size=30)


def budget(lines: int) -> LineBudget:
    """Return a budget with so many lines for series."""
    return LineBudget(Limits(max_lines=lines + RESERVED_LINES))


def make(shared: LineBudget, family: str = "futex", lines: int = 2, most: int | None = None) -> Series:
    return Series(
        family, {"count": np.int64, "slots": (np.int64, (3,)), "waiting": np.int64, "waiting_ns": np.int64},
        counters={"count": "counted", "slots": "slotted"},
        names=(0, 1), lines=lines, budget=shared, others=len(KINDS), most=most, uncontended=("cond",),
        maxima=("blocked",), windows={"1m": 60.0},
    )  # fmt: skip


class Model:
    """A family of series, and what was put into it, by label set."""

    def __init__(self, series: Series) -> None:
        self.series = series
        self.put: dict[Labels, int] = defaultdict(int)
        self._seen: dict[Labels, int] = {}

    def count(self, events: list[tuple[Labels, int, int]], now: float) -> None:
        if not events:
            return
        labels = [one for one, _, _ in events]
        keys = np.array([hash_labels(one) for one in labels], np.uint64)
        weights = np.array([weight for _, _, weight in events])
        rows = self.series.rows(keys, lambda i: labels[i], weights, now)
        amounts = [amount for _, amount, _ in events]
        np.add.at(self.series["count"], rows, amounts)
        np.add.at(self.series["slots"][:, 1], rows, amounts)
        for one, row in zip(labels, rows, strict=True):
            assert self.series.labels[row] in (one, (one[0], OTHER, one[2]), (OTHER, OTHER, one[2]))
        for one, amount, _ in events:
            self.put[one] += amount

    def counts(self) -> dict[Labels, int]:
        rows, labels = self.series.live()
        assert len(set(labels)) == len(labels)
        assert (self.series["count"][rows] == self.series["slots"][rows, 1]).all()
        return dict(zip(labels, self.series["count"][rows].tolist(), strict=True))

    def check(self) -> None:
        """Check that nothing is lost or counted twice. No series ever goes back, not even when it returns."""
        counts = self.counts()
        for retired in self.series.retired_values().values():
            assert sum(counts.values()) + retired == sum(self.put.values())
        for kind in KINDS:  # a label other than a name is never lost
            mine = sum(count for labels, count in counts.items() if labels[2] == kind)
            assert mine <= sum(amount for labels, amount in self.put.items() if labels[2] == kind)
        for labels, count in counts.items():
            assert labels[1] == OTHER or count <= self.put[labels]
            assert count >= self._seen.get(labels, 0), labels
        self._seen |= counts


def presence(comms: Iterable[object], *, lasting: bool = True, now: float = 0.0) -> Presence:
    """Return the presence of processes with these comms, in every unit."""
    one, names = (
        Presence(),
        [(unit, str(comm)) for unit in ("a", "b", "", "unit", "late", "db", "cron") for comm in comms],
    )
    one.note(names, now - 100)
    if lasting:
        one.note(names, now)
    return one


def rearrange(model: Model, comms: Iterable[object] = (), *, now: float, lasting: bool = True) -> None:
    model.series.rearrange(presence(comms, lasting=lasting, now=now), IDLE, now)


@given(STEPS, st.integers(10, 120), st.sampled_from([None, 3, 10]))
def test_totals_are_exact_and_lines_bounded(
    steps: list[tuple[list[tuple[Labels, int, int]], list[tuple[Labels, int, int]], set[int] | None, int]],
    lines: int, most: int | None,
) -> None:  # fmt: skip
    """Two families share the lines, whatever they count in whichever order, and whoever lives."""
    shared = budget(lines)
    models = [Model(make(shared, "futex", lines=2, most=most)), Model(make(shared, "offcpu", lines=3))]
    now, there = 0.0, Presence()
    for mine, others, present, seconds in steps:
        now += seconds
        if present is not None:
            there.note([("a", str(comm)) for comm in present] + [("b", str(comm)) for comm in present], now)
        for model, events in zip(models, (mine, others), strict=True):
            before = model.counts()
            model.count(events, now)
            after = model.counts()
            assert all(after[labels] >= count for labels, count in before.items())
            if present is not None:
                model.series.rearrange(there, IDLE, now)
                kept = model.counts()
                assert all(kept[labels] == after[labels] for labels in kept.keys() & after.keys())
            model.check()
        assert sum(model.series.exported_lines for model in models) <= max(lines, 2 * 2 + 2 * 3)


def test_refused_ask_again_when_there_is_room() -> None:
    shared = budget(20)
    model = Model(make(shared))
    model.count([(("unit", str(i), "lock"), 1, 10**9) for i in range(20)], 0)
    refused = next(labels for labels in model.put if labels not in model.counts())
    rearrange(model, now=1)
    model.count([(refused, 5, 10**9)], 1)
    assert refused not in model.counts()
    rearrange(model, now=2 * IDLE)
    model.count([(refused, 7, 10**9)], 2 * IDLE)
    assert model.counts()[refused] == 7  # what counted as `other` before stays there
    model.check()


def test_a_series_without_processes_goes_when_it_is_idle() -> None:
    model = Model(make(budget(1000)))
    old, alive = ("a", "old", "lock"), ("a", "alive", "lock")
    model.count([(old, 3, 0), (alive, 4, 0)], 0)
    rearrange(model, ["alive"], now=IDLE)
    assert old in model.counts()
    rearrange(model, ["alive"], now=IDLE + 1)
    assert model.counts() == {alive: 4}
    assert model.series.retired == 1
    assert model.series.retired_values() == {"counted": 3, "slotted": 3}
    model.check()


def test_one_that_comes_back_goes_on_where_it_was() -> None:
    """If a returning series began at zero, and passed its old value unseen, rate() would miss the reset."""
    model = Model(make(budget(1000)))
    old = ("a", "old", "lock")
    model.count([(old, 3, 0)], 0)
    rearrange(model, now=IDLE + 1)
    assert not model.counts()
    model.count([(old, 5, 0)], IDLE + 2)
    assert model.counts() == {old: 8}
    assert model.series.retired_values() == {"counted": 0, "slotted": 0}


def test_what_has_gone_is_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RETIRED", 2)
    model = Model(make(budget(1000)))
    gone = [("a", str(i), "lock") for i in range(3)]
    for now, labels in enumerate(gone):
        model.count([(labels, 10, 0)], now)
        rearrange(model, now=now + IDLE + 1)
    model.count([(labels, 1, 0) for labels in gone], 2 * IDLE)
    assert sorted(model.counts().values()) == [1, 11, 11]
    assert model.series.retired_values() == {"counted": 10, "slotted": 10}


def test_never_more_than_most() -> None:
    model = Model(make(budget(10_000), most=50))
    model.count([(("unit", str(i), "lock"), 1, 10**9) for i in range(200)], 0)
    assert len(model.series) == 51
    model.check()


def test_names_that_were_refused_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may have a million short-lived processes with names of their own."""
    monkeypatch.setattr(module, "MOST_REFUSED", 1000)
    model = Model(make(budget(100)))
    for now in range(20):
        model.count([(("unit", f"{now}.{i}", "lock"), 1, 0) for i in range(500)], now)
        rearrange(model, now=now)
        assert len(model.series._index) <= 1600
        assert len(model.series._entry_labels) <= 1700
    model.check()
    assert model.series.overflowed > 9900


def test_a_row_used_again_has_nothing_of_the_old_one() -> None:
    model = Model(make(budget(100)))
    series = model.series
    model.count([(("unit", "old", "lock"), 9, 0)], 0)
    row = int(series.live()[0][0])
    series.advance(0)
    series.note_max("blocked", np.array([row]), np.array([77]))
    series["waiting"][row] = 3
    series["waiting_ns"][row] = 99
    assert series.current_max("blocked", np.array([row]))["1m"] == 99
    rearrange(model, now=IDLE + 1)
    assert series.retired == 1
    model.count([(("unit", "new", "lock"), 1, 0)], IDLE + 2)
    assert series.row(("unit", "new", "lock"), IDLE + 2) == row
    other = (OTHER, OTHER, "lock")
    assert model.counts() == {("unit", "new", "lock"): 1, other: 0}
    assert series["waiting"][row] == 0
    assert series.current_max("blocked", np.array([row]))["1m"] == 0
    assert series.current_max("blocked", np.array([series.row(other, IDLE + 2)]))["1m"] == 77


def test_waits_that_go_on_are_in_the_maximum() -> None:
    series = make(budget(100))
    row = series.row(("unit", "a", "lock"), 0)
    series.advance(0)
    series.note_max("blocked", np.array([row]), np.array([50]))
    for waiting, largest in ((20, 50), (60, 60)):
        series["waiting_ns"][row] = waiting
        assert series.current_max("blocked", np.array([row]))["1m"] == largest
    series.clear_waiting()
    assert series.current_max("blocked", np.array([row]))["1m"] == 50


def test_the_shares_leave_something_for_whoever_needs_more() -> None:
    assert 0.5 < sum(SHARES.values()) < OPEN_SHARE


def test_a_family_gets_its_share_though_another_is_greedy() -> None:
    shared = budget(10_000)
    greedy, modest = Model(make(shared, "futex")), Model(make(shared, "offcpu_waker"))
    greedy.count([(("unit", str(i), "lock"), 1, 10**9) for i in range(20_000)], 0)
    rearrange(greedy, range(20_000), now=1)
    modest.count([(("unit", str(i), "lock"), 1, 10**9) for i in range(20_000)], 1)
    share = SHARES["offcpu_waker"] * 9992 / 2
    assert len(modest.series) - 1 == int(OPEN_SHARE * share)
    rearrange(modest, range(20_000), now=2)
    assert len(modest.series) - 1 == int(share)
    assert greedy.series.exported_lines + modest.series.exported_lines <= 10_000
    for model in (greedy, modest):
        model.check()


def test_what_has_ended_gives_way_to_another_family() -> None:
    shared = budget(10_000)
    greedy, late = Model(make(shared, "futex")), Model(make(shared, "offcpu"))
    greedy.count([(("unit", str(i), "lock"), 1, i) for i in range(20_000)], 0)
    before = len(greedy.series)
    late.count([(("unit", str(i), "lock"), 1, 10**9) for i in range(3000)], SHOWN_SECONDS + 1)
    for now in (SHOWN_SECONDS + 2, SHOWN_SECONDS + 3):
        for model in (greedy, late):
            rearrange(model, range(3000) if model is late else (), now=now)
    assert before > len(greedy.series) >= SHARES["futex"] * 9992 // 2
    assert len(late.series) > 2500
    assert greedy.series.exported_lines + late.series.exported_lines <= 10_000
    for model in (greedy, late):
        model.check()


def test_other_windows_begin_when_they_are_asked_for() -> None:
    """Windows that stay go on, and there are as many lines as before."""
    series = make(budget(1000))
    row = series.row(("unit", "comm", "lock"), 1000.0)
    for now, longest in ((1000.0, 9), (1100.0, 5)):
        series.advance(now)
        series.note_max("blocked", np.array([row]), np.array([longest]))
    lines = series.exported_lines
    series.keep_windows({"1m": 60.0, "5m": 300.0})
    series.advance(1101.0)
    series.note_max("blocked", np.array([row]), np.array([3]))
    found = series.current_max("blocked", np.array([row]))
    assert {window: maxima.tolist() for window, maxima in found.items()} == {"1m": [5], "5m": [3]}
    series.keep_windows({"5m": 300.0})
    series.advance(1200.0)
    assert list(series.current_max("blocked", np.array([row]))) == ["5m"]
    assert series.exported_lines == lines


def test_nobody_else_can_compute_the_hash_of_a_label_set() -> None:
    """Otherwise a user could look for a name whose hash is that of somebody else's label set."""
    labels = ("shop.service", "shop")
    public = blake2b("\0".join(labels).encode(), digest_size=8).digest()
    assert hash_labels(labels) == hash_labels(("shop.service", "shop"))
    assert hash_labels(labels) != int.from_bytes(public, "little")
