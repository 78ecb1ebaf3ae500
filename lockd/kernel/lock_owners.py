"""Who holds a kernel lock at this moment: runs the program of lockd/bpf/daemon/lock_owner.bpf.c."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence

from lockd.kernel.libbpf import ENOTSUPP, last_error, libbpf
from lockd.kernel.manifest import Manifest

log = logging.getLogger(__name__)

FUNCTION = "read_owner"


class TestRunOpts(ctypes.Structure):
    """struct bpf_test_run_opts of libbpf (bpf.h), as of its first release."""

    _fields_ = (
        ("sz", ctypes.c_size_t), ("data_in", ctypes.c_void_p), ("data_out", ctypes.c_void_p),
        ("data_size_in", ctypes.c_uint32), ("data_size_out", ctypes.c_uint32), ("ctx_in", ctypes.c_void_p),
        ("ctx_out", ctypes.c_void_p), ("ctx_size_in", ctypes.c_uint32), ("ctx_size_out", ctypes.c_uint32),
        ("retval", ctypes.c_uint32), ("repeat", ctypes.c_int), ("duration", ctypes.c_uint32),
        ("flags", ctypes.c_uint32), ("cpu", ctypes.c_uint32),
    )  # fmt: skip


class KernelOwners:
    """Owners of mutexes, rt_mutexes and rwsems held for writing; the kernel knows of no others.

    `fd` is the descriptor of the program, -1 if there is none: then, and where the kernel does not run it for
    this process (before 5.19 that takes CAP_BPF), no lock has an owner.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._arguments = (ctypes.c_uint64 * 2)()
        self._opts = TestRunOpts(
            sz=ctypes.sizeof(TestRunOpts),
            ctx_in=ctypes.addressof(self._arguments),
            ctx_size_in=ctypes.sizeof(self._arguments),
        )

    @classmethod
    def of(cls, manifest: Manifest, functions: Sequence[int]) -> KernelOwners:
        """`functions` are the descriptors of the manifest's functions, in its order."""
        pairs = zip(manifest.functions, functions, strict=True)
        return cls(next((fd for (_, name), fd in pairs if name == FUNCTION), -1))

    @property
    def works(self) -> bool:
        return self._fd >= 0

    def owner(self, address: int, waiter: int) -> int:
        """The thread that holds the lock at `address`, 0 if that is not known.

        `waiter` is a thread that waits for the lock: of what none waits for nothing is read. One system call.
        """
        if not self.works:
            return 0
        self._arguments[0], self._arguments[1] = address, waiter
        if libbpf().bpf_prog_test_run_opts(self._fd, ctypes.byref(self._opts)):
            self._give_up(last_error())
            return 0
        return int(self._opts.retval)

    def _give_up(self, error: int) -> None:
        words = "not supported (ENOTSUPP)" if error == ENOTSUPP else os.strerror(error)
        log.warning("who holds a kernel lock cannot be told: the kernel does not run %s: %s", FUNCTION, words)
        self._fd = -1
