"""Debug files: where distributions keep the symbols that they strip from programs."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from lockd.names.objects.files import open_regular
from lockd.names.objects.libdw import Elf, ElfError

DIRECTORY = b"/usr/lib/debug"
CHUNK = 1 << 20
MAX_CHECKED = 1 << 30
"""Largest file whose checksum is computed, where there is no build id to compare."""


def debug_file(elf: Elf, path: bytes, roots: tuple[Path, ...], directory: bytes = DIRECTORY) -> Elf | None:
    """The debug file of an object, which lies at `path` under the first root; none if it is not installed.

    `directory` is where they are kept, in each of the roots.
    """
    build_id = elf.build_id
    link, checksum = elf.debug_link
    for root in roots:
        for candidate in _candidates(path, build_id, link, directory):
            with contextlib.suppress(OSError, ElfError):
                found = _open(root, candidate)
                if _belongs(found, build_id, checksum if link else -1):
                    return found
                found.close()
    return None


def _candidates(path: bytes, build_id: bytes, link: bytes, kept: bytes) -> Iterator[bytes]:
    if len(build_id) > 1:
        name = build_id.hex().encode()
        yield b"%s/.build-id/%s/%s.debug" % (kept, name[:2], name[2:])
    if link and b"/" not in link:
        directory = path.rpartition(b"/")[0]
        for place in (directory, directory + b"/.debug", kept + directory):
            yield place + b"/" + link


def _open(root: Path, path: bytes) -> Elf:
    file = open_regular(root, path)
    try:
        return Elf(file)
    except BaseException:
        os.close(file)
        raise


def _belongs(found: Elf, build_id: bytes, checksum: int) -> bool:
    if build_id and found.build_id:
        return found.build_id == build_id
    if checksum < 0 or found.size > MAX_CHECKED:
        return False
    crc = 0
    for offset in range(0, found.size, CHUNK):
        crc = zlib.crc32(found.read(offset, CHUNK), crc)
    return crc == checksum
