"""The options that the one-shot tools share, and the settings that the loader gets for them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from lockd.load.settings import LoadSettings, Trace
from lockd.trace.core.call_stacks import KEPT, PAIRS
from lockd.trace.core.session import TRACED_PROCESSES, TRACED_THREADS

UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "h": 3600.0}
"""Seconds of each unit of a duration."""
LONGEST_NS = 2**63 - 1
"""The greatest value of LoadSettings.max_block_ns. With it no wait is too long to be counted."""
MOST_ID = 2**31 - 1
"""The greatest id of a process or a thread that the kernel's calls take."""
STACKS = 1024
"""Default for the number of new kernel stacks, and of new user stacks, for which one window has room."""
KEPT_STACKS = 65536
"""The most stacks that the programs remember, each by a hash. A remembered stack is not stored again."""
MOST_TRACED = 1024
"""The most process ids, and the most thread ids, that a trace can be limited to."""
PROFILE_FORMATS = ("stacks", "folded", "json", "table", "pprof")
"""The formats of tools whose result is a Profile."""
CAPTURED_BYTES = 16384
"""Bytes from the top of a thread's stack in a capture, if the stack is unwound by DWARF tables."""


def seconds(text: str) -> float:
    """Parse a duration such as `10`, `0.5`, `500ms` or `2m`. Returns seconds."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|)", text)
    value = float(parts[1]) * UNITS[parts[2]] if parts else 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration above 0, such as 10, 500ms or 2m")
    return value


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def ids(text: str) -> tuple[int, ...]:
    """Parse process or thread ids with commas between."""
    numbers = tuple(positive(number.strip()) for number in text.split(","))
    if len(numbers) > MOST_TRACED:
        raise argparse.ArgumentTypeError(f"{len(numbers)} ids; rule: at most {MOST_TRACED}")
    if max(numbers) > MOST_ID:
        raise argparse.ArgumentTypeError(f"{max(numbers)} is no id; rule: at most {MOST_ID}")
    return numbers


def add_duration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "duration",
        nargs="?",
        type=seconds,
        help="how long to trace: seconds, or a number with a unit, as in 500ms or 2m (default: until Ctrl-C)",
    )


def add_processes(parser: argparse.ArgumentParser, required: bool = False) -> None:
    parser.add_argument(
        "-p", "--pid", dest="pids", metavar="PID", type=ids, default=(), required=required,
        help="trace only these processes (ids separated by commas), and end when all of them have ended",
    )  # fmt: skip


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add options that limit the trace to single threads, or to user or kernel threads."""
    parser.add_argument(
        "-t", "--tid", dest="tids", metavar="TID", type=ids, default=(),
        help="trace only these threads (ids separated by commas), besides the processes of --pid",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "-u", "--user-threads-only", action="store_true", help="trace only threads of user processes"
    )
    which.add_argument("-k", "--kernel-threads-only", action="store_true", help="trace only kernel threads")


def add_stacks(parser: argparse.ArgumentParser) -> None:
    """Add the options of tools that print stacks of user space and of the kernel."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-U", "--user-stacks-only", action="store_true", help="print no kernel stacks")
    which.add_argument("-K", "--kernel-stacks-only", action="store_true", help="print no user stacks")
    _add_stack_storage(parser)


def add_user_stacks(parser: argparse.ArgumentParser) -> None:
    """Add the options of tools that print stacks of user space only, in place of add_stacks()."""
    parser.set_defaults(user_stacks_only=True, kernel_stacks_only=False)
    _add_stack_storage(parser)


def _add_stack_storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unwind",
        choices=("dwarf", "fp"),
        default="dwarf",
        help="how to find callers in user space: `dwarf` uses the tables that debuggers use, in any program; "
        "`fp` follows frame pointers, which is cheaper but misses callers in code without them "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--stack-storage-size", metavar="N", type=positive, default=STACKS,
        help="the number of new stacks that can be stored within 50 ms; further ones are lost "
        "(default: %(default)s)",
    )  # fmt: skip


def add_output(parser: argparse.ArgumentParser, formats: tuple[str, ...], default: str) -> None:
    """Add -o and --format, and --flamegraph if the result is a profile."""
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write to FILE instead of standard output"
    )
    parser.add_argument(
        "--format", choices=formats, default=default, action=_Format,
        help="the format of the output (default: %(default)s)",
    )  # fmt: skip
    parser.set_defaults(format_given=False, flamegraph=None)
    if "folded" in formats:
        parser.add_argument(
            "--flamegraph", metavar="FILE", type=Path,
            help="draw a flame graph (FILE.svg or FILE.html); nothing else is written, unless -o or --format "
            "is given as well",
        )  # fmt: skip


def add_short_format(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, name: str, *flags: str
) -> None:
    """Add an option that is short for `--format NAME`, to the options of add_output()."""
    parser.add_argument(
        *flags, dest="format", action=_Format, nargs=0, const=name, default=argparse.SUPPRESS,
        help=f"short for --format {name}",
    )  # fmt: skip


class _Format(argparse.Action):
    """Stores the value of --format and, in `format_given`, that the option was given.

    With --flamegraph, and without --format and --output, only the flame graph is written
    (output.is_only_graph()).
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        namespace.format, namespace.format_given = self.const or values, True


def load_settings(
    args: argparse.Namespace,
    trace: Trace,
    programs: tuple[str, ...] = (),
    entries: int = 16384,
    threads: int = 65536,
    lock_mode: str = "contention",
) -> LoadSettings:
    """The loader's settings for the parsed options.

    `trace` is what the tool itself adds; its macros replace those of the options with the same names.
    `programs` are the programs of the daemon that are loaded too. `entries` is the number of entries of each
    map of a pair, and `threads` the number of threads that can be followed at a time. `lock_mode` is the mode
    of the program `kernel_locks`.
    """
    defines: dict[str, int | None] = {"KEPT_STACKS_ENTRIES": KEPT_STACKS, "TRACED_ENTRIES": MOST_TRACED}
    maps = trace.maps
    if getattr(args, "pids", ()) or getattr(args, "tids", ()):
        defines["ONLY_LISTED"] = None
        maps += (TRACED_PROCESSES, TRACED_THREADS)
    if getattr(args, "user_threads_only", False):
        defines["ONLY_USER_THREADS"] = None
    if getattr(args, "kernel_threads_only", False):
        defines["ONLY_KERNEL_THREADS"] = None
    wants_stacks = getattr(args, "wants_stacks", hasattr(args, "unwind"))
    if wants_stacks and not args.kernel_stacks_only:
        defines["WITH_USER_STACKS"] = None
        defines["USER_FRAMES"] = 128
        defines["CAPTURE_BYTES"] = CAPTURED_BYTES if args.unwind == "dwarf" else 512
        if args.unwind == "dwarf":
            defines["UNWIND"] = None
    if wants_stacks and not args.user_stacks_only:
        defines["WITH_KERNEL_STACKS"] = None
    return LoadSettings(
        programs=programs,
        entries=entries,
        threads=threads,
        stacks=getattr(args, "stack_storage_size", 1),
        min_block_ns=getattr(args, "min_block_ns", 0),
        max_block_ns=getattr(args, "max_block_ns", LONGEST_NS),
        lock_mode=lock_mode,
        futex_mode="calls",
        mechanisms=tuple((program, "auto") for program in programs),
        trace=Trace(
            parts=trace.parts,
            files=("include/trace.bpf.h", *trace.files),
            defines={**defines, **trace.defines, "TRACE": None},
            pairs=(*PAIRS, *trace.pairs),
            maps=(KEPT, *maps),
        ),
    )
