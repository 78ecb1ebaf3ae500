"""Kernel symbols from /proc/kallsyms: functions of a stack, names of static locks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

LOCKING = re.compile(
    r"^(?:bpf_|__bpf_|trace_|__trace|perf_|___?bpf|(?:arch_|__)?(?:ftrace|kprobe|kretprobe|rethook)_"
    r"|(?:__)?(?:mutex|ww_mutex|rt_mutex|rtlock|rwbase|rwsem|percpu|down|up|lock)(?:_|$)"
    r"|(?:__)?(?:down|up)$|__down_common|___down_common"
    r"|(?:__)?(?:raw|pv|native|do_raw|queued|resilient)_|_raw_|schedule)"
)
"""Functions that are the locking itself, or the tracing of it, rather than a place that locks."""
SHOWN_FRAMES = 16


class KernelSymbols:
    """Addresses to names. If the kernel hides its addresses (kptr_restrict), nothing has a name."""

    def __init__(self, kallsyms: Path = Path("/proc/kallsyms")) -> None:
        addresses: list[int] = []
        names: list[bytes] = []
        kinds = bytearray()
        for line in sorted(kallsyms.read_bytes().splitlines()):  # fixed-width hexadecimal first
            fields = line.split()
            addresses.append(int(fields[0], 16))
            kinds.append(fields[1][0])
            names.append(fields[2])
        self._addresses = np.array(addresses, np.uint64)
        self._kinds = bytes(kinds)
        # One bytes object: a list of 200,000 small ones would take ten times the memory.
        self._ends = np.cumsum([len(name) for name in names], dtype=np.uint32)
        # Without CONFIG_KALLSYMS_ALL only a few marks are listed, and what lies behind one is anything.
        self._has_variables = b"init_task" in names
        self._text = b"".join(names)

    def function(self, address: int) -> str:
        """The function that holds `address`; empty if none is known."""
        at = self._at(address)
        return self._name(at) if at >= 0 and self._kinds[at] in b"tTwW" else ""

    def variable(self, address: int) -> str:
        """The variable at `address` or into which it points; empty if it is no static data."""
        if not self._has_variables:
            return ""
        at = self._at(address)
        if at < 0 or self._kinds[at] not in b"bBdDrRvV" or address - int(self._addresses[at]) > 65536:
            return ""
        offset = address - int(self._addresses[at])
        return self._name(at) + (f"+{offset:#x}" if offset else "")

    def site(self, stack: tuple[int, ...]) -> str:
        """The first function of a stack that is not itself locking; empty if there is none."""
        for address in stack:
            name = self.function(address)
            if name and not LOCKING.match(name):
                return name
        return ""

    def describe(self, stack: tuple[int, ...]) -> tuple[str, ...]:
        """The functions of a stack, innermost first, without the tracing on top."""
        names = [self.function(address) or f"{address:#x}" for address in stack]
        first = next((i for i, name in enumerate(names) if not _is_tracing(name)), 0)
        return tuple(names[first : first + SHOWN_FRAMES])

    def _at(self, address: int) -> int:
        at = int(np.searchsorted(self._addresses, np.uint64(address), side="right")) - 1
        return at if at >= 0 and self._addresses[at] else -1

    def _name(self, at: int) -> str:
        start = int(self._ends[at - 1]) if at else 0
        name = self._text[start : int(self._ends[at])].decode("ascii", "replace")
        # Compilers add .isra.0, .constprop.0, .part.0; they say nothing to a reader.
        return re.sub(r"\.(?:isra|constprop|part|cold|llvm)\b.*", "", name)


def _is_tracing(name: str) -> bool:
    return name.startswith(("bpf_", "__bpf_", "trace_", "__trace", "perf_", "ftrace_", "0x"))
