"""Names of kernel locks that follow from earlier answers, compared with what the namer would answer."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from lockd.names import known_kernel_locks
from lockd.names.kernel.locks import KernelNames
from lockd.names.known_kernel_locks import AGAIN_SECONDS, REMEMBERED_SECONDS, KnownKernelLocks
from lockd.names.protocol import KernelLock, LockAnswer

PIPE_WRITE, VFS_READ, MUTEX_LOCK = 0xFFFFFFFF81001000, 0xFFFFFFFF81002000, 0xFFFFFFFF81003000
STATIC, HEAP = 0xFFFFFFFF82000100, 0xFFFF888000000000
KALLSYMS = f"""\
{PIPE_WRITE:x} T pipe_write
{VFS_READ:x} T vfs_read
{MUTEX_LOCK:x} T mutex_lock
ffffffff82000000 D init_task
{STATIC:x} d tasklist_lock
ffffffffc0000000 d other_lock	[other]
"""
STACKS = ((), (MUTEX_LOCK, PIPE_WRITE), (MUTEX_LOCK, VFS_READ), (MUTEX_LOCK, PIPE_WRITE, VFS_READ))
ADDRESSES = (
    HEAP, HEAP + 64, 0xFFFFC90000000000, PIPE_WRITE - 64, STATIC - 0x80, STATIC, STATIC + 8,
    STATIC + (1 << 16) - 1, STATIC + (1 << 16), 0xFFFFFFFFBFFFFFFF, 0xFFFFFFFFC0000000,
    0xFFFFFFFFC0000000 + (1 << 16), (1 << 64) - 1,
)  # fmt: skip
NOW = 1000.0


@pytest.fixture
def names(tmp_path: Path) -> KernelNames:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    return KernelNames(tmp_path)


def waited(address: int, stack: tuple[int, ...] = STACKS[1], lock_type: str = "mutex") -> KernelLock:
    return KernelLock(7, address, lock_type, stack)


def known(names: KernelNames, *questions: KernelLock) -> KnownKernelLocks:
    locks = KnownKernelLocks()
    for question in questions:
        locks.remember(question, names.answer(question), NOW)
    return locks


def test_a_lock_at_another_address_has_the_name_of_its_stack(names: KernelNames) -> None:
    locks = known(names, waited(HEAP))
    assert locks.find(waited(HEAP + 4096)) == LockAnswer(
        7, False, "pipe->mutex", "pipe_write", ("mutex_lock", "pipe_write"), span=(0, PIPE_WRITE - 1)
    )
    for other in (
        waited(HEAP, STACKS[2]),
        waited(HEAP, lock_type="rwsem_read"),
        replace(waited(HEAP), is_mmap_lock=True),
        waited(STATIC),
    ):
        assert locks.find(other) is None, other


def test_the_name_of_a_static_lock_is_its_own(names: KernelNames) -> None:
    locks = known(names, waited(HEAP), waited(STATIC))
    found = locks.find(waited(STATIC))
    assert found and found.lock == "tasklist_lock"
    assert locks.find(waited(STATIC + 8)) is None
    assert locks.find(waited(HEAP)) is None, "of a stack the last counts"


def test_what_is_known_is_what_the_namer_answers(names: KernelNames) -> None:
    """This holds whatever was asked before, and at all borders of static memory."""
    chance, found = random.Random(1), 0
    locks = KnownKernelLocks()
    for _ in range(5000):
        question = KernelLock(
            7,
            chance.choice(ADDRESSES),
            chance.choice(("mutex", "rwsem_read")),
            chance.choice(STACKS),
            chance.random() < 0.2,
        )
        answer, by_others = names.answer(question), locks.find(question)
        if by_others:
            found += 1
            assert (by_others.lock, by_others.site, by_others.stack) == (
                answer.lock,
                answer.site,
                answer.stack,
            )
        else:
            locks.remember(question, answer, NOW)
    assert found > 500


def test_the_namer_is_asked_anew_after_a_while_and_then_not_at_once_again(names: KernelNames) -> None:
    locks = known(names, waited(HEAP))
    due = NOW + REMEMBERED_SECONDS
    for now, is_due in ((due - 1, False), (due, True), (due + 1, False), (due + AGAIN_SECONDS, True)):
        assert locks.is_due(waited(HEAP + 64), now) == is_due, now
    locks.remember(waited(HEAP), names.answer(waited(HEAP)), due)
    assert not locks.is_due(waited(HEAP), due + AGAIN_SECONDS)


def test_what_is_remembered_has_a_bound(names: KernelNames, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_kernel_locks, "MOST_REMEMBERED", 2)
    locks = known(names, *(waited(HEAP, stack) for stack in STACKS[:3]), waited(HEAP, STACKS[2]))
    assert [bool(locks.find(waited(HEAP, stack))) for stack in STACKS] == [False, True, True, False]
