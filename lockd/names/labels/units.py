"""Units by cgroup: the service or container that a thread belongs to, by the name that an operator uses."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from lockd.printable import masked

SERVICE = re.compile(r"/([^/]+\.(?:service|scope))(?=/|$)")
CONTAINER = re.compile(
    r"""/(?:
        (?!libpod-payload-)(?:[^/]*[-:])?(?P<id>[0-9a-f]{64})(?:\.scope|-[0-9a-f]+\.service)?
        | lxc(?:\.payload\.|\.monitor\.|/)(?P<lxc>[^/]+)
        | (?P<machine>machine-[^/]+\.scope | systemd-nspawn@[^/]+\.service)
    )(?=/|$)""",
    re.VERBOSE,
)
"""A container in the path of a cgroup.

An id is there alone (cgroupfs drivers), as docker-ID.scope, cri-containerd-ID.scope, crio-conmon-ID.scope,
kubepods-podUID.slice:cri-containerd:ID, or ID-HEX.service for podman's health checks. libpod-payload-ID is
not matched: this container is the only one of a service that was written for it, and the service's name is
the same for every new id.
"""
SHORT_ID = 12
"""Characters of a container's id that are shown."""
USER_MANAGER = re.compile(r"user@(?P<user>[^/]+)\.service")
"""The unit of a user's own service manager."""

OCTAL = re.compile(r"\\([0-7]{3})")
"""An escaped character in mountinfo, such as a space."""
DELETED = " (deleted)"
"""The end of the path of a removed cgroup."""
FILEID_KERNFS = 0xFE
"""The type of file handle that has a cgroup's id."""
MAX_KNOWN = 20_000
"""Cgroups whose unit is remembered, even after their end: those asked for last. They take some 5 MB."""
FILE_BYTES, MAX_FILES = 8192, 1000
"""Bytes that are read of /proc/PID/cgroup, and contents of such files that are remembered. The path of a
cgroup may have 4,096 bytes."""


def unit_of(path: str) -> str:
    """The unit in the path of a cgroup; empty if there is none.

    The unit is the outermost container: somebody else chose the names inside, and a whole system may run
    there. Without a container, the unit is the outermost service or scope, as a service may arrange the
    cgroups below its own. The units of a user's manager have names of the user's choice: the user's slice is
    put before them.

    >>> unit_of("/system.slice/nginx.service/worker")
    'nginx.service'
    >>> unit_of("/user.slice/user-1000.slice/user@1000.service/app.slice/nginx.service")
    'user-1000.slice/nginx.service'
    """
    return container_of(path) or _service_of(path)


def container_of(path: str) -> str:
    """The outermost container in the path of a cgroup: short id, `lxc:NAME` or unit; empty if none."""
    match = CONTAINER.search(path.removesuffix(DELETED))
    if not match:
        return ""
    unit = match["machine"] or (f"lxc:{match['lxc']}" if match["lxc"] else match["id"][:SHORT_ID])
    return _slice_of_user(path[: match.start() + 1]) + unit


def _service_of(path: str) -> str:
    units: list[str] = SERVICE.findall(path.removesuffix(DELETED))
    # init.scope is the user's manager itself.
    if units[1:] and USER_MANAGER.fullmatch(units[0]) and units[1] != "init.scope":
        return _slice_of_user(path) + units[1]
    return units[0] if units else ""


def _slice_of_user(path: str) -> str:
    """The slice of the user whose manager has this cgroup, with a slash; empty without a manager."""
    units = SERVICE.findall(path)
    manager = USER_MANAGER.fullmatch(units[0]) if units else None
    return f"user-{manager['user']}.slice/" if manager else ""


def unit_of_cgroup_file(lines: list[str]) -> str:
    """The unit in the lines of /proc/PID/cgroup; empty if there is none.

    A container in any hierarchy comes first, then a service in systemd's own hierarchy, then one in any
    other.
    """
    hierarchies = [line.split(":", 2) for line in lines]
    known = sorted((h for h in hierarchies if len(h) == 3), key=lambda h: h[1] not in ("name=systemd", ""))
    paths = [path for _, _, path in known]
    units = (unit for find in (container_of, _service_of) for path in paths if (unit := find(path)))
    return next(units, "")


@lru_cache(MAX_FILES)
def _unit_of_cgroup_file(text: bytes) -> str:
    """The unit in the content of /proc/PID/cgroup. It is cached: many processes share a few cgroups."""
    return unit_of_cgroup_file([_text(line) for line in text.split(b"\n")])


def _text(path: bytes) -> str:
    """A path as printable text: whoever may create cgroups may give them any names."""
    return masked(path.decode("utf-8", "backslashreplace"))


class _FileHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint32), ("kind", ctypes.c_int32), ("id", ctypes.c_uint64))
    _pack_ = 1


class Units:
    """Units by cgroup id (v2), and by process where there are controllers of v1.

    `procfs` is the root of a proc file system. At most `max_known` cgroups are remembered. The unit of a
    cgroup never changes: ids are never used again, and no cgroup of v2 is ever moved or renamed.
    """

    def __init__(self, procfs: Path = Path("/proc"), max_known: int = MAX_KNOWN) -> None:
        self._procfs = procfs
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._mount, self._mounted_at = self._open_cgroup2()
        self._controllers_are_v1 = any(self._mounts("cgroup"))
        self._by_id = lru_cache(max_known)(self._ask_kernel)

    def unit(self, cgroup_id: int, tgid: int) -> str:
        """The unit of a thread; empty if the thread is in none, or ended before its unit could be read.

        `cgroup_id` is 0 if it is unknown.
        """
        if self._controllers_are_v1:
            # The unified hierarchy may be empty, or know less: there, a container that is managed by v1 is in
            # the cgroup of the daemon that started the container.
            return self._by_process(tgid) or self._by_cgroup(cgroup_id) or ""
        unit = self._by_cgroup(cgroup_id)
        return self._by_process(tgid) if unit is None else unit

    def _by_cgroup(self, cgroup_id: int) -> str | None:
        """The unit of a cgroup; None if the cgroup is gone and its unit is not remembered."""
        try:
            return self._by_id(cgroup_id) if cgroup_id else None
        except OSError:
            return None

    def _ask_kernel(self, cgroup_id: int) -> str:
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
        return unit_of(_text(path.removeprefix(self._mounted_at)))

    def _by_process(self, tgid: int) -> str:
        try:
            with open(f"{self._procfs}/{tgid}/cgroup", "rb") as file:
                text = file.read(FILE_BYTES)
        except OSError:
            return ""
        return _unit_of_cgroup_file(text)

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
