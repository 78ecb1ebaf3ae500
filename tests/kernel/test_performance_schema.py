"""MariaDB's performance_schema times the server's locks by itself: lockd must say the same of the same locks.

lockd runs as it is configured by default, beside programs that have taken all series of locks before the
server starts.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.needs import need
from tests.support import mariadb
from tests.support.lockd_process import Lockd, Metrics
from tests.support.mariadb import COMM, Server
from tests.support.workload import Workload

pytestmark = pytest.mark.thorough("three minutes, most of them under a load that takes every processor")

CLIENTS = 32
QUIET_SECONDS, FIRST_SECONDS, SECONDS = 5, 60, 30
"""How long the load runs: with one client; then with all clients until the hot locks have their series, which
may take a minute; and with all clients for the time that is compared."""
NOISE_SECONDS = 600
CONDS = 20
REST_SECONDS = 8.0
"""After so long all calls are counted, also those whose locks had to be looked up. /-/settled would wait for
the look-ups of all other processes too, and on a busy host there are always some."""
PLACES = 50
"""The number of locks that have series by default."""
OPTIONS = (
    "--performance-schema=ON",
    "--performance-schema-instrument=wait/synch/%=ON",
    "--innodb-sync-spin-loops=1",  # spinning is no blocking, but is timed; with 0 some latches only spin
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-doublewrite=0",
)
WAITED = 0.5
"""An instrument is compared if threads waited for more than so many seconds in all."""
MORE, SPUN = 0.03, 0.08
"""The shares by which lockd may say more than the server, and less. It says less as the server also times how
long threads spin in a contended lock: 2 to 6% of the server's time of latches were seen. That is 20 to 50 us
a wait, or 0.1 to 0.3 us a call, as most calls do not wait."""
REACQUIRED = ("wait/synch/mutex/innodb/lock_wait_mutex",)
"""Mutexes that threads mostly wait for at the end of pthread_cond_timedwait(), which takes them again.
The server counts this time as the condition's. lockd counts it as the mutex's, and so may say much more."""
LATCHES = re.compile(r"wait/synch/(?:rwlock|sxlock)/innodb/")
LOCKS = re.compile(r"wait/synch/(?:mutex|rwlock|sxlock|prlock)/")
BLOCKED, BY_KIND = "lockd_futex_lock_blocked_seconds_total", "lockd_futex_blocked_seconds_sum"
NAMELESS = ("other", "anon", "")


class Instruments:
    """Finds the instrument of a lock by the lock's pointer to what performance_schema knows of it.

    The addresses in performance_schema's own tables are of no use, as the server makes them up.
    """

    CLASS_AT = 24
    """The offset of the pointer to the instrument in what performance_schema knows of a lock. The name of the
    instrument begins in its first bytes."""

    def __init__(self, pid: int) -> None:
        self._memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)

    def of(self, address: int) -> str:
        """Return the instrument of the lock at which a thread waited, by its address; empty if there is none.

        InnoDB's latches have the pointer in front of them, all other locks behind.
        """
        word = address & ~7
        for at in (word - 8, word, *range(word + 8, word + 128, 8)):
            name = self._name(self._pointer(self._pointer(at) + self.CLASS_AT))
            if name and bool(LATCHES.match(name)) == (at <= word):
                return name
        return ""

    def close(self) -> None:
        os.close(self._memory)

    def _read(self, address: int, count: int) -> bytes:
        try:
            return os.pread(self._memory, count, address)
        except (OSError, OverflowError):
            return b""

    def _pointer(self, address: int) -> int:
        return int.from_bytes(self._read(address, 8), "little")

    def _name(self, address: int) -> str:
        found = re.match(rb".{0,40}?(wait/synch/[^\0]+)\0", self._read(address, 200), re.S)
        return found[1].decode() if found else ""


@dataclass(frozen=True)
class Look:
    """What lockd and the server said at a time when nobody waited for anything."""

    metrics: Metrics
    rows: list[dict[str, Any]]
    counts: Counter[str]
    seconds: Counter[str]
    """Calls (`counts`) and seconds by instrument, as performance_schema says."""
    scheduled: tuple[int, int]
    """Nanoseconds that the server's threads ran, and that they waited for a processor."""


def look(lockd: Lockd, server: Server) -> Look:
    time.sleep(REST_SECONDS)
    metrics = lockd.metrics(settled=False)
    answer = server.ask(
        "SELECT event_name, count_star, sum_timer_wait"
        " FROM performance_schema.events_waits_summary_global_by_event_name WHERE count_star > 0"
    )
    counts = Counter({name: int(count) for name, count, _ in answer})
    seconds = Counter({name: int(picoseconds) / 1e12 for name, _, picoseconds in answer})
    rows = [row for row in lockd.api("locks", limit="1000", comm=COMM) if row["program"] == "futex"]
    return Look(metrics, rows, counts, seconds, scheduled(server.pid))


def scheduled(pid: int) -> tuple[int, int]:
    """Return what the kernel says of all threads that there are, see Look.scheduled. The threads of clients
    that are gone are among them: they wait for other clients."""
    threads = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(thread[0]) for thread in threads), sum(int(thread[1]) for thread in threads)


