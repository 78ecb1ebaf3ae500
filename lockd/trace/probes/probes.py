"""Where probes go for a pattern: functions of the kernel, of programs and libraries, tracepoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockd.errors import HostError, UsageError
from lockd.load.hooks import Candidate, Part, Way
from lockd.load.host import ensure_tracefs
from lockd.names.objects.demangle import Demangler
from lockd.names.objects.elfutils import ElfError
from lockd.names.objects.object_file import (
    FunctionEntry,
    ObjectFile,
    all_functions,
    functions_by_name,
    open_object,
)
from lockd.trace.probes.indirect import chosen_function
from lockd.trace.probes.kernel_functions import Kernel
from lockd.trace.probes.objects import IN_LIBC, Object, objects_named
from lockd.trace.probes.patterns import KERNEL, TRACEPOINT, USER, Pattern

MOST = 1000
"""Functions or tracepoints that one pattern may match, as with bcc."""
PROGRAM = "trace"
"""As hooks.Candidate has it."""
NO_EVENTS = ("ftrace",)
"""Categories of what tracefs lists as events, and no program can be attached to."""


@dataclass(frozen=True)
class Place:
    """Somewhere that a probe can be put."""

    name: str
    """`vfs_read`, `libc.so.6:malloc`, `sched:sched_switch`."""
    hook: str
    """As in hooks.Candidate."""
    pid: int = 0
    """Of the only process that is meant; 0: all."""


@dataclass(frozen=True)
class Probes:
    """What a pattern stands for, at least one place."""

    pattern: Pattern
    places: tuple[Place, ...]
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of what matches too: by reason, the names of what cannot be probed."""

    def part(self, function: str, files: tuple[str, ...], what: str = "calls") -> Part:
        """Calls the BPF function `function` of `files` from all these places. Of several, some may fail."""
        mechanisms = {KERNEL: ("kprobe", "fentry"), USER: ("uprobe",), TRACEPOINT: ("tracepoint",)}
        return Part(
            PROGRAM,
            what,
            tuple(
                Way(one, tuple(self.candidates(function, one)), ()) for one in mechanisms[self.pattern.kind]
            ),
            files,
        )

    def candidates(self, function: str, mechanism: str) -> Iterator[Candidate]:
        """One for each place."""
        is_required = len(self.places) == 1
        for place in self.places:
            yield Candidate(
                PROGRAM,
                function,
                mechanism,
                place.hook,
                is_required,
                pid=place.pid,
                one_of_many=not is_required,
            )

    def remarks(self) -> Iterator[str]:
        """What is to be said of what was left out."""
        for reason, names in self.left_out.items():
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            yield f"{len(names):,} left out: {reason}: {shown}"


def resolve(pattern: Pattern, pids: tuple[int, ...] = ()) -> Probes:
    """The places that `pattern` stands for; user functions in the processes `pids`, if there are any.

    Raises UsageError if it matches nothing, or too much, HostError if what matches cannot be probed.
    """
    found = _resolve(pattern, pids)
    names = {place.name for place in found.places}
    if len(names) > MOST:
        raise UsageError(
            f"{pattern.text}: matches {len(names):,} {pattern.kind}s: there can be {MOST:,}; narrow it down"
        )
    if not names:
        raise HostError(f"{pattern.text}: no probe can be put there: {'; '.join(found.remarks())}")
    return found


def _resolve(pattern: Pattern, pids: tuple[int, ...]) -> Probes:
    if pattern.kind == TRACEPOINT:
        return _tracepoints(pattern, ensure_tracefs() / "events")
    if pattern.kind == KERNEL:
        functions = Kernel(ensure_tracefs()).find(pattern)
        return Probes(pattern, tuple(Place(one, one) for one in functions.names), functions.left_out)
    try:
        return user_functions(pattern, objects_named(pattern.object, pids))
    except UsageError:
        if pattern.object not in IN_LIBC:
            raise
        return user_functions(pattern, objects_named("c", pids))


def _tracepoints(pattern: Pattern, events: Path) -> Probes:
    names = sorted(
        f"{one.parent.parent.name}:{one.parent.name}"
        for one in events.glob("*/*/id")
        if one.parent.parent.name not in NO_EVENTS
    )
    is_meant = pattern.matcher()
    found = tuple(Place(name, name) for name in names if is_meant(name))
    if not found:
        raise UsageError(
            f"{pattern.text}: none of the {len(names):,} tracepoints of this kernel ({events}) matches"
            f"{pattern.nearest(names)}"
        )
    return Probes(pattern, found)


def user_functions(pattern: Pattern, objects: Iterable[Object]) -> Probes:
    """The functions of `objects` that match. Takes their descriptors. Raises UsageError if there is none."""
    places: list[Place] = []
    left_out: dict[str, list[str]] = {}
    looked: list[str] = []
    names: set[str] = set()
    for one in objects:
        try:
            file = open_object(one.opened, Path(f"/proc/{one.pid or 'self'}"), os.fsencode(one.path))
        except ElfError as error:
            raise UsageError(f"{one.path}: is no program or library: {error}") from error
        try:
            entries = functions_by_name(file, _matcher(pattern))
            for entry in entries:
                offset, reason = _offset(file, one, entry)
                if reason:
                    left_out.setdefault(reason, []).append(entry.names[0])
                else:
                    places.append(Place(f"{one.name}:{entry.names[0]}", f"{one.place}+{offset:#x}", one.pid))
            if not entries:
                names.update(symbol.name for symbol in all_functions(file))
                kind = "" if file.has_full_symbols else ", of which only exported functions have names"
                looked.append(f"{one.path}{kind}")
        finally:
            file.close()
    if not places and not left_out:
        raise UsageError(
            f"{pattern.text}: none of the {len(names):,} functions matches of {', '.join(looked)}"
            f"{pattern.nearest(names)}"
        )
    unique = tuple({(place.hook, place.pid): place for place in places}.values())
    return Probes(pattern, unique, {reason: tuple(some) for reason, some in left_out.items()})


def _matcher(pattern: Pattern) -> Callable[[str], bool]:
    is_meant = pattern.matcher()
    if not pattern.is_demangled:
        return is_meant
    demangler = Demangler()
    return lambda name: is_meant(demangler.name(name)) if name.startswith(("_Z", "_R")) else is_meant(name)


def _offset(file: ObjectFile, one: Object, entry: FunctionEntry) -> tuple[int, str]:
    """Where in the file a probe is to be put, or why none can be."""
    if entry.is_indirect:
        address = max(chosen_function(file, one.opened, name) for name in entry.names)
        if address < 0:
            return -1, "it stands for one of several functions (IFUNC), which one is not to be told"
        return file.file_offset(address), ""
    return entry.offset, "" if entry.offset >= 0 else "the file has no code there"
