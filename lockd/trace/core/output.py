"""Where a trace's result goes: standard output or a file, in the format that was asked for."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, cast

from lockd.errors import LockdError, UsageError
from lockd.trace.core.formats import FORMATS
from lockd.views import flamegraph, pprof
from lockd.views.profile import Profile

GRAPHS = {".svg": flamegraph.svg, ".html": flamegraph.page}
"""By the ending of the file's name."""


def check(path: Path | None) -> None:
    """Raise UsageError at the start, not after an hour of tracing, if a file cannot be written there."""
    if path is None:
        return
    is_there = path.exists()
    try:
        if is_there and not path.is_file() and not path.is_dir():  # to open a pipe could take for ever
            return
        with path.open("ab"):
            pass
        if not is_there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def check_options(args: argparse.Namespace) -> None:
    """The same of all that the options of add_output() say, if there are such."""
    graph, output = getattr(args, "flamegraph", None), getattr(args, "output", None)
    check(output)
    check(graph)
    if graph and graph.suffix not in GRAPHS:
        raise UsageError(f"--flamegraph {graph}: rule: a name that ends in {' or '.join(GRAPHS)}")
    if graph and output and graph.absolute() == output.absolute():
        raise UsageError(f"--flamegraph {graph}: --output is the same file")
    if getattr(args, "format", "") == "pprof" and output is None and sys.stdout.isatty():
        raise UsageError("--format pprof: it is not for a terminal; rule: with -o FILE, or into a pipe")


def write(
    args: argparse.Namespace,
    profile: Profile,
    others: Mapping[str, Iterable[str]] = MappingProxyType({}),
    is_more: bool = False,
) -> None:
    """A profile, as the options of add_output() say: a flame graph is all, unless more is asked for.

    `others` are the lines of formats that are the tool's own. `is_more`: it comes after what was written
    before.
    """
    profile = replace(profile, title=args.command_line)
    write_graph(args, profile)
    if is_only_graph(args):
        return
    if args.format in others:
        write_text(args.output, others[args.format], is_more)
    elif args.format == "pprof":
        with _opened(args.output) as file, _explained(args.output):
            file.write(pprof.encode(profile))
    else:
        write_text(args.output, FORMATS[args.format](profile), is_more)


def write_graph(args: argparse.Namespace, profile: Profile) -> None:
    """The flame graph alone, if it is asked for."""
    if args.flamegraph:
        titled = replace(profile, title=args.command_line)
        write_text(args.flamegraph, [GRAPHS[args.flamegraph.suffix](titled)])


def is_only_graph(args: argparse.Namespace) -> bool:
    """Whether a flame graph is all that the user wants."""
    return bool(args.flamegraph and not args.output and not args.format_given)


@contextlib.contextmanager
def stream(path: Path | None) -> Iterator[Callable[[str], None]]:
    """What writes a text at once, as the result comes; in UTF-8, as write_text()."""
    with _opened(path) as file:

        def write(text: str) -> None:
            with _explained(path):
                file.write(text.encode(errors="backslashreplace"))
                file.flush()

        yield write


def write_text(path: Path | None, lines: Iterable[str], is_more: bool = False) -> None:
    """In UTF-8, whatever the locale: names are. `is_more` as of write()."""
    with _opened(path, "ab" if is_more else "wb") as file, _explained(path):
        file.writelines(line.encode("utf-8", "backslashreplace") for line in lines)


@contextlib.contextmanager
def _opened(path: Path | None, mode: str = "wb") -> Iterator[BinaryIO]:
    """Standard output if there is no path. Raises LockdError that names the file."""
    with _explained(path):
        sys.stdout.flush()
        file = cast("BinaryIO", path.open(mode)) if path else sys.stdout.buffer
    if not path:
        yield file
        with _explained(path):
            file.flush()  # but not after Ctrl-C: that would wait once more until somebody reads
        return
    try:
        yield file
    finally:
        with _explained(path):
            file.close()


@contextlib.contextmanager
def _explained(path: Path | None) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # nobody reads on
        raise
    except OSError as error:
        raise LockdError(f"{path or 'standard output'}: cannot be written: {error.strerror}") from error
