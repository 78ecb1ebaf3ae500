"""A table of what this host offers, hook by hook, and in words why not what it does not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TypeVar

from lockd.errors import HostError
from lockd.load.btf import KernelTypes
from lockd.load.host import Candidate, candidates, ensure_tracefs, require_privileges, unavailable

Found = TypeVar("Found")
PROGRAMS = ("futex", "offcpu", "kernel_locks")


def report() -> int:
    """Everything about this host; 3 if any program cannot run."""
    release = os.uname()
    print(f"kernel      {release.release} {release.machine}")
    return _table(PROGRAMS)


def check(programs: tuple[str, ...]) -> int:
    """What would be attached for `programs`; 3 if any of them cannot run."""
    print("configuration: valid")
    return _table(programs)


def _table(programs: tuple[str, ...]) -> int:
    wanted = [one for program in PROGRAMS if program in programs for one in candidates((program,))]
    reasons, general = _probe(wanted)
    for what, words in general:
        print(f"{what:<11} {words}")
    print()
    rows = [("PROGRAM", "HOOK", "MECHANISM", "AVAILABLE")]
    for one in wanted:
        reason = reasons[one]
        verdict = "yes" if not reason else f"not needed: {reason}" if one.optional else f"no: {reason}"
        rows.append((one.program, one.hook, one.mechanism, verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    unusable = sorted({one.program for one in wanted if one.required and reasons[one]})
    if unusable:
        print(f"\ncannot run here: {', '.join(unusable)}")
        return HostError.exit_code
    return 0


def _probe(wanted: Iterable[Candidate]) -> tuple[dict[Candidate, str], list[tuple[str, str]]]:
    """Why each candidate is not available (empty: it is), and words about the host in general."""
    general: list[tuple[str, str]] = []

    def probe(what: str, how: Callable[[], Found]) -> Found | None:
        try:
            found = how()
        except HostError as error:
            general.append((what, f"no: {error}"))
            return None
        general.append((what, "yes"))
        return found

    probe("privileges", require_privileges)
    types = probe("BTF", KernelTypes)
    trace = probe("tracefs", ensure_tracefs)
    general.append(("bcc", _bcc()))
    missing = [what for what, words in general if words.startswith("no")]
    if types is None or trace is None or missing:
        return dict.fromkeys(wanted, f"{', '.join(missing)} missing, see above"), general
    return {one: unavailable(one, types, trace) for one in wanted}, general


def _bcc() -> str:
    return "yes" if find_spec("bcc") else "no: python3-bpfcc is not installed for this Python"
