"""A backend of PostgreSQL that waits for a row's lock is told from an idle one, as both are in epoll_wait."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lockd_process import Lockd

from tests.needs import found, libraries, needs

pytestmark = needs("initdb", "postgres", "psql")
AS_NOBODY = ("setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups", "--")
"""The server refuses to run as root."""
COMM = "postgres"
SECONDS = "lockd_offcpu_blocked_seconds_sum"
READY_SECONDS = 60.0
HELD = 3.0


@pytest.fixture
def directory() -> Iterator[Path]:
    """That of a running server, and of its socket."""
    with tempfile.TemporaryDirectory(prefix="lockd-postgresql-", dir="/var/tmp") as name:
        shutil.chown(name, "nobody")
        data = f"{name}/data"
        made = [*AS_NOBODY, found("initdb"), "-D", data, "-U", "lockd", "--no-sync"]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL, env=libraries())
        with open(f"{name}/log", "wb") as log:
            command = [*AS_NOBODY, found("postgres"), "-D", data, "-k", name, "-h", ""]
            server = subprocess.Popen(command, stderr=log, env=libraries())
        try:
            deadline = time.monotonic() + READY_SECONDS
            while psql(Path(name), "SELECT 1").wait():
                assert time.monotonic() < deadline, Path(f"{name}/log").read_text()
                time.sleep(0.2)
            yield Path(name)
        finally:
            server.terminate()
            server.wait(30)


def psql(directory: Path, *commands: str) -> subprocess.Popen[bytes]:
    given = [word for command in commands for word in ("-c", command)]
    options = ["-q", "-h", str(directory), "-U", "lockd", "-d", "postgres", "-v", "ON_ERROR_STOP=1"]
    return subprocess.Popen(
        [found("psql"), *options, *given], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**libraries(), "PGAPPNAME": "shop waiting"},
    )  # fmt: skip


def test_waits_for_a_row_are_for_a_lock(lockd: Lockd, directory: Path) -> None:
    """`HELD` seconds each; who holds it sleeps, which is none."""
    assert (
        psql(
            directory, "CREATE TABLE stock (id int, left_over int)", "INSERT INTO stock VALUES (1, 9)"
        ).wait()
        == 0
    )
    before = lockd.metrics()
    take = "UPDATE stock SET left_over = left_over - 1 WHERE id = 1"
    holder = psql(directory, "BEGIN", take, f"SELECT pg_sleep({HELD + 1})", "COMMIT")
    time.sleep(1)
    waiters = [psql(directory, take), psql(directory, take)]
    assert [one.wait() for one in (holder, *waiters)] == [0, 0, 0]
    metrics = lockd.metrics()
    waited = {
        reason: metrics.sum(SECONDS, comm=COMM, reason=reason) - before.sum(SECONDS, comm=COMM, reason=reason)
        for reason in ("lock", "poll")
    }
    assert waited["lock"] == pytest.approx(2 * HELD, abs=0.6)
    assert waited["poll"] > HELD
