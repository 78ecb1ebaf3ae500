"""A backend of PostgreSQL that waits for a row's lock is told from an idle one, as both are in epoll_wait."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.needs import found, libraries, needs
from tests.support.lockd_process import Lockd

pytestmark = needs("initdb", "postgres", "psql")
AS_NOBODY = ("setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups", "--")
"""What runs a command as nobody: the server refuses to run as root."""
COMM = "postgres"
SECONDS = "lockd_offcpu_blocked_seconds_sum"
READY_SECONDS = 60.0
HELD, WAITERS = 3.0, 2
NEARLY = 0.02
"""The tolerance of waited times: the first moments of a wait are the server's own work."""


@pytest.fixture
def lockd(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Lockd]:
    """A daemon that looks at these servers alone: one that has seen much has no series for them at first."""
    daemon = Lockd(tmp_path_factory.mktemp("lockd"), {"filter": {"comms": [COMM]}})
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


@pytest.fixture
def directory() -> Iterator[Path]:
    """The directory of a running server, and of its socket."""
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


def psql(directory: Path, *commands: str, **how: Any) -> subprocess.Popen[str]:
    """Start a client that makes these queries, or if there are none, those that it reads."""
    given = [word for command in commands for word in ("-c", command)]
    options = ["-qAt", "-h", str(directory), "-U", "lockd", "-d", "postgres", "-v", "ON_ERROR_STOP=1"]
    return subprocess.Popen(
        [found("psql"), *options, *given], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**libraries(), "PGAPPNAME": "shop waiting"}, **how,
    )  # fmt: skip


def asked(directory: Path, query: str) -> str:
    with psql(directory, query) as client:
        answer, _ = client.communicate()
        assert client.returncode == 0
    return str(answer).strip()


def test_waits_for_a_row_are_for_a_lock(lockd: Lockd, directory: Path) -> None:
    """lockd says the same of the waiting backends as the server. The backend that holds the row's lock waits
    for its client, which is no wait for a lock but has the reason `poll`."""
    asked(directory, "CREATE TABLE stock (id int, left_over int); INSERT INTO stock VALUES (1, 9)")
    before = lockd.metrics()
    take = "UPDATE stock SET left_over = left_over - 1 WHERE id = 1"
    with psql(directory, stdin=subprocess.PIPE) as holder:
        assert holder.stdin and holder.stdout
        holder.stdin.write(f"BEGIN;\n{take};\nSELECT 'taken';\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "taken\n"
        waiters = [psql(directory, take) for _ in range(WAITERS)]
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        deadline = time.monotonic() + READY_SECONDS
        while asked(directory, waiting) != str(WAITERS):
            assert time.monotonic() < deadline
        time.sleep(HELD)
        since = (
            "SELECT sum(extract(epoch FROM clock_timestamp() - waitstart)) FROM pg_locks WHERE NOT granted"
        )
        asked_at = time.monotonic()
        least = float(asked(directory, since))
        holder.stdin.write("COMMIT;\n\\q\n")
    assert [one.wait() for one in (holder, *waiters)] == [0] * (1 + WAITERS)
    most = least + WAITERS * (time.monotonic() - asked_at)
    metrics = lockd.metrics()
    waited = {
        reason: metrics.sum(SECONDS, comm=COMM, reason=reason) - before.sum(SECONDS, comm=COMM, reason=reason)
        for reason in ("lock", "poll")
    }
    assert (1 - NEARLY) * least <= waited["lock"] <= (1 + NEARLY) * most
    assert waited["poll"] > HELD
