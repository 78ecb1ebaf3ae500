"""Reading of ELF files by elfutils: headers by libelf, unwinding rules and struct layouts by libdw.

This is the only module that calls these libraries. It declares the C functions and structs that it needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import struct
import zlib
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

PT_LOAD, PT_DYNAMIC, PT_NOTE, PT_TLS, PT_GNU_EH_FRAME = 1, 2, 4, 7, 0x6474E550
"""Kinds of segments."""
PF_X, PF_W = 1, 2
"""Flags of segments."""
SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_NOTE, SHT_NOBITS, SHT_DYNSYM = 1, 2, 3, 7, 8, 11
"""Kinds of sections."""
SHF_COMPRESSED = 0x800
ELFCOMPRESS_ZLIB = 1
COMPRESSED = struct.Struct("<I4xQ8x")
"""The header of a compressed section: the kind of compression, and the size unpacked."""
GNU_COMPRESSED = struct.Struct(">4sQ")
"""The older header, of a section whose name begins with `.z`: `ZLIB`, and the size unpacked."""
HEADER_BYTES = 64
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")

EV_CURRENT = 1
ELF_C_READ = 1
ELF_K_ELF = 3
DWARF_C_READ = 0
DW_EH_PE_OMIT = 0xFF
DW_TAG_STRUCTURE, DW_TAG_MEMBER, DW_AT_MEMBER_LOCATION = 0x13, 0x0D, 0x38

MAX_SECTIONS = 4096
"""A file with more sections than this is not used. libelf takes 200 bytes of memory for each section."""
MAX_SEGMENTS = 256
"""A file with more segments than this is not used."""
MAX_NAMES = 1 << 20
"""The largest table of section names that is read, in bytes. With a larger one, sections have no names."""
MAX_NAME = 4096
"""The most bytes of a section's name that are kept."""
MAX_NOTE = 1 << 16
"""The build id of a file with more bytes of notes than this is not read, nor is a `.gnu_debuglink` with more
bytes: libelf would read and keep all of them. Usual programs have less than a page of each."""
MAX_OPERATIONS = 64
"""Most operations of one DWARF expression. A longer expression counts as unknown."""
MAX_EH_FRAME = 128 << 20
"""Largest `.eh_frame` section that is used, in bytes: libdw reads the whole section."""
MAX_SCANNED = 8 << 20
"""Largest `.debug_frame` section that is used, in bytes after it was unpacked, and largest `.eh_frame`
without a search table: libdw goes through all of such a section, and remembers each entry that it passes."""
ENTRY_FACTOR = 5
"""Bytes of memory that libdw takes to remember the entries of a section, for each byte of the section."""
MAX_DWARF = 256 << 20
"""Most DWARF of a file that libdw opens, in bytes after it was unpacked: libdw reads and unpacks all of it.
lockd closes it again after each lookup."""
MAX_UNITS = 50_000
"""The most compilation units that are searched. A large Go program has some thousands."""
MAX_CHILDREN = 200_000
"""The most children of one DWARF entry that are searched."""


class ElfError(Exception):
    """A file is not an ELF file, or is too damaged to be used, or elfutils is not installed."""


class _Ehdr(ctypes.Structure):
    _fields_ = (
        ("e_ident", c_uint8 * 16), ("e_type", ctypes.c_uint16), ("e_machine", ctypes.c_uint16),
        ("e_version", c_uint), ("e_entry", c_uint64), ("e_phoff", c_uint64), ("e_shoff", c_uint64),
        ("e_flags", c_uint), ("e_ehsize", ctypes.c_uint16), ("e_phentsize", ctypes.c_uint16),
        ("e_phnum", ctypes.c_uint16), ("e_shentsize", ctypes.c_uint16), ("e_shnum", ctypes.c_uint16),
        ("e_shstrndx", ctypes.c_uint16),
    )  # fmt: skip


