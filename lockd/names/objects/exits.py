"""Where a function is left: its returns and its jumps to other functions, as binutils' objdump finds them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

OBJDUMP = ("objdump", "--disassemble", "--no-show-raw-insn", "--wide")
TIMEOUT = 30.0
RETURNS = ("ret", "retq", "retaa", "retab")
JUMPS = ("jmp", "jmpq", "b", "br", "braa", "brab")
"""Unconditional ones. What is jumped to on a condition is a rarely used part of the same function."""
PREFIXES = ("repz", "rep", "bnd", "notrack", "cs", "ds")

_INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\t(.*)$", re.MULTILINE)
_TARGET = re.compile(r"(?:0x)?([0-9a-f]+)\b")


@dataclass(frozen=True)
class Exits:
    """Addresses in the file."""

    returns: tuple[int, ...]
    jumps: tuple[int, ...]
    """What is jumped to outside of the function."""


def exits_of(path: str, start: int, end: int) -> Exits | None:
    """Of the function from `start` to `end`, addresses in the file at `path`.

    None if that cannot be told for sure: a probe must not be put where no instruction begins.
    """
    command = (*OBJDUMP, f"--start-address={start:#x}", f"--stop-address={end:#x}", path)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_exits(done.stdout, start, end) if done.returncode == 0 else None


def read_exits(listing: str, start: int, end: int) -> Exits | None:
    """The same of what objdump has printed."""
    returns: list[int] = []
    jumps: list[int] = []
    for address, text in _INSTRUCTION.findall(listing):
        words = text.split()
        while words and words[0] in PREFIXES:
            del words[0]
        name = words[0] if words else ""
        if not name or "(bad)" in text or name.startswith("."):
            return None
        if name in RETURNS:
            returns.append(int(address, 16))
        elif name in JUMPS:
            target = _TARGET.fullmatch(words[1]) if len(words) > 1 else None
            if target is None:  # by a register or a table: it may lead anywhere
                return None
            if not start <= int(target[1], 16) < end:
                jumps.append(int(target[1], 16))
    return Exits(tuple(returns), tuple(jumps)) if returns or jumps else None
