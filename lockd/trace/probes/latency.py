"""`lockd trace latency`: histograms of the durations of system calls, or of times between two tracepoints."""

from __future__ import annotations

import argparse
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lockd.errors import UsageError
from lockd.kernel.pairs import Entries
from lockd.load.hooks import Candidate, Part, Way
from lockd.load.host import ensure_tracefs
from lockd.load.settings import Trace
from lockd.names.labels import system_calls
from lockd.names.labels.processes import text
from lockd.trace.core import grouping, histogram, options, output
from lockd.trace.core.grouping import Groups, Row
from lockd.trace.core.session import Session
from lockd.trace.probes import tracepoints

HELP = "Measure how long system calls take, in histograms"
EPILOG = """\
examples:
  lockd trace latency read -p 1234 10
      calls of read() in process 1234 for ten seconds, with a histogram for each error
  lockd trace latency fsync,fdatasync --by comm -m 10ms
      which programs wait for more than 10 ms until their data is on disk
  lockd trace latency all -p 1234 --by none 5
      all system calls of a process, with a histogram for each
  lockd trace latency futex -p 1234 --by stack 5
      calls of futex(), with a histogram for each calling stack
  lockd trace latency irq:softirq_entry,softirq_exit --unit ns 5
      soft interrupts, from one tracepoint to the other
"""
NEVER_RETURN = ("exit", "exit_group", "rt_sigreturn")
RESTARTED = "restart_syscall"
FILES = ("include/histogram.bpf.h", "include/group.bpf.h", "trace/latency.bpf.c")
RESULTS = {
    0: "success", 1: "died", -512: "ERESTARTSYS", -513: "ERESTARTNOINTR", -514: "ERESTARTNOHAND",
    -516: "ERESTART_RESTARTBLOCK",
}  # fmt: skip
"""Names of the results that have no name in `errno`, by number (lockd/bpf/trace/latency.bpf.c)."""
UNITS = {"ns": 1, "us": 1000, "ms": 1_000_000}
NEAREST = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "calls", metavar="CALLS", help="SYSCALL[,SYSCALL...]; all for every system call; or "
        "CATEGORY:BEGIN,END for two tracepoints that a thread reaches one after the other (END can be "
        "CATEGORY:EVENT too)",
    )  # fmt: skip
    options.add_duration(parser)
    grouping.add_options(
        parser, "ret (success, or the name of an error), comm (of the process), pid, tid, stack",
        default="ret for system calls, none for tracepoints",
    )  # fmt: skip
    parser.set_defaults(by=None)
    parser.add_argument(
        "--unit", choices=tuple(UNITS), default="us", help="unit of the buckets (default: us)"
    )
    parser.add_argument(
        "-m", "--min", metavar="TIME", dest="shortest", type=options.seconds, default=0.0,
        help="leave out calls that took less than TIME, such as 10ms or 500us; a number without unit is "
        "seconds",
    )  # fmt: skip
    parser.add_argument(
        "--no-ongoing", action="store_true", help="leave out calls that had not returned when the trace ended"
    )
    options.add_processes(parser)
    options.add_stacks(parser)
    options.add_output(parser, tuple(histogram.FORMATS), "text")


def run(args: argparse.Namespace) -> int:
    is_system_calls = ":" not in args.calls
    trace = _system_calls(args.calls) if is_system_calls else _tracepoints(args.calls)
    if args.by is None:
        args.by = ("ret",) if is_system_calls else ()
    grouping.check(args, ("ret",) if is_system_calls else ())
    args.min_block_ns = int(args.shortest * 1e9)
    defines = {**trace.defines, **grouping.defines(args), "NS_PER_UNIT": UNITS[args.unit]}
    if "ret" in args.by:
        defines["BY_RESULT"] = None
    trace = replace(trace, defines=defines, pairs=("latency",), maps=("latency_calls",))
    settings = options.load_settings(args, trace)
    with Session("lockd trace latency", settings, args.duration, args.pids) as session:
        latencies = Latencies(args, session)
        for drained in session.windows():
            if "latency" in drained:
                session.events += latencies.add_ended(drained["latency"])
        if not args.no_ongoing:
            session.events += latencies.add_ongoing(session.read_steady("latency_calls"), session.ended_ns)
        output.write_text(args.output, latencies.groups.lines(args.format, args.unit))
        session.report()
    return 0


