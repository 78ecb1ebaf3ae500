"""What the namer remembers of processes that blocked, and for how long."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lockd.names.locks import user_locks
from lockd.names.locks.user_locks import MOST_RENAMED_SECONDS, WEIGHED_EVERY
from lockd.names.objects.address_space import AddressSpace
from lockd.names.objects.jit import JitNames
from lockd.names.objects.object_cache import ObjectCache
from lockd.names.protocol import (
    GoWaits,
    GoWaitsAnswer,
    LockAnswer,
    OwnedLock,
    Owners,
    OwnersAnswer,
    UserLockSeen,
    Watch,
)
from lockd.names.server import ASKED_SECONDS, Names
from lockd.names.shares import NOBODY, Shares

FIRST, SECOND = 100, 200
MAPS = "400000-401000 r-xp 00000000 08:01 7 /bin/waiter\n401000-402000 rw-p 00001000 08:01 7 /bin/waiter\n"
LOCK = 0x401100


class Host:
    """Names of processes of a procfs of its own, at times of its own."""

    def __init__(self, procfs: Path) -> None:
        self._procfs = procfs
        self._now = 1000.0
        self._shares = Shares(procfs, 1.0)
        self.names = Names(procfs, self._shares, lambda: self._now)

    def owes(self, tgid: int) -> None:
        """It has taken more of the namer's time than it may."""
        self._shares._charge((tgid, NOBODY), 1000.0)

    def blocks_and_ends(self, tgid: int) -> None:
        directory = self._procfs / str(tgid)
        directory.mkdir()
        (directory / "maps").write_text(MAPS)
        self.names.note_blocked([tgid])
        shutil.rmtree(directory)

    def wait(self, seconds: float) -> None:
        self._now += seconds

    def lock_of(self, tgid: int) -> str:
        answer = self.names.answer(UserLockSeen(1, tgid, tgid, LOCK, "lock"))
        assert isinstance(answer, LockAnswer)
        return answer.lock


def test_a_process_that_ended_is_still_known(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    assert host.lock_of(FIRST) == "waiter+0x1100"


def test_it_is_known_while_others_are_spoken_of(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    host.names.answer(Watch((SECOND,), (300,)))
    host.wait(ASKED_SECONDS / 2)
    host.blocks_and_ends(SECOND)
    assert host.lock_of(FIRST) == "waiter+0x1100"


def test_it_is_forgotten_if_nobody_asks(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    host.wait(ASKED_SECONDS)
    host.blocks_and_ends(SECOND)
    assert host.lock_of(FIRST) == "anon"


def test_what_the_sampler_speaks_of_is_known_until_it_says_otherwise(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    host.names.answer(Watch((FIRST,), ()))
    host.wait(ASKED_SECONDS)
    host.blocks_and_ends(SECOND)
    assert host.lock_of(FIRST) == "waiter+0x1100"
    host.names.answer(Watch((), (FIRST,)))
    assert host.lock_of(FIRST) == "anon"


def test_what_it_remembers_has_a_bound_that_is_not_looked_at_for_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much it is, is a sum over thousands."""
    most, weighed = 50 * len(MAPS), 0

    def memory(process: Any) -> int:
        nonlocal weighed
        weighed += 1
        return int(process.space.memory)

    monkeypatch.setattr(user_locks, "MAX_PROCESS_BYTES", most)
    monkeypatch.setattr(user_locks._Process, "memory", property(memory))
    host = Host(tmp_path)
    count = 10 * WEIGHED_EVERY
    for tgid in range(FIRST, FIRST + count):
        host.blocks_and_ends(tgid)
    kept = host.names._user._processes
    assert sum(process.space.memory for process in kept.values()) <= most + WEIGHED_EVERY * len(MAPS)
    assert weighed < 4 * count
    assert list(kept)[-1] == FIRST + count - 1
    assert host.lock_of(FIRST + count - 1) == "waiter+0x1100"
    assert host.lock_of(FIRST) == "anon"


def java(directory: Path) -> user_locks._Process:
    return user_locks._Process(directory, AddressSpace(directory, ObjectCache()), JitNames(directory))


def test_locks_of_java_are_named_anew_soon_and_then_more_and_more_rarely(tmp_path: Path) -> None:
    """A perf map is read as it is being written, and then there is more in it; one may also change always."""
    process = java(tmp_path)
    process.note_names(0.0)
    assert process.generation == 0
    renamed = []
    for tenth in range(10_000):
        process.jit.reads += 1
        before = process.generation
        process.note_names(tenth / 10)
        renamed += [tenth / 10] * (process.generation - before)
    assert renamed[:8] == [0, 1, 3, 7, 15, 31, 63, 123]
    assert renamed[-1] - renamed[-2] == MOST_RENAMED_SECONDS


def test_names_that_came_too_soon_are_taken_up_later(tmp_path: Path) -> None:
    process = java(tmp_path)
    process.jit.reads += 1
    process.note_names(10.0)
    process.jit.reads += 1
    process.note_names(10.5)
    assert process.generation == 1
    process.note_names(11.0)
    assert process.generation == 2


def test_of_whom_has_taken_his_share_no_lock_is_looked_at(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.blocks_and_ends(FIRST)
    host.owes(FIRST)
    assert host.lock_of(FIRST) == "anon"
    owners = host.names.answer(Owners(1, (OwnedLock(FIRST, LOCK, "lock", "mutex"),)))
    assert owners == OwnersAnswer(1, (0,))
    assert host.names.answer(GoWaits((FIRST,))) == GoWaitsAnswer((FIRST,), (-1,))
    host.blocks_and_ends(SECOND)
    assert host.lock_of(SECOND) == "waiter+0x1100"
