"""Compiled programs as a plain value, and the cache of such values in files.

With the cache only the first start with given programs on a given host compiles. The content of its files
becomes code of the kernel. A file is therefore read only if nobody but root, or this user, can have written
it. Whatever is wrong with a file, the programs are compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lockd.kernel.manifest import Layout

log = logging.getLogger(__name__)

LOAD_IMMEDIATE, NUMBER, PSEUDO_MAP_FD, PSEUDO_MAP_VALUE = 0x18, 0, 1, 2
"""The BPF operation that loads a constant, and the kinds of constants: a number, a map, or a place in the
only element of a map.

The operation takes two instructions. In the first one, the first byte is the operation, and the high half of
the second byte is the kind. Bytes 4 to 7 of the two instructions are the halves of a number, or the map and
the offset of the place.
"""
CALL, HELPER, PSEUDO_KERNEL_FUNCTION = 0x85, 0, 2
"""The operation that calls a function, and the kinds of functions in the high half of the second byte. Bytes
4 to 7 have the number of a helper, or the BTF id of a function of the kernel."""
FORMAT = "1"
"""Version of the cached values. It has to change whenever Compiled changes, or what compile.py makes of a
source."""
FILES = 16
"""Largest number of files in the cache."""
LARGEST = 1 << 24
"""Most bytes that are read of a file. All programs together take a hundredth of this."""
NAME = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{8})?")
"""Names of the cache's files: a key, with a suffix while the file is being written."""
WRITABLE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class MapDefinition:
    """A map as BPF_MAP_CREATE takes it, and the layouts of its keys and values."""

    name: str
    type: int
    key_size: int
    value_size: int
    entries: int
    flags: int
    inner: str
    """For an array of maps, the name of the map that is the model of its elements; else empty."""
    key_type: int
    """Number of the key's type in Compiled.btf; 0 if its type is not in there."""
    value_type: int
    """Number of the value's type in Compiled.btf; 0 if its type is not in there."""
    key: Layout | str
    value: Layout | str


