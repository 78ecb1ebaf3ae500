"""CPython: the Python functions that a thread is in, read from the interpreter's memory while the thread
waits.

Frames are returned only if everything that was read fits together. For an interpreter of an unknown version,
and for a thread that goes on meanwhile, there are no frames rather than wrong ones.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

MOST_FRAMES = 64
MOST_INTERPRETERS = 64
MOST_THREADS = 4096
MOST_TYPES = 64
MOST_CODES = 1024
"""Code objects whose file and function are remembered."""
CODE_BYTES, THREAD_BYTES = 500, 100
"""About how many bytes a remembered code object, without its names, and a remembered thread take."""
MOST_TEXT = 1024
"""A name of a file or a function with so many characters or more is taken for broken memory."""
FIRST_READ = 160
"""Bytes that the first read of a string asks for: most strings are no longer."""
MOST_TYPE_NAME = 64
"""Bytes that are read of a type's name. If no zero byte is among them, they are taken for broken memory."""
MOST_SPAN = 1 << 17
"""Bytes from the first to the last member that one read of a structure may cover."""
THREAD_STRUCTURE = 4096
"""More bytes than the C library's structure of a thread has. On arm64 a thread's id (pthread_self()) is its
thread pointer minus the size of this structure; on x86-64 both are the same."""
TAGS = 7
"""The lowest bits of a frame's pointer to its code object. CPython 3.14 uses them for flags."""
CODE, NONE, TEXT = "code", "NoneType", "str"
"""Names of the Python types by which lockd recognises objects."""

SWITCH_INTERVAL = 5000
"""Microseconds for which a thread waits for the GIL before it asks the holder to release it, unless the
program changes that. This number is the first word of the GIL's structure. The second word points to the
state of the thread that got the GIL last."""
MOST_RUNTIME, RUNTIME_CHUNK = 1 << 20, 1 << 16
"""Bytes from the beginning of `_PyRuntime` in which the GIL's structure is searched for, and bytes that are
read at a time."""
TRAMPOLINE = "<interpreter trampoline>"
"""The function of a frame of CPython 3.12 that only marks where C called Python."""

COOKIE = b"xdebugpy"
"""The first bytes of `_PyRuntime` from 3.13 on; the interpreter's own table of offsets follows."""
OFFSETS_SIZE = 1024
"""Bytes of `_PyRuntime` that are read: enough for the table of every known version."""
SHIM = 3
"""If a frame's member `owner` has this or a higher value, the frame is not that of a Python function."""


class Memory(Protocol):
    """The memory of a process."""

    def read(self, address: int, size: int) -> bytes:
        """The bytes at `address`: fewer than `size` if not all of them can be read."""


@dataclass(frozen=True)
class PythonFrame:
    """A Python function in the stack of a thread."""

    file: str
    function: str
    """The qualified name from CPython 3.11 on, before that the bare name."""

    @property
    def memory(self) -> int:
        """Bytes of memory that the names of the file and of the function take."""
        return sys.getsizeof(self.file) + sys.getsizeof(self.function)


@dataclass(frozen=True)
class Layout:
    """Where a version of CPython keeps its frames: offsets of members, in bytes.

    Each name is that of a structure and of a member in it.

    -1 stands for a member that the version lacks. All machines have 64 bits.
    """

    interpreters: int
    """The pointer to the first interpreter, in `_PyRuntime`."""
    interpreter_next: int
    interpreter_threads: int
    thread_previous: int
    thread_next: int
    thread_interpreter: int
    thread_id: int
    thread_frame: int
    cframe_frame: int
    """The frame, in the structure that `thread_frame` points to; -1 if it points to the frame itself."""
    frame_previous: int
    frame_code: int
    frame_instruction: int
    """The pointer to the instruction in the frame's code at which the thread is."""
    frame_owner: int
    """One byte; from SHIM on, the frame is not that of a Python function."""
    code_file: int
    code_name: int
    """The qualified name, if the version has one."""
    object_type: int
    type_name: int
    text_length: int
    text_state: int
    text_ascii: int
    """The characters of a string that is all ASCII."""
    text_other: int
    """The characters of any other string."""
    state_kind: int
    """The lowest of the 3 bits of `text_state` that are the width of a character in bytes. Two flags follow:
    compact and ASCII."""


def _classic(
    interpreters: int, threads: int, thread_id: int, frame: int, cframe: int, previous: int, code: int,
    instruction: int, owner: int, file: int, name: int, ascii_size: int, other_size: int,
) -> Layout:  # fmt: skip
    return Layout(
        interpreters, 0, threads, 0, 8, 16, thread_id, frame, cframe, previous, code, instruction, owner,
        file, name, 8, 24, 16, 32, ascii_size, other_size, 2,
    )  # fmt: skip


