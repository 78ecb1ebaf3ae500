"""The wakers of threads off the CPU, by the names that their processes have when the waits are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockd.kernel.pairs import Entries
from lockd.sample.aggregates.window import make_window
from tests.support.busy_host import MS, NR_WAIT, OFFCPU, OFFCPU_KEY, BusyHost
from tests.support.small_procfs import Procfs

SHELL, CHILD = 70, 71


def woken(host: BusyHost, waker: int) -> Entries:
    """The drained entry of a wait of SHELL that this process ended."""
    who = (host.units.number("shop.service"), b"sh", b"sh", SHELL, 0)
    keys = np.array([(SHELL, waker, NR_WAIT, 0, 0, 0, 12, 5, 0)], OFFCPU_KEY)
    return keys, np.array([(1, 30 * MS, 30 * MS, MS, who)], OFFCPU)


def name_in_series(host: BusyHost, entries: Entries) -> str:
    """Fold the entry, and return the name of its waker."""
    host.offcpu.fold(make_window(*entries, host._identities, has_overflowed=False), host.now)
    _, [(unit, comm, waker)] = host.offcpu.wakers.live()
    assert (unit, comm) == ("shop.service", "sh")
    return waker


@pytest.mark.parametrize(
    ("waker", "lives", "name"),
    [(CHILD, True, "true"), (CHILD, False, "unknown"), (0, False, "irq")],
    ids=["it lives", "it has ended", "none"],
)
def test_the_name_of_a_waker(tmp_path: Path, waker: int, lives: bool, name: str) -> None:
    """A child that ends without having slept wakes its parent, and no event of its own has told its name."""
    procfs, host = Procfs(tmp_path), BusyHost(tmp_path)
    if lives:
        procfs.add(CHILD, b"true")
    assert name_in_series(host, woken(host, waker)) == name


def test_a_waker_has_the_name_of_the_time_of_the_wait_and_not_of_the_fold(tmp_path: Path) -> None:
    procfs, host = Procfs(tmp_path), BusyHost(tmp_path)
    procfs.add(CHILD, b"true")
    entries = woken(host, CHILD)
    host.offcpu.name_wakers(entries[0])
    host._identities._processes.learn(CHILD, 0, b"other", kernel_thread=False)
    procfs.remove(CHILD)
    assert name_in_series(host, entries) == "true"
