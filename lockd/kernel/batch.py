"""Whether this kernel reads many entries of a map in one call, and what to say if it does not."""

from __future__ import annotations

import ctypes
import errno

from lockd.kernel.libbpf import ENOTSUPP, last_error, libbpf

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
