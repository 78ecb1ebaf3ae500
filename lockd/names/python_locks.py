"""Waits of a process that runs CPython: told apart by what the interpreter's memory says as they last."""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from lockd.names.capture import Capture
from lockd.names.cpython import Interpreter
from lockd.names.locking import Frame
from lockd.names.python_waits import COND, LOCK_TYPES, QUEUE_TYPE, RLOCK_TYPE, judge_python, label

RUNTIME = "_PyRuntime"
"""The variable that everything of an interpreter is found from."""
EVALUATES = "_PyEval_EvalFrame"
SEARCHED = 1024
"""Bytes of stack in which a method of a lock has the lock, as well as in registers."""
STACK_POINTERS = {17: 7, 33: 31}
"""By the number of captured registers."""
USER_END = 1 << 47
LOWEST = 1 << 16

_LIBC = re.compile(r"(?:libc|libpthread|ld-linux.*|ld-musl.*|libc\.musl.*|ld)[-.].*")
_INTERPRETER = re.compile(r"(?:lib)?python3(?:\.\d+)?[dt]?(?:\.so.*)?|(?:_queue|_multiprocessing)\..*\.so")
_LOCKS = re.compile(r"_?Py(?:Thread|Mutex|RecursiveMutex|Semaphore|ParkingLot|Event)_")
_QUEUE = re.compile(r"_queue\..*\.so")


@dataclass(frozen=True)
class PythonLock:
    """`kind` is `lock` or `cond`; `functions` are of Python, `file:function`, innermost first."""

    kind: str
    site: str
    family: str
    functions: tuple[str, ...]


def is_of_python(stack: Sequence[Frame]) -> bool:
    """Whether it is the interpreter that waits, and not a library that was called from Python."""
    first = next((frame for frame in stack if not _LIBC.fullmatch(frame.object)), None)
    return first is not None and bool(
        _INTERPRETER.fullmatch(first.object) or re.match("_?Py[A-Z]", first.function)
    )


def shown_stack(stack: Sequence[Frame], python: PythonLock) -> list[str]:
    """Functions of C up to the interpreter's evaluation of Python, if that has a name; then those of Python."""
    ends = (i for i, frame in enumerate(stack) if frame.function.startswith(EVALUATES))
    inner = stack[: next(ends, 0)] or takewhile(_is_locking, stack)
    return [frame.label for frame in inner] + list(python.functions)


def _is_locking(frame: Frame) -> bool:
    return bool(_LIBC.fullmatch(frame.object) or _LOCKS.match(frame.function))


class PythonProcess:
    """By its directory in procfs, and the address of its `_PyRuntime`."""

    def __init__(self, process: Path, runtime: int) -> None:
        self._process = process
        self._interpreter = Interpreter(runtime)

    def lock(self, tid: int, address: int, capture: Capture, stack: Sequence[Frame]) -> PythonLock | None:
        """What a thread waits for at `address`; none if it does not any more, or cannot be read."""
        with _opened(self._process) as memory:
            before = self._waits_in(tid, address)
            frames = self._interpreter.frames(memory, capture.thread_pointer) if before else []
            waited_for = _told_by(stack) or (self._type(memory, address, capture) if frames else "")
            if not frames or before != self._waits_in(tid, address):
                return None
        found = judge_python(frames, waited_for)
        family = "cond" if found.kind == COND else "thread_lock"
        return PythonLock(found.kind, found.site, family, tuple(label(frame) for frame in frames))

    def _waits_in(self, tid: int, address: int) -> bytes:
        """The system call that a thread is in, with its stack pointer, if it waits for that address."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            call = (self._process / "task" / str(tid) / "syscall").read_bytes()
            return call if int(call.split()[1], 16) == address else b""
        return b""

    def _type(self, memory: _Memory, address: int, capture: Capture) -> str:
        """Of the object that the lock belongs to; empty if there is none that has it by its address."""
        stack = capture.registers[STACK_POINTERS[len(capture.registers)]] if _is_known(capture) else 0
        if 0 <= address - stack < len(capture.stack):
            return ""  # from 3.13 on a thread sleeps on a semaphore of its own
        words = struct.unpack_from(f"={min(len(capture.stack), SEARCHED) // 8}Q", capture.stack)
        for word in dict.fromkeys((*capture.registers, *words)):
            if LOWEST < word < USER_END and word % 8 == 0:
                name, first = self._interpreter.type_of(memory, word)
                if first == address and name in LOCK_TYPES:
                    return name
        return ""


def _is_known(capture: Capture) -> bool:
    return len(capture.registers) in STACK_POINTERS


def _told_by(stack: Sequence[Frame]) -> str:
    """The type, by the functions of C that have called the lock."""
    for frame in stack:
        if frame.function.startswith(EVALUATES):
            break
        if _QUEUE.fullmatch(frame.object):
            return QUEUE_TYPE
        if frame.function in ("_PyRecursiveMutex_Lock", "rlock_acquire_restore"):
            return RLOCK_TYPE
    return ""


class _Memory:
    def __init__(self, file: int) -> None:
        self._file = file

    def read(self, address: int, size: int) -> bytes:
        with contextlib.suppress(OSError, OverflowError):
            return os.pread(self._file, size, address)
        return b""


@contextlib.contextmanager
def _opened(process: Path) -> Iterator[_Memory]:
    """The memory of a process; if it is gone or may not be read, it is as if nothing were mapped."""
    file = -1
    with contextlib.suppress(OSError):
        file = os.open(process / "mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _Memory(file)
    finally:
        if file >= 0:
            os.close(file)
