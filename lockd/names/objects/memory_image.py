"""An object file made from the memory that it is mapped to: where the file is gone, or must not be opened."""

from __future__ import annotations

import struct
from collections.abc import Callable

from lockd.names.objects.libdw import Elf, ElfError, Segment

MAX_BYTES = 32 << 20
HEADER_BYTES = 4096
MAX_LOADS = 16
PT_LOAD, PT_DYNAMIC = 1, 2
SHT_STRTAB, SHT_DYNSYM = 3, 11
DT_STRTAB, DT_SYMTAB, DT_STRSZ = 5, 6, 10
SYMBOL_BYTES = 24
SECTION = struct.Struct("<IIQQQQIIQQ")
NAMES = b"\0.dynsym\0.dynstr\0.shstrtab\0"


def memory_image(read: Callable[[int, int], bytes], base: int) -> bytes:
    """The file whose first byte is mapped at `base`, with no sections but the symbols for dynamic linking.

    ElfError if there is no 64-bit ELF header. `read` gives bytes of memory, none where nothing is mapped.
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
        data = read(bias + load.address, load.file_size)
        image[load.offset : load.offset + len(data)] = data
    image[: len(header)] = header[:size]
    dynamic = next((s for s in segments if s.kind == PT_DYNAMIC), None)
    if dynamic:
        _add_symbols(image, loads, _tags(bytes(image), dynamic, bias))
    return bytes(image)


def _tags(image: bytes, dynamic: Segment, bias: int) -> dict[int, int]:
    """Of the dynamic linker's table; it may have turned addresses into those of memory already."""
    data = image[dynamic.offset : dynamic.offset + dynamic.file_size]
    pairs = struct.iter_unpack("<QQ", data[: len(data) // 16 * 16])
    tags: dict[int, int] = {}
    for tag, value in pairs:
        is_moved = tag in (DT_STRTAB, DT_SYMTAB) and 0 < bias <= value
        tags[tag] = value - bias if is_moved else value
    return tags


def _add_symbols(image: bytearray, loads: list[Segment], tags: dict[int, int]) -> None:
    symbols, strings = (_offset(loads, tags.get(tag, 0)) for tag in (DT_SYMTAB, DT_STRTAB))
    # Nothing tells how many symbols there are, but all linkers put their names right behind them.
    if not 0 < symbols < strings:
        return
    count = (strings - symbols) // SYMBOL_BYTES
    at = len(image)
    sections = (
        (0, 0, 0, 0, 0, 0),
        (1, SHT_DYNSYM, symbols, count * SYMBOL_BYTES, 2, SYMBOL_BYTES),
        (9, SHT_STRTAB, strings, min(tags.get(DT_STRSZ, 0), at - strings), 0, 0),
        (17, SHT_STRTAB, at, len(NAMES), 0, 0),
    )
    image += NAMES
    image += bytes(-len(image) % 8)
    _set_sections(image, len(image), len(sections))
    for name, kind, offset, size, link, entry in sections:
        image += SECTION.pack(name, kind, 0, 0, offset, size, link, 0, 8, entry)


def _offset(loads: list[Segment], address: int) -> int:
    return next((address - s.address + s.offset for s in loads if 0 <= address - s.address < s.file_size), 0)


def _set_sections(header: bytearray, offset: int, count: int) -> None:
    struct.pack_into("<Q", header, 0x28, offset)
    struct.pack_into("<HHH", header, 0x3A, 64, count, max(count - 1, 0))