class _Phdr(ctypes.Structure):
    _fields_ = (
        ("p_type", c_uint), ("p_flags", c_uint), ("p_offset", c_uint64), ("p_vaddr", c_uint64),
        ("p_paddr", c_uint64), ("p_filesz", c_uint64), ("p_memsz", c_uint64), ("p_align", c_uint64),
    )  # fmt: skip


class _Shdr(ctypes.Structure):
    _fields_ = (
        ("sh_name", c_uint), ("sh_type", c_uint), ("sh_flags", c_uint64), ("sh_addr", c_uint64),
        ("sh_offset", c_uint64), ("sh_size", c_uint64), ("sh_link", c_uint), ("sh_info", c_uint),
        ("sh_addralign", c_uint64), ("sh_entsize", c_uint64),
    )  # fmt: skip


class _Operation(ctypes.Structure):
    _fields_ = (("atom", c_uint8), ("number", c_uint64), ("number2", c_uint64), ("offset", c_uint64))


_Operations = POINTER(_Operation)


class _Die(ctypes.Structure):
    """An entry of DWARF's debugging information."""

    _fields_ = (("addr", c_void_p), ("cu", c_void_p), ("abbrev", c_void_p), ("padding", ctypes.c_long))


class _Attribute(ctypes.Structure):
    _fields_ = (("code", c_uint), ("form", c_uint), ("valp", c_void_p), ("cu", c_void_p))


_LIBELF: dict[str, tuple[Any, list[Any]]] = {
    "elf_version": (c_uint, [c_uint]),
    "elf_begin": (c_void_p, [c_int, c_int, c_void_p]),
    "elf_memory": (c_void_p, [c_char_p, c_size_t]),
    "elf_end": (c_int, [c_void_p]),
    "elf_kind": (c_int, [c_void_p]),
    "gelf_getclass": (c_int, [c_void_p]),
    "gelf_getehdr": (c_void_p, [c_void_p, POINTER(_Ehdr)]),
    "elf_getphdrnum": (c_int, [c_void_p, POINTER(c_size_t)]),
    "gelf_getphdr": (c_void_p, [c_void_p, c_int, POINTER(_Phdr)]),
    "elf_getshdrnum": (c_int, [c_void_p, POINTER(c_size_t)]),
    "elf_getscn": (c_void_p, [c_void_p, c_size_t]),
    "elf_nextscn": (c_void_p, [c_void_p, c_void_p]),
    "elf_getshdrstrndx": (c_int, [c_void_p, POINTER(c_size_t)]),
    "gelf_getshdr": (c_void_p, [c_void_p, POINTER(_Shdr)]),
    "elf_strptr": (c_char_p, [c_void_p, c_size_t, c_size_t]),
}
_LIBDW: dict[str, tuple[Any, list[Any]]] = {
    "dwelf_elf_gnu_build_id": (ctypes.c_ssize_t, [c_void_p, POINTER(c_void_p)]),
    "dwelf_elf_gnu_debuglink": (c_char_p, [c_void_p, POINTER(c_uint)]),
    "dwarf_getcfi_elf": (c_void_p, [c_void_p]),
    "dwarf_cfi_end": (c_int, [c_void_p]),
    "dwarf_begin_elf": (c_void_p, [c_void_p, c_int, c_void_p]),
    "dwarf_end": (c_int, [c_void_p]),
    "dwarf_getcfi": (c_void_p, [c_void_p]),
    "dwarf_cfi_addrframe": (c_int, [c_void_p, c_uint64, POINTER(c_void_p)]),
    "dwarf_frame_info": (c_int, [c_void_p, POINTER(c_uint64), POINTER(c_uint64), POINTER(ctypes.c_bool)]),
    "dwarf_frame_cfa": (c_int, [c_void_p, POINTER(_Operations), POINTER(c_size_t)]),
    "dwarf_nextcu": (
        c_int,
        [c_void_p, c_uint64, POINTER(c_uint64), POINTER(c_size_t), c_void_p, c_void_p, c_void_p],
    ),
    "dwarf_offdie": (c_void_p, [c_void_p, c_uint64, POINTER(_Die)]),
    "dwarf_child": (c_int, [POINTER(_Die), POINTER(_Die)]),
    "dwarf_siblingof": (c_int, [POINTER(_Die), POINTER(_Die)]),
    "dwarf_tag": (c_int, [POINTER(_Die)]),
    "dwarf_diename": (c_char_p, [POINTER(_Die)]),
    "dwarf_attr": (c_void_p, [POINTER(_Die), c_uint, POINTER(_Attribute)]),
    "dwarf_formudata": (c_int, [POINTER(_Attribute), POINTER(c_uint64)]),
    "dwarf_frame_register": (
        c_int,
        [c_void_p, c_int, POINTER(_Operation), POINTER(_Operations), POINTER(c_size_t)],
    ),
}