CLASSIC = (
    _classic(32, 8, 176, 24, -1, 24, 32, -1, -1, 104, 112, 48, 72),  # 3.8, 3.9, 3.10
    _classic(40, 16, 152, 56, 8, 48, 32, 56, -1, 112, 128, 48, 72),  # 3.11
    _classic(40, 72, 136, 56, 0, 8, 0, 56, 70, 112, 128, 40, 56),  # 3.12
)
"""Layouts of versions without a table of offsets. Only the right one makes sense of what is in memory."""

_SLOTS = {
    (3, 13): (5, 8, 9, 20, 21, 22, 24, 23, 29, 30, 31, 33, 35, 37, 45, 47, 69, 68, 70),
    (3, 14): (5, 8, 9, 23, 24, 25, 27, 26, 32, 33, 34, 36, 40, 42, 51, 53, 79, 78, 80),
    (3, 15): (5, 8, 9, 23, 24, 25, 30, 26, 40, 41, 42, 44, 48, 50, 59, 61, 91, 90, 92),
}
"""By version, the indexes of 64-bit words in the interpreter's table of offsets: one for each member of
Layout, in the order of the members, but none for `cframe_frame`, `text_other` and `state_kind`."""
FREE_THREADED = 2
"""The index of a 64-bit word in the interpreter's table that is not 0 in a build without the GIL."""
COMPACT = 16
"""Bytes from `text_ascii` to `text_other`."""
MOST = 1 << 20
"""If the interpreter's table has a larger offset, in bytes, lockd does not use the table."""


def candidates(head: bytes) -> tuple[Layout, ...]:
    """Layouts to try, judged by the first bytes of `_PyRuntime`; none for an unknown version."""
    if not head.startswith(COOKIE):
        return CLASSIC
    words = struct.unpack_from(f"={len(head) // 8}Q", head)
    version = (words[1] >> 24 & 255, words[1] >> 16 & 255) if len(words) > 1 else (0, 0)
    slots = _SLOTS.get(version)
    if slots is None or max(slots) >= len(words):
        return ()
    values = [words[slot] for slot in slots]
    if max(values) > MOST:
        return ()
    is_apart = bool(words[FREE_THREADED]) and version >= (3, 14)
    offsets = [*values[:8], -1, *values[8:], values[-1] + COMPACT, 8 if is_apart else 2]
    return (Layout(*offsets),)


class _BrokenMemory(Exception):
    """The memory cannot be read, or is not the structure that it was taken for."""


