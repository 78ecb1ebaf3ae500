"""The symbols of one table of an ELF file: which function or variable an address is in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.names.libdw import Elf, Section

SHT_SYMTAB = 2
SHF_EXECINSTR = 4
SHN_ABS = 0xFFF1
STT_NOTYPE, STT_OBJECT, STT_FUNC, STT_COMMON, STT_TLS, STT_GNU_IFUNC = 0, 1, 2, 5, 6, 10
STB_LOCAL = 0

MAX_SYMBOLS = 4_000_000
CHUNK = 1 << 17
"""Symbols that are read at a time."""
MAX_NAME = 4096
LOOKED_BACK = 64
"""Symbols before an address that may span it: some lie within others."""
ALIASES = 32

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Symbol:
    """`size` is 0 if the file does not tell it."""

    name: str
    address: int
    size: int


@dataclass(frozen=True)
class _Sorted:
    """Symbols of one sort by address. In `names`, offsets into the string table."""

    addresses: Numbers
    sizes: Numbers
    names: Numbers
    local: Numbers

    @property
    def memory(self) -> int:
        return int(sum(a.nbytes for a in (self.addresses, self.sizes, self.names, self.local)))


class SymbolTable:
    """Names stay in the file until they are asked for: those of a big program take hundreds of MB."""

    def __init__(self, elf: Elf, table: Section) -> None:
        self._elf = elf
        self._is_full = table.kind == SHT_SYMTAB
        linked = elf.sections[table.link - 1] if 0 < table.link <= len(elf.sections) else None
        self._strings = (linked.offset, linked.size) if linked else (0, 0)
        entries = _read(elf, table)
        kinds = entries["info"] & 15
        is_text = np.zeros(0x10000, bool)
        for number, section in enumerate(elf.sections, 1):
            is_text[number] = bool(section.flags & SHF_EXECINSTR)
        in_text = is_text[entries["section"]]
        is_function = (kinds == STT_FUNC) | (kinds == STT_GNU_IFUNC) | ((kinds == STT_NOTYPE) & in_text)
        is_variable = ((kinds == STT_OBJECT) | (kinds == STT_COMMON)) & (entries["size"] > 0)
        self._functions = _sorted(entries[is_function])
        self._variables = _sorted(entries[is_variable])
        self._thread_locals = _sorted(entries[(kinds == STT_TLS) & (entries["size"] > 0)])
        self._text = sorted((s.address, s.address + s.size) for s in elf.sections if s.flags & SHF_EXECINSTR)
        self.memory = sum(s.memory for s in (self._functions, self._variables, self._thread_locals))

    def function(self, address: int) -> Symbol | None:
        """A function without a size goes on to the next one of its section, if all are in the table."""
        found = self._within(self._functions, address)
        return found or (self._unsized(address) if self._is_full else None)

    def variable(self, address: int) -> Symbol | None:
        return self._within(self._variables, address)

    def thread_local(self, offset: int) -> Symbol | None:
        """By the offset in the object's block of thread-local memory."""
        return self._within(self._thread_locals, offset)

    def _within(self, table: _Sorted, address: int) -> Symbol | None:
        last = int(np.searchsorted(table.addresses, np.uint64(address), side="right"))
        start = max(0, last - LOOKED_BACK)
        offsets = np.uint64(address) - table.addresses[start:last]
        spanning = np.flatnonzero(offsets < table.sizes[start:last])
        return self._best(table, start + int(spanning[-1])) if spanning.size else None

    def _unsized(self, address: int) -> Symbol | None:
        table = self._functions
        at = int(np.searchsorted(table.addresses, np.uint64(address), side="right")) - 1
        if at < 0 or table.sizes[at]:
            return None
        start = int(table.addresses[at])
        is_same_section = any(low <= start and address < high for low, high in self._text)
        return self._best(table, at) if is_same_section else None

    def _best(self, table: _Sorted, at: int) -> Symbol | None:
        """Of several names for one address the same on every host: a public, plain, short one."""
        address = table.addresses[at]
        first = max(at - ALIASES, int(np.searchsorted(table.addresses, address)))
        last = min(at + ALIASES, int(np.searchsorted(table.addresses, address, side="right")))
        named = [
            (bool(table.local[i]), len(name) - len(name.lstrip("_")), len(name), name, int(table.sizes[i]))
            for i in range(first, last)
            if (name := self._name(int(table.names[i])))
        ]
        if not named:
            return None
        *_, name, size = min(named)
        return Symbol(name, int(address), size)

    def _name(self, offset: int) -> str:
        """Without its version; empty for the marks that tell code from data on arm64."""
        start, size = self._strings
        data = self._elf.read(start + offset, min(MAX_NAME, size - offset))
        text, end, _ = data.partition(b"\0")
        if not end:
            return ""
        name = text.decode("utf-8", "backslashreplace").partition("@")[0]
        return "" if name.startswith("$") else name


def _read(elf: Elf, table: Section) -> Numbers:
    """The defined symbols of a table, in pieces: only those that can be asked for are kept."""
    order = "<" if elf.is_little else ">"
    if elf.is_64:
        fields = ["name:u4", "info:u1", "other:u1", "section:u2", "address:u8", "size:u8"]
    else:
        fields = ["name:u4", "address:u4", "size:u4", "info:u1", "other:u1", "section:u2"]
    layout = np.dtype([(name, order + kind) for name, kind in (field.split(":") for field in fields)])
    kept = [np.zeros(0, layout)]
    for start in range(0, min(table.size // layout.itemsize, MAX_SYMBOLS), CHUNK):
        data = elf.read(table.offset + start * layout.itemsize, min(CHUNK * layout.itemsize, table.size))
        entries = np.frombuffer(data, layout, count=len(data) // layout.itemsize)
        kind, section = entries["info"] & 15, entries["section"]
        wanted = np.isin(kind, (STT_NOTYPE, STT_OBJECT, STT_FUNC, STT_COMMON, STT_TLS, STT_GNU_IFUNC))
        kept.append(entries[wanted & (section != 0) & (section != SHN_ABS) & (entries["name"] != 0)])
        if not len(entries):
            break
    return np.concatenate(kept)


def _sorted(entries: Numbers) -> _Sorted:
    order = np.argsort(entries["address"], kind="stable")
    return _Sorted(
        entries["address"][order].astype(np.uint64),
        np.minimum(entries["size"][order], 2**32 - 1).astype(np.uint32),
        entries["name"][order].astype(np.uint32),
        (entries["info"][order] >> 4) == STB_LOCAL,
    )
