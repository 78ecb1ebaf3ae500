"""An object file (a program or a library): the names of its addresses, and the rules to unwind from them."""

from __future__ import annotations

import contextlib
import itertools
import lzma
import os
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockd.names.objects.elfutils import (
    PF_X,
    PT_GNU_EH_FRAME,
    PT_LOAD,
    PT_TLS,
    SHT_DYNSYM,
    SHT_SYMTAB,
    Elf,
    ElfError,
    Segment,
    UnwindRule,
)
from lockd.names.objects.mappings import Mapping
from lockd.names.objects.process_files import open_regular
from lockd.names.objects.symbols import GoFunctions, NamedFunction, Symbol, SymbolTable, variable_address

EM_X86_64, EM_AARCH64 = 62, 183
REGISTERS = {EM_X86_64: 17, EM_AARCH64: 32}
"""DWARF registers that unwinding rules cover, by machine."""
PAGE = 4096

MINI_DEBUG_INFO = 64 << 20
"""Largest MiniDebugInfo that is used, in bytes after it was unpacked."""
FUNCTION_STARTS = 64 << 20
"""The most bytes of `.eh_frame_hdr` that are read."""
MAX_RULE_BYTES = 10 << 20
"""Bytes of memory for the unwinding rules that are remembered for one file: enough for 4,000 usual ones."""
RULE_BYTES, REGISTER_BYTES, OPERATION_BYTES = 400, 60, 130
"""Estimated memory of one remembered rule, and of each register and each operation in it."""
MAX_FUNCTION_BYTES = 2 << 20
"""Bytes of memory for the functions that are remembered for one file: usually enough for 4,000 addresses."""
FUNCTION_BYTES = 400
"""Estimated memory of one remembered function without its name."""
FILE_BYTES = 100_000
"""Estimated bytes of memory of one file, mostly libelf's own. Symbols, function starts, rules, functions and
the sections that libdw reads for rules are not part of this number: ObjectFile.memory adds them.

No estimate has the 100 bytes that libdw remembers of each function for which it found a rule, or the names
that were looked up with variable_address() and member_offset(): callers look up only a few names.
"""
JUMP_BYTES = 1 << 16
"""The most bytes of one function that are searched for jumps."""
_JUMP = re.compile(rb"(?=(?:\xe9|\x0f[\x80-\x8f])(....))", re.S)
"""A jmp or a conditional jump of x86-64 with a distance of 32 bits."""

DEBUG_DIRECTORY = b"/usr/lib/debug"
"""Where distributions install debug files: the symbols that they strip from programs."""
DEBUG_CHUNK = 1 << 20
"""Bytes of a debug file that are read at a time for its checksum."""
MAX_DEBUG_CHECKED = 1 << 30
"""Largest debug file whose checksum is computed, in bytes. This is needed where there is no build id."""


MOST_TAIL_CALLERS = 50_000
"""Tail calls are not looked for in a file that has more functions than this. The C library has some 3,000."""
MOST_TARGETS = 256
"""The most jumps out of a split-off part of a function that are followed to find the function."""
COMPARED_BYTES = 4096
"""Bytes at the beginning of a mapping that identify its file. The build id usually is among them."""


