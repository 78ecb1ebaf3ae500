"""CPython: what a thread of a Python program waits for and where, by the Python functions that it is in.

In C code a contended `threading.Lock` and an idle `Queue.get()` look the same. The functions of Python's
standard library on the stack show which of them it is, and so does the type of the object that contains the
lock. Both are read from the interpreter's memory while the wait lasts.
"""

from __future__ import annotations

import contextlib
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from lockd.names.locks.locking_code import COND, LOCK, Frame, is_of_c_library
from lockd.names.objects.address_space import AddressSpace
from lockd.names.runtimes.cpython import Interpreter, PythonFrame
from lockd.names.unwind.capture import Capture

RUNTIME = "_PyRuntime"
"""The variable from which all data of an interpreter can be found."""
EVALUATES = "_PyEval_EvalFrame"
"""The beginning of the name of the C function that evaluates Python code."""
SEARCHED = 1024
"""Bytes of stack that are searched for a pointer to the object of a lock, besides the registers."""
STACK_POINTERS = {17: 7, 33: 31}
"""The index of the stack pointer in the captured registers, by their number: 17 on x86-64, 33 on arm64."""
CALL_FIELDS = 9
"""Fields in /proc/PID/task/TID/syscall of a thread that is in a system call."""
AHEAD = (0, 2, 8)
"""Possible numbers of bytes, in the known versions of CPython, from the bytecode instruction that a Python
frame points to, to the one after the call. The interpreter's C stack has the address of the one after it."""
MOST_SEEN = 128
"""The largest number of remembered places at which threads of one process were seen to wait."""
PLACE_BYTES, WORD_BYTES = 1500, 150
"""About how many bytes a remembered place takes without the names in its frames, and how many each of its
_Place.words adds. Most places have a few words; a stack full of pointers to one frame has hundreds."""
TRIES, TRY_SECONDS = 5, 0.001
"""Further attempts to read the frames of a thread in the same wait, and the seconds before each."""
IMPATIENT_SECONDS = 0.1
"""Seconds after the further attempts (TRIES) for one wait, in which other waits of the process get none."""
USER_END = 1 << 47
LOWEST = 1 << 16
"""The least address at which an object is looked for."""
MOST_SEARCHES = 64
"""The most searches in one process for the places of protocol.CPythonPlaces, which it may not have. A search
reads up to a megabyte."""
MOST_LABEL = 250
"""Characters of a function's label. The labels of a whole stack have to fit into one message."""

QUEUE_TYPE, RLOCK_TYPE = "_queue.SimpleQueue", "_thread.RLock"
LOCK_TYPES = {"_thread.lock", RLOCK_TYPE, QUEUE_TYPE, "_multiprocessing.SemLock"}
"""Types of objects that have the address of their lock right after the object's header."""
FAMILIES = {COND: "cond", LOCK: "thread_lock"}
"""The family of a Python lock, by its kind."""

_INTERPRETER = re.compile(r"(?:lib)?python3(?:\.\d+)?[dt]?(?:\.so.*)?|(?:_queue|_multiprocessing)\..*\.so")
_LOCKS = re.compile(r"_?Py(?:Thread|Mutex|RecursiveMutex|Semaphore|ParkingLot|Event)_")
_QUEUE = re.compile(r"_queue\..*\.so")

_WAITS = {
    "threading": {"wait", "join", "_wait_for_tstate_lock", "_shutdown"},
    "multiprocessing/synchronize": {"wait"},
    "multiprocessing/queues": {"get", "put"},
    "concurrent/futures/thread": {"_worker"},
}
"""Functions by module of the standard library. If one is the innermost in a stack, the thread waits for
others to do something."""
_ENTERS = ("multiprocessing/synchronize", "__enter__")
"""The function that takes the lock by which one of several idle readers of a queue becomes the reader."""
_TAKES = {
    "logging/__init__": {"acquire", "_acquireLock", "__enter__"},
    "_weakrefset": {"__enter__"},
    "contextlib": {"__enter__", "enter_context"},
}
"""By module of the standard library, functions that take a lock for their caller."""
_LOCKING = re.compile(
    r"threading|queue|_threading_local|concurrent/futures/\w+|multiprocessing/\w+|<frozen importlib\._\w+>"
)
"""Modules of the standard library whose functions are all locking code."""
_BOOTSTRAP = "_bootstrap"
"""The outermost function of a thread or of a child process. Frames beyond it are those of the parent process.
"""
_STARTS = {"_bootstrap", "_bootstrap_inner", "run"}
"""Functions in which every thread and child process begins."""

