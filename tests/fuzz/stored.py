"""Harness for the counts that one start of lockd leaves to the next."""

from __future__ import annotations

import os
import struct

from lockd import messages
from lockd.sample import saved_state
from lockd.sample.saved_state import SavedState
from tests.fuzz.harness import Harness, mutated

WORDS = struct.Struct("<5q")


MOST = 32 << 20
"""Most bytes of a block, in place of saved_state.LARGEST, which is more memory than an input may take."""


def saved(data: bytes) -> None:
    """Read a file of saved counts: the first bytes of the input are its words, the others its counts.

    Content that cannot be right is an error. The sampler then begins with a file of its own
    (saved_state.py).
    """
    saved_state.LARGEST = MOST
    fd = os.memfd_create("fuzz-saved")
    try:
        SavedState(fd).write(data[WORDS.size :])
        os.pwrite(fd, data[: WORDS.size], 0)
        try:
            if (block := SavedState(fd).read()) is not None:
                messages.unpack(block)
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
    finally:
        os.close(fd)


def seeds() -> list[bytes]:
    block = messages.pack({"form": [1, {}], "is_end": True}, {})
    return [WORDS.pack(draining, 0, 1, 0, len(block)) + block for draining in (0, 1)]


HARNESSES = (Harness("saved", saved, seeds, mutated),)
