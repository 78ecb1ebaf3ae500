"""Series: nothing is lost, nothing jumps, and there are never more lines than allowed."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd.sample import series as module
from lockd.sample.identities import code_of
from lockd.sample.limits import OPEN_SHARE, RESERVED_LINES, SHARES, Budget, Limits
from lockd.sample.series import EARNED_NS, OTHER, Series

KINDS = ("lock", "cond")
LABELS = st.tuples(st.just("unit"), st.integers(0, 30).map(str), st.sampled_from(KINDS))
EVENTS = st.lists(
    st.tuples(LABELS, st.integers(0, 10**6), st.sampled_from([0, 1000, EARNED_NS, 10**9])), max_size=20
)
"""Label set, what is counted, and the waiting that it showed."""
STEPS = st.lists(st.tuples(EVENTS, EVENTS, st.sampled_from(["", "reconsider", "retire"])), max_size=20)


def budget(lines: int) -> Budget:
    """One that has so many lines for series."""
    return Budget(Limits(max_lines=lines + RESERVED_LINES))


def make(shared: Budget, family: str = "futex", lines: int = 2, most: int | None = None) -> Series:
    return Series(
        family, {"count": np.int64, "waiting": np.int64, "waiting_ns": np.int64},
        names=(0, 1), lines=lines, budget=shared, others=len(KINDS), most=most,
        maxima=("blocked",), windows={"1m": 60.0},
    )  # fmt: skip


class Model:
    """What was put into a family, by label set."""

    def __init__(self, series: Series) -> None:
        self.series = series
        self.put: dict[tuple[str, ...], int] = defaultdict(int)
        self.retired = 0

    def count(self, events: list[tuple[tuple[str, ...], int, int]], now: float) -> None:
        if not events:
            return
        labels = [one for one, _, _ in events]
        keys = np.array([code_of(one) for one in labels], np.uint64)
        weights = np.array([weight for _, _, weight in events])
        rows = self.series.rows(keys, lambda i: labels[i], weights, now)
        np.add.at(self.series["count"], rows, [amount for _, amount, _ in events])
        for one, row in zip(labels, rows, strict=True):
            assert self.series.labels[row] in (one, (OTHER, OTHER, one[2]))
        for one, amount, _ in events:
            self.put[one] += amount

    def counts(self) -> dict[tuple[str, ...], int]:
        rows, labels = self.series.live()
        assert len(set(labels)) == len(labels)
        return dict(zip(labels, self.series["count"][rows].tolist(), strict=True))

    def check(self) -> None:
        counts = self.counts()
        assert sum(counts.values()) + self.retired == sum(self.put.values())
        for kind in KINDS:  # what a label says besides names is never lost
            mine = sum(count for labels, count in counts.items() if labels[2] == kind)
            assert mine <= sum(amount for labels, amount in self.put.items() if labels[2] == kind)
        for labels, count in counts.items():
            assert labels[1] == OTHER or count <= self.put[labels]

    def retire(self, before: float, alive: set[str]) -> None:
        old, seen = self.counts(), {}
        for row, labels in zip(*self.series.live(), strict=True):
            seen[labels] = self.series.seen[row]
        self.series.retire(before, lambda labels: labels[1] in alive)
        new = self.counts()
        gone = old.keys() - new.keys()
        assert gone == {
            labels
            for labels in old
            if labels[1] != OTHER and labels[1] not in alive and seen[labels] < before
        }
        assert new == {labels: count for labels, count in old.items() if labels not in gone}
        self.retired += sum(old[labels] for labels in gone)


@given(STEPS, st.integers(10, 90))
def test_totals_are_exact_and_lines_bounded(
    steps: list[tuple[list[tuple[tuple[str, ...], int, int]], ...]], lines: int
) -> None:
    """Two families share what there is, whatever is asked of them in which order."""
    shared = budget(lines)
    models = [Model(make(shared, "futex", lines=2)), Model(make(shared, "offcpu", lines=3))]
    for now, (*events, then) in enumerate(steps):
        for model, mine in zip(models, events, strict=True):
            before = model.counts()
            model.count(mine, now)
            after = model.counts()
            assert all(after[labels] >= count for labels, count in before.items())
            if then == "reconsider":
                model.series.reconsider()
                assert model.counts() == after
            elif then == "retire":
                model.retire(now - 1, alive={"1", "2", "3"})
            model.check()
        assert sum(model.series.exported_lines for model in models) <= max(lines, 2 * 2 + 2 * 3)
        assert sum(model.series.exported_lines for model in models) <= lines


def test_a_family_gets_its_share_though_another_is_greedy() -> None:
    shared = budget(10_000)
    greedy, modest = Model(make(shared, "futex")), Model(make(shared, "offcpu_waker"))
    greedy.count([(("unit", str(i), "lock"), 1, 10**9) for i in range(20_000)], 0)
    modest.count([(("unit", str(i), "lock"), 1, 10**9) for i in range(20_000)], 0)
    least = SHARES["offcpu_waker"] * 10_000 // 2
    assert len(modest.series) >= least
    assert greedy.series.exported_lines + modest.series.exported_lines <= 10_000
    for model in (greedy, modest):
        model.check()


def test_the_last_lines_are_for_those_that_wait() -> None:
    """Beyond OPEN_SHARE of its quota a family admits who showed much waiting at once."""
    shared = budget(1000)
    greedy, model = Model(make(shared, "futex")), Model(make(shared, "kernel_lock"))
    greedy.count([(("unit", str(i), "lock"), 1, 10**9) for i in range(1000)], 0)
    quota = SHARES["kernel_lock"] * 1000 // 2
    model.count([(("unit", str(i), "lock"), 1, EARNED_NS - 1) for i in range(100)], 0)
    assert len(model.series) - 1 == OPEN_SHARE * quota
    assert model.series.overflowed == 100 - OPEN_SHARE * quota
    late = ("unit", "late", "lock")
    model.count([(late, 1, EARNED_NS)], 1)
    assert model.counts()[late] == 1
    model.count([(("unit", f"later{i}", "lock"), 1, EARNED_NS) for i in range(100)], 2)
    assert len(model.series) - 1 == quota
    model.check()


def test_refused_ask_again_when_there_is_room() -> None:
    shared = budget(20)
    model = Model(make(shared))
    model.count([(("unit", str(i), "lock"), 1, 10**9) for i in range(20)], 0)
    refused = next(labels for labels in model.put if labels not in model.counts())
    model.count([(refused, 5, 10**9)], 1)
    assert refused not in model.counts()
    model.retire(100, alive=set())
    model.series.reconsider()
    model.count([(refused, 7, 10**9)], 101)
    assert model.counts()[refused] == 7  # what was counted before stays where it is
    model.check()


def test_never_more_than_most() -> None:
    model = Model(make(budget(10_000), most=50))
    model.count([(("unit", str(i), "lock"), 1, 10**9) for i in range(200)], 0)
    assert len(model.series) == 51
    model.check()


def test_names_that_were_refused_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million short-lived processes with names of their own."""
    monkeypatch.setattr(module, "MOST_REFUSED", 1000)
    model = Model(make(budget(100)))
    for now in range(20):
        model.count([(("unit", f"{now}.{i}", "lock"), 1, 0) for i in range(500)], now)
        model.series.reconsider()
        assert len(model.series._index) <= 1600
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
    model.retire(1, alive=set())
    assert series.retired == 1
    model.count([(("unit", "new", "lock"), 1, 0)], 2)
    assert series.live()[0].tolist() == [row]
    assert model.counts() == {("unit", "new", "lock"): 1}
    assert series["waiting"][row] == 0
    assert series.current_max("blocked", np.array([row]))["1m"] == 0


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


def test_the_shares_are_of_everything() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)
