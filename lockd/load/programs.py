"""BPF programs one by one: load code into the kernel and attach it to a hook.

Hooks are tracepoints, kernel functions (by kprobe or by trampoline, that is fentry and fexit) and code of
processes (by uprobe). All attachments are made by system calls that return a descriptor. Such an attachment
ends with its descriptor, whatever becomes of the process, while an event in tracefs would stay.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockd.errors import HostError, LockdError, refusal
from lockd.kernel.calls import (
    BPF_ITER_CREATE,
    BPF_LINK_CREATE,
    BPF_PROG_LOAD,
    IterCreate,
    KprobeMulti,
    LinkCreate,
    PerfEventAttr,
    ProgLoad,
    UprobeMulti,
    bpf,
    describe,
    perf_event_open,
)
from lockd.kernel.libbpf import libbpf
from lockd.load.compiled import CALL, PSEUDO_KERNEL_FUNCTION

MULTI = {"kprobe": "kprobe_multi", "uprobe": "uprobe_multi"}
"""The mechanism that load() must get for a program that attach_many() attaches, by the mechanism of its
hooks."""
TYPES = {
    **dict.fromkeys(("kprobe", "kretprobe", "uprobe", "uretprobe", *MULTI.values()), 2),
    **dict.fromkeys(("fentry", "fexit", "iterator"), 26),
    "tracepoint": 5,
    "raw_tracepoint": 17,
}
"""BPF_PROG_TYPE_* by mechanism."""
ATTACH_TYPES = {"fentry": 24, "fexit": 25, "iterator": 28, "kprobe_multi": 42, "uprobe_multi": 48}
"""enum bpf_attach_type by mechanism; 0 for all others."""
LOG_BYTES = (1 << 24) - 1
"""Size of the verifier's log: the largest that all kernels accept. Before 6.4 (124009615660) a log that
does not fit is cut at its end, so that the reason for a refusal would be missing."""
LOG_LINES = 12
"""Lines at the end of the verifier's log that an error message contains."""
LOAD_64, MOVE_CONSTANT = 0x79, 0xB7
"""BPF operations, the first byte of an instruction; bytes 2 and 3 are an offset, 4 to 7 a constant."""
RETURN_0 = bytes.fromhex("b700000000000000 9500000000000000")
"""The smallest program: r0 = 0; exit."""

PERF_TYPE_TRACEPOINT = 2
PERF_EVENT_IOC_SET_BPF, PERF_EVENT_IOC_ENABLE = 0x40042408, 0x2400
KPROBE_TYPE = Path("/sys/bus/event_source/devices/kprobe/type")
UPROBE_TYPE = Path("/sys/bus/event_source/devices/uprobe/type")
CAST = "bpf_rdonly_cast"
"""The function of the kernel by which a program may read any address as a struct."""
TRIED_FUNCTION = "down_read_killable"
"""The function on which mechanisms are tried. Every kernel has it, and a probe on it disturbs nobody."""


@dataclass(frozen=True)
class Given:
    """Values that a program is given when it is loaded; see GIVEN in lockd/bpf/include/common.bpf.h."""

    base: int
    """GIVEN_BASE of the BPF programs."""
    arguments: int = 0
    """Number of arguments of the hooked function; its return value follows them in the context."""
    constants: tuple[int, ...] = ()
    """Constants of 32 bits each, in the order of the GIVEN indices from 1 on."""

    def apply_to(self, code: bytes) -> bytes:
        """Return `code` with the given values in place of loads from beyond the end of the context.

        A load of the 64-bit word number `base` of the context becomes a load of the return value. A load of
        word `base` + n becomes the constant number n, counted from 1.
        """
        instructions = [bytearray(code[start : start + 8]) for start in range(0, len(code), 8)]
        for instruction in instructions:
            index = int.from_bytes(instruction[2:4], "little", signed=True) // 8 - self.base
            if instruction[0] != LOAD_64 or index < 0:
                continue
            if index == 0:
                instruction[2:4] = (self.arguments * 8).to_bytes(2, "little")
            else:  # the low half of the second byte is the target register
                constant = self.constants[index - 1]
                head = bytes((MOVE_CONSTANT, instruction[1] & 0x0F, 0, 0))
                instruction[:] = head + constant.to_bytes(4, "little")
        return b"".join(instructions)


