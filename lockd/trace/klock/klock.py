"""`lockd trace klock`: waits for the kernel's locks and holds of them, as records, tables or profiles.

The records have the format of the tool milli-klockstat, the tables that of bcc's klockstat.
"""

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
from lockd.errors import UsageError
from lockd.load.settings import LoadSettings, Trace
from lockd.trace.core import options, output
from lockd.trace.core.session import Session
from lockd.trace.klock.records import Records
from lockd.trace.klock.rows import (
    Accesses,
    Count,
    Names,
    Sums,
    comm_of,
    drained_rows,
    unfinished_holds,
    unfinished_waits,
)
from lockd.trace.klock.tables import FIELDS, SORTS, Layout, tables
from lockd.views.profile import KernelFrame, Mark, Profile, Sample, Value

HELP = "Record waits for the kernel's locks by thread and lock, or show who waits for them and holds them"
EPILOG = """\
examples:
  lockd trace klock >records             milli-klockstat's records of 10 seconds: see lockd analyze
  lockd trace klock --period 10 --time 60 -o records
  lockd trace klock --callers 5          who waits, and holds, by the function that takes the lock
  lockd trace klock --callers -i 1 -T    the same tables every second until Ctrl-C
  lockd trace klock --callers -s 4 -S acq_total -n 10 -p 1234
  lockd trace klock --mode contention --flamegraph locks.svg 30

Accesses that had to wait can be traced on every kernel since 5.10. With --mode all, every access is counted
and holds are measured; for this the kernel must support fentry programs or kprobes (see lockd doctor).
"""
STREAMED = ("csv", "table")
"""The formats of tables and records, which are written while the trace goes on."""
FORMATS = (*STREAMED, "folded", "stacks", "json", "pprof")
"""All formats. Those that are not in STREAMED show a profile."""
LONGEST_PERIOD_MS = 60_000
RECORDS_SECONDS = 10.0
"""Seconds for which records are made if no duration is given, as in milli-klockstat."""
ENTRIES = 32768
"""Number of entries of each map of a pair. In the 50 ms between two drains, each combination of thread, lock,
stack and period (of --period) takes one."""
MONITORS = (b"collect", b"collectl", b"tcplife-bpfcc")
"""Comms of monitoring tools, whose threads are left out by default, as in milli-klockstat."""
VALUES = (
    Value("wait_ns", "nanoseconds"), Value("waits", "count"), Value("accesses", "count"),
    Value("hold_ns", "nanoseconds"), Value("holds", "count"), Value("acquisitions", "count"),
)  # fmt: skip
HOLDS_FIRST = (3, 4, 5, 0, 1, 2)
"""The order of VALUES with --hold, by position. Formats with room for one value show the first."""
TITLE = "lockd trace klock"
NAMELESS = "counted without names"
"""What the keys in Session.own_losses say of events for whose names Sums has no room."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "duration", nargs="?", type=options.seconds,
        help="how long to trace: seconds, or with a unit, as 500ms (default: 10 s of csv; else until Ctrl-C)",
    )  # fmt: skip
    parser.add_argument(
        "-d", "--time", metavar="DURATION", type=options.seconds,
        help="another way to give the duration",
    )  # fmt: skip
    parser.add_argument(
        "--period", metavar="MS", type=_period, default=50,
        help="length in milliseconds of the periods that records are split into (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--mode", choices=("auto", "all", "contention"), default="auto",
        help="all: count every access and measure holds; contention: count only accesses that had to wait; "
        "auto: all where possible, else contention (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--mechanism", choices=("auto", "tracepoint", "fentry", "kprobe"), default="auto",
        help="how to hook the kernel (default: the best mechanism that it supports)",
    )  # fmt: skip
    options.add_processes(parser)
    options.add_threads(parser)
    parser.add_argument(
        "-c", "--caller", metavar="FUNCTION", default="", help="only callers whose names begin with FUNCTION"
    )
    parser.add_argument(
        "-L", "--lock", metavar="LOCK", default="", help="only this lock, by name or as 0xADDRESS"
    )
    parser.add_argument(
        "--no-filter-monitors", action="store_true",
        help="include the threads of monitors (collect, collectl, tcplife-bpfcc) and of this program",
    )  # fmt: skip
    parser.add_argument(
        "--no-ongoing", action="store_true",
        help="leave out waits and holds that had not ended when the trace ended",
    )  # fmt: skip
    parser.add_argument(
        "--hold", action="store_true",
        help="show times of holds instead of waits, in the formats folded, stacks, json and pprof and in "
        "flame graphs",
    )  # fmt: skip
    parser.add_argument(
        "--stack-storage-size", metavar="N", type=options.positive, default=options.STACKS,
        help="how many new stacks can be stored within 50 ms (default: %(default)s)",
    )  # fmt: skip
    _add_table_options(parser)
    options.add_output(parser, FORMATS, "csv")


def _add_table_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tables, as klockstat prints them")
    options.add_short_format(group, "table", "--callers")
    group.add_argument(
        "-n", "--locks", metavar="N", type=options.positive, help="print N lines of each table"
    )
    group.add_argument(
        "-s", "--stacks", metavar="N", type=options.positive, default=1,
        help="show the N innermost functions of each stack, and count stacks that differ in them "
        "separately (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "-S", "--sort", metavar="FIELDS", type=_sorts, default=(),
        help="sort by acq_FIELD (waits), by hld_FIELD (holds), or by both, separated by a comma; FIELD is "
        f"one of {', '.join(FIELDS)}",
    )  # fmt: skip
    group.add_argument(
        "-P", "--per-thread", action="store_true", help="a line for each thread, not each caller"
    )
    group.add_argument("-T", "--timestamp", action="store_true", help="print the time before each table")
    group.add_argument(
        "-i", "--interval", metavar="DURATION", type=options.seconds,
        help="print the tables again after each DURATION, each time from zero",
    )  # fmt: skip


def _period(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= LONGEST_PERIOD_MS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of milliseconds from 1 to {LONGEST_PERIOD_MS}"
        )
    return int(text)


def _sorts(text: str) -> tuple[str, ...]:
    sorts = tuple(text.split(","))
    if unknown := [name for name in sorts if name not in SORTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SORTS)}")
    return sorts


def run(args: argparse.Namespace) -> int:
    writes_records = args.format == "csv" and not output.is_only_graph(args)
    seconds = args.duration or args.time or (RECORDS_SECONDS if writes_records else None)
    if args.hold and args.mode == "contention":
        raise UsageError("--hold: --mode contention measures no holds; rule: --mode all")
    if args.mechanism == "tracepoint" and (args.hold or args.mode == "all"):
        option = "--hold" if args.hold else "--mode all"
        raise UsageError(f"{option}: no tracepoint reports holds; rule: --mechanism fentry or kprobe")
    if args.duration and args.time:
        raise UsageError("-d/--time: the duration is given twice")
    optional = () if args.mode == "all" or args.hold else ("holds",)
    with Session(TITLE, settings_of(args), seconds, args.pids, args.tids, optional=optional) as session:
        trace = LockTrace(session, args)
        texts = trace.records() if args.format == "csv" else trace.tables()

        def write_texts() -> None:
            with output.stream(args.output, session.progress.end) as write:
                for text in texts:
                    write(text)

        def write_graph() -> None:
            session.stop()  # if a text could not be written, the trace has not ended yet
            for _ in texts:
                pass
            output.write_graph(args, trace.profile())

        def write_profile() -> None:
            for _ in trace.windows():
                pass
            output.write(args, trace.profile())

        if args.format not in STREAMED or output.is_only_graph(args):
            output.write_each([write_profile, session.report])
        elif args.flamegraph:
            output.write_each([write_texts, write_graph, session.report])
        else:
            output.write_each([write_texts, session.report])
    return 0


def settings_of(args: argparse.Namespace) -> LoadSettings:
    """The loader's settings for these options.

    The programs store the stack of every wait. If stacks are shown, or --caller selects by them, they store
    the stack of every acquisition too, otherwise only that of each thread's first acquisition of each lock.
    """
    defines: dict[str, int | None] = {"PERIOD_NS": args.period * 1_000_000, "WITH_KERNEL_STACKS": None}
    if args.format != "csv" or args.flamegraph or args.caller:
        defines["EVERY_STACK"] = None
    settings = options.load_settings(
        args, Trace(defines=defines), ("kernel_locks",), ENTRIES, threads=1,
        lock_mode="contention" if args.mode == "contention" else "all",
    )  # fmt: skip
    return replace(settings, mechanisms=(("kernel_locks", args.mechanism),))


class LockTrace:
    """Turns the drained windows of a session into records, tables or a profile."""

    def __init__(self, session: Session, args: argparse.Namespace) -> None:
        self._session, self._args = session, args
        self._period_ns = args.period * 1_000_000
        self._types = list(session.manifest.enums["lock_type"])
        self._has_holds = self._report_mode()
        self._names = Names(session.stacks, self._types)
        self._sums = Sums()
        """The rows of the whole trace, if a profile is to be written."""
        self._makes_profile = bool(args.flamegraph) or args.format not in STREAMED

    def _report_mode(self) -> bool:
        """Print the mode, all or contention, on standard error. Returns whether holds are measured."""
        holds = next((part for part in self._session.manifest.chosen if part.what == "holds"), None)
        if holds and holds.mechanism:
            description = f"all: every access, by {holds.mechanism}"
        else:
            reason = f" ({holds.instead_of})" if holds else ""
            description = f"contention: only accesses that had to wait, and no holds{reason}"
        self._session.progress.end()
        print(f"{TITLE}: mode {description}", file=sys.stderr)
        return bool(holds and holds.mechanism)

    def windows(self) -> Iterator[Columns]:
        """The selected rows of each drained window and then, without --no-ongoing, those of unfinished waits
        and holds."""
        for drained in self._session.windows():
            yield self._select(drained_rows(drained))
        if not self._args.no_ongoing:
            yield self._select(self._unfinished())

    def records(self) -> Iterator[str]:
        """Lines of records, each as soon as its period is over."""
        records = Records(self._names, self._types, self._period_ns, Accesses(self._has_holds))
        settled = [0, 0, 0]
        for rows in self.windows():
            # `settled` has the times after the last three drains, each of which ended with a flip. The next
            # drain returns what was written after the second of these flips, so later than settled[0].
            settled = [*settled[1:], time.monotonic_ns()]
            yield "".join(records.add(rows, settled[0]))
        yield "".join(records.rest())

    def tables(self) -> Iterator[str]:
        """The tables of each interval, if --interval is given, and at the end those of the remaining time."""
        intervals = output.Intervals(self._args.interval)
        recent = Sums()
        for rows in self.windows():
            recent.add(rows)
            if not self._session.ended_ns and intervals.has_ended():
                yield self._tables(recent)
                recent = Sums()
        yield self._tables(recent)

    def _tables(self, sums: Sums) -> str:
        args = self._args
        rows = sums.rows()
        self._session.own_losses[f"tables: {NAMELESS}"] += sums.nameless
        layout = Layout(args.stacks, args.locks, args.sort, args.per_thread)
        stamp = time.strftime("\n%H:%M:%S\n") if args.timestamp else ""
        return stamp + "".join(tables(rows, self._names, self._types, layout, self._has_holds))

    def profile(self) -> Profile:
        """A sample for each combination of a thread, a lock and a calling stack that has waits or holds.

        The profile has no samples if the options ask for no profile (_makes_profile).
        """
        counts: dict[tuple[object, ...], Count] = {}
        samples: dict[tuple[object, ...], tuple[Sample, list[int]]] = {}
        rows = self._sums.rows()
        self._session.own_losses[f"profile: {NAMELESS}"] = self._sums.nameless
        for row in rows:
            type_, stack, lock = int(row["type"]), int(row["stack"]), int(row["lock"])
            functions = tuple(place.partition("+")[0] for place in self._names.callers(stack))
            key: tuple[object, ...] = (int(row["tid"]), lock, type_, functions)
            name = self._names.lock(lock, type_, stack, bool(row["is_mmap_lock"]))
            kind = self._types[type_]
            frames = (*map(KernelFrame, reversed(functions)), Mark(f"[{kind} {name}]"))
            labels = {"type": kind, "lock": name, "address": f"{lock:#x}"}
            sample = Sample(comm_of(row), int(row["tgid"]), int(row["tid"]), frames, (), labels)
            _, times = samples.setdefault(key, (sample, [0, 0]))
            times[0] += int(row["wait_ns"])
            times[1] += int(row["hold_ns"])
            counts.setdefault(key, Count()).add(row)
        order = HOLDS_FIRST if self._args.hold else range(len(VALUES))
        measured = []
        for key, (sample, (wait_ns, hold_ns)) in samples.items():
            count = counts[key]
            values = wait_ns, count.waits, count.accesses, hold_ns, count.holds, count.acquired
            if any(values):
                measured.append(replace(sample, values=tuple(values[n] for n in order)))
        values_in_order = tuple(VALUES[n] for n in order)
        return Profile(TITLE, values_in_order, measured, self._session.began_at, self._session.elapsed)

    def _select(self, rows: Columns) -> Columns:
        """Return the rows that the options select. Count their events; for a profile, add them to `_sums`."""
        args = self._args
        # Before Linux 5.17 (06c5088aeedd), bytes of an older name can follow the NUL that ends a comm.
        rows["comm"] = [comm.partition(b"\0")[0] for comm in rows["comm"].tolist()]
        mask = self._names.matching(rows, args.caller, args.lock)
        if not args.no_filter_monitors:
            mask &= ~np.isin(rows["comm"], MONITORS) & (rows["tgid"] != os.getpid())
        rows = structs.take(rows, np.flatnonzero(mask))
        self._session.events += int(rows["waits"].sum() + rows["acquired"].sum())
        if self._makes_profile:
            self._sums.add(rows)
        return rows

    def _unfinished(self) -> Columns:
        """Rows of the waits and holds that had not ended when the programs were detached."""
        session = self._session
        ended = session.ended_ns, self._period_ns
        waiting = unfinished_waits(*session.read_steady("kernel_waits"), *ended)
        if not self._has_holds:
            return waiting
        holds = unfinished_holds(*session.read_steady("kernel_holding"), waiting, *ended)
        return structs.concatenate([waiting, holds])