@functools.cache
def _libraries() -> tuple[Any, Any, Any]:
    """libelf, libdw and the C library. Raises ElfError if elfutils is not installed."""
    try:
        elf, dw = ctypes.CDLL("libelf.so.1"), ctypes.CDLL("libdw.so.1")
    except OSError as error:
        raise ElfError(f"the libraries of elfutils cannot be loaded: {error}") from None
    for library, functions in ((elf, _LIBELF), (dw, _LIBDW)):
        for name, (result, arguments) in functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    if not elf.elf_version(EV_CURRENT):
        raise ElfError(f"libelf does not support version {EV_CURRENT} of ELF")
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [c_void_p]
    libc.free.restype = None
    return elf, dw, libc


@dataclass(frozen=True)
class Segment:
    """A program header. `kind` and `flags` are its p_type and p_flags; sizes and offsets are in bytes."""

    kind: int
    flags: int
    offset: int
    address: int
    file_size: int
    memory_size: int
    align: int


@dataclass(frozen=True)
class Section:
    """A section header. `kind`, `flags` and `link` are its sh_type, sh_flags and sh_link; sizes are bytes."""

    name: str
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int


Operation = tuple[int, int, int]
"""A DWARF operation: its code and its two operands, which are unsigned numbers of 64 bits."""


@dataclass(frozen=True)
class UnwindRule:
    """How the caller's registers are found from the registers at one address of the code."""

    cfa: tuple[Operation, ...]
    """The expression for the canonical frame address: the caller's stack pointer after the return."""
    registers: dict[int, tuple[Operation, ...] | None]
    """By DWARF number, the expression for the address at which the register was saved.

    An expression that ends in DW_OP_stack_value gives the register's value instead. None: the value is lost.
    Registers that are not listed keep their values.
    """
    return_register: int
    """DWARF number of the register (or the column that stands for it) that has the return address."""
    is_signal: bool
    """Whether the frame is a signal's: its caller was interrupted, and made no call."""