@dataclass(frozen=True)
class Compared:
    """What happened between two looks."""

    before: Look
    after: Look
    instruments: dict[int, str]
    own: dict[str, float]
    """By instrument, the seconds that one call takes when nobody waits."""

    def locks(self) -> list[tuple[str, str, float]]:
        """Return the instrument, the kind and the blocked seconds of the lock at each address."""
        before = {(row["address"], row["kind"]): row["blocked_us"] for row in self.before.rows}
        return [
            (
                self.instruments[int(row["address"], 16)],
                row["kind"],
                (row["blocked_us"] - before.get((row["address"], row["kind"]), 0.0)) / 1e6,
            )
            for row in self.after.rows
        ]

    def by_instrument(self) -> dict[str, tuple[float, float, float]]:
        """Return three times of each instrument in seconds: by performance_schema, by lockd, and preempted.

        The first one leaves out what the calls take when nobody waits. The last one is the expected time in
        which a thread wants a processor, but has not asked for the lock yet, or has it already.
        performance_schema times this, but it is no blocking.
        """
        ran, wanted = (b - a for a, b in zip(self.before.scheduled, self.after.scheduled, strict=True))
        counts = self.after.counts - self.before.counts
        found = {name: 0.0 for name in counts if LOCKS.match(name)}
        for name, _, seconds in self.locks():
            if name in found:
                found[name] += seconds
        seconds = self.after.seconds - self.before.seconds
        own = {name: counts[name] * self.own.get(name, 0.0) for name in found}
        waited = {name: seconds[name] - own[name] for name in found}
        return {
            name: (waited[name], found[name], own[name] * wanted / ran)
            for name in found
            if waited[name] > WAITED
        }

    def lock_seconds(self, metric: str) -> dict[str, float]:
        """Return a metric's seconds for the server's locks by the label `lock`, empty where there is none."""
        seconds: dict[str, float] = {}
        for kind in ("lock", "pi"):
            for labels in self.after.metrics.labels(metric, comm=COMM, kind=kind):
                before, after = (one.metrics.sum(metric, **labels) for one in (self.before, self.after))
                lock = labels.get("lock", "")
                seconds[lock] = seconds.get(lock, 0.0) + after - before
        return seconds


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Compared]:
    sysbench = need("sysbench")
    lockd = Lockd(tmp_path_factory.mktemp("lockd"), {"budget": {"cpu": "auto"}})
    noise = [
        Workload("idle_pool", CONDS, NOISE_SECONDS, comm="noise-pool"),
        Workload("many_procs", PLACES, 100, comm="noise-procs"),
    ]
    try:
        for one in noise:
            one.go()
        lockd.until(lambda metrics: len(metrics.labels(BLOCKED)) >= PLACES, 60)
        with mariadb.started(*OPTIONS) as server:
            server.ask("CREATE DATABASE sbtest")
            load = [sysbench, f"--mysql-socket={server.socket}", "--mysql-user=root", "--db-driver=mysql",
                    "--tables=2", "--table-size=2000", "oltp_update_index"]  # fmt: skip

            def run(*arguments: object) -> Look:
                subprocess.run([*load, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)
                return look(lockd, server)

            first = run("prepare")
            alone = run("--threads=1", f"--time={QUIET_SECONDS}", "run")
            before = run(f"--threads={CLIENTS}", f"--time={FIRST_SECONDS}", "run")
            after = run(f"--threads={CLIENTS}", f"--time={SECONDS}", "run")
            memory = Instruments(server.pid)
            addresses = [int(row["address"], 16) for row in after.rows]
            instruments = {address: memory.of(address) for address in addresses}
            memory.close()
            counts = alone.counts - first.counts
            own = {name: (alone.seconds[name] - first.seconds[name]) / counts[name] for name in counts}
            yield Compared(before, after, instruments, own)
    finally:
        for one in noise:
            one.kill()
        assert lockd.stop() == 0, "".join(lockd.log)


def test_lock_time_is_under_the_names_of_the_locks(compared: Compared) -> None:
    """Other programs had taken all series before the server started."""
    by_lock = compared.lock_seconds(BLOCKED)
    total = sum(compared.lock_seconds(BY_KIND).values())
    named = sum(seconds for lock, seconds in by_lock.items() if lock not in NAMELESS)
    print(f"lock time {total:.3f} s, under names {named / total:.2%}")
    assert total > WAITED
    assert named >= 0.95 * total, by_lock


def test_each_lock_waits_as_long_as_the_server_says(compared: Compared) -> None:
    found = compared.by_instrument()
    assert found
    for name, (theirs, ours, preempted) in sorted(found.items()):
        said = f"{theirs:.3f} s, {preempted:.3f} s of it perhaps preempted"
        print(f"{name}: {said}; lockd {ours:.3f} s, {ours / theirs - 1:+.2%}")
    for name, (theirs, ours, preempted) in found.items():
        assert (1 - SPUN) * theirs - preempted <= ours
        assert name in REACQUIRED or ours <= (1 + MORE) * theirs


def test_latches_are_locks(compared: Compared) -> None:
    """InnoDB waits for latches by futex calls of its own, in functions that have no symbols."""
    of_latches = [(kind, seconds) for name, kind, seconds in compared.locks() if LATCHES.match(name)]
    total = sum(seconds for _, seconds in of_latches)
    as_locks = sum(seconds for kind, seconds in of_latches if kind == "lock")
    assert total > WAITED
    print(f"latches {total:.3f} s, of kind lock {as_locks / total:.2%}")
    assert as_locks >= 0.95 * total
