"""What threads of Python wait for, read from the memory of real interpreters, and from broken memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import struct
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockd.names.locks.cpython_waits import (
    MOST_SEEN,
    QUEUE_TYPE,
    RLOCK_TYPE,
    STACK_POINTERS,
    CPythonProcess,
    _Place,
    judge_python,
    label,
)
from lockd.names.locks.user_locks import UserLock, UserNames
from lockd.names.objects.address_space import AddressSpace
from lockd.names.objects.object_cache import ObjectCache
from lockd.names.protocol import CPythonPlaces
from lockd.names.runtimes.cpython import COOKIE, Interpreter, PythonFrame, candidates
from lockd.names.unwind.capture import Capture
from tests.fuzz import memory
from tests.support.ptraced import blocked_capture, releasing_capture

PROGRAM = Path(__file__).parent / "python_waiter.py"
HOLDERS = Path(__file__).parents[2] / "programs" / "holders.py"
VERSIONS = range(8, 16)
SECONDS = 60.0
"""Seconds that a busy host may take."""
WAITS = {
    "with_lock": "lock",
    "acquire": "lock",
    "with_rlock": "lock",
    "wait": "cond",
    "wait_event": "cond",
    "get": "cond",
    "put": "cond",
    "get_simple": "cond",
    "semaphore": "cond",
    "join": "cond",
    "pool": "cond",
    "take_back": "lock",
}
"""The kind of the wait of each thread of the program, by comm."""


def interpreter(minor: int) -> str:
    """Return the path of a Python 3.`minor` on this machine: the system's, or else one that pyenv built."""
    version = f"3.{minor}"
    found = [*(Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python{version}")]
    if system := shutil.which(f"python{version}", path="/usr/bin:/usr/local/bin"):
        found.insert(0, Path(system))
    if not found:
        pytest.skip(
            f"host: no Python {version} of the system or in ~/.pyenv; `make test` installs the system's alone"
        )
    return str(found[0])


def start(minor: int, what: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [interpreter(minor), PROGRAM, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout and process.stdout.readline() == b"ready\n"
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda minor: f"3.{minor}")
def waiter(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Yield the minor version of Python and the process id of the program."""
    process = start(request.param, "waits")
    yield request.param, process.pid
    stop(process)


def said(names: UserNames, pid: int, comm: str) -> UserLock:
    tid, address, capture = blocked_capture(pid, comm)
    return names.name_lock(pid, tid, address, "other", capture)


@pytest.mark.parametrize("comm", WAITS)
def test_a_wait_is_told_by_the_functions_of_python(waiter: tuple[int, int], comm: str) -> None:
    minor, pid = waiter
    found = said(UserNames(), pid, comm)
    function = f"Registry.{comm}" if minor > 10 else comm
    site = "concurrent/futures/thread.py:_worker" if comm == "pool" else f"python_waiter.py:{function}"
    assert (found.kind, found.lock, found.site) == (WAITS[comm], site, site)
    assert site in found.stack
    assert found.family == {"lock": "thread_lock", "cond": "cond"}[WAITS[comm]]


@pytest.mark.parametrize("comm", WAITS)
def test_a_wait_is_told_later_without_stopping_its_thread(waiter: tuple[int, int], comm: str) -> None:
    _, pid = waiter
    names = UserNames()
    tid, address, capture = blocked_capture(pid, comm)
    thread_pointer = capture.thread_pointer
    found = names.name_lock_of_sleeper(pid, tid, address, "other", thread_pointer)
    assert (found.kind, found.is_reused, found.is_provisional) == (WAITS[comm], True, False)
    assert found.site == said(names, pid, comm).site
    elsewhere = names.name_lock_of_sleeper(pid, tid, address + 4, "other", thread_pointer)
    assert elsewhere.is_provisional, "the thread sleeps on another word by now"


def code_objects(pid: int, places: CPythonPlaces, capture: Capture) -> tuple[int, ...]:
    """Return the code objects of the functions that a thread is in, read as the BPF programs read them.

    There are none unless the thread is the last that got the interpreter.
    """
    file = os.open(f"/proc/{pid}/mem", os.O_RDONLY)

    def word(address: int) -> int:
        return int.from_bytes(os.pread(file, 8, address), "little")

    try:
        thread = word(places.last_holder)
        if capture.thread_pointer != word(thread + places.thread_id):
            return ()
        frame = word(thread + places.thread_frame)
        if places.has_cframe:
            frame = word(frame + places.cframe_frame)
        codes = []
        while frame and len(codes) < 8:
            codes.append(word(frame + places.frame_code))
            frame = word(frame + places.frame_previous)
        return tuple(codes)
    finally:
        os.close(file)


@pytest.mark.parametrize("minor", VERSIONS)
def test_functions_are_told_of_a_thread_that_releases_a_lock_and_goes_on(minor: int) -> None:
    process = subprocess.Popen(
        [interpreter(minor), HOLDERS, "lock", "2", "60"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "LOCKD_COMM": "holds"},
    )  # fmt: skip
    try:
        assert process.stdin
        process.stdin.write(b"gg")
        process.stdin.flush()
        pid, names = process.pid, UserNames()
        places: tuple[int, ...] = ()
        until = time.monotonic() + SECONDS
        while not places and time.monotonic() < until:
            tid, address, capture = blocked_capture(pid, "holds")
            places = names.name_lock(pid, tid, address, "other", capture).cpython
        where = CPythonPlaces(*places)
        seen = set()
        while len(seen) < 3 and time.monotonic() < until:
            capture, codes = releasing_capture(pid, pid, lambda at: code_objects(pid, where, at))
            site, stack = names.name_holder(pid, capture, codes)
            if stack[0].endswith(":sem_post"):  # it only releases a lock of Python's threading
                assert codes and stack[-1] == "holders.py:<module>", stack
                seen.add(site)
                known, functions = capture, codes
        assert seen == {"holders.py:lock_short", "holders.py:lock_some", "holders.py:lock_long"}
        assert UserNames().name_holder(pid, known, functions)[0] in seen, "nothing need be known before"
        without, _ = names.name_holder(pid, known)
        assert not without.startswith("holders.py"), "a function in C, where the programs read none"
        assert names.name_holder(pid, known, (functions[0], functions[0] + 8))[0] == without
    finally:
        stop(process)


@pytest.mark.parametrize("minor", VERSIONS)
def test_who_wants_the_interpreter_is_told(minor: int) -> None:
    process = start(minor, "gil")
    try:
        names, until = UserNames(), time.monotonic() + SECONDS
        while (found := said(names, process.pid, "gil")).site != "python_waiter.py:want_the_interpreter":
            assert time.monotonic() < until, found
        assert (found.kind, found.family, found.lock.partition(":")[2]) == ("lock", "gil", "GIL")
    finally:
        stop(process)


class Broken:
    """The memory of a process with some of its words replaced at random. Counts the reads."""

    def __init__(self, pid: int, chance: float, seed: int = 0) -> None:
        self._file = Path(f"/proc/{pid}/mem")
        self._chance = chance
        self._random = random.Random(seed)
        self.reads = 0

    def read(self, address: int, size: int) -> bytes:
        self.reads += 1
        data = bytearray()
        with contextlib.suppress(OSError, OverflowError), self._file.open("rb", 0) as file:
            data += os.pread(file.fileno(), size, address)
        for at in range(0, len(data) - 7, 8):
            if self._random.random() < self._chance:
                data[at : at + 8] = self._random.choice((bytes(8), self._random.randbytes(8), data[:8]))
        return bytes(data)


class Alike:
    """Memory in which every word has the same value. Counts the reads."""

    def __init__(self, word: int) -> None:
        self._word = word
        self.reads = 0

    def read(self, _address: int, size: int) -> bytes:
        self.reads += 1
        return (struct.pack("=Q", self._word) * (size // 8 + 1))[:size]


def test_broken_memory_has_no_frames(waiter: tuple[int, int]) -> None:
    _, pid = waiter
    space = AddressSpace(Path(f"/proc/{pid}"), ObjectCache())
    space.refresh()
    thread_pointer = blocked_capture(pid, "get")[2].thread_pointer
    runtime = runtime_of(pid, space)
    whole = Broken(pid, 0)
    frames = Interpreter(runtime).frames(whole, thread_pointer)
    assert [label(frame).split(".py:")[0] for frame in frames[:3]] == ["threading", "queue", "python_waiter"]
    for seed in range(200):
        broken = Broken(pid, 0.01, seed)
        found = Interpreter(runtime).frames(broken, thread_pointer)
        assert len(found) <= 64 and broken.reads < 2000
        assert all(frame.file.isprintable() and frame.function.isprintable() for frame in found)


def runtime_of(pid: int, space: AddressSpace) -> int:
    """Return the address of `_PyRuntime`, which is in an object file that has code on a thread's stack."""
    capture = blocked_capture(pid, "get")[2]
    for word in struct.unpack(f"={len(capture.stack) // 8}Q", capture.stack):
        located = space.locate(word) if space.is_executable(word) else None
        if located and (found := located[0].variable_address("_PyRuntime")) is not None:
            return int(found + word - located[1])
    raise LookupError(f"process {pid}: no code of an interpreter on the stack")


@pytest.mark.parametrize("word", [0, 1, 8, 0x1000, 2**47 - 8, 2**63, 2**64 - 8, 2**64 - 1])
def test_memory_that_is_all_alike_has_no_frames(word: int) -> None:
    memory = Alike(word)
    assert Interpreter(0x1000).frames(memory, word) == []
    assert memory.reads < 20_000


@pytest.mark.parametrize("slot", [-5, -4, -3, -2, -1])
@pytest.mark.parametrize("offset", [0, 152, 157, 160, 1 << 20])
def test_an_interpreter_may_say_that_its_texts_are_anywhere(slot: int, offset: int) -> None:
    """From 3.13 on, the interpreter says where in a text its type, length, state and characters are."""
    for data in memory.pythons_with_tables({slot: offset}):
        runtime, thread_pointer = memory.HEAD.unpack_from(data)
        assert len(Interpreter(runtime).frames(memory.Memory(data), thread_pointer)) in (0, 2)


def test_remembered_places_are_in_the_estimate() -> None:
    """A stack may be full of pointers to the frame, and the texts of each frame may be long."""
    process = CPythonProcess(Path("/proc/self"), AddressSpace(Path("/proc/self"), ObjectCache()), 0)
    tracemalloc.start()
    for number in range(2 * MOST_SEEN):
        place = _Place(number, 0, tuple((8 * at, (number << 40) + at) for at in range(512)))
        texts = [PythonFrame(f"{number}{at}" + "\U00020000" * 1000, f"f{at}") for at in range(8)]
        for _ in range(2):
            process._remember(place, texts)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken / 1.2 < process.memory < 2 * taken


def test_places_in_use_are_remembered() -> None:
    """The place at which no thread has waited for longest is forgotten, not the one that was seen first."""

    def place(number: int) -> _Place:
        return _Place(number, 0, ((0, 1),))

    def frames_at(number: int) -> list[PythonFrame]:
        registers = tuple(number if at == STACK_POINTERS[17] else 0 for at in range(17))
        return process._seen_before(Capture(registers, struct.pack("=Q", 1), (), 0))

    process = CPythonProcess(Path("/proc/self"), AddressSpace(Path("/proc/self"), ObjectCache()), 0)
    for number in range(MOST_SEEN):
        process._remember(place(number), [PythonFrame("a.py", f"f{number}")])
    process._remember(place(0), [PythonFrame("a.py", "again")])
    assert frames_at(1) == [PythonFrame("a.py", "f1")]
    for number in range(MOST_SEEN, 2 * MOST_SEEN - 2):
        process._remember(place(number), [PythonFrame("a.py", "f")])
    assert frames_at(0) == [PythonFrame("a.py", "again")]
    assert frames_at(1) == [PythonFrame("a.py", "f1")]
    assert frames_at(2) == []


def test_an_unknown_version_has_no_layout() -> None:
    assert candidates(COOKIE + struct.pack("=Q", 3 << 24 | 99 << 16) + bytes(1000)) == ()
    assert candidates(COOKIE + bytes(3)) == ()


def test_an_exported_variable_is_found_by_its_name() -> None:
    address = ctypes.addressof(ctypes.c_ulong.in_dll(ctypes.pythonapi, "PyExc_ValueError"))
    space = AddressSpace(Path("/proc/self"), ObjectCache())
    space.refresh()
    located = space.locate(address)
    assert located is not None and located[0].variable_address("PyExc_ValueError") == located[1]
    assert located[0].variable_address("ValueError") is None
    assert located[0].variable_address("PyExc_ValueErro") is None


def frames(*texts: str) -> list[PythonFrame]:
    """Return the frames of texts `file:function`, in which `~/` stands for the standard library."""
    pairs = (text.replace("~/", "/usr/lib/python3.11/").rsplit(":", 1) for text in texts)
    return [PythonFrame(file, function) for file, function in pairs]


@pytest.mark.parametrize(
    ("stack", "kind", "site"),
    [
        (["/srv/app.py:Registry.put"], "lock", "app.py:Registry.put"),
        (["/srv/queue.py:Queue.wait"], "lock", "queue.py:Queue.wait"),
        (["~/threading.py:Condition.wait", "~/queue.py:Queue.get", "/srv/a.py:f"], "cond", "a.py:f"),
        (["~/threading.py:Condition.__enter__", "~/queue.py:Queue.get", "/srv/a.py:f"], "lock", "a.py:f"),
        (["~/threading.py:Condition._acquire_restore", "~/threading.py:Condition.wait"], "lock",
         "threading.py:Condition.wait"),
        (["~/threading.py:Thread._wait_for_tstate_lock", "~/threading.py:Thread.join", "m.py:main"], "cond",
         "m.py:main"),
        (["~/queue.py:Queue.get", "~/threading.py:Thread.run", "~/threading.py:Thread._bootstrap"], "lock",
         "queue.py:Queue.get"),
        (["<frozen importlib._bootstrap>:_ModuleLock.acquire", "<frozen importlib._bootstrap>:_find_and_load",
          "/srv/pkg/__init__.py:<module>"], "lock", "pkg/__init__.py:<module>"),
        (["~/logging/__init__.py:Handler.acquire", "~/logging/__init__.py:Handler.handle", "/srv/a.py:f"],
         "lock", "logging/__init__.py:Handler.handle"),
        (["~/multiprocessing/synchronize.py:SemLock.__enter__", "~/multiprocessing/queues.py:SimpleQueue.get",
          "~/multiprocessing/pool.py:worker", "~/multiprocessing/process.py:BaseProcess.run",
          "~/multiprocessing/process.py:BaseProcess._bootstrap", "/srv/a.py:main"], "cond",
         "multiprocessing/pool.py:worker"),
        (["~/multiprocessing/synchronize.py:SemLock.__enter__", "/srv/a.py:f"], "lock", "a.py:f"),
        (["/v/lib/python3.9/site-packages/sqlalchemy/pool/impl.py:do_get"], "lock",
         "sqlalchemy/pool/impl.py:do_get"),
        (["/usr/lib/python3/dist-packages/apt/cache.py:Cache.open"], "lock", "apt/cache.py:Cache.open"),
        (["/v/lib/python3.13t/threading.py:Event.wait", "/srv/a.py:f"], "cond", "a.py:f"),
        ([], "", ""),
    ],
)  # fmt: skip
def test_kind_and_site_of_a_wait(stack: list[str], kind: str, site: str) -> None:
    wait = judge_python(frames(*stack))
    assert (wait.kind, wait.site) == (kind, site)


def test_the_type_of_the_object_decides() -> None:
    app, waits = frames("/srv/app.py:f"), frames("~/threading.py:Condition.wait", "/srv/app.py:f")
    assert judge_python(app, QUEUE_TYPE).kind == "cond"
    assert judge_python(waits, RLOCK_TYPE).kind == "lock", "it takes the condition's lock back"