class Elf:
    """One ELF file: its headers, its unwinding rules, and the layouts of its structs.

    libelf reads the file in pieces and never maps it. A file that shrinks while it is read therefore causes
    errors instead of signals.
    """

    def __init__(self, source: int | bytes) -> None:
        """`source` is an open descriptor, which close() closes, or the bytes of the file.

        Raises ElfError if the source is no ELF file or cannot be used; then a descriptor stays open.
        """
        self._elf_library, self._dw, self._libc = _libraries()
        self._source = source
        self._cfi: list[int] | None = None
        self._eh_frame = 0
        self._debug_frame: _DebugFrame | None = None
        self._handle = 0
        self.size = len(source) if isinstance(source, bytes) else os.fstat(source).st_size
        self._handle = self._begin()
        try:
            self._read_headers()
        except BaseException:
            self._end()
            raise

    def _begin(self) -> int:
        """A handle of libelf for the file. Raises ElfError if libelf cannot read it."""
        handle = None
        if not isinstance(self._source, bytes):
            handle = self._elf_library.elf_begin(self._source, ELF_C_READ, None)
        elif self._source:
            handle = self._elf_library.elf_memory(self._source, len(self._source))
        if not handle:
            raise ElfError("libelf cannot read the file")
        return int(handle)

    def _read_headers(self) -> None:
        elf = self._elf_library
        header = _Ehdr()
        if elf.elf_kind(self._handle) != ELF_K_ELF or not elf.gelf_getehdr(self._handle, byref(header)):
            raise ElfError("the file has no ELF header")
        self.is_64 = elf.gelf_getclass(self._handle) == 2
        self.is_little = header.e_ident[5] == 1
        self.machine: int = header.e_machine
        self.segments = tuple(self._segments())
        self.sections = tuple(self._sections())

    def _segments(self) -> Iterator[Segment]:
        count = c_size_t()
        if self._elf_library.elf_getphdrnum(self._handle, byref(count)):
            return
        if count.value > MAX_SEGMENTS:
            raise ElfError(f"the file has {count.value} segments; rule: at most {MAX_SEGMENTS}")
        for i in range(count.value):
            header = _Phdr()
            if self._elf_library.gelf_getphdr(self._handle, i, byref(header)):
                yield Segment(
                    header.p_type, header.p_flags, header.p_offset, header.p_vaddr, header.p_filesz,
                    header.p_memsz, header.p_align,
                )  # fmt: skip

    def _sections(self) -> Iterator[Section]:
        """All sections but ELF's section 0, which means "no section": section i of ELF is element i - 1."""
        elf = self._elf_library
        count, names, header = c_size_t(), c_size_t(), _Shdr()
        if elf.elf_getshdrnum(self._handle, byref(count)) or elf.elf_getshdrstrndx(
            self._handle, byref(names)
        ):
            return
        if count.value > MAX_SECTIONS:
            raise ElfError(f"the file has {count.value} sections; rule: at most {MAX_SECTIONS}")
        section = elf.elf_getscn(self._handle, names.value)
        has_names = elf.gelf_getshdr(section, byref(header)) and header.sh_size <= MAX_NAMES
        section = elf.elf_nextscn(self._handle, None)
        while section:
            header = _Shdr()
            if not elf.gelf_getshdr(section, byref(header)):
                return
            name = elf.elf_strptr(self._handle, names.value, header.sh_name) if has_names else None
            name = name or b""
            yield Section(
                name[:MAX_NAME].decode("utf-8", "backslashreplace"), header.sh_type, header.sh_flags,
                header.sh_addr, header.sh_offset, header.sh_size, header.sh_link,
            )  # fmt: skip
            section = elf.elf_nextscn(self._handle, section)

    def section_of(self, kind: int) -> Section | None:
        """The first section of a kind; None if there is none. ELF allows one symbol table of each kind."""
        return next((section for section in self.sections if section.kind == kind), None)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes of the file from `offset`; fewer at its end, and none if they cannot be read."""
        size = min(size, self.size - offset)
        if size <= 0 or offset < 0:
            return b""
        if isinstance(self._source, bytes):
            return self._source[offset : offset + size]
        with contextlib.suppress(OSError):
            return os.pread(self._source, size, offset)
        return b""

    @property
    def build_id(self) -> bytes:
        """The GNU build id; empty if the file has none."""
        notes = [s.size for s in self.sections if s.kind == SHT_NOTE]
        notes += [s.file_size for s in self.segments if s.kind == PT_NOTE]
        if sum(notes) > MAX_NOTE:
            return b""
        pointer = c_void_p()
        size = self._dw.dwelf_elf_gnu_build_id(self._handle, byref(pointer))
        return ctypes.string_at(pointer.value, size) if 0 < size <= 64 and pointer.value else b""

    @property
    def debug_link(self) -> tuple[bytes, int]:
        """Name and CRC-32 of the separate debug file, by `.gnu_debuglink`; an empty name if there is none."""
        if any(s.size > MAX_NOTE for s in self.sections if s.name == ".gnu_debuglink"):
            return b"", 0
        crc = c_uint()
        return self._dw.dwelf_elf_gnu_debuglink(self._handle, byref(crc)) or b"", crc.value

    def member_offset(self, unit: str, structure: str, member: str) -> int | None:
        """The offset of a struct's member in bytes, by the DWARF of the compilation unit named `unit`.

        Returns None if the file has no such unit, struct or member, or more DWARF than MAX_DWARF.
        """
        dwarf_sections = [s for s in self.sections if "debug" in s.name]
        has_info = any(s.name in (".debug_info", ".zdebug_info") for s in dwarf_sections)
        is_readable = has_info and self.is_64 and self.is_little and self._handle
        if not is_readable or sum(map(self._unpacked_size, dwarf_sections)) > MAX_DWARF:
            return None
        # libelf keeps unpacked sections until the handle is closed, so another handle is used here.
        handle = self._begin()
        dwarf = self._dw.dwarf_begin_elf(handle, DWARF_C_READ, None)
        try:
            if not dwarf:
                return None
            units = itertools.islice(self._units(dwarf), MAX_UNITS)
            die = next((one for one in units if self._dw.dwarf_diename(byref(one)) == unit.encode()), None)
            struct = next(self._children(die, DW_TAG_STRUCTURE, structure), None) if die else None
            field = next(self._children(struct, DW_TAG_MEMBER, member), None) if struct else None
            return self._number(field, DW_AT_MEMBER_LOCATION) if field else None
        finally:
            if dwarf:
                self._dw.dwarf_end(dwarf)
            self._elf_library.elf_end(handle)

    def _unpacked_size(self, section: Section) -> int:
        """Bytes of memory that libdw takes for a section, which may be compressed."""
        header = self._compression(section)
        return max(section.size, header[1]) if header else section.size

    def _compression(self, section: Section) -> tuple[int, int, int] | None:
        """The kind of compression of a section, its size unpacked, and the offset of the data in the section.

        None if the section is not compressed. The file must be a 64-bit, little-endian one.
        """
        if section.flags & SHF_COMPRESSED:
            header = self.read(section.offset, COMPRESSED.size)
            return (*COMPRESSED.unpack(header), COMPRESSED.size) if len(header) == COMPRESSED.size else None
        header = self.read(section.offset, GNU_COMPRESSED.size) if section.name.startswith(".z") else b""
        if len(header) < GNU_COMPRESSED.size or header[:4] != b"ZLIB":
            return None
        return ELFCOMPRESS_ZLIB, GNU_COMPRESSED.unpack(header)[1], GNU_COMPRESSED.size

    def _units(self, dwarf: int) -> Iterator[_Die]:
        """The entries of all compilation units."""
        offset, following, header = 0, c_uint64(), c_size_t()
        while self._dw.dwarf_nextcu(dwarf, offset, byref(following), byref(header), None, None, None) == 0:
            die = _Die()
            if self._dw.dwarf_offdie(dwarf, offset + header.value, byref(die)):
                yield die
            offset = following.value

    def _children(self, parent: _Die, tag: int, name: str) -> Iterator[_Die]:
        """The children of a DWARF entry that have this tag and name."""
        die = _Die()
        failed = self._dw.dwarf_child(byref(parent), byref(die))
        for _ in range(MAX_CHILDREN):
            if failed:
                return
            if self._dw.dwarf_tag(byref(die)) == tag and self._dw.dwarf_diename(byref(die)) == name.encode():
                yield die
            failed = self._dw.dwarf_siblingof(byref(die), byref(die))

    def _number(self, die: _Die, attribute: int) -> int | None:
        found, number = _Attribute(), c_uint64()
        if not self._dw.dwarf_attr(byref(die), attribute, byref(found)):
            return None
        return number.value if self._dw.dwarf_formudata(byref(found), byref(number)) == 0 else None

    def rule(self, address: int, registers: int) -> UnwindRule | None:
        """The unwinding rule for an address of the file (not of memory).

        Returns None if neither `.eh_frame` nor `.debug_frame` has a rule for the address. `registers` is how
        many DWARF registers the rule covers, from number 0.
        """
        for cfi in self._cfi_tables():
            frame = c_void_p()
            if self._dw.dwarf_cfi_addrframe(cfi, address, byref(frame)) == 0 and frame.value:
                try:
                    return self._rule(frame, registers)
                finally:
                    self._libc.free(frame)
        return None

    def _cfi_tables(self) -> list[int]:
        if self._cfi is None:
            is_used = self._eh_frame_size <= (MAX_EH_FRAME if self._has_search_table else MAX_SCANNED)
            self._eh_frame = (self._dw.dwarf_getcfi_elf(self._handle) or 0) if is_used else 0
            if data := self._debug_frame_data():
                self._debug_frame = _DebugFrame(self, data)
            debug = self._debug_frame.cfi if self._debug_frame else 0
            self._cfi = [cfi for cfi in (self._eh_frame, debug) if cfi]
        return self._cfi

    @functools.cached_property
    def _eh_frame_size(self) -> int:
        """Bytes that libdw reads for `.eh_frame`.

        If the file has no such section, but the segment PT_GNU_EH_FRAME, libdw reads the whole file.
        """
        has_segment = any(segment.kind == PT_GNU_EH_FRAME for segment in self.segments)
        without = self.size if has_segment else 0
        found = [s.size for s in self.sections if s.name == ".eh_frame" and s.kind != SHT_NOBITS]
        return max(found, default=without)

    @functools.cached_property
    def _has_search_table(self) -> bool:
        """Whether there is a table in which libdw finds the entry of `.eh_frame` for an address.

        libdw finds the table by a section `.eh_frame_hdr` before the section `.eh_frame`. If there is no
        section `.eh_frame`, it finds the table by the segment PT_GNU_EH_FRAME.
        """
        before = itertools.takewhile(lambda section: section.name != ".eh_frame", self.sections)
        places = [section.offset for section in before if section.name == ".eh_frame_hdr"]
        if not any(section.name == ".eh_frame" for section in self.sections):
            places = [segment.offset for segment in self.segments if segment.kind == PT_GNU_EH_FRAME]
        tables = [self.read(place, 4) for place in places]
        return bool(tables) and all(len(data) == 4 and DW_EH_PE_OMIT not in data[2:] for data in tables)

    @property
    def _debug_frame_section(self) -> Section | None:
        names = (".debug_frame", ".zdebug_frame") if self.is_64 and self.is_little else ()
        return next((section for section in self.sections if section.name in names), None)

    def _debug_frame_data(self) -> bytes:
        """The content of `.debug_frame`; none if there is no such section, or if it is too large.

        lockd reads it without libdw, which would open, unpack and keep all DWARF of the file.
        """
        section = self._debug_frame_section
        if not section or self._unpacked_size(section) > MAX_SCANNED:
            return b""
        data, packed = self.read(section.offset, section.size), self._compression(section)
        if not packed:
            return data
        kind, size, start = packed
        if kind != ELFCOMPRESS_ZLIB:
            return b""
        with contextlib.suppress(zlib.error):
            return zlib.decompressobj().decompress(data[start:], size) if size else b""
        return b""

    @property
    def memory(self) -> int:
        """Estimated bytes of memory that this object takes, or will take after the first call of rule()."""
        return (self.size if isinstance(self._source, bytes) else 0) + self._rules_memory

    @functools.cached_property
    def _rules_memory(self) -> int:
        """Estimated bytes of memory that libdw takes for the sections with rules."""
        debug = self._debug_frame_section
        scanned = [self._unpacked_size(debug)] if debug else []
        scanned += [] if self._has_search_table else [self._eh_frame_size]
        read = self._eh_frame_size if self._has_search_table and self._eh_frame_size <= MAX_EH_FRAME else 0
        return read + sum((1 + ENTRY_FACTOR) * size for size in scanned if size <= MAX_SCANNED)

    def _rule(self, frame: c_void_p, registers: int) -> UnwindRule | None:
        operations, count, is_signal = _Operations(), c_size_t(), ctypes.c_bool()
        return_register = self._dw.dwarf_frame_info(frame, None, None, byref(is_signal))
        if return_register < 0 or self._dw.dwarf_frame_cfa(frame, byref(operations), byref(count)):
            return None
        cfa = _expression(operations, count.value)
        if not cfa:
            return None
        saved: dict[int, tuple[Operation, ...] | None] = {}
        memory = (_Operation * 3)()
        for register in range(registers):
            if self._dw.dwarf_frame_register(frame, register, memory, byref(operations), byref(count)):
                continue
            if count.value:
                saved[register] = _expression(operations, count.value)
            elif operations:
                saved[register] = None
        return UnwindRule(cfa, saved, return_register, is_signal.value)

    def close(self) -> None:
        """Free the memory of elfutils, and close the descriptor that was given as the source.

        Afterwards read() returns nothing.
        """
        if not self._handle:
            return
        self._end()
        source, self._source, self.size = self._source, b"", 0  # the descriptor may soon be another file's
        if isinstance(source, int):
            os.close(source)

    def _end(self) -> None:
        if self._eh_frame:
            self._dw.dwarf_cfi_end(self._eh_frame)
        self._cfi = None
        if self._debug_frame:
            self._debug_frame.close()
            self._debug_frame = None
        if self._handle:
            self._elf_library.elf_end(self._handle)
        self._handle = self._eh_frame = 0

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # __init__ failed before it set the attributes
            self.close()


class _DebugFrame:
    """The rules of a `.debug_frame` section: libdw opens a file in memory that has nothing but this section.

    If libdw opened the whole file, it would unpack and keep all DWARF.
    """

    def __init__(self, file: Elf, data: bytes) -> None:
        """`file` is the file with the section, and `data` the content of the section."""
        self._elf_library, self._dw, _ = _libraries()
        self._image = _file_of_section(file, b".debug_frame", data)
        self._handle = self._elf_library.elf_memory(self._image, len(self._image))
        self._dwarf = self._dw.dwarf_begin_elf(self._handle, DWARF_C_READ, None) if self._handle else None
        self.cfi: int = (self._dw.dwarf_getcfi(self._dwarf) if self._dwarf else None) or 0
        """libdw's handle for the rules; 0 if it cannot use them."""

    def close(self) -> None:
        """Free the memory of elfutils."""
        if self._dwarf:
            self._dw.dwarf_end(self._dwarf)
        if self._handle:
            self._elf_library.elf_end(self._handle)


