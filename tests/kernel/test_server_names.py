"""A real server under load: its hot lock is named, and nearly all blocked time has a name.

The run leaves tests/programs/build/server.json for docs/lock-names.md.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import need
from tests.support import mariadb
from tests.support.lockd_process import Lockd, Metrics
from tests.support.mariadb import COMM, Server

pytestmark = pytest.mark.thorough("a server under load")

BUILD = Path(__file__).resolve().parents[1] / "programs/build"
HOT = "mariadbd:LOCK_short_uuid_generator"
"""UUID_SHORT() takes this mutex, a global variable of the server, for each value."""
LOAD = (
    "--create=CREATE TABLE orders (id BIGINT UNSIGNED PRIMARY KEY, note CHAR(36)) ENGINE=InnoDB",
    "--query=INSERT INTO orders VALUES (UUID_SHORT(), UUID());"
    "SELECT COUNT(*) FROM orders WHERE id > UUID_SHORT();DO BENCHMARK(20000, UUID_SHORT())",
    "--delimiter=;",
)
CLIENTS = 16
LOAD_SECONDS = 8.0
SECONDS = "lockd_futex_lock_blocked_seconds_total"
NAMELESS = ("other", "anon", "")


def load(server: Server, seconds: float) -> None:
    """Have clients send queries to the server for so many seconds."""
    slap = server.client("mariadb-slap", f"--concurrency={CLIENTS}", "--number-of-queries=100000000", *LOAD)
    with subprocess.Popen(slap, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as clients:
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, errors = clients.communicate(timeout=seconds)
            pytest.fail(f"the load ended before its time: {errors}")
        clients.kill()


@pytest.fixture(scope="module")
def lockd(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Lockd]:
    """A daemon that looks at the server alone, from before its start on."""
    config = {"filter": {"comms": [COMM]}, "series": {"top_locks": 1000, "max": 100_000}}
    daemon = Lockd(tmp_path_factory.mktemp("lockd"), config)
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


@pytest.fixture(scope="module")
def server(lockd: Lockd) -> Iterator[Server]:
    need("mariadb-slap")
    with mariadb.started() as one:
        yield one


@pytest.fixture(scope="module")
def metrics(lockd: Lockd, server: Server) -> Metrics:
    """The metrics after the load, which begins when the server has just started."""
    load(server, LOAD_SECONDS)
    found = lockd.metrics()
    BUILD.mkdir(exist_ok=True)
    (BUILD / "server.json").write_text(json.dumps(summary(found, server), indent=1) + "\n")
    return found


def seconds_by_lock(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Return the blocked seconds by kind and lock. Locks without their own series have the comm `other`."""
    found: dict[tuple[str, str], float] = {}
    for comm in (COMM, "other"):
        for labels in metrics.labels(SECONDS, comm=comm):
            key = labels["kind"], labels["lock"]
            found[key] = metrics.sum(SECONDS, comm=comm, kind=key[0], lock=key[1])
    return found


def shares(metrics: Metrics) -> tuple[float, float]:
    """Return two shares of all blocked time: that of the lock `anon`, and that of locks with names."""
    total = metrics.sum("lockd_futex_blocked_seconds_sum", comm=COMM)
    by_lock = seconds_by_lock(metrics)
    anon = sum(seconds for (_, lock), seconds in by_lock.items() if lock == "anon")
    named = sum(seconds for (_, lock), seconds in by_lock.items() if lock not in NAMELESS)
    return anon / total, named / total


def summary(metrics: Metrics, server: Server) -> dict[str, object]:
    anon, named = shares(metrics)
    largest = sorted(seconds_by_lock(metrics).items(), key=lambda one: -one[1])[:8]
    return {
        "server": f"MariaDB {server.version}",
        "clients": CLIENTS,
        "seconds": metrics.sum("lockd_futex_blocked_seconds_sum", comm=COMM),
        "anon": anon,
        "named": named,
        "largest": [[*key, seconds] for key, seconds in largest],
    }


def test_the_hot_lock_is_named(metrics: Metrics) -> None:
    """Clients that want the same mutex all the time lose more to it than to any other lock."""
    by_lock = seconds_by_lock(metrics)
    contended = {lock: seconds for (kind, lock), seconds in by_lock.items() if kind in ("lock", "pi")}
    assert max(contended, key=lambda lock: contended[lock]) == HOT, contended
    assert contended[HOT] > 1.0


def test_its_site_is_the_function_that_takes_it(metrics: Metrics, lockd: Lockd) -> None:
    rows = [row for row in lockd.api("locks", limit="1000", kind="lock") if row["lock"] == HOT]
    assert {row["site"] for row in rows} == {"mariadbd:server_uuid_value"}


def test_nearly_all_blocked_time_has_a_name(metrics: Metrics) -> None:
    anon, named = shares(metrics)
    assert anon < 0.01
    assert named >= 0.99, seconds_by_lock(metrics)
