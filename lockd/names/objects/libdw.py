"""The door to elfutils: headers of ELF files by libelf, rules for unwinding by libdw."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from lockd.names.objects import elfutils
from lockd.names.objects.elfutils import ElfError

__all__ = ["Elf", "ElfError", "Operation", "Rule", "Section", "Segment"]

ELF_C_READ = 1
ELF_K_ELF = 3
DWARF_C_READ = 0

MAX_SECTIONS = 4096
MAX_SEGMENTS = 256
MAX_NAME = 4096
MAX_OPERATIONS = 64
MAX_EH_FRAME = 128 << 20
"""Bytes: libdw reads all of it."""
MAX_INFO = 32 << 20
"""Bytes of `.debug_info`, compressed as it may be: libdw reads and unpacks all of it."""
MAX_CHILDREN = 200_000
DW_TAG_STRUCTURE, DW_TAG_MEMBER, DW_AT_MEMBER_LOCATION = 0x13, 0x0D, 0x38


@dataclass(frozen=True)
class Segment:
    kind: int
    flags: int
    offset: int
    address: int
    file_size: int
    memory_size: int
    align: int


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int


Operation = tuple[int, int, int]
"""A DWARF operation: its code and its two operands, which are unsigned and 64 bits wide."""


@dataclass(frozen=True)
class Rule:
    """How the registers of the caller are found at one place in the code.

    Of `registers`, by DWARF number: an expression for the register's address, or for its value if
    it ends so; none if the register is lost. Those not listed keep their values.
    """

    cfa: tuple[Operation, ...]
    registers: dict[int, tuple[Operation, ...] | None]
    return_register: int
    is_signal: bool


class Elf:
    """One ELF file by an open descriptor, which it keeps, or by its bytes.

    Read by libelf in pieces, never mapped: a file that shrinks meanwhile gives errors, not signals.
    """

    def __init__(self, source: int | bytes) -> None:
        self._elf_library, self._dw, self._libc = elfutils.libraries()
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
            raise ElfError("libelf cannot read it")
        self._handle = handle
        try:
            self._read_headers()
        except BaseException:
            self._end()
            raise

    def _read_headers(self) -> None:
        elf = self._elf_library
        header = elfutils.Ehdr()
        if elf.elf_kind(self._handle) != ELF_K_ELF or not elf.gelf_getehdr(self._handle, byref(header)):
            raise ElfError("no ELF header")
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
            one = elfutils.Phdr()
            if self._elf_library.gelf_getphdr(self._handle, i, byref(one)):
                yield Segment(
                    one.p_type, one.p_flags, one.p_offset, one.p_vaddr, one.p_filesz, one.p_memsz, one.p_align
                )

    def _sections(self) -> Iterator[Section]:
        """All but the first, which stands for none: number i of ELF is at i - 1."""
        elf = self._elf_library
        names = c_size_t()
        if elf.elf_getshdrstrndx(self._handle, byref(names)):
            return
        section = elf.elf_nextscn(self._handle, None)
        for _ in range(MAX_SECTIONS):
            one = elfutils.Shdr()
            if not section or not elf.gelf_getshdr(section, byref(one)):
                return
            name = elf.elf_strptr(self._handle, names.value, one.sh_name) or b""
            yield Section(
                name[:MAX_NAME].decode("utf-8", "backslashreplace"),
                one.sh_type, one.sh_flags, one.sh_addr, one.sh_offset, one.sh_size, one.sh_link,
            )  # fmt: skip
            section = elf.elf_nextscn(self._handle, section)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the file; fewer at its end."""
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
        """Empty if it has none."""
        pointer = c_void_p()
        size = self._dw.dwelf_elf_gnu_build_id(self._handle, byref(pointer))
        return ctypes.string_at(pointer.value, size) if 0 < size <= 64 and pointer.value else b""

    @property
    def debug_link(self) -> tuple[bytes, int]:
        """The name of the file that holds what was stripped, and its CRC; an empty name if there is none."""
        crc = c_uint()
        return self._dw.dwelf_elf_gnu_debuglink(self._handle, byref(crc)) or b"", crc.value

    def member_offset(self, unit: str, structure: str, member: str) -> int | None:
        """Where in a struct its member is, in bytes, as the DWARF of a compilation unit says; else none."""
        about = sum(s.size for s in self.sections if s.name in (".debug_info", ".zdebug_info"))
        dwarf = self._dw.dwarf_begin_elf(self._handle, DWARF_C_READ, None) if 0 < about <= MAX_INFO else None
        if not dwarf:
            return None
        try:
            for die in self._units(dwarf):
                if self._dw.dwarf_diename(byref(die)) != unit.encode():
                    continue
                for one in self._children(die, DW_TAG_STRUCTURE, structure):
                    for field in self._children(one, DW_TAG_MEMBER, member):
                        return self._number(field, DW_AT_MEMBER_LOCATION)
        finally:
            self._dw.dwarf_end(dwarf)
        return None

    def _units(self, dwarf: int) -> Iterator[elfutils.Die]:
        at, following, header = 0, c_uint64(), c_size_t()
        while self._dw.dwarf_nextcu(dwarf, at, byref(following), byref(header), None, None, None) == 0:
            die = elfutils.Die()
            if self._dw.dwarf_offdie(dwarf, at + header.value, byref(die)):
                yield die
            at = following.value

    def _children(self, of: elfutils.Die, tag: int, name: str) -> Iterator[elfutils.Die]:
        """Those with this tag and name."""
        die = elfutils.Die()
        failed = self._dw.dwarf_child(byref(of), byref(die))
        for _ in range(MAX_CHILDREN):
            if failed:
                return
            if self._dw.dwarf_tag(byref(die)) == tag and self._dw.dwarf_diename(byref(die)) == name.encode():
                yield die
            failed = self._dw.dwarf_siblingof(byref(die), byref(die))

    def _number(self, die: elfutils.Die, attribute: int) -> int | None:
        found, number = elfutils.Attribute(), c_uint64()
        if not self._dw.dwarf_attr(byref(die), attribute, byref(found)):
            return None
        return number.value if self._dw.dwarf_formudata(byref(found), byref(number)) == 0 else None

    def rule(self, address: int, registers: int, use_debug_frame: bool) -> Rule | None:
        """How to unwind from an address of the file (not of memory); none if the file does not say.

        `registers` are the DWARF numbers to ask for, from 0. `.debug_frame` takes reading the file's DWARF.
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

    def _rule(self, frame: c_void_p, registers: int) -> Rule | None:
        operations, count, is_signal = elfutils.Operations(), c_size_t(), ctypes.c_bool()
        return_register = self._dw.dwarf_frame_info(frame, None, None, byref(is_signal))
        if return_register < 0 or self._dw.dwarf_frame_cfa(frame, byref(operations), byref(count)):
            return None
        cfa = _expression(operations, count.value)
        if not cfa:
            return None
        saved: dict[int, tuple[Operation, ...] | None] = {}
        memory = (elfutils.Operation * 3)()
        for register in range(registers):
            if self._dw.dwarf_frame_register(frame, register, memory, byref(operations), byref(count)):
                continue
            if count.value:
                saved[register] = _expression(operations, count.value)
            elif operations:
                saved[register] = None
        return Rule(cfa, saved, return_register, is_signal.value)

    def close(self) -> None:
        """Gives the descriptor back as well."""
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
        with contextlib.suppress(AttributeError):  # it was not made
            self.close()


def _expression(operations: Any, count: int) -> tuple[Operation, ...]:
    if count > MAX_OPERATIONS:
        return ()
    return tuple((int(op.atom), int(op.number), int(op.number2)) for op in operations[:count])
