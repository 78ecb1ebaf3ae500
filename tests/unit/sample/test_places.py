"""Tests of who has series where there is not room for all: the hot locks, and the services that last."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd.sample.series.label_hash import hash_labels
from lockd.sample.series.limits import OPEN_SHARE
from lockd.sample.series.ranking import (
    EARNED_NS,
    FLOOR,
    GONE,
    HALF_LIFE,
    LASTING,
    LASTS,
    THERE,
    Presence,
    rank,
)
from lockd.sample.series.series import OTHER, SHOWN_SECONDS
from tests.unit.sample.test_series import IDLE, Labels, Model, budget, make, rearrange

SECOND = 10**9
LOOK = 10.0
"""Seconds from one time at which the sampler gives out rows anew to the next."""


def locks(most: int = 50) -> Model:
    return Model(make(budget(10_000), "futex_lock", most=most))


def wait_on(model: Model, waits: list[tuple[Labels, float]]) -> None:
    """Note the waits that go on at this moment: label sets, and for how many seconds each has lasted."""
    series = model.series
    series.clear_waiting()
    keys = np.array([hash_labels(labels) for labels, _ in waits], np.uint64)
    waited = np.array([seconds * SECOND for _, seconds in waits], np.int64)
    series.waiting_rows(keys, lambda i: waits[i][0], waited, 0)


def own(model: Model) -> set[Labels]:
    """Return the label sets that count in a series of their own now. Some others still show theirs."""
    entries = model.series._entries
    return {
        labels
        for labels, entry in model.series._entry_of.items()
        if labels[1] != OTHER and entries["target"][entry] == entries["row"][entry]
    }


HOT: Labels = ("db", "dbd", "lock")


def test_a_hot_lock_takes_the_place_of_idle_waits_for_work() -> None:
    """60 threads wait for work, each on a condition variable of its own, before threads want one mutex."""
    model = locks()
    idle: list[Labels] = [("db", f"cond{i}", "cond") for i in range(60)]
    for now in range(100, 200, 10):
        wait_on(model, [(labels, float(now)) for labels in idle])
        rearrange(model, now=now)
    assert len(own(model)) == 50
    model.count([(HOT, 1, SECOND // 100)], 200)
    assert HOT not in own(model)
    rearrange(model, now=200)
    assert HOT in own(model)
    assert len(own(model)) == 50
    model.count([(HOT, 5, SECOND)], 201)
    assert model.counts()[HOT] == 5
    model.check()


def test_a_lock_that_was_hot_gives_way_to_one_that_is() -> None:
    model = locks(most=1)
    before: Labels = ("web", "httpd", "lock")
    model.count([(before, 7, 100 * SECOND)], 0)
    rearrange(model, now=0)
    for now in range(5 * int(HALF_LIFE), 5 * int(HALF_LIFE) + 60, 10):
        model.count([(HOT, 1, SECOND)], now)
        rearrange(model, now=now)
        if HOT in own(model):
            break
    assert own(model) == {HOT}
    model.check()


def test_what_lost_its_place_shows_its_last_numbers_for_a_while() -> None:
    """If it went at once, no scrape would ever see what was counted since the scrape before."""
    model = locks(most=1)
    before: Labels = ("web", "httpd", "lock")
    model.count([(before, 7, SECOND)], 0)
    model.count([(HOT, 1, 100 * SECOND)], 1)
    rearrange(model, now=1)
    model.count([(before, 3, SECOND), (HOT, 1, 100 * SECOND)], 2)
    assert own(model) == {HOT}
    assert model.counts() == {before: 7, HOT: 1, (OTHER, OTHER, "lock"): 4}
    rearrange(model, now=SHOWN_SECONDS - 1)
    assert before in model.counts()
    rearrange(model, now=SHOWN_SECONDS)
    assert before not in model.counts()
    assert model.series.retired == 1
    model.check()
    model.count([(before, 2, 1000 * SECOND)], SHOWN_SECONDS + 2)
    rearrange(model, now=SHOWN_SECONDS + 2)
    assert own(model) == {before}
    model.count([(before, 5, SECOND)], SHOWN_SECONDS + 3)
    assert model.counts()[before] == 12  # what counted as `other` meanwhile stays there
    model.check()


def test_a_wait_that_goes_on_counts_while_it_lasts() -> None:
    model = locks(most=1)
    stuck, busy = ("a", "stuck", "lock"), ("b", "busy", "lock")
    model.count([(busy, 1, SECOND)], 0)
    wait_on(model, [(stuck, 30.0)])
    rearrange(model, now=0)
    assert own(model) == {stuck}
    for now in (300, 310):
        wait_on(model, [])  # the wait has ended, long ago
        model.count([(busy, 1, SECOND)], now)
        rearrange(model, now=now)
    assert own(model) == {busy}


def test_locks_that_are_as_hot_as_each_other_do_not_flap() -> None:
    """Such locks keep their places although the one that is ahead changes all the time."""
    model, random = locks(most=5), np.random.default_rng(1)
    even: list[Labels] = [("db", str(i), "lock") for i in range(10)]
    changes, before = 0, set[Labels]()
    for now in range(0, 3600, 10):
        model.count(
            [(labels, 1, int(w)) for labels, w in zip(even, random.exponential(SECOND, 10), strict=True)], now
        )
        rearrange(model, now=now)
        changes += now > 120 and own(model) != before
        before = own(model)
    assert changes < 360 / 10
    model.check()


def test_a_trickle_takes_nobody_s_place() -> None:
    model = locks(most=2)
    model.count([(("a", str(i), "lock"), 1, 10) for i in range(2)], 0)
    before = own(model)
    for now in range(600, 700, 10):
        model.count([(("b", "late", "lock"), 1, EARNED_NS // 20)], now)
        rearrange(model, now=now)
    assert own(model) == before


def test_one_service_does_not_take_all_places() -> None:
    model = locks(most=20)
    hot: list[Labels] = [("db", str(i), "lock") for i in range(100)]
    quiet: list[Labels] = [(f"u{unit}", str(i), "lock") for unit in range(4) for i in range(3)]
    for now in range(0, 100, 10):
        model.count([(labels, 1, SECOND) for labels in hot], now)
        model.count([(labels, 1, SECOND // 50) for labels in quiet], now)
        rearrange(model, now=now)
    units = [unit for unit, _, _ in own(model)]
    assert len(units) == 20
    assert all(units.count(f"u{unit}") == FLOOR for unit in range(4))
    assert units.count("db") == 20 - 4 * FLOOR


def test_many_quiet_services_do_not_take_all_places_either() -> None:
    model = locks(most=20)
    hot: list[Labels] = [("db", str(i), "lock") for i in range(10)]
    for now in range(0, 100, 10):
        model.count(
            [((f"u{unit}", str(i), "lock"), 1, EARNED_NS) for unit in range(50) for i in range(3)], now
        )
        model.count([(labels, 1, SECOND) for labels in hot], now)
        rearrange(model, now=now)
    assert set(hot) <= own(model)


def test_floors_without_units_are_by_comm() -> None:
    model = locks(most=10)
    hot: list[Labels] = [("", "dbd", kind) for kind in ("lock", "pi")]
    model.count([(labels, 1, 100 * SECOND) for labels in hot], 0)
    model.count([(("", f"c{i}", "lock"), 1, SECOND) for i in range(20)], 0)
    rearrange(model, now=0)
    assert set(hot) <= own(model)


def processes(lines: int = 1000) -> Model:
    """Return a family that has 200 lines of its own, beside 800 that are nobody's share."""
    return Model(make(budget(lines), "futex"))


