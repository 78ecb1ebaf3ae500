"""Where a function returns, or jumps to another function: found in the disassembly of binutils' objdump.

Anybody can write a program, and objdump reads much of a file that nobody needs here. It is therefore given
only the instructions of the function, and runs without privileges.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
from dataclasses import dataclass

from lockd.process import memory, privileges

OBJDUMP = (
    "objdump", "--disassemble-all", "--no-show-raw-insn", "--wide", "--target=binary",
    f"--architecture={'aarch64' if os.uname().machine == 'aarch64' else 'i386:x86-64'}",
)  # fmt: skip
USER = "nobody"
"""The user that objdump runs as if lockd runs as root."""
MEMORY, CPU_SECONDS = 256 << 20, 5
"""Bytes of address space, and seconds of CPU time, that objdump may use."""
LONGEST_FUNCTION = 1 << 16
"""Bytes of the longest function that is disassembled, which makes some megabytes of text."""
TIMEOUT = 30.0
"""Seconds for which objdump may run."""
RETURNS = ("ret", "retq", "retaa", "retab")
JUMPS = ("jmp", "jmpq", "b", "br", "braa", "brab")
"""Unconditional jumps. lockd assumes that a conditional jump out of the function's addresses leads to a
rarely executed part of the same function, which the compiler placed elsewhere."""
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


def find_exits(code: bytes, start: int) -> FunctionExits | None:
    """The exits of the function with these instructions, the first of which has the address `start`.

    Returns None if the exits are not known for sure: a probe must only be placed where an instruction begins.
    """
    if not 0 < len(code) <= LONGEST_FUNCTION:
        return None
    user = privileges.unprivileged_user(USER)
    with open(memory.create_file("function"), "w+b", buffering=0) as file:
        file.write(code)
        file.seek(0)
        try:
            done = subprocess.run(
                (*OBJDUMP, f"--adjust-vma={start:#x}", "/dev/stdin"), stdin=file, capture_output=True,
                text=True, errors="replace", timeout=TIMEOUT, check=False,
                preexec_fn=lambda: _give_up_privileges(user),  # is safe in a process with one thread
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return None
    return parse_exits(done.stdout, start, start + len(code)) if done.returncode == 0 else None


def _give_up_privileges(user: str | None) -> None:
    """Limit and restrict the child process, before objdump takes its place."""
    privileges.drop_all(user)
    privileges.lower_limits(
        {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: CPU_SECONDS, resource.RLIMIT_AS: MEMORY}
    )


def parse_exits(listing: str, start: int, end: int) -> FunctionExits | None:
    """The exits of the function from `start` to `end` by objdump's listing; None if they are not certain."""
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
