"""Attach programs to functions of the kernel: kprobes and kretprobes, fentry and fexit.

By the kernel's own calls: what is attached goes with its descriptor, whatever becomes of the process,
while events in tracefs would stay. bcc loads fentry programs only by functions of its own naming, one
for every function of the kernel that is hooked; here one may serve many.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from lockd.errors import HostError
from lockd.libbpf import libbpf

SYS_BPF, SYS_PERF_EVENT_OPEN = {"aarch64": (280, 241)}.get(platform.machine(), (321, 298))
BPF_PROG_LOAD = 5
BPF_PROG_TYPE_KPROBE, BPF_PROG_TYPE_TRACING = 2, 26
ATTACH_TYPES = {"kprobe": 0, "kretprobe": 0, "fentry": 24, "fexit": 25}
PERF_FLAG_FD_CLOEXEC = 8
PERF_EVENT_IOC_SET_BPF, PERF_EVENT_IOC_ENABLE = 0x40042408, 0x2400
LOG_BYTES = 1 << 16
KPROBE_TYPE = Path("/sys/bus/event_source/devices/kprobe/type")
LOAD_64, MOVE_CONSTANT = 0x79, 0xB7
"""Operations, in the first byte; bytes 2 and 3 are an offset, 4 to 7 a constant."""
RETURN_0 = bytes.fromhex("b700000000000000 9500000000000000")
"""r0 = 0; exit"""


class _ProgLoad(ctypes.Structure):
    """What BPF_PROG_LOAD reads of union bpf_attr (include/uapi/linux/bpf.h)."""

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


class _PerfEventAttr(ctypes.Structure):
    """struct perf_event_attr of a kprobe, in its second version."""

    _fields_ = (
        ("type", ctypes.c_uint32), ("size", ctypes.c_uint32), ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64), ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64), ("flags", ctypes.c_uint64), ("wakeup_events", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32), ("kprobe_func", ctypes.c_uint64), ("probe_offset", ctypes.c_uint64),
    )  # fmt: skip


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class Given:
    """What a program is given when it is loaded; see GIVEN in lockd/bpf/common.bpf.h."""

    base: int
    """GIVEN_BASE"""
    arguments: int = 0
    """How many arguments the hooked function has; what it returns comes after them."""
    constants: tuple[int, ...] = ()

    def put_into(self, code: bytes) -> bytes:
        """`code` with its loads of the context from behind `base` replaced."""
        words = [bytearray(code[at : at + 8]) for at in range(0, len(code), 8)]
        for word in words:
            which = int.from_bytes(word[2:4], "little", signed=True) // 8 - self.base
            if word[0] != LOAD_64 or which < 0:
                continue
            if which == 0:
                word[2:4] = (self.arguments * 8).to_bytes(2, "little")
            else:  # the low half of the second byte is the target
                constant = self.constants[which - 1]
                word[:] = bytes((MOVE_CONSTANT, word[1] & 0x0F, 0, 0)) + constant.to_bytes(4, "little")
        return b"".join(words)


def load(code: bytes, name: str, mechanism: str, btf_id: int = 0, verbose: bool = True) -> int:
    """Load a program to be attached by one of ATTACH_TYPES; its descriptor.

    `btf_id`: of fentry and fexit, the kernel function in the kernel's BTF. Raises HostError with the
    verifier's last words.
    """
    instructions, licence = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"GPL")
    log = ctypes.create_string_buffer(LOG_BYTES)
    attr = _ProgLoad(
        prog_type=BPF_PROG_TYPE_TRACING if btf_id else BPF_PROG_TYPE_KPROBE,
        insn_cnt=len(code) // 8,
        insns=ctypes.addressof(instructions),
        license=ctypes.addressof(licence),
        prog_name=name.encode()[:15],
        expected_attach_type=ATTACH_TYPES[mechanism],
        attach_btf_id=btf_id,
    )
    fd = _bpf(BPF_PROG_LOAD, attr)
    if fd >= 0:
        return fd
    error = ctypes.get_errno()
    attr.log_level, attr.log_size, attr.log_buf = 1, LOG_BYTES, ctypes.addressof(log)
    fd = _bpf(BPF_PROG_LOAD, attr)
    if fd >= 0:
        return fd
    words = "\n".join(log.value.decode(errors="replace").splitlines()[-12:]) if verbose else ""
    raise HostError(f"{name}: the kernel refuses it: {describe(error)}{words and ': '}{words}")


def attach_tracing(program: int, function: str) -> int:
    """Attach a program loaded for fentry or fexit; the descriptor that keeps it attached."""
    fd = int(libbpf().bpf_raw_tracepoint_open(None, program))
    if fd < 0:
        raise HostError(f"{function}: cannot be attached: {describe(ctypes.get_errno())}")
    return fd


def try_tracing(function: str, btf_id: int) -> str:
    """Why no program can be attached by fentry here, in words; empty if one can, as to this function."""
    try:
        program = load(RETURN_0, "does_nothing", "fentry", btf_id, verbose=False)
        try:
            os.close(attach_tracing(program, function))
        finally:
            os.close(program)
    except HostError as error:
        return str(error)
    return ""


def attach_kprobe(program: int, function: str, mechanism: str) -> int:
    """Attach a loaded program at a function's entry (`kprobe`) or return (`kretprobe`); the descriptor.

    Raises HostError with the kernel's reason.
    """
    name = ctypes.create_string_buffer(function.encode())
    attr = _PerfEventAttr(
        type=int(KPROBE_TYPE.read_text()),
        size=ctypes.sizeof(_PerfEventAttr),
        config=int(mechanism == "kretprobe"),  # sys/bus/event_source/devices/kprobe/format/retprobe
        kprobe_func=ctypes.addressof(name),
    )
    fd = _syscall(SYS_PERF_EVENT_OPEN, ctypes.byref(attr), -1, 0, -1, PERF_FLAG_FD_CLOEXEC)
    if fd < 0:
        raise HostError(f"{function}: no {mechanism} can be set: {describe(ctypes.get_errno())}")
    try:
        fcntl.ioctl(fd, PERF_EVENT_IOC_SET_BPF, program)
        fcntl.ioctl(fd, PERF_EVENT_IOC_ENABLE, 0)
    except OSError as error:
        os.close(fd)
        raise HostError(f"{function}: the {mechanism} takes no program: {error.strerror}") from error
    return fd


def describe(error: int) -> str:
    """An errno in words; the kernel returns one that user space has no name for."""
    if error == 524:  # ENOTSUPP
        return "this kernel does not support it here (ENOTSUPP)"
    return os.strerror(error)


def _bpf(command: int, attr: ctypes.Structure) -> int:
    return _syscall(SYS_BPF, command, ctypes.byref(attr), ctypes.sizeof(attr))


def _syscall(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return int(_libc.syscall(ctypes.c_long(number), *words))
