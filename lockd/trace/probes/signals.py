"""Every signal that is sent, as it happens: who sends it, who receives it, which it is."""

from __future__ import annotations

import argparse
import csv
import io
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime

import numpy as np

from lockd.kernel.rings import Ring, RingReader
from lockd.load.hooks import Candidate, Part, Way
from lockd.load.settings import Trace
from lockd.names.labels.processes import text
from lockd.trace.core import options, output
from lockd.trace.core.session import Session
from lockd.trace.probes.signal_names import code_name, is_by_process, name_of, number_of, result_name

HELP = "Print every signal that is sent, with its sender and its receiver"
EPILOG = """\
examples:
  lockd trace signals                          all signals on this host, until Ctrl-C
  lockd trace signals -p 1234                  those that process 1234 sends or is sent
  lockd trace signals --signal KILL,TERM       who ends others
  lockd trace signals --count 60               how many of which in a minute, by sender and receiver
"""
TITLE = "lockd trace signals"
RING, RECORD = "signals", "signal_record"
"""See lockd/bpf/trace/signals.bpf.c."""
KERNEL = "[kernel]"


@dataclass(frozen=True)
class Sent:
    """One signal. Of a sender that is the kernel, `sender_pid` and `sender_tid` are 0."""

    time: str
    """ISO 8601, with microseconds."""
    sender: str
    sender_pid: int
    sender_tid: int
    receiver: str
    pid: int
    tid: int
    to: str
    """`process`, or `thread` if it is for this one only."""
    signal: str
    code: str
    result: str
    running: str
    """The process that ran: the sender, or what the kernel was working for, or had interrupted."""
    running_pid: int


def signals(words: str) -> int:
    """The value of --signal: a bit for each that is named."""
    try:
        return sum({1 << number_of(word) - 1 for word in words.split(",")})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_duration(parser)
    options.add_processes(parser)
    parser.add_argument(
        "--signal", metavar="NAME[,NAME...]", dest="asked", type=signals, default=(1 << 64) - 1,
        help="only these: TERM, SIGRTMIN+1 or a number",
    )  # fmt: skip
    parser.add_argument(
        "--count", action="store_true", help="at the end how many there were, by sender, receiver and signal"
    )
    options.add_output(parser, ("table", "csv", "json"), "table")


def run(args: argparse.Namespace) -> int:
    hook = Candidate("trace", "on_signal_generate", "raw_tracepoint", "signal_generate")
    part = Part("trace", "signals", (Way("tracepoint", (hook,), ()),), ("trace/signals.bpf.c",))
    maps = (RING, RECORD)
    settings = options.load_settings(args, Trace((part,), defines={"SIGNALS_ASKED": args.asked}, maps=maps))
    counts: Counter[tuple[str | int, ...]] = Counter()
    session = Session(TITLE, settings, args.duration, args.pids, others=maps)
    with output.stream(args.output) as write, session:
        if not args.count:
            write(HEADS[args.format])
        reader = _Reader(session)
        for _ in session.windows():
            sent = reader.read()
            session.events += len(sent)
            if args.count:
                counts.update((one.sender, one.sender_pid, one.receiver, one.pid, one.signal) for one in sent)
            else:
                write("".join(map(LINES[args.format], sent)))
        if args.count:
            write("".join(COUNTS[args.format](counts)))
        session.report()
    return 0


class _Reader:
    """Of the ring of signals."""

    def __init__(self, session: Session) -> None:
        infos = {info.name: info for info in session.manifest.maps}
        self._ring = RingReader(Ring(session.fds[RING], infos[RING].entries))
        self._record = np.dtype(infos[RECORD].value)  # type: ignore[arg-type]
        self._to_clock = time.time_ns() - time.monotonic_ns()

    def read(self) -> list[Sent]:
        """What was written since the last time, in the order of their times."""
        rows = np.frombuffer(b"".join(self._ring.records()), self._record)
        return [self._sent(*row) for row in rows[np.argsort(rows["at"], kind="stable")].tolist()]

    def _sent(
        self, at: int, running_tgid: int, running_tid: int, tgid: int, tid: int, number: int, code: int,
        result: int, to_process: int, running_comm: bytes, comm: bytes,
    ) -> Sent:  # fmt: skip
        running = text(running_comm)
        by_process = is_by_process(number, code)
        when = datetime.fromtimestamp((at + self._to_clock) / 1e9).astimezone()
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
    """Of the table of signals."""
    widths = (15, 15, 7, 15, 7, 7, 7, 11, 13, 0)
    return "  ".join(f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip() + "\n"


def _as_text(one: Sent) -> str:
    clock = one.time[11:26]
    sender = one.sender_pid or "-"
    return _line(
        clock, one.sender, sender, one.receiver, one.pid, one.tid, one.to, one.signal, one.code, one.result
    )


def _csv(*cells: object) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


COLUMNS = tuple(Sent.__dataclass_fields__)
HEADS = {
    "table": _line("TIME", "SENDER", "PID", "RECEIVER", "PID", "TID", "TO", "SIGNAL", "CODE", "RESULT"),
    "csv": _csv(*COLUMNS),
    "json": "",
}
LINES: dict[str, Callable[[Sent], str]] = {
    "table": _as_text,
    "csv": lambda one: _csv(*asdict(one).values()),
    "json": lambda one: json.dumps(asdict(one)) + "\n",
}

COUNTED = ("sender", "sender_pid", "receiver", "pid", "signal")
Counts = Counter[tuple[str | int, ...]]


def _counts_as_table(counts: Counts) -> Iterator[str]:
    """The most frequent last."""
    yield f"{'COUNT':>9}  {'SENDER':<15}  {'PID':<7}  {'RECEIVER':<15}  {'PID':<7}  SIGNAL\n"
    for (sender, sender_pid, receiver, pid, signal), count in reversed(counts.most_common()):
        yield f"{count:>9}  {sender:<15}  {sender_pid or '-':<7}  {receiver:<15}  {pid:<7}  {signal}\n"


def _counts_as_csv(counts: Counts) -> Iterable[str]:
    yield _csv(*COUNTED, "count")
    yield from (_csv(*about, count) for about, count in counts.most_common())


def _counts_as_json(counts: Counts) -> Iterable[str]:
    for about, count in counts.most_common():
        yield json.dumps({**dict(zip(COUNTED, about, strict=True)), "count": count}) + "\n"


COUNTS = {"table": _counts_as_table, "csv": _counts_as_csv, "json": _counts_as_json}
