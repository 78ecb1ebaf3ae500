"""An ELF file that is restored from the memory it is mapped to.

This serves for files that were deleted, and for files that lockd must not open.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from lockd.names.objects.elfutils import (
    PF_W,
    PF_X,
    PT_DYNAMIC,
    PT_LOAD,
    SECTION_HEADER,
    SHT_DYNSYM,
    SHT_STRTAB,
    Elf,
    ElfError,
    Segment,
)

MAX_BYTES = 32 << 20
"""Largest file that is restored, in bytes."""
HEADER_BYTES = 4096
"""Bytes of memory that are read for the ELF header and the program headers."""
MAX_LOADS = 16
"""The most segments that are restored."""
MAX_DYNAMIC = 1 << 16
"""The most bytes of the dynamic section that are read."""
DT_STRTAB, DT_SYMTAB, DT_STRSZ = 5, 6, 10
SYMBOL_BYTES = 24
NAMES = b"\0.dynsym\0.dynstr\0.shstrtab\0"


def memory_image(read: Callable[[int, int], bytes], base: int) -> bytes:
    """The bytes of the file whose first byte is mapped at `base`.

    Its only sections are the symbols for dynamic linking and tables of names. Segments that are writable and
    not executable are left out, because they differ from process to process: there are zeros in place of the
    file's variables. `read` takes an address and a size, and returns bytes of memory: none where nothing is
    mapped. Raises ElfError if there is no 64-bit ELF header at `base`, or if the file would be empty or
    larger than MAX_BYTES.
    """
    header = bytearray(read(base, HEADER_BYTES))
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        raise ElfError(f"no 64-bit ELF header in memory at {base:#x}")
    _set_sections(header, 0, 0)
    segments = Elf(bytes(header)).segments
    loads = [s for s in segments if s.kind == PT_LOAD and s.file_size][:MAX_LOADS]
    size = max((s.offset + s.file_size for s in loads), default=0)
    if not 0 < size <= MAX_BYTES:
        raise ElfError(f"a file of {size} bytes in memory at {base:#x}; rule: 1 to {MAX_BYTES}")
    bias = base - (min(s.address - s.offset for s in loads) & -HEADER_BYTES)
    image = bytearray(size)
    for load in loads:
        if load.flags & (PF_W | PF_X) != PF_W:
            data = read(bias + load.address, load.file_size)
            image[load.offset : load.offset + len(data)] = data
    image[: len(header)] = header[:size]
    dynamic = next((s for s in segments if s.kind == PT_DYNAMIC), None)
    if dynamic:
        section = read(bias + dynamic.address, min(dynamic.file_size, MAX_DYNAMIC))
        _add_symbols(image, loads, _tags(section, bias))
    return bytes(image)


def _tags(dynamic: bytes, bias: int) -> dict[int, int]:
    """The dynamic section: values by tag, with addresses of the file.

    The dynamic linker may have replaced addresses of the file by addresses in memory.
    """
    pairs = struct.iter_unpack("<QQ", dynamic[: len(dynamic) // 16 * 16])
    tags: dict[int, int] = {}
    for tag, value in pairs:
        is_relocated = tag in (DT_STRTAB, DT_SYMTAB) and 0 < bias <= value
        tags[tag] = value - bias if is_relocated else value
    return tags


def _add_symbols(image: bytearray, loads: list[Segment], tags: dict[int, int]) -> None:
    """Append section headers for the symbols, so that libelf finds them."""
    symbols, strings = (_offset(loads, tags.get(tag, 0)) for tag in (DT_SYMTAB, DT_STRTAB))
    # No tag has the number of symbols, but all linkers place the string table right behind the symbols.
    if not 0 < symbols < strings:
        return
    count = (strings - symbols) // SYMBOL_BYTES
    names = len(image)
    sections = (
        (0, 0, 0, 0, 0, 0),
        (1, SHT_DYNSYM, symbols, count * SYMBOL_BYTES, 2, SYMBOL_BYTES),
        (9, SHT_STRTAB, strings, min(tags.get(DT_STRSZ, 0), names - strings), 0, 0),
        (17, SHT_STRTAB, names, len(NAMES), 0, 0),
    )
    image += NAMES
    image += bytes(-len(image) % 8)
    _set_sections(image, len(image), len(sections))
    for name, kind, offset, size, link, entry in sections:
        image += SECTION_HEADER.pack(name, kind, 0, 0, offset, size, link, 0, 8, entry)


def _offset(loads: list[Segment], address: int) -> int:
    """The offset in the file of an address of the file; 0 if no segment has the address."""
    return next((address - s.address + s.offset for s in loads if 0 <= address - s.address < s.file_size), 0)


def _set_sections(header: bytearray, offset: int, count: int) -> None:
    """Set the position and the number of section headers; the last section has the names of sections."""
    struct.pack_into("<Q", header, 0x28, offset)
    struct.pack_into("<HHH", header, 0x3A, 64, count, max(count - 1, 0))
