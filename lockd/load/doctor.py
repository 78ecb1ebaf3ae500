"""The reports of `lockd doctor` and `lockd check`: which ways and hooks this host has, and why not others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
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
from lockd.load.settings import LoadSettings

Result = TypeVar("Result")
Row = tuple[str, str, str, str, str]
PROGRAMS = ("futex", "offcpu", "kernel_locks")
HEAD: Row = ("PROGRAM", "PART", "BY", "HOOK", "AVAILABLE")
NO_PARTS: Mapping[str, str] = MappingProxyType({})
NOT_BY_DEFAULT = {"holds": "all", "calls": "calls"}
"""The parts that a program's default mode does without, each with the mode that needs it."""


def report() -> int:
    """Print which conditions, ways and hooks this host has.

    Returns the exit code, which is 3 if a part of the work of a program in its default mode cannot be done.
    """
    system = os.uname()
    print(f"kernel      {system.release} {system.machine}")
    host = _check_host()
    if host is None:
        return HostError.exit_code
    parts = parts_of(PROGRAMS, "all", "calls")
    _print_table([(part, way) for part in parts for way in part.ways], host)
    return _print_choices([choose(part, "auto", host) for part in parts], NOT_BY_DEFAULT)


def check(settings: LoadSettings) -> int:
    """Print what would be attached with `settings`.

    Returns the exit code, which is 3 if a part of the programs' work cannot be done.
    """
    print("configuration: valid")
    host = _check_host()
    if host is None:
        return HostError.exit_code
    choices = choices_for(settings, host)
    _print_table([(choice.part, choice.way) for choice in choices if choice.way], host)
    return _print_choices(choices)


def _check_host() -> Host | None:
    """Print which conditions this host meets; return None if it lacks one that every program needs.

    Two conditions are none of these. Without ring buffers there are no samples, and only the tracepoints that
    count futex calls need tracefs.
    """
    is_complete = True

    def check_condition(
        name: str, requirement: Callable[[], Result], remark: str = "", is_needed: bool = True
    ) -> Result | None:
        nonlocal is_complete
        try:
            result = requirement()
        except HostError as error:
            print(f"{name:<11} no: {error}")
            is_complete = is_complete and not is_needed
            return None
        print(f"{name:<11} yes{remark}")
        return result

    check_condition("process ids", require_pids_of_the_host)
    check_condition("privileges", require_privileges)
    types = check_condition("BTF", KernelTypes)
    host = Host(types) if types else None
    if host:
        check_condition("rings", host.require_rings, is_needed=False)
    check_condition("tracefs", ensure_tracefs, _tracefs_remark(), is_needed=False)
    check_condition("bcc", _require_bcc)
    print()
    if host is None or not is_complete:
        print("nothing can run here")
        return None
    return host


def _tracefs_remark() -> str:
    if any(os.path.isdir(f"{place}/events") for place in TRACEFS_PLACES):
        return ""
    return ": not mounted on this host, so lockd mounts it for itself"


def _require_bcc() -> None:
    if not find_spec("bcc"):
        raise HostError("python3-bpfcc is not installed for this Python")


def _print_table(ways: list[tuple[Part, Way]], host: Host) -> None:
    rows = [HEAD, *(row for part, way in ways for row in _rows(part, way, host))]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    print()


def _rows(part: Part, way: Way, host: Host) -> list[Row]:
    """Return a row for each hook, or one row for all hooks if one reason makes all of them unavailable."""
    hooks = available(way, host)
    reasons = {reason for _, reason in hooks}
    if len(reasons) == 1 and "" not in reasons and len(hooks) > 1:
        return [(part.program, part.what, way.mechanism, f"all {len(hooks)}", f"no: {reasons.pop()}")]
    rows = []
    for hook, reason in hooks:
        verdict = "yes" if not reason else f"not needed: {reason}" if hook.optional else f"no: {reason}"
        rows.append((part.program, part.what, way.mechanism, f"{hook.mechanism} {hook.hook}", verdict))
    return rows


def _print_choices(choices: list[Choice], optional: Mapping[str, str] = NO_PARTS) -> int:
    """Print how each part will be done; return the exit code, 3 if one cannot be done.

    A part whose `what` is in `optional` does not affect the exit code; the value is the mode that needs it.
    """
    is_impossible = False
    for choice in choices:
        name = f"{choice.part.program} {choice.part.what}:"
        mode = optional.get(choice.part.what)
        if choice.way:
            because = f" (not by {choice.instead_of})" if choice.instead_of else ""
            print(f"{name:<20} by {choice.way.mechanism}{because}")
            continue
        needed_for = f" (only mode {mode} needs it)" if mode else ""
        print(f"{name:<20} cannot be measured here{needed_for}: {choice.instead_of}")
        is_impossible = is_impossible or not mode
    return HostError.exit_code if is_impossible else 0
