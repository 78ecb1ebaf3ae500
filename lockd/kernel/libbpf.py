"""The C library libbpf, with the prototypes of the functions that lockd calls."""

from __future__ import annotations

import ctypes
import functools

from lockd.errors import HostError

ENOTSUPP = 524
"""An errno that the kernel returns although user space has no name for it."""

LARGEST_ERRNO = 4095
"""The largest errno that a pointer can stand for (MAX_ERRNO in linux/err.h)."""

_INT, _U32, _PTR, _STR = ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_char_p

_PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    # declared in btf.h
    "btf__load_vmlinux_btf": (_PTR, ()),
    "btf__find_by_name_kind": (_INT, (_PTR, _STR, _U32)),
    "btf__type_by_id": (_PTR, (_PTR, _U32)),
    "btf__resolve_type": (_INT, (_PTR, _U32)),
    "btf__name_by_offset": (_STR, (_PTR, _U32)),
    # declared in bpf.h
    "bpf_map_update_elem": (_INT, (_INT, _PTR, _PTR, ctypes.c_uint64)),
    "bpf_map_lookup_elem": (_INT, (_INT, _PTR, _PTR)),
    "bpf_map_delete_elem": (_INT, (_INT, _PTR)),
    "bpf_map_lookup_and_delete_batch": (_INT, (_INT, _PTR, _PTR, _PTR, _PTR, _PTR, _PTR)),
    "bpf_map_lookup_batch": (_INT, (_INT, _PTR, _PTR, _PTR, _PTR, _PTR, _PTR)),
    "bpf_raw_tracepoint_open": (_INT, (_STR, _INT)),
    "bpf_obj_get_info_by_fd": (_INT, (_INT, _PTR, _PTR)),
    "bpf_prog_test_run_opts": (_INT, (_INT, _PTR)),
}


def is_address(pointer: int | None) -> bool:
    """Whether a pointer that a function of libbpf has returned is an address.

    A function that fails returns NULL, or before libbpf 1.0 a negative errno in place of the address.
    """
    return pointer is not None and 0 < pointer < 2 ** (8 * ctypes.sizeof(_PTR)) - LARGEST_ERRNO


@functools.cache
def libbpf() -> ctypes.CDLL:
    """Return the library, with prototypes. Raises HostError if it is not installed.

    After a call that failed, ctypes.get_errno() is the error: every version of libbpf sets it.
    """
    for name in ("libbpf.so.1", "libbpf.so.0"):
        try:
            library = ctypes.CDLL(name, use_errno=True)
            break
        except OSError:
            continue
    else:
        raise HostError("libbpf: not found: install the package libbpf1 (libbpf0 on older systems)")
    library.libbpf_set_print(None)  # keep libbpf from writing to stderr: lockd has messages of its own
    for function, (result, arguments) in _PROTOTYPES.items():
        prototype = getattr(library, function)
        prototype.restype, prototype.argtypes = result, arguments
    return library