def load(code: bytes, name: str, mechanism: str, btf_id: int = 0, verbose: bool = True) -> int:
    """Load a program and return its descriptor.

    `mechanism` is a key of TYPES. `btf_id` is the BTF id of the kernel function that the program is for, if
    it is loaded for fentry, fexit or iterator. Raises HostError if the kernel refuses the program, LockdError
    if the error may be temporary. With `verbose` the message has the last lines of the verifier's log.
    """
    instructions, licence = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"GPL")
    attr = ProgLoad(
        prog_type=TYPES[mechanism],
        insn_cnt=len(code) // 8,
        insns=ctypes.addressof(instructions),
        license=ctypes.addressof(licence),
        prog_name=name.encode()[:15],
        expected_attach_type=ATTACH_TYPES.get(mechanism, 0),
        attach_btf_id=btf_id,
    )
    fd = bpf(BPF_PROG_LOAD, attr)
    if fd >= 0:
        return fd
    error = ctypes.get_errno()
    log = ctypes.create_string_buffer(LOG_BYTES if verbose else 1 << 12)
    attr.log_level, attr.log_size, attr.log_buf = 1, len(log), ctypes.addressof(log)
    fd = bpf(BPF_PROG_LOAD, attr)
    if fd >= 0:
        return fd
    lines = "\n".join(log.value.decode(errors="replace").splitlines()[-LOG_LINES:]) if verbose else ""
    raise refusal(f"{name}: the kernel refuses it: {describe(error)}{lines and ': '}{lines}", error)


def attach(program: int, mechanism: str, hook: str, tracefs: Path, pid: int = 0, file: str = "") -> int:
    """Attach a program that was loaded for `mechanism`; return the descriptor that keeps it attached.

    `hook`, `pid` and `file` are as in hooks.Candidate; for fentry and fexit the hook was fixed when the
    program was loaded. Raises HostError with the kernel's reason, LockdError if the error may be temporary.
    """
    match mechanism:
        case "tracepoint":
            return _attach_tracepoint(program, hook, tracefs)
        case "raw_tracepoint":
            return _open_raw_tracepoint(program, hook, hook.encode())
        case "kprobe" | "kretprobe":
            return _attach_kprobe(program, hook, mechanism)
        case "uprobe" | "uretprobe":
            return _attach_uprobe(program, hook, mechanism, pid, file)
    return _open_raw_tracepoint(program, hook, None)


def attach_many(program: int, mechanism: str, hooks: Sequence[str], pid: int = 0, file: str = "") -> int:
    """Attach a program to many kernel functions, or to many places in one `file`, by one link.

    The program was loaded for MULTI[mechanism]. Returns the descriptor of the link. The kernel attaches the
    program to all hooks or to none; in the second case the errors are those of attach().
    """
    attr: KprobeMulti | UprobeMulti
    if mechanism == "kprobe":
        names = (ctypes.c_char_p * len(hooks))(*(hook.encode() for hook in hooks))
        attr = KprobeMulti(cnt=len(hooks), syms=ctypes.addressof(names))
    else:
        path = ctypes.create_string_buffer(os.fsencode(file))
        offsets = (ctypes.c_uint64 * len(hooks))(*(int(hook.rpartition("+")[2], 16) for hook in hooks))
        attr = UprobeMulti(
            path=ctypes.addressof(path), offsets=ctypes.addressof(offsets), cnt=len(hooks), pid=pid
        )
    attr.prog_fd, attr.attach_type = program, ATTACH_TYPES[MULTI[mechanism]]
    fd = bpf(BPF_LINK_CREATE, attr)
    if fd < 0:
        raise _refusal(f"{hooks[0]} and others: cannot be attached")
    return fd


def run_iterator(program: int) -> None:
    """Run a program that was loaded for `iterator` once for every object of its kind.

    Raises HostError with the kernel's reason, LockdError if the error may be temporary.
    """
    link = bpf(BPF_LINK_CREATE, LinkCreate(prog_fd=program, attach_type=ATTACH_TYPES["iterator"]))
    if link < 0:
        raise _refusal("the iterator cannot be attached")
    try:
        iterator = bpf(BPF_ITER_CREATE, IterCreate(link_fd=link))
        if iterator < 0:
            raise _refusal("the iterator cannot be made")
        with os.fdopen(iterator, "rb", buffering=0) as run:
            # read() is None for EAGAIN, which the kernel returns after a million objects without output.
            while run.read(1) is None:
                pass
    finally:
        os.close(link)


