"""Runs a program as on a kernel before 5.6: `python3 without_batches.py ERRNO PROGRAM ARGUMENT...`.

A seccomp filter lets the batch operations on maps fail with ERRNO.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000
LOAD, JUMP_IF_EQUAL, JUMP_IF_GREATER, RETURN = 0x20, 0x15, 0x25, 0x06
NUMBER, FIRST_ARGUMENT = 0, 16
"""Offsets in struct seccomp_data (include/uapi/linux/seccomp.h)."""
SYS_BPF = {"aarch64": 280}.get(platform.machine(), 321)
FIRST_BATCH, LAST_BATCH = 24, 27
"""BPF_MAP_LOOKUP_BATCH and BPF_MAP_DELETE_BATCH (enum bpf_cmd)."""


def install(error: int) -> None:
    """Install the filter; it stays for this process and what it starts. Raises OSError."""
    steps = (  # operation, steps to leave out if true and if false, constant
        (LOAD, 0, 0, NUMBER),
        (JUMP_IF_EQUAL, 0, 4, SYS_BPF),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_IF_GREATER, 2, 0, LAST_BATCH),
        (JUMP_IF_GREATER, 0, 1, FIRST_BATCH - 1),
        (RETURN, 0, 0, RET_ERRNO | error),
        (RETURN, 0, 0, RET_ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program):
        raise OSError(ctypes.get_errno(), "seccomp filter")


if __name__ == "__main__":
    install(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
