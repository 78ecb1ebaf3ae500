"""A storm of events: lockd leaves out more and more, says so, counts on, and is itself again afterwards.

docs/restraint.md says what each step saves; these tests do not measure how much. The budget is twice what
lockd takes on this host when little happens. A storm on all CPUs exceeds it many times.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockd.sample.budget.restraint import STEPS
from tests.kernel.test_totals import AGREEING, daemon
from tests.support.lockd_process import Lockd, Metrics
from tests.support.workload import Start, Workload

pytestmark = [
    pytest.mark.timeout(900),  # a storm, and all that comes after it
    pytest.mark.thorough("takes all processors for a minute"),
]

LAST = len(STEPS) - 1
STORM_SECONDS, CALM_SECONDS = 60, 200
"""The length of the storm, which is enough for every step, and the longest time that lockd may then take to
get back to level 0, both in seconds.
"""
LEAST, MOST = 0.005, 0.03
"""The bounds of the budget, as shares of the machine: less is too little where other processes are at work,
and more takes too long to use up.
"""
OWN_OF_KERNELS = (0.3, 1.3)
"""The bounds of the programs' time by lockd, divided by their time by the kernel.

The kernel's time of each run includes a reading of its clock, which is half of a short run. lockd's time is
an estimate from a sample of the runs.
"""
STEP = re.compile(r"restraint from (\d) to (\d): (.*); lockd takes ([\d.]+)% of the machine \(programs ")


def level_of(metrics: Metrics) -> int:
    return int(metrics.sum("lockd_restraint_level"))


def steps_of(lockd: Lockd) -> list[re.Match[str]]:
    """Return the lines in which the daemon has logged its steps."""
    return [found for line in list(lockd.log) if (found := STEP.search(line))]


def wait_for_level(lockd: Lockd, level: int, seconds: float) -> None:
    """Wait until the daemon has logged a step to `level`. Scrapes all the time would exceed its budget."""
    deadline = time.monotonic() + seconds
    while not ((steps := steps_of(lockd)) and int(steps[-1][2]) == level):
        assert time.monotonic() < deadline, "".join(lockd.log)
        time.sleep(0.2)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Lockd]:
    """A daemon that never restrains itself and has room for everybody."""
    config = {"maps": {"entries": 32_768, "threads": 32_768}, "series": {"max": 1_000_000}}
    with daemon(tmp_path_factory.mktemp("large"), **config) as lockd:
        yield lockd


def budget_for(lockd: Lockd) -> str:
    """Return a budget, as a share of the machine: about twice what a daemon without a budget takes now."""
    taken = [lockd.metrics().sum("lockd_cpu_ratio") for _ in range(10)]
    return f"{100 * min(max(2 * sorted(taken)[5], LEAST), MOST):.3f}%"


def left_out(before: Metrics, after: Metrics) -> float:
    """Return the number of runs of programs that the kernel left out between two scrapes, because a sampler
    was preempted in a map operation on that CPU.
    """
    name = "lockd_dropped_events_total"
    return after.sum(name, reason="recursion") - before.sum(name, reason="recursion")


class Storm:
    """What two daemons counted in a storm: `small` with a budget, `large` without."""

    def __init__(self, small: Lockd, large: Lockd, one: Workload, probe: Workload) -> None:
        self._one = one
        self._large_before, self._small_before = large.metrics(), small.metrics()
        one.go()
        wait_for_level(small, LAST, STORM_SECONDS)
        time.sleep(1.0)  # the programs learn of the level with the next window
        self.probed = probe.run()
        """The truth of another process, which ran at the last level."""
        self.at_last = small.metrics()
        self.truth = one.truth()
        self.after, self._large = small.metrics(), large.metrics()

    def check(self, truth: int, name: str, **labels: str) -> None:
        """Assert that nothing is lost and nothing counted twice; `other` may also hold what other processes
        did meanwhile.

        The two daemons may disagree about the kind of the waits of other processes: a storm drives the locks
        of these processes out of the table of known locks, and their waits then get the kind that their
        calls look like.
        """
        any_kind = {label: value for label, value in labels.items() if label not in ("kind", "reason")}
        lost, lost_by_large = (
            left_out(self._small_before, self.after),
            left_out(self._large_before, self._large),
        )
        most = truth + self._foreign(name, **any_kind) + lost_by_large
        others = self.added(name, comm="other", **labels)
        counted = self.after.sum(name, comm=self._one.comm, **labels) + others
        assert truth - lost <= counted <= most, (name, labels, lost, lost_by_large)
        assert 0 < others < counted, (name, labels)

    def _foreign(self, name: str, **labels: str) -> float:
        """Return what all other processes added in the storm, as the daemon without a budget counted it."""
        everybody = self._large.sum(name, **labels) - self._large_before.sum(name, **labels)
        own = {**labels, "comm": self._one.comm}
        return everybody - (self._large.sum(name, **own) - self._large_before.sum(name, **own))

    def added(self, name: str, **labels: str) -> float:
        """Return what the daemon with a budget counted in the storm."""
        return self.after.sum(name, **labels) - self._small_before.sum(name, **labels)


def test_a_storm(large: Lockd, workload: Start, tmp_path: Path) -> None:
    one, probe = workload("storm", 32, STORM_SECONDS, 2), workload("futex_errors", 5, 50, 0)
    last_probe = workload("mutex_handover", 20, 2000)
    with daemon(tmp_path, budget={"cpu": budget_for(large)}) as small:
        assert level_of(small.metrics()) == 0
        storm = Storm(small, large, one, probe)

        # In the storm, lockd counts on.
        assert level_of(storm.after) == LAST
        futex = storm.truth["futex"]["lock"]
        storm.check(futex["waits"], "lockd_futex_waits_total", kind="lock")
        storm.check(futex["blocked"], "lockd_futex_blocked_seconds_count", kind="lock")
        for error, count in storm.truth["errors"].items():
            storm.check(count, "lockd_futex_errors_total", error=error)
        (off,) = storm.truth["offcpu"]
        storm.check(off["count"], "lockd_offcpu_blocked_seconds_count", reason="lock")
        for one_family, another in AGREEING.items():
            expected = pytest.approx(storm.after.sum(another), rel=1e-9)
            assert storm.after.sum(one_family) == expected, one_family
        dropped = storm.added("lockd_dropped_events_total")
        assert dropped == storm.added("lockd_dropped_events_total", reason="recursion")
        assert storm.added("lockd_overflow_events_total", map="futex") > 0

        # At the last step, no process has series under its name; before it, processes have.
        assert storm.probed["errors"]["EAGAIN"] == 50
        assert storm.at_last.sum("lockd_futex_waits_total", comm=probe.comm) == 0
        assert storm.added("lockd_futex_waits_total", comm=one.comm) > 0

        # After the storm, lockd is itself again.
        wait_for_level(small, 0, CALM_SECONDS)
        told = last_probe.run()["futex"]["lock"]
        last = small.metrics()
        assert all(last.sum("lockd_restraint_seconds_total", level=str(level)) for level in range(LAST + 1))
        name = "lockd_futex_lock_blocked_total"
        assert last.sum(name, comm=last_probe.comm, lock="mutex_handover:handover_mutex") == told["blocked"]
        assert small.api("threads", comm=last_probe.comm, kind="lock")

        # The log has every step.
        steps = steps_of(small)
        levels = [(int(found[1]), int(found[2])) for found in steps]
        assert levels[:LAST] == [(0, 1), (1, 2), (2, 3)]
        assert levels[-1] == (1, 0)
        assert all(before == after for (_, before), (after, _) in itertools.pairwise(levels))
        assert all(found[3] == STEPS[int(found[2])] for found in steps)
    for workload_ in (one, probe, last_probe):
        workload_.finish()


def kernels_seconds(pid: int) -> float:
    """Return the kernel's run time of all programs of which a process has descriptors, in seconds."""
    ids: set[int] = set()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        ids |= {int(number) for number in re.findall(r"^prog_id:\s+(\d+)", path.read_text(), re.MULTILINE)}
    told = subprocess.run(["bpftool", "-j", "prog", "show"], capture_output=True, text=True, check=True)
    return sum(one.get("run_time_ns", 0) for one in json.loads(told.stdout) if one["id"] in ids) / 1e9


@pytest.mark.usefixtures("kept_times")
def test_programs_take_the_time_that_the_kernel_says(large: Lockd, workload: Start) -> None:
    one = workload("storm", 32, 14, 2)
    one.go()
    time.sleep(3.0)
    began, before = time.monotonic(), kernels_seconds(large.process.pid)
    own: list[float] = []
    while time.monotonic() < began + 8.0:
        time.sleep(0.5)
        own.append(large.metrics(settled=False).sum("lockd_cpu_ratio", part="programs"))
    kernels = (kernels_seconds(large.process.pid) - before) / (time.monotonic() - began)
    assert len(own) > 1, "a scrape took as long as the storm"
    ratio = sum(own) / len(own) * (os.cpu_count() or 1) / kernels
    assert OWN_OF_KERNELS[0] < ratio < OWN_OF_KERNELS[1], (own, kernels)
    one.truth()
    one.finish()
