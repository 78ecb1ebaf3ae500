"""Files of other processes, opened without trust in what their paths may be."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from lockd.names.objects.mappings import Mapping

MAX_LINKS = 40
"""In a path, as the kernel has it."""
OF_THE_KERNEL = {
    0x9FA0: "procfs",
    0x62656572: "sysfs",
    0x27E0EB: "cgroup",
    0x63677270: "cgroup2",
    0x64626720: "debugfs",
    0x74726163: "tracefs",
    0x73636673: "securityfs",
    0x5A3C69F0: "apparmorfs",
    0xF97CFF8C: "selinuxfs",
    0x43415D53: "smackfs",
    0x62656570: "configfs",
    0x6165676C: "pstore",
    0xDE5E81E4: "efivarfs",
    0xCAFE4A11: "bpf",
    0x42494E4D: "binfmt_misc",
    0x65735543: "fusectl",
    0x19800202: "mqueue",
    0x07655821: "resctrl",
}
"""File systems by their magic numbers (statfs(2)): reading there can take away what others are to read, and
tells what only root may know."""
HEADER = 512
"""Bytes of a file that are compared with memory if its device does not tell whether it is the same."""


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def open_regular(root: Path | str, path: bytes) -> int:
    """A descriptor to read a regular file under `root`, which no link leads out of. OSError if there is none.

    Nothing else is opened: what to open has effects, like a pipe, a device or a file of procfs, is only
    looked at. Whose file it is does not matter: this is for files that are then compared with what is known
    of them, such as a build id.
    """
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _opened(_look(directory, path))
    finally:
        os.close(directory)


def open_own(process: Path, paths: Iterable[bytes]) -> dict[bytes, int]:
    """Those of these files that are a process's own, as it finds them, by its directory in procfs. OSError if
    there is no such process.

    What is in them is told to whoever asks for names. So the process must be one that may read them anyway,
    and nobody else may have put them there: each belongs to the one user that the process runs as, root's to
    root's processes alone, has no other name, and no symbolic link leads to it.
    """
    opened: dict[bytes, int] = {}
    directory = os.open(process, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # whoever has its id next
    try:
        users = _users(directory)
        root = os.open("root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        try:
            for path in paths:
                with contextlib.suppress(OSError):
                    opened[path] = _opened(_look(root, path, follows_links=False), users)
        finally:
            os.close(root)
    finally:
        os.close(directory)
    return opened


def _users(directory: int) -> set[int]:
    """That a process runs as: its real, effective, saved and file system user, by its directory in procfs."""
    file = os.open("status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    with open(file, "rb") as status:
        return {int(user) for line in status if line.startswith(b"Uid:") for user in line.split()[1:]}


def open_link(link: str) -> int:
    """The same by one of procfs's links, which lead to a file wherever it is, even a deleted one."""
    return _opened(os.open(link, os.O_PATH | os.O_CLOEXEC))


def _look(root: int, path: bytes, follows_links: bool = True) -> int:
    """An O_PATH descriptor of what this path leads to if `root` is the directory that all paths begin at.

    Step by step, and never by `..`, which may lead anywhere once a directory has been moved. openat2() would
    do the same at once, but takes its flags from memory, where no filter of system calls sees whether it is
    to write (process/confinement.py).
    """
    places, names, links = [root], path.split(b"/")[::-1], 0
    try:
        while names:
            name = names.pop()
            if name == b".." and places[1:]:
                os.close(places.pop())
            if name in (b"", b".", b".."):
                continue
            places.append(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=places[-1]))
            if not stat.S_ISLNK(os.fstat(places[-1]).st_mode):
                continue
            links += 1
            if not follows_links or links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fsdecode(path))
            target = os.readlink(b"", dir_fd=places[-1])
            names += target.split(b"/")[::-1]
            for place in places[1:] if target.startswith(b"/") else places[-1:]:
                places.remove(place)
                os.close(place)
        if not places[1:]:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(path))
        return places.pop()
    finally:
        for place in places[1:]:
            os.close(place)


def _opened(place: int, users: set[int] | None = None) -> int:
    """Takes an O_PATH descriptor and gives one to read, if that is a file of these users alone."""
    try:
        about = os.fstat(place)
        if users is not None and (users != {about.st_uid} or about.st_nlink > 1):
            raise OSError(errno.EPERM, "a file that others own", os.readlink(f"/proc/self/fd/{place}"))
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "no regular file", os.readlink(f"/proc/self/fd/{place}"))
        if made := OF_THE_KERNEL.get(_file_system(place)):
            raise OSError(errno.EINVAL, f"a file of {made}", os.readlink(f"/proc/self/fd/{place}"))
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(place)


def _file_system(file: int) -> int:
    """Its magic number, which struct statfs begins with."""
    about = ctypes.create_string_buffer(256)
    if _libc().fstatfs(file, about):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(ctypes.c_ulong.from_buffer(about).value)


def open_mapped(process: Path, mapping: Mapping, memory: int) -> int:
    """The file behind a mapping of the process with this directory in procfs. OSError if there is none.

    Kernels show the file itself to those who may see it; else its path is tried, if the same file is
    still there, and the program's link. `memory` is a descriptor of the process's, or -1.

    Whose file it is does not matter: to have it mapped, the process had to be allowed to read or to run it.
    That it is this file is known by its inode, together with its device or with the first bytes of the
    memory. Of what is in it only the symbols of an ELF file are told.
    """
    attempts: tuple[Callable[[], int], ...] = (
        lambda: open_link(f"{process}/map_files/{mapping.start:x}-{mapping.end:x}"),
        lambda: open_regular(f"{process}/root", mapping.path),
        lambda: open_link(f"{process}/exe"),
        lambda: open_regular("/", mapping.path),  # the process may be gone
    )
    for attempt in attempts:
        try:
            file = attempt()
        except OSError:
            continue
        if _is_mapped(file, mapping, memory):
            return file
        os.close(file)
    raise OSError(errno.ENOENT, "the mapped file cannot be opened", os.fsdecode(mapping.path))


def _is_mapped(file: int, mapping: Mapping, memory: int) -> bool:
    """By device and inode. On btrfs and overlayfs stat() tells another device than the memory map does."""
    about = os.fstat(file)
    if about.st_ino != mapping.inode:
        return False
    if about.st_dev == mapping.device:
        return True
    try:
        there = os.pread(memory, HEADER, mapping.start) if memory >= 0 else b""
        return len(there) == HEADER and there == os.pread(file, HEADER, mapping.offset)
    except OSError:
        return False
