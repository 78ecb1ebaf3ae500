"""The rules that values of the configuration must follow.

A rule turns a YAML node into a value, or raises Broken. Its text `wants` describes correct values, in
messages of the form "VALUE is not ..." as well as in config/lockd.yaml.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

import yaml

T = TypeVar("T")
U = TypeVar("U")

STR, INT, BOOL, NULL = (f"tag:yaml.org,2002:{name}" for name in ("str", "int", "bool", "null"))

UNITS_NS = {
    "d": 86_400_000_000_000,
    "h": 3_600_000_000_000,
    "m": 60_000_000_000,
    "s": 1_000_000_000,
    "ms": 1_000_000,
    "us": 1_000,
}
_DURATION = re.compile("".join(rf"(?:([0-9]{{1,18}}){unit})?" for unit in UNITS_NS))
_ADDRESS = re.compile(r"(?:\[([^\]]+)\]|([A-Za-z0-9._-]*)):([0-9]{1,5})")
ADDRESS_WANTS = "HOST:PORT, such as 127.0.0.1:9776, [::1]:9776 or :9776 for every interface"


@dataclass(frozen=True)
class Fault:
    """A value that breaks a rule: its node, its place relative to the key, such as `[2]`, and what is
    wrong."""

    node: yaml.Node
    says: str
    place: str = ""


class Broken(Exception):
    """A value breaks its rule. A list can break its rule in several places, with a fault for each."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(*faults)
        self.faults = faults


class NotYet(Exception):
    """A value is correct, but this release of lockd does not support it."""


@dataclass(frozen=True)
class Rule(Generic[T]):
    """What a value must be, and how it is read from a YAML node."""

    wants: str
    read: Callable[[yaml.Node], T]

    def read_text(self, text: str) -> T:
        """The value that `text` has in a configuration file. Raises Broken if `text` breaks the rule."""
        return self.read(cast(yaml.Node, yaml.compose(text, Loader=yaml.SafeLoader)))


def parse_duration(text: str) -> int:
    """The nanoseconds in a duration such as 50ms, 1m or 1h30m, with units from large to small, or 0.

    Raises ValueError if the text is no such duration.
    """
    match = _DURATION.fullmatch(text)
    if text == "0":
        return 0
    if not text or match is None:
        raise ValueError(text)
    numbers = zip(match.groups("0"), UNITS_NS.values(), strict=True)
    return sum(int(number) * unit for number, unit in numbers)


