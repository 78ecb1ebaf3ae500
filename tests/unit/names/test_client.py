"""Names of locks: a real namer process is asked for them, and its answers are fetched later."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import pytest

import lockd
from lockd.kernel.rings import Ring
from lockd.names import client as resolver_module
from lockd.names import known_kernel_locks, server
from lockd.names.client import (
    LONGEST_RESTART_SECONDS,
    MESSAGE_BYTES,
    MOST_ENDING,
    OUTSTANDING,
    QUEUED,
    RESTART_SECONDS,
    STALLED_SECONDS,
    Resolver,
)
from lockd.names.kernel.locks import MODULES_SECONDS
from lockd.names.locks.cpython_waits import MOST_LABEL, label, shortened
from lockd.names.locks.user_locks import SHOWN_FRAMES
from lockd.names.objects.address_space import MAX_MAPS
from lockd.names.objects.demangle import MAX_NAME
from lockd.names.protocol import (
    CPYTHON_BITS,
    HOTSPOT_BITS,
    MOST_FUNCTIONS,
    NOT_READ,
    Answer,
    CPythonPlaces,
    GoWaits,
    HolderAnswer,
    HotSpotPlaces,
    KernelLock,
    KernelLockReleased,
    LockAnswer,
    LockReleased,
    OwnedLock,
    Owners,
    OwnersAnswer,
    Question,
    Reload,
    StackAnswer,
    ThreadCaptured,
    UserLockSeen,
    Watch,
    decode_answer,
    decode_question,
    encode_answer,
)
from lockd.names.runtimes.cpython import PythonFrame
from lockd.names.shares import ANSWER_SECONDS, NOBODY
from lockd.names.unwind.capture import SLEEPER_BYTES, Capture
from lockd.process import isolation
from lockd.process.clock import cpu_seconds
from tests.fuzz.messages import Talker
from tests.needs import needs
from tests.support.doubled_symbol import doubled

LOCK, HEAP = 0xFFFFFFFFC0001000, 0xFFFF888000000000
KALLSYMS = "ffffffff82000000 D init_task\nffffffffc0000000 d other_lock\t[other]\n"

MakeResolver = Callable[..., Resolver]
QUIET = 0.2
LONGEST_SYMBOL = 511
"""The largest number of characters in the name of a kernel function (KSYM_NAME_LEN)."""
MAX_ARG_STRLEN = 32 * mmap.PAGESIZE
"""Bytes of the longest argument of a program (linux/binfmts.h)."""
MOST_KERNEL_FRAMES = 127
"""The largest number of return addresses in a stack of the kernel (sysctl kernel.perf_event_max_stack)."""


@pytest.fixture
def make() -> Iterator[MakeResolver]:
    """Return a function that makes resolvers, whose namers are ended with the test."""
    made: list[Resolver] = []

    def make(procfs: Path, **more: Any) -> Resolver:
        made.append(Resolver(procfs, **more))
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


def test_owners_of_locks_are_asked_for_however_many_names_wait(tmp_path: Path, make: MakeResolver) -> None:
    """Deadlocks are found at every level of restraint, and also after a namer was lost."""
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    named(resolver, LOCK)
    os.kill(resolver.pid, signal.SIGSTOP)
    for key in range(OUTSTANDING):
        assert resolver.ask(KernelLock(key, LOCK, "mutex"))
    resolver.answers()  # these are sent
    while resolver.ask(KernelLock(QUEUED, LOCK, "mutex")):
        pass
    resolver.is_paused = True
    assert resolver.ask(Owners(7, ()))
    os.kill(resolver.pid, signal.SIGKILL)
    until = time.monotonic() + 30
    found: list[Answer] = []
    while not any(isinstance(answer, OwnersAnswer) for answer in found):
        assert time.monotonic() < until
        found += resolver.answers()
        assert resolver.room == 0  # more questions wait than it takes
        time.sleep(0.01)


def test_while_no_namer_runs_only_the_last_question_about_owners_waits() -> None:
    resolver = Resolver(Path("/proc"))
    for token in (1, 2):
        assert resolver.ask(KernelLock(token, LOCK, "mutex"))
        assert resolver.ask(Owners(token, ()))
    first, *others = resolver._queue
    assert first == Owners(2, ())
    assert others == [KernelLock(token, LOCK, "mutex") for token in (1, 2)]


def test_processes_that_come_and_go_meanwhile_take_no_room(tmp_path: Path, make: MakeResolver) -> None:
    """A namer that falls behind must not be asked about such processes for ever, and about no lock again."""
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    resolver.is_paused = True
    for tgid in range(1, 10_000):
        resolver.watch((tgid,))
        resolver.forget_ended(set())
    resolver.answers()
    assert resolver.room == QUEUED
    assert not resolver._to_watch
    assert not resolver._to_forget
    resolver.is_paused = False
    assert named(resolver, LOCK) == "other_lock+0x1000"


def test_all_that_live_are_looked_at_and_forgotten_in_messages_of_their_size(
    tmp_path: Path, make: MakeResolver
) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    resolver.watch(range(1, 2501))
    resolver.forget_ended(set(range(11, 2501)))
    named(resolver, LOCK)
    assert not resolver._to_watch
    resolver.forget_ended(set())
    named(resolver, LOCK)
    assert not resolver._to_forget


def test_a_process_with_the_id_of_one_that_ended_is_not_forgotten_in_its_place(
    tmp_path: Path, make: MakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More processes have ended than one message tells of, and that with the id is not among the first."""
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    resolver.watch(range(1, 2001))
    named(resolver, LOCK)
    assert not resolver._to_watch
    sent: list[Watch] = []

    def send(message: bytes) -> bool:
        question = decode_question(message)
        assert isinstance(question, Watch)
        sent.append(question)
        return True

    monkeypatch.setattr(resolver._namer, "send", send)
    resolver.forget_ended(set())
    resolver.watch((1500,))
    resolver.answers()
    assert sorted(tgid for one in sent for tgid in one.gone) == list(range(1, 2001))
    assert [(1500 in one.tgids, 1500 in one.gone) for one in sent] == [(True, True), (False, False)]


