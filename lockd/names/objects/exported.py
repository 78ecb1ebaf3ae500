"""Where a variable of a program or a library is, by its name."""

from __future__ import annotations

import numpy as np

from lockd.names.objects.libdw import Elf, Section

SHT_SYMTAB, SHT_DYNSYM = 2, 11
MAX_TABLE = 32 << 20
"""Bytes of names or of symbols that are looked through: those for dynamic linking are few in any program."""
ALIKE = 64
"""Places at which the name may end a longer one: such names share their bytes."""
SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)


def exported_variable(elf: Elf, name: str) -> int | None:
    """Its address in the file of a 64-bit, little-endian program; none if there is no such variable."""
    if not elf.is_64 or not elf.is_little:
        return None
    for kind in (SHT_DYNSYM, SHT_SYMTAB):
        for table in elf.sections:
            if table.kind == kind and (address := _find(elf, table, name.encode() + b"\0")):
                return address
    return None


def _find(elf: Elf, table: Section, name: bytes) -> int:
    strings = elf.sections[table.link - 1] if 0 < table.link <= len(elf.sections) else None
    if strings is None or max(table.size, strings.size) > MAX_TABLE:
        return 0
    names = elf.read(strings.offset, strings.size)
    places: list[int] = []
    at = names.find(name)
    while at >= 0 and len(places) < ALIKE:
        places.append(at)
        at = names.find(name, at + 1)
    data = elf.read(table.offset, table.size) if places else b""
    symbols = np.frombuffer(data, SYMBOL, count=len(data) // SYMBOL.itemsize)
    found = symbols[np.isin(symbols["name"], places) & (symbols["section"] != 0)]
    return int(found["value"][0]) if len(found) else 0
