"""Locks of Java, compared with Java's Flight Recorder, without a perf map and with one that comes later."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.needs import need
from tests.support.lockd_process import ROOT, Lockd, Metrics
from tests.support.workload import Workload

PROGRAMS = ROOT / "tests/programs"
SECONDS = "lockd_futex_lock_blocked_seconds_total"
HELD = "lockd_futex_lock_holder_seconds_total"
HOLDERS = ("holdBriefly", "holdForAWhile", "holdForLong")
HOLDING_SECONDS = 8.0
POINTS = 0.03
COMM = f"contend.{os.getpid():x}"


def compiled_at_once(program: str) -> tuple[str, ...]:
    """Options of Java with which a program's own methods are compiled when they are first called."""
    return (
        "-Xcomp",
        "-XX:TieredStopAtLevel=1",
        "-XX:CompileCommand=quiet",
        f"-XX:CompileCommand=compileonly,{program}::*",
        f"-XX:CompileCommand=dontinline,{program}::*",
        "-XX:+PreserveFramePointer",
    )


COMPILED_AT_ONCE = compiled_at_once("Contention")
"""Options with which only the methods of `Contention` itself are compiled, once and for all.

The perf map and the stacks then have each of them. All other methods are interpreted. A method that C2 has
compiled is compiled anew where the guesses of C2 fail, and is then in no map.
"""
LOCKS = {
    "reentrant": ("[java]:java.util.concurrent.locks.ReentrantLock", "[jit]:Contention.lockReentrant"),
    "writers": ("[java]:java.util.concurrent.locks.ReentrantReadWriteLock", "[jit]:Contention.writeTable"),
    "monitor": ("[java]:Contention$Shelf", "[jit]:Contention.enterMonitor"),
}
"""The name of each lock without a perf map, and with one."""
NOTICED_SECONDS = 60.0
"""The most seconds until lockd notices a change. A lock is captured again after ten seconds. The rest is for
a host that has much else to do."""
NEARLY = 0.03


@pytest.fixture(scope="module")
def lockd(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Lockd]:
    """A daemon that counts only these programs."""
    config = {
        "filter": {"comms": [COMM]},
        "series": {"top_locks": 1000},
        "profile": {"samples_per_second": 200},
    }
    daemon = Lockd(tmp_path_factory.mktemp("lockd"), config)
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


@pytest.fixture
def java(lockd: Lockd) -> Iterator[Callable[..., Workload]]:
    """Return a function that starts a program in Java. Its perf map is removed after the test."""
    need("javac", "jcmd")
    subprocess.run(["make", "-s", "-C", PROGRAMS, "java"], check=True)
    started: list[Workload] = []

    def start(*options: str, program: str = "Contention") -> Workload:
        one = Workload(str(shutil.which("java")), *options, "-cp", PROGRAMS / "build", program, comm=COMM)
        started.append(one)
        return one

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()
        Path(f"/tmp/perf-{one.pid}.map").unlink(missing_ok=True)


def until_known(lockd: Lockd, program: Workload) -> None:
    """Wait until lockd has found where the program's threads say what they wait for.

    It does so at their first waits.
    """
    lockd.until(
        lambda _: any(
            row["tgid"] == program.pid and row["advice"] == "java" for row in lockd.api("threads", comm=COMM)
        ),
        NOTICED_SECONDS,
    )


def queued_seconds(program: Workload) -> float:
    """Return how long the program's workers were ready and had no processor, as the kernel counts it."""
    tasks = Path(f"/proc/{program.pid}/task").iterdir()
    workers = [task for task in tasks if (task / "comm").read_text().startswith("worker")]
    assert workers
    return sum(int((task / "schedstat").read_text().split()[1]) for task in workers) / 1e9


def waited(metrics: Metrics, kind: str, *locks: str) -> float:
    return sum(metrics.sum(SECONDS, comm=COMM, kind=kind, lock=lock) for lock in locks)


