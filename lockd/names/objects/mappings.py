"""The memory map of a process: which mapping an address is in, and which program or library it belongs to."""

from __future__ import annotations

import bisect
import functools
import os
import re
from dataclasses import dataclass

from lockd.printable import masked

NOT_OBJECTS = (b"/dev/zero", b"/memfd:", b"/dev/shm/", b"/SYSV", b"/anon_hugepage")
"""Beginnings of the paths of memory without a file, which is no program or library: it is shared, or of huge
pages."""
MOST_PARTS = 256
"""The most mappings before an address among which the first mapping of its image is looked for. A process can
have a million mappings side by side."""
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
    """One line of /proc/PID/maps."""

    start: int
    end: int
    permissions: str
    """Four letters, such as `r-xp`."""
    offset: int
    """The offset in the file, in bytes."""
    device: int
    """The device number in the form of os.stat()'s st_dev."""
    inode: int
    path: bytes
    """Empty for anonymous memory. The kernel's suffix ` (deleted)` is removed."""

    @property
    def is_executable(self) -> bool:
        return self.permissions[2] == "x"


@dataclass(frozen=True)
class Image:
    """A program or library in memory."""

    first: Mapping
    """The mapping with the lowest offset in the file."""

    @property
    def base(self) -> int:
        return self.first.start

    @property
    def name(self) -> str:
        """The file's name without its directory, with `?` for characters that are not printable."""
        return masked(self.first.path.rpartition(b"/")[2].decode("utf-8", "backslashreplace"))


class Mappings:
    """All mappings of a process, by the text of /proc/PID/maps."""

    def __init__(self, text: bytes) -> None:
        """Lines of `text` that do not have the format of /proc/PID/maps are left out."""
        self._lines = _LINE.findall(text)
        self._starts = [int(line[0], 16) for line in self._lines]
        self._images: dict[int, Image | None] = {}
        self._found: dict[int, Mapping] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def find(self, address: int) -> Mapping | None:
        """The mapping that an address is in; None if nothing is mapped there."""
        index = self._index(address)
        return self._mapping(index) if index >= 0 else None

    def code_files(self) -> list[Mapping]:
        """One mapping of each file that has executable mappings."""
        found: dict[tuple[bytes, bytes], int] = {}
        for index, (_, _, permissions, _, device, inode, path) in enumerate(self._lines):
            if permissions[2:3] == b"x" and path.startswith(b"/"):
                found.setdefault((device, inode), index)
        return [self._mapping(index) for index in found.values()]

    def image(self, address: int) -> Image | None:
        """The program or library that an address belongs to; None for other memory.

        The variables that are zero at the start (.bss) are in anonymous memory right behind the file's
        mappings. A heap that follows them there counts as part of the image.
        """
        index = self._index(address)
        if index < 0:
            return None
        if index not in self._images:
            first = self._first(index)
            self._images[index] = Image(self._mapping(first)) if first >= 0 else None
        return self._images[index]

    def has_code(self, image: Image) -> bool:
        """Whether the file of an image has an executable mapping."""
        return image.first.path in self._with_code

    @functools.cached_property
    def _with_code(self) -> set[bytes]:
        return {self._path(i) for i, line in enumerate(self._lines) if line[2][2:3] == b"x" and line[6]}

    def images_with_code(self) -> list[Image]:
        """All images with an executable mapping, sorted by address."""
        starts = (
            start for start, line in zip(self._starts, self._lines, strict=True) if line[2][2:3] == b"x"
        )
        images = {image.base: image for start in starts if (image := self.image(start))}
        return list(images.values())

    def image_of_inode(self, inode: int) -> Image | None:
        """The image of the file with this inode number; None if no such file is mapped."""
        wanted = str(inode).encode()
        start = next((self._starts[i] for i, line in enumerate(self._lines) if line[5] == wanted), None)
        return self.image(start) if start is not None else None

    @functools.cached_property
    def jit_dumps(self) -> list[bytes]:
        """Sorted paths of mapped jitdump files: runtimes map these files so that profilers find them."""
        names = {line[6] for line in self._lines if b"/jit-" in line[6] and line[6].endswith(b".dump")}
        return sorted(names)

    def _first(self, index: int) -> int:
        """The index of the first mapping of the image that a mapping belongs to; -1 if it belongs to none.

        Two mappings side by side may share a page of the file. But a mapping beyond anonymous memory with the
        same offset begins another copy of the file.
        """
        lowest = index - MOST_PARTS
        while self._path(index) in (b"", HEAP):
            if index <= lowest or not self._continues(index):
                return -1
            index -= 1
        path = self._path(index)
        if path != VDSO and (not path.startswith(b"/") or path.startswith(NOT_OBJECTS)):
            return -1
        first = index
        while index > max(lowest, 0):
            before = self._path(index - 1)
            lower = self._offset(first) - self._offset(index - 1)
            if before == path and (lower > 0 or (lower == 0 and index == first)):
                first = index = index - 1
            elif not before and self._continues(index - 1):
                index -= 1
            else:
                break
        return first

    def _continues(self, index: int) -> bool:
        """Whether the previous mapping ends where this mapping starts."""
        return index > 0 and int(self._lines[index - 1][1], 16) == self._starts[index]

    def _index(self, address: int) -> int:
        index = bisect.bisect_right(self._starts, address) - 1
        return index if index >= 0 and address < int(self._lines[index][1], 16) else -1

    def _offset(self, index: int) -> int:
        return int(self._lines[index][3], 16)

    def _path(self, index: int) -> bytes:
        path: bytes = self._lines[index][6]
        return path.removesuffix(DELETED) if path.startswith(b"/") else path

    def _mapping(self, index: int) -> Mapping:
        if index in self._found:
            return self._found[index]
        start, end, permissions, offset, device, inode, _ = self._lines[index]
        major, minor = (int(part, 16) for part in device.split(b":"))
        self._found[index] = Mapping(
            int(start, 16), int(end, 16), permissions.decode(), int(offset, 16),
            os.makedev(major, minor), int(inode), self._path(index),
        )  # fmt: skip
        return self._found[index]
