"""Every mechanism against the kernel test module, which knows every wait for its locks and every hold.

The daemons of all mechanisms run at the same time, so that they see the same events.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.lock_module import LOCK_TYPES, LockModule, Truth
from tests.support.lock_scripts import CROWDS, scripts
from tests.support.lockd_process import Lockd, Metrics
from tests.support.mechanisms import Daemons, asked_for
from tests.support.workload import Start
from tests.tries import note

WAITS, WAITED = "lockd_kernel_lock_wait_seconds_count", "lockd_kernel_lock_wait_seconds_sum"
MAX_WAIT = "lockd_kernel_lock_max_wait_us"
TAKEN = "lockd_kernel_lock_acquisitions_total"
DROPPED = "lockd_dropped_events_total"
HOLDS, HELD = "lockd_kernel_lock_hold_seconds_count", "lockd_kernel_lock_hold_seconds_sum"

BY_DEFAULT = "auto"
MECHANISMS = (
    BY_DEFAULT,
    *(
        pytest.param(mechanism, marks=pytest.mark.thorough("lockd chooses the best that the kernel has"))
        for mechanism in ("fentry", "kprobe")
    ),
)
SHARE, EACH_US = 0.05, 500
"""The tolerance of times: this share, or so many microseconds for each wait or hold, whichever is more."""
TRIES = 3
"""How often a script is run at most. An emulated machine may stand still between the moment at which the
module reads the clock and that at which lockd does."""

MOST_ROWS = 1000
"""The most rows that lockd returns at a time."""

Counts = dict[str, tuple[float, ...]]
"""Waits, acquisitions and holds, by lock type."""

pytestmark = pytest.mark.timeout(1500)  # several daemons start at the same time


@dataclass(frozen=True)
class Lost:
    """Events of kernel locks that were counted as lost, of all processes."""

    left_out: float
    """Events at which the kernel skipped a program, because it was already running on that processor. This
    happens with trampolines too. If an acquisition is left out, its hold is not counted either."""
    other: float

    def __sub__(self, before: Lost) -> Lost:
        return Lost(self.left_out - before.left_out, self.other - before.other)

    @property
    def excuses(self) -> float:
        """The number of events that may be missing from the counts."""
        return 2 * self.left_out + self.other


class Bench:
    """The module, a daemon for each mechanism that this kernel offers, and what was run so far."""

    def __init__(self, directory: Path, module: LockModule, mechanisms: Collection[str]) -> None:
        self._module = module
        self.daemons = Daemons(directory, mechanisms, _config)
        self.seen = self.daemons.metrics()
        """The metrics of each daemon, with everything that has been run."""
        self.lost: dict[tuple[str, str], Lost] = {}
        """The losses by comm and mechanism, while the script of this comm ran and those of the same batch."""
        self._scripts = {**scripts(), **CROWDS}
        self._truths: dict[str, Truth] = {}
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def result(self, name: str, attempt: int) -> tuple[str, Truth]:
        """Return the name of the threads and the truth of a run of a script. All mechanisms share the run."""
        if not self._truths:
            self._run(list(scripts()), 0)
            for crowd in CROWDS:
                self._run([crowd], 0)
        comm = self._comm(name, attempt)
        note(attempt, comm not in self._truths)
        if comm not in self._truths:
            self._run([name], attempt)
        return comm, self._truths[comm]

    def rows(self, name: str, by: str, attempt: int = 0) -> list[dict[str, Any]]:
        """Return the rows of the daemon `by` for the locks of a script's first run, or of a further one."""
        comm, _ = self.result(name, attempt)
        if by not in self._rows:
            self._rows[by] = self.daemons[by].api("locks", unit="kernel", limit=str(MOST_ROWS))
            assert len(self._rows[by]) < MOST_ROWS
        return [row for row in self._rows[by] if row["comm"] == comm]

    def waited_for(self, name: str, by: str) -> list[dict[str, Any]]:
        """Return the rows of the locks that a script's threads waited for, in a run whose waits were seen.

        Locks without waits are left out: a thread takes mutexes of its own as it ends, and if their release
        is lost, they are shown as held, under the name that the thread had when lockd learnt it. Spinlocks
        are left out as well: any thread may wait for one of those.
        """
        for attempt in range(TRIES):
            rows = [row for row in self.rows(name, by, attempt) if row["kind"] in LOCK_TYPES]
            rows = [row for row in rows if row["blocked_count"]]
            if rows:
                return rows
            comm, _ = self.result(name, attempt)
            assert self.lost[comm, by].excuses, "its waits are neither counted nor counted as lost"
        pytest.fail(f"all waits were lost in each of {TRIES} tries")

    def _run(self, names: list[str], attempt: int) -> None:
        comms = {self._comm(name, attempt): self._scripts[name] for name in names}
        self._rows.clear()
        for comm, script in comms.items():
            self._truths[comm] = self._module.run(script, comm)
        before, self.seen = self.seen, self.daemons.metrics()
        self._module.end_threads()
        for by, metrics in self.seen.items():
            during = lost(metrics) - lost(before[by])
            self.lost |= {(comm, by): during for comm in comms}

    def _comm(self, name: str, attempt: int) -> str:
        return f"lt{list(self._scripts).index(name)}.{attempt}"


