"""Windows of real maps: nothing added around a flip is lost, and only maps that were written are drained."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lockd.config.reader import read_text
from lockd.config.schema import Config
from lockd.kernel.counters import Losses
from lockd.kernel.manifest import Manifest
from lockd.load.child import run_loader
from lockd.sample.drain import LONGEST_WINDOW, Collector
from lockd.service.start import load_settings
from tests.support.workload import Start

OFF = {"enabled": False}
PROGRAMS = {"futex": {"mode": "calls"}, "offcpu": OFF, "kernel_locks": OFF}
"""The configuration of programs. In mode `calls`, calls that did not block are added to a map some time after
they ended.
"""
STORM_SECONDS = 3


class Programs:
    """The programs of a daemon, with a collector in place of its sampler. If not `attached`, there are only
    the maps of the programs."""

    def __init__(self, attached: bool) -> None:
        config = read_text(Config, json.dumps({"programs": PROGRAMS}), "test")
        self.manifest: Manifest
        self.manifest, self._fds = run_loader(load_settings(config))
        if not attached:
            keep = len(self.manifest.maps) + len(self.manifest.functions)
            for fd in self._fds[keep:]:
                os.close(fd)
            del self._fds[keep:]
        self.collector = self.another_collector()

    def another_collector(self) -> Collector:
        return Collector(self.manifest, self._fds)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def attached(host: None) -> Iterator[Programs]:
    programs = Programs(attached=True)
    yield programs
    programs.close()


@pytest.fixture
def detached(host: None) -> Iterator[Programs]:
    programs = Programs(attached=False)
    for _ in range(3):
        drain(programs.collector)
    taken(programs.collector)
    yield programs
    programs.close()


def drain(collector: Collector) -> None:
    """Try to drain until a drain could be done."""
    until = time.monotonic() + 10
    while not collector.drain():
        assert time.monotonic() < until
        time.sleep(0.001)


def taken(collector: Collector) -> list[tuple[Any, Any]]:
    """Return the futex rows that were drained since the last call."""
    return list(zip(*collector.backlogs["futex"].take(1 << 20), strict=True))


def add(collector: Collector, window: int, uaddr: int) -> None:
    """Add an entry to a map of the pair `futex` without a mark, as no program does."""
    table = collector._maps.pairs["futex"][window]
    key, value = np.zeros(1, table.key), np.zeros(1, table.value)
    key["uaddr"], value["calls"] = uaddr, 1
    table.update(key, value)


def has_wakeup(collector: Collector, seconds: float = 0.0) -> bool:
    """Whether a program wakes the collector, within so many seconds."""
    assert collector.wakeups
    return bool(select.select([collector.wakeups], [], [], seconds)[0])


@pytest.mark.parametrize(
    "pause", [0.0, 0.0005, pytest.param(0.02, marks=pytest.mark.thorough("as slowly as usual"))]
)
def test_nothing_is_lost_around_flips(attached: Programs, workload: Start, pause: float) -> None:
    """Flips come as fast as grace periods allow, or so slowly that nobody may have written some windows."""
    collector, manifest = attached.collector, attached.manifest
    lock = manifest.enums["futex_kind"].index("lock")
    one = workload("storm", 2, STORM_SECONDS, 4, 20)
    counted, number = 0, collector.control.number

    def count() -> int:
        mine = one.comm.encode()
        rows = [(key, value) for key, value in taken(collector) if value["who"]["comm"] == mine]
        return sum(int(value["calls"]) for key, value in rows if key["kind"] == lock)

    one.go()
    until = time.monotonic() + STORM_SECONDS + 1
    while time.monotonic() < until:
        collector.drain()
        counted += count()
        time.sleep(pause)
    truth = one.truth()["futex"]["lock"]["waits"]
    collector.end_window()
    for _ in range(3):
        drain(collector)
    counted += count()
    lost = Losses(manifest, collector.losses).read()
    assert lost.overflowed["futex"] == 0
    assert collector.control.number - number > 20
    dropped = sum(count for (map_, _), count in lost.dropped.items() if map_ == "futex")
    assert truth - dropped <= counted <= truth


def test_a_pair_that_was_not_written_is_not_drained(detached: Programs) -> None:
    collector = detached.collector
    number = collector.control.number
    add(collector, collector.control.window, uaddr=64)
    for _ in range(20):
        assert collector.drain()
    assert collector.control.number == number
    assert not taken(collector)
    collector._maps.written.mark("soon")  # another pair was written
    for _ in range(2):
        drain(collector)
    assert collector.control.number == number + 1
    assert not taken(collector)
    for what in ("soon", "futex"):  # the first of these windows writes the other map
        collector._maps.written.mark(what)
        collector._maps.written.mark("soon")
        for _ in range(2):
            drain(collector)
        assert (what == "futex") == bool(taken(collector))


def test_another_sampler_takes_over_what_is_in_either_map(detached: Programs) -> None:
    """A new sampler goes on with the window number of the one before, so that the marks of the programs keep
    their meaning.
    """
    before = detached.collector
    for window, uaddr in ((0, 64), (1, 128)):
        add(before, window, uaddr)
    after = detached.another_collector()
    assert after.control.number == before.control.number
    for _ in range(3):
        drain(after)
    assert sorted(int(key["uaddr"]) for key, _ in taken(after)) == [64, 128]
    assert after.control.number == before.control.number + 1


def test_a_sampler_that_ended_between_flip_and_drain_leaves_all_to_the_next(detached: Programs) -> None:
    before = detached.collector
    add(before, before.control.window, uaddr=64)
    before._maps.written.mark("futex")
    before._maps.written.mark("soon")
    drain(before)  # only flips; another one would drain
    assert not taken(before)
    after = detached.another_collector()
    drain(after)
    assert [int(key["uaddr"]) for key, _ in taken(after)] == [64]


def test_programs_wake_a_collector_that_sleeps_and_no_other(attached: Programs, workload: Start) -> None:
    collector = attached.collector
    busy = workload("storm", 2, STORM_SECONDS, 4, 20)
    until = time.monotonic() + 10
    while not collector.sleep():  # until nothing that has happened so far waits to be drained
        assert time.monotonic() < until
        drain(collector)
    busy.go()
    assert has_wakeup(collector, STORM_SECONDS)
    collector.awake()
    assert not has_wakeup(collector, 0.5)
    busy.truth()


def test_a_collector_sleeps_for_a_window_unless_something_waits(detached: Programs) -> None:
    collector, written = detached.collector, detached.collector._maps.written
    now = time.monotonic()
    assert now < collector.sleep() <= time.monotonic() + LONGEST_WINDOW
    written.mark("processes")
    assert collector.sleep(), "the window goes on"
    written.mark("soon")
    assert not collector.sleep(), "the window has to end with the next tick"
    drain(collector)
    assert not collector.sleep(), "the window has ended, and is to be drained soon"
    drain(collector)
    assert collector.sleep()
    written.mark("processes")
    collector.end_window()
    drain(collector)
    assert collector.sleep(), "the window has ended, and is drained with the next one"
    assert not has_wakeup(collector), "there is no program"
