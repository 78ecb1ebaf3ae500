"""How much of the memory that a process no longer uses the C library keeps for later: little."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Of mallopt(3)."""
LARGE = 128 << 10
"""Bytes. It is glibc's own default, but glibc raises it to the size of what was last freed, up to 32 MB: what
is smaller then comes from the heap, whose holes stay resident."""


def keep_little() -> None:
    """For processes that now and then handle much: large blocks go back to the kernel once they are freed.

    Costs page faults for each of them; not for what allocates large blocks all the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # which musl does not have
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, LARGE)
        mallopt(M_ARENA_MAX, 1)
