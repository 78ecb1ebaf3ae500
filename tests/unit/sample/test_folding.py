"""Tests of folding: drained rows are folded once, in their order, so many at a time, and none waits long."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd.names.labels.processes import Processes
from lockd.names.labels.units import Units
from lockd.sample import folding
from lockd.sample.aggregates.identities import Filter, Identities
from lockd.sample.aggregates.window import Window
from lockd.sample.drain import FOLDED_ROWS, Backlog
from lockd.sample.folding import Folding

MAP_ENTRIES = 4000
OF_PROCESS = 1 << 31
PAIRS = ("futex", "futex_over", "offcpu")

WHO = [("cgroup", "u8"), ("comm", "S16"), ("thread_comm", "S16"), ("tgid", "u4"), ("kernel_thread", "u4")]
KEY = np.dtype([("uaddr", "u8"), ("tid", "u4"), ("kind", "u4")])
VALUE = np.dtype([("calls", "u8"), ("number", "u8"), ("who", WHO)])


class Table:
    """A stand-in for a map that programs have filled. All its rows are numbered, from the first one ever."""

    entries, key, value = MAP_ENTRIES, KEY, VALUE

    def __init__(self) -> None:
        self.made = 0
        self._fresh = 0

    def fill(self, count: int) -> None:
        self._fresh = count

    def drain_into(self, keys_at: int, values_at: int, room: int) -> int:
        count, self._fresh = self._fresh, 0
        assert count <= room
        keys, values = np.zeros(count, KEY), np.zeros(count, VALUE)
        values["calls"], values["number"] = 1, np.arange(self.made, self.made + count)
        values["who"]["comm"], keys["uaddr"] = b"shop", values["number"] % 2
        self.made += count
        ctypes.memmove(keys_at, keys.ctypes.data, keys.nbytes)
        ctypes.memmove(values_at, values.ctypes.data, values.nbytes)
        return count


class Aggregates:
    """Keeps the numbers of folded rows: under False those of overflow maps, under True all others."""

    series: tuple[()] = ()

    def __init__(self) -> None:
        self.numbers: dict[bool, list[int]] = {True: [], False: []}

    def fold(self, window: Window, now: float) -> None:
        self.numbers[window.has_detail] += window.values["number"].tolist()


class Collector:
    """A stand-in for the collector: the maps, and the backlogs of drained rows."""

    def __init__(self) -> None:
        self.tables = {pair: Table() for pair in PAIRS}
        self.backlogs = {pair: Backlog(cast(Any, table), FOLDED_ROWS) for pair, table in self.tables.items()}

    def forget_stacks(self) -> None:
        pass

    def drain(self, pair: str, count: int) -> None:
        self.tables[pair].fill(count)
        self.backlogs[pair].drain(cast(Any, self.tables[pair]))


class OddOnes:
    """A stand-in for UserLocks that asks for the names of locks at odd addresses until `are_known`."""

    are_known = False

    def is_undecided(
        self, tgids: Any, addresses: npt.NDArray[Any], kinds: Any, now: float
    ) -> npt.NDArray[np.bool_]:
        return np.zeros(len(addresses), np.bool_) if self.are_known else addresses % 2 == 1


class Bench:
    """A Folding with stand-ins for all that it works with."""

    def __init__(self, locks: OddOnes | None = None) -> None:
        self.collector, self.futex, self.offcpu = Collector(), Aggregates(), Aggregates()
        self.looked_at = 0
        self.folding = Folding(
            cast(Any, self.collector),
            cast(Any, {"futex": self.futex, "offcpu": self.offcpu}),
            Identities(Processes(Units(Path("/nowhere")), Path("/nowhere")), Filter()),
            cast(Any, locks),
            self._look,
            OF_PROCESS,
        )

    def _look(self, keys: npt.NDArray[Any]) -> None:
        self.looked_at += len(keys)

    @property
    def folded(self) -> dict[str, list[int]]:
        one, other = self.futex.numbers, self.offcpu.numbers
        return {"futex": one[True], "futex_over": one[False], "offcpu": other[True]}

    @property
    def waiting(self) -> dict[str, int]:
        return {pair: len(backlog) for pair, backlog in self.collector.backlogs.items()}


@given(st.lists(st.tuples(*(st.integers(0, MAP_ENTRIES) | st.integers(0, 9) for _ in PAIRS)), max_size=12))
def test_ticks_fold_each_row_once_in_its_order(ticks: list[tuple[int, ...]]) -> None:
    bench = Bench()
    for counts in ticks:
        while not all(backlog.has_room for backlog in bench.collector.backlogs.values()):
            bench.folding.fold_some()
        for pair, count in zip(PAIRS, counts, strict=True):
            bench.collector.drain(pair, count)
        before, few = sum(bench.waiting.values()), min(bench.waiting.values())
        bench.folding.fold_some()
        assert before - sum(bench.waiting.values()) == min(before, FOLDED_ROWS)
        assert few > FOLDED_ROWS or not min(bench.waiting.values())
    bench.folding.fold_all()
    for pair, numbers in bench.folded.items():
        assert numbers == list(range(bench.collector.tables[pair].made))
    assert bench.looked_at == bench.collector.tables["futex"].made


def test_new_rows_are_looked_at_once_before_they_are_folded() -> None:
    bench = Bench()
    for count, looked_at in ((3, 3), (2, 5), (0, 5)):
        bench.collector.drain("futex", count)
        bench.folding.look_at_new_rows()
        assert bench.looked_at == looked_at
    bench.collector.drain("futex", 4)
    bench.folding.fold_some(6)
    assert bench.looked_at == 6
    bench.folding.look_at_new_rows()
    bench.folding.fold_all()
    assert bench.looked_at == 9
    assert bench.folded["futex"] == list(range(9))


def test_few_rows_do_not_wait_behind_many() -> None:
    bench = Bench()
    for _ in range(2):
        bench.collector.drain("futex", MAP_ENTRIES)
    bench.collector.drain("offcpu", 5)
    bench.folding.fold_some()
    assert bench.waiting == {"futex": 2 * MAP_ENTRIES + 5 - FOLDED_ROWS, "futex_over": 0, "offcpu": 0}


def test_calls_wait_for_the_names_of_their_locks() -> None:
    bench = Bench(locks := OddOnes())
    bench.collector.drain("futex", MAP_ENTRIES)
    bench.folding.fold_all()
    assert bench.folded["futex"] == list(range(0, MAP_ENTRIES, 2))
    assert bench.folding.undecided_calls == MAP_ENTRIES // 2
    locks.are_known = True
    bench.folding.fold_all()
    assert sorted(bench.folded["futex"]) == list(range(MAP_ENTRIES))
    assert bench.folding.undecided_calls == 0


def test_what_was_drained_before_is_decided_though_there_is_always_more() -> None:
    bench = Bench(locks := OddOnes())
    for bench.folding.tick in (5, 6):
        bench.collector.drain("futex", 2)
        bench.folding.fold_all()
    assert bench.folding.has_decided(4)
    assert not bench.folding.has_decided(5)
    locks.are_known = True
    bench.folding.fold_all()
    locks.are_known = False
    bench.folding.tick = 7
    bench.collector.drain("futex", 2)
    bench.folding.fold_all()
    assert bench.folding.has_decided(6)
    assert not bench.folding.has_decided(7)


def test_only_so_many_calls_wait_and_the_oldest_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "HELD_BACK_ROWS", 100)
    bench = Bench(OddOnes())
    for _ in range(2):
        bench.collector.drain("futex", 300)
        bench.folding.fold_some()
    assert bench.folding.undecided_calls == 100
    assert sorted(set(range(600)) - set(bench.folded["futex"])) == list(range(401, 600, 2))
