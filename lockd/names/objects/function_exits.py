"""Where a function returns, or jumps to another function: found in the disassembly of binutils' objdump."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

OBJDUMP = ("objdump", "--disassemble", "--no-show-raw-insn", "--wide")
TIMEOUT = 30.0
"""Seconds for which objdump may run."""
RETURNS = ("ret", "retq", "retaa", "retab")
JUMPS = ("jmp", "jmpq", "b", "br", "braa", "brab")
"""Unconditional jumps. A conditional jump leads to a rarely executed part of the same function."""
PREFIXES = ("repz", "rep", "bnd", "notrack", "cs", "ds")

_INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\t(.*)$", re.MULTILINE)
_TARGET = re.compile(r"(?:0x)?([0-9a-f]+)\b")


@dataclass(frozen=True)
class FunctionExits:
    """The exits of one function, as addresses in the file."""

    returns: tuple[int, ...]
    """The return instructions."""
    jumps: tuple[int, ...]
    """The targets of jumps that lead out of the function."""


def find_exits(path: str, start: int, end: int) -> FunctionExits | None:
    """The exits of the function from `start` to `end`, both addresses in the file at `path`.

    Returns None if the exits are not known for sure: a probe must only be placed where an instruction begins.
    """
    command = (*OBJDUMP, f"--start-address={start:#x}", f"--stop-address={end:#x}", path)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_exits(done.stdout, start, end) if done.returncode == 0 else None


def parse_exits(listing: str, start: int, end: int) -> FunctionExits | None:
    """The exits of the function from `start` to `end` by objdump's listing; None if they are not sure."""
    returns: list[int] = []
    jumps: list[int] = []
    for address, text in _INSTRUCTION.findall(listing):
        parts = text.split()
        while parts and parts[0] in PREFIXES:
            del parts[0]
        name = parts[0] if parts else ""
        if not name or "(bad)" in text or name.startswith("."):
            return None
        if name in RETURNS:
            returns.append(int(address, 16))
        elif name in JUMPS:
            target = _TARGET.fullmatch(parts[1]) if len(parts) > 1 else None
            if target is None:  # a jump by a register or a table can lead anywhere
                return None
            if not start <= int(target[1], 16) < end:
                jumps.append(int(target[1], 16))
    return FunctionExits(tuple(returns), tuple(jumps)) if returns or jumps else None