def test_a_service_gets_its_series_when_helpers_have_taken_all() -> None:
    model = processes()
    model.count([(("cron", f"helper{i}", "cond"), 1, SECOND) for i in range(2000)], 0)
    room = len(model.series)
    assert room * 2 < OPEN_SHARE * 1000 + 5
    late: list[Labels] = [("late", f"service{i}", "cond") for i in range(300)]
    comms = [comm for _, comm, _ in late]
    for now in range(10, 100, 10):
        model.count([(labels, 1, 0) for labels in late], now)
        rearrange(model, comms, now=now)
        if now == 10:  # at once they get the lines that are kept for them
            assert len(set(late) & own(model)) >= (1 - OPEN_SHARE) * 1000 / 2 - 5
    assert set(late) <= own(model)
    assert model.series.exported_lines <= 1000
    model.check()


def test_those_that_have_ended_go_smallest_and_oldest_first() -> None:
    model = processes()
    ended: list[Labels] = [("cron", str(i), "cond") for i in range(300)]
    for now in range(30):
        model.count([(labels, 1, SECOND) for labels in ended[10 * now : 10 * now + 10]], now)
        rearrange(model, now=now)
    model.count([(ended[0], 1, 10_000 * SECOND)], 30)
    late: list[Labels] = [("late", f"service{i}", "cond") for i in range(300)]
    for now in (100, 110):
        model.count([(labels, 1, 0) for labels in late], now)
        rearrange(model, [comm for _, comm, _ in late], now=now)
    left = [int(comm) for unit, comm, _ in own(model) if unit == "cron"]
    assert 0 in left
    assert 150 < len(left) < 250
    assert min(set(left) - {0}) >= 300 - len(left) - 10  # ten at a time are equally old
    model.check()


