"""Run a command for which the kernel refuses one system call with one error, as if it lacked something:

    python3 refusing.py ERRNO CALL [FIRST_ARGUMENT] -- COMMAND...

A filter of system calls (seccomp) refuses the call. All processes that the command starts inherit the filter.
ERRNO is the name of the error; CALL and FIRST_ARGUMENT are numbers. With FIRST_ARGUMENT, only calls with this
first argument are refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
"""Operations of the filter: BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, and BPF_RET | BPF_K."""
NUMBER, FIRST_ARGUMENT = 0, 16
"""Offsets in struct seccomp_data of the number of the call and of its first argument."""
ALLOW, FAIL = 0x7FFF0000, 0x00050000


class Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction)))


def refuse(error: int, call: int, argument: int | None) -> None:
    """Install the filter: from now on, this process and its children get `error` from the call."""
    if argument is None:
        matching = [(LOAD, 0, 0, NUMBER), (EQUAL, 1, 0, call)]
    else:
        matching = [
            (LOAD, 0, 0, NUMBER), (EQUAL, 0, 2, call), (LOAD, 0, 0, FIRST_ARGUMENT), (EQUAL, 1, 0, argument),
        ]  # fmt: skip
    code = [Instruction(*one) for one in (*matching, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, FAIL | error))]
    libc = ctypes.CDLL(None, use_errno=True)
    program = Filter(len(code), (Instruction * len(code))(*code))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    at = sys.argv.index("--")
    error, *numbers = sys.argv[1:at]
    call, argument = [*map(int, numbers), None][:2]
    assert call is not None
    refuse(getattr(errno, error), call, argument)
    os.execvp(sys.argv[at + 1], sys.argv[at + 1 :])
