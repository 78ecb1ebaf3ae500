"""Cgroups to units: what an operator calls the service or container that a thread belongs to."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

UNIT = re.compile(r"^.+\.(?:service|scope)$")
CONTAINER = re.compile(r"^(?:[a-z-]+-)?([0-9a-f]{64})(?:\.scope)?$")
"""docker-ID.scope, cri-containerd-ID.scope, libpod-ID.scope, crio-ID.scope, or the bare id."""
SHORT_ID = 12

FILEID_KERNFS = 0xFE
MAX_CACHED = 20_000


def unit_of(path: str) -> str:
    """The last service, scope or container id of a cgroup's path; empty if there is none.

    >>> unit_of("/system.slice/nginx.service")
    'nginx.service'
    """
    for part in reversed(path.split("/")):
        if container := CONTAINER.match(part):
            return container[1][:SHORT_ID]
        if UNIT.match(part):
            return part
    return ""


class _FileHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint32), ("kind", ctypes.c_int32), ("id", ctypes.c_uint64))
    _pack_ = 1


class Units:
    """Unit names by cgroup id (v2) or, where a thread's v2 cgroup is the root, by process (v1).

    `procfs` is the root of a proc file system.
    """

    def __init__(self, procfs: Path = Path("/proc")) -> None:
        self._procfs = procfs
        self._by_id: dict[int, str | None] = {}
        self._by_file: dict[bytes, str] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._mount = self._open_cgroup2()
        self._controllers_are_v1 = self._has_v1()

    def unit(self, cgroup_id: int, tgid: int) -> str:
        """The unit of a thread; empty if it is in none, or ended before it could be told.

        A `cgroup_id` of 0 is not known.
        """
        if not cgroup_id:
            return self._by_process(tgid)
        if cgroup_id in self._by_id:
            unit = self._by_id[cgroup_id]
        else:
            unit = self._by_cgroup_id(cgroup_id)
            if len(self._by_id) >= MAX_CACHED:
                self._by_id.clear()
            self._by_id[cgroup_id] = unit
        if unit:
            return unit
        # On a hybrid or v1 host the unified hierarchy may be empty: ask the process.
        return self._by_process(tgid) if self._controllers_are_v1 else unit or ""

    def _by_cgroup_id(self, cgroup_id: int) -> str | None:
        """The unit by the kernel's own handle: the id is what name_to_handle_at() would give."""
        if self._mount < 0:
            return None
        handle = _FileHandle(8, FILEID_KERNFS, cgroup_id)
        fd = self._libc.open_by_handle_at(self._mount, ctypes.byref(handle), os.O_RDONLY)
        if fd < 0:
            return None
        try:
            path = os.readlink(b"/proc/self/fd/%d" % fd)
        finally:
            os.close(fd)
        return unit_of(path.decode("utf-8", "backslashreplace"))  # anybody may name a cgroup

    def _by_process(self, tgid: int) -> str:
        try:
            with open(f"{self._procfs}/{tgid}/cgroup", "rb") as file:
                text = file.read()
        except OSError:
            return ""
        # Thousands of processes share a few cgroups: their files are the same.
        unit = self._by_file.get(text)
        if unit is None:
            if len(self._by_file) >= MAX_CACHED:
                self._by_file.clear()
            unit = unit_of_cgroup_file(text.decode("utf-8", "backslashreplace").splitlines())
            self._by_file[text] = unit
        return unit

    def _open_cgroup2(self) -> int:
        place = next(self._mounts("cgroup2"), None)
        try:
            return os.open(place, os.O_RDONLY | os.O_DIRECTORY) if place else -1
        except OSError:
            return -1

    def _has_v1(self) -> bool:
        return any(self._mounts("cgroup"))

    def _mounts(self, kind: str) -> Iterator[str]:
        """Where file systems of this kind are mounted."""
        try:
            lines = (self._procfs / "self/mountinfo").read_text("utf-8", "surrogateescape").split("\n")
        except OSError:
            return
        for line in lines:
            fields, _, about = line.partition(" - ")
            if about.split(" ")[0] == kind:
                yield fields.split(" ")[4]


def unit_of_cgroup_file(lines: list[str]) -> str:
    """The unit in /proc/PID/cgroup: systemd's own hierarchy first, then any controller's."""
    hierarchies = [line.split(":", 2) for line in lines]
    known = sorted((h for h in hierarchies if len(h) == 3), key=lambda h: h[1] not in ("name=systemd", ""))
    return next((unit for _, _, path in known if (unit := unit_of(path))), "")
