"""BPF hash maps, read and drained into numpy arrays by libbpf's batch operations."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns import structs
from lockd.columns.index import mix
from lockd.errors import LockdError
from lockd.kernel.libbpf import libbpf
from lockd.kernel.manifest import MapInfo

BPF_NOEXIST = 1
BUSY = (errno.EBUSY, errno.EDEADLK, errno.ETIMEDOUT)
"""Errors of an operation that could not take the lock of a bucket. The kernel returns them since 5.12, and
since 6.15 also if the operation waited for the lock for a quarter of a second. The holder will release the
lock, so the operation is repeated."""


class HashMap:
    """A BPF hash map.

    `key` and `value` are the numpy dtypes of its keys and values, with the layout of the C structs. All
    methods raise LockdError if the kernel refuses an operation.
    """

    def __init__(self, fd: int, info: MapInfo) -> None:
        self.fd, self.name, self.entries = fd, info.name, info.entries
        self.key, self.value = structs.struct_dtype(info.key), structs.struct_dtype(info.value)
        self._key_bytes, self._value_bytes = self.key.itemsize, self.value.itemsize
        self._lib = libbpf()
        # These ctypes objects are made once: to make one takes 1 or 2 µs, and a whole tick takes some 100 µs.
        self._token, self._count = (ctypes.c_char * 16)(), ctypes.c_uint32()
        self._count_pointer = ctypes.byref(self._count)

    def read(self, buffers: Buffers) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the keys and the values of all entries.

        The arrays are views of `buffers`, valid until the buffers are used again.
        """
        keys, values = buffers.for_map(self)
        total = self._batch(self._lib.bpf_map_lookup_batch, keys.ctypes.data, values.ctypes.data, len(keys))
        return keys[:total], values[:total]

    def read_steady(self, buffers: Buffers) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Read the map twice; return copies of the keys and values of the entries that did not change."""
        keys, values = self.read(buffers)
        return self.only_steady(structs.copy(keys), structs.copy(values), buffers)

    def only_steady(
        self, keys: npt.NDArray[Any], values: npt.NDArray[Any], buffers: Buffers
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return those of the given entries, copies from an earlier read, that have not changed since then.

        Programs write an entry in several steps. An entry that is read between two steps could join the start
        of an old wait to the kind of a new one, and raise a false alert. An entry whose value is the same in
        both reads counts as complete.
        """
        if not len(keys):
            return keys, values
        keys_again, values_again = self.read(buffers)
        _, positions, positions_again = np.intersect1d(
            _as_numbers(keys), _as_numbers(keys_again), assume_unique=True, return_indices=True
        )
        is_same = structs.equal(structs.take(values, positions), structs.take(values_again, positions_again))
        steady = positions[is_same]
        return structs.take(keys, steady), structs.take(values, steady)

    def drain(self, buffers: Buffers) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Read all entries and delete them; return their keys and values as read() does.

        Only for a map to which no program writes any more.
        """
        keys, values = buffers.for_map(self)
        total = self.drain_into(keys.ctypes.data, values.ctypes.data, len(keys))
        return keys[:total], values[:total]

    def drain_into(self, keys_address: int, values_address: int, room: int) -> int:
        """Drain at most `room` entries into memory at two addresses; return the number of entries."""
        operation = self._lib.bpf_map_lookup_and_delete_batch
        return self._batch(operation, keys_address, values_address, room)

    def update(self, key: npt.NDArray[Any], value: npt.NDArray[Any]) -> None:
        """Write an entry, whether its key exists or not. Key and value are arrays of one element."""
        if code := self._try(self._lib.bpf_map_update_elem, key.ctypes.data, value.ctypes.data, 0):
            raise self._error("writing an entry", code)

    def insert(self, key: npt.NDArray[Any], value: npt.NDArray[Any]) -> bool:
        """Write an entry unless its key exists or the map is full. Return whether the entry was written."""
        code = self._try(self._lib.bpf_map_update_elem, key.ctypes.data, value.ctypes.data, BPF_NOEXIST)
        if code not in (0, errno.EEXIST, errno.E2BIG):
            raise self._error("writing an entry", code)
        return code == 0

    def lookup(self, key: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the value of an entry as an array of one element, all zeros if there is no such entry."""
        value = np.zeros(1, self.value)
        failed = self._lib.bpf_map_lookup_elem(self.fd, key.ctypes.data, value.ctypes.data)
        if failed and ctypes.get_errno() != errno.ENOENT:
            raise self._error("reading an entry", ctypes.get_errno())
        return value

    def delete(self, keys: npt.NDArray[Any]) -> None:
        """Delete the entries with these keys; keys without an entry are skipped."""
        address = keys.ctypes.data
        for key in range(address, address + len(keys) * self._key_bytes, self._key_bytes):
            if (code := self._try(self._lib.bpf_map_delete_elem, key)) not in (0, errno.ENOENT):
                raise self._error("deleting an entry", code)

    def _batch(self, operation: Any, keys_address: int, values_address: int, room: int) -> int:
        """Call a batch operation until the map ends or `room` entries are read; return how many were read."""
        total, token, count = 0, None, self._count
        while total < room:
            count.value = room - total
            keys, values = keys_address + total * self._key_bytes, values_address + total * self._value_bytes
            failed = operation(self.fd, token, self._token, keys, values, self._count_pointer, None)
            code = ctypes.get_errno() if failed else 0
            if code == errno.ENOSPC:
                break  # the map was full and changed during the read: the next bucket exceeds the room left
            # After ENOENT (the end of the map) or BUSY, too, the count is the number of entries read.
            if code not in (0, errno.ENOENT, *BUSY):
                raise self._error("reading a batch", code)
            total += count.value
            if code == errno.ENOENT:
                break
            token = self._token
        return total

    def _try(self, operation: Any, *arguments: Any) -> int:
        """Call an operation until it succeeds or fails with an error not in BUSY; return 0 or the errno."""
        while operation(self.fd, *arguments):
            if (code := ctypes.get_errno()) not in BUSY:
                return code
        return 0

    def _error(self, action: str, code: int) -> LockdError:
        return LockdError(f"map {self.name}: {action}: {os.strerror(code)}")


def _as_numbers(keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a number for each key: the key itself, or a hash of its members if it is a struct."""
    return mix(*(keys[name] for name in keys.dtype.names)) if keys.dtype.names else keys


class Buffers:
    """Memory that all maps are read into, one after another, as large as the largest map needs."""

    def __init__(self, maps: list[HashMap]) -> None:
        self._keys = np.empty(max(m.entries * m.key.itemsize for m in maps), np.uint8)
        self._values = np.empty(max(m.entries * m.value.itemsize for m in maps), np.uint8)

    def for_map(self, map_: HashMap) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the buffers as arrays of keys and values with room for every entry of `map_`."""
        keys = self._keys[: map_.entries * map_.key.itemsize].view(map_.key)
        values = self._values[: map_.entries * map_.value.itemsize].view(map_.value)
        return keys, values
