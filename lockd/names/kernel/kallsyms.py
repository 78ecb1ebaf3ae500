"""Kernel symbols from /proc/kallsyms: functions of a stack, names of static locks."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Container, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockd.names.kernel.kernel_sites import is_helper, is_locking, is_tracing

SHOWN_FRAMES = 16
ADDRESS_DIGITS = 16
KIND, NAME = ADDRESS_DIGITS + 1, ADDRESS_DIGITS + 3
"""Where in a line of kallsyms the address ends, the letter is and the name begins."""
PACKED_BYTES = 1 << 14
"""Of lines whose names are compressed together."""
UNPACKED = 16
"""Of those pieces, how many are kept as they are."""
KERNEL, MODULE, MADE = range(3)
"""Whose a symbol is: the kernel's own, a module's, of code that was made at run time."""


class KernelSymbols:
    """Addresses to names. If the kernel hides its addresses (kptr_restrict), nothing has a name.

    `modules` tells where modules end. Behind one may lie code that BPF has made: not the module's.
    """

    def __init__(
        self, kallsyms: Path = Path("/proc/kallsyms"), modules: Path = Path("/proc/modules")
    ) -> None:
        places = _places(modules)
        self._module_starts = np.array(sorted(start for start, _ in places.values()), np.uint64)
        self._module_ends = np.array(sorted(end for _, end in places.values()), np.uint64)
        # Names take 3 to 6 MB, and few are ever asked for: they are kept packed, some lines at a time.
        self._packed: list[bytes] = []
        self._unpacked: dict[int, list[str]] = {}
        counts, kinds, owners = [0], bytearray(), bytearray()
        addresses: list[npt.NDArray[np.uint64]] = []
        # Without CONFIG_KALLSYMS_ALL only a few marks are listed, and what lies behind one is anything.
        self._has_variables = False
        with kallsyms.open("rb") as file:
            while lines := file.readlines(PACKED_BYTES):
                counts.append(len(lines))
                addresses.append(_hexadecimal(line[:ADDRESS_DIGITS] for line in lines))
                kinds += bytes(line[KIND] for line in lines)
                owners += bytes(_owner(line, places) for line in lines)
                names = b"".join(line[NAME:] for line in lines)
                self._packed.append(zlib.compress(names, level=1))
                self._has_variables |= b"\ninit_task\n" in b"\n" + names
        self._firsts = np.cumsum(counts, dtype=np.uint32)
        """The number, in the order of the file, of the first symbol of each piece that is packed."""
        unordered = np.concatenate([*addresses, np.zeros(0, np.uint64)])
        self._order = np.argsort(unordered, kind="stable").astype(np.uint32)
        self._addresses = unordered[self._order]
        self._kinds, self._owners = (
            np.frombuffer(of, np.uint8)[self._order].tobytes() for of in (kinds, owners)
        )

    def function(self, address: int) -> str:
        """The function that holds `address`; empty if none is known."""
        at = self._function_at(address)
        return self._name(at) if at >= 0 else ""

    def place(self, address: int) -> str:
        """The function, the offset in it, its module in brackets; the address itself if none is known."""
        at = self._function_at(address)
        if at < 0:
            return f"{address:#x}"
        module = self._listed(at).partition("\t")[2]
        return f"{self._name(at)}+{address - int(self._addresses[at]):#x}{module and ' '}{module}"

    def variable(self, address: int) -> str:
        """The variable at `address` or into which it points; empty if it is no static data."""
        if not self._has_variables:
            return ""
        at = self._at(address)
        if at < 0 or self._kinds[at] not in b"bBdDrRvV" or address - int(self._addresses[at]) > 65536:
            return ""
        offset = address - int(self._addresses[at])
        return self._name(at) + (f"+{offset:#x}" if offset else "")

    def neighbours(self, name: str, is_one: Callable[[str], bool]) -> tuple[int, int]:
        """Address and size of the function `name` with those behind it that `is_one` is true of."""
        wanted = re.compile(re.escape(name) + r"(?:[.\t]|$)")
        first = next((at for at in range(len(self._addresses)) if wanted.match(self._listed(at))), -1)
        if first < 0:
            return 0, 0
        last = first
        while last < len(self._addresses) and is_one(self._name(last)):
            last += 1
        start = int(self._addresses[first])
        return start, int(self._addresses[min(last, len(self._addresses) - 1)]) - start

    def callers(self, stack: tuple[int, ...]) -> tuple[str, ...]:
        """The functions of a stack that are neither the locks' own nor there to trace, innermost first."""
        names = (self.function(address) for address in stack)
        return tuple(name for name in names if name and not is_locking(name) and not is_tracing(name))

    def site(self, stack: tuple[int, ...]) -> str:
        """The place that locks: the first function that does more than that; empty if there is none."""
        callers = self.callers(stack)
        return next((name for name in callers if not is_helper(name)), "") or next(iter(callers), "")

    def describe(self, stack: tuple[int, ...], most: int = SHOWN_FRAMES) -> tuple[str, ...]:
        """The functions of a stack, innermost first and `most` of them, without the tracing on top."""
        return tuple(self.function(address) or f"{address:#x}" for address in self.traced(stack)[:most])

    def traced(self, stack: tuple[int, ...]) -> tuple[int, ...]:
        """A stack without the tracing on top."""
        names = (self.function(address) for address in stack)
        return stack[next((i for i, name in enumerate(names) if name and not is_tracing(name)), 0) :]

    def _function_at(self, address: int) -> int:
        """The number of the symbol that holds it; -1 if there is none, or it is no function."""
        at = self._at(address)
        if at < 0 or self._kinds[at] not in b"tTwW":
            return -1
        return at if self._owners[at] != MODULE or self._is_in_module(address) else -1

    def _at(self, address: int) -> int:
        """The number of the last symbol before it; of several at one address the same on every host."""
        last = int(np.searchsorted(self._addresses, np.uint64(address), side="right")) - 1
        if last < 0 or not self._addresses[last]:
            return -1
        first = int(np.searchsorted(self._addresses, self._addresses[last]))
        return max(range(first, last + 1), key=lambda at: (self._kinds[at], self._listed(at)))

    def _is_in_module(self, address: int) -> bool:
        at = int(np.searchsorted(self._module_starts, np.uint64(address), side="right")) - 1
        return at >= 0 and address < int(self._module_ends[at])

    def _listed(self, at: int) -> str:
        """As kallsyms has it, a module in brackets behind a tab."""
        number = int(self._order[at])
        piece = int(np.searchsorted(self._firsts, number, side="right")) - 1
        if piece not in self._unpacked:
            if len(self._unpacked) >= UNPACKED:
                self._unpacked.clear()
            names = zlib.decompress(self._packed[piece]).decode("ascii", "replace")
            self._unpacked[piece] = names.split("\n")
        return self._unpacked[piece][number - int(self._firsts[piece])]

    def _name(self, at: int) -> str:
        name = self._listed(at).partition("\t")[0]
        # Compilers add .isra.0, .constprop.0, .part.0; they say nothing to a reader.
        return re.sub(r"\.(?:isra|constprop|part|cold|llvm)\b.*", "", name)


def _owner(line: bytes, modules: Container[bytes]) -> int:
    _, _, owner = line.rstrip().partition(b"\t")
    return MODULE if owner in modules else MADE if owner else KERNEL


def _hexadecimal(digits: Iterable[bytes]) -> npt.NDArray[np.uint64]:
    """Numbers of 64 bits."""
    return np.frombuffer(bytes.fromhex(b"".join(digits).decode("ascii")), ">u8").astype(np.uint64)


def _places(modules: Path) -> dict[bytes, tuple[int, int]]:
    """Beginning and end of each module's code, by name as in kallsyms."""
    try:
        lines = modules.read_bytes().splitlines()
    except FileNotFoundError:  # a kernel without modules
        return {}
    found = {}
    for line in lines:
        fields = line.split()
        start = int(fields[5], 16) if len(fields) > 5 else 0
        if start:  # else it is hidden
            found[b"[" + fields[0] + b"]"] = start, start + int(fields[1])
    return found
