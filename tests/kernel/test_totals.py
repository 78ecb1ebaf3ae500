"""Totals are exact where maps are too small: series of its own + `other` + dropped = truth.

What found no place in a map has lost its process, so `other` holds every process's, whatever the filter
says. Told apart it is by what no other program on the host does: priority-inheritance waits and EDEADLK,
off-CPU time for the reason `signal`, waits for a pipe's mutex. Whether another did after all is known
from a second daemon, whose maps are large: so much may `other` hold in addition, mostly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import Start
from lockd_process import Lockd, Metrics
from workload import Workload

Count = Callable[[Metrics], float]


class Comparison:
    """A workload between two scrapes of two daemons: one with small maps, one that has room for all."""

    def __init__(self, small: Lockd, large: Lockd, one: Workload) -> None:
        self._small, self._large, self._one = small, large, one
        self._before = large.metrics(), small.metrics(settled=False)
        self.truth = one.run()
        # The large one's interval holds the small one's.
        self.small = small.metrics()
        self.large = large.metrics()

    def counted(self, name: str, **labels: str) -> float:
        """By the small daemon, of this process and of `other`, since before the workload ran."""
        before = self._before[1].sum(name, comm="other", **labels)
        mine = self.small.sum(name, comm=self._one.comm, **labels)
        return mine + self.small.sum(name, comm="other", **labels) - before

    def dropped(self, program: str, reason: str = "") -> float:
        """By the small daemon."""
        labels = {"map": program, **({"reason": reason} if reason else {})}
        name = "lockd_dropped_events_total"
        return self.small.sum(name, **labels) - self._before[1].sum(name, **labels)

    def overflowed(self, program: str) -> float:
        name = "lockd_overflow_events_total"
        return self.small.sum(name, map=program) - self._before[1].sum(name, map=program)

    def foreign(self, name: str, **labels: str) -> float:
        """Of all other processes, by the large daemon."""
        since = self.large.sum(name, **labels) - self._before[0].sum(name, **labels)
        return since - self.large.sum(name, comm=self._one.comm, **labels)

    def check(self, program: str, truth: int, name: str, **labels: str) -> None:
        """Nothing lost, nothing twice: exactly the truth while no other process does the like."""
        counted, foreign = self.counted(name, **labels), self.foreign(name, **labels)
        print(name, labels, truth, counted, self.dropped(program), foreign)
        assert self.large.sum(name, comm=self._one.comm, **labels) == truth
        assert truth <= counted + self.dropped(program), (name, labels)
        assert counted <= truth + foreign, (name, labels)


@contextmanager
def daemon(directory: Path, **config: Any) -> Iterator[Lockd]:
    """One with a configuration of its own, which must end well."""
    lockd = Lockd(directory, config)
    try:
        yield lockd
    finally:
        code = lockd.stop()
    assert code == 0, "".join(lockd.log)


def test_futex_waits_that_find_no_place(lockd: Lockd, workload: Start, tmp_path: Path) -> None:
    one = workload("many_addrs", 5000, 500, 1)
    with daemon(tmp_path, maps={"entries": 64}, filter={"comms": [one.comm]}) as small:
        run = Comparison(small, lockd, one)
    for kind, told in run.truth["futex"].items():
        run.check("futex", told["waits"], "lockd_futex_waits_total", kind=kind)
        run.check("futex", told["blocked"], "lockd_futex_blocked_seconds_count", kind=kind)
    for error, count in run.truth["errors"].items():
        run.check("futex", count, "lockd_futex_errors_total", error=error)
    assert run.overflowed("futex") > 4000
    one.finish()


def test_absences_that_find_no_place(lockd: Lockd, workload: Start, tmp_path: Path) -> None:
    one = workload("crowd", 300, 50, 20_000)
    with daemon(tmp_path, maps={"entries": 64}, filter={"comms": [one.comm]}) as small:
        run = Comparison(small, lockd, one)
    for told in run.truth["offcpu"]:
        labels = {"state": told["state"], "reason": told["reason"]}
        run.check("offcpu", told["count"], "lockd_offcpu_blocked_seconds_count", **labels)
    assert run.overflowed("offcpu") > 1000
    one.finish()


def test_kernel_lock_waits_that_find_no_place(lockd: Lockd, workload: Start, tmp_path: Path) -> None:
    one = workload("pipe_crowd", 200, 5, 3000)
    with daemon(tmp_path, maps={"entries": 64}, filter={"comms": [one.comm]}) as small:
        run = Comparison(small, lockd, one)
    for lock_type, told in run.truth["kernel"].items():
        run.check("kernel_locks", told["waits"], "lockd_kernel_lock_wait_seconds_count", lock_type=lock_type)
    assert run.overflowed("kernel_locks") > 100
    one.finish()


def test_threads_that_find_no_place(lockd: Lockd, workload: Start, tmp_path: Path) -> None:
    one = workload("crowd", 300, 50, 20_000, 1)
    with daemon(tmp_path, maps={"threads": 64}, filter={"comms": [one.comm]}) as small:
        run = Comparison(small, lockd, one)
    print("futex dropped", run.dropped("futex", "threads_full"), run.dropped("futex"))
    print(run.counted("lockd_futex_waits_total", kind="lock"), run.foreign("lockd_futex_waits_total"), run.foreign("lockd_futex_wakes_total"))
    print("offcpu dropped", run.dropped("offcpu", "threads_full"), run.dropped("offcpu"), run.foreign("lockd_offcpu_blocked_seconds_count"))
    one.finish()
