"""How much of the memory that a process no longer uses the C library keeps for later: little."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Of mallopt(3)."""


def keep_little(large: int = 128 << 10) -> None:
    """Blocks of `large` bytes go back to the kernel as they are freed, which costs page faults the next time.

    glibc begins with 128 KiB too, but raises that to the size of what was last freed, up to 32 MiB: what is
    smaller then comes from the heap, whose holes stay resident, and twice as much at its end.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # which musl does not have
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, large)
        mallopt(M_TRIM_THRESHOLD, 2 * large)
        mallopt(M_ARENA_MAX, 1)