_LIBRARY = re.compile(r"(?:.*/)?python3(?:\.\d+t?|\d+\.zip)/(?!(?:site|dist)-packages/)(.+)\.py")
_PACKAGE = re.compile(r".*/(?:site|dist)-packages/(.+)")
_NOT_TELLING = {"__init__.py", "__main__.py"}
"""Names of files that say nothing without their directory."""


@dataclass(frozen=True)
class PythonWait:
    """What a thread of CPython waits for."""

    kind: str
    """LOCK or COND; empty if neither the frames nor the type of the object that is waited for tell it."""
    site: str
    """The label of the function that waits; empty if no frames are known."""
    functions: tuple[str, ...]
    """Labels of the thread's Python functions, innermost first."""

    @property
    def family(self) -> str:
        """A key of locking_code.KINDS; empty if the kind is unknown."""
        return FAMILIES.get(self.kind, "")


@dataclass(frozen=True)
class PythonPlace:
    """Where a thread of CPython was."""

    site: str
    """The label of the innermost function that is not locking code; empty if no functions are known."""
    functions: tuple[str, ...]
    """Labels of the thread's Python functions, innermost first."""


def judge_python(frames: Sequence[PythonFrame], waited_for: str = "") -> PythonWait:
    """Judge a wait by the thread's frames, innermost first.

    `waited_for` is the type of the object that contains the lock; empty if it is unknown.
    """
    return PythonWait(_kind(frames, waited_for), _site(frames), tuple(map(label, frames)))


def label(frame: PythonFrame) -> str:
    """The text for a function, `file:function`, such as `app.py:Registry.put`; at most MOST_LABEL characters.

    The file's path is shown from the package or the standard library's directory on, else without directory,
    so that the label is the same on every host.
    """
    return shortened(f"{_shown_file(frame.file)}:{frame.function}", MOST_LABEL)


def shortened(text: str, most: int) -> str:
    """The text, or its end behind an ellipsis if it has more than `most` characters."""
    return text if len(text) <= most else f"...{text[3 - most :]}"


def _shown_file(file: str) -> str:
    for pattern in (_LIBRARY, _PACKAGE):
        if match := pattern.fullmatch(file):
            return f"{match[1]}.py" if pattern is _LIBRARY else match[1]
    parts = file.rsplit("/", 2)
    return "/".join(parts[-2 if parts[-1] in _NOT_TELLING else -1 :])


def _kind(frames: Sequence[PythonFrame], waited_for: str) -> str:
    if waited_for == QUEUE_TYPE:
        return COND
    if waited_for == RLOCK_TYPE:  # also when a Condition takes its lock back
        return LOCK
    if not frames:
        return ""
    places = [_module_and_function(frame) for frame in frames[:2]]
    if places[0] == _ENTERS:
        del places[0]
    return COND if places and places[0][1] in _WAITS.get(places[0][0], ()) else LOCK


def _site(frames: Sequence[PythonFrame]) -> str:
    """The label of the innermost function that is not locking code. If all are locking code: of the outermost
    one that is not in every thread's stack; empty if there is none."""
    inside = []
    for frame in frames:
        module, function = _module_and_function(frame)
        is_locking = _LOCKING.fullmatch(module) is not None
        if not is_locking and function not in _TAKES.get(module, ()):
            return label(frame)
        if not is_locking or function not in _STARTS:
            inside.append(frame)
        if is_locking and function == _BOOTSTRAP:
            break
    return label(inside[-1]) if inside else ""


def _module_and_function(frame: PythonFrame) -> tuple[str, str]:
    """A function's module (path in the standard library, or `<frozen NAME>`, else empty) and bare name."""
    library = _LIBRARY.fullmatch(frame.file)
    module = library[1] if library else frame.file if frame.file.startswith("<frozen ") else ""
    return module, frame.function.rpartition(".")[2]


