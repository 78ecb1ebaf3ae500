"""Where a trace's result goes: standard output or a file, in the format that was asked for."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from lockd.errors import LockdError, UsageError
from lockd.trace.formats import FORMATS
from lockd.trace.profile import Profile


@contextlib.contextmanager
def opened(path: Path | None) -> Iterator[TextIO]:
    """Standard output if there is no path. Raises LockdError that names the file."""
    if path is None:
        yield sys.stdout
        return
    try:
        with path.open("w") as file:
            yield file
    except OSError as error:
        raise LockdError(f"{path}: cannot be written: {error.strerror}") from error


def check(path: Path | None) -> None:
    """Raise UsageError at the start, not after an hour of tracing, if a file cannot be written there."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"{path}: cannot be written: it is a directory, or is in none")


def write(args: argparse.Namespace, profile: Profile) -> None:
    """A profile, as the options of add_output() say."""
    write_text(args.output, FORMATS[args.format](profile))


def write_text(path: Path | None, lines: Iterable[str]) -> None:
    with opened(path) as file:
        file.writelines(lines)
