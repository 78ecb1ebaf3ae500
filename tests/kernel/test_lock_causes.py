"""What the holder of a user-space lock does while others wait for it, against a program that knows it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.test_cgroups import remove
from tests.kernel.test_holders import ELSEWHERE, POINTS, REFUSED, Program, build, name
from tests.support.cgroups import mounted
from tests.support.checks import in_one_of_some_tries, mode_calls_is_thorough, until_names_come
from tests.support.lockd_process import Lockd
from tests.support.workload import BUILD, Workload

PROGRAM = "lock_causes"
METRIC = "lockd_futex_lock_cause_seconds_total"
ASKERS, SECONDS = 3, 4
LOCKS = ("normal", "recursive", "pi", "rwlock")
"""Locks of glibc. lockd finds the holder of each in a different way."""
CAUSES = ("mixed", "running", "sleep", "socket", "poll", "lock", "disk")
ALIKE = pytest.mark.thorough("what a holder does has nothing to do with the lock; others are of this kind")
CASES = [("normal", cause) for cause in CAUSES] + [(lock, "mixed") for lock in LOCKS if lock != "normal"]
DEPTHS = [
    pytest.param(2, marks=pytest.mark.thorough("a part of the chain of three locks")),
    3,
    pytest.param(5, marks=pytest.mark.thorough("a longer chain of the same links")),
]
"""The number of locks in a chain."""
QUOTA_US, PERIOD_US = 4000, 20_000
LEAST_THROTTLED = 0.5
"""The least share of the held time for which a holder with this quota waits for a processor."""
MOST_UNKNOWN = 0.08
"""The largest share of `unknown` where a lock stores no owner, and its holder sleeps once in each hold."""
MOST_UNKNOWN_OF_SHORT = 0.15
"""The largest share of `unknown` where holds are short: a thread waits for several holders in turn, and only
the last one is known."""
MOST_UNKNOWN_OF_PREEMPTED = 0.8
"""The largest share of `unknown` where a lock stores no owner, and its holder computes. What it did before it
last lost its CPU is not known, and on a busy host that is most of a long hold."""
BUSY_THREADS = 32
"""The number of threads. Eight of them share one mutex and wait for it for a second in all, which is enough
for hundreds of samples."""
OF_A_PID_NAMESPACE = ("--pid", "--mount-proc", "--fork", "--kill-child")

Seconds = dict[str, float]
"""Seconds of waiting by cause."""
Throttle = Callable[[Workload], None]


def causes(lockd: Lockd, comm: str, lock: str = "") -> Seconds:
    """Return for how long threads of a process waited for a lock, by what its holders did; for all locks of
    the process if `lock` is empty."""
    metrics, found = lockd.metrics(), defaultdict[str, float](float)
    for labels in metrics.labels(METRIC, comm=comm):
        if not lock or labels["lock"].rpartition(":")[2] == lock:
            found[labels["cause"]] += metrics.sum(METRIC, **labels)
    return found


def assert_found(
    lockd: Lockd, lock: str, start: Callable[[], Workload], throttle: Throttle | None = None
) -> None:
    """Assert that lockd finds what the holder did, as the program tells it, in one of some tries.

    The program takes some of its times outside of the calls. These are right as far as the program gets its
    processors.
    """

    def attempt() -> list[str]:
        one = start()
        try:
            one.hurry()
            one.run()
            if throttle:
                throttle(one)
            before, refused = causes(lockd, one.comm, lock), -lockd.metrics().sum(REFUSED)
            truth = one.run()
            after = causes(lockd, one.comm, lock)
            refused += lockd.metrics().sum(REFUSED)  # of the locks of any process
        finally:
            one.kill()
        found = {cause: seconds - before.get(cause, 0.0) for cause, seconds in after.items()}
        total = sum(found.values())
        print(one.comm, lock, truth, found, f"{total:.3f} s, {refused:.3f} s refused")
        if not total:
            return [f"nothing of {lock}"]
        if throttle:
            assert truth["queued_us"] > LEAST_THROTTLED * truth["held_us"], "it is not throttled"
        shares = {cause: seconds / total for cause, seconds in found.items()}
        off = off_total(truth, total, refused, may_spin=lock == "pi") + off_shares(truth, shares)
        return off + (off_runqueue(truth, shares) if throttle else [])

    in_one_of_some_tries(attempt)


def off_total(truth: dict[str, Any], total: float, refused: float, may_spin: bool) -> list[str]:
    """Return words if the sum over all causes is not the time that threads waited while the lock was held.

    Since 5.16 the first thread in the queue of a PI mutex spins while the holder runs (`may_spin`). So the
    sum may lack the time that threads waited while the holder ran, but no time of the other causes.
    """
    causes = {cause: us for cause, us in truth["causes"].items() if not (may_spin and cause == "running")}
    waited, of_holder = truth["waited_us"] / 1e6, sum(causes.values()) / 1e6
    if total > waited * (1 + POINTS):
        return [f"{total} s, not {waited} s"]
    return [f"{total} s, not {of_holder} s"] if total + refused < of_holder * (1 - POINTS) else []


def off_shares(truth: dict[str, Any], shares: dict[str, float]) -> list[str]:
    """Return words for each cause that has another share than in the truth.

    In the program's truth, "running" is the time on a CPU and that on the run queue. The time that threads
    waited between two holds has no cause there: the lock has been released, and the next thread is about to
    take it. lockd counts this time for the next thread, if it finds out which thread that is.
    """
    waited, of_holder = truth["waited_us"], sum(truth["causes"].values())
    others = {cause: share for cause, share in shares.items() if cause not in (*truth["causes"], "runqueue")}
    nobody = 1 - of_holder / waited
    others["unknown"] = others.get("unknown", 0.0) - nobody
    off = [f"{cause}: {share:.3f}" for cause, share in others.items() if share > ELSEWHERE]
    for cause, us in truth["causes"].items():
        share, least, most = shares.get(cause, 0.0), us / waited, us / of_holder
        if cause == "running":
            share += shares.get("runqueue", 0.0)
            most += nobody
        if not least - POINTS <= share <= most + POINTS:
            off.append(f"{cause}: {share:.3f}, not {least:.3f} to {most:.3f}")
    return off


def off_runqueue(truth: dict[str, Any], shares: dict[str, float]) -> list[str]:
    """Return words if the share of the cause `runqueue` is not what the kernel has counted for the holder."""
    share, told = shares.get("runqueue", 0.0), truth["runqueue_us"] / truth["waited_us"]
    return [f"runqueue: {share:.3f}, not {told:.3f}"] if abs(share - told) > POINTS else []


@mode_calls_is_thorough
@pytest.mark.parametrize(("lock", "cause"), CASES)
def test_what_the_holder_does_is_found(either: Lockd, scratch: Path, lock: str, cause: str) -> None:
    def start() -> Workload:
        return Workload(PROGRAM, lock, cause, ASKERS, SECONDS, scratch, comm=name(cause))

    assert_found(either, lock, start)


WITHOUT_OWNER = [
    pytest.param("musl", "holders_musl", "normal", marks=ALIKE),
    pytest.param("rust", "holders_rust", "std", marks=ALIKE),
    ("rust", "holders_rust", "parking"),
]
"""Locks that do not store their owner: target of the Makefile, program and lock."""


@mode_calls_is_thorough
@pytest.mark.parametrize(("target", "program", "lock"), WITHOUT_OWNER, ids=str)
def test_a_lock_that_does_not_store_its_owner(either: Lockd, target: str, program: str, lock: str) -> None:
    """The holder sleeps once in each hold, and only what it did before the sleep is `unknown`."""
    build(target, program)

    def attempt() -> list[str]:
        one = Program(program, lock, 1, SECONDS, comm=name(lock))
        one.hurry()
        one.run()
        before = causes(either, one.comm)
        truth = one.run()
        found = {cause: us - before.get(cause, 0.0) for cause, us in causes(either, one.comm).items()}
        one.kill()
        print(truth, found)
        total, unknown = sum(found.values()), found.pop("unknown", 0.0)
        if total == unknown:
            return [f"no cause in {found}"]
        off = [] if unknown < MOST_UNKNOWN * total else [f"unknown: {unknown / total:.3f}"]
        share = found.get("sleep", 0.0) / sum(found.values())
        return off + ([f"sleep: {share:.3f}"] if share < 1 - POINTS else [])

    in_one_of_some_tries(attempt)


@mode_calls_is_thorough
def test_what_the_holder_did_before_anybody_waited_is_no_cause(either: Lockd) -> None:
    """The lock stores no owner. Long before a thread waits for it, its next holder polls without it."""

    def attempt() -> list[str]:
        one = Workload("late_asker", 20, comm=name("late"))
        one.hurry()
        truth = one.run()
        found = causes(either, one.comm)
        one.kill()
        print(truth, found)
        total, unknown = sum(found.values()), found.pop("unknown", 0.0)
        if unknown >= MOST_UNKNOWN_OF_PREEMPTED * total:
            return [f"unknown: {unknown:.3f} of {total:.3f}"]
        others = total - unknown - found.get("running", 0.0) - found.get("runqueue", 0.0)
        return [f"others: {others / total:.3f}"] if others > ELSEWHERE * total else []

    in_one_of_some_tries(attempt)


@mode_calls_is_thorough
def test_a_holder_that_waits_for_a_kernel_lock(either: Lockd) -> None:
    """The lock in user space stores no owner, so only at its release is it known who held it.

    By then the holder has got the lock of the kernel.
    """

    def attempt() -> list[str]:
        one = Workload("holder_in_kernel", 100, comm=name("inner"))  # enough for samples after a busy test
        one.hurry()
        truth = one.run()
        found = causes(either, one.comm)
        one.kill()
        print(truth, found)
        # On a busy host the holder may lose its CPU before it releases the lock. Then that is its last
        # absence, and nothing is known of what it did before. This may be so in nearly every hold.
        total, unknown, lock = sum(found.values()), found.pop("unknown", 0.0), found.pop("lock", 0.0)
        others = sum(found.values()) - found.get("running", 0.0) - found.get("runqueue", 0.0)
        off = [f"others: {others / total:.3f}"] if others > ELSEWHERE * total else []
        return off + ([f"lock: {lock:.3f} of {total:.3f}"] if lock <= 0.1 * (total - unknown) else [])

    in_one_of_some_tries(attempt)


@mode_calls_is_thorough
def test_the_holder_of_a_short_hold_needs_not_be_followed(either: Lockd) -> None:
    """Threads compute for 20 us with the lock held, so the holder runs or has lost its CPU."""

    def attempt() -> list[str]:
        one = Workload("load", SECONDS, BUSY_THREADS, 200, comm=name("short"))
        one.run()
        found = causes(either, one.comm, "contended")
        one.kill()
        print(found)
        total, unknown = sum(found.values()), found.pop("unknown", 0.0)
        if not total:
            return ["nothing"]
        others = total - unknown - found.get("running", 0.0) - found.get("runqueue", 0.0)
        shares = (("unknown", unknown, MOST_UNKNOWN_OF_SHORT), ("others", others, ELSEWHERE))
        return [f"{what}: {seconds / total:.3f}" for what, seconds, most in shares if seconds > most * total]

    in_one_of_some_tries(attempt)


@pytest.fixture
def throttle() -> Iterator[Throttle]:
    """A function that limits the main thread of a program to a fifth of a processor by the quota of a control
    group (`cpu.max`).

    The other threads are not limited. In cgroup2 the group of the thread is below that of its process.
    """
    own, v2 = f"lockd-test-{os.getpid()}-throttled", mounted("cgroup2", "rw")
    if v2 and "cpu" in (v2 / "cgroup.controllers").read_text().split():
        group, limits, threads = v2 / own / "holder", {"cpu.max": f"{QUOTA_US} {PERIOD_US}"}, "cgroup.threads"
    elif v1 := mounted("cgroup", "cpu"):
        group, threads = v1 / own / "holder", "tasks"
        limits = {"cpu.cfs_period_us": f"{PERIOD_US}", "cpu.cfs_quota_us": f"{QUOTA_US}"}
    else:
        pytest.skip("host: has no control groups of processor time")
    of_process = group.parent
    enabled = of_process.parent / "cgroup.subtree_control"
    was_enabled = not enabled.exists() or "cpu" in enabled.read_text().split()
    if not was_enabled:
        enabled.write_text("+cpu")
    try:
        of_process.mkdir()
        group.mkdir()
        if threads == "cgroup.threads":
            (group / "cgroup.type").write_text("threaded")
            (of_process / "cgroup.subtree_control").write_text("+cpu")
        for file, value in limits.items():
            (group / file).write_text(value)

        def throttled(one: Workload) -> None:
            (of_process / "cgroup.procs").write_text(str(one.pid))
            (group / threads).write_text(str(one.pid))

        yield throttled
    finally:
        for directory in (group, of_process):
            if directory.exists():
                remove(directory)
        if not was_enabled:
            enabled.write_text("-cpu")


@mode_calls_is_thorough
def test_a_holder_that_is_throttled_is_on_the_run_queue(either: Lockd, throttle: Throttle) -> None:
    def start() -> Workload:
        return Workload(PROGRAM, "normal", "running", ASKERS, SECONDS, comm=name("throttled"))

    assert_found(either, "normal", start, throttle)


class Apart(Workload):
    """One run of a workload in a pid namespace of its own, where its process has another id than outside."""

    def __init__(self, program: str, *arguments: object, comm: str) -> None:
        super().__init__("/usr/bin/unshare", *OF_A_PID_NAMESPACE, BUILD / program, *arguments, comm=comm)
        starter = self.process.pid
        self.pid = int(Path(f"/proc/{starter}/task/{starter}/children").read_text())


@mode_calls_is_thorough
def test_it_is_found_in_a_pid_namespace(either: Lockd) -> None:
    """A lock stores the id that its holder has in the pid namespace."""

    def start() -> Workload:
        return Apart(PROGRAM, "normal", "mixed", ASKERS, SECONDS, comm=name("apart"))

    assert_found(either, "normal", start)


def test_nobody_is_known_to_hold_what_a_timeout_ends(either: Lockd) -> None:
    until_names_come(either, Workload("futex_errors", 5, 0, 0, 20_000, comm=name("first")))
    before = sum(causes(either, "other").values())
    one = Workload("futex_errors", 200, 0, 100, 20_000, comm=name("time"))
    one.run()
    found, nameless = causes(either, one.comm), sum(causes(either, "other").values()) - before
    one.kill()
    assert list(found) == ["unknown"]
    assert nameless <= found["unknown"]  # the lock had no name for five seconds
    assert found["unknown"] + nameless >= 200 * 0.02 / 2


@mode_calls_is_thorough
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_chain_of_locks_ends_at_the_code_that_causes_it(either: Lockd, depth: int) -> None:
    """All time that threads wait for any of the locks is due to the holder of the last one, which sleeps."""

    def attempt() -> list[str]:
        one = Workload("lock_chain", depth, SECONDS, comm=name(f"chain{depth}"))
        one.hurry()
        one.run()
        waited = one.run()["waited_us"] / 1e6
        either.settle()
        rows = either.api("bottlenecks", comm=one.comm)
        one.kill()
        print(waited, rows)
        chains = {tuple(link["lock"] for link in chain["locks"]): chain for chain in rows[0]["chains"]}
        whole = chains.get(tuple(f"lock_chain:lock_{i}" for i in range(depth)))
        if not whole:
            return [f"not the whole chain in {list(chains)}"]
        holders = [f"lock_chain:link_{i}" for i in range(depth - 1)] + ["lock_chain:chain_end"]
        assert [link["holder"] for link in whole["locks"]] == holders
        end = {column: rows[0][column] for column in ("lock", "holder", "cause")}
        assert end == {"lock": f"lock_chain:lock_{depth - 1}", "holder": holders[-1], "cause": "sleep"}
        share = rows[0]["seconds"] / sum(row["seconds"] for row in rows)
        return [f"{share:.3f} of the time"] if share < 1 - POINTS - ELSEWHERE else []

    in_one_of_some_tries(attempt)