class ObjectFile:
    """An open ELF file with its debug file, if that is installed.

    All addresses are the file's own: addresses in memory less the bias().
    """

    def __init__(self, elf: Elf, debug: Elf | None = None) -> None:
        """`debug` is the debug file. close() closes both files."""
        self._elf = elf
        self._debug = debug
        self._mini = _mini_debug_info(elf)
        self._symbols = list(_tables([elf, debug, self._mini]))
        self._go = GoFunctions(elf)
        self.tables: list[SymbolTable | GoFunctions] = [*self._symbols, self._go]
        """Tables of functions: full symbol tables first, then tables for dynamic linking, then that of Go."""
        self._starts = _function_starts(elf)
        self._rules: dict[int, UnwindRule | None] = {}
        self._functions: dict[int, Symbol | None] = {}
        self._rule_bytes = self._function_bytes = 0
        self._lookups: dict[str, int | None] = {}
        self._loads = [s for s in elf.segments if s.kind == PT_LOAD]
        self.machine = elf.machine if elf.is_64 and elf.is_little else 0
        """ELF's number of the machine (such as EM_X86_64); 0 if the file is not 64-bit, little-endian."""
        self.end = max((s.address + s.memory_size for s in self._loads), default=0)
        """The address behind the last segment."""

    @property
    def has_full_symbols(self) -> bool:
        """Whether functions that are not exported have names, too."""
        return any(file and _has_full_symbols(file) for file in (self._elf, self._debug, self._mini))

    @property
    def memory(self) -> int:
        """Estimated bytes of memory that this object takes."""
        remembered = self._rule_bytes + self._function_bytes
        files = sum(elf.memory for elf in (self._elf, self._mini) if elf)
        return FILE_BYTES + sum(t.memory for t in self.tables) + self._starts.nbytes + remembered + files

    def bias(self, mapping: Mapping) -> int:
        """What to subtract from an address in memory to get the file's own, by one mapping of the file.

        Raises ElfError if the offset of the mapping is in no segment of the file.
        """
        candidates = [s for s in self._loads if _page(s.offset) <= mapping.offset < s.offset + s.file_size]
        # Two segments may share a page of the file, which is then mapped twice: the right to execute decides.
        candidates.sort(key=lambda s: bool(s.flags & PF_X) != mapping.is_executable)
        if not candidates:
            raise ElfError(f"the file has no segment that is mapped from offset {mapping.offset:#x}")
        return mapping.start - (mapping.offset + candidates[0].address - candidates[0].offset)

    def may_be_mapped(self, mapping: Mapping, memory: int) -> bool:
        """Whether a mapping begins with the bytes that the file has there; True if memory cannot be read.

        `memory` is a descriptor of the memory of the process, or -1.
        """
        mapped = b""
        if memory >= 0:
            with contextlib.suppress(OSError, OverflowError):
                mapped = os.pread(memory, COMPARED_BYTES, mapping.start)
        return not mapped or mapped == self._elf.read(mapping.offset, len(mapped))

    def function(self, address: int) -> Symbol | None:
        """The function that spans an address; None if its name is not known."""
        if address not in self._functions:
            function = self._named(address) or self._split_off(address)
            taken = FUNCTION_BYTES + (sys.getsizeof(function.name) if function else 0)
            if self._function_bytes + taken > MAX_FUNCTION_BYTES:
                self._functions.clear()
                self._function_bytes = 0
            self._functions[address] = function
            self._function_bytes += taken
        return self._functions[address]

    def is_go(self, address: int) -> bool:
        """Whether an address is in the code of a Go program, and not in code of C that is linked with it."""
        return self._go.function(address) is not None

    def _named(self, address: int) -> Symbol | None:
        return next((symbol for t in self.tables if (symbol := t.function(address))), None)

    def _split_off(self, address: int) -> Symbol | None:
        """The part of a function that an address is in, if the compiler placed that part elsewhere.

        Compilers do so with rarely executed code. Only full symbol tables have a name for such a part.
        Without them it is recognised by its jumps: the function jumps into the part, and the part jumps into
        the middle of the function. Only two parts of one function do that.
        """
        if self.machine != EM_X86_64 or self.rule(address) is None:
            return None
        index = int(np.searchsorted(self._starts, np.uint64(address), side="right"))
        if not 0 < index < len(self._starts):
            return None
        part = range(int(self._starts[index - 1]), int(self._starts[index]))
        outside = (target for target in self.jump_targets(part) if target not in part)
        targets = itertools.islice(outside, MOST_TARGETS)
        named = {symbol for target in targets if (symbol := self._named(target)) and symbol.address != target}
        if len(named) != 1:
            return None
        (whole,) = named
        code = range(whole.address, whole.address + whole.size)
        is_part = any(target in part for target in self.jump_targets(code))
        return Symbol(whole.name, part.start, len(part)) if is_part else None

    def jump_targets(self, code: range) -> Iterator[int]:
        """Where the jumps in a range of x86-64 code lead in the file. Only 32-bit distances are read."""
        for jump in _JUMP.finditer(self.code(code.start, min(len(code), JUMP_BYTES))):
            target = code.start + jump.end(1) + int.from_bytes(jump[1], "little", signed=True)
            if 0 <= target < self.end:
                yield target

    def variable(self, address: int) -> Symbol | None:
        """The variable that spans an address; None if its name is not known."""
        return next((symbol for t in self._symbols if (symbol := t.variable(address))), None)

    def variable_address(self, name: str) -> int | None:
        """The address of the variable with this exact name; None if the file has no such symbol."""
        if name not in self._lookups:
            self._lookups[name] = variable_address(self._elf, name)
        return self._lookups[name]

    def member_offset(self, unit: str, structure: str, member: str) -> int | None:
        """The offset of a struct's member in bytes, by the DWARF of the compilation unit named `unit`.

        Returns None if neither the file nor its debug file says.
        """
        key = f"{unit} {structure} {member}"
        if key not in self._lookups:
            files = (file for file in (self._elf, self._debug) if file)
            offsets = (file.member_offset(unit, structure, member) for file in files)
            self._lookups[key] = next((offset for offset in offsets if offset is not None), None)
        return self._lookups[key]

    def thread_local(self, offset: int) -> Symbol | None:
        """The variable that spans an offset in the block of thread-local memory; None if it has no name."""
        return next((symbol for t in self._symbols if (symbol := t.thread_local(offset))), None)

    @property
    def thread_local_block(self) -> Segment | None:
        """The segment of thread-local variables (PT_TLS); None if the file has none."""
        return next((s for s in self._elf.segments if s.kind == PT_TLS), None)

    def function_start(self, address: int) -> int:
        """Where the function that spans an address begins; -1 if no symbol or unwinding table says."""
        if symbol := self.function(address):
            return symbol.address
        if self.rule(address) is None:  # the address is in a gap of the tables
            return -1
        index = int(np.searchsorted(self._starts, np.uint64(address), side="right")) - 1
        return int(self._starts[index]) if index >= 0 else -1

    def rule(self, address: int) -> UnwindRule | None:
        """The unwinding rule for an address; None if the file has none."""
        if address not in self._rules:
            registers = REGISTERS.get(self.machine, 0)
            rule = self._elf.rule(address, registers) if registers else None
            taken = _rule_bytes(rule) if rule else RULE_BYTES
            if self._rule_bytes + taken > MAX_RULE_BYTES:
                self._rules.clear()
                self._rule_bytes = 0
            self._rules[address] = rule
            self._rule_bytes += taken
        return self._rules[address]

    def file_offset(self, address: int) -> int:
        """The offset in the file of the code at an address; -1 if the address is in no executable segment."""
        return next(
            (
                load.offset + address - load.address
                for load in self._loads
                if load.flags & PF_X and 0 <= address - load.address < load.file_size
            ),
            -1,
        )

    def code(self, address: int, size: int) -> bytes:
        """`size` bytes of the file at an address; fewer where the segment ends, none outside of segments."""
        for load in self._loads:
            offset = address - load.address
            if 0 <= offset < load.file_size:
                return self._elf.read(load.offset + offset, min(size, load.file_size - offset))
        return b""

    def close(self) -> None:
        """Close the file and its debug file."""
        for elf in (self._elf, self._debug, self._mini):
            if elf:
                elf.close()


