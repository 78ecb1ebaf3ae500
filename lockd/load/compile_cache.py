"""Keeps what was compiled in files, so that only the first start of its kind compiles.

What is in the files becomes code of the kernel: they are read only if nobody but root can have
written them. Whatever is wrong with them, the answer is to compile again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from lockd.load.compiled import Compiled

log = logging.getLogger(__name__)

FORMAT = "1"
"""To be changed with Compiled and with what compile.py makes of a source."""
FILES = 16
LARGEST = 1 << 24
"""Bytes that are read of a file; what all programs need is a hundredth of it."""
NAME = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{8})?")
"""Of a file, and of one that is being written."""
WRITABLE = stat.S_IWGRP | stat.S_IWOTH


def default_directory() -> Path | None:
    """systemd's (CacheDirectory=), or its place for root; None if there is none for this user."""
    if given := os.environ.get("CACHE_DIRECTORY"):
        return Path(given.partition(":")[0])
    return None if os.geteuid() else Path("/var/cache/lockd")


def key_of(decides: tuple[str, ...]) -> str:
    """The name for a result that these decide."""
    return hashlib.sha256(repr((FORMAT, decides)).encode()).hexdigest()


class Untrusted(OSError):
    """Others may have written into the directory; says how so."""


class Kept:
    """Results in a directory, by key. A file is a digest of its key and content, and the content as JSON."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def find(self, key: str) -> Compiled | None:
        """None if there is none that is whole and nobody else's."""
        try:
            with self._opened() as directory:
                digest, _, content = _read(key, directory).partition(b"\n")
            if digest != _digest(key, content):
                raise ValueError("its digest is not that of its content")
            return Compiled.from_json(content)
        except FileNotFoundError:
            return None
        except Untrusted as error:
            log.warning(
                "%s: not used: %s; it may hold code for the kernel only if no other user can write it: "
                "give it to root with mode 0700, or delete it; until then every start compiles",
                self.directory,
                error,
            )
            return None
        except (OSError, ValueError) as error:
            log.info("%s/%s: not used: %s", self.directory, key, _words(error))
            return None

    def keep(self, key: str, compiled: Compiled) -> None:
        """Add one, and delete the oldest of too many. It is no error if that cannot be done."""
        content = compiled.to_json()
        try:
            if self.directory:
                with contextlib.suppress(FileExistsError):
                    self.directory.mkdir(0o700)
            with self._opened() as directory:
                _write(key, _digest(key, content) + b"\n" + content, directory)
                _delete_old(directory)
        except OSError as error:
            log.info("%s: what was compiled is not kept: %s", self.directory, _words(error))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The directory's descriptor. Raises OSError if it cannot be opened, Untrusted."""
        if self.directory is None:
            raise FileNotFoundError("no directory: neither $CACHE_DIRECTORY is set nor is this root")
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if reason := _not_trusted(os.fstat(fd)):
                raise Untrusted(reason)
            yield fd
        finally:
            os.close(fd)


def _not_trusted(status: os.stat_result) -> str:
    """Why others may have written it, in words; empty if they cannot."""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & WRITABLE:
        return f"others may write it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _read(name: str, directory: int) -> bytes:
    # Neither through a link nor waiting for whoever writes into a pipe.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("no regular file")
        if reason := _not_trusted(status):
            raise ValueError(reason)
        return file.read(LARGEST)


def _write(name: str, content: bytes, directory: int) -> None:
    """Whole or not at all, whoever else writes it."""
    new = f"{name}.{os.urandom(4).hex()}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    try:
        with open(fd, "wb") as file:
            file.write(content)
        os.replace(new, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        os.unlink(new, dir_fd=directory)
        raise


def _delete_old(directory: int) -> None:
    ages = []
    for name in filter(NAME.fullmatch, os.listdir(directory)):
        with contextlib.suppress(FileNotFoundError):  # another lockd does the same
            ages.append((os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns, name))
    for _, name in sorted(ages)[:-FILES]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).hexdigest().encode()


def _words(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
