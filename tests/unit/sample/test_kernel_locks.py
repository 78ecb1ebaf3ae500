"""Tests of kernel locks for which threads wait so long that the lock has a row before the wait ends."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lockd.kernel.manifest import Manifest
from lockd.names.labels.processes import Processes
from lockd.names.labels.units import Units
from lockd.names.protocol import UNKNOWN, KernelLock, LockAnswer
from lockd.sample.aggregates.contention import PROGRAMS, ContentionTables
from lockd.sample.aggregates.identities import ProcessNames
from lockd.sample.aggregates.kernel_locks import KernelLockAggregates
from lockd.sample.aggregates.ongoing import Moment
from lockd.sample.aggregates.window import Stacks, Window
from lockd.sample.series.limits import Limits, LineBudget

TYPES = ["mutex", "rwsem_read"]
SHOP = ("shop.service", "shop")
NAMES = {100: SHOP, 200: ("web.service", "web")}
SECOND = 1_000_000_000
NOW = 1000.0
LOCK = 0xFFFF888100000010
KEY = np.dtype([("lock", np.uint64), ("tid", np.uint32), ("cpu", np.uint32)])
WAIT = np.dtype([("since", np.uint64), ("tgid", np.uint32), ("type", np.uint32)])

ENDED_KEY = np.dtype([("lock", np.uint64), ("tid", np.uint32), ("type", np.uint8), ("slot", np.uint8)])
WHO = np.dtype([("tgid", np.uint32), ("thread_comm", "S16")])
ENDED = np.dtype(
    [("waits", np.uint64), ("wait_ns", np.uint64), ("max_wait_ns", np.uint64), ("is_mmap_lock", np.uint64),
     ("who", WHO)]
)  # fmt: skip

Wait = tuple[int, int, int, int, float]
"""Lock, thread, process, type and seconds that the thread has waited."""


@dataclass
class Host:
    """The aggregates, and the questions that were asked of the namer."""

    asked: list[KernelLock] = field(default_factory=list)
    known: dict[tuple[int, ...], LockAnswer] = field(default_factory=dict)
    """The answers that are known already, by stack."""
    is_quiet: bool = False
    """Whether the namer rests."""

    def __post_init__(self) -> None:
        limits = Limits()
        self.contention = ContentionTables(lambda tgid, tid: f"thread{tid}", 64)
        manifest = Manifest(0, (), (), (), (), {"lock_type": TYPES}, {"SLOTS": 28})
        self.aggregates = KernelLockAggregates(
            manifest, limits, LineBudget(limits), self.contention, cast(Any, self)
        )

    def ask(self, question: KernelLock, is_needed: bool) -> bool:
        """Take a question as a resolver does: a namer that rests gets only questions that are needed."""
        if self.is_quiet and not is_needed:
            return False
        self.is_quiet = False
        self.asked.append(question)
        return True

    def known_answer(self, question: KernelLock) -> LockAnswer | None:
        return self.known.get(question.stack)

    def look(
        self, *waits: Wait, has_detail: bool = True, clock: int = int(NOW) * SECOND, cpu: int = 0
    ) -> None:
        keys = np.array([(lock, tid, cpu) for lock, tid, *_ in waits], KEY)
        values = [(clock - int(s * SECOND), tgid, number) for _, _, tgid, number, s in waits]
        identities = SimpleNamespace(identify_process=lambda tgid, since: (NAMES.get(tgid, SHOP), True))
        of_kernel = keys, np.array(values, WAIT)
        nothing = cast(Any, None)
        self.aggregates.note_ongoing(
            Moment(cast(Any, identities), nothing, nothing, of_kernel, None, clock, NOW, has_detail)
        )

    def fold(
        self,
        *waits: tuple[int, int, tuple[int, ...]],
        now: float = NOW,
        wait_ns: int = 1000,
        slots: Sequence[int] = (0,),
        for_mmap_lock: Sequence[bool] = (False,),
    ) -> None:
        """Fold waits of `wait_ns` each: the lock, the thread and the stack. `slots` are of the histogram.

        `for_mmap_lock` is whether each is, or all are, for the mmap_lock of the thread's address space.
        """
        addresses, tids = (np.array([wait[i] for wait in waits], np.uint64) for i in (0, 1))
        keys = np.zeros(len(waits), ENDED_KEY)
        values = np.zeros(len(waits), ENDED)
        keys["lock"], keys["tid"], keys["slot"] = addresses, tids, slots
        values["waits"], values["wait_ns"], values["max_wait_ns"] = 1, wait_ns, wait_ns
        values["is_mmap_lock"] = for_mmap_lock
        names = np.empty(1, object)
        names[0] = SHOP
        processes = ProcessNames(cast(Any, names), np.zeros(len(waits), np.int64))
        at = {"address": addresses, "tid": tids, "type": keys["type"], "slot": keys["slot"]}
        frames = {"kernel": np.array([(*stack, 0, 0)[:2] for _, _, stack in waits], np.uint64)}
        window = Window(keys, values, np.ones(len(waits), np.uint64), processes, has_detail=True)
        self.aggregates.fold(window, Stacks(cast(Any, at), cast(Any, frames)), now)

    def site_counts(self) -> dict[tuple[str, ...], int]:
        """The waits of each series of locks and sites, by these two labels."""
        sites = self.aggregates.sites.series
        rows, labels = sites.live()
        return {label[3:]: int(count) for label, count in zip(labels, sites["count"][rows], strict=True)}

    def add_ended(self, lock: str, site: str, address: int = LOCK, number: int = 0) -> None:
        """Add a row of waits for a lock that have ended."""
        process = np.empty(1, object)
        process[0] = SHOP
        about = {"address": address, "kind_number": number, "kind": TYPES[number], "process": process}
        about |= {"program": PROGRAMS.index("kernel_locks")}
        about |= {"blocked_ns": 1000, "count": 1, "is_asked": True}
        (row,) = self.contention.locks.find_or_add(np.array([7], np.uint64), NOW, lambda at: about)
        self.aggregates.sites.set_name(int(row), lock, site, ())

    def rows(self, holders: dict[tuple[int, int], int] | None = None) -> list[dict[str, Any]]:
        """Return the rows of /api/v1/locks whose locks are waited for now."""
        tables, arrays = self.contention.tables(NOW, holders or {}, {})
        table = tables["locks"]
        columns = {**table["text"], **{name: arrays[f"locks.{name}"] for name in table["numbers"]}}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return [row for row in rows if row["waiting"]]


@pytest.fixture
def host() -> Host:
    return Host()


def test_a_lock_has_a_row_as_soon_as_a_thread_has_waited_for_a_second(host: Host) -> None:
    host.look((LOCK, 1, 100, 0, 0.9))
    assert host.rows() == []
    host.look((LOCK, 1, 100, 0, 5.0), (LOCK, 2, 100, 0, 2.0), (LOCK, 3, 200, 0, 3.0), (LOCK, 4, 100, 0, 0.5))
    shop, web = host.rows({(0, LOCK): 77})
    about = {"unit": "shop.service", "comm": "shop", "kind": "mutex", "lock": "", "site": ""}
    about |= {"address": f"{LOCK:#x}", "waiting": 2, "waiting_us": 5e6, "blocked_count": 0, "blocked_us": 0}
    about |= {"threads": 2, "holder_tid": 77, "holder": "thread77"}
    assert {name: shop[name] for name in about} == about
    assert (web["comm"], web["waiting"], web["waiting_us"]) == ("web", 1, 3e6)


def test_the_row_is_dropped_when_no_thread_waits_any_longer(host: Host) -> None:
    """Once the wait has ended, it is counted in another row, which has its site."""
    host.look((LOCK, 1, 100, 0, 5.0), (LOCK + 64, 2, 100, 0, 5.0))
    host.look((LOCK, 1, 100, 0, 6.0))
    assert [row["address"] for row in host.rows()] == [f"{LOCK:#x}"]
    host.look((LOCK, 9, 100, 0, 0.1))
    assert len(host.contention.locks) == 0
    host.look((LOCK, 1, 100, 0, 5.0))
    host.look()
    assert len(host.contention.locks) == 0


def test_a_spin_counts_when_it_has_ended(host: Host) -> None:
    """The end of a spin in an interrupt may not be seen. What would be shown has no thread: id 0."""
    host.look((LOCK, 0, 100, 0, 5.0), cpu=2)
    assert host.rows() == []
    assert len(host.contention.threads) == 0
    assert host.asked == []


def test_the_namer_is_asked_once(host: Host) -> None:
    for seconds in (2.0, 3.0):
        host.look((LOCK, 1, 100, 0, seconds), (LOCK, 2, 100, 0, seconds))
    (question,) = host.asked
    assert (question.address, question.lock_type, question.stack) == (LOCK, "mutex", ())
    assert host.aggregates.sites.note_answer(LockAnswer(question.key, False, "big_lock", UNKNOWN, ()))
    host.look((LOCK, 1, 100, 0, 4.0))
    assert [(row["lock"], row["site"]) for row in host.rows()] == [("big_lock", UNKNOWN)]


def test_it_has_the_name_that_earlier_waits_told(host: Host) -> None:
    """The namer would need a stack for the name. The site is not taken over: this wait may be elsewhere."""
    host.add_ended("inode->i_rwsem", "vfs_read")
    host.look((LOCK, 1, 100, 0, 2.0), (LOCK, 2, 100, 1, 2.0))
    names = {row["kind"]: (row["lock"], row["site"]) for row in host.rows()}
    assert names == {"mutex": ("inode->i_rwsem", UNKNOWN), "rwsem_read": ("", "")}
    assert [question.lock_type for question in host.asked] == ["rwsem_read"]
    host.look()
    assert len(host.contention.locks) == 1


def test_a_new_lock_whose_name_follows_from_its_stack_counts_under_it_at_once(host: Host) -> None:
    host.known[1, 2] = LockAnswer(0, False, "pipe->mutex", "pipe_write")
    host.fold((LOCK, 1, (1, 2)), (LOCK + 64, 2, (1, 2)), (LOCK + 128, 3, (1, 3)))
    assert host.site_counts() == {("pipe->mutex", "pipe_write"): 2, ("other", "other"): 1}
    (question,) = host.asked
    assert (question.address, question.stack) == (LOCK + 128, (1, 3))


def test_a_long_wait_does_not_count_for_the_place_of_a_short_one(host: Host) -> None:
    """Both are of one thread, for one lock, and in the same second."""
    host.known[1, 2] = LockAnswer(0, False, "mmap_lock", "lock_mm_and_find_vma")
    host.known[3, 4] = LockAnswer(0, False, "mmap_lock", "do_munmap")
    host.fold((LOCK, 1, (1, 2)), (LOCK, 1, (3, 4)), slots=(2, 16))
    assert host.site_counts() == {("mmap_lock", "lock_mm_and_find_vma"): 1, ("mmap_lock", "do_munmap"): 1}


def test_a_lock_whose_question_was_lost_with_a_namer_is_asked_for_again(host: Host) -> None:
    """The question has the stack of the wait that was seen first: other threads may wait elsewhere by now."""
    host.fold((LOCK, 1, (1, 3)))
    (question,) = host.asked
    answer = question.fallback()
    assert isinstance(answer, LockAnswer)
    assert host.aggregates.sites.note_answer(answer)
    host.fold((LOCK + 64, 2, (1, 4)))
    assert {(one.address, one.stack) for one in host.asked[1:]} == {(LOCK, (1, 3)), (LOCK + 64, (1, 4))}
    assert host.aggregates.sites.note_answer(LockAnswer(question.key, False, "pipe->mutex", "pipe_write"))
    host.fold((LOCK, 1, (1, 3)))
    assert len(host.asked) == 3
    assert host.site_counts() == {("other", "other"): 2, ("pipe->mutex", "pipe_write"): 1}
    assert not any(host.contention.locks["frames"][host.contention.locks["lock"] == "pipe->mutex"])


def test_a_lock_is_known_as_an_mmap_lock_by_any_wait_for_it(host: Host) -> None:
    """Another process of this name may have waited for it as well, to read about this one."""
    waits = (LOCK, 1, (1, 3)), (LOCK, 2, (1, 3))
    host.fold(*waits)
    host.fold(*waits, for_mmap_lock=(True, False))
    host.fold(*waits, for_mmap_lock=(False, True))
    assert [(question.stack, question.is_mmap_lock) for question in host.asked] == [
        ((1, 3), False),
        ((1, 3), True),
    ]


def test_short_waits_do_not_wake_the_namer(host: Host) -> None:
    """The namer is asked for the names of their locks when it runs for something else."""
    host.is_quiet = True
    host.known[1, 2] = LockAnswer(0, False, "pipe->mutex", "pipe_write")
    short, other = (LOCK, 1, (1, 3)), (LOCK + 64, 2, (1, 4))
    host.fold(short, other, (LOCK + 128, 3, (1, 2)))
    host.fold(short, now=NOW + 1)
    assert host.asked == []
    assert host.site_counts() == {("pipe->mutex", "pipe_write"): 1, ("other", "other"): 3}
    host.fold(short, now=NOW + 2, wait_ns=998_000)
    assert [question.address for question in host.asked] == [LOCK], "its waits are 1 ms long together"
    host.fold((LOCK + 192, 4, (1, 2)), now=NOW + 3)
    assert [question.stack for question in host.asked] == [(1, 3), (1, 4)]


def test_its_releases_do_not_count_there(host: Host) -> None:
    """A release is counted under the site at which threads waited, which is known later."""
    host.look((LOCK, 1, 100, 0, 2.0))
    process = np.empty(1, object)
    process[0] = SHOP
    locks = np.array([LOCK], np.uint64), np.array([0])
    assert host.aggregates.sites.rows_of_most_waited(*locks, cast(Any, process)).tolist() == [-1]
    host.add_ended("big_lock", "vfs_read")
    assert host.aggregates.sites.rows_of_most_waited(*locks, cast(Any, process)).tolist() != [-1]


def test_under_restraint_no_lock_has_a_row(host: Host) -> None:
    host.look((LOCK, 1, 100, 0, 3.0), has_detail=False)
    assert len(host.contention.locks) == 0


def test_under_restraint_the_tables_stand_still(host: Host) -> None:
    """What they show is the last that is known. Without it a lock that is stuck would seem to be free."""
    host.look((LOCK, 1, 100, 0, 2.0))
    rows = np.flatnonzero(host.contention.threads.used)
    assert host.contention.threads["waiting_ns"][rows].tolist() == [2 * SECOND]
    host.look((LOCK, 1, 100, 0, 3.0), has_detail=False)
    assert host.contention.threads["waiting_ns"][rows].tolist() == [2 * SECOND]
    host.look(has_detail=False)
    assert host.contention.threads["waiting_ns"][rows].tolist() == [0]


def test_a_wait_of_a_thread_that_is_gone_is_found(host: Host) -> None:
    """The program for its end was skipped: it would seem to go on for ever, and somebody would be paged."""
    ended, mine, processes = subprocess.Popen(["true"]), os.getpid(), Processes(Units())
    waits = (LOCK, mine, mine, 0, 61.0), (LOCK, ended.pid, ended.pid, 0, 61.0), (LOCK, 5, 5, 0, 59.0)
    assert host.aggregates.find_ended(processes) is None
    ended.wait()
    began = time.monotonic_ns()
    host.look(*waits, clock=began + 61 * SECOND)
    keys = host.aggregates.find_ended(processes)
    assert keys is not None
    assert keys["tid"].tolist() == [ended.pid]
