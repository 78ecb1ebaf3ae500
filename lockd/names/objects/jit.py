"""Names of functions that were compiled as the program ran, as runtimes write them down for profilers."""

from __future__ import annotations

import bisect
import functools
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path

from lockd.names.objects.files import open_own

OBJECT = "[jit]"
MAX_BYTES = 16 << 20
"""Of a map; what was written last counts."""
MAX_FUNCTIONS = 200_000
"""Of a file; the last of a map, the first of a dump. In memory they are 40 MB."""
MAX_RECORDS = 2 * MAX_FUNCTIONS
"""Of a dump: lines of source code have records too."""
MAX_NAME = 256
LOOK_SECONDS = 0.1
"""Between two looks for files that have come or changed, while a function has no name; a look at what has not
changed takes some 50 us,"""
PATIENCE_SECONDS = 10.0
"""and so much longer where it has one: code that has gone may have had its place."""
READING_SHARE = 20
"""Times as long as the last reading took, nothing is read again."""

DUMP_MAGIC = 0x4A695444
DUMP_HEADER = struct.Struct("<IIIIIIQQ")
RECORD = struct.Struct("<IIQ")
CODE_LOAD = 0
CODE = struct.Struct("<IIQQQQ")
"""Of a record that tells of new code: process, thread, its address twice, its size, its number."""

_LINE = re.compile(rb"(?:0x)?([0-9a-fA-F]{1,16}) (?:0x)?([0-9a-fA-F]{1,16}) (.{1,%d})" % MAX_NAME)
_JAVA = re.compile(r"[^\s()]+ ([^\s()]+\.[^\s()]+)\([^()]*\)?")
"""As HotSpot writes a method: its type, its name, its parameters, which may be cut."""
_HIDDEN_CLASS = re.compile(r"/0x[0-9a-f]+")
"""What HotSpot adds to the name of one, which is another in every process."""


class JitNames:
    """Of one process by its directory in procfs: from perf-PID.map and jit-PID.dump in its own /tmp.

    Only files of its own user are believed, see open_own(). Later entries hide earlier ones.
    """

    def __init__(self, process: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._process, self._clock = process, clock
        self._look_at = 0.0
        self.reads = 0
        """How often other names were read than before."""
        self._read: dict[bytes, tuple[int, int, int]] = {}
        self._starts: list[int] = []
        self._functions: list[tuple[int, str]] = []

    def function(self, address: int, dumps: list[bytes]) -> tuple[int, str] | None:
        """Where a function begins and its name. `dumps`: files of that sort that the process has mapped."""
        found = self._find(address)
        has_more = self.refresh(dumps, PATIENCE_SECONDS if found else 0.0)
        return self._find(address) if has_more else found

    def refresh(self, dumps: list[bytes], patience: float = 0.0) -> bool:
        """Read what has come or changed, but not all the time; whether there are other names now."""
        now = self._clock()
        if now < self._look_at + patience:
            return False
        has_more = self._has_more(dumps)
        done = self._clock()
        self._look_at = done + max(LOOK_SECONDS, READING_SHARE * (done - now))
        return has_more

    @property
    def has_names(self) -> bool:
        return bool(self._starts)

    @property
    def memory(self) -> int:
        return 200 * len(self._starts)

    def _find(self, address: int) -> tuple[int, str] | None:
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._starts[at] + self._functions[at][0]:
            return None
        return self._starts[at], self._functions[at][1]

    def _has_more(self, dumps: list[bytes]) -> bool:
        """Reads everything again if a file has changed."""
        opened: dict[bytes, int] = {}
        try:
            opened = open_own(self._process, dict.fromkeys([*self._paths, *dumps]))
            about = {path: os.fstat(file) for path, file in opened.items()}
            found = {path: (a.st_ino, a.st_size, a.st_mtime_ns) for path, a in about.items()}
            if found == self._read:
                return False
            self._read = found
            functions: dict[int, tuple[int, str]] = {}
            for path in found:
                read = _dump if path.endswith(b".dump") else _map
                functions.update(read(opened[path], about[path].st_size))
            before = self._starts, self._functions
            self._starts = sorted(functions)
            self._functions = [functions[start] for start in self._starts]
            if (self._starts, self._functions) == before:  # it has just been created
                return False
            self.reads += 1
            return True
        except OSError:
            return False
        finally:
            for file in opened.values():
                os.close(file)

    @functools.cached_property
    def _paths(self) -> list[bytes]:
        """By the process's own number in its namespace, or the one it has here."""
        status = (self._process / "status").read_bytes()
        numbers = {line.split()[-1] for line in status.splitlines() if line.startswith(b"NSpid:")}
        return [
            b"/tmp/" + name % number
            for number in sorted({self._process.name.encode(), *numbers})
            for name in (b"perf-%s.map", b"jit-%s.dump")
        ]


def _map(file: int, size: int) -> dict[int, tuple[int, str]]:
    start = max(0, size - MAX_BYTES)
    data = os.pread(file, MAX_BYTES, start)
    data = data[: data.rfind(b"\n") + 1]  # the last line may still be being written
    lines = data.rsplit(b"\n", MAX_FUNCTIONS)
    functions: dict[int, tuple[int, str]] = {}
    for line in lines[1:] if start or len(lines) > MAX_FUNCTIONS else lines:  # the first may be cut
        if found := _LINE.match(line):
            address, length, name = found.groups()
            functions[int(address, 16)] = (int(length, 16), _without_types(name))
    return functions


def _without_types(name: bytes) -> str:
    text = name.decode("utf-8", "backslashreplace")
    java = _JAVA.fullmatch(text)
    return without_address(java[1]) if java else text


def without_address(name: str) -> str:
    """The name of a class of Java, or of what is in one, as it is in every process."""
    return _HIDDEN_CLASS.sub("", name)


def _dump(file: int, size: int) -> dict[int, tuple[int, str]]:
    functions: dict[int, tuple[int, str]] = {}
    header = os.pread(file, DUMP_HEADER.size, 0)
    if len(header) < DUMP_HEADER.size or DUMP_HEADER.unpack(header)[0] != DUMP_MAGIC:
        return functions
    at = max(DUMP_HEADER.unpack(header)[2], DUMP_HEADER.size)
    for _ in range(MAX_RECORDS):
        if at >= size or len(functions) == MAX_FUNCTIONS:
            break
        record = os.pread(file, RECORD.size + CODE.size + MAX_NAME, at)
        if len(record) < RECORD.size + CODE.size:
            break
        kind, total, _ = RECORD.unpack_from(record)
        if kind == CODE_LOAD:
            *_, address, length, _ = CODE.unpack_from(record, RECORD.size)
            name = record[RECORD.size + CODE.size :].partition(b"\0")[0]
            functions[address] = (length, name.decode("utf-8", "backslashreplace"))
        if total < RECORD.size:
            break
        at += total
    return functions
