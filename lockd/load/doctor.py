"""A table of what this host offers, way by way and hook by hook, and in words why not what it does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

from lockd.errors import HostError
from lockd.kernel.btf import KernelTypes
from lockd.load.choose import Choice, available, choices_for, choose
from lockd.load.hooks import Part, Way, parts_of
from lockd.load.host import (
    TRACEFS_PLACES,
    Host,
    ensure_tracefs,
    require_pids_of_the_host,
    require_privileges,
)
from lockd.load.maps import require_batches
from lockd.load.settings import LoadSettings

Found = TypeVar("Found")
Row = tuple[str, str, str, str, str]
PROGRAMS = ("futex", "offcpu", "kernel_locks")
HEAD: Row = ("PROGRAM", "PART", "BY", "HOOK", "AVAILABLE")
OF_MODE_ALL = "holds"


def report() -> int:
    """Everything about this host; 3 if any program cannot run as it does by default."""
    release = os.uname()
    print(f"kernel      {release.release} {release.machine}")
    host = _general()
    if host is None:
        return HostError.exit_code
    parts = parts_of(PROGRAMS, "all")
    _print_table([(part, way) for part in parts for way in part.ways], host)
    return _print_choices([choose(part, "auto", host) for part in parts], optional=OF_MODE_ALL)


def check(settings: LoadSettings) -> int:
    """What would be attached with `settings`; 3 if any of its programs cannot run."""
    print("configuration: valid")
    host = _general()
    if host is None:
        return HostError.exit_code
    choices = choices_for(settings, host)
    _print_table([(choice.part, choice.way) for choice in choices if choice.way], host)
    return _print_choices(choices)


def _general() -> Host | None:
    """Print what every program needs; None if something of it is missing."""
    complete = True

    def probe(what: str, how: Callable[[], Found], remark: str = "", needed: bool = True) -> Found | None:
        nonlocal complete
        try:
            found = how()
        except HostError as error:
            print(f"{what:<11} no: {error}")
            complete = complete and not needed
            return None
        print(f"{what:<11} yes{remark}")
        return found

    probe("process ids", require_pids_of_the_host)
    probe("privileges", require_privileges)
    types = probe("BTF", KernelTypes)
    trace = probe("tracefs", ensure_tracefs, _tracefs_remark())
    probe("map batches", require_batches, needed=False)
    probe("bcc", _bcc)
    print()
    if types is None or trace is None or not complete:
        print("nothing can run here")
        return None
    return Host(types, trace)


def _tracefs_remark() -> str:
    if any(os.path.isdir(f"{place}/events") for place in TRACEFS_PLACES):
        return ""
    return ": not mounted on this host, so lockd mounts it for itself"


def _bcc() -> None:
    if not find_spec("bcc"):
        raise HostError("python3-bpfcc is not installed for this Python")


def _print_table(ways: list[tuple[Part, Way]], host: Host) -> None:
    rows = [HEAD, *(row for part, way in ways for row in _rows(part, way, host))]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    print()


def _rows(part: Part, way: Way, host: Host) -> list[Row]:
    """A row for each hook, or one for all of them if none is available for the same reason."""
    hooks = available(way, host)
    reasons = {reason for _, reason in hooks}
    if len(reasons) == 1 and "" not in reasons and len(hooks) > 1:
        return [(part.program, part.what, way.mechanism, f"all {len(hooks)}", f"no: {reasons.pop()}")]
    rows = []
    for hook, reason in hooks:
        verdict = "yes" if not reason else f"not needed: {reason}" if hook.optional else f"no: {reason}"
        rows.append((part.program, part.what, way.mechanism, f"{hook.mechanism} {hook.hook}", verdict))
    return rows


def _print_choices(choices: list[Choice], optional: str = "") -> int:
    """How each part will be done; 3 if one cannot be that is not `optional`."""
    impossible = False
    for choice in choices:
        name = f"{choice.part.program} {choice.part.what}:"
        if choice.way:
            because = f" (not by {choice.instead_of})" if choice.instead_of else ""
            print(f"{name:<20} by {choice.way.mechanism}{because}")
            continue
        why = choice.instead_of or choice.hooks[0][1]
        needed_for = " (only mode all needs it)" if choice.part.what == optional else ""
        print(f"{name:<20} cannot be measured here{needed_for}: {why}")
        impossible = impossible or choice.part.what != optional
    return HostError.exit_code if impossible else 0