def test_a_service_that_is_there_keeps_its_series_whatever_comes_and_goes() -> None:
    model = processes()
    service: Labels = ("db", "dbd", "cond")
    model.count([(service, 1, 0)], 0)
    for now in range(10, 4000, 10):
        model.count([(("cron", f"{now}.{i}", "cond"), 1, 100 * SECOND) for i in range(30)], now)
        rearrange(model, ["dbd", *(f"{now}.{i}" for i in range(30))], lasting=now % 100 == 0, now=now)
        assert service in own(model)
    model.check()


CRON = ("cron", OTHER, "cond")
"""The series of a unit whose helpers have no room for series of their own."""


def helpers_without_room() -> tuple[Model, Presence]:
    """Return a model in which 2,000 helpers of a unit have waited, so that later ones count as CRON; and the
    processes that were there until second 40."""
    model, there = processes(), Presence()
    model.count([(("cron", f"helper{i}", "cond"), 1, SECOND) for i in range(2000)], 0)
    for now in (0, 20, 40):
        there.note([("cron", "crond")], now)
        model.count([(("cron", f"late{now}.{i}", "cond"), 1, SECOND) for i in range(10)], now)
        model.series.rearrange(there, IDLE, now)
    return model, there


def test_helpers_of_a_unit_are_one_series_when_there_is_no_room_for_each() -> None:
    model, _ = helpers_without_room()
    assert CRON in model.counts()
    before = model.counts()[CRON]
    model.count([(("cron", "new", "cond"), 7, SECOND)], 41)
    model.count([(("session-1.scope", "new", "cond"), 8, SECOND)], 41)
    assert model.counts()[CRON] == before + 7
    assert ("session-1.scope", OTHER, "cond") not in model.counts()
    model.check()


def test_helpers_return_to_the_series_of_their_unit_after_a_restart() -> None:
    """The unit had no process for a moment, in which other processes took the place of its series."""
    before, there, unit = processes(), Presence(), ("cron", OTHER, "cond")
    batch, helper = [("batch", f"worker{i}") for i in range(1000)], ("cron", "new", "cond")
    before.count([((*name, "cond"), 1, SECOND) for name in batch], 0)
    for now in (0, 20, 40):
        there.note([*batch, ("cron", "crond")], now)
        before.count([(("cron", f"late{now}.{i}", "cond"), 1, SECOND) for i in range(10)], now)
        before.series.rearrange(there, IDLE, now)
    after = processes()
    after.series.restore(*before.series.save(), now=50)
    counted = after.counts()[unit]
    after.count([(helper, 7, SECOND)], 50)
    assert after.counts()[unit] == counted + 7
    there.note(batch, 60)
    after.series.rearrange(there, 5, 60)
    assert unit not in after.counts()
    for now in (70, 90):
        there.note([*batch, ("cron", "crond")], now)
        after.count([(helper, 1, 100 * SECOND)], now)
        after.series.rearrange(there, IDLE, now)
    counted = after.counts()[unit]
    after.count([(helper, 3, SECOND)], 91)
    assert after.counts()[unit] == counted + 3