@functools.cache
def can_attach_many(mechanism: str) -> bool:
    """Whether this kernel has links to many functions, or correct links to many places in a file.

    The former are for `mechanism` kprobe and came with 5.18, the latter are for uprobe and came with 6.10.
    """
    try:
        program = load(RETURN_0, "does_nothing", MULTI[mechanism], verbose=False)
    except HostError:
        return False
    try:
        if mechanism == "kprobe":
            os.close(attach_many(program, mechanism, [TRIED_FUNCTION]))
            return True
        # The first kernels with links to many places in a file use `pid` as the id of a thread, not of a
        # process. Since this was corrected (46ba0e49b642) the kernel checks `pid` first: EINVAL for -1.
        path, offset = ctypes.create_string_buffer(b"/"), ctypes.c_uint64()
        attr = UprobeMulti(
            program, 0, ATTACH_TYPES[MULTI[mechanism]], 0, ctypes.addressof(path),
            ctypes.addressof(offset), cnt=1, pid=2**32 - 1,
        )  # fmt: skip
        return bpf(BPF_LINK_CREATE, attr) < 0 and ctypes.get_errno() == errno.EINVAL
    except HostError:
        return False
    finally:
        os.close(program)


def can_cast(function: int, struct: int) -> bool:
    """Whether this kernel lets programs call CAST for a struct. Both arguments are BTF ids: that of CAST, and
    that of the struct."""
    code = b"".join(
        (
            bytes((MOVE_CONSTANT, 1, 0, 0)) + bytes(4),
            bytes((MOVE_CONSTANT, 2, 0, 0)) + struct.to_bytes(4, "little"),
            bytes((CALL, PSEUDO_KERNEL_FUNCTION << 4, 0, 0)) + function.to_bytes(4, "little"),
            RETURN_0,
        )
    )
    try:
        os.close(load(code, "casts", "raw_tracepoint", verbose=False))
    except HostError:
        return False
    return True


def fentry_refusal(function: str, btf_id: int) -> str:
    """Return the reason why the kernel refuses to attach by fentry to this function; empty if it does not.

    An empty program is attached and detached.
    """
    try:
        program = load(RETURN_0, "does_nothing", "fentry", btf_id, verbose=False)
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
        raise _refusal(f"{hook}: cannot be attached")
    return fd


def _attach_tracepoint(program: int, hook: str, tracefs: Path) -> int:
    path = tracefs / "events" / hook.replace(":", "/") / "id"
    try:
        attr = PerfEventAttr(type=PERF_TYPE_TRACEPOINT, config=int(path.read_text()))
    except OSError as error:
        raise refusal(f"{path}: {error.strerror}", error.errno or 0) from error
    return _open_event(program, attr, hook, "tracepoint")


def _attach_kprobe(program: int, function: str, mechanism: str) -> int:
    """Attach to a kernel function's entry (`kprobe`) or return (`kretprobe`)."""
    name = ctypes.create_string_buffer(function.encode())
    attr = PerfEventAttr(
        type=int(KPROBE_TYPE.read_text()),
        config=int(mechanism == "kretprobe"),  # bit 0: /sys/bus/event_source/devices/kprobe/format/retprobe
        kprobe_func=ctypes.addressof(name),
    )
    return _open_event(program, attr, function, mechanism)


def _attach_uprobe(program: int, hook: str, mechanism: str, pid: int, file: str) -> int:
    """Attach to the instruction of `file` at the offset in `hook`.

    This affects every process that maps the file now or later; with a `pid`, only that process.
    """
    name = ctypes.create_string_buffer(os.fsencode(file))
    attr = PerfEventAttr(
        type=int(UPROBE_TYPE.read_text()),
        config=int(mechanism == "uretprobe"),  # bit 0: /sys/bus/event_source/devices/uprobe/format/retprobe
        kprobe_func=ctypes.addressof(name),  # sets uprobe_path, in a union with kprobe_func
        probe_offset=int(hook.rpartition("+")[2], 16),
    )
    return _open_event(program, attr, hook, mechanism, pid)


def _open_event(program: int, attr: PerfEventAttr, hook: str, mechanism: str, pid: int = 0) -> int:
    fd = perf_event_open(attr, pid)
    if fd < 0:
        raise _refusal(f"{hook}: no {mechanism} can be set")
    try:
        fcntl.ioctl(fd, PERF_EVENT_IOC_SET_BPF, program)
        fcntl.ioctl(fd, PERF_EVENT_IOC_ENABLE, 0)
    except OSError as error:
        os.close(fd)
        reason = f"{hook}: the {mechanism} takes no program: {error.strerror}"
        raise refusal(reason, error.errno or 0) from error
    return fd


def _refusal(message: str) -> LockdError:
    """Return the error for the system call that just failed."""
    number = ctypes.get_errno()
    return refusal(f"{message}: {describe(number)}", number)
