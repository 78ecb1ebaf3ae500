"""The object files of all processes: each file is read once, and kept while there is room."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from pathlib import Path

from lockd.names.objects.elfutils import Elf
from lockd.names.objects.mappings import Mapping
from lockd.names.objects.object_file import DEBUG_DIRECTORY, ObjectFile, open_object
from lockd.names.objects.process_files import UNKNOWN_ROOT, Root, open_mapped

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""Bytes of memory for all files, as ObjectFile.memory estimates them. A large program takes 1 to 5 MB, and
more with each lookup. The file that was used last is kept even if it alone takes more than MAX_BYTES. While a
file is read it may take more than afterwards: up to MAX_DWARF for the members of a struct (elfutils.py).
"""
MAX_FILES = 200
"""Files in the cache. Each keeps up to two descriptors open."""
MAX_FAILED = 10_000
"""Files without usable symbols that are remembered."""
MAX_PLACES = 4000
"""Mappings whose files are remembered."""

Key = tuple[int, ...]
"""Of a file: device, inode, time of the last change in ns, size. The key changes when the file is written.

If debug files are looked for in a root directory that another user than root may have chosen, the identity of
the root directory follows (process_files.Root): debug files that are found there count only for processes
with this root directory. The key of a file that was read from the memory of a process begins with -1, and the
other numbers depend on the content.
"""


class ObjectCache:
    """Open object files by key; the least recently used files make room for new ones.

    A file that is damaged or no ELF file is remembered, and logged once, at level debug.
    """

    def __init__(self, debug_files: bytes = DEBUG_DIRECTORY) -> None:
        """`debug_files` is the directory of debug files, see open_object()."""
        self._debug_files = debug_files
        self._files: OrderedDict[Key, ObjectFile] = OrderedDict()
        self._by_inode: dict[Key, Key] = {}
        """By _place() of a mapping, the key of the file that was last opened for it. See _opened_before()."""
        self._failed: set[Key] = set()

    def file(self, key: Key) -> ObjectFile | None:
        """The file with this key; None if it was evicted."""
        if file := self._files.get(key):
            self._files.move_to_end(key)
        return file

    def load_mapped(
        self, process: Path, mapping: Mapping, memory: int, root: Root = UNKNOWN_ROOT
    ) -> Key | None:
        """The key of the file behind a mapping. The file is read if the cache does not have it.

        `process`, `mapping` and `memory` are as in open_mapped(); `root` is the process's root directory.
        Returns None if the file is damaged or no ELF file. If the file cannot be opened, the result is the
        key of the file that was opened for this mapping before; None if there is none, or if it was evicted.
        """
        try:
            file = open_mapped(process, mapping, memory)
        except OSError as error:
            log.debug("%s", error)
            return self._opened_before(mapping, memory, root)
        about = os.fstat(file)
        of_root = () if root.is_shared else root.identity
        key = (about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size, *of_root)
        is_for_all = root.is_shared and about.st_dev == mapping.device
        place = _place(mapping, () if is_for_all else root.identity)
        if key in self._files or key in self._failed:
            os.close(file)
            if self.file(key):
                self._note_place(place, key)
            return None if key in self._failed else key
        try:
            read = open_object(file, root.directories, mapping.path, self._debug_files)
        except MemoryError:  # lockd lacks memory, the file may be good
            raise
        except Exception as error:  # anybody can map a file of any content
            log.debug("%s has no symbols: %s", os.fsdecode(mapping.path), error)
            if len(self._failed) >= MAX_FAILED:
                self._failed.clear()
            self._failed.add(key)
            return None
        self._add(key, read)
        self._note_place(place, key)
        return key

    def _note_place(self, place: Key, key: Key) -> None:
        self._by_inode.pop(place, None)  # the place that was noted last comes last, and is kept longest
        self._by_inode[place] = key
        if len(self._by_inode) > MAX_PLACES:
            del self._by_inode[next(iter(self._by_inode))]

    def _opened_before(self, mapping: Mapping, memory: int, root: Root) -> Key | None:
        """The key of the file that was opened for a mapping before; None if there is none.

        A file counts for all processes if root chose the root directory (Root.is_shared) and the device of
        the file is that of the mapping. Otherwise it counts only for the processes with the same root
        directory and mounts: in mounts of their own, a user can place any file at any path, and by a FUSE
        server with any inode number. On btrfs and overlayfs, the devices of a file and of its mapping differ.
        """
        for identity in (root.identity, ()):
            before = self._by_inode.get(_place(mapping, identity))
            known = self.file(before) if before else None
            # The mapping may be of a newer file: an inode's number is used again once its file is deleted.
            if known and known.may_be_mapped(mapping, memory):
                return before
        return None

    def load_image(self, key: Key, image: bytes) -> Key | None:
        """Add an object that exists only in memory, like the vDSO, under a key that the caller chooses.

        Returns the key, or None if `image` is damaged or no ELF file.
        """
        if key not in self._files:
            try:
                self._add(key, ObjectFile(Elf(image)))
            except MemoryError:  # lockd lacks memory, the image may be good
                raise
            except Exception as error:
                log.debug("an object in memory has no symbols: %s", error)
                return None
        return key

    def _add(self, key: Key, file: ObjectFile) -> None:
        self._files[key] = file
        self.make_room()

    def make_room(self) -> None:
        """Evict files until the limits hold. Each lookup in a file can enlarge its ObjectFile.memory."""
        total = sum(other.memory for other in self._files.values())
        while len(self._files) > 1 and (len(self._files) > MAX_FILES or total > MAX_BYTES):
            _, oldest = self._files.popitem(last=False)
            total -= oldest.memory
            oldest.close()


def _place(mapping: Mapping, root: tuple[int, ...]) -> Key:
    """Device and inode of a mapping, then `root`: the identity of a root directory, () for all of them."""
    return mapping.device, mapping.inode, *root
