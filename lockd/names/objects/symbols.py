"""Symbol tables of object files: ELF's own, and the table of functions in Go programs."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lockd.names.objects.elfutils import SHT_DYNSYM, SHT_SYMTAB, Elf, Section

SHF_ALLOC, SHF_EXECINSTR = 2, 4
SHN_ABS = 0xFFF1
STT_NOTYPE, STT_OBJECT, STT_FUNC, STT_COMMON, STT_TLS, STT_GNU_IFUNC = 0, 1, 2, 5, 6, 10
STB_LOCAL = 0

MAX_SYMBOLS = 8_000_000
"""The most symbols of one table that are read."""
MAX_KEPT = 2_000_000
"""The most functions, and the most variables, that are kept of one table: 17 bytes each."""
CHUNK = 1 << 17
"""Symbols that are read at a time."""
MAX_NAME = 4096
"""Bytes of one name that are read."""
MAX_NAMES = 512 << 20
"""The most bytes of the string table that are in memory while all functions are listed."""
LOOKED_BACK = 64
"""The most symbols at or before an address among which one that spans the address is looked for. The nearest
one may end before the address, as symbols can lie within others."""
ALIASES = 32
"""The most symbols of the same address, on each side of the one that was found, among which the best name is
chosen."""
MAX_SEARCHED = 32 << 20
"""Largest string table or symbol table that is searched for a variable's name, in bytes.

Tables for dynamic linking are smaller in any program.
"""
MAX_SUFFIXES = 64
"""The most places in the string table that are tried for a name. A name can share its bytes with longer names
that end in it."""

GO_SECTIONS = (".gopclntab", ".data.rel.ro.gopclntab")
GO_MAGICS = (0xFFFFFFF0, 0xFFFFFFF1)
"""The magic numbers of the tables that Go 1.18 and Go 1.20 introduced. Later releases use the second one."""
GO_HEADER = struct.Struct("<IHBBQQQQQQQQ")
GO_MODULE, GO_TEXT_AT = ".go.module", 176
"""The section that has the runtime's struct moduledata since Go 1.26, and the offset of its member `text`."""
SECTIONS_OF_C = (".init", ".init_array")
"""Sections with the code of C that runs before main(): only programs that the C linker made have them."""
MAX_GO_FUNCTIONS = 2_000_000

_MAPPING_SYMBOL = re.compile(r"\$[adtx](?:\.|\Z)")
"""Marks of code and data in files for ARM. Names of Swift begin with `$s`."""

Numbers: TypeAlias = "npt.NDArray[Any]"


@dataclass(frozen=True)
class Symbol:
    """A named function or variable. The address is the file's own."""

    name: str
    address: int
    size: int
    """In bytes; 0 if the table does not say."""


@dataclass(frozen=True)
class NamedFunction:
    """A function in the list of all functions of a table. The address is the file's own."""

    name: str
    address: int
    is_indirect: bool
    """Whether the code at the address only chooses the function that is to be called (IFUNC)."""


@dataclass(frozen=True)
class _Sorted:
    """Functions, variables or thread-local variables, sorted by address. All four arrays have the same order.

    `names` are offsets in the string table. `local` says whether a symbol is local (STB_LOCAL).
    """

    addresses: Numbers
    sizes: Numbers
    names: Numbers
    local: Numbers

    @property
    def memory(self) -> int:
        return int(sum(a.nbytes for a in (self.addresses, self.sizes, self.names, self.local)))