def test_locks_of_java_have_their_kind_and_get_their_names(
    lockd: Lockd, java: Callable[..., Workload]
) -> None:
    """Threads wait for all locks, and for queues, on the same futex words. Names come with the perf map."""
    program = java(*COMPILED_AT_ONCE)
    until_known(lockd, program)
    before = lockd.metrics()
    program.go()
    metrics = lockd.until(
        lambda m: all(waited(m, "lock", nameless) > 0.5 for nameless, _ in LOCKS.values()), NOTICED_SECONDS
    )
    assert not any(waited(metrics, "lock", named) for _, named in LOCKS.values())
    assert metrics.sum("lockd_advised_processes", comm=COMM, advice="java") == 1
    write_perf_map(program)
    lockd.until(lambda m: all(waited(m, "lock", named) > 0.5 for _, named in LOCKS.values()), NOTICED_SECONDS)
    assert lockd.metrics().sum("lockd_advised_processes", comm=COMM, advice="java") == 0
    # Flight Recorder's times end when the thread runs, lockd's when it is woken.
    queued = queued_seconds(program)
    program.go()
    truth = program.truth()
    metrics = lockd.metrics()
    said = {
        lock: waited(metrics, "lock", *names) - waited(before, "lock", *names)
        for lock, names in LOCKS.items()
    }
    for lock in LOCKS:
        least, most = (1 - NEARLY) * truth[lock] - queued, (1 + NEARLY) * truth[lock]
        assert least <= said[lock] <= most, (said, truth, queued)
    assert truth["conditions"] > 5 > metrics.sum(SECONDS, comm=COMM, kind="lock") - sum(said.values())
    assert not metrics.sum(SECONDS, comm=COMM, lock="libjli.so:JavaMain")  # the site of the very first wait
    program.finish()


def held(lockd: Lockd) -> dict[str, float]:
    """Return the seconds for which each method of Java has made threads wait.

    A lock has another name once there is a perf map: a method may have a series for each of the two names.
    """
    metrics, seconds = lockd.metrics(), Counter[str]()
    for labels in metrics.labels(HELD, comm=COMM):
        if labels["holder"].startswith("[jit]:Holders.hold"):
            seconds[labels["holder"].removeprefix("[jit]:Holders.")] += metrics.sum(HELD, **labels)
    return seconds


def write_perf_map(program: Workload) -> None:
    subprocess.run(["jcmd", str(program.pid), "Compiler.perfmap"], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.thorough("holders of locks of other languages are found in the same way")
def test_methods_that_hold_a_monitor_have_their_shares(lockd: Lockd, java: Callable[..., Workload]) -> None:
    """The truth is the program's own: Flight Recorder charges a wait to whoever had the monitor last."""
    program = java(*compiled_at_once("Holders"), program="Holders")
    until_known(lockd, program)
    write_perf_map(program)
    lockd.until(lambda _: len(held(lockd)) == len(HOLDERS), NOTICED_SECONDS)

    before = held(lockd)
    program.go()
    time.sleep(HOLDING_SECONDS)
    program.go()
    truth = program.truth()
    found = {name: seconds - before[name] for name, seconds in held(lockd).items()}
    print(truth, found)
    waited_ms = sum(truth["holders"].values())
    shares = {name: ms / waited_ms for name, ms in truth["holders"].items()}
    assert {name: seconds / sum(found.values()) for name, seconds in found.items()} == {
        name: pytest.approx(share, abs=POINTS) for name, share in shares.items()
    }
    program.finish()


@pytest.mark.thorough("few programs have such heaps")
@pytest.mark.parametrize("options", [("-XX:+UseSerialGC",), ("-XX:-UseCompressedOops",)], ids=lambda o: o[0])
def test_kinds_whatever_the_heap(
    lockd: Lockd, java: Callable[..., Workload], options: tuple[str, ...]
) -> None:
    program = java(*options, "-Xmx64m")
    until_known(lockd, program)
    before = lockd.metrics()
    program.go()
    lockd.until(
        lambda m: all(
            waited(m, "lock", lock) - waited(before, "lock", lock) > 1 for lock, _ in LOCKS.values()
        ),
        NOTICED_SECONDS,
    )
    program.go()
    truth = program.truth()
    metrics = lockd.metrics()
    for lock, (nameless, _) in LOCKS.items():
        assert waited(metrics, "lock", nameless) - waited(before, "lock", nameless) == pytest.approx(
            truth[lock], rel=2 * NEARLY
        )
    program.finish()
