"""Reads records of waits for locks: output of `lockd trace klock`, milli-klockstat or `lockd trace futex`."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lockd.errors import UsageError
from lockd.names.kernel.locks import member_of
from lockd.names.kernel.sites import is_locking, is_tracing
from lockd.trace.futex import lock_rows, summary

SAMPLE = re.compile(
    r"s,(?P<comm>.*),P(?P<pid>\d{1,20})_T(?P<tid>\d{1,20}),(?P<type>\w+),0x(?P<address>[0-9a-f]{1,20}),"
    r"(?P<start>\d{1,20}),(?P<wait>\d{1,20}),(?P<accesses>\d{1,20}),(?P<stack>-?\d{1,20})(?P<ongoing>,ongoing)?"
)
STACK = re.compile(r"t,(?P<number>-?\d{1,20}),(?P<functions>.*)")
RULE = (
    "rule: s,COMM,P<pid>_T<tid>,TYPE,0xADDRESS,START_NS,WAIT_NS,ACCESSES,STACK or t,STACK,FUNCTION,..., "
    "as `lockd trace klock` prints, or CSV of `lockd trace futex`"
)
TYPES_OF_MILLI_KLOCKSTAT = {"Mutex": "mutex", "RWLock": "rwlock", "Semaphore": "rwsem release"}
"""Lock types by milli-klockstat's names. Its lines have the thread id after P and the process id after T."""
USUAL_PERIOD_NS = 50_000_000
UNLIKELY = 1000
"""By chance, the starts of all periods can be multiples of a time that is longer than a period. If this has a
chance of 1 in this number, or less, it counts as impossible."""
LARGEST_NUMBER = 2**62 - 1
"""The largest time or count of a record. The sum of two such numbers fits into 64 bits."""

ROW = np.dtype(
    [
        ("lock", np.int64), ("thread", np.int64), ("stack", np.int64),  # positions in the tuples of Records
        ("start_ns", np.int64),  # start of the period; -1: the record has no period
        ("wait_ns", np.int64), ("accesses", np.int64), ("ongoing", np.int64),
    ]
)  # fmt: skip
Rows: TypeAlias = "npt.NDArray[Any]"


@dataclass(frozen=True)
class Lock:
    """A lock of the kernel or of a process."""

    process: int
    """The id of the process; 0 for a lock of the kernel."""
    address: int

    def __str__(self) -> str:
        return f"{self.address:#x}" + (f" of {self.process}" if self.process else "")


@dataclass(frozen=True)
class Thread:
    pid: int
    """The id of the process."""
    tid: int


@dataclass
class Records:
    """Records, and the locks, threads and stacks that they refer to."""

    rows: Rows
    """An array of the type ROW."""
    locks: tuple[Lock, ...]
    threads: tuple[Thread, ...]
    stacks: tuple[tuple[str, ...], ...]
    """The names of the functions of each stack, innermost first; an empty tuple if they are not known."""
    user_stacks: frozenset[int]
    """The positions in `stacks` of the stacks that are of processes. The others are of the kernel."""
    types: dict[int, str]
    """Types of locks by position in `locks`; several types of one lock have `/` between them."""
    names: dict[int, str]
    """Names of locks by position in `locks`, for locks with a name."""
    comms: dict[int, str]
    """The last comms of threads by position in `threads`."""
    period_ns: int
    """The length of periods in ns; 0 if the records have no periods."""
    began_ns: int | None = None
    """For selected records, the time in ns that counts as zero: the start of the period in which the first
    wait of all records began. None if nothing was selected yet, or if the records have no periods."""

    def label(self, lock: int) -> str:
        """The name, if there is one, and the address of the lock at the position `lock` in `locks`."""
        return f"{self.names[lock]} {self.locks[lock]}" if lock in self.names else str(self.locks[lock])

    def callers(self, stack: int) -> tuple[str, ...]:
        """The functions of a stack from the first one that neither implements locks nor traces them.

        If there is no such function, all functions are returned. `stack` is a position in `stacks`.
        """
        functions = self.stacks[stack]
        if stack in self.user_stacks:
            frames = functions[::-1]
            return tuple(summary.callers(frames, summary.judge_stack(frames).site))
        for position, name in enumerate(map(_plain_name, functions)):
            if name and not is_locking(name) and not is_tracing(name):
                return functions[position:]
        return functions

    def find(self, lock: str) -> int:
        """The position of the lock with this name or address; of several, the one with the most time waited.

        Raises UsageError if no record is of such a lock.
        """
        positions: list[int] = [
            n
            for n in np.unique(self.rows["lock"]).tolist()
            if lock in (f"{self.locks[n].address:#x}", self.names.get(n))
        ]
        if not positions:
            raise UsageError(
                f"--lock {lock}: no record is of it; rule: the name or 0xADDRESS of a lock of which"
                " --exclude, --from, --to and --min-threads leave a record"
            )
        waited = np.bincount(self.rows["lock"], self.rows["wait_ns"], len(self.locks))
        return max(positions, key=lambda n: float(waited[n]))

    def where(self, mask: npt.NDArray[np.bool_]) -> Records:
        """The rows that `mask` selects, with the same locks, threads and stacks."""
        return Records(
            self.rows[mask], self.locks, self.threads, self.stacks, self.user_stacks, self.types, self.names,
            self.comms, self.period_ns, self.began_ns,
        )  # fmt: skip


