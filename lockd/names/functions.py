"""The functions of an object file by their names: where in the file each begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockd.names.elf import ObjectFile
from lockd.names.symbols import Named


@dataclass(frozen=True)
class FunctionEntry:
    """All the names that one function has, of those that were wanted."""

    names: tuple[str, ...]
    """A plain and short one first."""
    address: int
    """The file's own, see ObjectFile.bias()."""
    offset: int
    """In the file; -1 if the address is not in it."""
    is_indirect: bool
    """Whether what is there chooses the function that is to be called (IFUNC), when the file is loaded."""


def functions_by_name(file: ObjectFile, is_wanted: Callable[[str], bool]) -> list[FunctionEntry]:
    """Those of which any name is wanted, by address."""
    found: dict[int, list[Named]] = {}
    for symbol in all_functions(file):
        if is_wanted(symbol.name):
            found.setdefault(symbol.address, []).append(symbol)
    return [
        FunctionEntry(
            names=tuple(sorted({one.name for one in symbols}, key=_plainest)),
            address=address,
            offset=file.file_offset(address),
            is_indirect=any(one.is_indirect for one in symbols),
        )
        for address, symbols in sorted(found.items())
    ]


def all_functions(file: ObjectFile) -> Iterator[Named]:
    """Of every table; a function may come several times."""
    for table in file.tables:
        yield from table.functions()


def _plainest(name: str) -> tuple[int, int, str]:
    return len(name) - len(name.lstrip("_")), len(name), name
