"""Owners of locks in user space: locks of this process's own libc, and memory with any content."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockd.names.locks import owners as owners_module
from lockd.names.locks.owners import UserOwners

PROCFS = Path("/proc")
LIBC = ctypes.CDLL(None, use_errno=True)
RECURSIVE, ERRORCHECK, ADAPTIVE, INHERIT, ROBUST, SHARED = 1, 2, 3, 1, 1, 1
WAITERS = 0x8000_0000


class Lock:
    """A pthread_mutex_t or pthread_rwlock_t of this process."""

    def __init__(self, attributes: dict[str, int], what: str = "mutex") -> None:
        self._what = what
        self._memory = (ctypes.c_uint64 * 8)()
        attr = (ctypes.c_uint64 * 2)()
        if attributes:
            self._call(f"{what}attr_init", attr)
        for name, value in attributes.items():
            self._call(f"{what}attr_set{name}", attr, value)
        self._call(f"{what}_init", self._memory, ctypes.byref(attr) if attributes else None)
        self.address = ctypes.addressof(self._memory)

    def _call(self, name: str, *arguments: object) -> None:
        assert getattr(LIBC, f"pthread_{name}")(*arguments) == 0, name

    def __call__(self, what: str) -> None:
        self._call(f"{self._what}_{what}", self._memory)


def owner(address: int, kind: str = "lock", family: str = "", tgid: int = 0) -> int:
    return UserOwners(PROCFS).owner(tgid or os.getpid(), address, kind, family)


class Other:
    """A thread that runs the functions that it is given, and lives until end() is called."""

    def __init__(self) -> None:
        self.tid = 0
        self._todo: list[Callable[[], None]] = []
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()
        self.do(lambda: setattr(self, "tid", threading.get_native_id()))

    def _run(self) -> None:
        while self._turn.acquire() and self._todo:
            self._todo.pop()()
            self._done.release()

    def do(self, what: Callable[[], None]) -> None:
        self.begin(what)
        assert self._done.acquire(timeout=10)

    def end(self) -> None:
        self._turn.release()

    def begin(self, what: Callable[[], None]) -> None:
        self._todo.append(what)
        self._turn.release()


@pytest.fixture
def other() -> Iterator[Other]:
    one = Other()
    yield one
    one.end()


@pytest.fixture
def waiter() -> Iterator[Other]:
    one = Other()
    yield one
    one.end()


@pytest.mark.parametrize(
    "attributes",
    [{}, {"type": RECURSIVE}, {"type": ERRORCHECK}, {"type": ADAPTIVE}, {"pshared": SHARED}],
    ids=str,
)
@pytest.mark.parametrize("family", ["mutex", ""])
def test_mutexes(other: Other, attributes: dict[str, int], family: str) -> None:
    lock = Lock(attributes)
    assert owner(lock.address, "lock", family) == 0
    other.do(lambda: lock("lock"))
    assert owner(lock.address, "lock", family) == other.tid
    other.do(lambda: lock("unlock"))
    assert owner(lock.address, "lock", family) == 0


@pytest.mark.parametrize(
    ("attributes", "kind"),
    [
        ({"protocol": INHERIT}, "pi"),
        ({"protocol": INHERIT, "type": RECURSIVE}, "pi"),
        ({"robust": ROBUST}, "lock"),
    ],
    ids=str,
)
def test_locks_with_the_owner_in_their_word(
    other: Other, waiter: Other, attributes: dict[str, int], kind: str
) -> None:
    lock = Lock(attributes)
    other.do(lambda: lock("lock"))
    waiter.begin(lambda: lock("lock"))
    while not struct.unpack("=I", ctypes.string_at(lock.address, 4))[0] & WAITERS:
        threading.Event().wait(0.01)
    assert owner(lock.address, kind) == other.tid
    other.do(lambda: lock("unlock"))
    while owner(lock.address, "pi") != waiter.tid:
        threading.Event().wait(0.01)
    waiter.begin(lambda: lock("unlock"))


@pytest.mark.parametrize("futex", [8, 12])
def test_rwlocks(other: Other, futex: int) -> None:
    lock = Lock({}, "rwlock")
    address = lock.address + futex
    assert owner(address, "lock", "rwlock") == 0
    other.do(lambda: lock("wrlock"))
    assert owner(address, "lock", "rwlock") == other.tid
    other.do(lambda: lock("unlock"))
    assert owner(address, "lock", "rwlock") == 0
    other.do(lambda: lock("rdlock"))
    assert owner(address, "lock", "rwlock") == 0
    other.do(lambda: lock("unlock"))


def word(*fields: int) -> int:
    """Return the address of memory with these 32-bit fields, which stays for as long as the process runs."""
    memory = (ctypes.c_uint32 * max(16, len(fields)))(*fields)
    KEPT.append(memory)
    return ctypes.addressof(memory)


KEPT: list[object] = []


def test_a_joined_thread(other: Other) -> None:
    assert owner(word(other.tid), "cond", "join") == other.tid
    assert owner(word(2), "cond", "join") == 0


def test_a_mutex_of_musl(other: Other) -> None:
    assert owner(word(other.tid | WAITERS), "lock", "mutex") == other.tid
    assert owner(word(errno.EBUSY | WAITERS), "lock", "mutex") == 0


@pytest.mark.parametrize(
    "fields",
    [
        (2, 0, "tid", 0, 0),  # nobody uses it
        (2, 0, "tid", 1, 4),  # a kind that does not exist
        (2, 0, "tid", 1, 0xFFFF_FFFF),  # destroyed
        (2, 1, "tid", 1, 0),  # taken more often than this kind can be
        (2, 0, "tid", 1, 1),  # recursive, and not taken
        (0, 0, "tid", 1, 0),  # free
        (3, 0, "tid", 1, 0),
        ("tid", 0, 0, 0, 0),  # nobody waits
    ],
    ids=str,
)
def test_what_is_no_mutex_has_no_owner(other: Other, fields: tuple[int | str, ...]) -> None:
    numbers = [other.tid if field == "tid" else int(field) for field in fields]
    assert owner(word(*numbers), "lock", "mutex") == 0
    assert owner(word(2, 0, other.tid, 1, 0), "lock", "mutex") == other.tid


@pytest.mark.parametrize("family", ["cond", "sem", "barrier", "once", "gil"])
def test_what_nobody_owns(other: Other, family: str) -> None:
    assert owner(word(2, 0, other.tid, 1, 0), "lock", family) == 0


def test_an_owner_must_live(other: Other) -> None:
    assert owner(word(1 << 22), "pi") == 0
    assert owner(word(2, 0, 1, 1, 0), "lock", "mutex") == 0  # init is not of this process
    assert owner(word(2, 0, 0x7FFF_FFFF, 1, 0x80), "lock", "mutex") == 0


SHARING = """
import mmap, sys
with open(sys.argv[1], "r+") as file:
    memory = mmap.mmap(file.fileno(), 4096)
