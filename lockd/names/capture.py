"""The user side of a thread as it blocked: what is needed to find out where and on what it waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capture:
    """Taken by the programs once for each lock, as a thread blocks on it."""

    registers: tuple[int, ...]
    """By their DWARF numbers; the last is where the thread will go on."""
    stack: bytes
    """From the stack pointer upward, as much as was kept."""
    frames: tuple[int, ...]
    """Return addresses as the kernel finds them by frame pointers, innermost first."""
    thread_pointer: int
    """0 if it is not known."""
