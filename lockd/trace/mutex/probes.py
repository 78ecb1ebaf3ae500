"""Where the mutex functions of processes are, and which of them are to be probed for what.

They are in the C library (glibc before 2.34: in libpthread), or in the program, if it is linked statically.
Return probes put another return address on the stack, at which unwinding ends: what would run as a thread is
cancelled, as the destructors of C++, does not run then. A wait for a condition is where threads are
cancelled, hence its end is probed at its last instruction instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockd.errors import HostError, UsageError
from lockd.load.hooks import Candidate, Part, Way
from lockd.names.objects.elfutils import ElfError
from lockd.names.objects.function_exits import find_exits
from lockd.names.objects.object_file import ObjectFile, functions_by_name, open_object
from lockd.trace.probes.objects import Object, objects_named

TAKING = (
    "pthread_mutex_lock", "pthread_mutex_trylock", "pthread_mutex_timedlock", "pthread_mutex_clocklock",
)  # fmt: skip
TAKING_C11 = ("mtx_lock", "mtx_trylock", "mtx_timedlock")
RELEASING = ("pthread_mutex_unlock",)
"""C11's calls it."""
WAITING = ("pthread_cond_wait", "pthread_cond_timedwait", "pthread_cond_clockwait")
"""The same."""
LIBRARIES = ("pthread", "c")
"""Where they are looked for first, in this order: in old glibc, libc passes calls on to libpthread."""


@dataclass(frozen=True)
class Function:
    """One of them in one file."""

    name: str
    address: int
    end: int
    offset: int
    """Of the address in the file."""


@dataclass(frozen=True)
class Library:
    """A file with mutex functions, as one process has mapped it."""

    path: str
    place: str
    functions: tuple[Function, ...]


def part(pids: tuple[int, ...], with_holds: bool) -> Part:
    """The probes for these processes. Raises HostError that says which has no mutex functions, and why."""
    hooks = dict.fromkeys(hook for pid in pids for hook in _candidates(pid, library_of(pid), with_holds))
    ended = Candidate("trace", "mutex_thread_ended", "raw_tracepoint", "sched_process_exit", required=False)
    return Part(
        "trace",
        "mutexes",
        (Way("uprobe", (*hooks, ended), ()),),
        ("include/histogram.bpf.h", "trace/mutex.bpf.c"),
    )


def library_of(pid: int) -> Library:
    """Raises HostError."""
    looked: list[str] = []
    for name in (*LIBRARIES, _program(pid), "*"):
        for one in _objects(name, pid):
            library = _library(one)
            if library:
                return library
            looked.append(one.path)
    raise HostError(
        f"process {pid}: no {TAKING[0]}() was found in {', '.join(dict.fromkeys(looked)) or 'it'}: "
        "a program that is linked statically needs its symbols"
    )


def _program(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError as error:
        raise HostError(f"process {pid}: its program: {error.strerror}") from error


def _objects(name: str, pid: int) -> list[Object]:
    try:
        return objects_named(name, (pid,))
    except UsageError:  # it has none of that name
        return []


def _library(one: Object) -> Library | None:
    """None if it has not got them. Takes the descriptor."""
    try:
        file = open_object(one.opened, Path(f"/proc/{one.pid}"), os.fsencode(one.path))
    except ElfError:
        return None
    try:
        if not file.machine:  # 32 bits: arguments are elsewhere
            return None
        functions = tuple(_functions(file))
    finally:
        file.close()
    names = {function.name for function in functions}
    return Library(one.path, one.place, functions) if {TAKING[0], *RELEASING} <= names else None


def _functions(file: ObjectFile) -> Iterator[Function]:
    """One for each address: most have several names."""
    wanted = {*TAKING, *TAKING_C11, *RELEASING, *WAITING}
    for entry in functions_by_name(file, lambda name: name.lstrip("_") in wanted):
        symbol = file.function(entry.address)
        if symbol and entry.offset >= 0 and not entry.is_indirect:
            name = entry.names[0].lstrip("_")
            yield Function(name, entry.address, entry.address + symbol.size, entry.offset)


def _candidates(pid: int, library: Library, with_holds: bool) -> Iterator[Candidate]:
    def probe(program: str, mechanism: str, offset: int) -> Candidate:
        return Candidate("trace", program, mechanism, f"{library.place}+{offset:#x}", pid=probed)

    # A probe of one process is one of its main thread's: if that has ended already, all have to be probed.
    probed = 0 if is_without_main_thread(pid) else pid
    for function in library.functions:
        if function.name in (*TAKING, *TAKING_C11):
            returned = "mutex_returned_c11" if function.name in TAKING_C11 else "mutex_returned"
            yield probe(returned, "uretprobe", function.offset)
            yield probe("mutex_asked", "uprobe", function.offset)
        elif with_holds and function.name in RELEASING:
            yield probe("mutex_released", "uprobe", function.offset)
        elif with_holds:
            last = _last_instructions(library, function)
            for offset in last:
                yield probe("condition_wait_returns", "uprobe", offset)
            if not last:
                yield probe("condition_wait_returned", "uretprobe", function.offset)
            yield probe("condition_wait_entered", "uprobe", function.offset)


def _last_instructions(library: Library, function: Function) -> list[int]:
    """Offsets of those by which a wait for a condition, or what it jumps to at its end, returns.

    Empty if they are not known for sure.
    """
    waits = {one.address: one for one in library.functions if one.name in WAITING}
    found: dict[int, int] = {}
    left = [function]
    seen = set()
    while left:
        one = left.pop()
        seen.add(one)
        exits = find_exits(library.place, one.address, one.end)
        if exits is None or not waits.keys() >= set(exits.jumps):
            return []
        found |= {address: one.offset + address - one.address for address in exits.returns}
        left += [waits[to] for to in exits.jumps if waits[to] not in seen]
    return sorted(found.values())


def is_without_main_thread(pid: int) -> bool:
    """Whether the thread has ended that the process began with, and others have not."""
    process = Path(f"/proc/{pid}")
    try:
        state = (process / "stat").read_bytes().rpartition(b") ")[2][:1]
        return state == b"Z" and len(list((process / "task").iterdir())) > 1
    except OSError:
        return False