print(flush=True)
input()
"""


def test_an_owner_in_another_process_must_have_the_memory_of_the_lock(tmp_path: Path) -> None:
    """A process can write the id of any thread into its lock."""
    path = tmp_path / "shared"
    path.write_bytes(bytes(4096))
    with path.open("r+") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    shared = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    command = [sys.executable, "-c", SHARING, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        for number, found in ((process.pid, process.pid), (1, 0)):
            for fields in ((number | WAITERS, 0, 0, 0, 0), (2, 0, number, 1, 0x80)):
                assert owner(word(*fields), "lock") == owner(word(*fields), "lock", "mutex") == 0
                struct.pack_into("=5I", memory, 0, *fields)
                assert owner(shared, "lock") == owner(shared, "lock", "mutex") == found
        process.communicate(b"\n")


def test_memory_that_is_not_there() -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    for address in (0, 1, page, 2**63, 2**64 - 4, 2**64 - 1):
        for family in ("mutex", "rwlock", "join"):
            assert owner(address, "lock", family) == owner(address, "pi", family) == 0
    assert owner(0, tgid=2**22 + 1) == 0


def test_any_memory() -> None:
    chance = random.Random(1)
    owners = UserOwners(PROCFS)
    live = {int(name) for name in os.listdir("/proc/self/task")}
    everybody = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    for _ in range(2000):
        memory = ctypes.create_string_buffer(chance.randbytes(128))
        address = ctypes.addressof(memory) + chance.choice((32, 36))
        kind, family = chance.choice(("lock", "pi")), chance.choice(("mutex", "rwlock", "join", ""))
        found = owners.owner(os.getpid(), address, kind, family)
        assert found in {0} | live | everybody


def test_a_process_in_a_pid_namespace_of_its_own(tmp_path: Path) -> None:
    """The process knows its threads by other ids than the host does."""
    lines = """
import ctypes, os, sys
lock = (ctypes.c_uint64 * 8)()
assert ctypes.CDLL(None).pthread_mutex_lock(lock) == 0
print(os.getpid(), ctypes.addressof(lock), flush=True)
sys.stdin.read()
"""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable, "-c", lines]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        if not (line := process.stdout.readline()):
            pytest.skip("host: no user namespaces here")
        inside, address = map(int, line.split())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        pid = int(children.split()[0])
        assert inside == 1 != pid
        try:
            Path(f"/proc/{pid}/mem").open("rb").close()
        except PermissionError:
            process.communicate("")
            pytest.skip("host: the memory of others is closed to this user")
        assert owner(address, "lock", "mutex", pid) == pid
        process.communicate("")


CHILD_IN_NAMESPACE = """
import ctypes, mmap, os, sys
from ctypes import addressof, c_char, c_uint64
libc = ctypes.CDLL(None)
memory = [mmap.mmap(-1, 4096) for _ in range(2)]
locks = [addressof(c_char.from_buffer(one)) for one in memory]
attributes = (c_uint64 * 2)()
assert libc.pthread_mutexattr_init(attributes) == libc.pthread_mutexattr_setpshared(attributes, 1) == 0
for lock in locks:
    assert libc.pthread_mutex_init(ctypes.c_void_p(lock), attributes) == 0
