"""Units of threads: the service or container of the cgroup whose path the kernel or procfs tells."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from lockd.names.labels.cgroup_paths import NO_UNIT, Unit, printable_path, unit_of, unit_of_cgroup_file

OCTAL = re.compile(r"\\([0-7]{3})")
"""An escaped character in mountinfo, such as a space."""
FILEID_KERNFS = 0xFE
"""The type of file handle that has a cgroup's id."""
MAX_KNOWN = 10_000
"""The most cgroups whose unit is remembered, even after their end. Those that were asked for last are kept.
They take 6 MB at most."""
FILE_BYTES, MAX_FILES = 8192, 1000
"""Bytes that are read of /proc/PID/cgroup, and the most contents of such files that are remembered. The path
of a cgroup may have 4,096 bytes."""
IN_V1 = re.compile(rb"^[1-9][0-9]*:[^:\n]*:/[^\n]", re.MULTILINE)
"""A line of /proc/PID/cgroup about a hierarchy of v1 in whose root the process is not."""
PF_EXITING = 1 << 2
"""The flag in /proc/PID/stat of threads that are about to end, or have ended."""


_unit_of_cgroup_file = lru_cache(MAX_FILES)(unit_of_cgroup_file)
"""unit_of_cgroup_file() with a cache, as many processes share a few cgroups."""


def flags_of(stat: bytes) -> int:
    """The flags (PF_…) of a thread, by its stat file in procfs."""
    return int(stat.rpartition(b")")[2].split()[6])


class _FileHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint32), ("kind", ctypes.c_int32), ("id", ctypes.c_uint64))
    _pack_ = 1


class Units:
    """Units by cgroup id (cgroup v2), or by process on a host with controllers of cgroup v1.

    `procfs` is the root of a proc file system. At most `max_known` cgroups are remembered. The unit of a
    cgroup never changes: ids are never used again, and no cgroup of v2 is ever moved or renamed.
    """

    def __init__(self, procfs: Path = Path("/proc"), max_known: int = MAX_KNOWN) -> None:
        self._procfs = procfs
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._mount, self._mounted_at = self._open_cgroup2()
        self._controllers_are_v1 = any(self._mounts("cgroup"))
        self._by_id = lru_cache(max_known)(self._ask_kernel)
        self.known: dict[str, Unit] = {}
        """The units that were found, by name, until keep() forgets them."""

    def unit(self, cgroup_id: int, tgid: int, last: str = "") -> str:
        """The name of a thread's unit; empty if the thread is in none, or ended before anybody could look.

        `cgroup_id` is 0 if it is unknown. `last` is the unit in which the process was last known, if any.
        """
        unit = self._find(cgroup_id, tgid, last)
        # A unit can have several cgroups, and some say less of it than others, such as that of a container's
        # monitor. What says most is kept.
        if unit.name and unit.said >= self.known.get(unit.name, NO_UNIT).said:
            self.known[unit.name] = unit
        return unit.name

    def keep(self, names: set[str]) -> None:
        """Forget what is known of all units but these."""
        self.known = {name: unit for name, unit in self.known.items() if name in names}

    def _find(self, cgroup_id: int, tgid: int, last: str) -> Unit:
        if not self._controllers_are_v1:
            return self._by_cgroup(cgroup_id) or self._by_process(tgid) or Unit(last)
        # The unified hierarchy may be empty, or know less: there, a container that is managed by v1 is in the
        # cgroup of the daemon that started the container.
        for unit in self._by_v1(tgid, last):
            if unit.name:
                return unit
        return self._by_cgroup(cgroup_id) or NO_UNIT

    def _by_v1(self, tgid: int, last: str) -> Iterator[Unit]:
        """The units that a process may be in if controllers are those of v1, the most likely one first."""
        text = self._read(f"{tgid}/cgroup")
        if not IN_V1.search(text) and self._has_ended(tgid):
            # The kernel shows a thread that has ended in the root of all hierarchies of v1. Other threads of
            # the process may still run.
            of_newest = self._read(f"{tgid}/task/{self._newest_thread(tgid)}/cgroup")
            if IN_V1.search(of_newest):
                yield _unit_of_cgroup_file(of_newest)
            yield Unit(last)
        yield _unit_of_cgroup_file(text)

    def _by_cgroup(self, cgroup_id: int) -> Unit | None:
        """The unit of a cgroup; None if the cgroup is gone and its unit is not remembered."""
        try:
            return self._by_id(cgroup_id) if cgroup_id else None
        except OSError:
            return None

    def _ask_kernel(self, cgroup_id: int) -> Unit:
        """The unit of a cgroup, found by the file handle that name_to_handle_at() would return for its id.

        Raises OSError if the cgroup is gone.
        """
        if self._mount < 0:
            raise OSError(errno.ENODEV, "no cgroup2 file system")
        handle = _FileHandle(8, FILEID_KERNFS, cgroup_id)
        fd = self._libc.open_by_handle_at(self._mount, ctypes.byref(handle), os.O_RDONLY)
        if fd < 0:
            raise OSError(ctypes.get_errno(), f"cgroup {cgroup_id}")
        try:
            path = _path_of(fd)
        finally:
            os.close(fd)
        return unit_of(printable_path(path.removeprefix(self._mounted_at)))

    def _by_process(self, tgid: int) -> Unit | None:
        """The unit that procfs tells of a process; None if the process is gone."""
        text = self._read(f"{tgid}/cgroup")
        return _unit_of_cgroup_file(text) if text else None

    def _has_ended(self, tgid: int) -> bool:
        """Whether the first thread of a process has ended, or is about to."""
        stat = self._read(f"{tgid}/stat")
        return not stat or bool(flags_of(stat) & PF_EXITING)

    def _newest_thread(self, tgid: int) -> str:
        """The id of the thread of a process that began last; empty if the process is gone."""
        try:
            return os.listdir(f"{self._procfs}/{tgid}/task")[-1]
        except (OSError, IndexError):
            return ""

    def _read(self, path: str) -> bytes:
        """The content of a file in procfs; empty if its process is gone."""
        try:
            with open(f"{self._procfs}/{path}", "rb") as file:
                return file.read(FILE_BYTES)
        except OSError:
            return b""

    def _open_cgroup2(self) -> tuple[int, bytes]:
        """Descriptor and path of the root of the unified hierarchy; -1 and empty if there is none."""
        for directory in self._mounts("cgroup2"):
            try:
                fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                continue
            return fd, _path_of(fd)
        return -1, b""

    def _mounts(self, kind: str) -> Iterator[str]:
        """Directories on which file systems of a type are mounted."""
        try:
            lines = (self._procfs / "self/mountinfo").read_text("utf-8", "surrogateescape").split("\n")
        except OSError:
            return
        for line in lines:
            fields, _, file_system = line.partition(" - ")
            if file_system.split(" ")[0] == kind:
                yield OCTAL.sub(lambda m: chr(int(m[1], 8)), fields.split(" ")[4])


def _path_of(fd: int) -> bytes:
    return os.readlink(b"/proc/self/fd/%d" % fd)