class Latencies:
    """Collects the times of calls, by group. A call may also be the time between two tracepoints."""

    def __init__(self, args: argparse.Namespace, session: Session) -> None:
        several = args.calls == "all" or ("," in args.calls and ":" not in args.calls)
        by = (*["call"] * several, *args.by, *["ongoing"] * (not args.no_ongoing))
        self._unit, self._scale = UNITS[args.unit], args.linear or histogram.LOG2
        self.groups = Groups(by, self._scale, session)
        self._shortest: int = args.min_block_ns
        self._calls = system_calls.names()

    def add_ended(self, entries: Entries) -> int:
        """Add drained entries: calls that have returned, or whose threads died in them.

        Returns the number of calls.
        """
        keys, values = entries
        columns = {
            **grouping.columns_of(keys["group"]),
            "call": [self._calls.get(number, "") for number in keys["nr"].tolist()],
            "ret": [result_name(result) for result in keys["result"].tolist()],
            "ongoing": [""] * len(keys),
        }
        rows: list[Row] = [
            (slot, count, total / self._unit, longest / self._unit)
            for slot, count, total, longest in zip(
                keys["slot"].tolist(),
                *(values[name].tolist() for name in ("count", "sum", "max")),
                strict=True,
            )
        ]
        return self.groups.add(columns, rows)

    def add_ongoing(self, calls: Entries, now_ns: int) -> int:
        """Add calls that have not returned, including calls of stopped processes. Returns their number.

        `calls` are the entries of the map latency_calls, and `now_ns` is the end of the trace.
        """
        ids, entries = calls
        times_ns = now_ns - entries["since"].astype("i8")
        wanted = (entries["since"] > 0) & (times_ns >= self._shortest)
        ids, entries, times_ns = ids[wanted], entries[wanted], times_ns[wanted].tolist()
        pids, tids = grouping.ids_of(ids)
        columns: dict[str, Any] = {
            "comm": [_comm(pid) for pid in pids],
            "pid": pids,
            "tid": tids,
            "stack": grouping.stacks_of(entries["stacks"]),
            "call": [self._calls.get(number, "") for number in entries["nr"].tolist()],
            "ret": [""] * len(ids),
            "ongoing": ["yes"] * len(ids),
        }
        rows: list[Row] = [
            (self._scale.slot(ns // self._unit), 1, ns / self._unit, ns / self._unit) for ns in times_ns
        ]
        return self.groups.add(columns, rows)


def result_name(result: int) -> str:
    """The name for the member `result` of struct latency_key: `success`, `died` or the name of an error."""
    return RESULTS.get(result) or system_calls.ERRORS.get(-result, str(result))


def _comm(pid: int) -> str:
    """The comm of a process; empty if it has ended."""
    try:
        return text(Path(f"/proc/{pid}/comm").read_bytes().rstrip(b"\n")) if pid else "swapper"
    except OSError:
        return ""


def _system_calls(names: str) -> Trace:
    """The programs and hooks for the system calls `names`. Raises UsageError if one cannot be measured."""
    numbers = {name: number for number, name in system_calls.names().items()}
    hooks = [
        Candidate("trace", "on_thread_exit", "raw_tracepoint", "sched_process_exit"),
        Candidate("trace", "on_thread_renamed", "raw_tracepoint", "sched_process_exec"),
        Candidate("trace", "on_signal_deliver", "raw_tracepoint", "signal_deliver"),
    ]
    if names == "all":
        defines = {f"NR_{name.upper()}": numbers[name] for name in NEVER_RETURN}
        hooks += [
            Candidate("trace", "on_exit", "raw_tracepoint", "sys_exit"),
            Candidate("trace", "on_enter", "raw_tracepoint", "sys_enter"),
        ]
        way = Way("tracepoint", tuple(hooks), ("trace/latency_system_calls.bpf.c",), ("ALL_CALLS",))
        return Trace((Part("trace", "calls", (way,), FILES),), defines=dict(defines))
    tracefs = ensure_tracefs()
    for name in (
        *dict.fromkeys(_tracefs_name(tracefs, name, numbers) for name in names.split(",")),
        RESTARTED,
    ):
        optional = name == RESTARTED
        hooks += [
            Candidate("trace", "on_exit", "tracepoint", f"syscalls:sys_exit_{name}", optional=optional),
            Candidate("trace", "on_enter", "tracepoint", f"syscalls:sys_enter_{name}", optional=optional),
        ]
    way = Way("tracepoint", tuple(hooks), ("include/system_calls.bpf.h", "trace/latency_system_calls.bpf.c"))
    return Trace((Part("trace", "calls", (way,), FILES),))


def _tracefs_name(tracefs: Path, name: str, numbers: dict[str, int]) -> str:
    """The name of a system call in tracefs. Raises UsageError if it is unknown or cannot be measured."""
    if name in NEVER_RETURN:
        raise UsageError(f"{name}: never returns, so its duration cannot be measured")
    if name == RESTARTED:
        raise UsageError(f"{name}: is counted as part of the system call that a signal has interrupted")
    tracefs_name = system_calls.TRACEFS.get(name, name)
    call_names = {in_tracefs: call for call, in_tracefs in system_calls.TRACEFS.items()}
    if call_names.get(tracefs_name, tracefs_name) not in numbers:
        nearest = get_close_matches(name, numbers, NEAREST)
        hint = f"; did you mean {', '.join(nearest)}?" if nearest else ""
        raise UsageError(f"{name}: is not a known system call{hint}")
    if not (tracefs / f"events/syscalls/sys_enter_{tracefs_name}").is_dir():
        raise UsageError(f"{name}: this kernel has no such system call, or no tracepoints for system calls")
    return tracefs_name


def _tracepoints(names: str) -> Trace:
    """The programs and hooks for the tracepoints CATEGORY:BEGIN,END.

    Raises UsageError for other texts and unknown tracepoints, HostError if tracefs cannot be read.
    """
    begin, comma, end = names.partition(",")
    if not comma:
        raise UsageError(f"{names}: rule: CATEGORY:BEGIN,END, two tracepoints")
    tracefs, category = ensure_tracefs(), begin.partition(":")[0]
    first = tracepoints.find(tracefs, begin)
    last = tracepoints.find(tracefs, end if ":" in end else f"{category}:{end}")
    hooks = (
        Candidate("trace", "on_thread_exit", "raw_tracepoint", "sched_process_exit"),
        Candidate("trace", "on_end", "tracepoint", str(last)),
        Candidate("trace", "on_begin", "tracepoint", str(first)),
    )
    way = Way("tracepoint", hooks, ("trace/latency_events.bpf.c",))
    return Trace((Part("trace", "events", (way,), FILES),))
