"""How much of the namer's time one process, or one user, may take."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockd.names.shares import ANSWER_SECONDS, NOBODY, SAVED_SECONDS, Shares, SubordinateIds
from lockd.process.clock import TICKS

SHARE = 0.1


class Host:
    """Processes of several users, and a clock."""

    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 1000.0
        self.shares = Shares(root, SHARE, clock=lambda: self.now)

    def start(self, tgid: int, user: int) -> int:
        directory = self.root / str(tgid)
        directory.mkdir()
        os.chown(directory, user, user)
        return tgid

    def work(self, tgid: int, seconds: float) -> bool:
        """Work for a process for `seconds`, if that is allowed, and return whether it is."""
        with self.shares.turn(tgid) as is_left:
            if is_left:
                self.now += seconds
        return is_left


@pytest.fixture
def host(tmp_path: Path) -> Host:
    if os.geteuid():
        pytest.skip("needs root: has directories of several users")
    return Host(tmp_path)


def test_what_takes_more_than_its_share_waits_and_nobody_else_does(host: Host) -> None:
    greedy, modest = host.start(1, 0), host.start(2, 0)
    assert host.work(greedy, 3 * SAVED_SECONDS)
    assert not host.work(greedy, 1)
    assert host.work(modest, 1)
    host.now += 2 * SAVED_SECONDS / SHARE - 2
    assert not host.work(greedy, 1)
    host.now += 2
    assert host.work(greedy, 1)


def test_over_a_long_time_it_gets_its_share(host: Host) -> None:
    greedy, worked = host.start(1, 0), 0
    for _ in range(10_000):
        if host.work(greedy, 0.5):
            worked += 1
        else:
            host.now += 0.5
    assert worked * 0.5 == pytest.approx(SAVED_SECONDS + SHARE * 5000, rel=0.01)


def test_processes_of_one_user_have_one_share_and_roots_each_their_own(host: Host) -> None:
    users = [host.start(tgid, 1000) for tgid in range(1, 12)]
    roots = [host.start(tgid, 0) for tgid in range(21, 32)]
    other = host.start(50, 1001)
    may = [host.work(tgid, SAVED_SECONDS / 10 + 0.5) for tgid in users]
    assert (may[0], may[-1]) == (True, False)
    assert all(host.work(tgid, SAVED_SECONDS / 10 + 0.5) for tgid in (*roots, other))


def shares_with(host: Host, subordinate_ids: str) -> Path:
    """Give the host's users these ranges of ids, and return the file that says so."""
    path = host.root / "subuid"
    path.write_text(subordinate_ids)
    host.shares = Shares(host.root, SHARE, clock=lambda: host.now, subordinate_ids=SubordinateIds(path))
    return path


def all_may_work(host: Host, users: range) -> bool:
    """Whether processes of ten users are all allowed to work, which together take more than one share."""
    first = 1 + max((int(path.name) for path in host.root.iterdir() if path.name.isdigit()), default=0)
    tgids = [host.start(first + at, user) for at, user in enumerate(users[:10])]
    return all(host.work(tgid, SAVED_SECONDS / 10 + 1) for tgid in tgids + tgids[:1])


def test_the_subordinate_ids_of_a_person_have_one_share(host: Host) -> None:
    path = shares_with(
        host,
        f"1000:100000:65536\nnobody:200000:10\nin error\n1000:x:5\nnot-a-user:300000:9\n{1 << 70}:300000:9\n",
    )
    assert not all_may_work(host, range(100_000, 165_536))
    assert not host.work(host.start(900, 1000), 0)
    assert host.work(host.start(901, 1001), 0)
    assert not all_may_work(host, range(200_000, 200_010))
    assert all_may_work(host, range(200_010, 200_020))
    assert all_may_work(host, range(300_000, 300_010))
    with path.open("a") as file:
        file.write("1002:400000:65536\n")
    assert not all_may_work(host, range(400_000, 465_536))
    path.unlink()
    assert not all_may_work(host, range(400_010, 465_536))


def test_each_id_that_root_or_a_service_was_given_has_its_own_share(host: Host) -> None:
    shares_with(host, "root:100000:65536\n0:200000:65536\n999:300000:65536\n")
    for first in (100_000, 200_000, 300_000):
        assert all_may_work(host, range(first, first + 65_536))


def test_a_process_that_has_ended_is_still_its_users(host: Host) -> None:
    for tgid in range(1, 12):
        host.start(tgid, 1000)
        assert host.work(tgid, 0)
        (host.root / str(tgid)).rmdir()
    may = [host.work(tgid, SAVED_SECONDS / 10 + 0.5) for tgid in range(1, 12)]
    assert (may[0], may[-1]) == (True, False)


def test_who_cost_a_namer_owes_what_it_took(host: Host) -> None:
    one, other = host.start(1, 1000), host.start(2, 1000)
    host.shares = Shares(host.root, SHARE, owing=[((1, 1000), 2 * SAVED_SECONDS)], clock=lambda: host.now)
    assert not host.work(one, 1)
    assert not host.work(other, 1)
    assert host.work(host.start(3, 0), 1)


def test_who_has_a_namer_hang_waits_until_it_has_ended(host: Host) -> None:
    one, other, root, second = host.start(1, 1000), host.start(2, 1000), host.start(3, 0), host.start(4, 0)
    host.shares.hold([(1, 1000), (3, 0)])
    host.now += 1e9
    assert not any(host.work(tgid, 0) for tgid in (one, other, root))
    assert host.work(second, 0)
    host.shares.hold([])
    assert all(host.work(tgid, 0) for tgid in (one, other, root, second))


def test_what_fails_has_taken_its_time(host: Host) -> None:
    one = host.start(1, 0)
    with pytest.raises(ValueError, match="strange"), host.shares.turn(one):
        host.now += 2 * SAVED_SECONDS
        raise ValueError("strange")
    assert not host.work(one, 1)


def stolen_seconds(cpu: int) -> float:
    """Return for how many seconds the hypervisor took this CPU, which count as time that the process ran."""
    lines = map(str.split, Path("/proc/stat").read_text().splitlines())
    return next(int(line[8]) for line in lines if line[0] == f"cpu{cpu}") / TICKS


def test_a_frozen_namer_charges_no_more_than_a_hung_one(host: Host) -> None:
    one = host.start(1, 0)
    assert host.work(one, 600)
    host.now += (ANSWER_SECONDS - SAVED_SECONDS) / SHARE - 1
    assert not host.work(one, 1)
    host.now += 2
    assert host.work(one, 1)


def test_waiting_for_a_cpu_is_nobodys_fault() -> None:
    """Two busy processes on one CPU have half of its time each."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        shares = Shares(Path("/proc"), SHARE)
        began, ran, stolen = time.monotonic(), time.process_time(), stolen_seconds(min(cpus))
        with shares.turn(os.getpid()):
            while time.process_time() < ran + 0.3:
                pass
        took, stolen = time.monotonic() - began, stolen_seconds(min(cpus)) - stolen
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, cpus)
    assert took > 0.4
    assert 0.22 <= shares._debt((os.getpid(), NOBODY)) <= 0.38 + stolen


def test_no_descriptor_stays_open() -> None:
    Shares(Path("/proc"), 0.25)
    before = os.listdir("/proc/self/fd")
    for _ in range(10):
        Shares(Path("/proc"), 0.25)
    assert os.listdir("/proc/self/fd") == before
