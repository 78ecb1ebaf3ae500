"""Where CPython keeps what tells which Python functions a thread is in, by version, on 64-bit machines."""

from __future__ import annotations

import struct
from dataclasses import dataclass

COOKIE = b"xdebugpy"
"""From 3.13 on `_PyRuntime` begins with it, and with the interpreter's own table of offsets."""
OFFSETS_SIZE = 1024
"""Bytes to read there, enough for the table of every version known."""


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes, by the structure that they are in; -1: it has no such member."""

    interpreters: int
    """The first interpreter, in `_PyRuntime`."""
    interpreter_next: int
    interpreter_threads: int
    thread_previous: int
    thread_next: int
    thread_interpreter: int
    thread_id: int
    thread_frame: int
    cframe_frame: int
    """Where it is in what `thread_frame` points to, if that is not the frame itself."""
    frame_previous: int
    frame_code: int
    frame_instruction: int
    """Where in its code it is."""
    frame_owner: int
    """One byte: from SHIM on it is no frame of a Python function."""
    code_file: int
    code_name: int
    """The qualified name if there is one."""
    object_type: int
    type_name: int
    text_length: int
    text_state: int
    text_ascii: int
    """Where the characters begin if all are ASCII."""
    text_other: int
    """Where they begin if not."""
    state_kind: int
    """The bit at which the width of characters begins: 3 bits, then whether it is compact, then ASCII."""


SHIM = 3


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
"""Versions without a table of their own. Which it is shows by what is in memory: one alone makes sense."""

_SLOTS = {
    (3, 13): (5, 8, 9, 20, 21, 22, 24, 23, 29, 30, 31, 33, 35, 37, 45, 47, 69, 68, 70),
    (3, 14): (5, 8, 9, 23, 24, 25, 27, 26, 32, 33, 34, 36, 40, 42, 51, 53, 79, 78, 80),
    (3, 15): (5, 8, 9, 23, 24, 25, 30, 26, 40, 41, 42, 44, 48, 50, 59, 61, 91, 90, 92),
}
"""Which 64-bit words of that table are the offsets, in the order of Layout, but for the last two."""
FREE_THREADED = 2
COMPACT = 16
"""Bytes by which the characters of a string that is not ASCII are further on."""
MOST = 1 << 20


def candidates(head: bytes) -> tuple[Layout, ...]:
    """Layouts to try, by the first bytes of `_PyRuntime`; none for a version that is not known."""
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
    apart = bool(words[FREE_THREADED]) and version >= (3, 14)
    offsets = [*values[:8], -1, *values[8:], values[-1] + COMPACT, 8 if apart else 2]
    return (Layout(*offsets),)
