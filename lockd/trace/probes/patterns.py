"""The patterns by which a user names functions and tracepoints, and the places of probes that they match.

The syntax is that of bcc's tools.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockd.errors import HostError, UsageError
from lockd.load.hooks import Candidate, Part, Way
from lockd.load.host import ensure_tracefs
from lockd.names.objects.demangle import Demangler
from lockd.names.objects.elfutils import ElfError
from lockd.names.objects.mappings import Mappings
from lockd.names.objects.object_file import (
    FunctionEntry,
    ObjectFile,
    all_functions,
    functions_by_name,
    open_object,
)
from lockd.names.objects.process_files import opened_root
from lockd.trace.probes.binaries import IN_LIBC, Binary, find_binaries, is_wildcard

KERNEL, USER, TRACEPOINT = "kernel function", "user function", "tracepoint"
"""The kinds of patterns, as messages name them."""
MECHANISMS = {KERNEL: ("kprobe", "fentry"), USER: ("uprobe",), TRACEPOINT: ("tracepoint",)}
NEAREST = 3
"""The most names that a message suggests if no name matches."""
COMPARED = 20_000
"""The most names that are compared with the user's word to suggest similar ones. Each comparison takes about
10 us."""
BEGINS_ALIKE = 3
"""If there are more than COMPARED names, only some of them are compared with the user's word: those that
begin with this many of its first characters, and those that contain the whole word."""
MOST = 1000
"""The most functions or tracepoints that one pattern may match, as in bcc."""
PROGRAM = "trace"
"""The value of hooks.Candidate.program for all probes of a pattern."""
NO_EVENTS = ("ftrace",)
"""Categories of events in tracefs to which no program can be attached."""

_OBJECT = re.compile(r"[\w./+*?\[\]-]+")
"""The name of a program or library, or a pattern for those that a process has mapped. With a `/`, it is one
whatever else is in it, since no function of the kernel has a `/` in its name."""


@dataclass(frozen=True)
class Pattern:
    """A name, a name with `*` for any text, or a regular expression for the beginning of names."""

    text: str
    """The pattern as the user wrote it."""
    kind: str
    """KERNEL, USER or TRACEPOINT."""
    object: str
    """For user functions: the program or library, as the user wrote it."""
    name: str
    """The part of the pattern that function names or tracepoints are matched with."""
    is_regex: bool

    @property
    def is_exact(self) -> bool:
        return not self.is_regex and "*" not in self.name

    @property
    def is_demangled(self) -> bool:
        """Whether the pattern is for names as they stand in C++ or Rust sources."""
        return "::" in self.name

    def matcher(self) -> Callable[[str], bool]:
        """A function that returns whether a name matches. Raises re.error for an invalid expression."""
        if self.is_exact:
            return self.name.__eq__
        expression = self.name if self.is_regex else ".*".join(map(re.escape, self.name.split("*")))
        compiled = re.compile(expression)
        match = compiled.match if self.is_regex else compiled.fullmatch
        return lambda name: match(name) is not None

    def nearest(self, names: Iterable[str]) -> str:
        """A suggestion `; did you mean A or B?` of similar names, or an empty string."""
        word = max(re.findall(r"[\w:]+", self.name), key=len, default="")
        candidates = list(dict.fromkeys(names))
        if len(candidates) > COMPARED:
            beginning = word[:BEGINS_ALIKE]
            candidates = [name for name in candidates if word in name or name[:BEGINS_ALIKE] == beginning]
        similar = difflib.get_close_matches(word, candidates[:COMPARED], NEAREST) if word else []
        return f"; did you mean {' or '.join(similar)}?" if similar else ""


def parse(text: str, is_regex: bool = False) -> Pattern:
    """Parse `FUNCTION` (of the kernel), `OBJECT:FUNCTION` (of a program or library) or `t:CATEGORY:EVENT`.

    The first two may begin with `p:`, as in `p::FUNCTION`. Raises UsageError for an invalid pattern, and
    for one of USDT probes (`u:`).
    """
    if text.startswith("u:"):
        raise UsageError(
            f"{text}: u: is for USDT probes, which lockd cannot trace: give a function as OBJECT:FUNCTION, "
            "or a tracepoint as t:CATEGORY:EVENT"
        )
    if text.startswith("t:"):
        category, _, event = text[2:].partition(":")
        if not category or not event:
            raise UsageError(f"{text}: a tracepoint is written t:CATEGORY:EVENT, as t:sched:sched_switch")
        return _checked(Pattern(text, TRACEPOINT, "", f"{category}:{event}", is_regex))
    rest = text.removeprefix("p:")
    place, colon, name = rest.partition(":")
    if colon and not place and not name.startswith(":"):
        return _checked(Pattern(text, KERNEL, "", name, is_regex))
    if colon and ("/" in place or _OBJECT.fullmatch(place)):
        return _checked(Pattern(text, USER, place, name, is_regex))
    return _checked(Pattern(text, KERNEL, "", rest, is_regex))


def _checked(pattern: Pattern) -> Pattern:
    if not pattern.name:
        raise UsageError(f"{pattern.text or repr('')}: names no function, as in vfs_read, or c:malloc")
    try:
        pattern.matcher()
    except re.error as error:
        raise UsageError(f"{pattern.name}: no regular expression: {error}") from error
    return pattern


@dataclass(frozen=True)
class Place:
    """A place where a probe can be attached."""

    name: str
    """The name in messages: `vfs_read`, `libc.so.6:malloc`, `sched:sched_switch`."""
    hook: str
    """The value of hooks.Candidate.hook."""
    pid: int = 0
    """The id of the only process that is probed; 0: all processes."""
    file: str = ""
    """For a user function, the value of hooks.Candidate.file."""


@dataclass(frozen=True)
class Probes:
    """The places that a pattern matches. A result of resolve() has at least one place."""

    pattern: Pattern
    places: tuple[Place, ...]
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names that match as well but cannot be probed, by the reason."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(place.name for place in self.places)

    def part(self, function: str, files: tuple[str, ...]) -> Part:
        """The part that attaches the BPF function `function` of `files` to all places.

        If there are several places, the kernel may refuse some: the trace goes on without these.
        """
        ways = tuple(
            Way(mechanism, tuple(self._candidates(function, mechanism)), ())
            for mechanism in MECHANISMS[self.pattern.kind]
        )
        return Part(PROGRAM, "calls", ways, files)

    def _candidates(self, function: str, mechanism: str) -> Iterator[Candidate]:
        is_required = len(self.places) == 1
        for place in self.places:
            yield Candidate(
                PROGRAM,
                function,
                mechanism,
                place.hook,
                is_required,
                pid=place.pid,
                file=place.file,
                one_of_many=not is_required,
            )

    def remarks(self) -> Iterator[str]:
        """Sentences for the user about the names in `left_out`."""
        for reason, names in self.left_out.items():
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            yield f"{len(names):,} left out: {reason}: {shown}"


def resolve(pattern: Pattern, pids: tuple[int, ...] = ()) -> Probes:
    """The places that `pattern` matches; user functions in the processes `pids`, if any are given.

    Raises UsageError if the pattern matches nothing or too much, and HostError if nothing that it matches can
    be probed.
    """
    probes = _resolve(pattern, pids)
    names = set(probes.names)
    if len(names) > MOST:
        raise UsageError(f"{pattern.text}: matches {len(names):,} {pattern.kind}s; rule: at most {MOST:,}")
    if not names:
        raise HostError(f"{pattern.text}: no probe can be attached there: {'; '.join(probes.remarks())}")
    return probes


def _resolve(pattern: Pattern, pids: tuple[int, ...]) -> Probes:
    if pattern.kind == TRACEPOINT:
        return _tracepoints(pattern, ensure_tracefs() / "events")
    if pattern.kind == KERNEL:
        return KernelFunctions(ensure_tracefs()).find(pattern)
    try:
        return user_functions(pattern, find_binaries(pattern.object, pids))
    except UsageError:
        if pattern.object not in IN_LIBC:
            raise
        return user_functions(pattern, find_binaries("c", pids))


def _tracepoints(pattern: Pattern, events: Path) -> Probes:
    names = sorted(
        f"{file.parent.parent.name}:{file.parent.name}"
        for file in events.glob("*/*/id")
        if file.parent.parent.name not in NO_EVENTS
    )
    matches = pattern.matcher()
    places = tuple(Place(name, name) for name in names if matches(name))
    if not places:
        raise UsageError(
            f"{pattern.text}: none of the {len(names):,} tracepoints of this kernel ({events}) matches"
            f"{pattern.nearest(names)}"
        )
    return Probes(pattern, places)


class KernelFunctions:
    """The functions of a kernel, read from files of procfs, tracefs and debugfs.

    The files of tracefs and debugfs may be missing or unreadable.
    """

    SYMBOL = re.compile(rb"^([0-9a-f]+) [tTwW] (\S+)(?:\t\[(\w+)\])?$", re.MULTILINE)
    """A line of kallsyms that describes a function: address, name and module."""
    COPY = re.compile(r"\.(?:isra|constprop|part|llvm)\b.*")
    """The suffixes that compilers append to the names of copies of a function."""
    NO_FUNCTION = re.compile(r"__(?:pfx|cfi)_.*|.*\.cold(?:\.\d+)?")
    """Symbols that are no functions: the bytes before a function (`__pfx_`, `__cfi_`), and code that the
    compiler has moved out of a function, and to which the function jumps (`.cold`)."""
    MADE_AT_RUN_TIME = (b"bpf", b"__builtin__ftrace", b"__builtin__kprobes")
    """Names that kallsyms shows in place of a module for code that the kernel has generated."""
    FILTER = "available_filter_functions"

    def __init__(
        self,
        tracefs: Path,
        kallsyms: Path = Path("/proc/kallsyms"),
        blacklist: Path = Path("/sys/kernel/debug/kprobes/blacklist"),
    ) -> None:
        self._kallsyms = kallsyms
        self._filter = tracefs / self.FILTER
        self._blacklist = blacklist

    def find(self, pattern: Pattern) -> Probes:
        """The functions that match. Raises UsageError if none does, HostError if the kernel hides them.

        If no function has exactly the name, the name stands for the copies of that function that the compiler
        has made, such as NAME.isra.0.
        """
        counts = self._symbol_counts()
        matches = pattern.matcher()
        names = [name for name in counts if matches(name)]
        if not names and pattern.is_exact:
            names = [name for name in counts if matches(self.COPY.sub("", name))]
        if not names:
            raise UsageError(
                f"{pattern.name}: none of the {len(counts):,} functions of this kernel ({self._kallsyms}) "
                f"matches{'' if not pattern.is_exact else ', or the compiler has inlined it'}"
                f"{pattern.nearest(counts)}"
            )
        blacklisted, traceable = self._blacklisted(), self._traceable()
        places: list[Place] = []
        left_out: dict[str, list[str]] = {}
        for name in names:
            if name in blacklisted:
                reason = "the kernel allows no probes on it (kprobes/blacklist)"
            elif traceable and name not in traceable:
                reason = f"it cannot be traced ({self.FILTER})"
            elif counts[name] > 1:
                reason = "several functions have that name"
            else:
                places.append(Place(name, name))
                continue
            left_out.setdefault(reason, []).append(name)
        return Probes(pattern, tuple(places), _as_tuples(left_out))

    def _symbol_counts(self) -> dict[str, int]:
        """The number of functions of each name.

        Functions of the section .init.text are left out: the kernel has freed them after its start.
        """
        symbols = self.SYMBOL.findall(self._kallsyms.read_bytes())
        bounds = {name: address for address, name, _ in symbols if name in (b"_sinittext", b"_einittext")}
        first, last = bounds.get(b"_sinittext", b""), bounds.get(b"_einittext", b"")
        counts: dict[str, int] = {}
        for address, name, owner in symbols:
            if owner in self.MADE_AT_RUN_TIME or first <= address < last:
                continue
            text_name = name.decode()
            if not self.NO_FUNCTION.fullmatch(text_name):
                counts[text_name] = counts.get(text_name, 0) + 1
        if not any(int(address, 16) for address, _, _ in symbols[:100]):
            raise HostError(
                f"{self._kallsyms}: the kernel hides its functions (kernel.kptr_restrict) or lists none"
            )
        return counts

    def _blacklisted(self) -> set[str]:
        """The functions that the kernel refuses to probe, from lines of the form `0xSTART-0xEND NAME`."""
        return {line.split()[-1] for line in _lines(self._blacklist)}

    def _traceable(self) -> set[str]:
        """The functions that the kernel can trace, from lines of the form `NAME` or `NAME [MODULE]`; empty if
        the file cannot be read."""
        return {line.split()[0] for line in _lines(self._filter)}


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def _as_tuples(names: dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {reason: tuple(group) for reason, group in names.items()}


def user_functions(pattern: Pattern, binaries: Iterable[Binary]) -> Probes:
    """The functions of `binaries` that match.

    Raises UsageError if none matches, or if a file that is named without wildcards is no program or library.
    """
    places: list[Place] = []
    left_out: dict[str, list[str]] = {}
    searched: list[str] = []
    names: set[str] = set()
    for binary in binaries:
        try:
            with opened_root(Path(f"/proc/{binary.pid or 'self'}")) as root:
                file = open_object(os.dup(binary.descriptor), root.directories, os.fsencode(binary.path))
        except ElfError as error:
            if is_wildcard(pattern.object):  # processes map other files as code, too
                searched.append(f"{binary.path} (no program or library)")
                continue
            raise UsageError(f"{binary.path}: is no program or library: {error}") from error
        try:
            entries = functions_by_name(file, _function_matcher(pattern))
            for entry in entries:
                offset, reason = _probe_offset(file, binary, entry)
                name = entry.names[0]
                if reason:
                    left_out.setdefault(reason, []).append(name)
                else:
                    hook = f"{binary.path}+{offset:#x}"
                    places.append(Place(f"{binary.name}:{name}", hook, binary.pid, binary.place))
            if not entries:
                names.update(symbol.name for symbol in all_functions(file))
                note = "" if file.has_full_symbols else " (only its exported functions have names)"
                searched.append(f"{binary.path}{note}")
        finally:
            file.close()
    if not places and not left_out:
        raise UsageError(
            f"{pattern.text}: none of the {len(names):,} functions of {', '.join(searched)} matches"
            f"{pattern.nearest(names)}"
        )
    unique = tuple({(place.hook, place.pid, place.file): place for place in places}.values())
    return Probes(pattern, unique, _as_tuples(left_out))


def _function_matcher(pattern: Pattern) -> Callable[[str], bool]:
    matches = pattern.matcher()
    if not pattern.is_demangled:
        return matches
    demangler = Demangler()
    return lambda name: matches(demangler.name(name)) if name.startswith(("_Z", "_R")) else matches(name)


def _probe_offset(file: ObjectFile, binary: Binary, entry: FunctionEntry) -> tuple[int, str]:
    """The offset in the file at which to attach the probe, and an empty text.

    If no probe can be attached, the text is the reason.
    """
    if entry.is_indirect:
        address = max(_ifunc_address(file, binary.descriptor, name) for name in entry.names)
        if address < 0:
            return -1, "it stands for one of several functions (IFUNC), and which one is unknown"
        return file.file_offset(address), ""
    return entry.offset, "" if entry.offset >= 0 else "the file has no code there"


def _ifunc_address(file: ObjectFile, descriptor: int, name: str) -> int:
    """The address, as in the ELF file, of the function that the linker chooses here for an IFUNC, or -1.

    An IFUNC such as `strlen` stands for one of several functions, which the linker chooses by the processor.
    The choice is known only for libraries that this process has loaded as well, such as the C library.
    """
    status = os.fstat(descriptor)
    mappings = Mappings(Path("/proc/self/maps").read_bytes())
    for mapping in mappings.code_files():
        if mapping.inode != status.st_ino:
            continue
        with contextlib.suppress(OSError, AttributeError, ElfError):
            # On btrfs and overlayfs, stat() returns another device than /proc/PID/maps shows.
            if not os.path.samestat(os.stat(mapping.path), status):
                continue
            function = getattr(ctypes.CDLL(os.fsdecode(mapping.path)), name)
            address = ctypes.cast(function, ctypes.c_void_p).value or 0
            chosen = mappings.find(address)
            if chosen and chosen.inode == mapping.inode:
                return address - file.bias(chosen)
    return -1
