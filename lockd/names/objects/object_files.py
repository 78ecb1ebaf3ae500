"""The object files of all processes: each is read once and kept while there is room."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from pathlib import Path

from lockd.names.objects.debug_files import DIRECTORY, debug_file
from lockd.names.objects.elf import ObjectFile, has_full_symbols
from lockd.names.objects.files import open_mapped
from lockd.names.objects.libdw import Elf
from lockd.names.objects.mappings import Mapping

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""A large program takes one to five million, more as more of its functions are asked for."""
MAX_FILES = 200
"""Each keeps up to two descriptors open."""
MAX_FAILED = 10_000

Key = tuple[int, int, int, int]
"""Device, inode, time of the last change in ns, size: another if the file is written anew."""


class ObjectFiles:
    """Whatever is wrong with a file, it has no symbols then, which is logged once at level debug."""

    def __init__(
        self, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES, debug_files: bytes = DIRECTORY
    ) -> None:
        """`debug_files` is the directory of what was stripped from the files."""
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._debug_files = debug_files
        self._files: OrderedDict[Key, ObjectFile] = OrderedDict()
        self._by_inode: dict[tuple[int, int], Key] = {}
        self._failed: set[Key] = set()

    def by_key(self, key: Key) -> ObjectFile | None:
        """None if it is no longer kept."""
        if found := self._files.get(key):
            self._files.move_to_end(key)
        return found

    def key_of(self, process: Path, mapping: Mapping, memory: int) -> Key | None:
        """Reads the file that is mapped; none if it cannot be had. See open_mapped()."""
        try:
            file = open_mapped(process, mapping, memory)
        except OSError as error:
            log.debug("%s", error)
            return self._by_inode.get((mapping.device, mapping.inode))
        about = os.fstat(file)
        key = (about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size)
        if key in self._files or key in self._failed:
            os.close(file)
            self.by_key(key)
            return None if key in self._failed else key
        try:
            read = read_object(file, process, mapping.path, self._debug_files)
        except Exception as error:  # any file can be mapped, and anything can be in it
            log.debug("%s has no symbols: %s", os.fsdecode(mapping.path), error)
            if len(self._failed) >= MAX_FAILED:
                self._failed.clear()
            self._failed.add(key)
            return None
        self._keep(key, read)
        self._by_inode[mapping.device, mapping.inode] = key
        return key

    def memory_file(self, key: Key, image: bytes) -> Key | None:
        """The same for a file that is only in memory, like the vDSO."""
        if key not in self._files:
            try:
                self._keep(key, ObjectFile(Elf(image)))
            except Exception as error:
                log.debug("an object in memory has no symbols: %s", error)
                return None
        return key

    def _keep(self, key: Key, file: ObjectFile) -> None:
        self._files[key] = file
        self.make_room()

    def make_room(self) -> None:
        """Files grow a little as they are used."""
        total = sum(other.memory for other in self._files.values())
        while len(self._files) > 1 and (len(self._files) > self._max_files or total > self._max_bytes):
            _, oldest = self._files.popitem(last=False)
            total -= oldest.memory
            oldest.close()
        if len(self._by_inode) > 4 * self._max_files:
            self._by_inode = {inode: key for inode, key in self._by_inode.items() if key in self._files}


def read_object(file: int, process: Path, path: bytes, debug_files: bytes = DIRECTORY) -> ObjectFile:
    """Takes the descriptor of the file that a process, by its directory in procfs, has at `path`.

    What was stripped from it is looked for in that process's root and in our own. ElfError if it is no
    ELF file.
    """
    try:
        elf = Elf(file)
    except BaseException:
        os.close(file)
        raise
    debug = None
    if not has_full_symbols(elf):
        with contextlib.suppress(OSError):
            debug = debug_file(elf, path, (process / "root", Path("/")), debug_files)
    return ObjectFile(elf, debug)
