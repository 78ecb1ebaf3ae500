"""Files of other processes, opened without trust in what their paths may be."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from lockd.names.mappings import Mapping

SYS_OPENAT2 = 437
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 2, 16
HEADER = 512
"""Bytes of a file that are compared with memory if its device does not tell whether it is the same."""


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def open_regular(root: Path | str, path: bytes) -> int:
    """A descriptor to read a regular file under `root`, which no link leads out of. OSError if there is none.

    Nothing else is opened: what to open has effects, like a pipe or a device, is only looked at.
    """
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        place = _look(directory, path)
    finally:
        os.close(directory)
    return _opened(place)


def open_link(link: str) -> int:
    """The same by one of procfs's links, which lead to a file wherever it is, even a deleted one."""
    return _opened(os.open(link, os.O_PATH | os.O_CLOEXEC))


def _look(directory: int, path: bytes) -> int:
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    place: int = _libc().syscall(SYS_OPENAT2, directory, path, how, len(how))
    if place >= 0:
        return place
    code = ctypes.get_errno()
    if code != errno.ENOSYS:
        raise OSError(code, os.strerror(code), os.fsdecode(path))
    # Before 5.6. A link in the path is followed from this process's root: rather none at all.
    return os.open(
        b"/".join((b".", path.lstrip(b"/"))), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory
    )


def _opened(place: int) -> int:
    """Takes an O_PATH descriptor and gives one to read."""
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise OSError(errno.EINVAL, "no regular file", os.readlink(f"/proc/self/fd/{place}"))
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(place)


def open_mapped(process: Path, mapping: Mapping, memory: int) -> int:
    """The file behind a mapping of the process with this directory in procfs. OSError if there is none.

    Kernels show the file itself to those who may see it; else its path is tried, if the same file is
    still there, and the program's link. `memory` is a descriptor of the process's, or -1.
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