class Interpreter:
    """CPython in one process."""

    def __init__(self, runtime: int) -> None:
        """`runtime` is the address of the variable `_PyRuntime` in the process."""
        self._runtime = runtime
        self._layout: Layout | None = None
        self._threads: dict[int, int] = {}
        self._types: dict[int, str] = {}
        self._codes: dict[tuple[int, int, int], PythonFrame] = {}
        self._code_bytes = 0

    @property
    def memory(self) -> int:
        """Bytes that this object takes, about."""
        return self._code_bytes + len(self._threads) * THREAD_BYTES

    def frames(self, memory: Memory, thread_pointer: int) -> list[PythonFrame]:
        """The Python functions of the thread with this thread pointer, innermost first. Never raises.

        Empty if the thread is not one of the interpreter's, or its frames cannot be read.
        """
        for layout in self._layouts(memory):
            try:
                frames = self._read(memory, layout, thread_pointer)
            except (_BrokenMemory, OverflowError):
                continue
            self._layout = layout
            return frames
        self._layout = None  # the process may run another program by now
        return []

    def places(self, memory: Memory, thread_pointer: int) -> tuple[int, ...]:
        """The values of the members of protocol.CPythonPlaces, in their order. Never raises.

        If the layout is unknown, it is found by the frames of the thread with this thread pointer. Empty if
        these cannot be read, or if the GIL cannot be found: in a build without it, or if the program has
        changed the switch interval.
        """
        if not self._layout:
            self.frames(memory, thread_pointer)
        layout = self._layout
        if not layout:
            return ()
        try:
            last_holder = _find_last_holder(memory, layout, self._runtime)
        except (_BrokenMemory, OverflowError):
            return ()
        cframe = (1, layout.cframe_frame) if layout.cframe_frame >= 0 else (0, 0)
        frame = layout.frame_previous, layout.frame_code
        return (last_holder, layout.thread_id, layout.thread_frame, *cframe, *frame)

    def functions(self, memory: Memory, codes: Sequence[int]) -> list[PythonFrame]:
        """The functions of the code objects at the addresses `codes`, in the same order. Never raises.

        Functions that only mark a call from C are left out. Empty if not every address is that of a code
        object.
        """
        for layout in self._layouts(memory):
            try:
                functions = [self._code(memory, layout, code & ~TAGS) for code in codes]
            except (_BrokenMemory, OverflowError):
                continue
            return [function for function in functions if function and function.function != TRAMPOLINE]
        return []

    def _layouts(self, memory: Memory) -> Sequence[Layout]:
        """The layouts that the interpreter may have: one if the last call of frames() could read a thread."""
        return [self._layout] if self._layout else candidates(memory.read(self._runtime, OFFSETS_SIZE))

    def innermost(self, memory: Memory, thread_pointer: int) -> tuple[int, int]:
        """The addresses of a thread's innermost frame and of its present instruction; 0 where unknown.

        Both are unknown unless the last call of frames() could read a thread.
        """
        layout = self._layout
        if layout:
            try:
                frame = _current_frame(memory, layout, self._thread(memory, layout, thread_pointer))
                if layout.frame_instruction < 0:
                    return frame, 0
                return frame, _fields(memory, frame, (layout.frame_instruction,))[0]
            except (_BrokenMemory, OverflowError):
                pass
        return 0, 0

    def type_of(self, memory: Memory, address: int) -> tuple[str, int]:
        """The name of the type of the object at `address`, and the word after the object's header.

        The name is empty if there is no object, or if the last call of frames() could not read a thread.
        """
        layout = self._layout
        if layout:
            try:
                kind, first = _fields(memory, address, (layout.object_type, layout.object_type + 8))
                return self._type(memory, layout, kind), first
            except (_BrokenMemory, OverflowError):
                pass
        return "", 0

    def _read(self, memory: Memory, layout: Layout, thread_pointer: int) -> list[PythonFrame]:
        thread = self._thread(memory, layout, thread_pointer)
        frames = []
        first = frame = _current_frame(memory, layout, thread)
        for _ in range(MOST_FRAMES):
            if not frame:
                break
            previous, code, owner = _frame(memory, layout, frame)
            if owner < SHIM and (function := self._code(memory, layout, code & ~TAGS)):
                frames.append(function)
            frame = previous
        if _current_frame(memory, layout, thread) != first:
            raise _BrokenMemory
        return frames

    def _thread(self, memory: Memory, layout: Layout, thread_pointer: int) -> int:
        known = self._threads.get(thread_pointer, 0)
        if known and _is_thread(memory, layout, known, thread_pointer):
            return known
        thread = _find_thread(memory, layout, self._runtime, thread_pointer)
        if len(self._threads) >= MOST_THREADS:
            self._threads.clear()
        self._threads[thread_pointer] = thread
        return thread

    def _code(self, memory: Memory, layout: Layout, address: int) -> PythonFrame | None:
        """The function of a code object; None for a frame that only marks where C called Python."""
        kind, file, name = _fields(memory, address, (layout.object_type, layout.code_file, layout.code_name))
        type_name = self._type(memory, layout, kind)
        if type_name == NONE:
            return None
        if type_name != CODE:
            raise _BrokenMemory
        key = address, file, name
        if key not in self._codes:
            function = PythonFrame(self._text(memory, layout, file), self._text(memory, layout, name))
            if len(self._codes) >= MOST_CODES:
                self._codes.clear()
                self._code_bytes = 0
            self._codes[key] = function
            self._code_bytes += CODE_BYTES + function.memory
        return self._codes[key]

    def _type(self, memory: Memory, layout: Layout, address: int) -> str:
        if address not in self._types:
            (name,) = _fields(memory, address, (layout.type_name,))
            text, end, _ = memory.read(name, MOST_TYPE_NAME).partition(b"\0")
            if not end or not text.isascii():
                raise _BrokenMemory
            if len(self._types) >= MOST_TYPES:
                self._types.clear()
            self._types[address] = text.decode()
        return self._types[address]

    def _text(self, memory: Memory, layout: Layout, address: int) -> str:
        head = memory.read(address, FIRST_READ) if address else b""
        # Offsets from an interpreter's own table may be anything.
        needed = layout.text_other, layout.object_type + 8, layout.text_length + 8, layout.text_state + 4
        if len(head) < max(needed):
            raise _BrokenMemory
        (kind,) = struct.unpack_from("=Q", head, layout.object_type)
        (length,) = struct.unpack_from("=q", head, layout.text_length)
        (state,) = struct.unpack_from("=I", head, layout.text_state)
        state >>= layout.state_kind
        width, is_compact, is_ascii = state & 7, bool(state & 8), bool(state & 16)
        encoding = {1: "ascii" if is_ascii else "latin-1", 2: "utf-16-le", 4: "utf-32-le"}.get(width)
        if not encoding or not is_compact or not 0 < length < MOST_TEXT:
            raise _BrokenMemory
        if self._type(memory, layout, kind) != TEXT:
            raise _BrokenMemory
        start = layout.text_ascii if is_ascii else layout.text_other
        end = start + length * width
        data = head if end <= len(head) else memory.read(address, end)
        try:
            text = data[start:end].decode(encoding)
        except UnicodeDecodeError:
            raise _BrokenMemory from None
        if len(text) != length or not text.isprintable():
            raise _BrokenMemory
        return text