def open_object(
    file: int, roots: Sequence[Path], path: bytes, debug_files: bytes = DEBUG_DIRECTORY
) -> ObjectFile:
    """The object file behind an open descriptor, which is closed with it, or at once if this fails.

    `path` is the file's path in the root directory of a process. A debug file is searched for in the root
    directories `roots` (see process_files.Root), beside the file and in the directory `debug_files`. Raises
    ElfError if the file is no ELF file.
    """
    try:
        elf = Elf(file)
    except BaseException:
        os.close(file)
        raise
    debug = None
    if not _has_full_symbols(elf):
        with contextlib.suppress(OSError):
            debug = _debug_file(elf, os.fstat(file), path, roots, debug_files)
    return ObjectFile(elf, debug)


def _debug_file(
    elf: Elf, about: os.stat_result, path: bytes, roots: Sequence[Path], directory: bytes
) -> Elf | None:
    """The first debug file below one of the root directories that fits an ELF file; None if none does.

    `about` is the status of the ELF file. The debug file must belong to root, to the owner of the ELF file or
    to the owner of the root directory: other users must not choose the names of its functions. Outside of
    `directory`, it must be in the file system of the ELF file, because a user can have any file bound to a
    path beside files of their own, and a FUSE server of theirs can name any owner.
    """
    build_id = elf.build_id
    link, checksum = elf.debug_link
    for root in roots:
        owners = {0, about.st_uid, os.stat(root).st_uid}
        for candidate in _debug_paths(path, build_id, link, directory):
            device = -1 if candidate.startswith(directory + b"/") else about.st_dev
            with contextlib.suppress(OSError, ElfError):
                debug = _open_elf(root, candidate, owners, device)
                if _fits(debug, build_id, checksum if link else -1):
                    return debug
                debug.close()
    return None


def _debug_paths(path: bytes, build_id: bytes, link: bytes, directory: bytes) -> Iterator[bytes]:
    """Where the debug file of the file at `path` may be, in the order in which gdb searches."""
    if len(build_id) > 1:
        name = build_id.hex().encode()
        yield b"%s/.build-id/%s/%s.debug" % (directory, name[:2], name[2:])
    if link and b"/" not in link:
        beside = path.rpartition(b"/")[0]
        for place in (beside, beside + b"/.debug", directory + beside):
            yield place + b"/" + link


def _open_elf(root: Path, path: bytes, owners: set[int], device: int) -> Elf:
    """The ELF file at `path` in a root directory.

    Raises OSError if there is no such file, and ElfError if it is no ELF file, if it belongs to none of
    `owners`, or if it is on another device than `device` (-1: on any).
    """
    file = open_regular(root, path)
    try:
        about = os.fstat(file)
        if about.st_uid not in owners:
            raise ElfError(
                f"{os.fsdecode(path)} belongs to user {about.st_uid}; rule: one of {sorted(owners)}"
            )
        if device not in (-1, about.st_dev):
            raise ElfError(f"{os.fsdecode(path)} is on device {about.st_dev}; rule: {device}")
        return Elf(file)
    except BaseException:
        os.close(file)
        raise


