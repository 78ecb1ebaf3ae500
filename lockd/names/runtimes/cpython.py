"""The Python functions that a thread is in, read from the memory of CPython as the thread waits.

What is there is believed only if all of it fits together: an interpreter of another version, or a thread that
goes on meanwhile, has no frames rather than wrong ones.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lockd.names.runtimes.cpython_layouts import OFFSETS_SIZE, SHIM, Layout, candidates

MOST_FRAMES = 64
MOST_INTERPRETERS = 64
MOST_THREADS = 4096
MOST_TYPES = 64
MOST_CODES = 1024
CODE_BYTES, THREAD_BYTES = 500, 100
MOST_TEXT = 1024
"""Characters of a file's or a function's name."""
FIRST_READ = 160
"""Bytes of a string that are read at once: most are no longer."""
MOST_TYPE_NAME = 64
MOST_SPAN = 1 << 17
THREAD_STRUCTURE = 4096
"""On arm64 a thread's own id is its thread pointer less the size of a structure, below this."""
TAGS = 7
"""Bits of a pointer in a frame that 3.14 uses for itself."""
CODE, NONE, TEXT = "code", "NoneType", "str"


class Memory(Protocol):
    """Of a process."""

    def read(self, address: int, size: int) -> bytes:
        """Less than `size` bytes if not all can be read."""


@dataclass(frozen=True)
class PythonFrame:
    """`function` is the qualified name from 3.11 on, before that the bare one."""

    file: str
    function: str


class _NotThere(Exception):
    """The memory cannot be read, or is not what it was taken for."""


class Interpreter:
    """CPython in one process, by the address there of its variable `_PyRuntime`."""

    def __init__(self, runtime: int) -> None:
        self._runtime = runtime
        self._layout: Layout | None = None
        self._threads: dict[int, int] = {}
        self._types: dict[int, str] = {}
        self._codes: dict[tuple[int, int, int], PythonFrame] = {}
        self._code_bytes = 0

    @property
    def memory(self) -> int:
        """Bytes that it takes, about."""
        return self._code_bytes + len(self._threads) * THREAD_BYTES

    def frames(self, memory: Memory, thread_pointer: int) -> list[PythonFrame]:
        """Of the thread with this thread pointer, innermost first; none if it is not known. Never raises."""
        layouts = [self._layout] if self._layout else candidates(memory.read(self._runtime, OFFSETS_SIZE))
        for layout in layouts:
            try:
                found = self._read(memory, layout, thread_pointer)
            except (_NotThere, OverflowError):
                continue
            self._layout = layout
            return found
        self._layout = None  # another program may be in its place
        return []

    def place(self, memory: Memory, thread_pointer: int) -> tuple[int, int]:
        """The addresses of its innermost frame and of the instruction that is on; 0 where not known.

        Known only once frames() has found some.
        """
        layout = self._layout
        if layout:
            try:
                frame = _current_frame(memory, layout, self._thread(memory, layout, thread_pointer))
                if layout.frame_instruction < 0:
                    return frame, 0
                return frame, _fields(memory, frame, (layout.frame_instruction,))[0]
            except (_NotThere, OverflowError):
                pass
        return 0, 0

    def type_of(self, memory: Memory, address: int) -> tuple[str, int]:
        """The type of the object there and the word behind its header; an empty name if there is none.

        Known only once frames() has found some.
        """
        layout = self._layout
        if layout:
            try:
                kind, first = _fields(memory, address, (layout.object_type, layout.object_type + 8))
                return self._type(memory, layout, kind), first
            except (_NotThere, OverflowError):
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
            if owner < SHIM and (found := self._code(memory, layout, code & ~TAGS)):
                frames.append(found)
            frame = previous
        if _current_frame(memory, layout, thread) != first:
            raise _NotThere
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
        """None for a frame that only marks where C called Python."""
        kind, file, name = _fields(memory, address, (layout.object_type, layout.code_file, layout.code_name))
        type_name = self._type(memory, layout, kind)
        if type_name == NONE:
            return None
        if type_name != CODE:
            raise _NotThere
        key = address, file, name
        if key not in self._codes:
            found = PythonFrame(self._text(memory, layout, file), self._text(memory, layout, name))
            if len(self._codes) >= MOST_CODES:
                self._codes.clear()
                self._code_bytes = 0
            self._codes[key] = found
            self._code_bytes += CODE_BYTES + len(found.file) + len(found.function)
        return self._codes[key]

    def _type(self, memory: Memory, layout: Layout, address: int) -> str:
        if address not in self._types:
            (name,) = _fields(memory, address, (layout.type_name,))
            text, end, _ = memory.read(name, MOST_TYPE_NAME).partition(b"\0")
            if not end or not text.isascii():
                raise _NotThere
            if len(self._types) >= MOST_TYPES:
                self._types.clear()
            self._types[address] = text.decode()
        return self._types[address]

    def _text(self, memory: Memory, layout: Layout, address: int) -> str:
        head = memory.read(address, FIRST_READ) if address else b""
        # By its own table of offsets an interpreter may have them anywhere.
        needed = layout.text_other, layout.object_type + 8, layout.text_length + 8, layout.text_state + 4
        if len(head) < max(needed):
            raise _NotThere
        (kind,) = struct.unpack_from("=Q", head, layout.object_type)
        (length,) = struct.unpack_from("=q", head, layout.text_length)
        (state,) = struct.unpack_from("=I", head, layout.text_state)
        state >>= layout.state_kind
        width, is_compact, is_ascii = state & 7, bool(state & 8), bool(state & 16)
        encoding = {1: "ascii" if is_ascii else "latin-1", 2: "utf-16-le", 4: "utf-32-le"}.get(width)
        if not encoding or not is_compact or not 0 < length < MOST_TEXT:
            raise _NotThere
        if self._type(memory, layout, kind) != TEXT:
            raise _NotThere
        start = layout.text_ascii if is_ascii else layout.text_other
        end = start + length * width
        data = head if end <= len(head) else memory.read(address, end)
        try:
            text = data[start:end].decode(encoding)
        except UnicodeDecodeError:
            raise _NotThere from None
        if len(text) != length or not text.isprintable():
            raise _NotThere
        return text


