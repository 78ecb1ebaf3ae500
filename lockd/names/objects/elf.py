"""An object file, a program or a library: names for its addresses and rules to unwind from them."""

from __future__ import annotations

import lzma
import re
import struct
from collections.abc import Iterable, Iterator

import numpy as np

from lockd.names.objects.exported import exported_variable
from lockd.names.objects.go_functions import GoFunctions
from lockd.names.objects.libdw import Elf, ElfError, Rule, Segment
from lockd.names.objects.mappings import Mapping
from lockd.names.objects.symbols import SHT_SYMTAB, Symbol, SymbolTable

PT_LOAD, PT_TLS, PT_GNU_EH_FRAME = 1, 7, 0x6474E550
PF_X = 1
SHT_DYNSYM = 11
EM_X86_64, EM_AARCH64 = 62, 183
PAGE = 4096

DEBUG_FRAME_FILE = 64 << 20
"""Largest file whose `.debug_frame` is read: all its DWARF has to be opened for that."""
MINI_DEBUG_INFO = 64 << 20
"""Of symbols that a file brings along compressed, once they are unpacked."""
FUNCTION_STARTS = 64 << 20
RULES = 4_000
RULE_BYTES = 1500
FUNCTIONS = 4_000
FUNCTION_BYTES = 400
FILE_BYTES = 100_000
"""What a file takes besides symbols, function starts and what was found: sections, segments, libelf's own."""
JUMPED_IN = 1 << 16
"""Bytes of one function that are looked through for jumps."""
_JUMP = re.compile(rb"(?=(?:\xe9|\x0f[\x80-\x8f])(....))", re.S)
REGISTERS = {EM_X86_64: 17, EM_AARCH64: 32}


class ObjectFile:
    """Addresses are the file's own: those of memory less the bias(). `debug` has what was stripped."""

    def __init__(self, elf: Elf, debug: Elf | None = None) -> None:
        self._elf = elf
        self._debug = debug
        self._mini = _mini_debug_info(elf)
        self.tables: list[SymbolTable | GoFunctions] = [*_tables([elf, debug, self._mini]), GoFunctions(elf)]
        """Of symbols, the fullest first."""
        self._starts = _function_starts(elf)
        self._rules: dict[int, Rule | None] = {}
        self._exported: dict[str, int | None] = {}
        self._functions: dict[int, Symbol | None] = {}
        self._loads = [s for s in elf.segments if s.kind == PT_LOAD]
        self.machine = elf.machine if elf.is_64 and elf.is_little else 0
        self.end = max((s.address + s.memory_size for s in self._loads), default=0)

    @property
    def has_full_symbols(self) -> bool:
        """Whether functions that are not exported have names as well."""
        return any(file and has_full_symbols(file) for file in (self._elf, self._debug, self._mini))

    @property
    def memory(self) -> int:
        """Bytes that it takes, about."""
        found = len(self._rules) * RULE_BYTES + len(self._functions) * FUNCTION_BYTES
        held = self._elf.memory + (self._mini.memory if self._mini else 0)
        return FILE_BYTES + sum(t.memory for t in self.tables) + self._starts.nbytes + found + held

    def bias(self, mapping: Mapping) -> int:
        """What is to be taken from an address in memory to get the file's own, by one mapping of the file.

        ElfError if the file has no segment that would be mapped so.
        """
        candidates = [s for s in self._loads if _page(s.offset) <= mapping.offset < s.offset + s.file_size]
        # Two segments may share a page of the file, which then is mapped twice.
        candidates.sort(key=lambda s: bool(s.flags & PF_X) != mapping.is_executable)
        if not candidates:
            raise ElfError(f"no segment of it is mapped from {mapping.offset:#x}")
        return mapping.start - (mapping.offset + candidates[0].address - candidates[0].offset)

    def function(self, address: int) -> Symbol | None:
        if address not in self._functions:
            if len(self._functions) >= FUNCTIONS:
                self._functions.clear()
            self._functions[address] = self._named(address) or self._split_off(address)
        return self._functions[address]

    def _named(self, address: int) -> Symbol | None:
        return next((found for t in self.tables if (found := t.function(address))), None)

    def _split_off(self, address: int) -> Symbol | None:
        """A part of a named function that the compiler put elsewhere, as it seldom runs.

        It has a name only in full symbol tables. Each of the two jumps into the other, and the part into the
        middle, which only parts of one function do.
        """
        if self.machine != EM_X86_64 or self.rule(address) is None:
            return None
        at = int(np.searchsorted(self._starts, np.uint64(address), side="right"))
        if not 0 < at < len(self._starts):
            return None
        part = range(int(self._starts[at - 1]), int(self._starts[at]))
        targets = (target for target in self.jumps(part) if target not in part)
        named = {symbol for target in targets if (symbol := self._named(target)) and symbol.address != target}
        if len(named) != 1:
            return None
        (whole,) = named
        is_its = any(
            target in part for target in self.jumps(range(whole.address, whole.address + whole.size))
        )
        return Symbol(whole.name, part.start, len(part)) if is_its else None

    def jumps(self, code: range) -> Iterator[int]:
        """Where the jumps in some code of x86-64 go to, within the file, if told by a distance of 32 bits."""
        for jump in _JUMP.finditer(self.code(code.start, min(len(code), JUMPED_IN))):
            target = code.start + jump.end(1) + int.from_bytes(jump[1], "little", signed=True)
            if 0 <= target < self.end:
                yield target

    def variable(self, address: int) -> Symbol | None:
        return next((found for t in self.tables if (found := t.variable(address))), None)

    def exported(self, name: str) -> int | None:
        """Where the variable of this name is; none if there is no such."""
        if name not in self._exported:
            self._exported[name] = exported_variable(self._elf, name)
        return self._exported[name]

    def member_offset(self, unit: str, structure: str, member: str) -> int | None:
        """Where in a struct its member is, by the debugging information; none if that does not tell."""
        asked = f"{unit} {structure} {member}"
        if asked not in self._exported:
            told = (file.member_offset(unit, structure, member) for file in (self._elf, self._debug) if file)
            self._exported[asked] = next((offset for offset in told if offset is not None), None)
        return self._exported[asked]

    def thread_local(self, offset: int) -> Symbol | None:
        return next((found for t in self.tables if (found := t.thread_local(offset))), None)

    @property
    def thread_local_block(self) -> Segment | None:
        return next((s for s in self._elf.segments if s.kind == PT_TLS), None)

    def function_start(self, address: int) -> int:
        """Where the function begins that `address` is in; -1 if neither symbols nor unwinding tables tell."""
        if symbol := self.function(address):
            return symbol.address
        if self.rule(address) is None:  # then it is in a gap of the tables
            return -1
        at = int(np.searchsorted(self._starts, np.uint64(address), side="right")) - 1
        return int(self._starts[at]) if at >= 0 else -1

    def rule(self, address: int) -> Rule | None:
        """How to unwind from there; none if the file does not say."""
        if address not in self._rules:
            if len(self._rules) >= RULES:
                self._rules.clear()
            registers = REGISTERS.get(self.machine, 0)
            is_small = self._elf.size <= DEBUG_FRAME_FILE
            self._rules[address] = self._elf.rule(address, registers, is_small) if registers else None
        return self._rules[address]

    def file_offset(self, address: int) -> int:
        """Where in the file the code at `address` is; -1 if it is in no segment that is executed."""
        return next(
            (
                load.offset + address - load.address
                for load in self._loads
                if load.flags & PF_X and 0 <= address - load.address < load.file_size
            ),
            -1,
        )

    def code(self, address: int, size: int) -> bytes:
        """Bytes of the program text; fewer where it ends."""
        for load in self._loads:
            offset = address - load.address
            if 0 <= offset < load.file_size:
                return self._elf.read(load.offset + offset, min(size, load.file_size - offset))
        return b""

    def close(self) -> None:
        for elf in (self._elf, self._debug, self._mini):
            if elf:
                elf.close()