@dataclass
class _Reader:
    """Collects records from files, and numbers their locks, threads and stacks."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    locks: dict[Lock, int] = field(default_factory=dict)
    threads: dict[Thread, int] = field(default_factory=dict)
    stacks: dict[tuple[str, ...], int] = field(default_factory=lambda: {(): 0})
    user_stacks: set[int] = field(default_factory=set)
    types: dict[int, set[str]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    comms: dict[int, str] = field(default_factory=dict)

    def lock(self, process: int, address: int, type_: str) -> int:
        number = self.locks.setdefault(Lock(process, address), len(self.locks))
        self.types.setdefault(number, set()).add(type_)
        return number

    def thread(self, pid: int, tid: int, comm: str) -> int:
        number = self.threads.setdefault(Thread(pid, tid), len(self.threads))
        self.comms[number] = comm  # between fork and exec, a child has its parent's comm
        return number

    def stack(self, functions: tuple[str, ...]) -> int:
        return self.stacks.setdefault(functions, len(self.stacks))

    def read(self, name: str, lines: Iterable[str]) -> None:
        lines = list(lines)
        first = next((line for line in lines if line.strip()), "")
        if first.startswith("pid,"):
            self._read_futex(name, lines)
        else:
            self._read_klock(name, lines)

    def _read_klock(self, name: str, lines: Iterable[str]) -> None:
        numbers: dict[int, int] = {}
        for line_number, line in enumerate(lines, 1):
            text = line.rstrip("\r\n")
            if stack := STACK.fullmatch(text):
                numbers[int(stack["number"])] = self.stack(_functions(stack["functions"]))
            elif sample := SAMPLE.fullmatch(text):
                self._read_sample(f"{name}:{line_number}", sample, numbers)
            elif text:
                raise UsageError(f"{name}:{line_number}: {_short(text)!r}; {RULE}")

    def _read_sample(self, where: str, sample: re.Match[str], numbers: dict[int, int]) -> None:
        start, wait, accesses, number = (int(sample[part]) for part in ("start", "wait", "accesses", "stack"))
        address = int(sample["address"], 16)
        if max(start, wait, accesses, address >> 2) > LARGEST_NUMBER:
            raise UsageError(f"{where}: a number above {LARGEST_NUMBER}; rule: what fits into 62 bits")
        if not accesses:
            raise UsageError(f"{where}: 0 accesses; rule: 1 or more")
        pid, tid, type_ = int(sample["pid"]), int(sample["tid"]), sample["type"]
        if type_ in TYPES_OF_MILLI_KLOCKSTAT:
            pid, tid, type_ = tid, pid, TYPES_OF_MILLI_KLOCKSTAT[type_]
        comm = sample["comm"]
        if comm.startswith('"') and comm.endswith('"'):
            comm = comm[1:-1].replace('""', '"')
        stack = numbers.get(number, 0)
        lock, thread = self.lock(0, address, type_), self.thread(pid, tid, comm)
        self.rows.append((lock, thread, stack, start, wait, accesses, bool(sample["ongoing"])))

    def _read_futex(self, name: str, lines: Iterable[str]) -> None:
        for row in lock_rows.read_lines(name, lines):
            if max(row.blocked_ns, row.wait_count, row.ongoing) > LARGEST_NUMBER:
                raise UsageError(
                    f"{name}: a number above {LARGEST_NUMBER}; rule: what fits into 62 bits, times in ns"
                )
            if row.wait_count:
                lock = self.lock(row.pid, row.address, f"futex {row.kind}".rstrip())
                if row.lock:
                    self.names[lock] = row.lock
                thread = self.thread(row.pid, row.tid, row.comm)
                stack = self.stack(row.frames[::-1])
                self.user_stacks.add(stack)
                self.rows.append((lock, thread, stack, -1, row.blocked_ns, row.wait_count, row.ongoing))


def read(paths: Sequence[Path], period_ns: int = 0) -> Records:
    """The records of all files; the path `-` is standard input.

    `period_ns` is the length of periods; if it is 0, it is derived from their start times. Raises UsageError
    if a file cannot be read or has an invalid line, or if there are no records.
    """
    reader = _Reader()
    for path in paths:
        lock_rows.read_file(path, reader.read)
    if not reader.rows:
        raise UsageError(f"{', '.join(map(str, paths))}: no records; {RULE}")
    rows = np.array(reader.rows, ROW)
    types = {lock: "/".join(sorted(names)) for lock, names in reader.types.items()}
    records = Records(
        rows, tuple(reader.locks), tuple(reader.threads), tuple(reader.stacks), frozenset(reader.user_stacks),
        types, reader.names, reader.comms, period_ns or _period(rows["start_ns"]),
    )  # fmt: skip
    records.names |= _names(records)
    return records


def _functions(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name and not name.startswith("["))


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "..."


def _period(starts: npt.NDArray[np.int64]) -> int:
    """The length of periods in ns; 0 if no record has a period. Periods start at multiples of their length.

    `starts` are the start times of the records' periods, -1 for records without. The starts of only a few
    periods may be multiples of a longer time by chance. The length is then assumed to be 50 ms, as it mostly
    is, or a divisor of 50 ms; a message on standard error says so if the starts suggest another length.
    """
    starts = np.unique(starts[starts >= 0])
    if not len(starts):
        return 0
    common = int(np.gcd.reduce(starts))
    multiple, rest = divmod(common, USUAL_PERIOD_NS)
    # Of N periods of 50 ms, all begin at a multiple of K * 50 ms with a probability of about 1 / K**N.
    is_unlikely = multiple ** min(len(starts), 10) >= UNLIKELY
    is_certain = len(starts) > 1 if rest else len(starts) > 2 and is_unlikely
    if is_certain:
        return common
    assumed = math.gcd(common, USUAL_PERIOD_NS)
    if assumed != common:
        print(
            f"lockd analyze: periods of {assumed / 1e6:g} ms are assumed: the records are of only "
            f"{len(starts)}; rule: --period for others",
            file=sys.stderr,
        )
    return assumed


def _names(records: Records) -> dict[int, str]:
    """Names of the kernel's locks by position in `locks`.

    The name comes from the function that asked for the lock in the record with the longest wait. It is the
    structure and member that this function locks, as `pipe->mutex`, or `in FUNCTION` if they are not known.
    """
    names: dict[int, str] = {}
    rows = records.rows
    for row in np.argsort(-rows["wait_ns"], kind="stable").tolist():
        lock = int(rows["lock"][row])
        if lock in names or records.locks[lock].process:
            continue
        if callers := records.callers(int(rows["stack"][row])):
            caller = _plain_name(callers[0])
            members = (member_of(type_, caller) for type_ in records.types[lock].split("/"))
            names[lock] = next(filter(None, members), f"in {caller}")
    return names


def _plain_name(function: str) -> str:
    """The name of a function without its offset and without a suffix of the compiler such as `.isra.0`."""
    return function.partition("+")[0].partition(".")[0]
