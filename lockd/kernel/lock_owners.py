"""Owners of kernel locks, read by running the program of lockd/bpf/daemon/lock_owner.bpf.c."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence

from lockd.kernel.libbpf import ENOTSUPP, libbpf
from lockd.kernel.manifest import Manifest

log = logging.getLogger(__name__)

FUNCTION = "read_owner"


class TestRunOpts(ctypes.Structure):
    """struct bpf_test_run_opts of libbpf (bpf.h), as in its first release."""

    _fields_ = (
        ("sz", ctypes.c_size_t), ("data_in", ctypes.c_void_p), ("data_out", ctypes.c_void_p),
        ("data_size_in", ctypes.c_uint32), ("data_size_out", ctypes.c_uint32), ("ctx_in", ctypes.c_void_p),
        ("ctx_out", ctypes.c_void_p), ("ctx_size_in", ctypes.c_uint32), ("ctx_size_out", ctypes.c_uint32),
        ("retval", ctypes.c_uint32), ("repeat", ctypes.c_int), ("duration", ctypes.c_uint32),
        ("flags", ctypes.c_uint32), ("cpu", ctypes.c_uint32),
    )  # fmt: skip


class KernelOwners:
    """Owners of mutexes, rt_mutexes and rwsems held for writing. No owners of other locks are known.

    `fd` is the descriptor of the BPF program read_owner(), or -1 if there is none. No owner is known without
    the program, or if the kernel refuses to run it for this process (before 5.19 running it takes CAP_BPF).
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
    def from_manifest(cls, manifest: Manifest, functions: Sequence[int]) -> KernelOwners:
        """Return the owners that the program read_owner() reads. Without it in `manifest`, none is known.

        `functions` are the descriptors of `manifest.functions`, in the same order.
        """
        descriptors = zip(manifest.functions, functions, strict=True)
        return cls(next((fd for (_, name), fd in descriptors if name == FUNCTION), -1))

    @property
    def is_available(self) -> bool:
        """Whether owners can be read: there is the program, and the kernel has never refused to run it."""
        return self._fd >= 0

    def owner(self, address: int, waiter: int) -> int:
        """Return the id of the thread that holds the lock at `address`, or 0 if it is not known.

        `waiter` is the id of a thread that waits for the lock: the program reads nothing of a lock that
        nobody waits for. Takes one system call.
        """
        if not self.is_available:
            return 0
        self._arguments[0], self._arguments[1] = address, waiter
        if libbpf().bpf_prog_test_run_opts(self._fd, ctypes.byref(self._opts)):
            self._give_up(ctypes.get_errno())
            return 0
        return int(self._opts.retval)

    def _give_up(self, error: int) -> None:
        reason = "not supported (ENOTSUPP)" if error == ENOTSUPP else os.strerror(error)
        log.warning("holders of kernel locks are not known: the kernel does not run %s: %s", FUNCTION, reason)
        self._fd = -1
