"""The memory map of a process: what is mapped at an address, and to which object it belongs."""

from __future__ import annotations

import bisect
import functools
import os
import re
from dataclasses import dataclass

from lockd.printable import masked

NOT_OBJECTS = (b"/dev/zero", b"/memfd:", b"/dev/shm/", b"/SYSV")
"""Memory that is shared by way of a file, rather than a program or a library."""
DELETED = b" (deleted)"
HEAP = b"[heap]"
VDSO = b"[vdso]"

_LINE = re.compile(
    rb"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) ([r-][w-][x-][ps]) ([0-9a-f]{1,16})"
    rb" ([0-9a-f]{1,8}:[0-9a-f]{1,8}) ([0-9]{1,20})(?: +([^\n]*))?$",
    re.M,
)


@dataclass(frozen=True)
class Mapping:
    """One line of /proc/PID/maps; `path` is empty for anonymous memory, and without ` (deleted)`."""

    start: int
    end: int
    permissions: str
    offset: int
    device: int
    """As os.stat() gives it."""
    inode: int
    path: bytes

    @property
    def is_executable(self) -> bool:
        return self.permissions[2] == "x"


@dataclass(frozen=True)
class Image:
    """A program or library in memory: from `first`, which maps the lowest part of its file that is mapped."""

    first: Mapping

    @property
    def base(self) -> int:
        return self.first.start

    @property
    def name(self) -> str:
        return masked(self.first.path.rpartition(b"/")[2].decode("utf-8", "backslashreplace"))


class Mappings:
    """What /proc/PID/maps said; lines that make no sense are left out."""

    def __init__(self, text: bytes) -> None:
        self._lines = _LINE.findall(text)
        self._starts = [int(line[0], 16) for line in self._lines]
        self._images: dict[int, Image | None] = {}
        self._found: dict[int, Mapping] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def find(self, address: int) -> Mapping | None:
        at = self._at(address)
        return self._mapping(at) if at >= 0 else None

    def code_files(self) -> list[Mapping]:
        """Of every file that has code mapped, one mapping of it."""
        found: dict[tuple[bytes, bytes], int] = {}
        for at, (_, _, permissions, _, device, inode, path) in enumerate(self._lines):
            if permissions[2:3] == b"x" and path.startswith(b"/"):
                found.setdefault((device, inode), at)
        return [self._mapping(at) for at in found.values()]

    def image(self, address: int) -> Image | None:
        """The object an address belongs to; none for memory that is no object's.

        Zero-initialised variables live in anonymous memory right behind the file's, which a heap may go on.
        """
        at = self._at(address)
        if at < 0:
            return None
        if at not in self._images:
            first = self._first(at)
            self._images[at] = Image(self._mapping(first)) if first >= 0 else None
        return self._images[at]

    def has_code(self, image: Image) -> bool:
        """Whether some of its file is mapped to be executed."""
        return image.first.path in self._with_code

    @functools.cached_property
    def _with_code(self) -> set[bytes]:
        return {self._path(at) for at, line in enumerate(self._lines) if line[2][2:3] == b"x" and line[6]}

    def images_with_code(self) -> list[Image]:
        """In the order of their addresses."""
        starts = (
            start for start, line in zip(self._starts, self._lines, strict=True) if line[2][2:3] == b"x"
        )
        found = {image.base: image for start in starts if (image := self.image(start))}
        return list(found.values())

    def image_of_inode(self, inode: int) -> Image | None:
        """The object that a file of this number is mapped as."""
        wanted = str(inode).encode()
        start = next((self._starts[i] for i, line in enumerate(self._lines) if line[5] == wanted), None)
        return self.image(start) if start is not None else None

    def jit_dumps(self) -> list[bytes]:
        """Paths of files that tell of compiled functions: runtimes map those to be found so."""
        names = {line[6] for line in self._lines if b"/jit-" in line[6] and line[6].endswith(b".dump")}
        return sorted(names)

    def _first(self, at: int) -> int:
        while self._path(at) in (b"", HEAP):
            if not self._continues(at):
                return -1
            at -= 1
        path = self._path(at)
        if path != VDSO and (not path.startswith(b"/") or path.startswith(NOT_OBJECTS)):
            return -1
        first = at
        while at > 0:
            before = self._path(at - 1)
            if before == path and self._offset(at - 1) <= self._offset(first):
                first = at = at - 1
            elif not before and self._continues(at - 1):
                at -= 1
            else:
                break
        return first

    def _continues(self, at: int) -> bool:
        """Whether the mapping before this one ends where this one starts."""
        return at > 0 and int(self._lines[at - 1][1], 16) == self._starts[at]

    def _at(self, address: int) -> int:
        at = bisect.bisect_right(self._starts, address) - 1
        return at if at >= 0 and address < int(self._lines[at][1], 16) else -1

    def _offset(self, at: int) -> int:
        return int(self._lines[at][3], 16)

    def _path(self, at: int) -> bytes:
        path: bytes = self._lines[at][6]
        return path.removesuffix(DELETED) if path.startswith(b"/") else path

    def _mapping(self, at: int) -> Mapping:
        if at in self._found:
            return self._found[at]
        start, end, permissions, offset, device, inode, _ = self._lines[at]
        major, minor = (int(part, 16) for part in device.split(b":"))
        self._found[at] = Mapping(
            int(start, 16), int(end, 16), permissions.decode(), int(offset, 16),
            os.makedev(major, minor), int(inode), self._path(at),
        )  # fmt: skip
        return self._found[at]