@dataclass(frozen=True)
class Compiled:
    """A compiled translation unit. It refers to nothing in the kernel."""

    maps: tuple[MapDefinition, ...]
    functions: dict[str, bytes]
    """Code by function name. An instruction that loads the descriptor of a map has the position of the map in
    `maps` instead."""
    btf: bytes
    """Types of the maps' keys and values in BTF; may be empty."""

    def to_json(self) -> bytes:
        raw = asdict(self)
        raw["functions"] = {name: code.hex() for name, code in self.functions.items()}
        raw["btf"] = self.btf.hex()
        return json.dumps(raw).encode()

    @staticmethod
    def from_json(text: bytes) -> Compiled:
        """Return the unit that a JSON text describes. Raises ValueError if the text describes none."""
        try:
            raw = json.loads(text)
            return Compiled(
                maps=tuple(MapDefinition(**definition) for definition in raw["maps"]),
                functions={name: bytes.fromhex(code) for name, code in raw["functions"].items()},
                btf=bytes.fromhex(raw["btf"]),
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not compiled programs: {error!r}") from None


def with_maps(code: bytes, maps: dict[int, int]) -> bytes:
    """Return `code` with its references to maps replaced: descriptors by positions, or positions by
    descriptors. `maps` has the new number of each map by the old one."""
    new = bytearray(code)
    for start in _instructions(code, LOAD_IMMEDIATE, PSEUDO_MAP_FD):
        number = int.from_bytes(code[start + 4 : start + 8], "little")
        new[start + 4 : start + 8] = maps[number].to_bytes(4, "little")
    return bytes(new)


def with_addresses(code: bytes, maps: dict[int, int]) -> bytes:
    """Return `code` with addresses in elements of maps in place of 64-bit numbers that stand for them.

    The upper half of such a number is a key of `maps`, whose values are descriptors of maps. The lower half
    is an offset within the only element of the map.
    """
    new = bytearray(code)
    for start in _instructions(code, LOAD_IMMEDIATE, NUMBER):
        upper = int.from_bytes(code[start + 12 : start + 16], "little")
        if upper in maps:
            new[start + 1] |= PSEUDO_MAP_VALUE << 4
            new[start + 12 : start + 16] = code[start + 4 : start + 8]
            new[start + 4 : start + 8] = maps[upper].to_bytes(4, "little")
    return bytes(new)


def with_kernel_functions(code: bytes, base: int) -> bytes:
    """Return `code` with calls of functions of the kernel in place of calls of helpers from number `base` on.

    A helper with the number `base` + n stands for the function with the BTF id n.
    """
    new = bytearray(code)
    for start in _instructions(code, CALL, HELPER):
        number = int.from_bytes(code[start + 4 : start + 8], "little")
        if number >= base:
            new[start + 1] |= PSEUDO_KERNEL_FUNCTION << 4
            new[start + 4 : start + 8] = (number - base).to_bytes(4, "little")
    return bytes(new)


def _instructions(code: bytes, operation: int, kind: int) -> Iterator[int]:
    """Yield the position in `code` of each instruction with this operation, for which the high half of its
    second byte is `kind`."""
    position = 0
    while position < len(code):
        if code[position] == operation and code[position + 1] >> 4 == kind:
            yield position
        position += 16 if code[position] == LOAD_IMMEDIATE else 8


def default_directory() -> Path | None:
    """Return the directory of the cache: systemd's (CacheDirectory=), or root's; None for other users."""
    if directories := os.environ.get("CACHE_DIRECTORY"):
        return Path(directories.partition(":")[0])
    return None if os.geteuid() else Path("/var/cache/lockd")


def key_of(inputs: tuple[str, ...]) -> str:
    """Return the key of the compiled programs that these inputs determine."""
    return hashlib.sha256(repr((FORMAT, inputs)).encode()).hexdigest()


class UntrustedError(OSError):
    """Users other than root and lockd's own may have written into the directory; the message says why."""


class CompileCache:
    """Compiled programs in a directory. A file is named by its key.

    A file contains a digest of the key and of the content, a line feed, and the content as JSON.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def find(self, key: str) -> Compiled | None:
        """Return the programs with this key, or None if their file is missing, damaged or not safe from other
        users."""
        try:
            with self._open() as directory:
                digest, _, content = _read(key, directory).partition(b"\n")
            if digest != _digest(key, content):
                raise ValueError("its digest is not that of its content")
            return Compiled.from_json(content)
        except FileNotFoundError:
            return None
        except UntrustedError as error:
            log.warning(
                "%s: not used: %s; it may hold code for the kernel only if no other user can write it: "
                "give it to root with mode 0700, or delete it; until then every start compiles",
                self.directory,
                error,
            )
            return None
        except (OSError, ValueError) as error:
            log.info("%s/%s: not used: %s", self.directory, key, _reason(error))
            return None

    def add(self, key: str, compiled: Compiled) -> None:
        """Write the file of these programs, and delete the oldest files above FILES.

        A failure is only logged.
        """
        content = compiled.to_json()
        try:
            if self.directory:
                with contextlib.suppress(FileExistsError):
                    self.directory.mkdir(0o700)
            with self._open() as directory:
                _write(key, _digest(key, content) + b"\n" + content, directory)
                _delete_old(directory)
        except OSError as error:
            log.info("%s: what was compiled is not kept: %s", self.directory, _reason(error))

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        """Open the directory; yield its descriptor. Raises OSError, UntrustedError."""
        if self.directory is None:
            raise FileNotFoundError("no directory: neither $CACHE_DIRECTORY is set nor is this root")
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if reason := _distrust(os.fstat(fd)):
                raise UntrustedError(reason)
            yield fd
        finally:
            os.close(fd)


def _distrust(status: os.stat_result) -> str:
    """Return why other users may have written a file or directory; empty if they cannot have."""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & WRITABLE:
        return f"others may write it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _read(name: str, directory: int) -> bytes:
    # A symbolic link is not followed, and a pipe is not waited for.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("no regular file")
        if reason := _distrust(status):
            raise ValueError(reason)
        return file.read(LARGEST)


def _write(name: str, content: bytes, directory: int) -> None:
    """Write a file atomically, also while other processes write the same file."""
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
    """Delete the oldest files of the cache until FILES are left. Files whose names do not match NAME stay."""
    ages = []
    for name in filter(NAME.fullmatch, os.listdir(directory)):
        with contextlib.suppress(FileNotFoundError):  # another lockd may delete files at the same time
            ages.append((os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns, name))
    for _, name in sorted(ages)[:-FILES]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).hexdigest().encode()


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
