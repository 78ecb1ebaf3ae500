"""Load code into the kernel: what a program is given, and the verifier's words if it is refused."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from lockd.errors import refusal
from lockd.kernel.calls import BPF_PROG_LOAD, ProgLoad, bpf, describe

TYPES = {
    **dict.fromkeys(("kprobe", "kretprobe", "uprobe", "uretprobe", "kprobe_multi", "uprobe_multi"), 2),
    **dict.fromkeys(("fentry", "fexit", "iterator"), 26),
    "tracepoint": 5,
    "raw_tracepoint": 17,
}
"""BPF_PROG_TYPE_* by mechanism."""
ATTACH_TYPES = {"fentry": 24, "fexit": 25, "iterator": 28, "kprobe_multi": 42, "uprobe_multi": 48}
LOG_BYTES = (1 << 24) - 1
"""The most that all kernels take. Before 6.4 (124009615660) a log that has no room ends at its beginning."""
LOG_LINES = 12
LOAD_64, MOVE_CONSTANT = 0x79, 0xB7
"""Operations, in the first byte; bytes 2 and 3 are an offset, 4 to 7 a constant."""


@dataclass(frozen=True)
class Given:
    """What a program is given when it is loaded; see GIVEN in lockd/bpf/include/common.bpf.h."""

    base: int
    """GIVEN_BASE"""
    arguments: int = 0
    """How many arguments the hooked function has; what it returns comes after them."""
    constants: tuple[int, ...] = ()
    """32 bits each."""

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
    """Load a program to be attached by one of TYPES; its descriptor.

    `btf_id`: of fentry, fexit and iterator, the kernel function in the kernel's BTF. Raises HostError with
    the verifier's last words, LockdError if what fails may pass.
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
    words = "\n".join(log.value.decode(errors="replace").splitlines()[-LOG_LINES:]) if verbose else ""
    raise refusal(f"{name}: the kernel refuses it: {describe(error)}{words and ': '}{words}", error)
