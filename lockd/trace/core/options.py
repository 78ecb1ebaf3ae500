"""The options that the one-shot tools share, and what they mean for what is loaded."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from lockd.load.settings import LoadSettings, Trace
from lockd.trace.core.call_stacks import PAIRS
from lockd.trace.core.session import TRACED_PROCESSES, TRACED_THREADS

UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "h": 3600.0}
LONGEST_NS = 2**63 - 1
STACKS = 1024
"""New stacks within one period of 50 ms, of the kernel and of user space each."""
KEPT_STACKS = 65536
"""Numbers of stacks that are not handed over again."""
MOST_TRACED = 1024
PROFILE_FORMATS = ("stacks", "folded", "json", "table", "pprof")
"""Of tools whose result is a Profile."""
CAPTURED_BYTES = 16384
"""Of a thread's stack, to be unwound."""


def seconds(text: str) -> float:
    """A duration such as `10`, `0.5`, `500ms` or `2m`, as seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|)", text)
    value = float(found[1]) * UNITS[found[2]] if found else 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration above 0, such as 10, 500ms or 2m")
    return value


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def ids(text: str) -> tuple[int, ...]:
    """Process or thread ids with commas between."""
    numbers = tuple(positive(one.strip()) for one in text.split(","))
    if len(numbers) > MOST_TRACED:
        raise argparse.ArgumentTypeError(f"{len(numbers)} ids: there can be {MOST_TRACED}")
    return numbers


def add_duration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "duration",
        nargs="?",
        type=seconds,
        help="how long to trace: seconds, or with a unit, as 500ms; without it, until Ctrl-C",
    )


def add_processes(parser: argparse.ArgumentParser, required: bool = False) -> None:
    parser.add_argument(
        "-p", "--pid", dest="pids", metavar="PID", type=ids, default=(), required=required,
        help="only these processes (ids with commas between); ends when all of them have ended",
    )  # fmt: skip


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Besides add_processes(): single threads, or those of one sort."""
    parser.add_argument(
        "-t", "--tid", dest="tids", metavar="TID", type=ids, default=(), help="only these threads"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "-u", "--user-threads-only", action="store_true", help="only threads of user processes"
    )
    which.add_argument("-k", "--kernel-threads-only", action="store_true", help="only threads of the kernel")


def add_stacks(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-U", "--user-stacks-only", action="store_true", help="no stacks of the kernel")
    which.add_argument("-K", "--kernel-stacks-only", action="store_true", help="no stacks of user space")
    _add_stack_storage(parser)


def add_user_stacks(parser: argparse.ArgumentParser) -> None:
    """Instead of add_stacks(), where the kernel's side says nothing."""
    parser.set_defaults(user_stacks_only=True, kernel_stacks_only=False)
    _add_stack_storage(parser)


def _add_stack_storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unwind",
        choices=("dwarf", "fp"),
        default="dwarf",
        help="how callers in user space are found: by the tables that debuggers use, in any program, or by "
        "frame pointers alone, which is cheaper and misses callers in code without them (default: dwarf)",
    )
    parser.add_argument(
        "--stack-storage-size", metavar="N", type=positive, default=STACKS,
        help="how many stacks that are new can be kept within 50 ms (default: %(default)s)",
    )  # fmt: skip


def add_output(parser: argparse.ArgumentParser, formats: tuple[str, ...], default: str) -> None:
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write there instead of to standard output"
    )
    parser.add_argument(
        "--format", choices=formats, default=default, action=_Format,
        help="what to write (default: %(default)s)",
    )  # fmt: skip
    parser.set_defaults(format_given=False, flamegraph=None)
    if "folded" in formats:
        parser.add_argument(
            "--flamegraph", metavar="FILE", type=Path,
            help="draw a flame graph (FILE.svg or FILE.html); it is then all that is written, unless -o or "
            "--format is given",
        )  # fmt: skip


def add_folded(parser: argparse.ArgumentParser) -> None:
    """Besides add_output()."""
    parser.add_argument(
        "-f", "--folded", dest="format", action=_Format, nargs=0, const="folded",
        help="the same as --format folded",
    )  # fmt: skip


class _Format(argparse.Action):
    """Notes that a format was asked for: a flame graph is else all that is written."""

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
    """What the options mean for the loader; `trace` is the command's own part."""
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
        mechanisms=tuple((program, "auto") for program in programs),
        trace=Trace(
            parts=trace.parts,
            files=("include/trace.bpf.h", *trace.files),
            defines={**defines, **trace.defines, "TRACE": None},
            pairs=(*PAIRS, *trace.pairs),
            maps=maps,
        ),
    )
