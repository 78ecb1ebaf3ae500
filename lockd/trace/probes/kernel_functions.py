"""The functions of the running kernel that probes can be put on, by pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lockd.errors import HostError, UsageError
from lockd.trace.probes.patterns import Pattern

_FUNCTION = re.compile(rb"^([0-9a-f]+) [tTwW] (\S+)(?:\t\[(\w+)\])?$", re.MULTILINE)
_COPY = re.compile(r"\.(?:isra|constprop|part|llvm)\b.*")
"""What compilers append to the names of copies of a function."""
_NEVER = re.compile(r"__(?:pfx|cfi)_.*|.*\.cold(?:\.\d+)?")
"""Not functions, but what lies before them, or parts that others jump to."""
MADE_AT_RUN_TIME = (b"bpf", b"__builtin__ftrace", b"__builtin__kprobes")
FILTER = "available_filter_functions"


@dataclass(frozen=True)
class KernelFunctions:
    """What was found. `left_out`: for each reason the functions that it is true of."""

    names: tuple[str, ...]
    left_out: dict[str, tuple[str, ...]]


class Kernel:
    """What a kernel says of its functions: files as in procfs, tracefs and debugfs. The last two may be
    missing, or not be for us to read."""

    def __init__(
        self,
        tracefs: Path,
        kallsyms: Path = Path("/proc/kallsyms"),
        blacklist: Path = Path("/sys/kernel/debug/kprobes/blacklist"),
    ) -> None:
        self._kallsyms = kallsyms
        self._filter = tracefs / FILTER
        self._blacklist = blacklist

    def find(self, pattern: Pattern) -> KernelFunctions:
        """The functions that match. Raises UsageError if none does, HostError if the kernel hides them."""
        addresses = self._functions()
        is_meant = pattern.matcher()
        matching = [name for name in addresses if is_meant(name)]
        if not matching and pattern.is_exact:
            matching = [name for name in addresses if is_meant(_COPY.sub("", name))]
        if not matching:
            raise UsageError(
                f"{pattern.name}: none of the {len(addresses):,} functions of this kernel ({self._kallsyms}) "
                f"matches{'' if not pattern.is_exact else ', or the compiler has inlined it'}"
                f"{pattern.nearest(addresses)}"
            )
        blacklisted, traceable = self._blacklisted(), self._traceable()
        names: list[str] = []
        left_out: dict[str, list[str]] = {}
        for name in matching:
            if name in blacklisted:
                reason = "the kernel allows no probes on it (kprobes/blacklist)"
            elif traceable and name not in traceable:
                reason = f"it cannot be traced ({FILTER})"
            elif addresses[name] > 1:
                reason = "several functions have that name"
            else:
                names.append(name)
                continue
            left_out.setdefault(reason, []).append(name)
        return KernelFunctions(tuple(names), {reason: tuple(some) for reason, some in left_out.items()})

    def _functions(self) -> dict[str, int]:
        """How many places each name stands for; without what is gone since the kernel has started."""
        text = self._kallsyms.read_bytes()
        found = _FUNCTION.findall(text)
        starts = {name: address for address, name, _ in found if name in (b"_sinittext", b"_einittext")}
        first, last = starts.get(b"_sinittext", b""), starts.get(b"_einittext", b"")
        counts: dict[str, int] = {}
        for address, name, owner in found:
            if owner in MADE_AT_RUN_TIME or first <= address < last:
                continue
            text_name = name.decode()
            if not _NEVER.fullmatch(text_name):
                counts[text_name] = counts.get(text_name, 0) + 1
        if not any(int(address, 16) for address, _, _ in found[:100]):
            raise HostError(
                f"{self._kallsyms}: the kernel hides its functions (kernel.kptr_restrict) or lists none"
            )
        return counts

    def _blacklisted(self) -> set[str]:
        """Lines of 0xSTART-0xEND and a name."""
        return {line.split()[-1] for line in _lines(self._blacklist)}

    def _traceable(self) -> set[str]:
        """Names, those of modules with [MODULE]; empty if it is not told."""
        return {line.split()[0] for line in _lines(self._filter)}


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []
