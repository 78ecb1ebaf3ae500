"""The futex calls of a trace: windows are merged into sums, and the sums become rows and histograms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lockd.columns.index import Hashes, mix
from lockd.columns.structs import Columns
from lockd.kernel.manifest import Manifest
from lockd.kernel.pairs import Entries
from lockd.names.labels.processes import text
from lockd.trace.core.histogram import Histogram
from lockd.trace.futex.lock_rows import LockRow

NameOf = Callable[[int, int, str], tuple[str, str]]
"""A function that returns the kind and the name of a lock. Its arguments are the process, the address, and
the kind that the arguments of the futex calls suggest, or an empty string."""

KEY = ("tgid", "tid", "uaddr", "kind", "slot", "error", "stack", "is_open")
SUMS = ("calls", "blocked_ns", "sys_ns")
MAXIMA = ("max_blocked_ns", "max_sys_ns")
CALLS = np.dtype([
    ("tgid", "u4"), ("tid", "u4"), ("uaddr", "u8"), ("kind", "u1"), ("slot", "u1"), ("error", "u1"),
    ("stack", "u8"), ("is_open", "u1"), *((name, "i8") for name in (*SUMS, *MAXIMA)),
])  # fmt: skip
"""A row of sums over all calls with the same KEY. `stack` is a number of CallStacks; `is_open` is 1 for waits
that were open at the end of the trace."""
MERGED_AT = 16384
"""The least number of rows that are collected before they are merged."""
MOST = 1 << 20
"""The most keys (values of KEY) that have rows of their own. These rows take about 100 MB. Calls with further
keys are counted without names."""
NAMES = ("tgid", "tid", "uaddr", "stack")
"""The columns of KEY that are 0 in a row without names."""
UNKNOWN = "[no room]"
"""The comm of calls that were counted without names."""


class FutexCalls:
    """The sums of all calls so far. `most` is the largest number of keys with rows of their own."""

    def __init__(self, manifest: Manifest, most: int = MOST) -> None:
        kinds = manifest.enums["futex_kind"]
        self.kinds = list(kinds)
        """Names of kinds, by their numbers in the programs. Kinds of waits come before `wake`."""
        self.wake, self.no_slot = kinds.index("wake"), manifest.constants["SLOT_NONE"]
        self.total = 0
        """Number of calls."""
        self.nameless = 0
        """Number of calls that were counted without names, because there were more than `most` keys."""
        self._most = most
        self._comms: dict[int, str] = {0: UNKNOWN}
        self._merged = np.empty(0, CALLS)
        self._parts: list[Columns] = []

    def add(self, taken: dict[str, Entries]) -> None:
        """Add the calls of a window, including those that the programs counted without names."""
        for name in ("futex", "futex_over"):
            if name in taken:
                keys, values = taken[name]
                part = np.zeros(len(keys), CALLS)
                for column in ("tid", "uaddr", "kind", "slot", "error"):
                    part[column] = keys[column]
                part["tgid"], part["stack"] = values["who"]["tgid"], keys["stacks"]["user"]
                for column in (*SUMS, *MAXIMA):
                    part[column] = values[column]
                who = values["who"][part["tgid"] > 0]
                self._comms.update(zip(who["tgid"].tolist(), map(text, who["comm"].tolist()), strict=True))
                self.add_rows(part)

    def add_rows(self, part: Columns) -> None:
        """Add rows of CALLS."""
        self.total += int(part["calls"].sum())
        self._parts.append(part)
        if sum(map(len, self._parts)) > max(MERGED_AT, len(self._merged)):
            self.merged()

    def name_process(self, tgid: int, comm: str) -> None:
        """Set the comm of a process, unless a BPF program has already reported one."""
        self._comms.setdefault(tgid, comm)

    def merged(self) -> Columns:
        """All calls so far as rows of CALLS, with one row for each key."""
        if self._parts:
            parts = np.concatenate([self._merged, *self._parts])
            self._make_room(parts)
            hashes = _hashes(parts)
            _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
            self._merged, self._parts = parts[first], []
            for name in SUMS:
                self._merged[name] = 0
                np.add.at(self._merged[name], which, parts[name])
            for name in MAXIMA:
                np.maximum.at(self._merged[name], which, parts[name])
        return self._merged

    def _make_room(self, parts: Columns) -> None:
        """Set the columns NAMES to 0 in rows with new keys for which there is no room (`most`)."""
        hashes = _hashes(parts)
        is_known = np.isin(hashes, _hashes(self._merged))
        fresh = np.unique(hashes[~is_known])
        excess = fresh[max(self._most - len(self._merged), 0) :]
        is_nameless = np.isin(hashes, excess) & (parts["tgid"] > 0)
        for name in NAMES:
            parts[name][is_nameless] = 0
        self.nameless += int(parts["calls"][is_nameless].sum())

    def rows(
        self, stack_of: Callable[[int], tuple[str, ...]], name_of: NameOf | None = None
    ) -> list[LockRow]:
        """A row for each combination of thread, address, stack and, with `name_of`, kind.

        `stack_of` returns the functions of a stack by its number, innermost first.
        """
        merged = self.merged()
        main_kinds = self._main_kinds(merged) if name_of else {}
        rows: dict[tuple[object, ...], LockRow] = {}
        named: dict[tuple[int, int, str], tuple[str, str]] = {}
        for call in map(_Call._make, merged.tolist()):
            guess = self.kinds[call.kind] if call.kind < self.wake else ""
            kind = lock = ""
            if name_of:
                question = call.tgid, call.uaddr, guess or main_kinds.get((call.tgid, call.uaddr), "")
                if question not in named:
                    named[question] = name_of(*question)
                kind, lock = named[question]
            stack = stack_of(call.stack)  # several numbers may stand for one stack
            key = call.tgid, call.tid, call.uaddr, stack, kind
            row = rows.get(key)
            if row is None:
                frames = tuple(reversed(stack))
                comm = self._comms.get(call.tgid, "")
                row = rows[key] = LockRow(call.tgid, call.tid, call.uaddr, comm, frames, kind, lock)
            self._add_to(row, call)
        return list(rows.values())

    def _add_to(self, row: LockRow, call: _Call) -> None:
        row.blocked_ns += call.blocked_ns
        row.sys_ns += call.sys_ns
        row.max_blocked_ns = max(row.max_blocked_ns, call.max_blocked_ns)
        row.max_sys_ns = max(row.max_sys_ns, call.max_sys_ns)
        row.wait_count += call.calls * (call.kind < self.wake)
        row.wake_count += call.calls * (call.kind == self.wake)
        row.blocked_count += call.calls * (call.slot != self.no_slot)
        row.errors += call.calls * (call.error > 0)
        row.ongoing += call.calls * call.is_open

    def _main_kinds(self, merged: Columns) -> dict[tuple[int, int], str]:
        """The kind that most waits at an address have, by process and address."""
        counts: dict[tuple[int, int], Counter[str]] = {}
        for call in map(_Call._make, merged[merged["kind"] < self.wake].tolist()):
            counter = counts.setdefault((call.tgid, call.uaddr), Counter())
            counter[self.kinds[call.kind]] += call.calls
        return {address: counter.most_common(1)[0][0] for address, counter in counts.items()}

    def histograms(self) -> dict[tuple[int, int], Histogram]:
        """Histograms of blocked times in microseconds, by process and address."""
        merged = self.merged()
        histograms: dict[tuple[int, int], Histogram] = {}
        for call in map(_Call._make, merged[merged["slot"] != self.no_slot].tolist()):
            # Slot s of common.bpf.h has times above 2^(s-1) us and up to 2^s us; slot 0 has times up to 1 us.
            # The slots of a Histogram that come nearest to these ranges are s + 1 and 1.
            histograms.setdefault((call.tgid, call.uaddr), Histogram()).add(call.slot + 1, call.calls)
        return histograms


def _hashes(rows: Columns) -> Hashes:
    return mix(*(rows[name] for name in KEY))


class _Call(NamedTuple):
    """A row of CALLS."""

    tgid: int
    tid: int
    uaddr: int
    kind: int
    slot: int
    error: int
    stack: int
    is_open: int
    calls: int
    blocked_ns: int
    sys_ns: int
    max_blocked_ns: int
    max_sys_ns: int
