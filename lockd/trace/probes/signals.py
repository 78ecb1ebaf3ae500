"""`lockd trace signals`: every signal as it is sent, with its sender, receiver and result."""

from __future__ import annotations

import argparse
import json
import operator
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from difflib import get_close_matches

import numpy as np

from lockd.load.hooks import Candidate, Part, Way
from lockd.load.settings import Trace
from lockd.names.labels.processes import text
from lockd.trace.core import options, output
from lockd.trace.core.session import Session
from lockd.trace.probes.events import EventReader

HELP = "Print every signal that is sent, with its sender and its receiver"
EPILOG = """\
examples:
  lockd trace signals                          all signals on this host, until Ctrl-C
  lockd trace signals -p 1234                  signals that process 1234 sends or receives
  lockd trace signals --signal KILL,TERM       signals that end processes
  lockd trace signals --count 60               counts for a minute, by sender, receiver and signal
"""
TITLE = "lockd trace signals"
RING, RECORD = "signals", "signal_record"
"""The ring buffer, and the map that describes its records (lockd/bpf/trace/signals.bpf.c)."""
KERNEL = "[kernel]"
"""The sender of signals that no process has sent."""
FIRST_REALTIME, LAST = 34, 64
"""The numbers of SIGRTMIN and SIGRTMAX. The C library reserves 32 and 33 for itself."""
CODES = {
    0: "SI_USER", 0x80: "SI_KERNEL", -1: "SI_QUEUE", -2: "SI_TIMER", -3: "SI_MESGQ", -4: "SI_ASYNCIO",
    -5: "SI_SIGIO", -6: "SI_TKILL", -7: "SI_DETHREAD", -60: "SI_ASYNCNL",
}  # fmt: skip
"""Names of the codes that every signal can have; see sigaction(2)."""
CODES_OF = {
    "SIGILL": "ILL_ ILLOPC ILLOPN ILLADR ILLTRP PRVOPC PRVREG COPROC BADSTK BADIADDR",
    "SIGFPE": "FPE_ INTDIV INTOVF FLTDIV FLTOVF FLTUND FLTRES FLTINV FLTSUB",
    "SIGSEGV": "SEGV_ MAPERR ACCERR BNDERR PKUERR ACCADI ADIDERR ADIPERR MTEAERR MTESERR CPERR",
    "SIGBUS": "BUS_ ADRALN ADRERR OBJERR MCEERR_AR MCEERR_AO",
    "SIGTRAP": "TRAP_ BRKPT TRACE BRANCH HWBKPT UNK PERF",
    "SIGCHLD": "CLD_ EXITED KILLED DUMPED TRAPPED STOPPED CONTINUED",
    "SIGIO": "POLL_ IN OUT MSG ERR PRI HUP",
    "SIGSYS": "SYS_ SECCOMP USER_DISPATCH",
}
"""Names of the codes whose meaning depends on the signal, by signal: the prefix of all names, then the rest
of each name, from code 1 on."""
BY_PROCESS = ("SI_USER", "SI_QUEUE", "SI_MESGQ", "SI_TKILL")
"""Codes that show that the running process has sent the signal, whatever system call it is in."""
BY_KERNEL = (-2, -4, -5, -7)
"""Negative codes that the kernel uses itself, or reserves for itself: for timers, USB devices, files, and
threads that end because another one executes a program."""
RESULTS = ("delivered", "ignored", "already pending", "queue full", "delivered without info")
"""Names for the results of the tracepoint signal_generate, an enum in the kernel's trace/events/signal.h.

A delivered signal is pending as long as the receiver blocks it.
"""
NEAREST = 3
"""The most names that a message suggests for a signal that does not exist."""


@dataclass(frozen=True)
class Sent:
    """One signal that was sent.

    If the kernel is the sender, `sender` is KERNEL, and `sender_pid` and `sender_tid` are 0.
    """

    time: str
    """Local time in ISO 8601, with microseconds."""
    sender: str
    sender_pid: int
    sender_tid: int
    receiver: str
    pid: int
    tid: int
    to: str
    """`process`, or `thread` if the signal is for this thread only."""
    signal: str
    code: str
    result: str
    running: str
    """The comm of the running process: the sender, or a process that the kernel worked for or interrupted."""
    running_pid: int


