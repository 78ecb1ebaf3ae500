"""Reads a YAML file into nested dataclasses, and reports everything that is wrong with the file at once."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import yaml

from lockd.config.rules import NULL, Broken, Rule
from lockd.errors import ConfigError
from lockd.printable import printable

LARGEST_FILE = 1_048_576
"""The most bytes that a configuration file may have. A larger file was probably named by mistake."""
_INDICATOR = re.compile(r"[*&!%@`]|:(?![\s\0])")
"""Matches a character that cannot begin a value without quotes in YAML. A colon before a blank or at the end
of the text does not match: it separates a key from its value."""


class Section(Protocol):
    """A dataclass whose fields are made by key() and section().

    It may have a method `conflicts` for values that are correct one by one and wrong together. The method
    yields pairs of a key and what is wrong with its value. A key of a section inside is dotted; an empty key
    stands for the whole section.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


T = TypeVar("T")
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Key:
    """What one key of a section takes. `default` is written as in a file; config/lockd.yaml shows `help` to
    users."""

    rule: Rule[Any]
    default: str
    help: str
    reloads: bool = False
    """Whether a change of this key takes effect when lockd reloads its configuration."""


def key(rule: Rule[T], default: str, help: str, reloads: bool = False) -> T:
    """A field of a section: a key with one value."""
    about = Key(rule, default, help, reloads)
    return field(default=rule.read_text(default), metadata={"about": about})


def section(kind: type[S]) -> S:
    """A field of a section: a section inside it."""
    return field(default=kind(), metadata={"about": kind})


def described(kind: type[Section]) -> dict[str, tuple[str, Key | type[Section]]]:
    """By the name of each key of a section, a pair: the name of the key's field, and what the key takes.

    A key takes a value, which a Key describes, or a section, which its class describes.
    """
    fields = kind.__dataclass_fields__.values()
    return {f.name.removesuffix("_ns"): (f.name, f.metadata["about"]) for f in fields}


def all_keys(kind: type[Section], above: str = "") -> Iterator[tuple[str, Key | type[Section]]]:
    """Yield the dotted name of every key of a section and of the sections inside it, and what the key takes.

    A section comes before its own keys.
    """
    for name, (_, about) in described(kind).items():
        yield above + name, about
        if isinstance(about, type):
            yield from all_keys(about, f"{above}{name}.")


def read_file(kind: type[S], path: Path, may_be_empty: bool = True) -> S:
    """Read the section `kind` from the file at `path`. Raises ConfigError with everything that is wrong.

    If the file `may_be_empty`, an empty file stands for the defaults of all keys; else it is wrong.
    """
    try:
        # O_NONBLOCK: opening a pipe must not wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path}: cannot read this configuration: it is no regular file")
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this configuration: {error.strerror}") from None
    if len(data) > LARGEST_FILE:
        raise ConfigError(f"{path}: larger than 1 MiB, so not a configuration of lockd")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not text in UTF-8") from None
    return read_text(kind, text, str(path), may_be_empty)


def read_text(kind: type[S], text: str, file: str, may_be_empty: bool = True) -> S:
    """Read the section `kind` from a text, which messages call `file`. Raises ConfigError as read_file()
    does."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        says = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}: not valid YAML: {says}{_rule_of_quotes(error)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{file}:{line}: not valid YAML: {error.reason}") from None
    except (ValueError, OverflowError) as error:  # an escape such as "\UFFFFFFFF"
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file}: not valid YAML for lockd: nested too deeply") from None
    if root is None:
        if not may_be_empty:
            raise ConfigError(f"{file}: empty; rule: {{}} if nothing is to be set")
        return kind()
    reader = Reader(kind, file)
    values = reader.read(kind, root, "")
    if reader.problems:
        raise ConfigError("\n".join(text for _, text in sorted(reader.problems)))
    return values


def _rule_of_quotes(error: yaml.MarkedYAMLError) -> str:
    """The rule to add to the message if the error is about a value such as *.service or [:9776]; else ''."""
    for mark in (error.context_mark, error.problem_mark):
        if mark and (begins := _INDICATOR.match(mark.buffer or "", mark.pointer)):
            return f"; rule: a value that begins with {begins[0]} is in quotes"
    return ""


class Reader:
    """Reads the nodes of one file as sections. `problems` collects pairs of a line number and a message."""

    def __init__(self, grammar: type[Section], file: str) -> None:
        self.file = file
        self.problems: list[tuple[int, str]] = []
        self._given: dict[str, yaml.Node] = {}
        """The value of each key in the file, by its dotted name."""
        self._everywhere = [name for name, _ in all_keys(grammar)]

    def read(self, kind: type[S], node: yaml.Node, name: str) -> S:
        """The section at `node`. A value that is wrong is reported, and its key gets the default.

        `name` is the dotted name of the section; it is empty for the whole file.
        """
        known = described(kind)
        if isinstance(node, yaml.ScalarNode) and node.tag == NULL:
            return kind()  # such as `filter:` if all of its keys are commented out
        if not isinstance(node, yaml.MappingNode):
            self._report(node, name, f"is not a section with the keys {', '.join(known)}")
            return kind()
        values: dict[str, Any] = {}
        given: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            word = key_node.value if isinstance(key_node, yaml.ScalarNode) else _excerpt(key_node)
            if word not in known:
                self._add(key_node, _dotted(name, word), self._unknown(word, name, list(known)))
            elif word in given:
                first = given[word].start_mark.line + 1
                self._add(key_node, _dotted(name, word), f"given twice, first on line {first}")
            else:
                given[word] = self._given[_dotted(name, word)] = value
                field_name, about = known[word]
                values[field_name] = self._value(about, value, _dotted(name, word))
        result = kind(**values)
        for word, says in getattr(result, "conflicts", tuple)():
            dotted = _dotted(name, word)
            self._report(self._given.get(dotted, node), dotted, says)
        return result

    def _value(self, about: Key | type[Section], node: yaml.Node, name: str) -> object:
        if isinstance(about, type):
            return self.read(about, node, name)
        try:
            return about.rule.read(node)
        except Broken as error:
            for fault in error.faults:
                self._report(fault.node, name + fault.place, fault.says)
            return about.rule.read_text(about.default)

    def _unknown(self, word: str, above: str, siblings: list[str]) -> str:
        if "." not in word and (near := difflib.get_close_matches(word, siblings, n=1)):
            return f'unknown key; did you mean "{near[0]}"?'
        for name in self._everywhere:
            home, _, last = name.rpartition(".")
            if word in (name, last):
                place = f"in the section {home}" if home else "at the top level"
                return f'unknown key; did you mean "{last}" {place}?'
        return f"unknown key; {above or 'the top level'} has {', '.join(siblings)}"

    def _report(self, node: yaml.Node, name: str, says: str) -> None:
        self._add(node, name, f"{_excerpt(node)} {says}")

    def _add(self, node: yaml.Node, name: str, text: str) -> None:
        line = node.start_mark.line + 1
        name = f"{name}: " if name else ""
        self.problems.append((line, printable(f"{self.file}:{line}: {name}{text}")))


def _dotted(above: str, name: str) -> str:
    return ".".join(part for part in (above, name) if part)


def _excerpt(node: yaml.Node) -> str:
    """The value as it is written in the file: its first line, cut to 40 characters."""
    start, end = node.start_mark, node.end_mark
    written = (start.buffer or "")[start.pointer : end.pointer].strip()
    first = written.partition("\n")[0].rstrip()
    if len(first) > 40 or first != written:
        return first[:40] + " ..."
    return first or "nothing"