def _config(mechanism: str) -> dict[str, Any]:
    off = {"enabled": False}
    locks = {"mode": "all", "mechanism": mechanism}
    return {
        "programs": {"futex": off, "offcpu": off, "kernel_locks": locks},
        "filter": {"comms": ["lt*"]},
        "series": {"max": 100_000, "top_locks": 1000},
        "histogram": {"buckets_us": [1024]},  # each bucket is a line for each script, to be written and read
    }


@pytest.fixture(scope="module")
def bench(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    lockd: Lockd,
    module: LockModule,
) -> Iterator[Bench]:
    """The bench. The daemon of the default configuration (`lockd`) runs beside it from the beginning."""
    mechanisms = sorted({BY_DEFAULT} | asked_for(request, "by"))
    bench = Bench(tmp_path_factory.mktemp("by"), module, mechanisms)
    yield bench
    bench.daemons.stop()


@pytest.fixture(params=MECHANISMS)
def by(request: pytest.FixtureRequest, bench: Bench, record_property: pytest.RecordProperty) -> str:
    """A mechanism that this kernel offers."""
    mechanism: str = request.param
    for what in ("waits", "holds"):
        record_property(f"kernel_locks {what}", mechanism)
    _ = bench.daemons[mechanism]
    return mechanism


def labels_of(comm: str, lock_type: str) -> dict[str, str]:
    return {"unit": "kernel", "comm": comm, "lock_type": lock_type}


def counts(metrics: Metrics, comm: str) -> Counts:
    """Return the numbers of waits, acquisitions and holds by lock type."""
    return {
        lock_type: tuple(metrics.sum(name, **labels_of(comm, lock_type)) for name in (WAITS, TAKEN, HOLDS))
        for lock_type in LOCK_TYPES
    }


def true_counts(truth: Truth) -> Counts:
    return {
        lock_type: (told.waits, told.acquisitions, told.holds) for lock_type, told in truth.threads.items()
    }


def off(metrics: Metrics, comm: str, truth: Truth) -> list[str]:
    """Words for each time that is not near the truth."""
    found = []
    for lock_type, told in truth.threads.items():
        labels = labels_of(comm, lock_type)
        times = {
            "waits": (metrics.sum(WAITED, **labels) * 1e6, told.wait_ns / 1e3, told.waits),
            "longest wait": (metrics.max(MAX_WAIT, window="5m", **labels), told.max_wait_ns / 1e3, 1),
            "holds": (metrics.sum(HELD, **labels) * 1e6, told.hold_ns / 1e3, told.holds),
        }
        for what, (seen_us, told_us, count) in times.items():
            if seen_us != pytest.approx(told_us, rel=SHARE, abs=EACH_US * count):
                found.append(f"{lock_type}, {what}: {seen_us:.0f} us, truth {told_us:.0f} us, count {count}")
    return found


@pytest.mark.parametrize("name", scripts())
def test_counts_are_exact_and_times_right(name: str, by: str, bench: Bench) -> None:
    found = []
    for attempt in range(TRIES):
        comm, truth = bench.result(name, attempt)
        metrics = bench.seen[by]
        seen, told = counts(metrics, comm), true_counts(truth)
        if seen == told:
            found.append(off(metrics, comm, truth))
            if not found[-1]:
                return
        else:
            losses = bench.lost[comm, by]
            assert difference(seen, told) <= losses.excuses
            found.append([f"seen {seen}, truth {told}, {losses}"])
    pytest.fail(f"off in each of {TRIES} tries: {found}")


def difference(seen: Counts, told: Counts) -> float:
    """Return the number of events that are in one of the counts and not in the other."""
    return sum(abs(one - other) for each in told for one, other in zip(seen[each], told[each], strict=True))


def lost(metrics: Metrics) -> Lost:
    """Return the events that had been lost by the time of these metrics."""
    of = [{"map": "kernel_locks"}, {"map": "kernel_holds"}]
    left_out = sum(metrics.sum(DROPPED, **labels, reason="recursion") for labels in of)
    return Lost(left_out, sum(metrics.sum(DROPPED, **labels) for labels in of) - left_out)


