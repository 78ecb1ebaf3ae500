"""The probes of `lockd trace mutex`: where the mutex functions of processes are, and what is attached there.

The functions are in the C library (glibc before 2.34: in libpthread), or in a program that is linked
statically. A return probe (uretprobe) replaces the return address on the stack, and unwinding ends there. If
a thread is cancelled in a function with a return probe, code that would run while the stack is unwound, such
as C++ destructors, does not run. Of the functions here, only those that wait for a condition are cancellation
points. Their returns are therefore probed by uprobes at their return instructions. If not all of these
instructions are known, a return probe is used all the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockd.errors import HostError, UsageError
from lockd.load.hooks import Candidate, Part, Way
from lockd.names.objects.elfutils import ElfError
from lockd.names.objects.function_exits import LONGEST_FUNCTION, find_exits
from lockd.names.objects.object_file import ObjectFile, functions_by_name, open_object
from lockd.names.objects.process_files import opened_root
from lockd.trace.probes.binaries import Binary, find_binaries

TAKING = (
    "pthread_mutex_lock", "pthread_mutex_trylock", "pthread_mutex_timedlock", "pthread_mutex_clocklock",
)  # fmt: skip
TAKING_C11 = ("mtx_lock", "mtx_trylock", "mtx_timedlock")
RELEASING = ("pthread_mutex_unlock",)
"""C11's mtx_unlock() calls this function."""
WAITING = ("pthread_cond_wait", "pthread_cond_timedwait", "pthread_cond_clockwait")
"""C11's functions for conditions call these functions."""
LIBRARIES = ("pthread", "c")
"""Short names of the libraries that are searched first, in this order. In glibc before 2.34 the functions of
libc only call those of libpthread."""


@dataclass(frozen=True)
class Function:
    """A mutex function in a file."""

    name: str
    address: int
    """The address that the ELF file itself gives to the first instruction."""
    code: bytes
    """The instructions, if the function waits for a condition and is not too long; else empty."""
    offset: int
    """The offset of the first instruction in the file."""


@dataclass(frozen=True)
class Library:
    """A file with mutex functions that a process has mapped."""

    path: str
    """The path as the process sees it, for messages."""
    place: str
    """A path by which the kernel finds the file for lockd (binaries.Binary.place)."""
    functions: tuple[Function, ...]


def part(pids: tuple[int, ...], with_holds: bool) -> Part:
    """The probes for these processes. With `with_holds` these include releases and waits for conditions.

    Raises HostError for a process without mutex functions, and UsageError for one that does not exist.
    """
    hooks = dict.fromkeys(hook for pid in pids for hook in _candidates(pid, library_of(pid), with_holds))
    ended = Candidate("trace", "mutex_thread_ended", "raw_tracepoint", "sched_process_exit", required=False)
    return Part(
        "trace",
        "mutexes",
        (Way("uprobe", (*hooks, ended), ()),),
        ("include/histogram.bpf.h", "trace/mutex.bpf.c"),
    )


def library_of(pid: int) -> Library:
    """The file with the mutex functions that the process uses.

    Raises HostError if there is none, and UsageError if there is no such process.
    """
    searched: list[str] = []
    for name in (*LIBRARIES, _program(pid), "*"):
        for binary in _binaries(name, pid):
            library = _library(binary)
            if library:
                return library
            searched.append(binary.path)
    raise HostError(
        f"process {pid}: {', '.join(dict.fromkeys(searched)) or 'it'} has no function {TAKING[0]}(); rule: a "
        "program that is linked statically needs its symbols"
    )


def _program(pid: int) -> str:
    if not Path(f"/proc/{pid}").exists():
        raise UsageError(f"process {pid}: No such process")
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError as error:
        raise HostError(f"process {pid}: its program: {error.strerror}") from error


def _binaries(name: str, pid: int) -> list[Binary]:
    try:
        return find_binaries(name, (pid,))
    except UsageError:  # the process has mapped no file of that name
        return []


def _library(binary: Binary) -> Library | None:
    """The mutex functions of a file; None if it has none."""
    try:
        with opened_root(Path(f"/proc/{binary.pid}")) as root:
            file = open_object(os.dup(binary.descriptor), root.directories, os.fsencode(binary.path))
    except ElfError:
        return None
    try:
        if not file.machine:  # 32-bit programs pass arguments in other places
            return None
        functions = tuple(_functions(file, binary.descriptor))
    finally:
        file.close()
    names = {function.name for function in functions}
    return Library(binary.path, binary.place, functions) if {TAKING[0], *RELEASING} <= names else None


def _functions(file: ObjectFile, descriptor: int) -> Iterator[Function]:
    """The mutex functions of a file that is open. A function with several names is returned once."""
    wanted = {*TAKING, *TAKING_C11, *RELEASING, *WAITING}
    for entry in functions_by_name(file, lambda name: name.lstrip("_") in wanted):
        symbol = file.function(entry.address)
        if symbol and entry.offset >= 0 and not entry.is_indirect:
            name = entry.names[0].lstrip("_")
            code = _code(descriptor, entry.offset, symbol.size) if name in WAITING else b""
            yield Function(name, entry.address, code, entry.offset)


def _code(descriptor: int, offset: int, size: int) -> bytes:
    """The instructions of a function; empty if it is too long, or not all of it is in the file."""
    if size > LONGEST_FUNCTION:
        return b""
    try:
        code = os.pread(descriptor, size, offset)
    except (OSError, OverflowError):  # offset and size come from the file's headers, which can be wrong
        return b""
    return code if len(code) == size else b""


def _candidates(pid: int, library: Library, with_holds: bool) -> Iterator[Candidate]:
    def probe(program: str, mechanism: str, offset: int) -> Candidate:
        hook = f"{library.path}+{offset:#x}"
        return Candidate("trace", program, mechanism, hook, pid=pid, file=library.place)

    for function in library.functions:
        if function.name in (*TAKING, *TAKING_C11):
            returned = "mutex_returned_c11" if function.name in TAKING_C11 else "mutex_returned"
            yield probe(returned, "uretprobe", function.offset)
            yield probe("mutex_asked", "uprobe", function.offset)
        elif with_holds and function.name in RELEASING:
            yield probe("mutex_released", "uprobe", function.offset)
        elif with_holds:
            returns = _return_offsets(library, function)
            for offset in returns:
                yield probe("condition_wait_returns", "uprobe", offset)
            if not returns:
                yield probe("mutex_returned", "uretprobe", function.offset)
            yield probe("condition_wait_entered", "uprobe", function.offset)


def _return_offsets(library: Library, function: Function) -> list[int]:
    """Offsets in the file of the instructions by which a wait for a condition returns.

    The function may end with a jump to another function that waits for a condition. Then that function's
    offsets are included. The list is empty if not all offsets are known.
    """
    waits = {wait.address: wait for wait in library.functions if wait.name in WAITING}
    offsets: dict[int, int] = {}
    pending = [function]
    seen = set()
    while pending:
        current = pending.pop()
        seen.add(current)
        exits = find_exits(current.code, current.address)
        if exits is None or not waits.keys() >= set(exits.jumps):
            return []
        offsets |= {address: current.offset + address - current.address for address in exits.returns}
        pending += [waits[target] for target in exits.jumps if waits[target] not in seen]
    return sorted(offsets.values())
