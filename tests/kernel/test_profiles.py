"""The daemon's profiles of a real workload have the same numbers as its metrics, by stack."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time

import pytest

from tests.needs import need
from tests.support.lockd_process import Lockd
from tests.support.workload import Start


def top(lockd: Lockd, program: str, comm: str, index: str) -> dict[str, tuple[float, float]]:
    """Return by the name of a frame what is in the frame itself, and what is in it with all that it calls."""
    go = need("go")
    url = f"http://{lockd.address}/debug/pprof/{program}?comm={comm}"
    shown = ("-nodefraction=0", "-nodecount=100000", "-unit=us", f"-sample_index={index}")
    command = [go, "tool", "pprof", "-top", *shown, url]
    with tempfile.TemporaryDirectory() as kept:  # for what pprof fetches
        environment = {**os.environ, "PPROF_TMPDIR": kept}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    number = r"\s*([\d.]+)(?:us)?\s+\S+%"
    found = re.findall(rf"^{number}\s+\S+%{number}\s+(.*)$", done.stdout, re.MULTILINE)
    return {name: (float(itself), float(whole)) for itself, whole, name in found}


def named(lockd: Lockd, program: str, comm: str, lock: str) -> dict[str, tuple[float, float]]:
    """Return the number of waits by the name of the frame, as top() does, once the lock has its name."""
    deadline = time.monotonic() + 30
    while lock not in (waits := top(lockd, program, comm, "waits")):
        assert time.monotonic() < deadline, waits
        time.sleep(0.5)
    return waits


def test_locks_of_a_program(narrow: Lockd, workload: Start) -> None:
    locks = workload("mutex_handover", 50, 2000)
    truth = locks.run()["futex"]["lock"]
    metrics = narrow.until(
        lambda now: now.sum("lockd_futex_lock_blocked_total", comm=locks.comm) >= truth["blocked"], 30
    )
    narrow.metrics()
    blocked_us = 1e6 * metrics.sum("lockd_futex_lock_blocked_seconds_total", comm=locks.comm, kind="lock")
    waits = named(narrow, "futex", locks.comm, "mutex_handover:handover_mutex")
    assert waits["mutex_handover:handover_mutex"][0] == truth["blocked"]
    assert waits[locks.comm] == (0, truth["blocked"])
    blocked = top(narrow, "futex", locks.comm, "blocked")
    assert blocked["mutex_handover:handover_mutex"][0] == pytest.approx(blocked_us, abs=2)
    assert any("pthread_mutex_lock" in name for name in blocked)
    page = narrow.get(f"/flamegraph?program=futex&comm={locks.comm}").decode()
    assert "<title>mutex_handover:handover_mutex\n" in page
    locks.finish()


def test_off_the_cpu_the_time_of_each_reason_is_exact(narrow: Lockd, workload: Start) -> None:
    """Samples only divide the time among stacks. The time is exact even for a reason without a sample."""
    locks = workload("mutex_handover", 50, 2000)
    locks.run()
    metrics = narrow.metrics()
    for path in ("offcpu", "wakers"):
        blocked = top(narrow, path, locks.comm, "blocked")
        for reason in ("sleep", "lock"):
            labels = {"comm": locks.comm, "reason": reason}
            assert metrics.sum("lockd_offcpu_blocked_seconds_count", **labels) >= 50
            counted_us = 1e6 * metrics.sum("lockd_offcpu_blocked_seconds_sum", **labels)
            # The innermost frame of a sample of wakers is the waker, that of others the reason.
            assert blocked[reason][1] == pytest.approx(counted_us, abs=2)
    locks.finish()


def test_locks_of_the_kernel(narrow: Lockd, workload: Start) -> None:
    crowd = workload("pipe_crowd", 20, 5, 3000)
    truth = crowd.run()["kernel"]["mutex"]
    metrics = narrow.metrics()
    counted = metrics.sum("lockd_kernel_lock_wait_seconds_count", comm=crowd.comm)
    waits = named(narrow, "kernel_locks", crowd.comm, "pipe->mutex")
    assert waits[crowd.comm][1] == counted >= truth["waits"]
    assert waits["pipe->mutex"][0] >= truth["waits"]
    assert any(name.endswith(("pipe_write", "pipe_read")) for name in waits)
    crowd.finish()
