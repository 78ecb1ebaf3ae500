"""Windows end when something was written, and are drained once. Nothing is lost, whoever writes when.

The collector is real. The programs are simulated step by step, as they are in
lockd/bpf/include/common.bpf.h.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd.kernel.pairs import ELEMENT_WORDS, Control, Written
from lockd.sample import drain
from lockd.sample.drain import LONGEST_OWN_WINDOW, LONGEST_WINDOW, Collector

PAIRS = ("futex", "offcpu")
MEMBERS = (*PAIRS, "soon", "processes", "wait", "writtens")
OF_LOCKD, OF_PROCESS, ONE_OF_MANY = (), ("processes",), ("processes", "soon")
"""What a program marks besides the pair, by sort of entry: about lockd, about a process, one of many."""
CONTROL = [("window", "u4"), ("restraint", "u4"), ("is_timed", "u4"), ("sampler", "u4"), ("exporter", "u4")]
MANIFEST = SimpleNamespace(maps=(), constants={"TIMED_RUNS": 8})


class Table:
    """One map of a pair."""

    entries, key, value = 4096, np.dtype("u8"), np.dtype("u8")

    def __init__(self) -> None:
        self.content: list[int] = []
        self.drains = 0

    def drain_into(self, keys_at: int, values_at: int, room: int) -> int:
        self.drains += 1
        keys, self.content = np.array(self.content, np.uint64), []
        ctypes.memmove(keys_at, keys.ctypes.data, keys.nbytes)
        return len(keys)


class Kernel:
    """The maps, which outlast a sampler, and the runs of programs."""

    def __init__(self, number: int = 0) -> None:
        self.control = np.zeros(1, CONTROL)
        self.control["window"] = number
        self.words = np.zeros(2 * ELEMENT_WORDS * len(MEMBERS), np.uint32)
        self.written = self.words[::ELEMENT_WORDS]
        self.tables = {name: (Table(), Table()) for name in PAIRS}
        self.running: list[Iterator[None]] = []
        self.made = 0

    def begin(self, pair: str, marks: tuple[str, ...]) -> None:
        """Begin a run of a program that adds an entry."""
        self.made += 1
        run = self._add((pair, *marks), self.made)
        next(run)
        self.running.append(run)

    def advance(self, which: int) -> None:
        """Let one of the runs do its next step."""
        if self.running:
            run = self.running[which % len(self.running)]
            if next(run, self) is self:
                self.running.remove(run)

    def end_all(self) -> None:
        while self.running:
            self.advance(0)

    def _add(self, marks: tuple[str, ...], entry: int) -> Iterator[None]:
        window = int(self.control["window"][0]) & 1
        for what in marks:
            yield
            number = int(self.control["window"][0])
            number = (number - ((number ^ window) & 1)) & 0xFFFFFFFF  # the programs have 32 bits
            at = 2 * MEMBERS.index(what) + window
            last = self.written[at]
            yield
            if last != number:
                self.written[at] = number
        yield
        self.tables[marks[0]][window].content.append(entry)


class Maps:
    """Stands for Pairs. A grace period passes when the runs have ended that had begun before it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.hashes: dict[str, Any] = {"threads": None}
        self.pairs = kernel.tables
        self.losses, self.run_times = None, SimpleNamespace(read=lambda: [0])
        self.control = Control(memoryview(kernel.control.view(np.uint32)), CONTROL)
        self.written = Written(memoryview(kernel.words), MEMBERS, self.control)
        self.flips = 0
        self._waited_for = list(kernel.running)
        self.buffers: Any = None

    @property
    def is_settled(self) -> bool:
        return not any(run in self._kernel.running for run in self._waited_for)

    def idle(self, name: str) -> Table:
        return self.pairs[name][1 - self.control.window]

    def flip(self) -> None:
        self.flips += 1
        self.control.flip()
        self._waited_for = list(self._kernel.running)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(drain, "time", clock)
    return clock


def collector_of(kernel: Kernel) -> tuple[Collector, Maps]:
    maps = Maps(kernel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drain, "Pairs", lambda *_: maps)
        return Collector(cast(Any, MANIFEST), []), maps


def taken(collector: Collector) -> list[int]:
    """The entries that were drained since the last call."""
    return [int(key) for backlog in collector.backlogs.values() for key in backlog.take(1 << 20)[0]]


def begun(kernel: Kernel) -> tuple[Collector, Maps]:
    """A collector that has looked at both maps of each pair."""
    collector, maps = collector_of(kernel)
    for _ in range(3):
        assert collector.drain()
    assert maps.flips == 1
    return collector, maps


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("begin"), st.sampled_from(PAIRS), st.sampled_from([OF_LOCKD, OF_PROCESS, ONE_OF_MANY])
        ),
        st.tuples(st.just("advance"), st.integers(0, 5)),
        st.just(("tick",)),
        st.just(("second",)),
        st.just(("restart",)),
    ),
    max_size=80,
)


