"""Names of locks, asked of a real namer process and fetched later."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockd.names.capture import Capture
from lockd.names.kernel_locks import MODULES_SECONDS
from lockd.names.messages import (
    Answer,
    KernelLock,
    LockAnswer,
    Looks,
    OwnedLock,
    Owners,
    OwnersAnswer,
    Question,
    UserLockSeen,
    decode,
    decode_question,
    encode_answer,
)
from lockd.names.resolver import QUEUED, Resolver

LOCK = 0xFFFFFFFFC0001000
KALLSYMS = "ffffffff82000000 D init_task\nffffffffc0000000 d other_lock\t[other]\n"

MakeResolver = Callable[[Path], Resolver]


@pytest.fixture
def make() -> Iterator[MakeResolver]:
    """Resolvers whose namers are ended with the test."""
    made: list[Resolver] = []

    def make(procfs: Path) -> Resolver:
        made.append(Resolver(procfs))
        return made[-1]

    yield make
    for resolver in made:
        resolver.close()


def answers(resolver: Resolver, count: int = 1) -> list[Answer]:
    found: list[Answer] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} answers"
        found += resolver.answers()
        time.sleep(0.01)
    return found


def named(resolver: Resolver, address: int) -> str:
    assert resolver.ask(KernelLock(1, address, "mutex"))
    (answer,) = answers(resolver)
    assert isinstance(answer, LockAnswer)
    return answer.lock


def test_a_module_that_was_loaded_later_has_names_too(tmp_path: Path, make: MakeResolver) -> None:
    kallsyms, modules = tmp_path / "kallsyms", tmp_path / "modules"
    kallsyms.write_text(KALLSYMS)
    modules.write_text("other 16384 2 - Live 0xffffffffc0000000\n")
    resolver = make(tmp_path)
    assert named(resolver, LOCK) == "other_lock+0x1000"

    kallsyms.write_text(KALLSYMS + "ffffffffc0001000 d registry_lock\t[new]\n")
    modules.write_text("new 16384 0 - Live 0xffffffffc0001000\nother 16384 3 - Live 0xffffffffc0000000\n")
    time.sleep(2 * MODULES_SECONDS)
    assert named(resolver, LOCK) == "registry_lock"


def test_a_kernel_without_modules_has_names(tmp_path: Path, make: MakeResolver) -> None:
    (tmp_path / "kallsyms").write_text("ffffffff82000000 D init_task\nffffffff82000100 d tasklist_lock\n")
    assert named(make(tmp_path), 0xFFFFFFFF82000100) == "tasklist_lock"


def test_while_it_is_paused_only_the_owners_of_locks_are_asked_for(
    tmp_path: Path, make: MakeResolver
) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    resolver.is_paused = True
    resolver.ask(KernelLock(1, LOCK, "mutex"))
    resolver.ask(Owners(7, ()))
    (answer,) = answers(resolver)
    assert isinstance(answer, OwnersAnswer)
    time.sleep(0.1)
    assert resolver.answers() == []
    resolver.is_paused = False
    (answer,) = answers(resolver)
    assert isinstance(answer, LockAnswer)


def test_processes_that_come_and_go_meanwhile_take_no_room(tmp_path: Path, make: MakeResolver) -> None:
    """Or a namer that falls behind would be asked about them for ever, and about no lock again."""
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    resolver.is_paused = True
    for tgid in range(1, 10_000):
        resolver.look((tgid,))
        resolver.look((), (tgid,))
    resolver.answers()
    assert resolver.room == QUEUED
    assert not resolver._to_look
    assert not resolver._to_forget
    resolver.is_paused = False
    assert named(resolver, LOCK) == "other_lock+0x1000"


def test_all_that_live_are_looked_at_and_forgotten_in_messages_of_their_size(
    tmp_path: Path, make: MakeResolver
) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    resolver.look(range(1, 2501))
    resolver.look((), range(1, 11))
    named(resolver, LOCK)
    assert not resolver._to_look
    resolver.look((), range(11, 2501))
    named(resolver, LOCK)
    assert not resolver._to_forget


def test_it_is_idle_only_while_nothing_waits(tmp_path: Path, make: MakeResolver) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    assert not resolver.is_idle  # there is no namer yet
    named(resolver, LOCK)
    assert resolver.is_idle
    for gone in ((), (1,)):
        resolver.look(() if gone else (1,), gone)
        assert not resolver.is_idle
        resolver.answers()
        assert resolver.is_idle
    assert resolver.ask(KernelLock(2, LOCK, "mutex"))
    assert not resolver.is_idle
    answers(resolver)
    assert resolver.is_idle


def test_answers_come_in_the_order_of_the_questions(tmp_path: Path, make: MakeResolver) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    for key in range(QUEUED):
        assert resolver.ask(KernelLock(key, LOCK + key, "mutex"))
    assert not resolver.ask(KernelLock(QUEUED, LOCK, "mutex"))
    keys = [answer.key for answer in answers(resolver, QUEUED) if isinstance(answer, LockAnswer)]
    assert keys == list(range(QUEUED))


def test_a_namer_that_dies_is_replaced_and_only_its_question_is_lost(
    tmp_path: Path, make: MakeResolver, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    assert named(resolver, LOCK) == "other_lock+0x1000"
    first = resolver.pid
    os.kill(first, signal.SIGSTOP)
    for key in range(100):
        resolver.ask(KernelLock(key, LOCK, "mutex"))
    assert resolver.answers() == []
    os.kill(first, signal.SIGKILL)
    found = answers(resolver, 100)
    assert [answer.key for answer in found if isinstance(answer, LockAnswer)] == list(range(100))
    names = [answer.lock for answer in found if isinstance(answer, LockAnswer)]
    assert names == ["anon"] + 99 * ["other_lock+0x1000"]
    assert resolver.pid not in (0, first)
    assert resolver.restarts == 1
    assert "ended by SIGKILL, while looking at the kernel's lock 0xffffffffc0001000" in caplog.text


def test_a_namer_that_cannot_be_started_is_started_later(
    tmp_path: Path, make: MakeResolver, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert resolver.answers() == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resolver.pid == 0
    assert "namer: cannot be started: Too many open files; trying again" in caplog.text
    assert named(resolver, LOCK) == "other_lock+0x1000"


def test_what_the_namers_cost_only_grows(tmp_path: Path, make: MakeResolver) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    assert resolver.cpu_seconds() == 0
    named(resolver, LOCK)
    before = resolver.cpu_seconds()
    assert before > 0
    os.kill(resolver.pid, signal.SIGKILL)
    named(resolver, LOCK)
    assert resolver.cpu_seconds() > before


def test_without_a_ring_it_holds_no_descriptor_but_its_socket(tmp_path: Path, make: MakeResolver) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    named(resolver, LOCK)
    fds = {os.readlink(fd).partition(":")[0] for fd in Path(f"/proc/{resolver.pid}/fd").iterdir()}
    ours = {os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in (1, 2)}
    assert fds <= {"socket", "/dev/null"} | ours


CAPTURE = Capture(tuple(range(17)), bytes(range(256)) * 3, (1 << 63, 5), 7)


@pytest.mark.parametrize(
    "question",
    [
        UserLockSeen(1 << 63, 2, 3, 4, "lock", CAPTURE),
        UserLockSeen(1, 2, 3, 4, "cond"),
        KernelLock(1, LOCK, "mutex", (LOCK, 2), True),
        Owners(1, (OwnedLock(1, 2, "lock", "mutex"), OwnedLock(1, 2, "pi", ""))),
        Looks((1, 2), (3,)),
    ],
)
def test_questions_arrive_as_they_were_sent(question: Question) -> None:
    assert decode_question(question.encode()) == question


@pytest.mark.parametrize(
    "answer", [LockAnswer(1, True, "a:b", "c:d", ("x", "y"), "lock", "mutex"), OwnersAnswer(1, (0, 77))]
)
def test_answers_arrive_as_they_were_sent(answer: Answer) -> None:
    assert decode(encode_answer(answer)) == answer


@pytest.mark.parametrize("message", [b"", b"[]", b"{}", b'{"q":"rm"}\n', b'{"q":"kernel"}\n'])
def test_what_is_no_question_is_refused(message: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        decode_question(message)


SLOW_FILTER = """#!/bin/sh
while read symbol; do
  n=0; while [ $n -lt 60000 ]; do n=$((n+1)); done
  echo "a::slow"