def is_of_python(stack: Sequence[Frame]) -> bool:
    """Whether the interpreter itself waits, and not a library that Python code called."""
    first = next((frame for frame in stack if not is_of_c_library(frame.object)), None)
    return first is not None and bool(
        _INTERPRETER.fullmatch(first.object) or re.match("_?Py[A-Z]", first.function)
    )


def shown_stack(stack: Sequence[Frame], functions: Sequence[str]) -> list[str]:
    """Labels of a stack: of the C functions that Python code called, then of the Python functions.

    Without Python functions these are the labels of all C functions.
    """
    shown = called_by_python(stack) if functions else stack
    return [*(frame.label for frame in shown), *functions]


def called_by_python(stack: Sequence[Frame]) -> list[Frame]:
    """The C functions on top of a stack, up to the one that evaluates Python code.

    If that function has no name, only the locking code on top is certain to have been called by it.
    """
    end = next((i for i, frame in enumerate(stack) if frame.function.startswith(EVALUATES)), 0)
    return list(stack[:end] or takewhile(_is_locking, stack))


def _is_locking(frame: Frame) -> bool:
    return is_of_c_library(frame.object) or bool(_LOCKS.match(frame.function))


@dataclass(frozen=True)
class _Place:
    """A place in C and Python code at which a thread waits."""

    stack_pointer: int
    instruction_pointer: int
    words: tuple[tuple[int, int], ...]
    """Offsets and values of the words on the stack that point to the Python frame or its next instruction.

    Other words of a stack may be left over from earlier calls, and so differ between waits at one place.
    """

    def is_of(self, capture: Capture) -> bool:
        """Whether the captured thread waited at this place."""
        if self.stack_pointer != _stack_pointer(capture):
            return False
        if self.instruction_pointer != capture.registers[-1]:
            return False
        return all(capture.stack[at : at + 8] == word.to_bytes(8, "little") for at, word in self.words)


def _place(
    space: AddressSpace, call: Sequence[bytes], frame: int, instruction: int, size: int
) -> _Place | None:
    """The place of a thread in a system call, by `size` bytes of its stack.

    `call` is what system_call() returns. `frame` is the address of the Python frame, and `instruction` that
    of the frame's present instruction, 0 if unknown. None unless the stack has the address of the frame and,
    if `instruction` is known, that of the next instruction.
    """
    stack_pointer, instruction_pointer = (int(field, 16) for field in call[-2:])
    ready = {instruction + ahead for ahead in AHEAD} if instruction else set()
    stack = _words(space.read(stack_pointer, size))
    words = tuple((8 * i, word) for i, word in enumerate(stack) if word == frame or word in ready)
    values = {word for _, word in words}
    is_certain = frame in values and (not instruction or values & ready)
    return _Place(stack_pointer, instruction_pointer, words) if is_certain else None


def system_call(process: Path, tid: int) -> list[bytes]:
    """The fields of /proc/PID/task/TID/syscall: number, six arguments, stack pointer, instruction pointer.

    `process` is the directory /proc/PID. Empty if the thread is not in a system call, or is gone.
    """
    with contextlib.suppress(OSError):
        call = (process / "task" / str(tid) / "syscall").read_bytes().split()
        return call if len(call) == CALL_FIELDS else []
    return []