def test_it_is_idle_only_while_nothing_waits(tmp_path: Path, make: MakeResolver) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    assert not resolver.is_idle  # there is no namer yet
    named(resolver, LOCK)
    assert resolver.is_idle
    for change in (lambda: resolver.watch((1,)), lambda: resolver.forget_ended(set())):
        change()
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


@pytest.mark.parametrize(
    ("pauses", "is_lost"),
    [([2 * ANSWER_SECONDS], False), (3 * [0.9 * STALLED_SECONDS], True)],
    ids=["frozen", "hung"],
)
def test_a_namer_that_was_frozen_with_the_sampler_lives_on(
    pauses: list[float], is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    resolver = Resolver(Path("/proc"))
    resolver._namer = talker = Talker()  # type: ignore[assignment]  # no process
    talker.bench.turn = (123, 1000)
    question = UserLockSeen(1, 123, 123, 0x1000, "lock")
    assert resolver.ask(question) and resolver.answers() == []
    found: list[Answer] = []
    for pause in pauses:
        now += pause
        found += resolver.answers()
    assert found == ([question.fallback()] if is_lost else [])
    assert resolver.restarts == len(resolver._owing) == is_lost


@pytest.mark.parametrize(
    ("tgid", "about"),
    [
        (12, "process 12, before the lock 0x1000 of process 123;"),
        (123, "the lock 0x1000 of process 123;"),
    ],
    ids=["another process", "the process of the question"],
)
def test_the_process_that_a_lost_namer_looked_at_is_in_the_log(
    tgid: int, about: str, caplog: pytest.LogCaptureFixture
) -> None:
    resolver = Resolver(Path("/proc"))
    resolver._namer = talker = Talker()  # type: ignore[assignment]  # no process
    assert resolver.ask(UserLockSeen(1, 123, 123, 0x1000, "lock")) and resolver.answers() == []
    talker.bench.turn = (tgid, 0)
    talker.says = [b"nothing that can be read"]
    assert len(resolver.answers()) == 1
    assert f"while looking at {about}" in caplog.text


SMALL = """
import re, sys
from pathlib import Path
sys.path.insert(0, "ROOT")
from lockd.names import server
data = re.findall(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())
server.MEMORY_BYTES = 1024 * int(data[0]) + MAX_MAPS // 2
sys.exit(server.main())
""".replace("ROOT", isolation.ROOT).replace("MAX_MAPS", str(MAX_MAPS))
"""The code of a namer with too little memory to read what a process has mapped."""


def test_a_namer_without_memory_is_replaced(
    make: MakeResolver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a namer would fail at all later questions, since what takes the memory may stay for ever."""
    resolver = make(Path("/proc"))
    monkeypatch.setattr(isolation, "command", lambda _: [sys.executable, "-c", SMALL])
    resolver.answers()
    monkeypatch.undo()
    other = subprocess.Popen(["sleep", "60"])
    try:
        assert resolver.ask(UserLockSeen(1, other.pid, other.pid, 0x1000, "lock"))
        assert resolver.ask(UserLockSeen(2, os.getpid(), os.getpid(), 0x1000, "lock"))
        found = answers(resolver, 2)
        assert [answer.key for answer in found if isinstance(answer, LockAnswer)] == [1, 2]
        assert resolver.restarts == 1
        assert [tgid for (tgid, _), _, _ in resolver._owing] == [other.pid]
        assert f"while looking at the lock 0x1000 of process {other.pid}" in caplog.text
    finally:
        other.kill()
        other.wait()


def until_it_rests(resolver: Resolver) -> None:
    """Fetch answers until there is no namer, as the sampler does when it has nothing to ask."""
    deadline = time.monotonic() + 30
    while resolver.pid:
        assert time.monotonic() < deadline
        assert resolver.answers() == []
        time.sleep(0.01)
    while resolver._ending:
        resolver.answers()


def test_a_namer_that_nothing_needs_ends_until_something_does(
    tmp_path: Path, make: MakeResolver, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path, quiet_seconds=QUIET)
    resolver.answers()
    assert resolver.pid, "it is there before there is a question"
    named(resolver, LOCK)
    first, taken = resolver.pid, resolver.cpu_seconds()
    until_it_rests(resolver)
    assert not Path(f"/proc/{first}").exists()
    assert resolver.is_idle
    resolver.reload(0.5)
    assert resolver.is_idle, "the next one begins with what is in force"
    assert resolver.cpu_seconds() >= taken
    time.sleep(2 * QUIET)
    assert resolver.answers() == [] and not resolver.pid
    assert named(resolver, LOCK) == "other_lock+0x1000"
    assert resolver.pid not in (0, first)
    assert resolver.restarts == 0
    assert not caplog.records


def test_what_needs_no_namer_neither_starts_nor_keeps_one(tmp_path: Path, make: MakeResolver) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    busy = make(tmp_path)
    named(busy, LOCK)
    assert busy.ask(KernelLock(1, LOCK, "mutex"), is_needed=False), "while there is one it is asked"
    resolver = make(tmp_path, quiet_seconds=QUIET)
    named(resolver, LOCK)
    deadline = time.monotonic() + 30
    while resolver.pid:
        assert time.monotonic() < deadline
        resolver.ask(KernelLock(1, LOCK, "mutex"), is_needed=False)
        resolver.answers()
        time.sleep(0.02)
    assert not resolver.ask(KernelLock(1, LOCK, "mutex"), is_needed=False)
    resolver.watch((1,))
    assert resolver.answers() == []
    assert not resolver.pid
    assert resolver.is_idle
    assert named(resolver, LOCK) == "other_lock+0x1000"


def test_a_lock_whose_name_follows_from_earlier_answers_needs_no_namer(
    tmp_path: Path, make: MakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there is a namer, it is still asked for a name that is old: a module may have come and gone."""
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    first, second = (KernelLock(key, HEAP + key, "mutex") for key in (2, 3))
    fresh = make(tmp_path)
    assert fresh.known_answer(first) is None
    assert named(fresh, HEAP) == "anon"
    known = fresh.known_answer(first)
    assert known and (known.key, known.lock) == (2, "anon")
    assert fresh.is_idle
    monkeypatch.setattr(known_kernel_locks, "REMEMBERED_SECONDS", 0.0)
    monkeypatch.setattr(known_kernel_locks, "AGAIN_SECONDS", 0.0)
    busy, resolver = make(tmp_path), make(tmp_path, quiet_seconds=QUIET)
    named(busy, HEAP)
    assert busy.known_answer(second)
    assert [answer.key for answer in answers(busy) if isinstance(answer, LockAnswer)] == [3]
    named(resolver, HEAP)
    deadline = time.monotonic() + 30
    while resolver.pid:
        assert time.monotonic() < deadline
        assert resolver.known_answer(first)
        resolver.answers()
        time.sleep(0.02)
    assert resolver.known_answer(second)
    assert resolver.answers() == [] and resolver.is_idle and not resolver.pid


def test_another_namer_remembers_processes_anew(tmp_path: Path, make: MakeResolver) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path, quiet_seconds=QUIET)
    resolver.watch((1, 2))
    named(resolver, LOCK)
    resolver.watch((1, 2))
    assert resolver.is_idle, "it remembers them"
    until_it_rests(resolver)
    assert resolver.ask(KernelLock(1, LOCK, "mutex"))
    resolver.watch((1,))
    assert list(resolver._to_watch) == [1]
    answers(resolver)


def test_programs_tell_of_blocked_processes_in_vain_while_it_rests(
    tmp_path: Path, make: MakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring of blocked processes is emptied meanwhile, or the next namer would read what all of them have
    mapped before it answered anything."""
    emptied: list[Ring] = []
    reader = SimpleNamespace(read=lambda: None)
    monkeypatch.setattr(resolver_module, "BlockedProcesses", lambda ring: emptied.append(ring) or reader)
    resolver = make(tmp_path, quiet_seconds=0.0)
    ring = Ring(os.memfd_create("ring"), mmap.PAGESIZE)
    resolver.answers()
    until_it_rests(resolver)
    resolver._blocked = ring  # only from now on, since a namer could not read this: it is no ring
    resolver.answers()
    assert emptied == [ring]
    assert resolver.ask(KernelLock(1, LOCK, "mutex"))
    resolver._blocked = None
    resolver.answers()
    assert emptied == [ring], "what was said last is for the namer"
    os.close(ring.fd)


class Silent(NamedTuple):
    tgid: int
    address: int
    requests: IO[str]  # a line for each request that the server has and does not answer
    end: Callable[[], None]  # ends the server, and whatever waits for it


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Silent]:
    """Yield a process with memory that nobody can read; whoever tries cannot be killed meanwhile."""
    if os.geteuid():
        pytest.skip("needs root: mounts a file system whose server is silent")
    if not Path("/dev/fuse").exists():
        pytest.skip("host: has no /dev/fuse, for a file system whose server is silent")
    script = Path(__file__).with_name("silent_fuse.py")
    server = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    tgid, address = server.stdout.readline().split()
    yield Silent(int(tgid), int(address, 16), server.stdout, server.kill)
    server.kill()
    server.communicate()


def is_stuck(pid: int) -> bool:
    """Whether a process waits for the silent server. After SIGKILL this is a wait that no signal ends."""
    return Path(f"/proc/{pid}/wchan").read_text() == "request_wait_answer"


def stick(resolver: Resolver, token: int, silent: Silent, page: int = 0) -> int:
    """Have a namer hang at a question about the owner of a lock in the memory of `silent`; return the namer's
    process id."""
    address = silent.address + page * mmap.PAGESIZE
    assert resolver.ask(Owners(token, (OwnedLock(silent.tgid, address, "lock", "mutex"),)))
    deadline = time.monotonic() + 30
    while not (resolver.pid and is_stuck(resolver.pid)):
        assert time.monotonic() < deadline
        assert resolver.answers() == []
        time.sleep(0.01)
    assert silent.requests.readline() == "read\n"  # a signal takes back a request that the server has not got
    return resolver.pid


def hang(resolver: Resolver, token: int, silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a namer hang and be killed, after which it does not end."""
    # A page for each namer: a second reader of a page waits only for the first one, and can be killed.
    namer = stick(resolver, token, silent, page=token)
    with monkeypatch.context() as patched:
        patched.setattr(resolver_module, "ANSWER_SECONDS", 0.0)
        assert answers(resolver) == [OwnersAnswer(token, (NOT_READ,))]
    deadline = time.monotonic() + 30
    while not is_stuck(namer):  # it may be between the wait that the signal ended and the next
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_has_a_namer_hang_has_no_other_one_hang(
    silent: Silent, make: MakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The namer's time that a process owes is paid off after a while, whether the killed namer has ended or
    not. The process is refused until the killed namer has ended."""
    resolver = make(Path("/proc"))
    hang(resolver, 1, silent, monkeypatch)
    resolver._owing.clear()  # as if enough time had passed
    silents = OwnedLock(silent.tgid, silent.address + 2 * mmap.PAGESIZE, "lock", "mutex")
    assert resolver.ask(Owners(2, (silents,)))
    assert answers(resolver) == [OwnersAnswer(2, (NOT_READ,))]
    assert (resolver.refused, resolver.restarts) == (1, 1)
    namer = resolver.pid
    resolver.reload(0.5)  # new settings end the refusal for nobody
    assert resolver.ask(Owners(3, (silents,)))
    assert answers(resolver) == [OwnersAnswer(3, (NOT_READ,))]
    assert (resolver.refused, resolver.restarts) == (2, 1)
    silent.end()
    deadline = time.monotonic() + 30
    while resolver._ending:
        assert time.monotonic() < deadline
        assert resolver.answers() == []
    assert resolver.ask(Owners(4, (silents,)))
    assert answers(resolver) == [OwnersAnswer(4, (0,))], "nothing can be read there any more"
    assert (resolver.refused, resolver.restarts, resolver.pid) == (2, 1, namer)


def test_a_namer_that_cannot_die_is_left_behind(
    silent: Silent, make: MakeResolver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the server ends, the namer waits for a page of a file, whatever signal it gets. Whoever waited
    for the end of the namer would not come back."""
    resolver = make(Path("/proc"))
    for token in range(1, MOST_ENDING + 1):
        resolver._owing.clear()  # as if it were another user's process each time
        resolver._ending = dict.fromkeys(resolver._ending, (NOBODY, NOBODY))
        hang(resolver, token, silent, monkeypatch)
        assert resolver.restarts == token
    deadline = time.monotonic() + 30
    while "have not ended" not in caplog.text:  # the next one is due
        assert time.monotonic() < deadline
        assert resolver.answers() == []
    assert resolver.answers() == []
    assert resolver.pid == 0  # with so many hanging, no namer is started
    assert resolver.cpu_seconds() > 0
    assert caplog.text.count("3 namers were killed and have not ended") == 1
    assert f"with process {silent.tgid}" in caplog.text
    silent.end()
    deadline = time.monotonic() + 30
    while not resolver.pid:
        assert time.monotonic() < deadline
        assert resolver.answers() == []


def test_whose_turn_it_was_when_a_namer_was_lost_is_known_to_the_next(
    silent: Silent, make: MakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = make(Path("/proc"))
    mine, silents = (
        OwnedLock(os.getpid(), ctypes.addressof(HELD), "pi", ""),
        OwnedLock(silent.tgid, silent.address, "lock", "mutex"),
    )
    stick(resolver, 1, silent)
    real, skipped = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: real() + skipped)
    found: list[Answer] = []
    while not found:
        skipped += STALLED_SECONDS / 2  # more at once would count as if lockd had been frozen
        found = resolver.answers()
    assert found == [OwnersAnswer(1, (NOT_READ,))]
    assert resolver.refused == 0
    resolver.ask(Owners(2, (silents, mine)))
    assert answers(resolver) == [OwnersAnswer(2, (NOT_READ, os.getpid()))]
    assert resolver.refused == 1
    assert resolver.restarts == 1


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


def test_a_namer_takes_as_many_patterns_as_are_configured(tmp_path: Path, make: MakeResolver) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    patterns = [f"service-{number}:\N{LATIN SMALL LETTER A WITH DIAERESIS}*" for number in range(20_000)]
    assert len(json.dumps(patterns)) > MAX_ARG_STRLEN
    assert named(make(tmp_path, parked=patterns), LOCK) == "other_lock+0x1000"


def test_namers_that_end_before_they_answer_are_started_ever_more_rarely(
    tmp_path: Path, make: MakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends them, such as a lack of memory, may last. Each start takes processor time."""
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    real, skipped = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + skipped[0])
    resolver = make(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(isolation, "command", lambda _: ["/bin/false"])
        while skipped[0] < 60:
            assert resolver.answers() == []
            if resolver.pid:
                os.waitid(os.P_PID, resolver.pid, os.WEXITED | os.WNOWAIT)
            skipped[0] += 0.25
    # 1, 2, 4 and then 8 seconds apart
    assert 5 <= resolver.restarts <= 11
    skipped[0] += LONGEST_RESTART_SECONDS
    assert named(resolver, LOCK) == "other_lock+0x1000"
    assert resolver._pause == RESTART_SECONDS


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


def test_without_a_ring_it_holds_its_socket_and_what_tells_whose_turn_it_is(
    tmp_path: Path, make: MakeResolver
) -> None:
    (tmp_path / "kallsyms").write_text(KALLSYMS)
    resolver = make(tmp_path)
    named(resolver, LOCK)
    fds = set()
    for fd in Path(f"/proc/{resolver.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed just now
            fds.add(os.readlink(fd).partition(":")[0])
    ours = {os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in (1, 2)}
    assert fds <= {"socket", "/memfd", f"/proc/{resolver.pid}/schedstat", "/dev/null"} | ours


HELD = ctypes.c_uint32(os.getpid())
"""The word of a PI mutex that the main thread of this process holds."""
CAPTURE = Capture(tuple(range(17)), bytes(range(256)) * 3, (1 << 63, 5), 7)


@pytest.mark.parametrize(
    "question",
    [
        UserLockSeen(1 << 63, 2, 3, 4, "lock", CAPTURE),
        UserLockSeen(1, 2, 3, 4, "cond"),
        KernelLock(1, LOCK, "mutex", (LOCK, 2), True),
        Owners(1, (OwnedLock(1, 2, "lock", "mutex"), OwnedLock(1, 2, "pi", ""))),
        LockReleased(3, 2, CAPTURE),
        LockReleased(3, 2, CAPTURE, (1 << 47, 5)),
        KernelLockReleased(3, (0xFFFFFFFF81000000, 1)),
        ThreadCaptured(3, 2, (0xFFFFFFFF81000000, 1), CAPTURE),
        ThreadCaptured(3, 2, (), CAPTURE, (1 << 47, 5)),
        ThreadCaptured(3, 2, (0xFFFFFFFF81000000,)),
        Watch((1, 2), (3,)),
        Reload(10, 0.25),
        Reload(10, 0.25, ((7, 1000), (8, -1))),
    ],
)
def test_questions_arrive_as_they_were_sent(question: Question) -> None:
    assert decode_question(question.encode()) == question


@pytest.mark.parametrize(
    "answer",
    [
        LockAnswer(1, True, "a:b", "c:d", ("x", "y"), "lock", "mutex"),
        LockAnswer(1, False, "pipe->mutex", "pipe_write", span=(0, 2**64 - 1)),
        OwnersAnswer(1, (0, NOT_READ, 77)),
        HolderAnswer(3, "c:d", ("x", "y")),
        StackAnswer(3, ("x", "y"), (0, 2**64 - 1), ("schedule",), (0, 2**64 - 1)),
        StackAnswer(3, (), (), (), ()),
        StackAnswer(3, ("read", "app.py:f", "app.py:g"), (1, 2), (), (), (2**47, *[2**32 - 1] * 6)),
    ],
)
def test_answers_arrive_as_they_were_sent(answer: Answer) -> None:
    assert decode_answer(encode_answer(answer)) == answer


@pytest.mark.parametrize(
    "message", [b"", b"1", b"[]", b"{}", b'{"q":"rm"}\n', b'{"q":"kernel"}\n', b"[" * 100_000]
)
def test_what_is_no_question_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError):
        decode_question(message)


NAMED = LockAnswer(
    1,
    True,
    "a:b",
    "c:d",
    ("x", "y"),
    "lock",
    "mutex",
    hotspot=(2**47, *[2**32 - 1] * 9, 3, 3, 0, 1),
    cpython=(2**47, *[2**32 - 1] * 6),
)


def test_a_namer_says_nothing_but_answers_to_what_it_was_asked(tmp_path: Path) -> None:
    """What a namer reads can make it say anything. That may cost the namer its life, but not the sampler."""
    good = json.loads(encode_answer(NAMED))
    for wrong in (
        1, [], {}, {**good, "a": "other"}, {**good, "key": -1}, {**good, "key": "1"}, {**good, "key": 2**64},
        {**good, "is_user": 1}, {**good, "lock": None}, {**good, "stack": [1]}, {**good, "stack": [["x"]]},
        {**good, "hotspot": [1]}, {**good, "hotspot": [2**63, *[0] * 13]},
        {**good, "hotspot": [0, 2**32, *[0] * 12]},
        {**good, "hotspot": [*[0] * 10, 256, 0, 0, 0]}, {**good, "hotspot": [-1, *[0] * 13]},
        {**good, "cpython": [1]}, {**good, "cpython": [2**63, *[0] * 6]},
        {**good, "cpython": [0, 2**32, *[0] * 5]}, {**good, "cpython": [*[0] * 6, -1]},
        {**good, "span": [1]}, {**good, "span": [0, 2**64]}, {**good, "span": [-1, 0]}, {**good, "span": 1},
        {**good, "more": 1}, {**good, "advice": "run this"},
        {**good, "key": 2}, {**good, "is_user": False}, {"a": "owners", "token": 1,
        "tids": [1]},
        {"a": "go", "tgids": [1], "waited_ns": [1]},
    ):  # fmt: skip
        assert not said(tmp_path, UserLockSeen(1, 2, 3, 4, "lock"), json.dumps(wrong).encode()), wrong
    assert not said(tmp_path, UserLockSeen(1, 2, 3, 4, "lock"), b"[" * 100_000)
    assert said(tmp_path, UserLockSeen(1, 2, 3, 4, "lock"), json.dumps(good).encode())
    owners = Owners(5, (OwnedLock(1, 2, "lock", ""),))
    assert said(tmp_path, owners, b'{"a":"owners","token":5,"tids":[7]}')
    for tids in ("[]", "[7,7]", "[9223372036854775808]", "[Infinity]", "[1.5]", '["7"]'):
        assert not said(tmp_path, owners, f'{{"a":"owners","token":5,"tids":{tids}}}'.encode())
    for tgids, waited in (("[8]", "[1]"), ("[9]", "[]"), ("[9]", "[NaN]")):
        assert not said(
            tmp_path, GoWaits((9,)), f'{{"a":"go","tgids":{tgids},"waited_ns":{waited}}}'.encode()
        )


def test_the_functions_of_a_stack_are_taken_only_as_they_were_agreed(tmp_path: Path) -> None:
    good = json.loads(encode_answer(StackAnswer(4, ("read", "main"), (1, 2**64 - 1), ("schedule",), ())))
    longest = {
        **good,
        "user": ["f"] * MOST_FUNCTIONS,
        "returns": [1] * MOST_FUNCTIONS,
        "kernel": ["f"] * MOST_FUNCTIONS,
    }
    asked = ThreadCaptured(4, 2, (0xFFFFFFFF81000000,), CAPTURE)
    for right in (
        good,
        longest,
        {**good, "user": [], "returns": [], "kernel": [], "interrupts": [2**64 - 1]},
        {**good, "user": ["read", "app.py:f", "app.py:g"], "cpython": [2**47, *[2**32 - 1] * 6]},
    ):
        assert said(tmp_path, asked, json.dumps(right).encode()), right
    for wrong in (
        {**good, "a": "holder"}, {**good, "token": 5}, {**good, "token": "4"}, {**good, "token": None},
        {**good, "returns": []}, {**good, "user": []}, {**good, "returns": [1, -1]},
        {**good, "returns": [1, 2**64]}, {**good, "returns": [1, 1.5]}, {**good, "returns": [1, True]},
        {**good, "returns": ["1", "2"]}, {**good, "returns": None}, {**good, "returns": 2},
        {**good, "cpython": [1]}, {**good, "cpython": [-1, *[0] * 6]}, {**good, "user": ["read", 1]},
        {**good, "user": ["read", None]},
        {**good, "kernel": [1]}, {**good, "kernel": None}, {**good, "kernel": [["schedule"]]},
        {**good, "interrupts": True}, {**good, "interrupts": [-1]}, {**good, "more": 1},
        {name: value for name, value in good.items() if name != "kernel"},
        {**longest, "user": ["f"] * (MOST_FUNCTIONS + 1), "returns": [1] * (MOST_FUNCTIONS + 1)},
        {**longest, "kernel": ["f"] * (MOST_FUNCTIONS + 1)},
        {**longest, "returns": [1] * (MOST_FUNCTIONS + 1)},
        {"a": "holder", "token": 4, "site": "", "stack": []},
    ):  # fmt: skip
        assert not said(tmp_path, asked, json.dumps(wrong).encode()), wrong


def said(procfs: Path, question: UserLockSeen | Owners | GoWaits | ThreadCaptured, message: bytes) -> bool:
    """Whether a resolver takes `message` from its namer as an answer to the question, and keeps the namer."""
    resolver = Resolver(procfs)
    resolver._namer = talker = Talker()  # type: ignore[assignment]  # no process
    assert resolver.ask(question) and resolver.answers() == []
    talker.says = [message]
    found = resolver.answers()
    if resolver.restarts:
        assert found == [question.fallback()], "which another namer cannot answer either"
        return False
    assert found == [decode_answer(message)]
    return True


@pytest.mark.parametrize(
    ("name", "places", "bits"),
    [("hotspot", HotSpotPlaces, HOTSPOT_BITS), ("cpython", CPythonPlaces, CPYTHON_BITS)],
)
def test_the_places_in_a_runtime_are_as_wide_as_the_programs_have_them(
    name: str, places: type, bits: tuple[int, ...]
) -> None:
    text = (Path(lockd.__file__).parent / f"bpf/daemon/{name}.bpf.c").read_text()
    (struct,) = re.findall(rf"struct {name} \{{(.*?)\}};", text, re.S)
    members = [(name, int(bits)) for bits, name in re.findall(r"^    u(\d+) (\w+);", struct, re.M)]
    assert [name for name, _ in members] == [field.name for field in fields(places)]
    assert [bits for _, bits in members] == [64, *bits[1:]]


def stack_label() -> str:
    """Return the label of a Python function whose file and name are as long as possible."""
    return label(PythonFrame("/srv/" + "\U00020000" * 1000 + ".py", "\U00020000" * 1023))


def test_an_answer_fits_into_one_message_however_long_the_names_of_functions_are() -> None:
    stack = (stack_label(),) * SHOWN_FRAMES
    assert stack[0].startswith("...") and len(stack[0]) == MOST_LABEL
    assert len(encode_answer(LockAnswer(1, True, stack[0], stack[0], stack))) < MESSAGE_BYTES


def test_the_longest_stacks_fit_into_one_message() -> None:
    frames, names = (2**64 - 1,) * MOST_FUNCTIONS, ("\U00020000" * MAX_NAME,) * MOST_FUNCTIONS
    kernel = ("f" * LONGEST_SYMBOL,) * MOST_FUNCTIONS
    python = (shortened(stack_label(), MAX_NAME),) * MOST_FUNCTIONS
    for user in (names, python):
        answer = StackAnswer(2**63, user, frames, kernel, frames, (2**63 - 1, *[2**32 - 1] * 6))
        assert len(encode_answer(answer)) < MESSAGE_BYTES
    capture = Capture((2**64 - 1,) * 33, bytes(SLEEPER_BYTES), frames, 2**64 - 1)
    question = ThreadCaptured(2**63, 2**31, (2**64 - 1,) * MOST_KERNEL_FRAMES, capture)
    assert len(question.encode()) < server.MESSAGE_BYTES


SLOW = [doubled(60).replace("1f", f"3f{number}", 1) for number in range(10, 30)]


def slow_variables(directory: Path) -> list[int]:
    """Return the addresses of variables whose names keep a child of the namer busy until it is stopped."""
    source, library = directory / "slow.c", directory / "libslow.so"
    source.write_text("".join(f'int v{at} __asm__("{name}") = 1;' for at, name in enumerate(SLOW)))
    subprocess.run(["gcc", "-shared", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    return [ctypes.addressof(ctypes.c_int.in_dll(loaded, name)) for name in SLOW]


@needs("gcc")
def test_what_its_children_take_counts_as_its_own_while_they_live(tmp_path: Path, make: MakeResolver) -> None:
    resolver = make(Path("/proc"))
    seconds, most = [0.0], 0.0
    for key, variable in enumerate(slow_variables(tmp_path)):
        if most > 0.05:
            break
        resolver.ask(UserLockSeen(key, os.getpid(), os.getpid(), variable, "lock"))
        while not resolver.answers():
            seconds.append(resolver.cpu_seconds())
            most = max(most, seconds[-1] - (cpu_seconds(resolver.pid) if resolver.pid else 0.0))
            time.sleep(0.01)
    assert most > 0.05  # this is the time of living children
    assert seconds == sorted(seconds)


def test_names_and_stacks_are_kept_once_however_many_locks_are_waited_for_there() -> None:
    stack = ("futex_wait", "do_futex", "do_syscall_64")
    one, other = (
        decode_answer(encode_answer(LockAnswer(key, False, f"lock_{key}", "do_futex", stack)))
        for key in (1, 2)
    )
    assert isinstance(one, LockAnswer)
    assert isinstance(other, LockAnswer)
    assert one.stack is other.stack
    assert one.stack == stack
    assert one.site is other.site is one.stack[1]