def signals(text: str) -> int:
    """The value of --signal as a mask: bit N-1 is set for signal N."""
    try:
        return sum({1 << number_of(name) - 1 for name in text.split(",")})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_duration(parser)
    options.add_processes(parser)
    parser.add_argument(
        "--signal", metavar="NAME[,NAME...]", dest="asked", type=signals, default=(1 << 64) - 1,
        help="only these signals: names such as TERM or SIGRTMIN+1, or numbers",
    )  # fmt: skip
    parser.add_argument(
        "--count", action="store_true", help="print counts at the end, by sender, receiver and signal"
    )
    options.add_output(parser, ("table", "csv", "json"), "table")


def run(args: argparse.Namespace) -> int:
    hook = Candidate("trace", "on_signal_generate", "raw_tracepoint", "signal_generate")
    part = Part("trace", "signals", (Way("tracepoint", (hook,), ()),), ("trace/signals.bpf.c",))
    maps = (RING, RECORD)
    settings = options.load_settings(args, Trace((part,), defines={"SIGNALS_ASKED": args.asked}, maps=maps))
    counts: Counter[tuple[str | int, ...]] = Counter()
    session = Session(TITLE, settings, args.duration, args.pids, others=maps)
    with session, output.stream(args.output, session.progress.end) as write:
        if not args.count:
            write(HEADS[args.format])
        reader = Reader(session, args.pids)
        for _ in session.windows():
            signals_sent = reader.read()
            session.events += len(signals_sent)
            if args.count:
                counts.update(map(COUNT_KEY, signals_sent))
            else:
                write("".join(map(LINES[args.format], signals_sent)))
        if args.count:
            write("".join(COUNTS[args.format](counts)))
        session.report()
    return 0


class Reader:
    """Reads signals from the ring buffer; with `pids` only those that these processes send or receive."""

    def __init__(self, session: Session, pids: Iterable[int]) -> None:
        self._events = EventReader(session, RING, RECORD)
        self._pids = frozenset(pids)

    def read(self) -> list[Sent]:
        """The signals since the last call, in the order of their times."""
        rows = self._events.read()
        to_clock = time.time_ns() - time.monotonic_ns()  # computed anew, as the clock may have been set
        ordered = rows[np.argsort(rows["at"], kind="stable")].tolist()
        signals_sent = (self._sent(at_ns + to_clock, *rest) for at_ns, *rest in ordered)
        # The programs also report signals that the kernel sends to other processes while one of `pids` runs.
        return [one for one in signals_sent if not self._pids or {one.sender_pid, one.pid} & self._pids]

    def _sent(
        self, time_ns: int, running_tgid: int, running_tid: int, tgid: int, tid: int, number: int, code: int,
        result: int, to_process: int, is_queueing: int, running_comm: bytes, comm: bytes,
    ) -> Sent:  # fmt: skip
        running = text(running_comm)
        by_process = is_by_process(number, code, bool(is_queueing))
        when = datetime.fromtimestamp(time_ns / 1e9).astimezone()
        return Sent(
            time=when.isoformat(timespec="microseconds"),
            sender=running if by_process else KERNEL,
            sender_pid=running_tgid if by_process else 0,
            sender_tid=running_tid if by_process else 0,
            receiver=text(comm),
            pid=tgid,
            tid=tid,
            to="process" if to_process else "thread",
            signal=name_of(number),
            code=code_name(number, code),
            result=result_name(result),
            running=running,
            running_pid=running_tgid,
        )  # fmt: skip


