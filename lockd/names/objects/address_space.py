"""The address space of one process: its mappings, its object files, and the code in its memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lockd.names.objects.elfutils import ElfError, UnwindRule
from lockd.names.objects.mappings import VDSO, Image, Mapping, Mappings
from lockd.names.objects.memory_image import memory_image
from lockd.names.objects.object_cache import Key, ObjectCache
from lockd.names.objects.object_file import COMPARED_BYTES, ObjectFile
from lockd.names.objects.process_files import opened_root

REREAD_SECONDS = 0.1
"""Age of the memory map, in seconds, from which it is read again if an address is in none of its mappings."""
STALE_SECONDS = 5.0
"""Age of the memory map, in seconds, up to which the stacks of sampled waits are unwound by it."""
READING_SHARE = 20
"""After the memory map was read, it is not read again for this many times the duration of the reading."""
ADDRESSES = 1 << 64
"""The size of the address space, in bytes. A damaged file may claim that it reaches to a larger address."""
MAX_VDSO = 1 << 20
"""The most bytes of the vDSO that are read."""
MAX_MAPS = 64 << 20
"""The most bytes of /proc/PID/maps that are read."""
MAX_RESTORED = 256
"""For each process, the most files that are remembered as restored from its memory."""


class AddressSpace:
    """The address space of a process. After the process has ended, it stays as it was last read."""

    def __init__(self, process: Path, objects: ObjectCache) -> None:
        """`process` is the directory of the process in procfs. No mapping is known before a refresh()."""
        self._process = process
        self._objects = objects
        self._text = b""
        self._mappings: Mappings | None = None
        self._program = (0, 0)
        self._files: dict[int, tuple[Mapping, Key, int] | None] = {}
        """By the base address of an image: its first mapping, and the key and the bias of its file. None if
        the file cannot be read."""
        self._restored: dict[tuple[int, ...], Key] = {}
        """Keys of files that were restored from memory, by the base address of the image, the device, the
        inode, and the hash of the first COMPARED_BYTES."""
        self._memory = -1
        self._read_at = self._pause = 0.0
        with opened_root(process) as root:
            self._root = root.identity
            """The identity of the root directory when it was last seen, see process_files.Root."""

    @property
    def memory(self) -> int:
        """Estimated bytes of memory that this object takes, without object files."""
        return len(self._text) + (300 * len(self._mappings) if self._mappings else 0)

    def refresh(self, max_age: float = 0.0) -> bool:
        """Read the memory map again, and return whether it changed.

        A map that was read within `max_age` seconds is kept, unless the process runs another program by now.
        The map is also kept if the process has ended. A map with many mappings takes milliseconds to read,
        and is read less often, see READING_SHARE.
        """
        now = time.monotonic()
        program = self._program
        with contextlib.suppress(OSError):  # the process has ended, or is a kernel thread
            about = os.stat(f"{self._process}/exe")
            program = about.st_dev, about.st_ino
        if self._text and program == self._program and now < self._read_at + max(max_age, self._pause):
            return False
        with contextlib.suppress(OSError), open(f"{self._process}/maps", "rb") as file:
            text = file.read(MAX_MAPS)
            self._pause = READING_SHARE * (time.monotonic() - now)
            self._read_at, self._program = now, program
            if text and text != self._text:  # the file is empty while a process ends
                self._text, self._mappings = text, None
                return True
        return False

    @property
    def _maps(self) -> Mappings:
        if self._mappings is None:
            self._mappings = Mappings(self._text)
            # A map changes with each growth of the heap. Files that are still mapped are not opened again.
            self._files = {
                base: placed
                for base, placed in self._files.items()
                if placed and placed[0] == self._mappings.find(base)
            }
        return self._mappings

    def mapping(self, address: int) -> Mapping | None:
        """The mapping that an address is in; None if there is none, even after a refresh()."""
        mapping = self._maps.find(address)
        if mapping is None:
            self.refresh(REREAD_SECONDS)
            mapping = self._maps.find(address)
        return mapping

    def image(self, address: int) -> Image | None:
        """The program or library that an address is in; None for other memory.

        Variables in anonymous memory behind the mappings of the file belong to the image.
        """
        mapping, image = self._maps.find(address), self._maps.image(address)
        placed = self.file(image) if image else None
        if placed:
            return image if 0 <= address - placed[1] < min(placed[0].end, ADDRESSES) else None
        if not image or not mapping or mapping.path == image.first.path:
            return image
        before = self._maps.find(mapping.start - 1)
        # The file of the image is unreadable or no ELF file. The anonymous memory behind its last mapping is
        # taken for its variables only if that mapping is writable and the file has code.
        if mapping.path or not before or before.path != image.first.path or before.permissions[1] != "w":
            return None
        return image if self._maps.has_code(image) else None

    def program_image(self) -> Image | None:
        """The image of the main program; None if it is not known."""
        return self._maps.image_of_inode(self._program[1])

    def file(self, image: Image) -> tuple[ObjectFile, int] | None:
        """The file of an image, and its bias (see ObjectFile.bias()); None if the file cannot be read."""
        if image.base not in self._files:
            self._files[image.base] = self._load(image)
        placed = self._files[image.base]
        if placed is None:
            return None
        _, key, bias = placed
        file = self._objects.file(key)
        if file is None:  # the cache has evicted the file
            placed = self._files[image.base] = self._load(image)
            file = self._objects.file(placed[1]) if placed else None
        return (file, bias) if file else None

    def _load(self, image: Image) -> tuple[Mapping, Key, int] | None:
        """Read the file of an image into the cache. Returns what _files has to say of the image."""
        with self.opened_memory():
            if image.first.path == VDSO:
                data = self._read(image.base, min(image.first.end - image.base, MAX_VDSO))
                key = self._objects.load_image(_key_of(data), data)
            else:
                with opened_root(self._process) as root:
                    self._root = root.identity or self._root
                    root = replace(root, identity=self._root)
                    key = self._objects.load_mapped(self._process, image.first, self._memory, root)
            if key is None and image.first.offset == 0:
                key = self._from_memory(image)
        file = self._objects.file(key) if key else None
        try:
            return (image.first, key, file.bias(image.first)) if key and file else None
        except ElfError:
            return None

    def _from_memory(self, image: Image) -> Key | None:
        """The key of a file that is restored from the memory of the process; None if it cannot be restored.

        The key depends on every byte that was read: a process may have changed its copy of a file, and the
        names in a changed copy must not be shown for another process. Processes with equal copies share one
        ObjectFile.
        """
        first = image.first
        # An inode's number is used again for other files. The first page of a file tells them apart: it
        # usually has the build id.
        start = hash(self._read(image.base, COMPARED_BYTES))
        known = self._restored.get((image.base, first.device, first.inode, start))
        if known and self._objects.file(known):
            return known
        try:
            data = memory_image(self._read, image.base)
        except ElfError:
            return None
        key = self._objects.load_image(_key_of(data), data)
        if key:
            if len(self._restored) >= MAX_RESTORED:
                self._restored.clear()
            self._restored[image.base, first.device, first.inode, start] = key
        return key

    def load(self) -> None:
        """Read the files of all mapped code. Some of them cannot be opened after the process has ended."""
        for image in self._maps.images_with_code():
            self.file(image)

    def locate(self, address: int) -> tuple[ObjectFile, int] | None:
        """The object file that an address is in, and the address in that file; None if there is no file."""
        image = self.image(address)
        placed = self.file(image) if image else None
        return (placed[0], address - placed[1]) if placed else None

    def rule(self, address: int) -> UnwindRule | None:
        """The unwinding rule for an address; None if no object file has one."""
        located = self.locate(address)
        return located[0].rule(located[1]) if located else None

    def is_executable(self, address: int) -> bool:
        """Whether an address is in an executable mapping."""
        mapping = self._maps.find(address)
        return bool(mapping and mapping.is_executable)

    def is_jit_code(self, address: int) -> bool:
        """Whether an address is in an executable mapping that belongs to no object file."""
        return self.is_executable(address) and self.image(address) is None

    def is_same_mapping(self, address: int, other: int) -> bool:
        """Whether two addresses are in one mapping."""
        mapping = self._maps.find(address)
        return mapping is not None and mapping.start <= other < mapping.end

    def function_start(self, address: int) -> int:
        """The address in memory at which the function that spans an address begins; -1 if it is not known."""
        located = self.locate(address)
        start = located[0].function_start(located[1]) if located else -1
        return start + address - located[1] if located and start >= 0 else -1

    def code(self, address: int, size: int) -> bytes:
        """`size` bytes of code at an address: from the object file, or from memory where there is no file."""
        located = self.locate(address)
        return located[0].code(located[1], size) if located else self.read(address, size)

    @contextlib.contextmanager
    def opened_memory(self) -> Iterator[None]:
        """Keep the memory of the process open for several calls of read()."""
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

    def _read(self, address: int, size: int) -> bytes:
        """Do the work of read(), within opened_memory()."""
        with contextlib.suppress(OSError, OverflowError):
            return os.pread(self._memory, size, address) if self._memory >= 0 else b""
        return b""

    def read(self, address: int, size: int) -> bytes:
        """At most `size` bytes of memory at an address; none if the first one cannot be read."""
        with self.opened_memory():
            return self._read(address, size)

    @property
    def jit_dumps(self) -> list[bytes]:
        """Sorted paths of the jitdump files that the process has mapped."""
        return self._maps.jit_dumps


def _key_of(data: bytes) -> Key:
    """The key in the cache for an ELF file with this content that was read from memory."""
    return -1, hash(data), 0, len(data)