def _fields(memory: Memory, address: int, offsets: Sequence[int]) -> tuple[int, ...]:
    """The 64-bit words at these offsets of a structure, in one read."""
    first, last = min(offsets), max(offsets) + 8
    if not address or address % 8 or last - first > MOST_SPAN:
        raise _BrokenMemory
    data = memory.read(address + first, last - first)
    if len(data) < last - first:
        raise _BrokenMemory
    return tuple(struct.unpack_from("=Q", data, offset - first)[0] for offset in offsets)


def _current_frame(memory: Memory, layout: Layout, thread: int) -> int:
    """The address of a thread's innermost frame."""
    (frame,) = _fields(memory, thread, (layout.thread_frame,))
    if layout.cframe_frame >= 0:
        (frame,) = _fields(memory, frame, (layout.cframe_frame,))
    return frame


def _frame(memory: Memory, layout: Layout, frame: int) -> tuple[int, int, int]:
    """The address of the calling frame, the address of the code object, and `owner` (0 without one)."""
    offsets = (layout.frame_previous, layout.frame_code, layout.frame_owner & -8)
    previous, code, word = _fields(memory, frame, offsets if layout.frame_owner >= 0 else (*offsets[:2], 0))
    return previous, code, word >> layout.frame_owner % 8 * 8 & 255 if layout.frame_owner >= 0 else 0


def _find_thread(memory: Memory, layout: Layout, runtime: int, thread_pointer: int) -> int:
    """The address of the state of the thread with this thread pointer."""
    for thread, thread_id in _threads(memory, layout, runtime):
        if _is_same(thread_id, thread_pointer):
            return thread
    raise _BrokenMemory


def _find_last_holder(memory: Memory, layout: Layout, runtime: int) -> int:
    """The address of the pointer to the state of the thread that last got the GIL."""
    threads = {thread for thread, _ in _threads(memory, layout, runtime)}
    interval = SWITCH_INTERVAL.to_bytes(8, "little")
    for start in range(runtime, runtime + MOST_RUNTIME, RUNTIME_CHUNK):
        data = memory.read(start, RUNTIME_CHUNK + 8)
        at = data.find(interval)
        while at >= 0:
            if at % 8 == 0 and int.from_bytes(data[at + 8 : at + 16], "little") in threads:
                return start + at + 8
            at = data.find(interval, at + 1)
        if len(data) < RUNTIME_CHUNK + 8:
            break
    raise _BrokenMemory


def _threads(memory: Memory, layout: Layout, runtime: int) -> Iterator[tuple[int, int]]:
    """The address of the state of each thread, and the thread's id.

    Raises _BrokenMemory where the links between the states of two threads contradict each other.
    """
    seen = 0
    (interpreter,) = _fields(memory, runtime, (layout.interpreters,))
    for _ in range(MOST_INTERPRETERS):
        if not interpreter:
            break
        following, thread = _fields(
            memory, interpreter, (layout.interpreter_next, layout.interpreter_threads)
        )
        before = 0
        while thread and seen < MOST_THREADS:
            seen += 1
            previous, after, owner, name = _links(memory, layout, thread)
            if previous != before or owner != interpreter:
                raise _BrokenMemory
            yield thread, name
            before, thread = thread, after
        interpreter = following


def _is_thread(memory: Memory, layout: Layout, thread: int, thread_pointer: int) -> bool:
    """Whether a remembered thread state is still in its interpreter's list: freed memory keeps its words."""
    try:
        previous, _, interpreter, name = _links(memory, layout, thread)
        if not _is_same(name, thread_pointer):
            return False
        if previous:
            return _links(memory, layout, previous)[1] == thread
        return _fields(memory, interpreter, (layout.interpreter_threads,)) == (thread,)
    except _BrokenMemory:
        return False


def _links(memory: Memory, layout: Layout, thread: int) -> tuple[int, ...]:
    """The previous and the next thread state, the interpreter and the id of a thread."""
    offsets = (layout.thread_previous, layout.thread_next, layout.thread_interpreter, layout.thread_id)
    return _fields(memory, thread, offsets)


def _is_same(thread_id: int, thread_pointer: int) -> bool:
    return thread_id > 0 and 0 <= thread_pointer - thread_id < THREAD_STRUCTURE
