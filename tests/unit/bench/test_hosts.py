"""Tests of bench/hosts.py: each copy of the recorded host has threads and processes of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.hosts import FIRST_ID, OF_PROCESS, THREADS, Copies, Recording
from lockd.sample.budget.restraint import DETAIL, PROCESSES

WHO = np.dtype([("comm", "S16"), ("tgid", "u4")])
KEYS = {
    "futex": np.dtype([("uaddr", "u8"), ("tid", "u4"), ("slot", "u4")]),
    "offcpu": np.dtype([("tid", "u4"), ("waker", "u4"), ("slot", "u8")]),
    "kernel_locks": np.dtype([("lock", "u8"), ("tid", "u4"), ("slot", "u4")]),
}
THREAD = np.dtype([("tgid", "u4"), ("waker", "u4")])
TIDS = (10, 11, 20)
TGIDS = (10, 10, 20)


@pytest.fixture
def recording() -> Recording:
    """Return a recording of two threads of a process and one of another. Each is in both windows."""
    windows = []
    for slot in (1, 2):
        window = {}
        for name, dtype in KEYS.items():
            keys, values = np.zeros(3, dtype), np.zeros(3, [("count", "u8"), ("who", WHO)])
            keys["tid"], keys["slot"] = TIDS, slot
            values["who"]["tgid"], values["who"]["comm"] = TGIDS, (b"one", b"one", b"a-name-of-15-by")
            window[name] = keys, values
        window["offcpu"][0]["waker"] = 20, 0, 10
        windows.append(window)
    threads = np.zeros(3, THREAD)
    threads["tgid"] = TGIDS
    return Recording(windows, (np.array(TIDS, np.uint32), threads), 1000.0, 1e-6)


def words(keys: Any) -> set[bytes]:
    return {key.tobytes() for key in keys}


def test_each_copy_has_threads_of_its_own(recording: Recording) -> None:
    copies = Copies(recording, 5)
    for keys, values in copies.window(1, 0).values():
        assert len(words(keys)) == len(keys) == 15
        assert len(set(keys["tid"].tolist())) == 15
        assert min(keys["tid"]) > FIRST_ID
        assert len(set(values["who"]["comm"].tolist())) == 10
    tids, threads = copies.threads()
    assert len(tids) == len(set(tids.tolist())) >= THREADS
    assert set(copies.window(1, 0)["futex"][1]["who"]["tgid"].tolist()) <= set(threads["tgid"].tolist())
    assert 0 in copies.window(1, 0)["offcpu"][0]["waker"], "an interrupt is the same everywhere"


def test_a_longer_window_has_what_comes_in_all_its_periods(recording: Recording) -> None:
    copies = Copies(recording, 5)
    assert len(copies.window(2, 0)["futex"][0]) == 2 * 15
    assert len(copies.window(4, 0)["futex"][0]) == 2 * 15, "the same comes again"


def test_restraint_leaves_out_what_the_programs_leave_out(recording: Recording) -> None:
    copies = Copies(recording, 5)
    for keys, _ in copies.window(1, DETAIL).values():
        assert len(words(keys)) == len(keys) == 10
        assert (keys["tid"] & OF_PROCESS).all()
    for keys, values in copies.window(1, PROCESSES).values():
        assert len(words(keys)) == len(keys) <= 2
        assert not keys["tid"].any()
        assert not values["who"]["tgid"].any()
