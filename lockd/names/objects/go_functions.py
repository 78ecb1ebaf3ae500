"""Functions of Go programs by the table that their own runtime needs, and that no strip takes away."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from lockd.names.objects.libdw import Elf
from lockd.names.objects.symbols import MAX_NAME, Named, Symbol

SECTIONS = (".gopclntab", ".data.rel.ro.gopclntab")
MAGICS = (0xFFFFFFF0, 0xFFFFFFF1)
"""Of Go 1.18 and of 1.20 and later."""
HEADER = struct.Struct("<IHBBQQQQQQQQ")
MAX_FUNCTIONS = 2_000_000


class GoFunctions:
    """A table like SymbolTable, empty for what is no Go program of 64 bits, or an older one."""

    def __init__(self, elf: Elf) -> None:
        self._elf = elf
        self._entries = np.zeros((0, 2), np.uint32)
        self._start = self._end = 0
        table = next((s for s in elf.sections if s.name in SECTIONS), None)
        text = next((s for s in elf.sections if s.name == ".text"), None)
        header = elf.read(table.offset, HEADER.size) if table else b""
        if not table or not text or len(header) < HEADER.size or not elf.is_64 or not elf.is_little:
            return
        magic, _, _, word, count, _, start, names, _, _, _, functions = HEADER.unpack(header)
        if magic not in MAGICS or word != 8 or count > MAX_FUNCTIONS or max(names, functions) >= table.size:
            return
        self._start, self._end = start or text.address, text.address + text.size
        self._names = table.offset + names
        self._functions = table.offset + functions
        data = elf.read(self._functions, 8 * count)
        self._entries = np.frombuffer(data, "<u4", count=len(data) // 8 * 2).reshape(-1, 2).copy()

    @property
    def memory(self) -> int:
        """Bytes that it takes, about."""
        return self._entries.nbytes

    def function(self, address: int) -> Symbol | None:
        offset = address - self._start
        if not 0 <= offset < 2**32 or address >= self._end or not len(self._entries):
            return None
        at = int(np.searchsorted(self._entries[:, 0], np.uint32(offset), side="right")) - 1
        if at < 0:
            return None
        begins, about = (int(number) for number in self._entries[at])
        name = self._name(about)
        ends = int(self._entries[at + 1][0]) if at + 1 < len(self._entries) else self._end - self._start
        size = max(0, ends - begins)
        return Symbol(name, self._start + begins, size) if name else None

    def functions(self) -> Iterator[Named]:
        """All of them with their names, read from the file anew."""
        for begins, about in self._entries.tolist():
            if name := self._name(about):
                yield Named(name, self._start + begins, False)

    def _name(self, about: int) -> str:
        """Of the function that is described there; empty if it has none."""
        data = self._elf.read(self._functions + about, 8)
        if len(data) < 8:
            return ""
        name = self._elf.read(self._names + int.from_bytes(data[4:], "little"), MAX_NAME).partition(b"\0")[0]
        return name.decode("utf-8", "backslashreplace")

    def variable(self, _address: int) -> Symbol | None:
        """It tells of none."""
        return None

    def thread_local(self, _offset: int) -> Symbol | None:
        """It tells of none."""
        return None
