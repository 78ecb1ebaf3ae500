"""Cgroups to units: what an operator calls the service or container that a thread belongs to."""

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
"""The id alone (cgroupfs drivers), docker-ID.scope, cri-containerd-ID.scope, crio-conmon-ID.scope,
kubepods-podUID.slice:cri-containerd:ID, podman's health checks ID-HEX.service. Not libpod-payload-ID: it is
the one container of a service that was written for it, whose name outlives the ids."""
SHORT_ID = 12
USER_MANAGER = re.compile(r"user@(?P<user>[^/]+)\.service")

OCTAL = re.compile(r"\\([0-7]{3})")
"""How spaces are written in mountinfo."""
DELETED = " (deleted)"
"""What the kernel appends to the path of a cgroup that is removed."""
FILEID_KERNFS = 0xFE
MAX_KNOWN = 20_000
"""Cgroups whose unit is remembered, also when they are gone: the last ones asked for. Some 5 MB."""
FILE_BYTES, MAX_FILES = 8192, 1000
"""Of /proc/PID/cgroup, and how many different ones are remembered. A cgroup's path may have 4,096 bytes."""


def unit_of(path: str) -> str:
    """The unit in a cgroup's path; empty if there is none.

    It is the outermost container, for what runs in it is named by somebody else, and may be a whole
    system; else the outermost service or scope, so that below it a service may arrange itself as it likes.
    A user's manager has units of the user's choice: they have the user's slice before them.

    >>> unit_of("/system.slice/nginx.service/worker")
    'nginx.service'
    >>> unit_of("/user.slice/user-1000.slice/user@1000.service/app.slice/nginx.service")
    'user-1000.slice/nginx.service'
    """
    return container_of(path) or _service_of(path)


def container_of(path: str) -> str:
    """The outermost container in a cgroup's path: its short id, `lxc:NAME` or its unit; empty if none."""
    found = CONTAINER.search(path.removesuffix(DELETED))
    if not found:
        return ""
    unit = found["machine"] or (f"lxc:{found['lxc']}" if found["lxc"] else found["id"][:SHORT_ID])
    return _slice_of_user(path[: found.start() + 1]) + unit


def _service_of(path: str) -> str:
    units: list[str] = SERVICE.findall(path.removesuffix(DELETED))
    if units[1:] and USER_MANAGER.fullmatch(units[0]) and units[1] != "init.scope":  # which is the manager
        return _slice_of_user(path) + units[1]
    return units[0] if units else ""


def _slice_of_user(path: str) -> str:
    """Of the user whose manager's cgroup this is below, with a slash; empty if it is not below one's."""
    units = SERVICE.findall(path)
    manager = USER_MANAGER.fullmatch(units[0]) if units else None
    return f"user-{manager['user']}.slice/" if manager else ""


def unit_of_cgroup_file(lines: list[str]) -> str:
    """The unit in /proc/PID/cgroup: a container in any hierarchy, else systemd's own hierarchy first."""
    hierarchies = [line.split(":", 2) for line in lines]
    known = sorted((h for h in hierarchies if len(h) == 3), key=lambda h: h[1] not in ("name=systemd", ""))
    paths = [path for _, _, path in known]
    found = (unit for of in (container_of, _service_of) for path in paths if (unit := of(path)))
    return next(found, "")


@lru_cache(MAX_FILES)
def _unit_of_cgroup_file(text: bytes) -> str:
    """Thousands of processes share a few cgroups: their files are the same."""
    return unit_of_cgroup_file([_text(line) for line in text.split(b"\n")])


def _text(path: bytes) -> str:
    """Anybody who may make cgroups may call them what they like."""
    return masked(path.decode("utf-8", "backslashreplace"))


class _FileHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint32), ("kind", ctypes.c_int32), ("id", ctypes.c_uint64))
    _pack_ = 1


class Units:
    """Unit names by cgroup id (v2), and by process where there are controllers of v1.

    `procfs` is the root of a proc file system. At most `max_known` cgroups are remembered; ids are never
    used again, and no cgroup of v2 is ever moved or renamed, so that what was learnt of one stays true.
    """

    def __init__(self, procfs: Path = Path("/proc"), max_known: int = MAX_KNOWN) -> None:
        self._procfs = procfs
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._mount, self._mounted_at = self._open_cgroup2()
        self._controllers_are_v1 = any(self._mounts("cgroup"))
        self._by_id = lru_cache(max_known)(self._ask_kernel)

    def unit(self, cgroup_id: int, tgid: int) -> str:
        """The unit of a thread; empty if it is in none, or ended before it could be told.

        A `cgroup_id` of 0 is not known.
        """
        if self._controllers_are_v1:
            # The unified hierarchy may be empty, or know less: a container that is managed by v1 is in
            # the cgroup of the daemon that started it.
            return self._by_process(tgid) or self._by_cgroup(cgroup_id) or ""
        unit = self._by_cgroup(cgroup_id)
        return self._by_process(tgid) if unit is None else unit

    def _by_cgroup(self, cgroup_id: int) -> str | None:
        """None if it is gone, and was not asked for before."""
        try:
            return self._by_id(cgroup_id) if cgroup_id else None
        except OSError:
            return None

    def _ask_kernel(self, cgroup_id: int) -> str:
        """By the kernel's own handle: the id is what name_to_handle_at() would give.

        OSError: the cgroup is gone.
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
        """A descriptor and the path of the unified hierarchy; -1 if there is none."""
        for place in self._mounts("cgroup2"):
            try:
                fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                continue
            return fd, _path_of(fd)
        return -1, b""

    def _mounts(self, kind: str) -> Iterator[str]:
        """Where file systems of this kind are mounted."""
        try:
            lines = (self._procfs / "self/mountinfo").read_text("utf-8", "surrogateescape").split("\n")
        except OSError:
            return
        for line in lines:
            fields, _, about = line.partition(" - ")
            if about.split(" ")[0] == kind:
                yield OCTAL.sub(lambda m: chr(int(m[1], 8)), fields.split(" ")[4])


def _path_of(fd: int) -> bytes:
    return os.readlink(b"/proc/self/fd/%d" % fd)
