"""Reading of ELF files by elfutils: headers by libelf, unwinding rules and struct layouts by libdw.

This is the only module that calls these libraries. It declares the C functions and structs that it needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

PT_LOAD, PT_DYNAMIC, PT_TLS, PT_GNU_EH_FRAME = 1, 2, 7, 0x6474E550
"""Kinds of segments."""
SHT_SYMTAB, SHT_STRTAB, SHT_DYNSYM = 2, 3, 11
"""Kinds of sections."""

EV_CURRENT = 1
ELF_C_READ = 1
ELF_K_ELF = 3
DWARF_C_READ = 0
DW_TAG_STRUCTURE, DW_TAG_MEMBER, DW_AT_MEMBER_LOCATION = 0x13, 0x0D, 0x38

MAX_SECTIONS = 4096
MAX_SEGMENTS = 256
MAX_NAME = 4096
"""Bytes of a section's name that are read."""
MAX_OPERATIONS = 64
"""Operations of one DWARF expression. A longer expression counts as unknown."""
MAX_EH_FRAME = 128 << 20
"""Largest `.eh_frame` section that is used, in bytes: libdw reads the whole section."""
MAX_INFO = 32 << 20
"""Largest `.debug_info` section that is used, in bytes of the file: libdw reads and unpacks all of it."""
MAX_UNITS = 50_000
"""Compilation units that are searched. A large Go program has some thousands."""
MAX_CHILDREN = 200_000
"""Children of one DWARF entry that are searched."""


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

        Raises ElfError if the source is no ELF file; then a descriptor stays open.
        """
        self._elf_library, self._dw, self._libc = _libraries()
        self._source = source
        self._cfi: list[int] | None = None
        self._dwarf = 0
        self._handle = 0
        if isinstance(source, bytes):
            handle = self._elf_library.elf_memory(source, len(source)) if source else None
            self.size = self.memory = len(source)
        else:
            handle = self._elf_library.elf_begin(source, ELF_C_READ, None)
            self.size, self.memory = os.fstat(source).st_size, 0
        if not handle:
            raise ElfError("libelf cannot read the file")
        self._handle = handle
        try:
            self._read_headers()
        except BaseException:
            self._end()
            raise

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
        for i in range(min(count.value, MAX_SEGMENTS)):
            header = _Phdr()
            if self._elf_library.gelf_getphdr(self._handle, i, byref(header)):
                yield Segment(
                    header.p_type, header.p_flags, header.p_offset, header.p_vaddr, header.p_filesz,
                    header.p_memsz, header.p_align,
                )  # fmt: skip

    def _sections(self) -> Iterator[Section]:
        """All sections but ELF's section 0, which means "no section": section i of ELF is element i - 1."""
        elf = self._elf_library
        names = c_size_t()
        if elf.elf_getshdrstrndx(self._handle, byref(names)):
            return
        section = elf.elf_nextscn(self._handle, None)
        for _ in range(MAX_SECTIONS):
            header = _Shdr()
            if not section or not elf.gelf_getshdr(section, byref(header)):
                return
            name = elf.elf_strptr(self._handle, names.value, header.sh_name) or b""
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
        pointer = c_void_p()
        size = self._dw.dwelf_elf_gnu_build_id(self._handle, byref(pointer))
        return ctypes.string_at(pointer.value, size) if 0 < size <= 64 and pointer.value else b""

    @property
    def debug_link(self) -> tuple[bytes, int]:
        """Name and CRC-32 of the separate debug file, by `.gnu_debuglink`; an empty name if there is none."""
        crc = c_uint()
        return self._dw.dwelf_elf_gnu_debuglink(self._handle, byref(crc)) or b"", crc.value

    def member_offset(self, unit: str, structure: str, member: str) -> int | None:
        """The offset of a struct's member in bytes, by the DWARF of the compilation unit named `unit`.

        Returns None if the file has no such unit, struct or member, or more DWARF than MAX_INFO.
        """
        size = sum(s.size for s in self.sections if s.name in (".debug_info", ".zdebug_info"))
        dwarf = self._dw.dwarf_begin_elf(self._handle, DWARF_C_READ, None) if 0 < size <= MAX_INFO else None
        if not dwarf:
            return None
        try:
            units = itertools.islice(self._units(dwarf), MAX_UNITS)
            die = next((one for one in units if self._dw.dwarf_diename(byref(one)) == unit.encode()), None)
            struct = next(self._children(die, DW_TAG_STRUCTURE, structure), None) if die else None
            field = next(self._children(struct, DW_TAG_MEMBER, member), None) if struct else None
            return self._number(field, DW_AT_MEMBER_LOCATION) if field else None
        finally:
            self._dw.dwarf_end(dwarf)

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

    def rule(self, address: int, registers: int, use_debug_frame: bool) -> UnwindRule | None:
        """The unwinding rule for an address of the file (not of memory).

        Returns None if neither `.eh_frame` nor `.debug_frame` has a rule for the address.

        `registers` is how many DWARF registers the rule covers, from number 0. `use_debug_frame` allows
        `.debug_frame`, for which libdw opens all DWARF of the file. The first call decides about that.
        """
        for cfi in self._cfi_tables(use_debug_frame):
            frame = c_void_p()
            if self._dw.dwarf_cfi_addrframe(cfi, address, byref(frame)) == 0 and frame.value:
                try:
                    return self._rule(frame, registers)
                finally:
                    self._libc.free(frame)
        return None

    def _cfi_tables(self, use_debug_frame: bool) -> list[int]:
        if self._cfi is None:
            sizes = [s.size for s in self.sections if s.name == ".eh_frame"] or [self.size]
            cfi = self._dw.dwarf_getcfi_elf(self._handle) if max(sizes) <= MAX_EH_FRAME else None
            self._cfi = [cfi] if cfi else []
            self._eh_frame = self._cfi[0] if self._cfi else 0
            if use_debug_frame:
                self._dwarf = self._dw.dwarf_begin_elf(self._handle, DWARF_C_READ, None) or 0
                debug = self._dw.dwarf_getcfi(self._dwarf) if self._dwarf else None
                self._cfi += [debug] if debug else []
        return self._cfi

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
        """Free what elfutils holds, and close the descriptor that the file was made from."""
        if not self._handle:
            return
        self._end()
        if isinstance(self._source, int):
            os.close(self._source)

    def _end(self) -> None:
        if self._cfi:
            if self._eh_frame:
                self._dw.dwarf_cfi_end(self._eh_frame)
            self._cfi = None
        if self._dwarf:
            self._dw.dwarf_end(self._dwarf)
        if self._handle:
            self._elf_library.elf_end(self._handle)
        self._handle = self._dwarf = 0

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # __init__ failed before it set the attributes
            self.close()


def _expression(operations: Any, count: int) -> tuple[Operation, ...]:
    if count > MAX_OPERATIONS:
        return ()
    return tuple((int(op.atom), int(op.number), int(op.number2)) for op in operations[:count])