def _fields(memory: Memory, address: int, offsets: Sequence[int]) -> tuple[int, ...]:
    """The words of a structure, in one read."""
    first, last = min(offsets), max(offsets) + 8
    if not address or address % 8 or last - first > MOST_SPAN:
        raise _NotThere
    data = memory.read(address + first, last - first)
    if len(data) < last - first:
        raise _NotThere
    return tuple(struct.unpack_from("=Q", data, offset - first)[0] for offset in offsets)


def _current_frame(memory: Memory, layout: Layout, thread: int) -> int:
    (frame,) = _fields(memory, thread, (layout.thread_frame,))
    if layout.cframe_frame >= 0:
        (frame,) = _fields(memory, frame, (layout.cframe_frame,))
    return frame


def _frame(memory: Memory, layout: Layout, frame: int) -> tuple[int, int, int]:
    """The frame that it was called by, its code and its owner."""
    offsets = (layout.frame_previous, layout.frame_code, layout.frame_owner & -8)
    previous, code, word = _fields(memory, frame, offsets if layout.frame_owner >= 0 else (*offsets[:2], 0))
    return previous, code, word >> layout.frame_owner % 8 * 8 & 255 if layout.frame_owner >= 0 else 0


def _find_thread(memory: Memory, layout: Layout, runtime: int, thread_pointer: int) -> int:
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
                raise _NotThere
            if _is_same(name, thread_pointer):
                return thread
            before, thread = thread, after
        interpreter = following
    raise _NotThere


def _is_thread(memory: Memory, layout: Layout, thread: int, thread_pointer: int) -> bool:
    """Whether a thread's state that was known is still in the list: what was freed keeps its words."""
    try:
        previous, _, interpreter, name = _links(memory, layout, thread)
        if not _is_same(name, thread_pointer):
            return False
        if previous:
            return _links(memory, layout, previous)[1] == thread
        return _fields(memory, interpreter, (layout.interpreter_threads,)) == (thread,)
    except _NotThere:
        return False


def _links(memory: Memory, layout: Layout, thread: int) -> tuple[int, ...]:
    offsets = (layout.thread_previous, layout.thread_next, layout.thread_interpreter, layout.thread_id)
    return _fields(memory, thread, offsets)


def _is_same(thread_id: int, thread_pointer: int) -> bool:
    return thread_id > 0 and 0 <= thread_pointer - thread_id < THREAD_STRUCTURE
