"""Waits for the kernel's locks and holds of them: milli-klockstat's records, klockstat's tables, profiles."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lockd.columns import structs
from lockd.columns.structs import Columns
from lockd.load.settings import LoadSettings, Trace
from lockd.trace.core import options, output
from lockd.trace.core.session import Session
from lockd.trace.klock.options import add_options
from lockd.trace.klock.places import Places
from lockd.trace.klock.records import Records
from lockd.trace.klock.rows import (
    Accesses,
    Count,
    Sums,
    comm_of,
    rows_of,
    still_held,
    still_waiting,
)
from lockd.trace.klock.tables import Layout, tables
from lockd.views.profile import KernelFrame, Mark, Profile, Sample, Value

HELP = "Record waits for the kernel's locks by thread and lock, or show who waits for them and holds them"
EPILOG = """\
examples:
  lockd trace klock >records             milli-klockstat's records of 10 seconds: see lockd analyze
  lockd trace klock --period 10 --time 60 -o records
  lockd trace klock --callers 5          who waits, and holds, by the function that takes the lock
  lockd trace klock --callers -i 1 -T    the same every second until Ctrl-C
  lockd trace klock --callers -s 4 -S acq_total -n 10 -p 1234
  lockd trace klock --mode contention --flamegraph locks.svg 30

Accesses that had to wait are seen on all kernels since 5.10. Every access, and how long locks are held, are
seen with --mode all: where the kernel takes fentry programs or kprobes (lockd doctor tells).
"""
RECORDS_SECONDS = 10.0
"""As milli-klockstat does without --time."""
ENTRIES = 32768
"""Threads and locks, by stack and period, that are counted within 50 ms."""
MONITORS = (b"collect", b"collectl", b"tcplife-bpfcc")
"""Threads that milli-klockstat leaves out."""
VALUES = (
    Value("wait_ns", "nanoseconds"), Value("waits", "count"), Value("accesses", "count"),
    Value("hold_ns", "nanoseconds"), Value("holds", "count"), Value("acquisitions", "count"),
)  # fmt: skip
TITLE = "lockd trace klock"
__all__ = ["EPILOG", "HELP", "add_options", "run", "settings_of"]


def run(args: argparse.Namespace) -> int:
    seconds = args.duration or args.time or (RECORDS_SECONDS if args.format == "csv" else None)
    optional = () if args.mode == "all" else ("holds",)
    with Session(TITLE, settings_of(args), seconds, args.pids, args.tids, optional=optional) as session:
        trace = LockTrace(session, args)
        if args.format in ("csv", "table") and not output.is_only_graph(args):
            with output.stream(args.output) as write:
                for text in trace.records() if args.format == "csv" else trace.tables():
                    write(text)
            output.write_graph(args, trace.profile())
        else:
            for _ in trace.windows():
                pass
            output.write(args, trace.profile())
        session.report()
    return 0


def settings_of(args: argparse.Namespace) -> LoadSettings:
    """What is loaded. Every taking has its stack if that is shown, else a thread's first of a lock."""
    defines: dict[str, int | None] = {"PERIOD_NS": args.period * 1_000_000, "WITH_KERNEL_STACKS": None}
    if args.format != "csv" or args.flamegraph or args.caller:
        defines["EVERY_STACK"] = None
    settings = options.load_settings(
        args, Trace(defines=defines), ("kernel_locks",), ENTRIES, threads=1,
        lock_mode="contention" if args.mode == "contention" else "all",
    )  # fmt: skip
    return replace(settings, mechanisms=(("kernel_locks", args.mechanism),))


