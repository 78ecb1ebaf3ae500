"""What the tests of times share: how far a time may be from the truth, and when to read it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.lockd_process import Lockd, Metrics
from tests.support.workload import Workload
from tests.tries import tries

TRIES = 5

beside_another_tool = pytest.mark.thorough("what another tool says; what is true, other tests here say")

mode_calls_is_thorough = pytest.mark.parametrize(
    "either",
    [
        "blocked",
        pytest.param("calls", marks=pytest.mark.thorough("what both modes have in common")),
    ],
    indirect=True,
)
"""Marks a long test of the fixture `either`: `make test` runs it in mode blocked alone."""

SHARE = 0.03
PER_WAIT_US = 300
"""The tolerance of a time: 3% or 300 us for each wait, whichever is more."""
PER_SWITCH_US = 50
"""The time between the kernel's accounting of a thread's time and the switch that lockd sees, at most."""
REST_SECONDS = 10.0
SPINS = ("spinlock", "rwlock_read", "rwlock_write")
"""Types of kernel locks for which threads spin.

If the kernel skips the program at the end of such a wait, lockd takes the wait to go on for ten seconds.
"""


def about(told_us: float, waits: float = 1) -> Any:
    """Return a value that equals each time within the tolerance of `told_us`, the truth of `waits` waits."""
    return pytest.approx(told_us, rel=SHARE, abs=PER_WAIT_US * waits)


def at_rest(lockd: Lockd, comm: str) -> Metrics:
    """Return the metrics once all that happened is counted and no thread of `comm` is said to sleep for a
    lock."""
    lockd.metrics()

    def none_waits(metrics: Metrics) -> bool:
        name = "lockd_kernel_lock_waiting"
        of_kernel = metrics.labels(name, comm=comm)
        sleeping = [metrics.sum(name, **one) for one in of_kernel if one["lock_type"] not in SPINS]
        return not (metrics.sum("lockd_futex_waiting", comm=comm) or any(sleeping))

    return lockd.until(none_waits, REST_SECONDS)


def until_names_come(lockd: Lockd, first: Workload) -> None:
    """Run a workload that waits for a lock, until the lock has its name.

    A namer may take longer to start than a wait is held back for the name of its lock.
    """
    first.run()
    lockd.waited_for(comm=first.comm)
    first.finish()


def in_one_of_some_tries(attempt: Callable[[], list[str]]) -> None:
    """Fail unless `attempt` returns an empty list in one of TRIES tries.

    `attempt` returns messages about times that are off, if a disturbance can explain them. Programs time
    their waits from outside: what interrupts and the hypervisor take while a program is about to wait, or
    has waited, is in its truth too.
    """
    off: list[list[str]] = []
    for _ in tries(TRIES):
        off.append(attempt())
        if not off[-1]:
            return
    pytest.fail(f"off in each of {TRIES} tries: {off}")


def off(
    what: str,
    seen_us: float,
    told_us: float,
    waits: float = 1,
    more_us: float = 0,
    least_us: float | None = None,
) -> list[str]:
    """Return a message in a list if the time `seen_us` is not about the truth `told_us`; else an empty list.

    Fails at once if the time is too long: beyond the tolerance, and at least `more_us` above the truth.

    The truth may have a lower bound `least_us`, which the kernel tells (tests/workloads/workload.h). Then
    any shorter time down to this bound less `more_us` and the tolerance PER_SWITCH_US is right too. `more_us`
    is the time that the threads that waited were on the run queue.
    """
    words = f"{what}: {seen_us:.0f} us, truth {told_us:.0f} us, at least {least_us} us"
    is_about = seen_us == about(told_us, waits)
    assert is_about or seen_us < told_us + more_us, words
    is_possible = least_us is not None and seen_us >= least_us - more_us - PER_SWITCH_US * waits
    return [] if is_about or is_possible else [words]


def stolen_us() -> float:
    """Return the time that the hypervisor has taken from all CPUs so far, in us."""
    ticks = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    return ticks / os.sysconf("SC_CLK_TCK") * 1e6
