"""Tracepoints as tracefs describes them: which there are, and where in a record the fields are."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from lockd.errors import HostError, UsageError

LINE = re.compile(r"\tfield:(?P<declared>[^;]+);\toffset:(\d+);\tsize:(\d+);\tsigned:([01]);")
COMMON_BYTES = 8
"""Programs see another thing where a record has what all tracepoints have in common."""
DYNAMIC = "__data_loc"
ARGUMENTS = {
    **dict.fromkeys(("int", "pid_t", "clockid_t", "key_t", "mqd_t", "s32", "timer_t"), (4, True)),
    **dict.fromkeys(("unsigned int", "unsigned", "uid_t", "gid_t", "u32", "qid_t"), (4, False)),
    **dict.fromkeys(("umode_t", "short unsigned int"), (2, False)),
    **dict.fromkeys(("long", "off_t", "loff_t"), (8, True)),
}
"""Bytes and sign of the types of system calls' arguments, for each of which a record has eight bytes."""
NEAREST = 5


@dataclass(frozen=True)
class Field:
    """One field of a tracepoint's record."""

    name: str
    type: str
    """As the kernel declares it, `char[16]`."""
    offset: int
    bytes: int
    signed: bool

    @property
    def is_number(self) -> bool:
        return self.bytes in (1, 2, 4, 8) and "[" not in self.type

    @property
    def is_text(self) -> bool:
        return self.is_dynamic or re.fullmatch(r"(const )?char ?\[\d+\]", self.type) is not None

    @property
    def is_dynamic(self) -> bool:
        """Whether what is in the record is where the text is."""
        return re.fullmatch(rf"{DYNAMIC} (const )?char ?\[\]", self.type) is not None

    @property
    def range(self) -> tuple[int, int]:
        """The least and the greatest number that it can be."""
        bits = 8 * self.bytes
        return (-1 << bits - 1, (1 << bits - 1) - 1) if self.signed else (0, (1 << bits) - 1)


@dataclass(frozen=True)
class Tracepoint:
    category: str
    event: str
    fields: tuple[Field, ...]
    """Those that programs can see."""

    def __str__(self) -> str:
        return f"{self.category}:{self.event}"

    def field(self, name: str) -> Field:
        """One that can be counted. Raises UsageError, which lists those that can be."""
        found = next((field for field in self.fields if field.name == name), None)
        if found and (found.is_number or found.is_text):
            return found
        why = f"is of the type {found.type}" if found else "is not one of its fields"
        known = ", ".join(
            f"{field.name} ({field.type})" for field in self.fields if field.is_number or field.is_text
        )
        nearest = difflib.get_close_matches(name, [field.name for field in self.fields], 1)
        hint = f"; did you mean {nearest[0]}?" if nearest and not found else ""
        raise UsageError(f"{self}: {name} {why}{hint}\nnumbers and texts among its fields: {known or 'none'}")


def find(tracefs: Path, name: str) -> Tracepoint:
    """CATEGORY:EVENT. Raises UsageError with the nearest names, HostError if the file cannot be read."""
    category, _, event = name.partition(":")
    if not (re.fullmatch(r"\w+", event) and re.fullmatch(r"[\w-]+", category)):
        nearest = _nearest(tracefs, "", name) if re.fullmatch(r"\w+", name) else ""
        raise UsageError(
            f"{name}: is not a tracepoint; rule: CATEGORY:EVENT, as syscalls:sys_exit_read{nearest}"
        )
    path = tracefs / "events" / category / event / "format"
    try:
        return Tracepoint(category, event, fields_of(path.read_text(), category == "syscalls"))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise HostError(f"{path}: {error.strerror}") from error
    raise UsageError(f"{name}: this kernel has no such tracepoint{_nearest(tracefs, category, event)}")


def fields_of(text: str, are_arguments: bool = False) -> tuple[Field, ...]:
    """Of a file `format`; `are_arguments`: of a system call, which are as wide as their types say."""
    fields = []
    for line in text.splitlines():
        if not (found := LINE.fullmatch(line)):
            continue
        offset, size, signed = int(found[2]), int(found[3]), found[4] == "1"
        type_, name = _declared(found["declared"])
        if are_arguments and size == 8:
            size, signed = ARGUMENTS.get(type_.removeprefix("const "), (size, signed))
        if offset >= COMMON_BYTES:
            fields.append(Field(name, type_, offset, size, signed))
    return tuple(fields)


def _declared(text: str) -> tuple[str, str]:
    """Type and name of `char comm[16]`, `__data_loc char[] name`, `const char * name`."""
    found = re.fullmatch(r"(.*?)\s*\b(\w+)((?:\[[^\]]*\])*)", text)
    return (f"{found[1]}{found[3]}", found[2]) if found else (text, text)


def _nearest(tracefs: Path, category: str, event: str) -> str:
    """What may have been meant, in words."""
    events = [
        f"{directory.parent.name}:{directory.name}"
        for directory in (tracefs / "events").glob("*/*")
        if directory.is_dir()
    ]
    same = [name for name in events if name.endswith(f":{event}")]
    nearest = same[:NEAREST] or difflib.get_close_matches(f"{category}:{event}", events, NEAREST)
    return f"; did you mean {', '.join(nearest)}?" if nearest else ""
