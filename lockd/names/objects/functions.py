"""The functions of an object file by their names: where in the file each begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockd.names.objects.elf import EM_X86_64, ObjectFile
from lockd.names.objects.symbols import Named


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


def tail_callers(file: ObjectFile, is_wanted: Callable[[str], bool]) -> dict[int, tuple[str, ...]]:
    """Functions without a name by where they begin, each with the wanted functions that end in a jump to it.

    As a jump leaves no trace on the stack, such a function is there in place of the one that was called:
    `pthread_once` leaves all but the quick check to one that only the C library itself knows. A plain and
    short name comes first.
    """
    found: dict[int, set[str]] = {}
    if file.has_full_symbols or file.machine != EM_X86_64:
        return {}
    for entry in functions_by_name(file, is_wanted):
        symbol = file.function(entry.address)
        for target in file.jumps(range(entry.address, entry.address + (symbol.size if symbol else 0))):
            if file.function_start(target) == target and not file.function(target):
                found.setdefault(target, set()).add(entry.names[0])
    return {address: tuple(sorted(names, key=_plainest)) for address, names in found.items()}


def all_functions(file: ObjectFile) -> Iterator[Named]:
    """Of every table; a function may come several times."""
    for table in file.tables:
        yield from table.functions()


def _plainest(name: str) -> tuple[int, int, str]:
    return len(name) - len(name.lstrip("_")), len(name), name
