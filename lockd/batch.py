"""Whether this kernel reads many entries of a map in one call, and what to say if it does not."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

from lockd.errors import HostError
from lockd.libbpf import last_error, libbpf

SYS_BPF = {"aarch64": 280}.get(platform.machine(), 321)
BPF_MAP_CREATE, BPF_MAP_TYPE_HASH = 0, 1
ENOTSUPP = 524
"""Of the kernel's own; user space has no name for it."""
MISSING = (
    "this kernel has no batch operations on maps (Linux 5.6 and later have them): "
    "maps are read entry by entry, which takes some 25 times as long"
)


def can_batch(fd: int) -> bool:
    """Whether the hash map with this descriptor can be read in batches."""
    count, token = ctypes.c_uint32(0), ctypes.create_string_buffer(16)
    # None is asked for, and so none is read.
    failed = libbpf().bpf_map_lookup_batch(fd, None, token, None, None, ctypes.byref(count), None)
    return not failed or last_error() not in (errno.EINVAL, errno.EOPNOTSUPP, ENOTSUPP)


def require_batches() -> None:
    """Raise HostError if this kernel has none; needs the privileges for making a map."""
    attributes = (ctypes.c_uint32 * 5)(
        BPF_MAP_TYPE_HASH, 4, 4, 1, 0
    )  # sizes of key and value, entries, flags
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(SYS_BPF, BPF_MAP_CREATE, attributes, ctypes.sizeof(attributes))
    if fd < 0:
        raise HostError(f"a map cannot be made: {os.strerror(ctypes.get_errno())}")
    try:
        if not can_batch(fd):
            raise HostError(MISSING)
    finally:
        os.close(fd)