class SymbolTable:
    """One symbol table of an ELF file.

    Names are read from the file when they are needed: those of a big program take hundreds of MB.
    """

    def __init__(self, elf: Elf, table: Section) -> None:
        """`table` is a section of kind SHT_SYMTAB or SHT_DYNSYM. `elf` must stay open."""
        self._elf = elf
        self._table = table
        self._is_full = table.kind == SHT_SYMTAB
        linked = elf.sections[table.link - 1] if 0 < table.link <= len(elf.sections) else None
        self._strings = (linked.offset, linked.size) if linked else (0, 0)
        is_text, is_absent = np.zeros(0x10000, bool), np.zeros(0x10000, bool)
        for number, section in enumerate(elf.sections, 1):
            is_text[number] = bool(section.flags & SHF_EXECINSTR)
            is_absent[number] = not section.flags & SHF_ALLOC  # not loaded, such as .gnu.warning.gets
        functions, variables, thread_locals = _Collector(), _Collector(), _Collector()
        for entries in _entries(elf, table):
            kinds, has_size = entries["info"] & 15, entries["size"] > 0
            is_label = (kinds == STT_NOTYPE) & is_text[entries["section"]]
            functions.add(entries, (kinds == STT_FUNC) | (kinds == STT_GNU_IFUNC) | is_label)
            is_variable = ((kinds == STT_OBJECT) | (kinds == STT_COMMON)) & has_size
            variables.add(entries, is_variable & ~is_absent[entries["section"]])
            thread_locals.add(entries, (kinds == STT_TLS) & has_size)
        self._functions, self._variables = functions.sorted(), variables.sorted()
        self._thread_locals = thread_locals.sorted()
        self._text = sorted((s.address, s.address + s.size) for s in elf.sections if s.flags & SHF_EXECINSTR)
        self.memory = sum(s.memory for s in (self._functions, self._variables, self._thread_locals))
        """Bytes that the table takes in memory."""

    def function(self, address: int) -> Symbol | None:
        """The function that spans an address; None if there is none.

        A function without a size reaches to the next function of its section. This holds only in full
        tables: in a table for dynamic linking most functions are missing.
        """
        found = self._within(self._functions, address)
        return found or (self._unsized(address) if self._is_full else None)

    def functions(self) -> Iterator[NamedFunction]:
        """All functions of the table, read from the file at each call. Labels in the code are left out."""
        start, size = self._strings
        texts = self._elf.read(start, min(size, MAX_NAMES))
        for entries in _entries(self._elf, self._table):
            kinds = entries["info"] & 15
            chosen = entries[(kinds == STT_FUNC) | (kinds == STT_GNU_IFUNC)]
            for offset, address, info in zip(
                chosen["name"].tolist(), chosen["address"].tolist(), chosen["info"].tolist(), strict=True
            ):
                name = texts[offset : offset + MAX_NAME].partition(b"\0")[0].partition(b"@")[0]
                if name:
                    is_indirect = info & 15 == STT_GNU_IFUNC
                    yield NamedFunction(name.decode("utf-8", "backslashreplace"), address, is_indirect)

    def variable(self, address: int) -> Symbol | None:
        """The variable that spans an address; None if there is none."""
        return self._within(self._variables, address)

    def thread_local(self, offset: int) -> Symbol | None:
        """The variable that spans an offset in the object's thread-local memory; None if there is none."""
        return self._within(self._thread_locals, offset)

    def _within(self, table: _Sorted, address: int) -> Symbol | None:
        last = int(np.searchsorted(table.addresses, np.uint64(address), side="right"))
        start = max(0, last - LOOKED_BACK)
        offsets = np.uint64(address) - table.addresses[start:last]
        spanning = np.flatnonzero(offsets < table.sizes[start:last])
        return self._best(table, start + int(spanning[-1])) if spanning.size else None

    def _unsized(self, address: int) -> Symbol | None:
        table = self._functions
        index = int(np.searchsorted(table.addresses, np.uint64(address), side="right")) - 1
        if index < 0 or table.sizes[index]:
            return None
        start = int(table.addresses[index])
        is_same_section = any(low <= start and address < high for low, high in self._text)
        return self._best(table, index) if is_same_section else None

    def _best(self, table: _Sorted, index: int) -> Symbol | None:
        """The symbol with the best name among those that have the address of table[index].

        A public name is better than a local one. Next, fewer underscores in front are better, then a shorter
        name, then the first one in the alphabet. So the choice is the same on every host.
        """
        address = table.addresses[index]
        first = max(index - ALIASES, int(np.searchsorted(table.addresses, address)))
        last = min(index + ALIASES, int(np.searchsorted(table.addresses, address, side="right")))
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
        """A name without its version; empty for the symbols that mark code and data on arm64."""
        start, size = self._strings
        data = self._elf.read(start + offset, min(MAX_NAME, size - offset))
        text, end, _ = data.partition(b"\0")
        if not end:
            return ""
        name = text.decode("utf-8", "backslashreplace").partition("@")[0]
        return "" if _MAPPING_SYMBOL.match(name) else name


class _Collector:
    """Collects the functions, the variables or the thread-local variables of a table, piece by piece."""

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
        """All collected symbols. Can be called only once, as it frees the pieces one by one."""
        empty = {"address": np.uint64, "size": np.uint32, "name": np.uint32, "local": np.bool_}
        joined = {key: np.concatenate([np.zeros(0, t), *self._pieces.pop(key)]) for key, t in empty.items()}
        order = np.argsort(joined["address"], kind="stable").astype(np.uint32)
        return _Sorted(*(joined.pop(key)[order] for key in empty))


