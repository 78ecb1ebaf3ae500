"""Finds files of programs and libraries by name, in the mappings of processes or on this host."""

from __future__ import annotations

import fnmatch
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockd.errors import HostError, UsageError
from lockd.names.objects.mappings import Mapping, Mappings
from lockd.names.objects.process_files import open_mapped, open_regular

ARCHITECTURE = {"aarch64": "AArch64"}.get(os.uname().machine, "x86-64")
"""The name by which `ldconfig -p` marks libraries for this processor."""
LDCONFIG = ("ldconfig", "/sbin/ldconfig", "/usr/sbin/ldconfig")
MUSL = re.compile(r"ld-musl-.*|libc\.musl-.*")
"""File names of musl's C library."""
MOST_LISTED = 12
"""The most files of a process that an error message lists."""
IN_LIBC = ("pthread", "rt", "dl", "util", "anl")
"""Short names of libraries that are parts of libc in glibc since 2.34, and in every musl."""


@dataclass(frozen=True)
class Binary:
    """An open file of a program or library."""

    path: str
    """The path for messages: as the process sees it, if the file was found in a process."""
    pid: int
    """The id of the process that is to be probed; 0: all processes."""
    descriptor: int
    """The open file. It stays open until lockd ends, since the kernel finds the file by it (`place`)."""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def place(self) -> str:
        """A path by which the kernel finds this very file for lockd and its children.

        `path` would not do: a user who may rename the file can make `path` lead to another user's file at any
        time. A probe at the same offset could then be in the middle of an instruction of that file.
        """
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"


_kept: dict[tuple[int, int], int] = {}
"""Descriptors of all files that were found, by device and inode: many processes map the same libraries."""


def _keep(descriptor: int) -> int:
    """The descriptor in `_kept` for the same file. If that is another descriptor, `descriptor` is closed."""
    about = os.fstat(descriptor)
    kept = _kept.setdefault((about.st_dev, about.st_ino), descriptor)
    if kept != descriptor:
        os.close(descriptor)
    return kept


def find_binaries(name: str, pids: tuple[int, ...]) -> list[Binary]:
    """The files that `name` stands for: those that the processes `pids` have mapped or, without `pids`, files
    of this host.

    `name` is a path, the name of a file, the short name of a library (`c`) or a program on PATH. With `pids`
    it can also be a shell pattern. Raises UsageError if there is no such file or process, or if a file that
    no process has mapped cannot be read. Raises HostError if the mappings of a process, or a file that it has
    mapped, cannot be read.
    """
    if not pids:
        return _find_on_host(name)
    binaries: list[Binary] = []
    for pid in pids:
        binaries += _find_in_process(name, pid)
    return binaries


def has_name(file: str, name: str) -> bool:
    """Whether `name`, a shell pattern or the short name of a library, stands for a file called `file`."""
    if fnmatch.fnmatchcase(file, name):
        return True
    short = re.escape(name.removeprefix("lib"))
    if name == "c" and MUSL.fullmatch(file):
        return True
    return re.fullmatch(rf"lib{short}(?:-[\d.]+)?\.so(?:\.[\d.]+)?", file) is not None


def _find_in_process(name: str, pid: int) -> list[Binary]:
    process = Path(f"/proc/{pid}")
    try:
        mapped = Mappings((process / "maps").read_bytes()).code_files()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise UsageError(f"process {pid}: No such process") from error
    except OSError as error:
        raise HostError(f"process {pid}: {error.strerror}") from error
    if "/" in name:
        chosen = [mapping for mapping in mapped if os.fsdecode(mapping.path) == name]
        # A file that is not mapped is probed too: the process may load the library later.
        return [_mapped(process, pid, mapping) for mapping in chosen] or [_unmapped(process, pid, name)]
    chosen = [mapping for mapping in mapped if has_name(_name(mapping), name)]
    if not chosen:
        names = sorted({_name(mapping) for mapping in mapped})
        more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
        raise UsageError(
            f"{name}: process {pid} has mapped no program or library of that name; "
            f"it has {', '.join(names[:MOST_LISTED]) or 'none'}{more}"
        )
    return [_mapped(process, pid, mapping) for mapping in chosen]


def _name(mapping: Mapping) -> str:
    return os.fsdecode(mapping.path.rpartition(b"/")[2])


def _mapped(process: Path, pid: int, mapping: Mapping) -> Binary:
    """The file of a mapping, even if another file has its path by now."""
    path = os.fsdecode(mapping.path)
    try:
        memory = os.open(process / "mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            descriptor = open_mapped(process, mapping, memory)
        finally:
            os.close(memory)
    except OSError as error:
        raise HostError(f"process {pid}: {path}: {error.strerror}") from error
    return Binary(path, pid, _keep(descriptor))


def _unmapped(process: Path, pid: int, path: str) -> Binary:
    try:
        descriptor = open_regular(process / "root", os.fsencode(path))
    except OSError as error:
        raise UsageError(f"{path}: in the file system of process {pid}: {error.strerror}") from error
    return Binary(path, pid, _keep(descriptor))


def is_wildcard(name: str) -> bool:
    """Whether a name is a shell pattern, which may stand for several files."""
    return not set(name).isdisjoint("*?[")


def _find_on_host(name: str) -> list[Binary]:
    if "/" in name:
        paths = [name]
    elif is_wildcard(name):
        raise UsageError(f"{name}: a pattern of programs or libraries needs a process to look in: add -p PID")
    else:
        program = shutil.which(name)
        paths = list(_libraries(name)) or ([program] if program else [])
    if not paths:
        raise UsageError(
            f"{name}: no library of that name for {ARCHITECTURE} is in the linker's cache (ldconfig -p), "
            "and no program of that name is on PATH; give its path, or a process that uses it with -p PID"
        )
    real = dict.fromkeys(os.path.realpath(path) for path in paths)
    try:
        return [Binary(path, 0, _keep(open_regular("/", os.fsencode(path)))) for path in real]
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from error


def _libraries(name: str) -> Iterator[str]:
    for file, path in _cached_libraries():
        # Few programs use musl. Its C library is found only in a process, or if its path is given.
        if has_name(file, name) and not MUSL.fullmatch(file):
            yield path


@functools.cache
def _cached_libraries() -> tuple[tuple[str, str], ...]:
    """Names and paths of the libraries in the linker's cache that are for ARCHITECTURE."""
    command = next(filter(None, map(shutil.which, LDCONFIG)), None)
    if not command:
        return ()
    done = subprocess.run([command, "-p"], capture_output=True, text=True, check=False)
    lines = re.findall(r"^\t(\S+) \(([^)]*)\) => (.+)$", done.stdout, re.MULTILINE)
    return tuple((file, path) for file, kind, path in lines if ARCHITECTURE in kind.split(","))
