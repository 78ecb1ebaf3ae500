"""The wakers of threads off the CPU, by the names that their processes have when the waits are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockd.sample.aggregates.window import make_window
from tests.support.busy_host import MS, NR_WAIT, OFFCPU, OFFCPU_KEY, BusyHost
from tests.support.small_procfs import Procfs

SHELL, CHILD = 70, 71


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
    who = (host.units.number("shop.service"), b"sh", b"sh", SHELL, 0)
    keys = np.array([(SHELL, waker, NR_WAIT, 0, 0, 0, 12, 5, 0)], OFFCPU_KEY)
    values = np.array([(1, 30 * MS, 30 * MS, MS, who)], OFFCPU)
    host.offcpu.fold(make_window(keys, values, host._identities, has_overflowed=False), host.now)
    _, labels = host.offcpu.wakers.live()
    assert labels == [("shop.service", "sh", name)]
