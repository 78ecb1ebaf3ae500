"""Names of JIT-compiled functions: runtimes write them to perf maps and jitdump files for profilers."""

from __future__ import annotations

import bisect
import functools
import os
import re
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lockd.names.objects.process_files import open_own
from lockd.process.clock import NS, start_ns

JIT_OBJECT = "[jit]"
"""What is shown instead of an object file's name for JIT-compiled code."""
MAX_BYTES = 16 << 20
"""Bytes of a perf map that are read, from its end: the last entries are the valid ones."""
MAX_FUNCTIONS = 200_000
"""The most functions of one process: the last ones of its perf maps, the first ones of its jitdumps."""
MAX_MEMORY = 64 << 20
"""Bytes of memory for the functions of one process, as estimated by FUNCTION_BYTES and the names."""
FUNCTION_BYTES = 200
"""Estimated memory of one function without its name."""
MAX_DUMPS = 4
"""The most mapped jitdump files of a process that are read."""
MAX_RECORDS = 2 * MAX_FUNCTIONS
"""The most records of a jitdump that are read. Lines of source code have records, too."""
MAX_NAME = 256
"""The most bytes of a function's name that are read, and the most characters that are kept."""
CHECK_SECONDS = 0.1
"""Seconds between two checks for new or changed files while the wanted function has no name.

A check takes some 50 us if nothing has changed.
"""
PATIENCE_SECONDS = 10.0
"""Seconds that are added to CHECK_SECONDS if the wanted function has a name.

The check is still needed: the name can belong to older code at the same address.
"""
EARLIER_NS = NS
"""A file that was last changed so many nanoseconds before a process started, or earlier, is not its file.

The margin is needed because the kernel sets the times of files by a clock that is some milliseconds late.
"""
READING_SHARE = 20
"""After files were read, they are not checked again for this many times the duration of the reading."""

DUMP_MAGIC = 0x4A695444
DUMP_HEADER = struct.Struct("<IIIIIIQQ")
RECORD = struct.Struct("<IIQ")
CODE_LOAD = 0
CODE = struct.Struct("<IIQQQQ")
"""A JIT_CODE_LOAD record behind its header: process, thread, address (twice), size and number of the code."""

_LINE = re.compile(rb"(?:0x)?([0-9a-fA-F]{1,16}) (?:0x)?([0-9a-fA-F]{1,16}) (.{1,%d})" % MAX_NAME)
_JAVA = re.compile(r"[^\s()]+ ([^\s()]+)\([^()]*\)?")
"""A method in HotSpot's form: its type, its name, and its parameters, whose end may be missing.

_without_types() checks that the name has a dot between class and method. If the pattern had this dot, the
matching would try each dot of the name.
"""
_HIDDEN_CLASS = re.compile(r"/0x[0-9a-f]+")
"""The address that HotSpot adds to the name of a hidden class. The address differs between processes."""


