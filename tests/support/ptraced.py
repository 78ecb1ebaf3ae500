"""Reads by ptrace what a blocked thread of a real process has in its registers and on its stack."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from lockd.names.unwind.capture import Capture

T = TypeVar("T")

PTRACE_GETREGS, PTRACE_DETACH, PTRACE_SYSCALL, PTRACE_SEIZE, PTRACE_INTERRUPT = 12, 17, 24, 0x4206, 0x4207
WALL = 0x40000000
STACK_BYTES = 4096
FUTEX = (202, 219)  # futex, and restart_syscall, by which a wait with a timeout goes on after a stop
# rax rdx rcx rbx rsi rdi rbp rsp r8..r15 rip, by their places in struct user_regs_struct
DWARF = (10, 12, 11, 5, 13, 14, 4, 19, 9, 8, 7, 6, 3, 2, 1, 0, 16)
RAX, RSI, RDI, ORIG_RAX, FS_BASE = 10, 13, 14, 15, 21
FUTEX_COMMANDS, FUTEX_WAKE = 0x7F, 1
NOT_MADE_YET = -38  # in place of the result of a system call that is about to be made
# What an interrupted call returns inside the kernel, so that it is made again: ERESTARTSYS and its like.
RESTARTS = (-512, -513, -514, -516)
UNSIGNED = 2**64 - 1
WAITS_AGAIN_SECONDS = 0.1
"""The time within which a thread is back in its wait after a stop. One that is not was in the wait only for a
moment, as for the lock of an interpreter."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, tid: int, data: object = None) -> None:
    if _libc.ptrace(request, tid, None, data) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace({request:#x}, {tid}): {os.strerror(code)}")


def futex_of(tgid: int, tid: int) -> int:
    """Return the address on which a thread sleeps in a futex call; 0 if it does not."""
    fields = Path(f"/proc/{tgid}/task/{tid}/syscall").read_text().split()
    return int(fields[1], 16) if fields[0] in map(str, FUTEX) else 0


def blocked_thread(tgid: int, comm: str, seconds: float = 60.0) -> tuple[int, int]:
    """Return the thread of that name and the futex on which it sleeps, as soon as it does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for task in Path(f"/proc/{tgid}/task").iterdir():
            try:
                if (task / "comm").read_text() == f"{comm}\n" and (address := futex_of(tgid, int(task.name))):
                    return int(task.name), address
            except (OSError, IndexError):
                pass
        time.sleep(0.002)
    raise TimeoutError(f"no thread {comm} of {tgid} blocked in a futex call in {seconds} s")


def blocked_capture(tgid: int, comm: str, seconds: float = 60.0) -> tuple[int, int, Capture]:
    """Return the thread of that name, the futex on which it sleeps, and what the programs capture there.

    The thread is stopped for that. It sleeps there again afterwards, so that its memory can be read. If its
    wait ended before the stop or did not go on after it, the search begins again.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        tid, address = blocked_thread(tgid, comm, until - time.monotonic())
        if (capture := _capture(tgid, tid, address)) and _sleeps_again(tgid, tid, address):
            return tid, address, capture
    raise TimeoutError(f"the thread {comm} of {tgid} was stopped in another wait each time in {seconds} s")


def releasing_capture(tgid: int, tid: int, look: Callable[[Capture], T]) -> tuple[Capture, T]:
    """Return what a thread has in its next futex call that wakes another one, and what `look` sees while the
    thread is stopped there. Afterwards the thread goes on."""
    _ptrace(PTRACE_SEIZE, tid)
    try:
        _ptrace(PTRACE_INTERRUPT, tid)
        os.waitpid(tid, WALL)
        registers = (ctypes.c_int64 * 27)()
        while True:
            _ptrace(PTRACE_SYSCALL, tid)
            os.waitpid(tid, WALL)
            _ptrace(PTRACE_GETREGS, tid, ctypes.addressof(registers))
            is_call = registers[ORIG_RAX] == FUTEX[0] and registers[RAX] == NOT_MADE_YET
            if is_call and registers[RSI] & FUTEX_COMMANDS == FUTEX_WAKE:
                capture = _captured(tgid, registers)
                return capture, look(capture)
    finally:
        _ptrace(PTRACE_DETACH, tid)


def _sleeps_again(tgid: int, tid: int, address: int) -> bool:
    until = time.monotonic() + WAITS_AGAIN_SECONDS
    while not (sleeps := futex_of(tgid, tid) == address) and time.monotonic() < until:
        time.sleep(0.0005)
    return sleeps


def _capture(tgid: int, tid: int, address: int) -> Capture | None:
    """Return what a thread has in a wait for a futex; None if its stop does not interrupt that wait.

    Frame pointers are walked here in the same way as by the kernel.
    """
    _ptrace(PTRACE_SEIZE, tid)
    try:
        _ptrace(PTRACE_INTERRUPT, tid)
        os.waitpid(tid, WALL)
        registers = (ctypes.c_int64 * 27)()
        _ptrace(PTRACE_GETREGS, tid, ctypes.addressof(registers))
        if registers[ORIG_RAX] not in FUTEX or registers[RDI] != address or registers[RAX] not in RESTARTS:
            return None
        return _captured(tgid, registers)
    finally:
        _ptrace(PTRACE_DETACH, tid)


def _captured(tgid: int, registers: Sequence[int]) -> Capture:
    numbered = tuple(registers[place] & UNSIGNED for place in DWARF)
    memory = os.open(f"/proc/{tgid}/mem", os.O_RDONLY)
    try:
        stack = os.pread(memory, STACK_BYTES, numbered[7])
        return Capture(numbered, stack, _frame_pointers(memory, numbered), registers[FS_BASE] & UNSIGNED)
    finally:
        os.close(memory)


def _frame_pointers(memory: int, registers: tuple[int, ...]) -> tuple[int, ...]:
    frames, frame = [registers[16]], registers[6]
    while len(frames) < 64:
        try:
            frame, address = struct.unpack("<QQ", os.pread(memory, 16, frame))
        except (OSError, OverflowError, struct.error):
            break
        if not address:
            break
        frames.append(address)
    return tuple(frames)
