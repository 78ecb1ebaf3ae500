"""Declarations of elfutils' libraries: the structures and functions of libelf and libdw that are used."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_uint64, c_void_p
from typing import Any

EV_CURRENT = 1


class ElfError(Exception):
    """A file is not ELF, or so damaged that nothing of it can be used."""


class Ehdr(ctypes.Structure):
    _fields_ = (
        ("e_ident", c_uint8 * 16), ("e_type", ctypes.c_uint16), ("e_machine", ctypes.c_uint16),
        ("e_version", c_uint), ("e_entry", c_uint64), ("e_phoff", c_uint64), ("e_shoff", c_uint64),
        ("e_flags", c_uint), ("e_ehsize", ctypes.c_uint16), ("e_phentsize", ctypes.c_uint16),
        ("e_phnum", ctypes.c_uint16), ("e_shentsize", ctypes.c_uint16), ("e_shnum", ctypes.c_uint16),
        ("e_shstrndx", ctypes.c_uint16),
    )  # fmt: skip


class Phdr(ctypes.Structure):
    _fields_ = (
        ("p_type", c_uint), ("p_flags", c_uint), ("p_offset", c_uint64), ("p_vaddr", c_uint64),
        ("p_paddr", c_uint64), ("p_filesz", c_uint64), ("p_memsz", c_uint64), ("p_align", c_uint64),
    )  # fmt: skip


class Shdr(ctypes.Structure):
    _fields_ = (
        ("sh_name", c_uint), ("sh_type", c_uint), ("sh_flags", c_uint64), ("sh_addr", c_uint64),
        ("sh_offset", c_uint64), ("sh_size", c_uint64), ("sh_link", c_uint), ("sh_info", c_uint),
        ("sh_addralign", c_uint64), ("sh_entsize", c_uint64),
    )  # fmt: skip


class Operation(ctypes.Structure):
    _fields_ = (("atom", c_uint8), ("number", c_uint64), ("number2", c_uint64), ("offset", c_uint64))


Operations = POINTER(Operation)


class Die(ctypes.Structure):
    """An entry of DWARF."""

    _fields_ = (("addr", c_void_p), ("cu", c_void_p), ("abbrev", c_void_p), ("padding", ctypes.c_long))


class Attribute(ctypes.Structure):
    _fields_ = (("code", c_uint), ("form", c_uint), ("valp", c_void_p), ("cu", c_void_p))


_LIBELF: dict[str, tuple[Any, list[Any]]] = {
    "elf_version": (c_uint, [c_uint]),
    "elf_begin": (c_void_p, [c_int, c_int, c_void_p]),
    "elf_memory": (c_void_p, [c_char_p, c_size_t]),
    "elf_end": (c_int, [c_void_p]),
    "elf_kind": (c_int, [c_void_p]),
    "gelf_getclass": (c_int, [c_void_p]),
    "gelf_getehdr": (c_void_p, [c_void_p, POINTER(Ehdr)]),
    "elf_getphdrnum": (c_int, [c_void_p, POINTER(c_size_t)]),
    "gelf_getphdr": (c_void_p, [c_void_p, c_int, POINTER(Phdr)]),
    "elf_nextscn": (c_void_p, [c_void_p, c_void_p]),
    "elf_getshdrstrndx": (c_int, [c_void_p, POINTER(c_size_t)]),
    "gelf_getshdr": (c_void_p, [c_void_p, POINTER(Shdr)]),
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
    "dwarf_frame_cfa": (c_int, [c_void_p, POINTER(Operations), POINTER(c_size_t)]),
    "dwarf_nextcu": (
        c_int,
        [c_void_p, c_uint64, POINTER(c_uint64), POINTER(c_size_t), c_void_p, c_void_p, c_void_p],
    ),
    "dwarf_offdie": (c_void_p, [c_void_p, c_uint64, POINTER(Die)]),
    "dwarf_child": (c_int, [POINTER(Die), POINTER(Die)]),
    "dwarf_siblingof": (c_int, [POINTER(Die), POINTER(Die)]),
    "dwarf_tag": (c_int, [POINTER(Die)]),
    "dwarf_diename": (c_char_p, [POINTER(Die)]),
    "dwarf_attr": (c_void_p, [POINTER(Die), c_uint, POINTER(Attribute)]),
    "dwarf_formudata": (c_int, [POINTER(Attribute), POINTER(c_uint64)]),
    "dwarf_frame_register": (
        c_int,
        [c_void_p, c_int, POINTER(Operation), POINTER(Operations), POINTER(c_size_t)],
    ),
}


@functools.cache
def libraries() -> tuple[Any, Any, Any]:
    """libelf, libdw and the C library. ElfError if elfutils is not installed."""
    try:
        elf, dw = ctypes.CDLL("libelf.so.1"), ctypes.CDLL("libdw.so.1")
    except OSError as error:
        raise ElfError(f"elfutils' libraries cannot be loaded: {error}") from None
    for library, functions in ((elf, _LIBELF), (dw, _LIBDW)):
        for name, (result, arguments) in functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    if not elf.elf_version(EV_CURRENT):
        raise ElfError(f"libelf does not know version {EV_CURRENT} of ELF")
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [c_void_p]
    libc.free.restype = None
    return elf, dw, libc
