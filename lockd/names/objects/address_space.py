"""What is at the addresses of one process: its mappings, its object files, the code in its memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from lockd.names.objects.elf import ObjectFile
from lockd.names.objects.libdw import ElfError, Rule
from lockd.names.objects.mappings import VDSO, Image, Mapping, Mappings
from lockd.names.objects.memory_image import memory_image
from lockd.names.objects.object_files import Key, ObjectFiles

REREAD_SECONDS = 0.1
"""Between two looks at the memory map of a process in which an address was not found."""
STALE_SECONDS = 5.0
MAX_VDSO = 1 << 20
MAX_MAPS = 64 << 20


class AddressSpace:
    """Of a process by its directory in procfs. As it was last seen when the process is gone."""

    def __init__(self, process: Path, objects: ObjectFiles) -> None:
        self._process = process
        self._objects = objects
        self._text = b""
        self._mappings: Mappings | None = None
        self._program = (0, 0)
        self._keys: dict[int, tuple[Key, int] | None] = {}
        self._memory = -1
        self._read_at = 0.0

    @property
    def memory(self) -> int:
        """Bytes that it takes, about."""
        return len(self._text) + (300 * len(self._mappings) if self._mappings else 0)

    def look(self, age: float = 0.0) -> None:
        """Read the memory map, unless that was done `age` seconds ago at most, of the same program."""
        now = time.monotonic()
        program = self._program
        with contextlib.suppress(OSError):  # it is gone, or has no program: then it is as it was
            about = os.stat(f"{self._process}/exe")
            program = about.st_dev, about.st_ino
        if self._text and program == self._program and now < self._read_at + age:
            return
        with contextlib.suppress(OSError), open(f"{self._process}/maps", "rb") as file:
            text = file.read(MAX_MAPS)
            self._read_at, self._program = now, program
            if text and text != self._text:  # it is empty as a process ends
                self._text, self._mappings = text, None
                self._keys.clear()

    @property
    def _maps(self) -> Mappings:
        if self._mappings is None:
            self._mappings = Mappings(self._text)
        return self._mappings

    def mapping(self, address: int) -> Mapping | None:
        found = self._maps.find(address)
        if found is None:
            self.look(REREAD_SECONDS)
            found = self._maps.find(address)
        return found

    def image(self, address: int) -> Image | None:
        """The object that an address is in, also behind its file's end."""
        mapped, found = self._maps.find(address), self._maps.image(address)
        placed = self.file(found) if found else None
        if placed:
            return found if address - placed[1] < placed[0].end else None
        if not found or not mapped or mapped.path == found.first.path:
            return found
        before = self._maps.find(mapped.start - 1)
        # Of a file that cannot be read, or is no object: variables are behind others, of one with code.
        if mapped.path or not before or before.path != found.first.path or before.permissions[1] != "w":
            return None
        return found if self._maps.has_code(found) else None

    def program_image(self) -> Image | None:
        """The main program's."""
        return self._maps.image_of_inode(self._program[1])

    def file(self, image: Image) -> tuple[ObjectFile, int] | None:
        """The file of an object, and what to take from addresses to get its own; none if unreadable."""
        if image.base not in self._keys:
            self._keys[image.base] = self._load(image)
        known = self._keys[image.base]
        if known is None:
            return None
        key, bias = known
        file = self._objects.by_key(key)
        if file is None:  # it had to make room meanwhile
            known = self._keys[image.base] = self._load(image)
            file = self._objects.by_key(known[0]) if known else None
        return (file, bias) if file else None

    def _load(self, image: Image) -> tuple[Key, int] | None:
        with self._opened_memory():
            if image.first.path == VDSO:
                data = self.read(image.base, min(image.first.end - image.base, MAX_VDSO))
                key = self._objects.memory_file((-1, hash(data), 0, len(data)), data)
            else:
                key = self._objects.key_of(self._process, image.first, self._memory)
            if key is None and image.first.offset == 0:
                key = self._from_memory(image)
        file = self._objects.by_key(key) if key else None
        try:
            return (key, file.bias(image.first)) if key and file else None
        except ElfError:
            return None

    def _from_memory(self, image: Image) -> Key | None:
        first = image.first
        key = (first.device, first.inode, -1, 0)
        if first.inode and self._objects.by_key(key):
            return key
        try:
            return self._objects.memory_file(key, memory_image(self.read, image.base))
        except ElfError:
            return None

    def load(self) -> None:
        """Read the files of all code that is mapped: when the process is gone, some may not be to be had."""
        for image in self._maps.images_with_code():
            self.file(image)

    def locate(self, address: int) -> tuple[ObjectFile, int] | None:
        """The object file that an address is in, and the address in that file."""
        image = self.image(address)
        placed = self.file(image) if image else None
        return (placed[0], address - placed[1]) if placed else None

    def rule(self, address: int) -> Rule | None:
        located = self.locate(address)
        return located[0].rule(located[1]) if located else None

    def is_executable(self, address: int) -> bool:
        mapping = self._maps.find(address)
        return bool(mapping and mapping.is_executable)

    def is_compiled(self, address: int) -> bool:
        """Whether it is program text that is in no object."""
        return self.is_executable(address) and self.image(address) is None

    def is_together(self, address: int, other: int) -> bool:
        """Whether two addresses are in one mapping."""
        return (found := self._maps.find(address)) is not None and found.start <= other < found.end

    def function_start(self, address: int) -> int:
        """-1 if it is not known."""
        located = self.locate(address)
        start = located[0].function_start(located[1]) if located else -1
        return start + address - located[1] if located and start >= 0 else -1

    def code(self, address: int, size: int) -> bytes:
        """Of the object's file, or of the memory itself where there is none."""
        located = self.locate(address)
        if located:
            return located[0].code(located[1], size)
        with self._opened_memory():
            return self.read(address, size)

    @contextlib.contextmanager
    def _opened_memory(self) -> Iterator[None]:
        """For reads that belong together; a process that is gone has none."""
        if self._memory >= 0:
            yield
            return
        with contextlib.suppress(OSError):
            self._memory = os.open(f"{self._process}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield
        finally:
            if self._memory >= 0:
                os.close(self._memory)
            self._memory = -1

    def read(self, address: int, size: int) -> bytes:
        """Of the memory as it is now; nothing if it cannot be read."""
        with contextlib.suppress(OSError, OverflowError):
            return os.pread(self._memory, size, address) if self._memory >= 0 else b""
        return b""

    def read_now(self, address: int, size: int) -> bytes:
        """The same, where nothing else is read with it."""
        with self._opened_memory():
            return self.read(address, size)

    def jit_dumps(self) -> list[bytes]:
        """Files with names of compiled functions that the process has mapped to say so."""
        return self._maps.jit_dumps()
