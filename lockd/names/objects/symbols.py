"""The symbols of one table of an ELF file: which function or variable an address is in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lockd.names.objects.libdw import Elf, Section

SHT_SYMTAB = 2
SHF_EXECINSTR = 4
SHN_ABS = 0xFFF1
STT_NOTYPE, STT_OBJECT, STT_FUNC, STT_COMMON, STT_TLS, STT_GNU_IFUNC = 0, 1, 2, 5, 6, 10
STB_LOCAL = 0

MAX_SYMBOLS = 8_000_000
MAX_KEPT = 2_000_000
"""Of functions, and of variables: 17 bytes each."""
CHUNK = 1 << 17
"""Symbols that are read at a time."""
MAX_NAME = 4096
MAX_NAMES = 512 << 20
"""Bytes of all names, while they are looked through."""
LOOKED_BACK = 64
"""Symbols before an address that may span it: some lie within others."""
ALIASES = 32

Numbers: TypeAlias = "npt.NDArray[Any]"


@dataclass(frozen=True)
class Symbol:
    """`size` is 0 if the file does not tell it."""

    name: str
    address: int
    size: int


@dataclass(frozen=True)
class Named:
    """A function that was looked for by its name."""

    name: str
    address: int
    is_indirect: bool
    """Whether it only chooses the function that is meant (IFUNC)."""


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
        self._table = table
        self._is_full = table.kind == SHT_SYMTAB
        linked = elf.sections[table.link - 1] if 0 < table.link <= len(elf.sections) else None
        self._strings = (linked.offset, linked.size) if linked else (0, 0)
        is_text = np.zeros(0x10000, bool)
        for number, section in enumerate(elf.sections, 1):
            is_text[number] = bool(section.flags & SHF_EXECINSTR)
        functions, variables, thread_locals = _Collector(), _Collector(), _Collector()
        for entries in _entries(elf, table):
            kinds, has_size = entries["info"] & 15, entries["size"] > 0
            is_label = (kinds == STT_NOTYPE) & is_text[entries["section"]]
            functions.add(entries, (kinds == STT_FUNC) | (kinds == STT_GNU_IFUNC) | is_label)
            variables.add(entries, ((kinds == STT_OBJECT) | (kinds == STT_COMMON)) & has_size)
            thread_locals.add(entries, (kinds == STT_TLS) & has_size)
        self._functions, self._variables = functions.sorted(), variables.sorted()
        self._thread_locals = thread_locals.sorted()
        self._text = sorted((s.address, s.address + s.size) for s in elf.sections if s.flags & SHF_EXECINSTR)
        self.memory = sum(s.memory for s in (self._functions, self._variables, self._thread_locals))

    def function(self, address: int) -> Symbol | None:
        """A function without a size goes on to the next one of its section, if all are in the table."""
        found = self._within(self._functions, address)
        return found or (self._unsized(address) if self._is_full else None)

    def functions(self) -> Iterator[Named]:
        """All of them with their names, read from the file anew. Labels in the code are none."""
        start, size = self._strings
        texts = self._elf.read(start, min(size, MAX_NAMES))
        for entries in _entries(self._elf, self._table):
            kinds = entries["info"] & 15
            chosen = entries[(kinds == STT_FUNC) | (kinds == STT_GNU_IFUNC)]
            for at, address, info in zip(
                chosen["name"].tolist(), chosen["address"].tolist(), chosen["info"].tolist(), strict=True
            ):
                name = texts[at : at + MAX_NAME].partition(b"\0")[0].partition(b"@")[0]
                if name:
                    yield Named(name.decode("utf-8", "backslashreplace"), address, info & 15 == STT_GNU_IFUNC)

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


class _Collector:
    """Of symbols as they are read, in pieces: what is not asked for is not kept."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Numbers]] = {"address": [], "size": [], "name": [], "local": []}
        self._count = 0

    def add(self, entries: Numbers, wanted: Numbers) -> None:
        chosen = entries[wanted][: MAX_KEPT - self._count]
        self._count += len(chosen)
        self._pieces["address"].append(chosen["address"].astype(np.uint64))
        self._pieces["size"].append(np.minimum(chosen["size"], 2**32 - 1).astype(np.uint32))
        self._pieces["name"].append(chosen["name"].astype(np.uint32))
        self._pieces["local"].append((chosen["info"] >> 4) == STB_LOCAL)

    def sorted(self) -> _Sorted:
        """By address. Can be called once: the pieces are given up one by one."""
        empty = {"address": np.uint64, "size": np.uint32, "name": np.uint32, "local": np.bool_}
        joined = {key: np.concatenate([np.zeros(0, t), *self._pieces.pop(key)]) for key, t in empty.items()}
        order = np.argsort(joined["address"], kind="stable").astype(np.uint32)
        return _Sorted(*(joined.pop(key)[order] for key in empty))


def _entries(elf: Elf, table: Section) -> Iterator[Numbers]:
    """The defined symbols of a table, some at a time."""
    order = "<" if elf.is_little else ">"
    if elf.is_64:
        fields = ["name:u4", "info:u1", "other:u1", "section:u2", "address:u8", "size:u8"]
    else:
        fields = ["name:u4", "address:u4", "size:u4", "info:u1", "other:u1", "section:u2"]
    layout = np.dtype([(name, order + kind) for name, kind in (field.split(":") for field in fields)])
    size = min(table.size // layout.itemsize, MAX_SYMBOLS) * layout.itemsize
    for start in range(0, size, CHUNK * layout.itemsize):
        data = elf.read(table.offset + start, min(CHUNK * layout.itemsize, size - start))
        entries = np.frombuffer(data, layout, count=len(data) // layout.itemsize)
        if not len(entries):
            return
        section = entries["section"]
        yield entries[(section != 0) & (section != SHN_ABS) & (entries["name"] != 0)]