done
"""


def test_what_its_children_take_counts_as_its_own(
    tmp_path: Path, make: MakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A C++ variable, named by a c++filt that is busy for a while."""
    filter_ = tmp_path / "c++filt"
    filter_.write_text(SLOW_FILTER)
    filter_.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    resolver = make(Path("/proc"))
    variable = ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL("libstdc++.so.6"), "_ZSt4cout"))
    assert resolver.ask(UserLockSeen(1, os.getpid(), os.getpid(), variable, "lock"))
    (answer,) = answers(resolver)
    assert isinstance(answer, LockAnswer)
    assert answer.lock.endswith("a::slow")
    before, deadline = resolver.cpu_seconds(), time.monotonic() + 10
    while resolver.cpu_seconds() < before + 0.03:  # the child ends once nobody asks
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_names_of_functions_are_kept_once_however_many_locks_are_waited_for_there() -> None:
    stack = ("futex_wait", "do_futex", "do_syscall_64")
    one, other = (
        decode(encode_answer(LockAnswer(key, False, f"lock_{key}", "do_futex", stack))) for key in (1, 2)
    )
    assert isinstance(one, LockAnswer)
    assert isinstance(other, LockAnswer)
    assert one.stack == stack
    assert all(mine is theirs for mine, theirs in zip(one.stack, other.stack, strict=True))
    assert one.site is other.site is one.stack[1]