def _page(offset: int) -> int:
    return offset & -PAGE


def _tables(files: Iterable[Elf | None]) -> Iterable[SymbolTable]:
    """Full tables before those for dynamic linking, whose names are a part of the same."""
    known = [file for file in files if file]
    for kind in (SHT_SYMTAB, SHT_DYNSYM):
        for file in known:
            for section in file.sections:
                if section.kind == kind:
                    yield SymbolTable(file, section)


def has_full_symbols(elf: Elf) -> bool:
    return any(s.kind == SHT_SYMTAB for s in elf.sections)


def _mini_debug_info(elf: Elf) -> Elf | None:
    """Fedora's: a small ELF file with the symbols of functions, compressed, in a section."""
    section = next((s for s in elf.sections if s.name == ".gnu_debugdata"), None)
    if section is None:
        return None
    try:
        data = elf.read(section.offset, min(section.size, MINI_DEBUG_INFO))
        unpacker = lzma.LZMADecompressor(memlimit=MINI_DEBUG_INFO)
        return Elf(unpacker.decompress(data, MINI_DEBUG_INFO))
    except (lzma.LZMAError, ElfError, EOFError):
        return None


def _function_starts(elf: Elf) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Sorted, by the table that `.eh_frame_hdr` is for a quick search; empty if there is none.

    The usual encoding alone: offsets from the header's own address, 32 bits wide, signed.
    """
    none = np.zeros(0, np.uint64)
    header = next((s for s in elf.segments if s.kind == PT_GNU_EH_FRAME), None)
    if header is None or not elf.is_little:
        return none
    data = elf.read(header.offset, min(header.file_size, FUNCTION_STARTS))
    if len(data) < 12 or data[0] != 1 or data[1] & 15 not in (3, 11) or data[2] != 3 or data[3] != 0x3B:
        return none
    count = min(struct.unpack_from("<I", data, 8)[0], (len(data) - 12) // 8)
    offsets = np.frombuffer(data, "<i4", count=2 * count, offset=12)[::2].astype(np.int64)
    return np.sort((offsets + np.int64(header.address & 2**63 - 1)).astype(np.uint64))