class JitNames:
    """The JIT-compiled functions of one process, by perf-PID.map and jit-PID.dump in the process's own /tmp.

    Only files of the process's own user are read, see open_own(). Later entries replace earlier ones that
    begin in the same memory. A file that has not been changed since the process started is not read: it is
    that of an earlier process with the same id. (The first process of a container has the same id after each
    restart of the container.)
    """

    def __init__(self, process: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`process` is the directory of the process in procfs; `clock` returns seconds."""
        self._process, self._clock = process, clock
        self._check_at = 0.0
        self.reads = 0
        """How often the reading of files changed the names."""
        self._read: dict[bytes, tuple[int, int, int]] = {}
        """Inode, size in bytes and time of the last change in ns of each file that was read, by path."""
        self._starts: list[int] = []
        self._functions: list[tuple[int, str]] = []
        """Size in bytes and name of each function, in the order of the addresses in _starts."""
        self.memory = 0
        """Estimated bytes of memory that the names take."""

    def function(self, address: int, dumps: list[bytes]) -> tuple[int, str] | None:
        """The start and the name of the function that spans an address; None if it is not known.

        `dumps` are the paths of jitdump files that the process has mapped.
        """
        function = self._find(address)
        has_changed = self.refresh(dumps, PATIENCE_SECONDS if function else 0.0)
        return self._find(address) if has_changed else function

    def refresh(self, dumps: list[bytes], patience: float = 0.0) -> bool:
        """Read new and changed files, unless they were just checked. Returns whether names changed.

        `patience` is added to the seconds that must have passed since the last check.
        """
        now = self._clock()
        if now < self._check_at + patience:
            return False
        has_changed = self._read_changes(dumps)
        done = self._clock()
        self._check_at = done + max(CHECK_SECONDS, READING_SHARE * (done - now))
        return has_changed

    @property
    def has_names(self) -> bool:
        """Whether any function is known."""
        return bool(self._starts)

    def _find(self, address: int) -> tuple[int, str] | None:
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._starts[index] + self._functions[index][0]:
            return None
        return self._starts[index], self._functions[index][1]

    def _read_changes(self, dumps: list[bytes]) -> bool:
        """Read all files again if one has changed. Returns whether names changed."""
        opened: dict[bytes, int] = {}
        try:
            opened = open_own(self._process, dict.fromkeys([*self._paths, *dumps[:MAX_DUMPS]]))
            since = self._start_ns() - EARLIER_NS
            about = {path: os.fstat(file) for path, file in opened.items()}
            about = {
                path: status
                for path, status in about.items()
                if status.st_mtime_ns >= since or self._is_known(path, status)
            }
            found = {path: (a.st_ino, a.st_size, a.st_mtime_ns) for path, a in about.items()}
            if found == self._read:
                return False
            functions = _Functions()
            for path in found:
                read = _read_dump if path.endswith(b".dump") else _read_map
                read(opened[path], about[path].st_size, functions)
            self._read = found
            before = self._starts, self._functions
            self._starts, self.memory = functions.sorted(), functions.memory
            self._functions = [functions.found[start][:2] for start in self._starts]
            if (self._starts, self._functions) == before:  # a file was created, and is still empty
                return False
            self.reads += 1
            return True
        except OSError:
            return False
        finally:
            for file in opened.values():
                os.close(file)

    def _is_known(self, path: bytes, status: os.stat_result) -> bool:
        """Whether the file at `path` is one that was read before, and so is the process's own.

        The time of its last change cannot decide this: once the clock of the host has been set forward, the
        file seems to be older than the process.
        """
        return path in self._read and self._read[path][0] == status.st_ino

    def _start_ns(self) -> int:
        """When the process started: nanoseconds since the epoch, by the clock as it is set now."""
        now, running = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return now - running + self._started

    @functools.cached_property
    def _started(self) -> int:
        """When the process started: nanoseconds of CLOCK_BOOTTIME."""
        return start_ns((self._process / "stat").read_bytes())

    @functools.cached_property
    def _paths(self) -> list[bytes]:
        """Usual paths of perf maps and jitdumps, by the process's id in procfs and in its pid namespace."""
        status = (self._process / "status").read_bytes()
        numbers = {line.split()[-1] for line in status.splitlines() if line.startswith(b"NSpid:")}
        return [
            b"/tmp/" + name % number
            for number in sorted({self._process.name.encode(), *numbers})
            for name in (b"perf-%s.map", b"jit-%s.dump")
        ]


class _Functions:
    """The functions of one process, up to MAX_FUNCTIONS and MAX_MEMORY."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, str, int]] = {}
        """Size, name and rank by address. Of the functions of a file the last one has the highest rank."""
        self.memory = 0
        """Estimated bytes of memory that the functions take."""

    @property
    def is_full(self) -> bool:
        """Whether no other function may be added."""
        return len(self.found) >= MAX_FUNCTIONS or self.memory >= MAX_MEMORY

    def add(self, address: int, size: int, name: str, rank: int) -> None:
        """Add a function, or replace the one at the same address."""
        if address in self.found:
            self.memory -= FUNCTION_BYTES + sys.getsizeof(self.found[address][1])
        self.found[address] = size, name, rank
        self.memory += FUNCTION_BYTES + sys.getsizeof(name)

    def sorted(self) -> list[int]:
        """The sorted addresses of all functions but those that begin within a newer function.

        Newer code has taken the memory of these.
        """
        kept: list[int] = []
        around: list[tuple[int, int]] = []  # rank and end of functions that may span the next address
        for address in sorted(self.found):
            size, _, rank = self.found[address]
            while around and around[-1][1] <= address:
                around.pop()
            if not around or around[-1][0] <= rank:
                kept.append(address)
                around.append((rank, address + size))
        return kept


def _read_map(file: int, size: int, functions: _Functions) -> None:
    """Add the functions of a perf map, the last ones first."""
    start = max(0, size - MAX_BYTES)
    data = os.pread(file, MAX_BYTES, start)
    data = data[: data.rfind(b"\n") + 1]  # the runtime may be writing the last line
    lines = data.rsplit(b"\n", MAX_FUNCTIONS)
    if start or len(lines) > MAX_FUNCTIONS:
        del lines[0]  # the beginning of this line may be missing
    seen: set[int] = set()
    while lines and not functions.is_full:
        if found := _LINE.match(lines.pop()):
            address, length, name = int(found[1], 16), int(found[2], 16), found[3]
            if address not in seen:
                seen.add(address)
                functions.add(address, length, _without_types(name), len(lines))


def _without_types(name: bytes) -> str:
    """The name of a function. A Java method loses its type and its parameters."""
    text = _decoded(name)
    java = _JAVA.fullmatch(text)
    return class_name(java[1]) if java and "." in java[1][1:-1] else text


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")[:MAX_NAME]


def class_name(name: str) -> str:
    """The name of a Java class or method without the address of a hidden class: the same in every process."""
    return _HIDDEN_CLASS.sub("", name)


def _read_dump(file: int, size: int, functions: _Functions) -> None:
    """Add the functions of a jitdump file, the first ones first."""
    header = os.pread(file, DUMP_HEADER.size, 0)
    if len(header) < DUMP_HEADER.size or DUMP_HEADER.unpack(header)[0] != DUMP_MAGIC:
        return
    offset = max(DUMP_HEADER.unpack(header)[2], DUMP_HEADER.size)
    for rank in range(MAX_RECORDS):
        if offset >= size or functions.is_full:
            break
        record = os.pread(file, RECORD.size + CODE.size + MAX_NAME, offset)
        if len(record) < RECORD.size + CODE.size:
            break
        kind, total, _ = RECORD.unpack_from(record)
        if kind == CODE_LOAD:
            *_, address, length, _ = CODE.unpack_from(record, RECORD.size)
            name = record[RECORD.size + CODE.size :].partition(b"\0")[0]
            functions.add(address, length, _decoded(name), rank)
        if total < RECORD.size:
            break
        offset += total