def _file_of_section(file: Elf, name: bytes, data: bytes) -> bytes:
    """An ELF file for the same machine as another one (64-bit and little-endian), with one section."""
    header = bytearray(file.read(0, HEADER_BYTES))
    names = b"\0" + name + b"\0.shstrtab\0"
    end = HEADER_BYTES + len(data)
    sections = (
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (1, SHT_PROGBITS, 0, 0, HEADER_BYTES, len(data), 0, 0, 1, 0),
        (len(name) + 2, SHT_STRTAB, 0, 0, end, len(names), 0, 0, 1, 0),
    )
    padding = bytes(-(end + len(names)) % 8)
    # The offsets of the segments' and the sections' headers; the sizes and numbers of these headers.
    struct.pack_into("<QQ", header, 32, 0, end + len(names) + len(padding))
    struct.pack_into("<5H", header, 54, 0, 0, SECTION_HEADER.size, len(sections), len(sections) - 1)
    table = b"".join(SECTION_HEADER.pack(*section) for section in sections)
    return bytes(header) + data + names + padding + table


def _expression(operations: Any, count: int) -> tuple[Operation, ...]:
    if count > MAX_OPERATIONS:
        return ()
    return tuple((int(op.atom), int(op.number), int(op.number2)) for op in operations[:count])
