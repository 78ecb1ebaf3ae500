"""What the kernel says of a loaded program: how often and how long it ran."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from lockd.kernel.libbpf import libbpf

PROG_INFO_BYTES = 232
RUN_TIME_NS, RUN_COUNT, RECURSION_MISSES = 192, 200, 208
"""Offsets in struct bpf_prog_info (include/uapi/linux/bpf.h); it only grows at its end."""


def program_info(fd: int) -> npt.NDArray[np.int64]:
    """Run time (ns), runs and missed runs of a BPF function; zeros where the kernel keeps none."""
    words = np.zeros(PROG_INFO_BYTES // 8, np.int64)
    size = ctypes.c_uint32(PROG_INFO_BYTES)
    if libbpf().bpf_obj_get_info_by_fd(fd, words.ctypes.data, ctypes.byref(size)):
        return np.zeros(3, np.int64)
    return np.array([words[at // 8] for at in (RUN_TIME_NS, RUN_COUNT, RECURSION_MISSES)])
