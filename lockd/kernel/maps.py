"""The one door to the kernel's maps: batch operations of libbpf into numpy arrays."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns import structs
from lockd.columns.index import mix
from lockd.errors import LockdError
from lockd.kernel.libbpf import last_error, libbpf
from lockd.kernel.manifest import MapInfo

MEMBARRIER_CALL = {"x86_64": 324, "aarch64": 283}[os.uname().machine]
MEMBARRIER_CMD_GLOBAL = 1
BPF_NOEXIST = 1
BUSY = (errno.EBUSY, errno.EDEADLK, errno.ETIMEDOUT)
"""Who holds the lock of a bucket does not let go of it (5.12; for a quarter of a second: 6.15). It will."""
LONGEST_WALK = 4
"""So many times as many steps as entries a map that changes may take to be read one by one."""
LONGEST_PROGRAM = 0.25
"""Seconds; a BPF program runs for some microseconds, with preemption disabled."""


class HashMap:
    """A hash map, read whole. `key` and `value` are numpy dtypes with the C structs' layout.

    `batch` says whether the kernel has batch operations (5.6).
    """

    def __init__(self, fd: int, info: MapInfo, batch: bool = True) -> None:
        self.fd, self.name, self.entries = fd, info.name, info.entries
        self.key, self.value = np.dtype(info.key), np.dtype(info.value)  # type: ignore[arg-type]
        self._key_bytes, self._value_bytes = self.key.itemsize, self.value.itemsize
        self._batch = batch
        self._lib = libbpf()
        # Made once: a tick is over in some hundred microseconds, and each of these takes one or two.
        self._token, self._count = (ctypes.c_char * 16)(), ctypes.c_uint32()
        self._count_at = ctypes.byref(self._count)

    def read(self, buffers: Buffers) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Keys and values of all entries; the arrays are `buffers` and hold until its next use."""
        keys, values = buffers.for_map(self)
        places = keys.ctypes.data, values.ctypes.data, len(keys)
        if self._batch:
            total = self._in_batches(self._lib.bpf_map_lookup_batch, *places)
        else:
            total = self._one_by_one(*places)
        return keys[:total], values[:total]

    def read_steady(self, buffers: Buffers) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Keys and values, as copies, of the entries that did not change between two reads.

        Programs write an entry in several steps. An entry that is read half-way could join the start of an
        old wait to the kind of a new one, and page somebody. What is the same in two reads was written before
        the first of them.
        """
        keys, values = (structs.copy(columns) for columns in self.read(buffers))
        keys_again, values_again = self.read(buffers)
        _, at, at_again = np.intersect1d(
            _as_numbers(keys), _as_numbers(keys_again), assume_unique=True, return_indices=True
        )
        same = structs.equal(structs.take(values, at), structs.take(values_again, at_again))
        return structs.take(keys, at[same]), structs.take(values, at[same])

    def drain(self, buffers: Buffers) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The same, and delete them. No program may be writing to the map any more."""
        keys, values = buffers.for_map(self)
        total = self.move(keys.ctypes.data, values.ctypes.data, len(keys))
        return keys[:total], values[:total]

    def put(self, key: npt.NDArray[Any], value: npt.NDArray[Any]) -> None:
        """Write an entry; each of the two is an array of one."""
        if code := self._try(self._lib.bpf_map_update_elem, key.ctypes.data, value.ctypes.data, 0):
            raise self._failed("writing an entry", code)

    def put_new(self, key: npt.NDArray[Any], value: npt.NDArray[Any]) -> bool:
        """The same if there is no entry yet, and there is room; whether that was so."""
        code = self._try(self._lib.bpf_map_update_elem, key.ctypes.data, value.ctypes.data, BPF_NOEXIST)
        if code not in (0, errno.EEXIST, errno.E2BIG):
            raise self._failed("writing an entry", code)
        return code == 0

    def get(self, key: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The value of an entry, an array of one as `key`; blank if there is none."""
        value = np.zeros(1, self.value)
        failed = self._lib.bpf_map_lookup_elem(self.fd, key.ctypes.data, value.ctypes.data)
        if failed and last_error() != errno.ENOENT:
            raise self._failed("reading an entry", last_error())
        return value

    def delete(self, keys: npt.NDArray[Any]) -> None:
        """Delete entries, one by one; those that are gone already are no error."""
        self._delete(keys.ctypes.data, len(keys))

    def move(self, keys_at: int, values_at: int, room: int) -> int:
        """Drain into memory at these addresses, which has room for so many entries; how many there were."""
        if self._batch:
            return self._in_batches(self._lib.bpf_map_lookup_and_delete_batch, keys_at, values_at, room)
        total = self._one_by_one(keys_at, values_at, room)
        self._delete(keys_at, total)
        return total

    def _in_batches(self, operation: Any, keys_at: int, values_at: int, room: int) -> int:
        total, since, count = 0, None, self._count
        while total < room:
            count.value = room - total
            keys, values = keys_at + total * self._key_bytes, values_at + total * self._value_bytes
            failed = operation(self.fd, since, self._token, keys, values, self._count_at, None)
            code = last_error() if failed else 0
            if code == errno.ENOSPC:
                break  # was full and changed while it was read: what comes next has no room here
            if code not in (0, errno.ENOENT, *BUSY):  # these say how far they came, as success does
                raise self._failed("reading a batch", code)
            total += count.value
            if code == errno.ENOENT:
                break
            since = self._token
        return total

    def _one_by_one(self, keys_at: int, values_at: int, room: int) -> int:
        total, seen = 0, set()
        key, previous = ctypes.create_string_buffer(self._key_bytes), None
        # After a key that a program has deleted meanwhile the kernel begins again with the first.
        for _ in range(LONGEST_WALK * room):
            if total == room:
                break
            if self._lib.bpf_map_get_next_key(self.fd, previous, key):
                if last_error() != errno.ENOENT:
                    raise self._failed("finding the next entry", last_error())
                break
            previous, name = key, key.raw
            if name not in seen:
                seen.add(name)
                if not self._lib.bpf_map_lookup_elem(self.fd, key, values_at + total * self._value_bytes):
                    ctypes.memmove(keys_at + total * self._key_bytes, name, len(name))
                    total += 1
        return total

    def _delete(self, keys_at: int, count: int) -> None:
        for at in range(keys_at, keys_at + count * self._key_bytes, self._key_bytes):
            if (code := self._try(self._lib.bpf_map_delete_elem, at)) not in (0, errno.ENOENT):
                raise self._failed("deleting an entry", code)

    def _try(self, operation: Any, *arguments: Any) -> int:
        """0, or the error's number."""
        while operation(self.fd, *arguments):
            if (code := last_error()) not in BUSY:
                return code
        return 0

    def _failed(self, what: str, code: int) -> LockdError:
        return LockdError(f"map {self.name}: {what}: {os.strerror(code)}")


def _as_numbers(keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Each key as one number: itself, or a hash of its members."""
    return mix(*(keys[name] for name in keys.dtype.names)) if keys.dtype.names else keys


class Buffers:
    """Memory that all maps are read into, one after another; made once, as large as any needs."""

    def __init__(self, maps: list[HashMap]) -> None:
        self._keys = np.empty(max(m.entries * m.key.itemsize for m in maps), np.uint8)
        self._values = np.empty(max(m.entries * m.value.itemsize for m in maps), np.uint8)

    def for_map(self, map_: HashMap) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        keys = self._keys[: map_.entries * map_.key.itemsize].view(map_.key)
        values = self._values[: map_.entries * map_.value.itemsize].view(map_.value)
        return keys, values


class Control:
    """What the programs are told: which map of every pair to write to, and how.

    `value` is the dtype of struct control.
    """

    def __init__(self, fd: int, value: npt.DTypeLike) -> None:
        self._fd = fd
        self._value = np.zeros(1, value)
        self._key = ctypes.c_uint32(0)
        self._entry = ctypes.byref(self._key), self._value.ctypes.data
        self._lib = libbpf()
        if self._lib.bpf_map_lookup_elem(fd, *self._entry):
            raise LockdError(f"map control: reading the window: {os.strerror(last_error())}")
        self.window = int(self._value["window"][0]) & 1
        """Which map of every pair is written to; 0 at first, else as the last sampler left it."""
        self.restraint = 0
        """How much to leave out (enum restraint), from the next window on."""

    def flip(self, is_timed: bool = False) -> None:
        """Let the programs write to the other maps, and take their run times if `is_timed`.

        Raises LockdError.
        """
        for name, told in (
            ("window", 1 - self.window),
            ("restraint", self.restraint),
            ("is_timed", is_timed),
        ):
            self._value[name] = told
        if self._lib.bpf_map_update_elem(self._fd, *self._entry, 0):
            raise LockdError(f"map control: flipping the window: {os.strerror(last_error())}")
        self.window = 1 - self.window


class PerCpuCounters:
    """A per-CPU array of u64 counters that only grow."""

    def __init__(self, fd: int, info: MapInfo) -> None:
        self._fd, self._name, self._entries = fd, info.name, info.entries
        cpus = np.dtype(info.value).itemsize // 8  # type: ignore[arg-type]
        self._values = np.zeros(cpus, np.uint64)
        self._lib = libbpf()

    def read(self) -> npt.NDArray[np.int64]:
        """Each counter, summed over the CPUs."""
        totals = np.zeros(self._entries, np.int64)
        for index in range(self._entries):
            key = ctypes.c_uint32(index)
            if self._lib.bpf_map_lookup_elem(self._fd, ctypes.byref(key), self._values.ctypes.data):
                raise LockdError(f"map {self._name}: reading: {os.strerror(last_error())}")
            totals[index] = int(self._values.sum())
        return totals


class GracePeriod:
    """Waits in a thread of its own until no program can still be using what it had before.

    A program may hold an entry of the map that was just flipped away. Programs run inside
    RCU read-side sections, and membarrier's global command waits for all of them, which the
    50 ms loop must not: it takes 5 to 20 ms, but a second on a host that forks a lot. As no
    program runs for more than microseconds, a quarter of a second is enough without it.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        offered = self._libc.syscall(MEMBARRIER_CALL, 0, 0, 0)
        self._begun = self._over = 0
        self._began_at = 0.0
        self._asked = threading.Event()
        if offered > 0 and offered & MEMBARRIER_CMD_GLOBAL:  # not with nohz_full CPUs
            threading.Thread(target=self._run, name="lockd-grace", daemon=True).start()

    def begin(self) -> None:
        self._begun += 1
        self._began_at = time.monotonic()
        self._asked.set()

    @property
    def over(self) -> bool:
        """Whether the period that was begun last is over; True if none was."""
        return self._over == self._begun or time.monotonic() - self._began_at >= LONGEST_PROGRAM

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            begun = self._begun
            self._libc.syscall(MEMBARRIER_CALL, MEMBARRIER_CMD_GLOBAL, 0, 0)
            self._over = begun