@pytest.mark.parametrize("name", CROWDS)
def test_a_crowd_loses_nothing_that_is_not_counted(name: str, by: str, bench: Bench) -> None:
    """Many threads are in one function at a time, and a kretprobe follows only a few of them."""
    found = []
    for attempt in range(TRIES):
        comm, truth = bench.result(name, attempt)
        metrics = bench.seen[by]
        seen, told = counts(metrics, comm), true_counts(truth)
        losses = bench.lost[comm, by]
        if not losses.left_out:
            assert [taken for _, taken, _ in seen.values()] == [taken for _, taken, _ in told.values()]
        if by == "kprobe" or losses.left_out:
            assert difference(seen, told) <= losses.excuses
            return
        assert seen == told
        found.append(off_in_a_crowd(metrics, comm, truth))
        if not found[-1]:
            return
    pytest.fail(f"off in each of {TRIES} tries: {found}")


def off_in_a_crowd(metrics: Metrics, comm: str, truth: Truth) -> list[str]:
    """Words for each time that is not near the truth.

    Of so many threads, some are preempted on their way into the wait. This time is in the truth alone: always
    in its sum, and now and then in its longest wait.
    """
    found = []
    for lock_type, each in truth.threads.items():
        labels = labels_of(comm, lock_type)
        waited_us, held_us = (metrics.sum(name, **labels) * 1e6 for name in (WAITED, HELD))
        max_us = metrics.max(MAX_WAIT, window="5m", **labels)
        longest_us = each.max_wait_ns / 1e3
        assert waited_us <= each.wait_ns / 1e3
        assert max_us <= longest_us * (1 + SHARE)
        if max_us < longest_us * (1 - SHARE):
            found.append(f"{lock_type}, longest wait: {max_us:.0f} us, truth {longest_us:.0f} us")
        if held_us != pytest.approx(each.hold_ns / 1e3, rel=SHARE, abs=EACH_US * each.holds):
            found.append(f"{lock_type}, holds: {held_us:.0f} us, truth {each.hold_ns / 1e3:.0f} us")
    return found


NAMED = {
    "contended mutex_lock": "lockd_test_mutex",
    "contended down_read": "lockd_test_rwsem",
    "contended down": "lockd_test_semaphore",
}


@pytest.mark.parametrize("name", NAMED)
def test_static_locks_have_names(name: str, by: str, bench: Bench) -> None:
    assert {row["lock"] for row in bench.waited_for(name, by)} == {NAMED[name]}


NO_SITES = {"unknown"}


def is_blind_to_callers(bench: Bench) -> bool:
    """Whether a daemon with kprobes hides the callers of its probed functions from the other daemons.

    Kernels before 5.15 cannot walk a stack through the trampoline of a kretprobe. test_kernel_sites.py tests
    the sites that are seen without such a daemon.
    """
    return "kprobe" in bench.daemons.running and tuple(
        int(part) for part in platform.release().split(".")[:2]
    ) < (5, 15)


WAITERS = [name.removeprefix("contended ") for name in scripts() if name.startswith("contended ")]


@pytest.mark.parametrize("function", WAITERS)
def test_sites_are_where_the_module_asks_for_a_lock(function: str, by: str, bench: Bench) -> None:
    sites = {row["site"] for row in bench.waited_for(f"contended {function}", by)}
    # Where call_FUNCTION() only returns what the kernel's function returns, the compiler makes a jump of the
    # call, and the site is a caller of call_FUNCTION().
    expected = {f"call_{function}", "take", "do_step"}
    assert sites <= (NO_SITES if is_blind_to_callers(bench) else expected)


@pytest.mark.parametrize(
    ("fault", "site"), [(0, r"\w*mincore"), (1, r"lock_mm_and_find_vma|do_user_addr_fault|exc_page_fault")]
)
def test_names_of_the_lock_of_an_address_space(fault: int, site: str, bench: Bench, workload: Start) -> None:
    one = workload("mmap_lock", 20, 64, fault, comm=f"ltmm{fault}")
    one.run()
    for daemon in bench.daemons.running.values():
        rows = daemon.waited_for(comm=one.comm, kind="rwsem_read")  # other locks were only held
        assert {row["lock"] for row in rows} == {"mmap_lock"}
        expected = "unknown" if is_blind_to_callers(bench) else site
        assert [row["site"] for row in rows if not re.fullmatch(expected, row["site"])] == []
    one.finish()


@pytest.fixture(scope="module")
def seen_by_default(lockd: Lockd, bench: Bench) -> Metrics:
    """The metrics of the daemon of the default configuration, after all scripts."""
    bench.result(next(iter(NAMED)), 0)
    return lockd.metrics()


@pytest.mark.parametrize("name", NAMED)
def test_by_default_waits_are_counted_and_no_holds(
    name: str, seen_by_default: Metrics, bench: Bench, record_property: pytest.RecordProperty
) -> None:
    record_property("kernel_locks waits", "auto")
    comm, truth = bench.result(name, 0)
    for lock_type, (waits, _, _) in true_counts(truth).items():
        labels = labels_of(comm, lock_type)
        assert [seen_by_default.sum(name, **labels) for name in (WAITS, TAKEN, HOLDS)] == [waits, 0, 0]
