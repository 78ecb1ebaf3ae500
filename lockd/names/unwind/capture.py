"""The user side of a blocked thread: what is needed to find out where and on what it waits."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

REGISTERS = {
    "x86_64": ("ax", "dx", "cx", "bx", "si", "di", "bp", "sp", *(f"r{n}" for n in range(8, 16)), "ip"),
    "aarch64": ("regs", "sp", "pc"),
}
"""Members of struct pt_regs in the order of their DWARF numbers."""
ASLEEP_BYTES = 16384
PAGE = 4096


@dataclass(frozen=True)
class Capture:
    """Taken by the programs now and then for each lock, as a thread blocks on it; or later, as it sleeps."""

    registers: tuple[int, ...]
    """By their DWARF numbers; the last is where the thread will go on."""
    stack: bytes
    """From the stack pointer upward, as much as was kept."""
    frames: tuple[int, ...]
    """Return addresses as the kernel finds them by frame pointers, innermost first."""
    thread_pointer: int
    """0 if it is not known."""


def captures_of(rows: npt.NDArray[Any], machine: str = os.uname().machine) -> list[Capture]:
    """One for each struct capture of `rows`."""
    saved = rows["registers"]
    registers = np.column_stack([saved[name] for name in REGISTERS[machine]]).tolist()
    return [
        Capture(
            tuple(registers[at]),
            row["stack"].tobytes()[: int(row["bytes"])],
            tuple(address for address in row["frames"].tolist() if address),
            int(row["thread_pointer"]),
        )
        for at, row in enumerate(rows)
    ]


def captured(
    procfs: Path, tgid: int, stack_pointer: int, program_counter: int, thread_pointer: int = 0,
    machine: str = os.uname().machine,
) -> Capture | None:  # fmt: skip
    """What there is without stopping a thread that sleeps; None if its stack cannot be read.

    Of the registers only two are known. What the caller of a function needs of the others, the function has
    saved on the stack; a caller for which that is not so is missed, with all beyond.
    """
    stack = b""
    for size in (ASLEEP_BYTES, PAGE - stack_pointer % PAGE):  # there may be less of it
        with contextlib.suppress(OSError, OverflowError):
            stack = stack or _read(procfs, tgid, stack_pointer, size)
    known = {"sp": stack_pointer, "ip": program_counter, "pc": program_counter}
    registers: list[int] = []
    for name in REGISTERS[machine]:
        registers += [0] * 31 if name == "regs" else [known.get(name, 0)]
    return Capture(tuple(registers), stack, (), thread_pointer) if stack else None


def _read(procfs: Path, tgid: int, address: int, size: int) -> bytes:
    with (procfs / str(tgid) / "mem").open("rb", buffering=0) as memory:
        return os.pread(memory.fileno(), size, address)
