"""Captures: the registers and the top of the user stack of threads, mostly of blocked ones."""

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
"""Members of struct pt_regs (arm64: user_pt_regs) by machine, in the order of their DWARF numbers."""
SLEEPER_BYTES = 16384
"""The most bytes that are read from the stack of a thread that is already asleep."""
PAGE = 4096


@dataclass(frozen=True)
class Capture:
    """Registers and top of the user stack of a thread.

    BPF programs take a capture when a thread blocks on a lock, once in a while for each lock. They also take
    captures of threads that release locks, and of sampled waits. read_capture() takes one of a thread that is
    already asleep.
    """

    registers: tuple[int, ...]
    """Values by DWARF number. The last one is the address at which the thread will continue."""
    stack: bytes
    """The stack from the stack pointer upward: as many bytes as were captured."""
    frames: tuple[int, ...]
    """Return addresses that the kernel found by frame pointers, innermost first."""
    thread_pointer: int
    """Address of the thread control block; 0 if it is not known."""


def decode_captures(rows: npt.NDArray[Any], machine: str = os.uname().machine) -> list[Capture]:
    """The captures of an array of struct capture (bpf/include/capture.bpf.h), in the same order."""
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


def read_capture(
    procfs: Path, tgid: int, stack_pointer: int, program_counter: int, thread_pointer: int = 0
) -> Capture | None:
    """The capture of a thread that sleeps, taken without stopping it; None if its stack cannot be read.

    Only two registers are known: the caller has them from /proc/TGID/task/TID/syscall. The others are 0.
    Unwinding needs some of these others, which most functions have saved on the stack. It ends at the first
    function that has not saved them.
    """
    stack = b""
    for size in (SLEEPER_BYTES, PAGE - stack_pointer % PAGE):  # the stack may end before SLEEPER_BYTES
        with contextlib.suppress(OSError, OverflowError):
            stack = stack or read_memory(procfs, tgid, stack_pointer, size)
    known = {"sp": stack_pointer, "ip": program_counter, "pc": program_counter}
    registers: list[int] = []
    for name in REGISTERS[os.uname().machine]:
        registers += [0] * 31 if name == "regs" else [known.get(name, 0)]
    return Capture(tuple(registers), stack, (), thread_pointer) if stack else None


def read_memory(procfs: Path, tgid: int, address: int, size: int) -> bytes:
    """At most `size` bytes of a process's memory at `address`.

    Raises OSError if they cannot be read, and OverflowError if `address` is too large for an address.
    """
    with (procfs / str(tgid) / "mem").open("rb", buffering=0) as memory:
        return os.pread(memory.fileno(), size, address)