def parse_address(text: str) -> tuple[str, int]:
    """The host and the port in HOST:PORT. An IPv6 host is in brackets; no host stands for every interface.

    Raises ValueError if the text is no such address.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise ValueError(text)
    six, host, port = match.groups()
    if six:
        ipaddress.IPv6Address(six)
    elif host and not re.search("[A-Za-z]", host):  # without letters it must be an address; 1.2.3 is none
        try:
            socket.inet_pton(socket.AF_INET, host)
        except OSError:
            raise ValueError(text) from None
    return six or host, int(port)


def scalar(wants: str, tags: set[str], parse: Callable[[str], T]) -> Rule[T]:
    """A single value of one of the YAML types `tags`. `parse` raises ValueError for a wrong value."""

    def read(node: yaml.Node) -> T:
        if isinstance(node, yaml.ScalarNode) and node.tag in tags:
            try:
                return parse(node.value)
            except ValueError:
                pass
            except NotYet as error:
                raise Broken(Fault(node, str(error))) from None
        raise Broken(Fault(node, f"is not {wants}"))

    return Rule(wants, read)


def duration(low: str, high: str) -> Rule[int]:
    """A duration, which is read as nanoseconds. Only 0, if `low` allows it, may have no unit."""
    low_ns, high_ns = parse_duration(low), parse_duration(high)

    def parse(text: str) -> int:
        return within(parse_duration(text), low_ns, high_ns)

    start = f"a duration from {low} to {high}" if low_ns else f"0 or a duration up to {high}"
    return scalar(start, {STR, INT}, parse)


def within(number: int, low: int, high: int) -> int:
    """`number`, if it is from `low` to `high`; else raises ValueError."""
    if not low <= number <= high:
        raise ValueError(number)
    return number


def _decimal(text: str) -> int:
    # YAML 1.1 reads 010 as 8 and 1:30 as 90, which nobody means.
    if not re.fullmatch(r"0|[1-9][0-9_]{0,17}", text):
        raise ValueError(text)
    return int(text.replace("_", ""))


def integer(low: int, high: int) -> Rule[int]:
    wants = f"a whole number from {low} to {high}"
    return scalar(wants, {INT}, lambda text: within(_decimal(text), low, high))


def power_of_two(low: int, high: int) -> Rule[int]:
    def parse(text: str) -> int:
        number = within(_decimal(text), low, high)
        if number & (number - 1):
            raise ValueError(number)
        return number

    return scalar(f"a power of two from {low} to {high}", {INT}, parse)


def share(low: str, high: str) -> Rule[float]:
    """A share in percent, which is read as a fraction: `2%` as 0.02. A number without % is refused as
    unclear."""

    def parse(text: str) -> float:
        if not re.fullmatch(r"(0|[1-9][0-9]{0,2})(\.[0-9]{1,3})?%", text):
            raise ValueError(text)
        return float(text.removesuffix("%")) / 100

    def parse_within(text: str) -> float:
        if not parse(low) <= parse(text) <= parse(high):
            raise ValueError(text)
        return parse(text)

    return scalar(f"a share from {low} to {high}", {STR}, parse_within)


def boolean() -> Rule[bool]:
    def parse(text: str) -> bool:
        if text.lower() not in ("true", "false"):  # YAML 1.1 also reads yes, no, on and off as booleans
            raise ValueError(text)
        return text.lower() == "true"

    return scalar("true or false", {BOOL}, parse)


def choice(*names: str, not_yet: tuple[str, ...] = ()) -> Rule[str]:
    """One of the words in `names`. The words in `not_yet` are correct, but not supported by this release."""

    def parse(text: str) -> str:
        if text in not_yet:
            raise NotYet(f"is not in this release: use {' or '.join(names)}")
        if text not in names:
            raise ValueError(text)
        return text

    later = f" ({', '.join(not_yet)}: not in this release)" if not_yet else ""
    return scalar(f"one of {', '.join(names)}{later}", {STR}, parse)


def glob(longest: int | None = None) -> Rule[str]:
    """A name or a shell pattern. A name of more than `longest` bytes is refused, as it could never match."""

    def parse(text: str) -> str:
        too_long = longest and not set(text) & set("*?[") and len(text.encode()) > longest
        if not text or not text.isprintable() or too_long:
            raise ValueError(text)
        return text

    at_most = f" of at most {longest} bytes" if longest else ""
    return scalar(f"a string: a name{at_most}, or a shell pattern", {STR}, parse)


def address() -> Rule[tuple[str, int]]:
    return scalar(ADDRESS_WANTS, {STR}, parse_address)


def absolute_path() -> Rule[Path]:
    def parse(text: str) -> Path:
        if not text.startswith("/") or not text.isprintable():
            raise ValueError(text)
        return Path(text)

    return scalar("a path that starts with /", {STR}, parse)


def or_none(rule: Rule[T], word: str) -> Rule[T | None]:
    """A value of `rule`, or None, which is written as `word` or as null."""
    return _or(rule, word, None, {NULL})


def or_word(rule: Rule[T], word: str, value: U) -> Rule[T | U]:
    """A value of `rule`, or the word `word`, which is read as `value`."""
    return _or(rule, word, value, set())


def _or(rule: Rule[T], word: str, value: U, tags: set[str]) -> Rule[T | U]:
    def read(node: yaml.Node) -> T | U:
        if isinstance(node, yaml.ScalarNode) and (node.tag in tags or node.value == word):
            return value
        try:
            return rule.read(node)
        except Broken as error:
            faults = (Fault(f.node, f"{f.says}, or {word}", f.place) for f in error.faults)
            raise Broken(*faults) from None

    return Rule(f"{rule.wants}, or {word}", read)


def list_of(
    item: Rule[T], wants: str, fits: Callable[[tuple[T, ...]], bool] = lambda values: True
) -> Rule[tuple[T, ...]]:
    """A list whose items follow the rule `item`, and for which `fits` returns True.

    `wants` describes a correct list.
    """

    def read(node: yaml.Node) -> tuple[T, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise Broken(Fault(node, f"is not {wants}"))
        values, faults = [], []
        for at, child in enumerate(node.value):
            try:
                values.append(item.read(child))
            except Broken as error:
                faults += [Fault(f.node, f.says, f"[{at}]{f.place}") for f in error.faults]
        if faults:
            raise Broken(*faults)
        if not fits(tuple(values)):
            raise Broken(Fault(node, f"is not {wants}"))
        return tuple(values)

    return Rule(wants, read)
