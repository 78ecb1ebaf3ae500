"""MariaDB's performance_schema knows which thread owns a mutex: lockd must charge the code of that thread.

Two sorts of clients hold the mutex of the binary log: some commit, and some begin new files of the log. The
server is asked again and again who owns the mutex and how many threads wait for it.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import mariadb
from tests.support.checks import in_one_of_some_tries
from tests.support.lockd_process import Lockd
from tests.support.mariadb import COMM, Server

pytestmark = pytest.mark.thorough("a minute of a database under load")

SECONDS = 30
POINTS, ELSEWHERE = 0.06, 0.02
"""The largest difference between the shares of a user, and of anything else that holds the mutex.

While a woken thread waits for a processor nobody owns the mutex, which is a fifth of the time here. lockd
charges the waits of all other threads in this time to the next holder, and the server to nobody.
"""
MUTEX = "wait/synch/mutex/sql/LOG::LOCK_log"
"""The mutexes of all logs of the server. Only the binary log is in use."""
OPTIONS = (
    "--performance-schema=ON",
    f"--performance-schema-instrument={MUTEX}=ON",
    "--performance-schema-consumer-events-waits-current=ON",
    "--log-bin=binlog",
    "--sync-binlog=1",
    "--innodb-flush-log-at-trx-commit=0",
)
FUNCTIONS = {
    "commit": "MYSQL_BIN_LOG::trx_group_commit_leader",
    "rotate": "MYSQL_BIN_LOG::rotate_and_purge",
}
"""By user, the function in which the user's thread releases the mutex."""
CLIENTS = {
    "commit": (3, "INSERT INTO made.lines VALUES (NULL, REPEAT('x', 2000))"),
    "rotate": (2, "FLUSH BINARY LOGS; DO SLEEP(0.02)"),
}
"""By user, the number of clients and what each of them does in a loop."""
SAMPLES = f"""
BEGIN NOT ATOMIC
  DECLARE stop DATETIME(6) DEFAULT SYSDATE(6) + INTERVAL {SECONDS} SECOND;
  WHILE SYSDATE(6) < stop DO
    SELECT UNIX_TIMESTAMP(SYSDATE(6)),
      MAX(IFNULL(owner.processlist_user, IF(locked_by_thread_id, 'server', ''))),
      (SELECT COUNT(*) FROM performance_schema.events_waits_current WHERE event_name = '{MUTEX}'
         AND operation = 'lock' AND end_event_id IS NULL)
    FROM performance_schema.mutex_instances LEFT JOIN performance_schema.threads AS owner
      ON owner.thread_id = locked_by_thread_id
    WHERE mutex_instances.name = '{MUTEX}';
    DO SLEEP(0.001);
  END WHILE;
END"""
"""What prints the time, the user that owns the mutex, and how many threads wait for it, again and again."""


@contextmanager
def client(server: Server, user: str, statements: str) -> Iterator[None]:
    loop = f"BEGIN NOT ATOMIC WHILE 1 DO {statements}; END WHILE; END"
    command = server.client("mariadb", f"--user={user}", "--delimiter=//", "-e", loop)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield
            assert process.poll() is None, f"the client {user} has ended"
        finally:
            process.kill()


def waited_by_owner(server: Server) -> Counter[str]:
    """Return for how many seconds threads waited while each user owned the mutex, as the server says.

    Time in which nobody owned it is left out: the server's waits last until the thread runs, but those of
    holders in lockd only until it is woken.
    """
    rows = server.ask(SAMPLES, delimiter="//")
    samples = [(float(time), owner, int(waiting)) for time, owner, waiting in rows]
    seconds = Counter[str]()
    for (time, owner, waiting), (time_after, _, _) in itertools.pairwise(samples):
        seconds[owner] += (time_after - time) * waiting
    unowned = seconds.pop("", 0.0)
    print(f"{len(samples)} samples; {unowned:.1f} s while nobody owned the mutex")
    return seconds


def charged(lockd: Lockd) -> Counter[str]:
    """Return for how many seconds each user's function made threads wait for the mutex, as lockd says."""
    seconds = Counter[str]()
    for holder in holders(lockd):
        stack = " ".join([holder["site"], *holder["stack"]])
        users = [user for user, function in FUNCTIONS.items() if function in stack]
        seconds[users[0] if len(users) == 1 else holder["site"]] += holder["seconds"]
    return seconds


def holders(lockd: Lockd) -> list[dict[str, Any]]:
    """Return the holders of the lock with most of these functions."""
    rows = [row["holders"] for row in lockd.api("locks", limit="1000", comm=COMM) if row.get("holders")]

    def known(row: list[dict[str, Any]]) -> float:
        pattern = re.compile("|".join(FUNCTIONS.values()))
        return sum(one["seconds"] for one in row if pattern.search(" ".join([one["site"], *one["stack"]])))

    return max(rows, key=known, default=[])


def test_the_owners_code_is_charged(host: None, tmp_path: Path) -> None:
    settings = {"filter": {"comms": [COMM]}, "profile": {"samples_per_second": 200}}
    with (
        mariadb.started(*OPTIONS) as server,
        Lockd(tmp_path, settings) as lockd,
        ExitStack() as clients,
    ):
        server.ask("CREATE DATABASE made")
        server.ask("CREATE TABLE made.lines (id INT AUTO_INCREMENT PRIMARY KEY, text VARCHAR(2000))")
        for user, (count, statements) in CLIENTS.items():
            for _ in range(count):
                clients.enter_context(client(server, user, statements))
        lockd.until(lambda _: set(charged(lockd)) >= set(FUNCTIONS), 60)

        def attempt() -> list[str]:
            lockd.settle()
            before = charged(lockd)
            truth = waited_by_owner(server)
            lockd.settle()
            found = charged(lockd)
            found.subtract(before)
            assert all(truth[user] > 0.1 * truth.total() for user in FUNCTIONS), truth
            return differences(truth, found)

        in_one_of_some_tries(attempt)
        assert lockd.stop() == 0, "".join(lockd.log)


def differences(truth: Counter[str], found: Counter[str]) -> list[str]:
    """Return words for each user whose share is not what the server says."""
    off = []
    for user in sorted({*truth, *found}):
        theirs, ours = truth[user] / truth.total(), found[user] / found.total()
        print(f"{user}: {theirs:.1%} of {truth.total():.1f} s, lockd {ours:.1%} of {found.total():.1f} s")
        if abs(ours - theirs) > (POINTS if user in FUNCTIONS else ELSEWHERE):
            off.append(f"{user}: {ours:.3f}, not {theirs:.3f}")
    return off
