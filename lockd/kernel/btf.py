"""The type information (BTF) of the running kernel: offsets of struct members, numbers of arguments of
functions and tracepoints, and whether the kernel has a BPF helper."""

from __future__ import annotations

import ctypes
from pathlib import Path

from lockd.errors import PASSING, HostError, LockdError
from lockd.kernel.calls import describe
from lockd.kernel.libbpf import is_address, libbpf

VMLINUX = Path("/sys/kernel/btf/vmlinux")
BTF_KIND_STRUCT, BTF_KIND_ENUM, BTF_KIND_TYPEDEF, BTF_KIND_FUNC = 4, 6, 8, 12


class _Type(ctypes.Structure):
    _fields_ = (("name_off", ctypes.c_uint32), ("info", ctypes.c_uint32), ("size_or_type", ctypes.c_uint32))

    @property
    def members(self) -> int:
        return int(self.info & 0xFFFF)

    @property
    def is_bitfield_struct(self) -> bool:
        return bool(self.info >> 31)


class _Member(ctypes.Structure):
    _fields_ = (("name_off", ctypes.c_uint32), ("type", ctypes.c_uint32), ("offset", ctypes.c_uint32))


class _EnumValue(ctypes.Structure):
    _fields_ = (("name_off", ctypes.c_uint32), ("value", ctypes.c_int32))


class KernelTypes:
    """The kernel's type information (CONFIG_DEBUG_INFO_BTF), read by libbpf and kept until the process ends.

    Raises HostError if the kernel has none, or if libbpf is not installed or too old for it; LockdError if it
    cannot be read at this moment.
    """

    def __init__(self) -> None:
        self._lib = libbpf()
        self._btf = self._lib.btf__load_vmlinux_btf()
        if not is_address(self._btf):
            raise _missing()

    def struct(self, name: str) -> int:
        """Return the BTF id of a struct. Raises HostError if there is none with this name."""
        btf_id = int(self._lib.btf__find_by_name_kind(self._btf, name.encode(), BTF_KIND_STRUCT))
        if btf_id < 0:
            raise HostError(f"kernel BTF: struct {name}: not found")
        return btf_id

    def bit_offset(self, struct: str, path: str) -> int:
        """Return the offset in bits of the member `path` in `struct`.

        `path` is the names of nested members joined by dots. Members of anonymous structs and unions count as
        members of the struct around them. Raises HostError if there is no such struct or member.
        """
        index = self.struct(struct)
        total = 0
        for name in path.split("."):
            member = self._member(index, name)
            if member is None:
                raise HostError(f"kernel BTF: struct {struct}: no member {path}")
            offset, index = member
            total += offset
        return total

    def offset(self, struct: str, path: str) -> int:
        """Return the offset in bytes of the member `path` in `struct`, as bit_offset() does in bits."""
        return self.bit_offset(struct, path) // 8

    def has_member(self, struct: str, member: str) -> bool:
        index = self._lib.btf__find_by_name_kind(self._btf, struct.encode(), BTF_KIND_STRUCT)
        return index >= 0 and self._member(index, member) is not None

    def tracepoint_args(self, name: str) -> int | None:
        """Return the number of arguments of a raw tracepoint, or None if the kernel does not have it."""
        typedef = self._lib.btf__find_by_name_kind(self._btf, f"btf_trace_{name}".encode(), BTF_KIND_TYPEDEF)
        if typedef < 0:
            return None
        pointer = self._type(typedef).size_or_type
        prototype = self._type(pointer).size_or_type
        return self._type(prototype).members - 1  # without the first: the tracepoint's own data

    def function(self, name: str) -> int | None:
        """Return the BTF id of a kernel function, or None if BTF does not describe it."""
        btf_id = int(self._lib.btf__find_by_name_kind(self._btf, name.encode(), BTF_KIND_FUNC))
        return btf_id if btf_id > 0 else None

    def arguments(self, function: int) -> int:
        """Return the number of arguments of the function with this BTF id."""
        return self._type(self._type(function).size_or_type).members

    def has_helper(self, name: str) -> bool:
        """Whether the kernel has the BPF helper `name`: `enum bpf_func_id` has BPF_FUNC_ with this name."""
        index = self._lib.btf__find_by_name_kind(self._btf, b"bpf_func_id", BTF_KIND_ENUM)
        if index < 0:
            return False
        address = self._address(index) + ctypes.sizeof(_Type)
        values = (_EnumValue * self._type(index).members).from_address(address)
        return any(self._name(value.name_off) == f"BPF_FUNC_{name}" for value in values)

    def _member(self, index: int, name: str) -> tuple[int, int] | None:
        """Return the offset in bits of the member `name`, and the BTF id of its type; None if there is none.

        `index` is the BTF id of the struct or union.
        """
        index = self._lib.btf__resolve_type(self._btf, index)
        kind = self._type(index)
        address = self._address(index) + ctypes.sizeof(_Type)
        for member in (_Member * kind.members).from_address(address):
            offset = member.offset & 0xFFFFFF if kind.is_bitfield_struct else member.offset
            if member.name_off and self._name(member.name_off) == name:
                return offset, member.type
            if not member.name_off and (inner := self._member(member.type, name)):
                return offset + inner[0], inner[1]
        return None

    def _address(self, index: int) -> int:
        address = self._lib.btf__type_by_id(self._btf, index)
        if not address:
            raise HostError(f"kernel BTF: type {index}: not found")
        return int(address)

    def _type(self, index: int) -> _Type:
        return _Type.from_address(self._address(index))

    def _name(self, offset: int) -> str:
        return str(self._lib.btf__name_by_offset(self._btf, offset).decode())


def _missing() -> LockdError:
    """Return the error to raise after libbpf has failed to load the kernel's BTF.

    libbpf's own error does not tell whether the kernel has BTF.
    """
    try:
        VMLINUX.read_bytes()
    except OSError as error:
        if error.errno in PASSING:
            return LockdError(f"{VMLINUX}: cannot be read: {describe(error.errno)}")
        return HostError(
            f"{VMLINUX}: cannot be read: this kernel was built without BTF "
            "(CONFIG_DEBUG_INFO_BTF), from which lockd takes the offsets of kernel structures"
        )
    if ctypes.get_errno() in PASSING:
        return LockdError(f"{VMLINUX}: libbpf cannot read it: {describe(ctypes.get_errno())}")
    return HostError(
        f"{VMLINUX}: libbpf cannot read its content: it has types that this libbpf does not know; rule: "
        "libbpf is as new as the kernel, for Linux 6 and later it is 1.0 or later"
    )
