"""Make maps in the kernel as they were compiled."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from lockd.errors import HostError, LockdError, refusal
from lockd.kernel.batch import MISSING, can_batch
from lockd.kernel.calls import BPF_BTF_LOAD, BPF_MAP_CREATE, BtfLoad, MapCreate, bpf, describe
from lockd.kernel.libbpf import last_error, libbpf
from lockd.load.compiled import MapDefinition

BPF_MAP_TYPE_HASH = 1


def create(maps: Sequence[MapDefinition], btf: bytes) -> list[int]:
    """The descriptor of each map. Raises LockdError with the kernel's reason, and then keeps none."""
    types = _load_btf(btf)
    made: dict[str, int] = {}
    try:
        for one in sorted(maps, key=lambda one: bool(one.inner)):
            made[one.name] = _create(one, made.get(one.inner, 0), types)
    except LockdError:
        for fd in made.values():
            os.close(fd)
        raise
    finally:
        if types:
            os.close(types)
    return [made[one.name] for one in maps]


def require_batches() -> None:
    """Raise HostError if this kernel cannot read maps in batches; needs the privileges for making one."""
    fd = bpf(BPF_MAP_CREATE, MapCreate(map_type=BPF_MAP_TYPE_HASH, key_size=4, value_size=4, max_entries=1))
    if fd < 0:
        raise _refused("a map cannot be made", ctypes.get_errno())
    try:
        if not can_batch(fd):
            raise HostError(MISSING)
    finally:
        os.close(fd)


def set_element(fd: int, name: str, index: int, value: ctypes.c_uint32 | ctypes.c_uint64) -> None:
    """Write an element of an array; of an array of maps, `value` is a map's descriptor."""
    key = ctypes.c_uint32(index)
    if libbpf().bpf_map_update_elem(fd, ctypes.byref(key), ctypes.byref(value), 0):
        raise _refused(f"map {name}: setting element {index}", last_error())


def _create(one: MapDefinition, inner: int, types: int) -> int:
    attr = MapCreate(
        map_type=one.type,
        key_size=one.key_size,
        value_size=one.value_size,
        max_entries=one.entries,
        map_flags=one.flags,
        inner_map_fd=inner,
        map_name=one.name.encode()[:15],
    )
    if types and one.key_type:
        attr.btf_fd, attr.btf_key_type_id, attr.btf_value_type_id = types, one.key_type, one.value_type
    fd = bpf(BPF_MAP_CREATE, attr)
    if fd < 0:
        raise _refused(f"map {one.name}: cannot be made", ctypes.get_errno())
    return fd


def _refused(what: str, number: int) -> LockdError:
    return refusal(f"{what}: {describe(number)}", number)


def _load_btf(btf: bytes) -> int:
    """The descriptor; 0 if there is none to be had. It only lets bpftool show what is in the maps."""
    content = ctypes.create_string_buffer(btf, len(btf))
    attr = BtfLoad(btf=ctypes.addressof(content), btf_size=len(btf))
    return max(bpf(BPF_BTF_LOAD, attr), 0) if btf else 0
