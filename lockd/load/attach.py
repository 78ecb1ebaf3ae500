"""Attach loaded programs to hooks: tracepoints, functions of the kernel by kprobe or trampoline, code of
programs by uprobe.

By the kernel's own calls: what is attached goes with its descriptor, whatever becomes of the process,
while events in tracefs would stay.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from lockd.errors import HostError, LockdError, refusal
from lockd.kernel.calls import (
    BPF_ITER_CREATE,
    BPF_LINK_CREATE,
    IterCreate,
    KprobeMulti,
    LinkCreate,
    PerfEventAttr,
    UprobeMulti,
    bpf,
    describe,
    perf_event_open,
)
from lockd.kernel.libbpf import libbpf
from lockd.load import programs

PERF_TYPE_TRACEPOINT = 2
PERF_EVENT_IOC_SET_BPF, PERF_EVENT_IOC_ENABLE = 0x40042408, 0x2400
KPROBE_TYPE = Path("/sys/bus/event_source/devices/kprobe/type")
UPROBE_TYPE = Path("/sys/bus/event_source/devices/uprobe/type")
RETURN_0 = bytes.fromhex("b700000000000000 9500000000000000")
"""r0 = 0; exit"""
MULTI = {"kprobe": "kprobe_multi", "uprobe": "uprobe_multi"}
"""What a program is loaded for that is attached by attach_together()."""
TRIED_FUNCTION = "down_read_killable"
"""Every kernel has it, and nobody is disturbed by a probe on it."""


def attach(program: int, mechanism: str, hook: str, tracefs: Path, pid: int = 0) -> int:
    """Attach a program loaded for `mechanism`; the descriptor that keeps it attached.

    `hook` and `pid` as in hooks.Candidate. Raises HostError with the kernel's reason, LockdError if that may
    pass.
    """
    match mechanism:
        case "tracepoint":
            return _attach_tracepoint(program, hook, tracefs)
        case "raw_tracepoint":
            return _open_raw_tracepoint(program, hook, hook.encode())
        case "kprobe" | "kretprobe":
            return _attach_kprobe(program, hook, mechanism)
        case "uprobe" | "uretprobe":
            return _attach_uprobe(program, hook, mechanism, pid)
    return _open_raw_tracepoint(program, hook, None)  # loaded for this function


def attach_together(program: int, mechanism: str, hooks: Sequence[str], pid: int = 0) -> int:
    """The same of many functions of the kernel, or of many places in one file, by one link: all or none.

    The program was loaded for MULTI[mechanism]. Raises as attach() does.
    """
    attr: KprobeMulti | UprobeMulti
    if mechanism == "kprobe":
        names = (ctypes.c_char_p * len(hooks))(*(hook.encode() for hook in hooks))
        attr = KprobeMulti(cnt=len(hooks), syms=ctypes.addressof(names))
    else:
        path = ctypes.create_string_buffer(os.fsencode(hooks[0].rpartition("+")[0]))
        offsets = (ctypes.c_uint64 * len(hooks))(*(int(hook.rpartition("+")[2], 16) for hook in hooks))
        attr = UprobeMulti(
            path=ctypes.addressof(path), offsets=ctypes.addressof(offsets), cnt=len(hooks), pid=pid
        )
    attr.prog_fd, attr.attach_type = program, programs.ATTACH_TYPES[MULTI[mechanism]]
    fd = bpf(BPF_LINK_CREATE, attr)
    if fd < 0:
        raise _refused(f"{hooks[0]} and others: cannot be attached")
    return fd


def run_iterator(program: int) -> None:
    """Have a program that was loaded for `iterator` called for everything there is. Raises as attach()."""
    link = bpf(BPF_LINK_CREATE, LinkCreate(prog_fd=program, attach_type=programs.ATTACH_TYPES["iterator"]))
    if link < 0:
        raise _refused("the iterator cannot be attached")
    try:
        iterator = bpf(BPF_ITER_CREATE, IterCreate(link_fd=link))
        if iterator < 0:
            raise _refused("the iterator cannot be made")
        with os.fdopen(iterator, "rb", buffering=0) as called:
            while called.read(1) is None:  # it was called a million times and said nothing, which is EAGAIN
                pass
    finally:
        os.close(link)


@functools.cache
def can_attach_together(mechanism: str) -> bool:
    """Whether this kernel has links to many functions (5.18), or to many places in a file (6.6)."""
    try:
        program = programs.load(RETURN_0, "does_nothing", MULTI[mechanism], verbose=False)
    except HostError:
        return False
    try:
        if mechanism == "kprobe":
            os.close(attach_together(program, mechanism, [TRIED_FUNCTION]))
            return True
        # At first one process was taken for one thread. Since that is mended (46ba0e49b642) the pid is looked
        # at before anything else.
        path, offset = ctypes.create_string_buffer(b"/"), ctypes.c_uint64()
        attr = UprobeMulti(
            program, 0, programs.ATTACH_TYPES[MULTI[mechanism]], 0, ctypes.addressof(path),
            ctypes.addressof(offset), cnt=1, pid=2**32 - 1,
        )  # fmt: skip
        return bpf(BPF_LINK_CREATE, attr) < 0 and ctypes.get_errno() == errno.EINVAL
    except HostError:
        return False
    finally:
        os.close(program)


def try_tracing(function: str, btf_id: int) -> str:
    """Why no program can be attached by fentry here, in words; empty if one can, as to this function."""
    try:
        program = programs.load(RETURN_0, "does_nothing", "fentry", btf_id, verbose=False)
        try:
            os.close(_open_raw_tracepoint(program, function, None))
        finally:
            os.close(program)
    except HostError as error:
        return str(error)
    return ""


def _open_raw_tracepoint(program: int, hook: str, tracepoint: bytes | None) -> int:
    fd = int(libbpf().bpf_raw_tracepoint_open(tracepoint, program))
    if fd < 0:
        raise _refused(f"{hook}: cannot be attached")
    return fd


def _attach_tracepoint(program: int, hook: str, tracefs: Path) -> int:
    path = tracefs / "events" / hook.replace(":", "/") / "id"
    try:
        attr = PerfEventAttr(type=PERF_TYPE_TRACEPOINT, config=int(path.read_text()))
    except OSError as error:
        raise refusal(f"{path}: {error.strerror}", error.errno or 0) from error
    return _open_event(program, attr, hook, "tracepoint")


def _attach_kprobe(program: int, function: str, mechanism: str) -> int:
    """At a function's entry (`kprobe`) or return (`kretprobe`)."""
    name = ctypes.create_string_buffer(function.encode())
    attr = PerfEventAttr(
        type=int(KPROBE_TYPE.read_text()),
        config=int(mechanism == "kretprobe"),  # sys/bus/event_source/devices/kprobe/format/retprobe
        kprobe_func=ctypes.addressof(name),
    )
    return _open_event(program, attr, function, mechanism)