class CPythonProcess:
    """A process that runs CPython."""

    def __init__(self, process: Path, space: AddressSpace, runtime: int) -> None:
        """`process` is its directory in procfs, `runtime` the address of its `_PyRuntime`."""
        self._process, self._space = process, space
        self._interpreter = Interpreter(runtime)
        self.places: tuple[int, ...] = ()
        """The numbers of protocol.CPythonPlaces; empty until find_places() has found them."""
        self._searches = 0
        self._next_patience = 0.0
        self._seen: OrderedDict[_Place, list[PythonFrame]] = OrderedDict()
        self._seen_bytes = 0

    @property
    def memory(self) -> int:
        """Bytes that this object takes, about."""
        return self._interpreter.memory + self._seen_bytes

    def wait(self, tid: int, address: int, capture: Capture, stack: Sequence[Frame]) -> PythonWait:
        """What a captured thread waits for at `address`.

        The site and the functions are empty if the thread's frames cannot be read. Many waits are over before
        they are read. A thread that waits often soon waits again, so this method tries a few times, and
        sleeps in between.
        """
        with self._space.opened_memory():
            frames = self._frames(tid, address, capture) or self._seen_before(capture)
            if not frames and time.monotonic() >= self._next_patience:
                for _ in range(TRIES):
                    time.sleep(TRY_SECONDS)
                    if frames := self._frames(tid, address, capture):
                        break
                self._next_patience = time.monotonic() + IMPATIENT_SECONDS
            waited_for = _type_by_functions(stack) or self._type(address, capture)
        self.find_places(capture.thread_pointer)
        return judge_python(frames, waited_for)

    def find_places(self, thread_pointer: int) -> None:
        """Set `places` if they can be found. `thread_pointer` is that of any Python thread of the process."""
        if not self.places and self._searches < MOST_SEARCHES:
            self._searches += 1
            with self._space.opened_memory():
                self.places = self._interpreter.places(self._space, thread_pointer)

    def place(self, codes: Sequence[int]) -> PythonPlace:
        """The place of a thread whose functions have the code objects at these addresses, innermost first."""
        with self._space.opened_memory():
            frames = self._interpreter.functions(self._space, codes)
        return PythonPlace(_site(frames), tuple(map(label, frames)))

    def _frames(self, tid: int, address: int, capture: Capture) -> list[PythonFrame]:
        """The thread's Python frames, if it still waits at the captured place, or for the same address."""
        before = system_call(self._process, tid)
        frames = self._interpreter.frames(self._space, capture.thread_pointer) if before else []
        if not frames:
            return []
        frame, instruction = self._interpreter.innermost(self._space, capture.thread_pointer)
        place = _place(self._space, before, frame, instruction, len(capture.stack))
        is_same_place = place is not None and place.is_of(capture)
        is_same_wait = is_same_place or int(before[1], 16) == address
        if not is_same_wait or system_call(self._process, tid) != before:
            return []
        if place and is_same_place and instruction:
            self._remember(place, frames)
        return frames

    def _remember(self, place: _Place, frames: list[PythonFrame]) -> None:
        """Remember the frames of threads that wait at a place.

        If more than MOST_SEEN places are known, the one at which no thread was seen for longest is dropped.
        """
        if place in self._seen:
            self._seen_bytes -= _bytes_of(place, self._seen.pop(place))
        self._seen[place] = frames
        self._seen_bytes += _bytes_of(place, frames)
        if len(self._seen) > MOST_SEEN:
            self._seen_bytes -= _bytes_of(*self._seen.popitem(last=False))

    def _seen_before(self, capture: Capture) -> list[PythonFrame]:
        """The remembered frames of threads that waited at the captured place; empty if there are none."""
        place = next((place for place in self._seen if place.is_of(capture)), None)
        if place is None:
            return []
        self._seen.move_to_end(place)
        return self._seen[place]

    def _type(self, address: int, capture: Capture) -> str:
        """The type of the object whose lock is at `address`; empty if no captured word points to it."""
        if 0 <= address - _stack_pointer(capture) < len(capture.stack):
            return ""  # from 3.13 on a thread sleeps on a semaphore on its own stack
        for word in dict.fromkeys((*capture.registers, *_words(capture.stack[:SEARCHED]))):
            if LOWEST < word < USER_END and word % 8 == 0:
                name, first = self._interpreter.type_of(self._space, word)
                if first == address and name in LOCK_TYPES:
                    return name
        return ""


def _bytes_of(place: _Place, frames: Sequence[PythonFrame]) -> int:
    """Bytes of memory that a place with its frames takes, about."""
    return PLACE_BYTES + len(place.words) * WORD_BYTES + sum(frame.memory for frame in frames)


def _stack_pointer(capture: Capture) -> int:
    index = STACK_POINTERS.get(len(capture.registers))
    return capture.registers[index] if index else 0


def _words(stack: bytes) -> tuple[int, ...]:
    return struct.unpack_from(f"={len(stack) // 8}Q", stack)


def _type_by_functions(stack: Sequence[Frame]) -> str:
    """The type of the object that a thread waits for, by the C functions that lock; empty if unknown."""
    for frame in stack:
        if frame.function.startswith(EVALUATES):
            break
        if _QUEUE.fullmatch(frame.object):
            return QUEUE_TYPE
        if frame.function in ("_PyRecursiveMutex_Lock", "rlock_acquire_restore"):
            return RLOCK_TYPE
    return ""
