"""Which files are meant by the name of a program or library: those of a process, or of this host."""

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
"""As ldconfig calls it."""
LDCONFIG = ("ldconfig", "/sbin/ldconfig", "/usr/sbin/ldconfig")
MUSL = re.compile(r"ld-musl-.*|libc\.musl-.*")
LISTED = 12
IN_LIBC = ("pthread", "rt", "dl", "util", "anl")
"""Libraries that became parts of libc with glibc 2.34; musl never had them apart."""


@dataclass(frozen=True)
class Object:
    """A file with code."""

    path: str
    """For people: as the process sees it, if it is one's."""
    pid: int
    """Of the process in which it is meant; 0: in all."""
    place: str
    """A path by which we, and the kernel for us, find the very file."""
    opened: int
    """A descriptor to read it."""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def objects_named(name: str, pids: tuple[int, ...], procfs: Path = Path("/proc")) -> list[Object]:
    """Files called `name`: a path, a file's name, a library's short one (`c`), a program on PATH; of
    processes, those that they have mapped, also by a pattern.

    Descriptors are the caller's. Raises UsageError if there is none, or no such process; HostError if one
    cannot be read.
    """
    if not pids:
        return _of_host(name)
    found: list[Object] = []
    for pid in pids:
        found += _of_process(name, pid, procfs)
    return found


def is_called(file: str, name: str) -> bool:
    """Whether a file of this name is meant by `name`."""
    if fnmatch.fnmatchcase(file, name):
        return True
    short = re.escape(name.removeprefix("lib"))
    if name == "c" and MUSL.fullmatch(file):
        return True
    return re.fullmatch(rf"lib{short}(?:-[\d.]+)?\.so(?:\.[\d.]+)?", file) is not None


def _of_process(name: str, pid: int, procfs: Path) -> list[Object]:
    process = procfs / str(pid)
    try:
        mapped = Mappings((process / "maps").read_bytes()).code_files()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise UsageError(f"process {pid}: No such process") from error
    except OSError as error:
        raise HostError(f"process {pid}: {error.strerror}") from error
    if "/" in name:
        chosen = [one for one in mapped if os.fsdecode(one.path) == name]
        # A library that is to be loaded later.
        return [_mapped(process, pid, one) for one in chosen] or [_unmapped(process, pid, name)]
    chosen = [one for one in mapped if is_called(_name(one), name)]
    if not chosen:
        names = sorted({_name(one) for one in mapped})
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        raise UsageError(
            f"{name}: process {pid} has mapped no program or library of that name; "
            f"it has {', '.join(names[:LISTED]) or 'none'}{more}"
        )
    return [_mapped(process, pid, one) for one in chosen]


def _name(mapping: Mapping) -> str:
    return os.fsdecode(mapping.path.rpartition(b"/")[2])


def _mapped(process: Path, pid: int, mapping: Mapping) -> Object:
    """By its path, as this process finds it or through the other's root; if neither leads to the file any
    more, as it was replaced, by procfs's link to it."""
    path = os.fsdecode(mapping.path)
    try:
        memory = os.open(process / "mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            opened = open_mapped(process, mapping, memory)
        finally:
            os.close(memory)
    except OSError as error:
        raise HostError(f"process {pid}: {path}: {error.strerror}") from error
    link = f"{process}/map_files/{mapping.start:x}-{mapping.end:x}"
    about = os.fstat(opened)
    for place in (path, f"{process}/root{path}"):
        try:
            if os.path.samestat(os.stat(place), about):
                return Object(path, pid, place, opened)
        except OSError:
            continue
    return Object(path, pid, link, opened)


def _unmapped(process: Path, pid: int, path: str) -> Object:
    try:
        opened = open_regular(process / "root", os.fsencode(path))
    except OSError as error:
        raise UsageError(f"{path}: in the file system of process {pid}: {error.strerror}") from error
    return Object(path, pid, f"{process}/root{path}", opened)


def _of_host(name: str) -> list[Object]:
    if "/" in name:
        paths = [name]
    elif set(name) & set("*?["):
        raise UsageError(f"{name}: a pattern of programs or libraries needs a process to look in: add -p PID")
    else:
        paths = list(_libraries(name)) or [found for found in (shutil.which(name),) if found]
    if not paths:
        raise UsageError(
            f"{name}: no library of that name for {ARCHITECTURE} is in the linker's cache (ldconfig -p), "
            "and no program on PATH; give its path, or the process that uses it with -p PID"
        )
    places = dict.fromkeys(os.path.realpath(path) for path in paths)
    try:
        return [Object(place, 0, place, open_regular("/", os.fsencode(place))) for place in places]
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from error


def _libraries(name: str) -> Iterator[str]:
    for file, path in _cached_libraries():
        if is_called(file, name) and not MUSL.fullmatch(
            file
        ):  # that of few programs: by a process, or its path
            yield path


@functools.cache
def _cached_libraries() -> tuple[tuple[str, str], ...]:
    """Name and path of the libraries that this host's linker knows, for programs like its own."""
    command = next((found for one in LDCONFIG if (found := shutil.which(one))), None)
    if not command:
        return ()
    done = subprocess.run([command, "-p"], capture_output=True, text=True, check=False)
    lines = re.findall(r"^\t(\S+) \(([^)]*)\) => (.+)$", done.stdout, re.MULTILINE)
    return tuple((file, path) for file, kind, path in lines if ARCHITECTURE in kind.split(","))
