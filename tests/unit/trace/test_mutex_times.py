"""Times of mutexes that are still held when a trace ends."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockd.trace.core.call_stacks import NO_STACK
from lockd.trace.mutex.times import HELD_BY_NONE, STILL_HELD, MutexTimes

SINCE, THREAD_ENDED, TRACE_ENDED = 1_000, 1_400, 9_000
END = np.dtype([("tgid", "u4"), ("at", "u8"), ("comm", "S16")])
HOLD_KEY = np.dtype([("mutex", "u8"), ("tgid", "u4")])
HOLD = np.dtype([("since", "u8"), ("stack", "u8"), ("freed_at", "u8"), ("tid", "u4")])


@pytest.mark.parametrize("is_zombie", [True, False])
def test_a_hold_ends_with_its_process_even_if_nobody_has_waited_for_that(is_zombie: bool) -> None:
    with subprocess.Popen(["true" if is_zombie else "cat"], stdin=subprocess.PIPE) as child:
        if is_zombie:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        tid = child.pid if is_zombie else 1 << 30
        entries = {
            "mutex_ends": (np.array([tid]), np.array([(child.pid, THREAD_ENDED, b"holder")], END)),
            "mutex_holds": (
                np.array([(0x40, child.pid)], HOLD_KEY), np.array([(SINCE, NO_STACK, 0, tid)], HOLD),
            ),
        }  # fmt: skip
        session: Any = SimpleNamespace(ended_ns=TRACE_ENDED, read_steady=entries.__getitem__)
        stacks: Any = SimpleNamespace(user=lambda _: (), names=SimpleNamespace(variable=lambda *_: "orders"))
        times = MutexTimes(stacks, ())
        times.add_holds(session)
        ((key, measurement),) = times.result(1).items()
    end, state = (THREAD_ENDED, STILL_HELD) if is_zombie else (TRACE_ENDED, HELD_BY_NONE)
    assert (measurement.total, key.state) == (end - SINCE, state)
