"""Tests of the waits that are read from the entries of the BPF programs' maps."""

from __future__ import annotations

import numpy as np

from lockd.kernel.manifest import Manifest
from lockd.sample.locks.waits import LockWaitReader

ENUMS = {
    "state": ["runnable"],
    "futex_kind": ["lock", "pi", "wake"],
    "lock_type": ["mutex", "rwsem", "spinlock"],
}
KEY = np.dtype([("lock", "u8"), ("tid", "u4"), ("cpu", "u4")])
WAIT = np.dtype([("since", "u8"), ("tgid", "u4"), ("type", "u4")])
NO_THREADS = np.zeros(0, "u4"), np.zeros(0, "u1")


def test_a_cpu_that_spins_is_no_thread_that_waits() -> None:
    """The entry of a CPU has no thread id. Thread 0 would be the holder of each lock with no known holder."""
    reader = LockWaitReader(Manifest(0, (), (), (), (), ENUMS, {}), None)
    keys = np.array([(0x1000, 0, 3), (0x2000, 7, 0)], KEY)
    waits = np.array([(500, 70, 2), (600, 70, 1)], WAIT)
    found = reader.read_waits(NO_THREADS, (keys, waits))
    assert len(found) == 1
    assert (wait := found.find(7)) and (wait.address, wait.kind, wait.in_kernel) == (0x2000, "rwsem", True)
    assert len(reader.read_waits(NO_THREADS, (keys[:1], waits[:1]))) == 0
