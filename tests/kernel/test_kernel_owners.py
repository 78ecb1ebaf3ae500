"""The owner of a kernel lock, which the lock itself stores, as read by a thread without capabilities."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockd.config.reader import read_text
from lockd.config.schema import Config
from lockd.kernel.lock_owners import FUNCTION, KernelOwners
from lockd.load.child import run_loader
from lockd.process import privileges
from lockd.sample.drain import Collector
from lockd.service.start import load_settings
from tests.support.lock_module import LockModule, Script
from tests.support.workload import Start

CONFIG = {"futex": {"enabled": False}, "offcpu": {"enabled": False}, "kernel_locks": {"mode": "all"}}
HELD_BY_ONE = {
    "mutex_lock mutex": "mutex_lock mutex",
    "mutex_lock allocated_mutex": "mutex_lock allocated_mutex",
    "down_write rwsem": "down_write rwsem",
    "down_write allocated_rwsem": "down_read allocated_rwsem",
}
"""Locks that store their owner: the step by which the holder takes the lock, and that of the waiter."""
HELD_BY_WHO_KNOWS = {"down_read rwsem": "down_write rwsem", "down semaphore": "down semaphore"}
TYPES = {"mutex_lock": "mutex", "down_write": "rwsem_write", "down_read": "rwsem_read", "down": "semaphore"}
RELEASE = {"mutex_lock": "mutex_unlock", "down_write": "up_write", "down_read": "up_read", "down": "up"}


class Owners:
    """The program that reads owners, loaded as a daemon loads it, and the waits about which it is asked."""

    def __init__(self) -> None:
        config = read_text(Config, json.dumps({"programs": CONFIG}), "test")
        manifest, self._fds = run_loader(load_settings(config))
        self._collector = Collector(manifest, self._fds)
        first = len(manifest.maps)
        assert [name for _, name in manifest.functions].count(FUNCTION) == 1
        self.owners = KernelOwners.from_manifest(manifest, self._fds[first : first + len(manifest.functions)])
        self._types = list(manifest.enums["lock_type"])

    def waits(self, comm: str) -> list[tuple[str, int, int]]:
        """Return the lock type, the lock's address and the waiter of each wait of threads called `comm`."""
        keys, waits = self._collector.kernel_waits() or ((), ())
        return [
            (self._types[wait["type"]], int(key["lock"]), int(key["tid"]))
            for key, wait in zip(keys, waits, strict=True)
            if key["tid"] and comm_of(int(key["tid"])) == comm
        ]

    def wait(self, comm: str, lock_type: str, seconds: float) -> tuple[int, int]:
        """Return the lock's address and the waiter of the only such wait, once it has begun."""
        end = time.monotonic() + seconds
        while not (found := [wait[1:] for wait in self.waits(comm) if wait[0] == lock_type]):
            assert time.monotonic() < end, self.waits(comm)
            time.sleep(0.02)
        (wait,) = found
        return wait

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def comm_of(tid: int) -> str:
    try:
        return Path(f"/proc/{tid}/comm").read_text().strip()
    except OSError:  # the thread has ended
        return ""


def kept() -> set[str]:
    """Return the capabilities that the sampler keeps. Before 5.19 it needs CAP_BPF to use descriptors of BPF
    objects."""
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    return {"CAP_BPF"} if release < (5, 19) else set()


def told_without_capabilities(owners: Owners, address: int, waiter: int) -> int:
    """Return the owner as read by a thread that has no more capabilities than the sampler has for it."""
    told: list[int] = []

    def ask() -> None:
        privileges.keep_only(kept())
        told.append(owners.owners.owner(address, waiter))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return told[0]


@pytest.fixture(scope="module")
def owners() -> Iterator[Owners]:
    owners = Owners()
    yield owners
    owners.close()


def owner_while_held(owners: Owners, module: LockModule, holds: str, waits: str) -> tuple[int, int]:
    """Return the owner that is read while a thread of the module waits for a lock, and the true holder."""
    lock, comm = holds.split()[1], "owned"
    ends = {taken: f"{RELEASE[taken.split()[0]]} {lock}" for taken in (holds, waits)}
    script = Script(
        {
            "holder": f"{holds}, asleep 1 {lock}, pause, {ends[holds]}",
            "waiter": f"held 1 {lock}, {waits}, {ends[waits]}",
        }
    )
    running = threading.Thread(target=module.run, args=(script, comm))
    running.start()
    try:
        address, waiter = owners.wait(comm, TYPES[waits.split(maxsplit=1)[0]], 60)
        told = told_without_capabilities(owners, address, waiter)
        threads = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and comm_of(int(pid)) == comm]
        (holder,) = set(threads) - {waiter}
    finally:
        module.write("go\n")
        running.join()
    assert owners.owners.owner(address, waiter) == 0  # nobody waits any more
    return told, holder


@pytest.mark.parametrize("holds", HELD_BY_ONE)
def test_the_owner_of_a_lock_of_the_module(holds: str, owners: Owners, module: LockModule) -> None:
    told, holder = owner_while_held(owners, module, holds, HELD_BY_ONE[holds])
    assert told == holder


@pytest.mark.parametrize("holds", HELD_BY_WHO_KNOWS)
def test_readers_and_semaphores_have_no_owner(holds: str, owners: Owners, module: LockModule) -> None:
    told, _ = owner_while_held(owners, module, holds, HELD_BY_WHO_KNOWS[holds])
    assert told == 0


def test_the_owner_of_a_pipe_and_of_an_inode(owners: Owners, workload: Start, scratch: Path) -> None:
    """The workload's holder has the lock while it sits in a page fault that userfaultfd holds up."""
    one = workload("kernel_locks", 1, 1_500_000, scratch)
    one.go()
    found = {}
    for lock_type in ("mutex", "rwsem_write"):
        address, waiter = owners.wait(one.comm, lock_type, 15)
        told = told_without_capabilities(owners, address, waiter)
        found[lock_type] = told, [tid for tid in threads_of(one.pid) if sits_in_a_fault(tid)]
    one.truth()
    one.finish()
    assert all([told] == holders for told, holders in found.values()), found


def threads_of(pid: int) -> list[int]:
    return [int(tid) for tid in os.listdir(f"/proc/{pid}/task")]


def sits_in_a_fault(tid: int) -> bool:
    return "handle_userfault" in Path(f"/proc/{tid}/stack").read_text()