class LockTrace:
    """What a session tells of kernel locks."""

    def __init__(self, session: Session, args: argparse.Namespace) -> None:
        self._session, self._args = session, args
        self._period_ns = args.period * 1_000_000
        self._types = session.manifest.enums["lock_type"]
        self._has_holds = self._say_mode()
        self._places = Places(session.stacks, self._types)
        self._sums = Sums()
        self._began = time.time()

    def _say_mode(self) -> bool:
        holds = next((part for part in self._session.manifest.chosen if part.what == "holds"), None)
        if holds and holds.mechanism:
            words = f"all: every access, by {holds.mechanism}"
        else:
            reason = f" ({holds.instead_of})" if holds else ""
            words = f"contention: only accesses that had to wait, and no holds{reason}"
        self._session.progress.end()
        print(f"{TITLE}: mode {words}", file=sys.stderr)
        return bool(holds and holds.mechanism)

    def windows(self) -> Iterator[Columns]:
        """The rows of each drained window, and at last those of what had not ended."""
        for taken in self._session.windows():
            yield self._shown(rows_of(taken))
        if not self._args.no_ongoing:
            yield self._shown(self._ongoing())

    def records(self) -> Iterator[str]:
        """Lines, as soon as a period is over."""
        records = Records(self._places, self._types, self._period_ns, Accesses(self._has_holds))
        settled = [0, 0, 0]
        for rows in self.windows():
            # What was drained just now was idle since the last time, and what comes next was not before.
            settled = [*settled[1:], time.monotonic_ns()]
            yield "".join(records.add(rows, settled[0]))
        yield "".join(records.rest())

    def tables(self) -> Iterator[str]:
        """At the end, and after each interval."""
        args = self._args
        due = time.monotonic() + (args.interval or np.inf)
        recent = Sums()
        for rows in self.windows():
            recent.add(rows)
            if time.monotonic() >= due and not self._session.ended_ns:
                due += args.interval
                yield self._table(recent.rows())
                recent = Sums()
        yield self._table(recent.rows())

    def _table(self, rows: Columns) -> str:
        args = self._args
        layout = Layout(args.stacks, args.locks, args.sort, args.per_thread)
        stamp = time.strftime("\n%H:%M:%S\n") if args.timestamp else ""
        self._session.progress.end()
        return stamp + "".join(tables(rows, self._places, self._types, layout, self._has_holds))

    def profile(self) -> Profile:
        """A sample for each thread, lock and calling stack; none of those that did not wait (or hold)."""
        counts: dict[tuple[object, ...], Count] = {}
        samples: dict[tuple[object, ...], tuple[Sample, list[int]]] = {}
        for row in self._sums.rows():
            type_, stack, lock = int(row["type"]), int(row["stack"]), int(row["lock"])
            functions = tuple(place.partition("+")[0] for place in self._places.callers(stack))
            key: tuple[object, ...] = (int(row["tid"]), lock, type_, functions)
            name = self._places.lock(lock, type_, stack, bool(row["is_mmap_lock"]))
            kind = self._types[type_]
            frames = (*map(KernelFrame, reversed(functions)), Mark(f"[{kind} {name}]"))
            labels = {"type": kind, "lock": name, "address": f"{lock:#x}"}
            sample = Sample(comm_of(row), int(row["tgid"]), int(row["tid"]), frames, (), labels)
            _, times = samples.setdefault(key, (sample, [0, 0]))
            times[0] += int(row["wait_ns"])
            times[1] += int(row["hold_ns"])
            counts.setdefault(key, Count()).add(row)
        order = (3, 4, 5, 0, 1, 2) if self._args.hold else range(len(VALUES))
        found = []
        for at, (sample, (wait_ns, hold_ns)) in samples.items():
            count = counts[at]
            values = wait_ns, count.waits, count.accesses, hold_ns, count.holds, count.acquired
            if any(values):
                found.append(replace(sample, values=tuple(values[n] for n in order)))
        return Profile(TITLE, tuple(VALUES[n] for n in order), found, self._began, self._session.elapsed)

    def _shown(self, rows: Columns) -> Columns:
        """Those that the user asked for, which are added to the totals."""
        args = self._args
        mask = self._places.chosen(rows, args.caller, args.lock)
        if not args.no_filter_monitors:
            mask &= ~np.isin(rows["comm"], MONITORS) & (rows["tgid"] != os.getpid())
        rows = structs.take(rows, np.flatnonzero(mask))
        self._session.events += int(rows["waits"].sum() + rows["acquired"].sum())
        self._sums.add(rows)
        return rows

    def _ongoing(self) -> Columns:
        """Waits and holds that had not ended when everything was detached."""
        session = self._session
        when = session.ended_ns, self._period_ns
        waiting = still_waiting(*session.steady("kernel_waits"), *when)
        if not self._has_holds:
            return waiting
        return structs.concatenate([waiting, still_held(*session.steady("kernel_holding"), waiting, *when)])
