"""Tracepoints and the fields of their records, as tracefs describes them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from lockd.errors import HostError, UsageError

LINE = re.compile(r"\tfield:(?P<declared>[^;]+);\toffset:(\d+);\tsize:(\d+);\tsigned:([01]);")
COMMON_BYTES = 8
"""Bytes at the start of a record with the fields that all tracepoints have. Programs cannot read them."""
DYNAMIC = "__data_loc"
ARGUMENTS = {
    **dict.fromkeys(("int", "pid_t", "clockid_t", "key_t", "mqd_t", "s32", "timer_t"), (4, True)),
    **dict.fromkeys(("unsigned int", "unsigned", "uid_t", "gid_t", "u32", "qid_t"), (4, False)),
    **dict.fromkeys(("umode_t", "short unsigned int"), (2, False)),
    **dict.fromkeys(("long", "off_t", "loff_t"), (8, True)),
}
"""Bytes and signedness of the arguments of system calls, by C type. In records each has eight bytes."""
NEAREST = 5
"""The most names that a message suggests for a tracepoint that does not exist."""


@dataclass(frozen=True)
class Field:
    """A field of a tracepoint's record."""

    name: str
    type: str
    """The C type, such as `char[16]`."""
    offset: int
    """Bytes from the start of the record."""
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
        """Whether the field contains the offset and length of a text, not the text itself."""
        return re.fullmatch(rf"{DYNAMIC} (const )?char ?\[\]", self.type) is not None

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest number that the field can have."""
        bits = 8 * self.bytes
        return (-1 << bits - 1, (1 << bits - 1) - 1) if self.signed else (0, (1 << bits) - 1)


@dataclass(frozen=True)
class Tracepoint:
    category: str
    event: str
    fields: tuple[Field, ...]
    """The fields that programs can read."""

    def __str__(self) -> str:
        return f"{self.category}:{self.event}"

    def field(self, name: str) -> Field:
        """The field `name`. Raises UsageError, which lists the fields, unless it is a number or a text."""
        countable = [field for field in self.fields if field.is_number or field.is_text]
        field = next((field for field in self.fields if field.name == name), None)
        if field in countable:
            return field
        why = f"is of the type {field.type}" if field else "is not one of its fields"
        known = ", ".join(f"{field.name} ({field.type})" for field in countable)
        nearest = difflib.get_close_matches(name, [field.name for field in self.fields], 1)
        hint = f"; did you mean {nearest[0]}?" if nearest and not field else ""
        raise UsageError(f"{self}: {name} {why}{hint}\nnumbers and texts among its fields: {known or 'none'}")


def find(tracefs: Path, name: str) -> Tracepoint:
    """The tracepoint called CATEGORY:EVENT.

    Raises UsageError with the nearest names if there is none, HostError if its description cannot be read.
    """
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
    """The fields that a tracepoint's file `format` describes.

    `are_arguments` is whether they are arguments of a system call. The size of an argument follows from its
    type, because the file gives eight bytes for all.
    """
    fields = []
    for line in text.splitlines():
        if not (match := LINE.fullmatch(line)):
            continue
        offset, size, signed = int(match[2]), int(match[3]), match[4] == "1"
        type_, name = _type_and_name(match["declared"])
        if are_arguments and size == 8:
            size, signed = ARGUMENTS.get(type_.removeprefix("const "), (size, signed))
        if offset >= COMMON_BYTES:
            fields.append(Field(name, type_, offset, size, signed))
    return tuple(fields)


def _type_and_name(text: str) -> tuple[str, str]:
    """Type and name of a declaration: `char comm[16]`, `__data_loc char[] name`, `const char * name`."""
    match = re.fullmatch(r"(.*?)\s*\b(\w+)((?:\[[^\]]*\])*)", text)
    return (f"{match[1]}{match[3]}", match[2]) if match else (text, text)


def _nearest(tracefs: Path, category: str, event: str) -> str:
    """A suggestion `; did you mean A, B?` of similar tracepoints, or an empty string."""
    events = [
        f"{directory.parent.name}:{directory.name}"
        for directory in (tracefs / "events").glob("*/*")
        if directory.is_dir()
    ]
    same = [name for name in events if name.endswith(f":{event}")]
    nearest = same[:NEAREST] or difflib.get_close_matches(f"{category}:{event}", events, NEAREST)
    return f"; did you mean {', '.join(nearest)}?" if nearest else ""