said, say = os.pipe()
assert libc.pthread_mutex_lock(ctypes.c_void_p(locks[0])) == 0
if not (child := os.fork()):
    assert libc.pthread_mutex_lock(ctypes.c_void_p(locks[1])) == 0
    os.write(say, b"x")
    sys.stdin.readline()
    os._exit(0)
os.read(said, 1)
private = (c_uint64 * 5).from_buffer_copy(memory[1])
print(os.getpid(), child, *locks, addressof(private), flush=True)
os.waitpid(child, 0)
sys.stdin.readline()
"""


def test_an_owner_in_another_process_of_a_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes know the other by an id that the host has for somebody else."""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable, "-c"]
    with subprocess.Popen(
        [*command, CHILD_IN_NAMESPACE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        if not (line := process.stdout.readline()):
            pytest.skip("host: no user namespaces here")
        inside, inside_child, of_parent, of_child, private = map(int, line.split())
        parent = only_child(process.pid)
        child = only_child(parent)
        assert inside == 1 != parent
        assert inside_child != child
        if not os.access(f"/proc/{parent}/mem", os.R_OK):
            process.communicate("\n\n")
            pytest.skip("host: the memory of others is closed to this user")
        assert owner(of_parent, "lock", "mutex", child) == parent
        now, read = [1000.0], Counted(monkeypatch)
        found = UserOwners(PROCFS, lambda: now[0])
        for _ in range(2):
            assert found.owner(parent, of_child, "lock", "mutex") == child
            assert found.owner(parent, of_parent, "lock", "mutex") == parent
            assert found.owner(parent, private, "lock", "mutex") == 0, "it says shared, but is not"
            read.since()
        assert found.owner(parent, of_child, "lock", "mutex") == child
        assert read.since() == 1, "it is remembered"
        process.communicate("\n\n")


def only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


MANY_THREADS = 40
IN_NAMESPACE = """
import ctypes, os, sys, threading
libc = ctypes.CDLL(None)
locks = [(ctypes.c_uint64 * 8)() for _ in range(2)]
def hold(lock):
    assert libc.pthread_mutex_lock(lock) == 0
    print(threading.get_native_id(), ctypes.addressof(lock), flush=True)
    threading.Event().wait()
for _ in range(MANY):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
for lock in locks:
    threading.Thread(target=hold, args=(lock,), daemon=True).start()
    sys.stdin.readline()
os._exit(0)
"""


class Counted:
    """Takes the place of _ids() in the module of owners, and counts the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self._ids = 0, owners_module._ids
        monkeypatch.setattr(owners_module, "_ids", self)

    def __call__(self, status: Path) -> list[int]:
        self.calls += 1
        return self._ids(status)

    def since(self) -> int:
        calls, self.calls = self.calls, 0
        return calls


def test_the_threads_of_a_pid_namespace_are_not_all_read_for_every_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be ten thousand threads, and a question about the same locks every second."""
    script = IN_NAMESPACE.replace("MANY", str(MANY_THREADS))
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        if not (line := process.stdout.readline()):
            pytest.skip("host: no user namespaces here")
        inside, address = map(int, line.split())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        pid, now, read = int(children.split()[0]), [1000.0], Counted(monkeypatch)
        if not os.access(f"/proc/{pid}/mem", os.R_OK):
            process.communicate("\n\n")
            pytest.skip("host: the memory of others is closed to this user")
        found = UserOwners(PROCFS, lambda: now[0])
        holder = found.owner(pid, address, "lock", "mutex")
        assert owners_module._ids(Path(f"/proc/{pid}/task/{holder}/status"))[-1] == inside != holder
        assert read.since() > MANY_THREADS
        assert found.owner(pid, address, "lock", "mutex") == holder
        assert read.since() == 1, "the thread's"
        now[0] += 1
        assert found.owner(pid, address, "lock", "mutex") == holder
        assert read.since() == 2, "and the process's"
        process.stdin.write("\n")
        process.stdin.flush()
        inside, other = map(int, process.stdout.readline().split())
        found._threads[pid].read_at = now[0] + 3
        assert found.owner(pid, other, "lock", "mutex") == 0
        assert read.since() < MANY_THREADS, "it took long before, and so it has to wait"
        now[0] += 3
        second = found.owner(pid, other, "lock", "mutex")
        assert second not in (0, holder)
        assert found.owner(pid, address, "lock", "mutex") == holder
        threads = found._threads[pid]
        threads.tids[1], threads.read_at = holder, 0.0
        assert found._translated(threads, pid, 1, 0) == pid, "what is remembered is wrong"
        found.keep({pid})
        assert found._threads
        found.keep(set())
        assert not found._threads
        process.communicate("\n")
