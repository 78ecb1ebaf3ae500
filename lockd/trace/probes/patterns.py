"""What a user writes to say which functions or tracepoints are meant, as bcc's tools take it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lockd.errors import UsageError

KERNEL, USER, TRACEPOINT = "kernel function", "user function", "tracepoint"
NEAREST = 3
COMPARED = 20_000
"""Names that are compared with one that is not found; it takes some 10 us for each."""
BEGINS_ALIKE = 3

_OBJECT = re.compile(r"[\w./+*?\[\]-]+")
"""Of a program or a library, a path, or a pattern for those that a process has mapped."""


@dataclass(frozen=True)
class Pattern:
    """A pattern with `*` for anything, or a regular expression that a name must begin with."""

    text: str
    """As it was written."""
    kind: str
    """KERNEL, USER or TRACEPOINT."""
    object: str
    """Of user functions: the program or library that they are in."""
    name: str
    is_regex: bool

    @property
    def is_exact(self) -> bool:
        return not self.is_regex and "*" not in self.name

    @property
    def is_demangled(self) -> bool:
        """Whether it is about names of C++ or Rust as their authors wrote them."""
        return "::" in self.name

    def matcher(self) -> Callable[[str], bool]:
        """Whether a name is meant."""
        if self.is_exact:
            return self.name.__eq__
        expression = self.name if self.is_regex else _anything(self.name)
        compiled = re.compile(expression)
        found = compiled.match if self.is_regex else compiled.fullmatch
        return lambda name: found(name) is not None

    def nearest(self, names: Iterable[str]) -> str:
        """`; did you mean A or B?`, of names that are like it; empty if none is."""
        word = max(re.findall(r"[\w:]+", self.name), key=len, default="")
        unique = list(dict.fromkeys(names))
        alike = [one for one in unique if word in one or one[:BEGINS_ALIKE] == word[:BEGINS_ALIKE]]
        if len(unique) <= COMPARED:
            alike = unique
        found = difflib.get_close_matches(word, alike[:COMPARED], NEAREST) if word else []
        return f"; did you mean {' or '.join(found)}?" if found else ""


def parse(text: str, is_regex: bool = False) -> Pattern:
    """`FUNCTION` of the kernel, `OBJECT:FUNCTION` of a program or library, `t:CATEGORY:EVENT`.

    `p:` may come before the first two, as in `p::FUNCTION`. Raises UsageError.
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
    if colon and _OBJECT.fullmatch(place):
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


def _anything(wildcards: str) -> str:
    return ".*".join(map(re.escape, wildcards.split("*")))