def _fits(debug: Elf, build_id: bytes, checksum: int) -> bool:
    """Whether a debug file has this build id, or this checksum if one of the two files has no build id.

    Checksum -1 fits no file.
    """
    if build_id and debug.build_id:
        return debug.build_id == build_id
    if checksum < 0 or debug.size > MAX_DEBUG_CHECKED:
        return False
    crc = 0
    for offset in range(0, debug.size, DEBUG_CHUNK):
        crc = zlib.crc32(debug.read(offset, DEBUG_CHUNK), crc)
    return crc == checksum


@dataclass(frozen=True)
class FunctionEntry:
    """A function, with those of its names that functions_by_name() was asked for."""

    names: tuple[str, ...]
    """Names with fewer underscores in front come first, then shorter names."""
    address: int
    """The file's own address, see ObjectFile.bias()."""
    offset: int
    """Offset in the file; -1 if the address is in no executable segment."""
    is_indirect: bool
    """Whether the code there only chooses, at load time, the function that is to be called (IFUNC)."""


def functions_by_name(file: ObjectFile, is_wanted: Callable[[str], bool]) -> list[FunctionEntry]:
    """The functions that have a wanted name, sorted by address."""
    found: dict[int, list[NamedFunction]] = {}
    for symbol in all_functions(file):
        if is_wanted(symbol.name):
            found.setdefault(symbol.address, []).append(symbol)
    return [
        FunctionEntry(
            names=tuple(sorted({symbol.name for symbol in symbols}, key=_plainness)),
            address=address,
            offset=file.file_offset(address),
            is_indirect=any(symbol.is_indirect for symbol in symbols),
        )
        for address, symbols in sorted(found.items())
    ]


def tail_callers(file: ObjectFile, is_wanted: Callable[[str], bool]) -> dict[int, tuple[str, ...]]:
    """Nameless functions by address, each with the names of the wanted functions that tail-call it.

    A tail call is a jump. It leaves no trace on the stack: the nameless function appears there in place of
    the function that was called. For instance, `pthread_once` does only a quick check itself, and jumps to a
    function whose name is only known inside the C library. Names are sorted by _plainness(). The result is
    empty for files with full symbols or very many functions, and for machines other than x86-64.
    """
    found: dict[int, set[str]] = {}
    if file.has_full_symbols or file.machine != EM_X86_64 or _has_more_functions(file, MOST_TAIL_CALLERS):
        return {}
    for entry in functions_by_name(file, is_wanted):
        symbol = file.function(entry.address)
        code = range(entry.address, entry.address + (symbol.size if symbol else 0))
        for target in file.jump_targets(code):
            if file.function_start(target) == target and not file.function(target):
                found.setdefault(target, set()).add(entry.names[0])
    return {address: tuple(sorted(names, key=_plainness)) for address, names in found.items()}


def all_functions(file: ObjectFile) -> Iterator[NamedFunction]:
    """The functions of all symbol tables of a file. A function can come several times."""
    for table in file.tables:
        yield from table.functions()


def _has_more_functions(file: ObjectFile, count: int) -> bool:
    return next(itertools.islice(all_functions(file), count, None), None) is not None


def _plainness(name: str) -> tuple[int, int, str]:
    """A key to sort names by: fewer underscores in front first, then the shorter name."""
    return len(name) - len(name.lstrip("_")), len(name), name


def _rule_bytes(rule: UnwindRule) -> int:
    """Estimated bytes of memory of a rule. Anybody can write one with dozens of operations for a register."""
    expressions = [rule.cfa, *filter(None, rule.registers.values())]
    operations = sum(map(len, expressions))
    return RULE_BYTES + len(rule.registers) * REGISTER_BYTES + operations * OPERATION_BYTES


def _page(offset: int) -> int:
    return offset & -PAGE


def _tables(files: Iterable[Elf | None]) -> Iterable[SymbolTable]:
    """The symbol tables of files. Full tables come first: tables for dynamic linking have fewer names."""
    known = [file for file in files if file]
    for kind in (SHT_SYMTAB, SHT_DYNSYM):
        for file in known:
            if section := file.section_of(kind):
                yield SymbolTable(file, section)


def _has_full_symbols(elf: Elf) -> bool:
    return elf.section_of(SHT_SYMTAB) is not None


def _mini_debug_info(elf: Elf) -> Elf | None:
    """Fedora's MiniDebugInfo: a compressed ELF file with the symbols of functions, in a section."""
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
    """Sorted addresses of functions, by the search table in `.eh_frame_hdr`; empty if there is no such table.

    Only the usual encoding is read: signed offsets of 32 bits from the address of the header.
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