def _attach_uprobe(program: int, hook: str, mechanism: str, pid: int) -> int:
    """In every process that maps the file, or in one, now or later; `hook` is FILE+0xOFFSET, of an
    instruction."""
    path, _, offset = hook.rpartition("+")
    name = ctypes.create_string_buffer(os.fsencode(path))
    attr = PerfEventAttr(
        type=int(UPROBE_TYPE.read_text()),
        config=int(mechanism == "uretprobe"),  # sys/bus/event_source/devices/uprobe/format/retprobe
        kprobe_func=ctypes.addressof(name),  # uprobe_path, in the same place
        probe_offset=int(offset, 16),
    )
    return _open_event(program, attr, hook, mechanism, pid)


def _open_event(program: int, attr: PerfEventAttr, hook: str, mechanism: str, pid: int = 0) -> int:
    fd = perf_event_open(attr, pid)
    if fd < 0:
        raise _refused(f"{hook}: no {mechanism} can be set")
    try:
        fcntl.ioctl(fd, PERF_EVENT_IOC_SET_BPF, program)
        fcntl.ioctl(fd, PERF_EVENT_IOC_ENABLE, 0)
    except OSError as error:
        os.close(fd)
        words = f"{hook}: the {mechanism} takes no program: {error.strerror}"
        raise refusal(words, error.errno or 0) from error
    return fd


def _refused(what: str) -> LockdError:
    """The error for the call that just failed."""
    number = ctypes.get_errno()
    return refusal(f"{what}: {describe(number)}", number)
