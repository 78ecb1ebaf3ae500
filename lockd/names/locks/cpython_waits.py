"""Waits of a process that runs CPython: told apart by what the interpreter's memory says as they last."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from lockd.names.locks.locking import Frame, is_of_c_library
from lockd.names.runtimes.cpython import Interpreter, PythonFrame
from lockd.names.runtimes.python_waits import (
    COND,
    LOCK,
    LOCK_TYPES,
    QUEUE_TYPE,
    RLOCK_TYPE,
    judge_python,
    label,
)
from lockd.names.unwind.capture import Capture

RUNTIME = "_PyRuntime"
"""The variable that everything of an interpreter is found from."""
EVALUATES = "_PyEval_EvalFrame"
SEARCHED = 1024
"""Bytes of stack in which a method of a lock has the lock, as well as in registers."""
STACK_POINTERS = {17: 7, 33: 31}
"""By the number of captured registers."""
CALL_FIELDS = 9
"""In /proc/PID/task/TID/syscall of a thread that is in a call, the last but one being its stack pointer."""
AHEAD = (0, 2, 8)
"""Bytes from the instruction of a frame, which is a call, to the one the interpreter has ready."""
MOST_SEEN = 128
"""Places at which threads of one process were seen to wait."""
PLACE_BYTES = 1500
TRIES, TRY_SECONDS = 5, 0.001
IMPATIENT_SECONDS = 0.1
"""After all tries, no others of the same process for so long."""
USER_END = 1 << 47
LOWEST = 1 << 16

_INTERPRETER = re.compile(r"(?:lib)?python3(?:\.\d+)?[dt]?(?:\.so.*)?|(?:_queue|_multiprocessing)\..*\.so")
_LOCKS = re.compile(r"_?Py(?:Thread|Mutex|RecursiveMutex|Semaphore|ParkingLot|Event)_")
_QUEUE = re.compile(r"_queue\..*\.so")


@dataclass(frozen=True)
class PythonLock:
    """`kind` is `lock` or `cond`, or empty if that is not known, as is the family then; `functions` are of
    Python, `file:function`, innermost first."""

    kind: str
    site: str
    family: str
    functions: tuple[str, ...]


def is_of_python(stack: Sequence[Frame]) -> bool:
    """Whether it is the interpreter that waits, and not a library that was called from Python."""
    first = next((frame for frame in stack if not is_of_c_library(frame.object)), None)
    return first is not None and bool(
        _INTERPRETER.fullmatch(first.object) or re.match("_?Py[A-Z]", first.function)
    )


def shown_stack(stack: Sequence[Frame], functions: Sequence[str]) -> list[str]:
    """Functions of C up to the evaluation of Python, if that has a name; then those of Python."""
    if not functions:
        return [frame.label for frame in stack]
    ends = (i for i, frame in enumerate(stack) if frame.function.startswith(EVALUATES))
    inner = stack[: next(ends, 0)] or takewhile(_is_locking, stack)
    return [*(frame.label for frame in inner), *functions]


def _is_locking(frame: Frame) -> bool:
    return is_of_c_library(frame.object) or bool(_LOCKS.match(frame.function))


@dataclass(frozen=True)
class _Place:
    """Where in C and in Python: the call, and where on the stack are the frame and its next instruction."""

    stack_pointer: int
    program: int
    words: tuple[tuple[int, int], ...]

    def is_of(self, capture: Capture) -> bool:
        """Other words of a stack may be left over from other calls, but these are in use at such a depth."""
        if self.stack_pointer != _sp(capture) or self.program != capture.registers[-1]:
            return False
        return all(capture.stack[at : at + 8] == word.to_bytes(8, "little") for at, word in self.words)


def _place(memory: _Memory, call: Sequence[bytes], frame: int, instruction: int, size: int) -> _Place | None:
    """Of a thread in a system call, by as many bytes of its stack; none if that does not tell."""
    stack_pointer, program = (int(field, 16) for field in call[-2:])
    ready = {instruction + ahead for ahead in AHEAD} if instruction else set()
    stack = _words(memory.read(stack_pointer, size))
    words = tuple((8 * i, word) for i, word in enumerate(stack) if word == frame or word in ready)
    found = {word for _, word in words}
    is_told = frame in found and (not instruction or found & ready)
    return _Place(stack_pointer, program, words) if is_told else None


def call_of(process: Path, tid: int) -> list[bytes]:
    """The system call that a thread is in, its arguments, its stack pointer and where it was made; if any."""
    with contextlib.suppress(OSError):
        call = (process / "task" / str(tid) / "syscall").read_bytes().split()
        return call if len(call) == CALL_FIELDS else []
    return []


class PythonProcess:
    """By its directory in procfs, and the address of its `_PyRuntime`."""

    def __init__(self, process: Path, runtime: int) -> None:
        self._process = process
        self._interpreter = Interpreter(runtime)
        self._next_patience = 0.0
        self._seen: OrderedDict[_Place, list[PythonFrame]] = OrderedDict()

    @property
    def memory(self) -> int:
        """Bytes that it takes, about."""
        return self._interpreter.memory + len(self._seen) * PLACE_BYTES

    def lock(self, tid: int, address: int, capture: Capture, stack: Sequence[Frame]) -> PythonLock:
        """What a thread waits for that was captured. Without functions and site if these could not be read.

        Many a wait is over before it is looked at. Who often waits soon waits again: so this waits too.
        """
        with _opened(self._process) as memory:
            frames = self._frames(memory, tid, address, capture) or self._seen_before(capture)
            if not frames and time.monotonic() >= self._next_patience:
                for _ in range(TRIES):
                    time.sleep(TRY_SECONDS)
                    if frames := self._frames(memory, tid, address, capture):
                        break
                self._next_patience = time.monotonic() + IMPATIENT_SECONDS
            waited_for = _told_by(stack) or self._type(memory, address, capture)
        found = judge_python(frames, waited_for)
        family = {COND: "cond", LOCK: "thread_lock"}.get(found.kind, "")
        return PythonLock(found.kind, found.site, family, tuple(label(frame) for frame in frames))

    def _frames(self, memory: _Memory, tid: int, address: int, capture: Capture) -> list[PythonFrame]:
        """Of the thread if it is where it was captured: waits for the same, or in the same place."""
        before = call_of(self._process, tid)
        frames = self._interpreter.frames(memory, capture.thread_pointer) if before else []
        if not frames:
            return []
        frame, instruction = self._interpreter.place(memory, capture.thread_pointer)
        place = _place(memory, before, frame, instruction, len(capture.stack))
        is_there = place is not None and place.is_of(capture)
        if not (is_there or int(before[1], 16) == address) or call_of(self._process, tid) != before:
            return []
        if place and is_there and instruction:
            self._seen[place] = frames
            if len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
        return frames

    def _seen_before(self, capture: Capture) -> list[PythonFrame]:
        return next((frames for place, frames in self._seen.items() if place.is_of(capture)), [])

    def _type(self, memory: _Memory, address: int, capture: Capture) -> str:
        """Of the object that the lock belongs to; empty if there is none that has it by its address."""
        if 0 <= address - _sp(capture) < len(capture.stack):
            return ""  # from 3.13 on a thread sleeps on a semaphore of its own
        for word in dict.fromkeys((*capture.registers, *_words(capture.stack[:SEARCHED]))):
            if LOWEST < word < USER_END and word % 8 == 0:
                name, first = self._interpreter.type_of(memory, word)
                if first == address and name in LOCK_TYPES:
                    return name
        return ""


def _sp(capture: Capture) -> int:
    place = STACK_POINTERS.get(len(capture.registers))
    return capture.registers[place] if place else 0


def _words(stack: bytes) -> tuple[int, ...]:
    return struct.unpack_from(f"={len(stack) // 8}Q", stack)


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
