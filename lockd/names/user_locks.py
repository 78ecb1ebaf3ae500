"""User-space locks by the object that their address lies in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ANON = "anon"
"""A lock on a heap, on a stack or in shared memory: nothing has a name there."""
NOT_OBJECTS = ("/dev/zero", "/memfd:", "/dev/shm/", "/SYSV")


@dataclass(frozen=True)
class Mapping:
    """One line of /proc/PID/maps; `path` is empty for anonymous memory."""

    start: int
    end: int
    path: str


def mappings(lines: Iterable[str]) -> Iterator[Mapping]:
    for line in lines:
        fields = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in fields[0].split("-"))
        path = fields[5].rstrip("\n").removesuffix(" (deleted)") if len(fields) > 5 else ""
        yield Mapping(start, end, path)


def name_in(maps: Iterable[Mapping], address: int) -> str:
    """`object+0xoffset` from the object's first byte in memory, or `anon`.

    Zero-initialised variables live in an anonymous mapping right behind the file's: it
    belongs to the object too.
    """
    path, base, end = "", 0, 0
    for one in maps:
        continues = one.path == path or (not one.path and one.start == end)
        if not continues or not path:
            path, base = one.path, one.start
        end = one.end
        if one.start <= address < one.end:
            is_object = path.startswith("/") and not path.startswith(NOT_OBJECTS)
            return f"{Path(path).name}+{address - base:#x}" if is_object else ANON
    return ANON


def name_of_user_lock(procfs: Path, tgid: int, address: int) -> str:
    """The name of the lock at `address` of a process; `anon` as well if the process is gone."""
    try:
        path = procfs / str(tgid) / "maps"
        with path.open(encoding="utf-8", errors="backslashreplace", newline="\n") as maps:
            return name_in(mappings(maps), address)
    except OSError:
        return ANON
