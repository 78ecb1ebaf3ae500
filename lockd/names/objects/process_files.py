"""Files of other processes. Their paths are not trusted: they are chosen by whoever runs the process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockd.names.objects.mappings import Mapping

MAX_LINKS = 40
"""Symbolic links in one path: the limit of the kernel."""
KERNEL_FILE_SYSTEMS = {
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
"""Names of file systems by magic number (statfs(2)). lockd opens no file there.

Reading such a file can consume data that another reader needs, or disclose what only root may know.
"""
HEADER = 512
"""Bytes of a file that are compared with memory, if the device does not say whether it is the same file."""


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Root:
    """The root directory of a process, in the mount namespace of the process."""

    identity: tuple[int, ...]
    """Numbers of its mount, device and inode; empty if they are unknown, as for a process that has ended."""
    is_shared: bool
    """Whether what is read in `directories` may be used for all processes: only root can have chosen them."""
    directories: tuple[Path, ...]
    """Where files that belong to the process's programs are looked for, such as debug files."""


HOST = Path("/")
"""lockd's own root directory."""
UNKNOWN_ROOT = Root((), True, (HOST,))
"""The root directory of a process of which nothing can be read."""


@contextlib.contextmanager
def opened_root(process: Path) -> Iterator[Root]:
    """The root directory of a process, for as long as the `with` block lasts.

    `process` is the directory of the process in procfs. By a user namespace, any user can give a process of
    theirs another root directory, or other mounts below the same one. Therefore, if the process has the root
    directory of lockd or of process 1 of the host, `directories` is this root directory with the mounts of
    lockd or of process 1. Only another root directory is used with the mounts of the process itself.
    """
    try:
        directory = os.open(process / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield UNKNOWN_ROOT
        return
    try:
        about = os.fstat(directory)
        identity = _mount(directory), about.st_dev, about.st_ino
        trusted = next((one for one in (HOST, process.parent / "1/root") if _is_at(about, one)), None)
        own = trusted or Path(f"/proc/self/fd/{directory}")
        yield Root(identity, trusted is not None, tuple(dict.fromkeys((own, HOST))))
    finally:
        os.close(directory)


def _mount(file: int) -> int:
    """The number of the mount in which a file was opened; 0 if the kernel does not say.

    Every mount namespace has mounts of its own.
    """
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{file}", "rb") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith(b"mnt_id:")), 0)
    return 0


def _is_at(about: os.stat_result, place: Path) -> bool:
    """Whether a file is the one at `place`."""
    with contextlib.suppress(OSError):
        return os.path.samestat(about, os.stat(place))
    return False


def open_regular(root: Path | str, path: bytes) -> int:
    """A descriptor to read the regular file at `path` in the root directory `root`.

    No symbolic link leads out of `root`. Raises OSError if there is no such file, or if it is not a regular
    file. Pipes, devices and files of procfs are never opened, because opening them has effects. The owner is
    not checked: a caller that uses the file's content for other processes must check who can have written it.
    A build id does not show that, because anybody can read it and write it into another file.
    """
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _reopen(_resolve(directory, path))
    finally:
        os.close(directory)


def open_own(process: Path, paths: Iterable[bytes]) -> dict[bytes, int]:
    """Descriptors by path, to read those of `paths` that are a process's own files, in its root directory.

    `process` is the directory of the process in procfs. Raises OSError if there is no such process.

    lockd tells the content of these files to everybody who asks for names. Therefore the process must be
    allowed to read them anyway, and nobody else may have placed them there. A file counts as the process's
    own if it belongs to the only user that the process runs as (a file of root only for processes of root),
    if it has no other hard link, and if no symbolic link leads to it.
    """
    opened: dict[bytes, int] = {}
    # An open directory stays that of this process, even if another process gets its id.
    directory = os.open(process, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        users = _users(directory)
        root = os.open("root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        try:
            for path in paths:
                with contextlib.suppress(OSError):
                    opened[path] = _reopen(_resolve(root, path, follows_links=False), users)
        finally:
            os.close(root)
    finally:
        os.close(directory)
    return opened


def _users(directory: int) -> set[int]:
    """The real, effective, saved and file system user of the process with this directory in procfs."""
    file = os.open("status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    with open(file, "rb") as status:
        return {int(user) for line in status if line.startswith(b"Uid:") for user in line.split()[1:]}


def _open_link(link: str) -> int:
    """A descriptor to read a regular file by a link of procfs. A deleted file can be opened so, too.

    Raises OSError if the file cannot be opened or is not a regular file.
    """
    return _reopen(os.open(link, os.O_PATH | os.O_CLOEXEC))


def _resolve(root: int, path: bytes, follows_links: bool = True) -> int:
    """An O_PATH descriptor of the file at `path` in the root directory `root`; OSError if there is none.

    The path is followed step by step. `..` returns to the directory that was opened before, because the real
    parent can be anywhere once a directory has been moved. openat2() would do all this in one call, but it
    takes its flags from memory, where a seccomp filter cannot check that the file is only read
    (process/confinement.py).
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


def _reopen(place: int, users: set[int] | None = None) -> int:
    """Close an O_PATH descriptor, and return a descriptor to read the file.

    Raises OSError if it is no regular file, or if it is in a file system of the kernel. Where `users` is
    given, also raises OSError if `users` has another user than the owner of the file, or if the file has more
    than one hard link.
    """
    try:
        about = os.fstat(place)
        if users is not None and (users != {about.st_uid} or about.st_nlink > 1):
            raise OSError(errno.EPERM, "a file that others own", os.readlink(f"/proc/self/fd/{place}"))
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "no regular file", os.readlink(f"/proc/self/fd/{place}"))
        if kernel := KERNEL_FILE_SYSTEMS.get(_file_system(place)):
            raise OSError(errno.EINVAL, f"a file of {kernel}", os.readlink(f"/proc/self/fd/{place}"))
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(place)


def _file_system(file: int) -> int:
    """The magic number of the file system that a file is in: the first member of struct statfs."""
    statfs = ctypes.create_string_buffer(256)
    if _libc().fstatfs(file, statfs):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(ctypes.c_ulong.from_buffer(statfs).value)


def open_mapped(process: Path, mapping: Mapping, memory: int) -> int:
    """A descriptor to read the file behind a mapping. Raises OSError if the file cannot be opened.

    `process` is the directory of the process in procfs. `memory` is a descriptor of the process's memory,
    or -1. The kernel gives access to the mapped file itself, in /proc/PID/map_files, only with enough
    privileges. Otherwise the file's path, in the root directories of the process and of lockd, and
    /proc/PID/exe are tried.

    The owner of the file does not matter: the process was allowed to read or to execute the file, or it could
    not have mapped it. The file is recognised by its inode, together with its device or with the first bytes
    of the mapping. lockd discloses nothing of its content but the symbols of an ELF file.
    """
    attempts: tuple[Callable[[], int], ...] = (
        lambda: _open_link(f"{process}/map_files/{mapping.start:x}-{mapping.end:x}"),
        lambda: open_regular(f"{process}/root", mapping.path),
        lambda: _open_link(f"{process}/exe"),
        lambda: open_regular("/", mapping.path),  # the process may have ended
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
    """Whether a file is the mapped one: by device and inode, or by inode and first bytes.

    On btrfs and overlayfs stat() returns another device than /proc/PID/maps shows.
    """
    about = os.fstat(file)
    if about.st_ino != mapping.inode:
        return False
    if about.st_dev == mapping.device:
        return True
    try:
        mapped = os.pread(memory, HEADER, mapping.start) if memory >= 0 else b""
        return len(mapped) == HEADER and mapped == os.pread(file, HEADER, mapping.offset)
    except OSError:
        return False
