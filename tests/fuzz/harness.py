"""The class of harnesses, limits of what an input may cost, and ways to make one input from another."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

MOST_GROWTH = 64 << 10
"""The KiB by which one input may make the memory of the process grow at once."""
NUMBERS = (0, 1, 2, 7, 8, 15, 16, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31,
           2**32 - 1, 2**32, 2**47, 2**63 - 1, 2**63, 2**64 - 1, 2**64)  # fmt: skip
TEXTS = (
    "",
    "0",
    "-1",
    "true",
    "null",
    "\0",
    "\x1b[2J",
    "\ud800",
    "\u2028",
    "<b>",
    "a\nb",
    "é" * 300,
    "x" * 5000,
)
_DECIMAL = re.compile(rb"\d+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

Mutate = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Harness:
    """One sort of input, and the code of lockd that reads it."""

    name: str
    run: Callable[[bytes], None]
    """Has lockd read an input, and catches the exceptions that lockd may raise there. If `run` itself raises
    an exception, that is a finding.
    """
    seeds: Callable[[], Sequence[bytes]]
    """Returns real inputs, or inputs made like real ones."""
    mutate: Mutate
    """Changes an input so that lockd gets beyond its first check of it."""
    words: tuple[bytes, ...] = ()
    """Words that have a meaning in such inputs."""
    longest: int = 4096
    """The most bytes of an input."""
    seconds: float = 1.0
    """The seconds of CPU time that one input may take."""


class TooMuch(BaseException):
    """An input takes too much time or memory. lockd's handlers for Exception do not catch it."""


def execute(harness: Harness, data: bytes) -> None:
    """Run a harness on one input. A finding is raised as an exception."""
    before = _most_memory()
    signal.setitimer(signal.ITIMER_PROF, harness.seconds)
    try:
        harness.run(data)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = _most_memory() - before
    if grown > MOST_GROWTH:
        raise TooMuch(f"memory: {grown} KiB more for {len(data)} bytes; rule: {MOST_GROWTH}")


def _most_memory() -> int:
    """The most memory that this process has had so far, in KiB.

    getrusage() would tell that of the program which started this one, if it had more.
    """
    with open("/proc/self/status", "rb") as status:
        (line,) = (line for line in status if line.startswith(b"VmHWM:"))
    return int(line.split()[1])


def be_limited(most_bytes: int) -> None:
    """Limit this process: it is interrupted when an input takes too much CPU time, and it gets no more than
    `most_bytes` of memory.
    """
    signal.signal(signal.SIGPROF, _too_long)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _too_long(_number: int, _frame: FrameType | None) -> None:
    raise TooMuch("time: more CPU time than an input may take")


def check_words(text: str) -> None:
    """Assert that a message about an input has no control characters, because it goes to terminals and
    journals.
    """
    assert not _CONTROL.search(text), f"control characters in {text[:200]!r}"


_memory_file = -1


def file_of(data: bytes) -> Path:
    """Return the path of a file with this content, which it keeps until the next call."""
    global _memory_file  # noqa: PLW0603  # one for the process
    if _memory_file < 0:
        _memory_file = os.memfd_create("fuzz")
    os.ftruncate(_memory_file, 0)
    os.pwrite(_memory_file, data, 0)
    return Path(f"/proc/self/fd/{_memory_file}")


def mutated(
    data: bytes, chance: random.Random, words: Sequence[bytes] = (), keeps_length: bool = False
) -> bytes:
    """Return the data with some bytes, numbers or words changed, moved or taken away."""
    changed = bytearray(data or b"\0")
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        changed = changed or bytearray(1)
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(4 if keeps_length else 8):
            case 0:
                changed[at : at + 1] = bytes((chance.randrange(256),)) if at < len(changed) else b""
            case 1:
                width = chance.choice((1, 2, 4, 8))
                number = (chance.choice(NUMBERS) - chance.randrange(3)) & (1 << 8 * width) - 1
                changed[at : at + width] = number.to_bytes(width, "little")[: len(changed) - at]
            case 2:
                size, other = chance.randrange(1, 33), chance.randrange(len(changed))
                part = changed[other : other + size][: len(changed) - at]
                changed[at : at + len(part)] = part
            case 3 if words:
                word = chance.choice(words)[: len(changed) - at if keeps_length else None]
                changed[at : at + len(word)] = word
            case 4 if words:
                changed[at:at] = chance.choice(words)
            case 5:
                del changed[at : at + chance.choice((1, 2, 8, 64, len(changed)))]
            case 6:
                other = chance.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + chance.choice((1, 8, 64))]
            case _:
                if changed and at < len(changed):
                    changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed)


def text_mutation(words: Sequence[bytes]) -> Mutate:
    """Return a mutation for texts in lines. Besides bytes, it changes whole numbers, words and lines."""

    def mutate(data: bytes, chance: random.Random) -> bytes:
        for _ in range(chance.choice((1, 2, 4))):
            match chance.randrange(4):
                case 0:
                    places = list(_DECIMAL.finditer(data))
                    if places:
                        place = chance.choice(places)
                        number = b"%d" % (chance.choice(NUMBERS) - chance.randrange(3))
                        number = chance.choice((number, number, b"9" * 5000, b"0x10", b"1e999", b"-1", b""))
                        data = data[: place.start()] + number + data[place.end() :]
                case 1:
                    lines = data.splitlines(keepends=True) or [b"\n"]
                    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
                    lines[at : at + chance.randrange(2)] = [lines[other]] * chance.choice((0, 1, 2))
                    data = b"".join(lines)
                case _:
                    data = mutated(data, chance, words)
        return data

    return mutate


def mutated_lines(mutate: Mutate) -> Mutate:
    """Return a mutation that changes one line by `mutate`."""

    def mutate_line(data: bytes, chance: random.Random) -> bytes:
        lines = data.split(b"\n")
        at = chance.randrange(len(lines))
        lines[at] = mutate(lines[at], chance)
        return b"\n".join(lines)

    return mutate_line


def json_mutation(mutate_rest: Mutate | None = None) -> Mutate:
    """Return a mutation for JSON, which mostly stays JSON: values are replaced, moved and left out. If given,
    `mutate_rest` changes what follows the first line."""

    def mutate(data: bytes, chance: random.Random) -> bytes:
        head, newline, rest = data.partition(b"\n") if mutate_rest else (data, b"", b"")
        if mutate_rest and newline and chance.random() < 0.3:
            return head + newline + mutate_rest(rest, chance)
        try:
            value = json.loads(head)
        except (ValueError, RecursionError):
            return mutated(data, chance)
        for _ in range(chance.choice((1, 1, 2, 4))):
            value = _other_value(value, value, chance)
        if chance.random() < 0.1:
            return mutated(data, chance)
        return json.dumps(value).encode() + newline + rest

    return mutate


def _other_value(value: Any, whole: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        if chance.random() < 0.1:
            return {key: one for key, one in value.items() if key != name}
        return {**value, name: _other_value(value[name], whole, chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        match chance.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * chance.choice((2, 3, 100)) + value[at:]
        return [*value[:at], _other_value(value[at], whole, chance), *value[at + 1 :]]
    if isinstance(value, int) and chance.random() < 0.5:
        return chance.choice((1, -1)) * (chance.choice(NUMBERS) - chance.randrange(3))
    others: tuple[Any, ...] = (None, True, False, 0, -1, 2**64, 10**400, 0.5, float("inf"), float("nan"), [],
                               {}, [[]], [0], {"": 0}, whole, *TEXTS)  # fmt: skip
    return chance.choice(others)
