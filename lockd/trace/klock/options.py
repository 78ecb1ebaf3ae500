"""The options of `lockd trace klock`."""

from __future__ import annotations

import argparse
from typing import Any

from lockd.trace.core import options
from lockd.trace.klock.tables import FIELDS, SORTS

FORMATS = ("csv", "table", "folded", "stacks", "json", "pprof")
LONGEST_PERIOD_MS = 60_000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "duration", nargs="?", type=options.seconds,
        help="how long to trace: seconds, or as 500ms; without it 10 s of csv, or until Ctrl-C",
    )  # fmt: skip
    parser.add_argument(
        "-d", "--time", metavar="DURATION", type=options.seconds,
        help="the same as an option",
    )  # fmt: skip
    parser.add_argument(
        "--period", metavar="MS", type=_period, default=50,
        help="length of the periods that records are about, in milliseconds (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--mode", choices=("auto", "all", "contention"), default="auto",
        help="count every access, and holds, or only those that had to wait; auto: all where possible",
    )  # fmt: skip
    parser.add_argument(
        "--mechanism", choices=("auto", "tracepoint", "fentry", "kprobe"), default="auto",
        help="how the kernel is hooked (default: the best that it has)",
    )  # fmt: skip
    options.add_processes(parser)
    options.add_threads(parser)
    parser.add_argument(
        "-c", "--caller", metavar="FUNCTION", default="", help="only of callers whose names begin so"
    )
    parser.add_argument(
        "-L", "--lock", metavar="LOCK", default="", help="only this lock: its name or 0xADDRESS"
    )
    parser.add_argument(
        "--no-filter-monitors", action="store_true",
        help="show the threads of monitors (collect, collectl, tcplife-bpfcc) and of this program as well",
    )  # fmt: skip
    parser.add_argument(
        "--no-ongoing", action="store_true", help="leave out waits and holds that had not ended at the end"
    )
    parser.add_argument(
        "--hold",
        action="store_true",
        help="of folded, stacks, json, pprof and flame graphs: by hold, not wait",
    )
    parser.add_argument(
        "--stack-storage-size", metavar="N", type=options.positive, default=options.STACKS,
        help="how many stacks that are new can be kept within 50 ms (default: %(default)s)",
    )  # fmt: skip
    _add_table_options(parser)
    options.add_output(parser, FORMATS, "csv")


def _add_table_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tables, as klockstat prints them")
    group.add_argument("--callers", nargs=0, action=_Callers, help="the same as --format table")
    group.add_argument("-n", "--locks", metavar="N", type=options.positive, help="lines of each table")
    group.add_argument(
        "-s", "--stacks", metavar="N", type=options.positive, default=1,
        help="functions of a stack that are shown, and tell lines apart (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "-S", "--sort", metavar="FIELDS", type=_sorts, default=(),
        help=f"acq_FIELD for waits, hld_FIELD for holds, or both with a comma; FIELD: {', '.join(FIELDS)}",
    )  # fmt: skip
    group.add_argument("-P", "--per-thread", action="store_true", help="by thread instead of by caller")
    group.add_argument("-T", "--timestamp", action="store_true", help="print the time before each table")
    group.add_argument(
        "-i",
        "--interval",
        metavar="DURATION",
        type=options.seconds,
        help="print the tables so often, each anew",
    )


class _Callers(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        namespace.format, namespace.format_given = "table", True


def _period(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= LONGEST_PERIOD_MS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of milliseconds from 1 to {LONGEST_PERIOD_MS}"
        )
    return int(text)


def _sorts(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if wrong := [name for name in found if name not in SORTS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(SORTS)}")
    return found