LONGEST = 5 * SECOND


def note_longest(model: Model, labels: Labels) -> None:
    """Note a wait of LONGEST that has ended in the series of a label set."""
    row = model.series.find(np.array([hash_labels(labels)], np.uint64))
    model.series.note_max("blocked", row, np.array([LONGEST]))


def longest(model: Model) -> dict[Labels, int]:
    """Return the longest wait of each series that has one."""
    rows, labels = model.series.live()
    values = model.series.current_max("blocked", rows)["1m"]
    return {one: int(value) for one, value in zip(labels, values, strict=True) if value}


def test_the_longest_wait_of_an_ended_process_is_still_there_when_another_takes_its_place() -> None:
    """Its events count in its own series until the moment at which that goes."""
    model, ended = locks(most=1), ("web", "httpd", "lock")
    model.count([(ended, 1, LONGEST)], 0)
    note_longest(model, ended)
    now = SHOWN_SECONDS + 1
    model.count([(HOT, 1, 100 * SECOND)], now)
    rearrange(model, ["dbd"], now=now)
    assert own(model) == {HOT}
    assert model.series.retired == 1
    assert longest(model) == {(OTHER, OTHER, "lock"): LONGEST}
    model.check()


@pytest.mark.parametrize("is_unit_there", [True, False])
def test_the_longest_wait_of_a_helper_is_still_there_when_its_series_goes(is_unit_there: bool) -> None:
    """The wait counts in the series of the unit, or as `other` if that series goes at the same time."""
    model, there = helpers_without_room()
    helper = min(own(model) - {CRON})
    note_longest(model, helper)
    there.note([("cron", "crond")] if is_unit_there else [], 60)
    model.series.rearrange(there, 5, 60)
    assert helper not in model.counts()
    assert (CRON in model.counts()) == is_unit_there
    assert longest(model) == {CRON if is_unit_there else (OTHER, OTHER, "cond"): LONGEST}
    model.check()


def test_what_lasts() -> None:
    there = Presence()
    for now in (0.0, LOOK):
        there.note([("a", "x")], now)
        assert there.state(("a", "x")) == there.unit_state("a") == THERE
    there.note([("a", "x"), ("b", "y")], 2 * LOOK)
    assert 2 * LOOK >= LASTING
    assert there.state(("a", "x")) == there.unit_state("a") == LASTS
    assert there.state(("b", "y")) == there.unit_state("b") == THERE
    there.note([], 3 * LOOK)
    assert there.state(("a", "x")) == there.unit_state("a") == GONE
    there.note([("a", "x")], 4 * LOOK)
    assert there.state(("a", "x")) == THERE


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 100), st.integers(0, 5), st.booleans()), min_size=1),
    st.integers(0, 20),
)
def test_the_ranking_is_an_order_of_all(entries: list[tuple[int, float, int, bool]], floors: int) -> None:
    tiers, merits, owners, has_floor = (np.array(column) for column in zip(*entries, strict=True))
    order = rank(tiers, merits, owners, has_floor, floors).tolist()
    assert sorted(order) == list(range(len(entries)))
    first = 0
    while first < min(floors, len(order)) and has_floor[order[first]]:
        first += 1
    rest = [(-tiers[i], -merits[i]) for i in order[first:]]
    assert rest == sorted(rest)