def _entries(elf: Elf, table: Section) -> Iterator[Numbers]:
    """The defined symbols of a table as structured arrays, CHUNK of them at a time."""
    layout = _layout(elf)
    size = min(table.size // layout.itemsize, MAX_SYMBOLS) * layout.itemsize
    for start in range(0, size, CHUNK * layout.itemsize):
        data = elf.read(table.offset + start, min(CHUNK * layout.itemsize, size - start))
        entries = np.frombuffer(data, layout, count=len(data) // layout.itemsize)
        if not len(entries):
            return
        section = entries["section"]
        yield entries[(section != 0) & (section != SHN_ABS) & (entries["name"] != 0)]


def _layout(elf: Elf) -> np.dtype[Any]:
    """The struct of one symbol: Elf32_Sym or Elf64_Sym."""
    order = "<" if elf.is_little else ">"
    if elf.is_64:
        fields = ["name:u4", "info:u1", "other:u1", "section:u2", "address:u8", "size:u8"]
    else:
        fields = ["name:u4", "address:u4", "size:u4", "info:u1", "other:u1", "section:u2"]
    return np.dtype([(name, order + kind) for name, kind in (field.split(":") for field in fields)])


def variable_address(elf: Elf, name: str) -> int | None:
    """The address in the file of the variable (or function) with this exact name.

    Returns None if no symbol table that is searched (see MAX_SEARCHED) has the name, or if the file is not a
    64-bit, little-endian one.
    """
    if not elf.is_64 or not elf.is_little:
        return None
    for kind in (SHT_DYNSYM, SHT_SYMTAB):
        table = elf.section_of(kind)
        if table and (address := _find(elf, table, name.encode() + b"\0")):
            return address
    return None


def _find(elf: Elf, table: Section, name: bytes) -> int:
    """The address of the symbol with this zero-terminated name; 0 if it is not found.

    A table larger than MAX_SEARCHED is not searched.
    """
    strings = elf.sections[table.link - 1] if 0 < table.link <= len(elf.sections) else None
    if strings is None or max(table.size, strings.size) > MAX_SEARCHED:
        return 0
    names = elf.read(strings.offset, strings.size)
    offsets: list[int] = []
    offset = names.find(name)
    while offset >= 0 and len(offsets) < MAX_SUFFIXES:
        offsets.append(offset)
        offset = names.find(name, offset + 1)
    data = elf.read(table.offset, table.size) if offsets else b""
    layout = _layout(elf)
    symbols = np.frombuffer(data, layout, count=len(data) // layout.itemsize)
    found = symbols[np.isin(symbols["name"], offsets) & (symbols["section"] != 0)]
    return int(found["address"][0]) if len(found) else 0


def _go_text(elf: Elf, text: Section) -> int:
    """The address at which the code of Go begins; 0 if nothing tells it.

    This is for programs whose .gopclntab does not say so: those since Go 1.26, and files that can be loaded
    at any address. If the C linker made the program, its section `text` begins with C code.
    """
    module = next((s for s in elf.sections if s.name == GO_MODULE), None)
    data = elf.read(module.offset + GO_TEXT_AT, 8) if module else b""
    start = int.from_bytes(data, "little") or variable_address(elf, "runtime.text") or 0
    if text.address <= start < text.address + text.size:
        return start
    is_linked_by_c = any(section.name in SECTIONS_OF_C for section in elf.sections)
    return 0 if is_linked_by_c else text.address


class GoFunctions:
    """The functions of a Go program, from .gopclntab: the Go runtime needs this table, and strip keeps it.

    No function is known if the file is no 64-bit little-endian Go program, or was built by a Go before 1.18.
    Nor is any if the C linker made the program and nothing tells where the code of Go begins.
    """

    def __init__(self, elf: Elf) -> None:
        self._elf = elf
        self._entries = np.zeros((0, 2), np.uint32)
        self._start = self._end = 0
        table = next((s for s in elf.sections if s.name in GO_SECTIONS), None)
        text = next((s for s in elf.sections if s.name == ".text"), None)
        header = elf.read(table.offset, GO_HEADER.size) if table else b""
        if not table or not text or len(header) < GO_HEADER.size or not elf.is_64 or not elf.is_little:
            return
        magic, _, _, word, count, _, start, names, _, _, _, functions = GO_HEADER.unpack(header)
        if magic not in GO_MAGICS or word != 8 or count > MAX_GO_FUNCTIONS:
            return
        if max(names, functions) >= table.size:
            return
        self._start = start or _go_text(elf, text)
        if not self._start:
            return
        self._names = table.offset + names
        self._functions = table.offset + functions
        data = elf.read(self._functions, 8 * count + 4)
        if len(data) < 8 * count + 4:
            return
        self._entries = np.frombuffer(data, "<u4", count=2 * count).reshape(-1, 2).copy()
        # C code may follow the code of Go.
        self._end = min(self._start + int.from_bytes(data[-4:], "little"), text.address + text.size)

    @property
    def memory(self) -> int:
        """Bytes that the table takes in memory."""
        return self._entries.nbytes

    def function(self, address: int) -> Symbol | None:
        """The function that spans an address; None if there is none."""
        offset = address - self._start
        if not 0 <= offset < 2**32 or address >= self._end or not len(self._entries):
            return None
        index = int(np.searchsorted(self._entries[:, 0], np.uint32(offset), side="right")) - 1
        if index < 0:
            return None
        start, description = (int(number) for number in self._entries[index])
        name = self._name(description)
        has_next = index + 1 < len(self._entries)
        end = int(self._entries[index + 1][0]) if has_next else self._end - self._start
        size = max(0, end - start)
        return Symbol(name, self._start + start, size) if name else None

    def functions(self) -> Iterator[NamedFunction]:
        """All functions, read from the file at each call."""
        for start, description in self._entries.tolist():
            if name := self._name(description):
                yield NamedFunction(name, self._start + start, False)

    def _name(self, description: int) -> str:
        """The name of the function whose description is at this offset; empty if it has no name."""
        data = self._elf.read(self._functions + description, 8)
        if len(data) < 8:
            return ""
        name = self._elf.read(self._names + int.from_bytes(data[4:], "little"), MAX_NAME).partition(b"\0")[0]
        return name.decode("utf-8", "backslashreplace")