@given(STEPS, st.sampled_from([0, 1, 5, (1 << 32) - 2]))
def test_every_entry_is_drained_once_whatever_comes_between(steps: list[Any], number: int) -> None:
    clock, kernel, seen = Clock(), Kernel(number), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drain, "time", clock)
        collector, _ = collector_of(kernel)
        for what, *arguments in steps:
            if what == "begin":
                kernel.begin(*arguments)
            elif what == "advance":
                kernel.advance(*arguments)
            elif what == "tick":
                collector.drain()
            elif what == "second":
                clock.now += LONGEST_OWN_WINDOW
            else:  # another sampler takes over; the rows that this one has drained count as folded
                seen += taken(collector)
                collector, _ = collector_of(kernel)
        kernel.end_all()
        for _ in range(3):
            clock.now += LONGEST_OWN_WINDOW
            assert collector.drain()
    seen += taken(collector)
    assert sorted(seen) == list(range(1, kernel.made + 1))
    assert not any(table.content for pair in kernel.tables.values() for table in pair)


def test_where_nothing_was_written_nothing_is_done(clock: Clock) -> None:
    kernel = Kernel()
    collector, maps = begun(kernel)
    drains = [table.drains for pair in kernel.tables.values() for table in pair]
    for _ in range(200):
        clock.now += 0.05
        assert collector.drain()
    assert maps.flips == 1
    assert drains == [table.drains for pair in kernel.tables.values() for table in pair]


def test_only_the_pair_that_was_written_is_drained(clock: Clock) -> None:
    kernel = Kernel()
    collector, maps = begun(kernel)
    others = sum(table.drains for table in kernel.tables["offcpu"])
    kernel.begin("futex", ONE_OF_MANY)
    kernel.end_all()
    assert collector.drain()
    assert maps.flips == 2
    assert collector.drain()
    assert taken(collector) == [1]
    assert collector.has_rows_of_processes
    assert sum(table.drains for table in kernel.tables["offcpu"]) == others


@pytest.mark.parametrize(("marks", "longest"), [(OF_PROCESS, LONGEST_WINDOW), (OF_LOCKD, LONGEST_OWN_WINDOW)])
def test_few_entries_wait_for_a_while_or_for_somebody_who_asks(
    marks: tuple[str, ...], longest: float, clock: Clock
) -> None:
    kernel = Kernel()
    collector, maps = begun(kernel)
    collector.has_rows_of_processes = False
    kernel.begin("offcpu", marks)
    kernel.end_all()
    clock.now += longest * 0.8
    assert collector.drain()
    assert maps.flips == 1
    clock.now += longest * 0.2
    assert collector.drain()
    assert collector.drain()
    assert taken(collector) == [1]
    assert collector.has_rows_of_processes == (marks == OF_PROCESS)
    kernel.begin("offcpu", marks)
    kernel.end_all()
    collector.end_window()
    assert collector.drain()
    assert collector.drain()
    assert taken(collector) == [2]


def test_nothing_is_done_until_no_program_can_write_to_the_idle_maps(clock: Clock) -> None:
    kernel = Kernel()
    collector, maps = begun(kernel)
    kernel.begin("futex", ONE_OF_MANY)
    for _ in range(6):
        kernel.advance(0)  # sets the marks; the entry is still to come
    assert collector.drain()
    assert maps.flips == 2
    assert not collector.drain()
    kernel.end_all()
    assert collector.drain()
    assert taken(collector) == [1]


class KernelWaits:
    """Stands for the map of waits for kernel locks; notes what is deleted."""

    def __init__(self, *waits: tuple[int, float]) -> None:
        """Make the map. A wait is a number and its seconds so far.

        The number is that of the CPU that spins plus 1, or 0 for a thread that sleeps.
        """
        now = time.monotonic_ns()
        self.keys = np.zeros(len(waits), [("lock", "u8"), ("tid", "u4"), ("cpu", "u4")])
        self.values = np.zeros(len(waits), [("since", "u8")])
        self.keys["cpu"] = [cpu for cpu, _ in waits]
        self.values["since"] = [now - int(seconds * 1e9) for _, seconds in waits]
        self.deleted: list[int] = []

    def read_steady(self, _: object) -> tuple[Any, Any]:
        return self.keys, self.values

    def delete(self, keys: Any) -> None:
        self.deleted += keys["cpu"].tolist()


def test_a_spin_whose_end_was_not_seen_does_not_go_on_for_ever() -> None:
    """The kernel skips the program for the end of a spin if the CPU is running a program already.

    A thread that sleeps may do so for as long as it likes.
    """
    collector, _ = collector_of(Kernel())
    waits = KernelWaits((1, 0.001), (2, 3600.0), (0, 3600.0))
    collector._kernel_waits = cast(Any, waits)
    found = collector.kernel_waits()
    assert found
    assert found[0]["cpu"].tolist() == [1, 0]
    assert len(found[1]) == 2
    assert waits.deleted == [2]
