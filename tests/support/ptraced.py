"""What a blocked thread of a real process has in its registers and on its stack, by ptrace."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from pathlib import Path

from lockd.names.unwind.capture import Capture

PTRACE_GETREGS, PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 12, 17, 0x4206, 0x4207
WALL = 0x40000000
STACK_BYTES = 4096
FUTEX = 202
# rax rdx rcx rbx rsi rdi rbp rsp r8..r15 rip, by their places in struct user_regs_struct
DWARF = (10, 12, 11, 5, 13, 14, 4, 19, 9, 8, 7, 6, 3, 2, 1, 0, 16)
RDI, FS_BASE = 14, 21

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, tid: int, data: object = None) -> None:
    if _libc.ptrace(request, tid, None, data) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace({request:#x}, {tid}): {os.strerror(code)}")


def futex_of(tgid: int, tid: int) -> int:
    """The address on which a thread sleeps in the futex call; 0 if it does not."""
    fields = Path(f"/proc/{tgid}/task/{tid}/syscall").read_text().split()
    return int(fields[1], 16) if fields[0] == str(FUTEX) else 0


def blocked_thread(tgid: int, comm: str, seconds: float = 60.0) -> tuple[int, int]:
    """The thread of that name and the futex on which it sleeps, as soon as it does."""
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


def capture_of(tgid: int, tid: int, stack_bytes: int = STACK_BYTES) -> Capture:
    """As the programs capture it; the kernel's frames are walked here in the same way."""
    _ptrace(PTRACE_SEIZE, tid)
    try:
        _ptrace(PTRACE_INTERRUPT, tid)
        os.waitpid(tid, WALL)
        registers = (ctypes.c_uint64 * 27)()
        _ptrace(PTRACE_GETREGS, tid, ctypes.addressof(registers))
        numbered = tuple(registers[place] for place in DWARF)
        memory = os.open(f"/proc/{tgid}/mem", os.O_RDONLY)
        try:
            stack = os.pread(memory, stack_bytes, numbered[7])
            return Capture(numbered, stack, _frame_pointers(memory, numbered), registers[FS_BASE])
        finally:
            os.close(memory)
    finally:
        _ptrace(PTRACE_DETACH, tid)


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
