"""System calls for BPF objects (maps, type information, programs, links) and perf events.

A structure here is the part of the kernel's structure, or of union bpf_attr, that lockd reads or writes (see
include/uapi/linux/bpf.h and perf_event.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import resource

from lockd.kernel.libbpf import ENOTSUPP

SYS_BPF, SYS_PERF_EVENT_OPEN = {"aarch64": (280, 241)}.get(os.uname().machine, (321, 298))
BPF_MAP_CREATE, BPF_PROG_LOAD, BPF_BTF_LOAD, BPF_LINK_CREATE, BPF_ITER_CREATE = 0, 5, 18, 28, 33
PERF_FLAG_FD_CLOEXEC = 8


class MapCreate(ctypes.Structure):
    """Attributes of BPF_MAP_CREATE."""

    _fields_ = (
        ("map_type", ctypes.c_uint32), ("key_size", ctypes.c_uint32), ("value_size", ctypes.c_uint32),
        ("max_entries", ctypes.c_uint32), ("map_flags", ctypes.c_uint32), ("inner_map_fd", ctypes.c_uint32),
        ("numa_node", ctypes.c_uint32), ("map_name", ctypes.c_char * 16), ("map_ifindex", ctypes.c_uint32),
        ("btf_fd", ctypes.c_uint32), ("btf_key_type_id", ctypes.c_uint32),
        ("btf_value_type_id", ctypes.c_uint32),
    )  # fmt: skip


class BtfLoad(ctypes.Structure):
    """Attributes of BPF_BTF_LOAD."""

    _fields_ = (
        ("btf", ctypes.c_uint64), ("btf_log_buf", ctypes.c_uint64), ("btf_size", ctypes.c_uint32),
        ("btf_log_size", ctypes.c_uint32), ("btf_log_level", ctypes.c_uint32),
    )  # fmt: skip


class ProgLoad(ctypes.Structure):
    """Attributes of BPF_PROG_LOAD."""

    _fields_ = (
        ("prog_type", ctypes.c_uint32), ("insn_cnt", ctypes.c_uint32), ("insns", ctypes.c_uint64),
        ("license", ctypes.c_uint64), ("log_level", ctypes.c_uint32), ("log_size", ctypes.c_uint32),
        ("log_buf", ctypes.c_uint64), ("kern_version", ctypes.c_uint32), ("prog_flags", ctypes.c_uint32),
        ("prog_name", ctypes.c_char * 16), ("prog_ifindex", ctypes.c_uint32),
        ("expected_attach_type", ctypes.c_uint32), ("prog_btf_fd", ctypes.c_uint32),
        ("func_info_rec_size", ctypes.c_uint32), ("func_info", ctypes.c_uint64),
        ("func_info_cnt", ctypes.c_uint32), ("line_info_rec_size", ctypes.c_uint32),
        ("line_info", ctypes.c_uint64), ("line_info_cnt", ctypes.c_uint32),
        ("attach_btf_id", ctypes.c_uint32),
    )  # fmt: skip


class LinkCreate(ctypes.Structure):
    """Attributes of BPF_LINK_CREATE for an iterator."""

    _fields_ = (
        ("prog_fd", ctypes.c_uint32), ("target_fd", ctypes.c_uint32), ("attach_type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32), ("iter_info", ctypes.c_uint64), ("iter_info_len", ctypes.c_uint32),
    )  # fmt: skip


class IterCreate(ctypes.Structure):
    """Attributes of BPF_ITER_CREATE."""

    _fields_ = (("link_fd", ctypes.c_uint32), ("flags", ctypes.c_uint32))


class KprobeMulti(ctypes.Structure):
    """Attributes of BPF_LINK_CREATE for a link to many kernel functions (BPF_TRACE_KPROBE_MULTI)."""

    _fields_ = (
        ("prog_fd", ctypes.c_uint32), ("target_fd", ctypes.c_uint32), ("attach_type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32), ("kprobe_flags", ctypes.c_uint32), ("cnt", ctypes.c_uint32),
        ("syms", ctypes.c_uint64), ("addrs", ctypes.c_uint64), ("cookies", ctypes.c_uint64),
    )  # fmt: skip


class UprobeMulti(ctypes.Structure):
    """Attributes of BPF_LINK_CREATE for a link to many places in a file (BPF_TRACE_UPROBE_MULTI)."""

    _fields_ = (
        ("prog_fd", ctypes.c_uint32), ("target_fd", ctypes.c_uint32), ("attach_type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32), ("path", ctypes.c_uint64), ("offsets", ctypes.c_uint64),
        ("ref_ctr_offsets", ctypes.c_uint64), ("cookies", ctypes.c_uint64), ("cnt", ctypes.c_uint32),
        ("uprobe_flags", ctypes.c_uint32), ("pid", ctypes.c_uint32),
    )  # fmt: skip


class MapFacts(ctypes.Structure):
    """The beginning of struct bpf_map_info."""

    _fields_ = (
        ("type", ctypes.c_uint32), ("id", ctypes.c_uint32), ("key_size", ctypes.c_uint32),
        ("value_size", ctypes.c_uint32), ("max_entries", ctypes.c_uint32), ("map_flags", ctypes.c_uint32),
        ("name", ctypes.c_char * 16), ("ifindex", ctypes.c_uint32),
        ("btf_vmlinux_value_type_id", ctypes.c_uint32), ("netns_dev", ctypes.c_uint64),
        ("netns_ino", ctypes.c_uint64), ("btf_id", ctypes.c_uint32), ("btf_key_type_id", ctypes.c_uint32),
        ("btf_value_type_id", ctypes.c_uint32),
    )  # fmt: skip


class BtfFacts(ctypes.Structure):
    """The beginning of struct bpf_btf_info."""

    _fields_ = (("btf", ctypes.c_uint64), ("btf_size", ctypes.c_uint32), ("id", ctypes.c_uint32))


class PerfEventAttr(ctypes.Structure):
    """struct perf_event_attr in its second version, for a kprobe, a uprobe or a tracepoint."""

    _fields_ = (
        ("type", ctypes.c_uint32), ("size", ctypes.c_uint32), ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64), ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64), ("flags", ctypes.c_uint64), ("wakeup_events", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32), ("kprobe_func", ctypes.c_uint64), ("probe_offset", ctypes.c_uint64),
    )  # fmt: skip


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def bpf(command: int, attr: ctypes.Structure) -> int:
    """Call bpf(2) and return a descriptor, or a negative number if the kernel refuses.

    ctypes.get_errno() is the reason then.
    """
    _lift_memlock()
    return _syscall(SYS_BPF, command, ctypes.byref(attr), ctypes.sizeof(attr))


def perf_event_open(attr: PerfEventAttr, pid: int = 0) -> int:
    """Open an event of one process, or of all processes if `pid` is 0; return a descriptor as bpf() does.

    An event of all processes is opened on CPU 0, but a program attached to it is called on every CPU. A
    program attached to an event of one process is called for every thread of the process.
    """
    attr.size = ctypes.sizeof(attr)
    pid, cpu = (pid, -1) if pid else (-1, 0)
    return _syscall(SYS_PERF_EVENT_OPEN, ctypes.byref(attr), pid, cpu, -1, PERF_FLAG_FD_CLOEXEC)


@functools.cache
def _lift_memlock() -> None:
    """Remove the limit on locked memory.

    Before 5.11 (97306be45fbe and others) the BPF objects of all processes of a user count as locked memory.
    """
    unlimited = resource.RLIM_INFINITY
    with contextlib.suppress(ValueError, OSError):  # the limit stays: a BPF call beyond it fails
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (unlimited, unlimited))


def describe(error: int) -> str:
    """Return the text for an errno, for messages."""
    if error == ENOTSUPP:
        return "this kernel does not support it here (ENOTSUPP)"
    if error == errno.EMFILE:
        return f"{os.strerror(error)} (RLIMIT_NOFILE is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    return os.strerror(error)


def _syscall(number: int, *arguments: object) -> int:
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return int(_libc.syscall(ctypes.c_long(number), *converted))