def _line(*cells: object) -> str:
    """A line of the table of signals."""
    widths = (15, 15, 7, 15, 7, 7, 7, 11, 13, 0)
    return "  ".join(f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip() + "\n"


def _as_text(sent: Sent) -> str:
    clock = sent.time[11:26]
    return _line(
        clock, sent.sender, sent.sender_pid or "-", sent.receiver, sent.pid, sent.tid, sent.to, sent.signal,
        sent.code, sent.result,
    )  # fmt: skip


COLUMNS = tuple(Sent.__dataclass_fields__)
HEADS = {
    "table": _line("TIME", "SENDER", "PID", "RECEIVER", "PID", "TID", "TO", "SIGNAL", "CODE", "RESULT"),
    "csv": output.csv_line(COLUMNS),
    "json": "",
}
LINES: dict[str, Callable[[Sent], str]] = {
    "table": _as_text,
    "csv": lambda sent: output.csv_line(asdict(sent).values()),
    "json": lambda sent: json.dumps(asdict(sent)) + "\n",
}

COUNTED = ("sender", "sender_pid", "receiver", "pid", "signal")
COUNT_KEY = operator.attrgetter(*COUNTED)
Counts = Counter[tuple[str | int, ...]]


def _counts_as_table(counts: Counts) -> Iterator[str]:
    """The lines of a table of counts, the largest last."""
    yield f"{'COUNT':>9}  {'SENDER':<15}  {'PID':<7}  {'RECEIVER':<15}  {'PID':<7}  SIGNAL\n"
    for (sender, sender_pid, receiver, pid, name), count in reversed(counts.most_common()):
        yield f"{count:>9}  {sender:<15}  {sender_pid or '-':<7}  {receiver:<15}  {pid:<7}  {name}\n"


def _counts_as_csv(counts: Counts) -> Iterable[str]:
    yield output.csv_line([*COUNTED, "count"])
    yield from (output.csv_line([*key, count]) for key, count in counts.most_common())


def _counts_as_json(counts: Counts) -> Iterable[str]:
    for key, count in counts.most_common():
        yield json.dumps({**dict(zip(COUNTED, key, strict=True)), "count": count}) + "\n"


COUNTS = {"table": _counts_as_table, "csv": _counts_as_csv, "json": _counts_as_json}


def name_of(number: int) -> str:
    """The name of a signal, such as SIGTERM or SIGRTMIN+3, or its number if it has no name."""
    if FIRST_REALTIME <= number <= LAST:
        return f"SIGRTMIN+{number - FIRST_REALTIME}" if number > FIRST_REALTIME else "SIGRTMIN"
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def number_of(name: str) -> int:
    """The number of a signal given as SIGTERM, TERM, sigterm, RTMIN+3 or 15.

    Raises ValueError with the nearest names.
    """
    known = {name_of(number): number for number in range(1, LAST + 1)}
    known |= {"SIGRTMAX": LAST, "SIGPOLL": signal.SIGPOLL, "SIGIOT": signal.SIGIOT}
    wanted = name.strip().upper()
    for spelling in (wanted, f"SIG{wanted}"):
        if spelling in known:
            return known[spelling]
    if wanted.isdecimal() and 1 <= int(wanted) <= LAST:
        return int(wanted)
    nearest = get_close_matches(f"SIG{wanted.removeprefix('SIG')}", known, NEAREST)
    hint = f"; did you mean {', '.join(nearest)}?" if nearest else ""
    raise ValueError(f"{name!r} is no signal{hint}")


def code_name(number: int, code: int) -> str:
    """The name of a signal's code, such as SI_USER or SEGV_MAPERR, or its number if it has no name."""
    if code in CODES:
        return CODES[code]
    prefix, *names = CODES_OF.get(name_of(number), "?").split()
    return f"{prefix}{names[code - 1]}" if 1 <= code <= len(names) else str(code)


def is_by_process(number: int, code: int, is_queueing: bool) -> bool:
    """Whether the running process has sent the signal, or is the child that a SIGCHLD is about.

    `is_queueing` is whether the process is in a system call such as rt_sigqueueinfo(), which sends a signal
    with the code that the process chooses. For 32-bit programs this is unknown, and `is_queueing` is False. A
    negative code that is not in BY_KERNEL shows that a process has sent the signal even so.
    """
    return (
        is_queueing
        or code_name(number, code) in BY_PROCESS
        or (code < 0 and code not in BY_KERNEL)
        or (number == signal.SIGCHLD and code > 0 and code not in CODES)
    )


def result_name(result: int) -> str:
    return RESULTS[result] if 0 <= result < len(RESULTS) else str(result)
