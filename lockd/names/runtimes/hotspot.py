"""HotSpot, the Java machine, in one process: what its threads wait for, by the machine's own structures.

Every thread of Java sleeps on a word of its own, whatever it waits for. What that is, is in its memory: the
monitor that it enters or waits on, and the object that it gave to LockSupport.park(), as all that waits in
java.util.concurrent does. HotSpot describes its structures for debuggers (`gHotSpotVMStructs`), so that no
version is compared. The programs read the same at each wait (bpf/daemon/hotspot.bpf.c) and give the wait, in
place of the word's address, a number that says what it is for.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lockd.names.objects.jit import class_name
from lockd.names.objects.object_file import ObjectFile
from lockd.names.protocol import HotSpotPlaces

LIBRARY = "libjvm.so"
STRUCTURES = "gHotSpotVMStructs"
STRUCTURE = struct.Struct("<QQQi4xQQ")
"""Names of a type, of its field and of the field's type, whether it is static, its offset, its address."""
MOST_STRUCTURES = 20_000
MOST_TEXT = 64
MOST_MODULES = 64
"""Objects with thread-local memory that a process may have."""
MODULE = 16
"""Bytes of each in the vector that the second word of a thread points to, in glibc; musl has another."""
MOST_BLOCK = 4096
MOST_CLASSES = 4096
MOST_CLASS_NAME = 512
USER_END = 1 << 47

FLAG = 1 << 63
"""Is set in the number of a wait, and in no address of user space."""
OBJECT, WORD, MONITOR = 0b10, 0b110, 0b111
"""What it is a number of, in its highest two or three bits: a class, and perhaps an object of it; the word
that the thread sleeps on, as HotSpot says no more; an ObjectMonitor."""
ADDRESS = (1 << 48) - 1
CLASS_AT, CLASS_BITS = 32, 28
GENERATIONS = 4

_CLASS = re.compile(rb"[\w$/\[;\-+.<>\x80-\xff]+")
_LOCKS = re.compile(r"java\.util\.concurrent\.locks\.(?!.*Condition|LockSupport)\S+")
_LASTING = re.compile(r"java\.util\.concurrent\.(?:locks\.|Semaphore\b)\S*")
_INNER = re.compile(r"\$(?:NonfairSync|FairSync|Sync)$")
"""Classes of a lock that its users never see."""


@dataclass(frozen=True)
class JavaWait:
    """`name` is the class of the object that is waited for, `kind` lock or cond; all empty if not known."""

    name: str = ""
    kind: str = ""
    family: str = ""
    is_many: bool = False
    """Whether the number stands for a class whose objects are to be told apart: each is for many waits."""


def is_word(number: int) -> bool:
    """Whether it says no more of a wait than the address of the word that the thread sleeps on."""
    return number >> 61 == WORD


class _Unknown(Exception):
    """Something is not there, or is not what it was taken for."""


class HotSpot:
    """By the process's directory in procfs. `library` is libjvm.so, `bias` what is added to its addresses."""

    def __init__(self, process: Path, library: ObjectFile, bias: int) -> None:
        self._process, self._library, self._bias = process, library, bias
        self._fields: dict[str, tuple[str, int]] | None = None
        self._places: HotSpotPlaces | None = None
        self._class_base = 0
        self._classes: dict[int, str] = {}

    def places(self, thread_pointer: int) -> HotSpotPlaces | None:
        """None where this HotSpot is not as expected, or the thread not one of Java. Never raises."""
        if self._places is None and thread_pointer:
            # ValueError: an offset that is none.
            with contextlib.suppress(_Unknown, OSError, ValueError), self._memory() as memory:
                self._places = self._find(memory, thread_pointer)
        return self._places

    def wait(self, number: int, guess: str) -> JavaWait:
        """What a wait with this number is for. Never raises."""
        with contextlib.suppress(_Unknown, OSError), self._memory() as memory:
            if number >> 61 == MONITOR:
                name = ""
                with contextlib.suppress(_Unknown):  # the monitor may be gone
                    name = self._class_of_monitor(memory, number & ADDRESS)
                return JavaWait(name, guess, "monitor" if guess == "lock" else "cond")
            if number >> 62 == OBJECT:
                offset = (number >> CLASS_AT & (1 << CLASS_BITS) - 1) << 3
                name = self._class(memory, self._class_base + offset)
                family, kind = ("synchronizer", "lock") if _LOCKS.fullmatch(name) else ("park", "cond")
                return JavaWait(_INNER.sub("", name), kind, family, bool(_LASTING.match(name)))
        return JavaWait()

    def _find(self, memory: _Memory, thread_pointer: int) -> HotSpotPlaces:
        if self._fields is None:
            self._fields = {}  # if this fails, it would again
            self._fields = _structures(memory, memory.word(self._symbol(STRUCTURES)))
        # Pointers to objects would have other bits in them, and those to classes be elsewhere or too long.
        if any(self._is_on(memory, flag) for flag in ("UseZGC", "UseCompactObjectHeaders")):
            raise _Unknown
        if not self._is_on(memory, "UseCompressedClassPointers"):
            raise _Unknown
        has_older = "CompressedOops::_narrow_oop._base" in self._fields
        oops, classes = ("_narrow_oop.", "_narrow_klass.") if has_older else ("", "")
        is_virtual = "JavaThread::_vthread" in self._fields
        self._class_base = memory.word(self._field(f"CompressedKlassPointers::{classes}_base", "address"))
        places = HotSpotPlaces(
            oop_base=memory.word(self._field(f"CompressedOops::{oops}_base", "address")),
            module=0,
            current_thread=0,
            thread_object=self._field("JavaThread::_threadObj", "OopHandle"),
            current_object=self._field(
                f"JavaThread::{'_vthread' if is_virtual else '_threadObj'}", "OopHandle"
            ),
            pending_monitor=self._field("JavaThread::_current_pending_monitor", "ObjectMonitor*"),
            waiting_monitor=self._field("JavaThread::_current_waiting_monitor", "ObjectMonitor*"),
            eetop=memory.half(self._symbol("_ZN16java_lang_Thread13_eetop_offsetE")),
            blocker=memory.half(self._symbol("_ZN16java_lang_Thread20_park_blocker_offsetE")),
            klass=self._field("oopDesc::_metadata._compressed_klass", "narrowKlass"),
            oop_shift=memory.half(self._field(f"CompressedOops::{oops}_shift", "int")),
            klass_shift=memory.half(self._field(f"CompressedKlassPointers::{classes}_shift", "int")),
            is_wide=int(not self._is_on(memory, "UseCompressedOops")),
        )
        return self._with_thread(memory, places, thread_pointer)

    def _with_thread(self, memory: _Memory, places: HotSpotPlaces, thread_pointer: int) -> HotSpotPlaces:
        """With where a thread has its own JavaThread: a thread-local variable that no symbol need tell of, as
        only that has an object of Java that points back to it."""
        segment = self._library.thread_local_block
        size = min(segment.memory_size, MOST_BLOCK) if segment else 0
        vector = memory.word(thread_pointer + 8)
        for module in range(MODULE, MODULE * MOST_MODULES, MODULE):
            try:
                block = memory.words(memory.word(vector + module), size // 8)
            except _Unknown:
                continue
            for number, thread in enumerate(block):
                with contextlib.suppress(_Unknown):
                    java_thread = memory.word(memory.word(thread + places.thread_object))
                    if thread and memory.word(java_thread + places.eetop) == thread:
                        return replace(places, module=module, current_thread=8 * number)
        raise _Unknown

    def _class_of_monitor(self, memory: _Memory, monitor: int) -> str:
        held = memory.word(memory.word(monitor + self._field("ObjectMonitor::_object", "")))
        places = self._places
        if not places:
            raise _Unknown
        return self._class(
            memory, self._class_base + (memory.half(held + places.klass) << places.klass_shift)
        )

    def _class(self, memory: _Memory, klass: int) -> str:
        """With dots, as in Java."""
        if klass not in self._classes:
            symbol = memory.word(klass + self._field("Klass::_name", "Symbol*"))
            length = memory.half(symbol + self._field("Symbol::_length", "u2")) & 0xFFFF
            name = memory.read(symbol + self._field("Symbol::_body", ""), min(length, MOST_CLASS_NAME))
            if not _CLASS.fullmatch(name):
                raise _Unknown
            if len(self._classes) >= MOST_CLASSES:
                self._classes.clear()
            self._classes[klass] = class_name(name.decode("utf-8", "backslashreplace")).replace("/", ".")
        return self._classes[klass]

    def _field(self, name: str, kind: str) -> int:
        """Its offset, or its address if it is static; of no other type, if that is told."""
        told, place = (self._fields or {}).get(name, ("", -1))
        if place < 0 or (kind and told != kind):
            raise _Unknown
        return place

    def _is_on(self, memory: _Memory, flag: str) -> bool:
        """A flag of HotSpot's that it may not have."""
        at = self._library.variable_address(flag)
        return at is not None and memory.read(at + self._bias, 1) == b"\1"

    def _symbol(self, name: str) -> int:
        at = self._library.variable_address(name)
        if at is None:
            raise _Unknown
        return at + self._bias

    @contextlib.contextmanager
    def _memory(self) -> Iterator[_Memory]:
        fd = os.open(self._process / "mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield _Memory(fd)
        finally:
            os.close(fd)


class _Memory:
    """Of a process, as it is now. Raises _Unknown where there is none."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, address: int, size: int) -> bytes:
        if not 0 < address < USER_END:
            raise _Unknown
        try:
            data = os.pread(self._fd, size, address)
        except OSError:
            raise _Unknown from None
        if len(data) < size:
            raise _Unknown
        return data

    def words(self, address: int, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}Q", self.read(address, 8 * count))

    def word(self, address: int) -> int:
        return self.words(address, 1)[0]

    def half(self, address: int) -> int:
        return int.from_bytes(self.read(address, 4), "little")

    def text(self, address: int) -> str:
        """Up to MOST_TEXT bytes; empty for a null pointer."""
        if not address:
            return ""
        size = min(MOST_TEXT, 4096 - address % 4096)  # what is behind that page may not be there
        data = self.read(address, size)
        if b"\0" not in data and size < MOST_TEXT:
            data += self.read(address + size, MOST_TEXT - size)
        return data.partition(b"\0")[0].decode("latin-1")


def _structures(memory: _Memory, table: int) -> dict[str, tuple[str, int]]:
    """Type, and offset or address, of each field that HotSpot tells of."""
    fields: dict[str, tuple[str, int]] = {}
    for at in range(table, table + STRUCTURE.size * MOST_STRUCTURES, STRUCTURE.size):
        of, name, kind, is_static, offset, address = STRUCTURE.unpack(memory.read(at, STRUCTURE.size))
        if not of:
            break
        found = memory.text(kind), address if is_static else offset
        fields[f"{memory.text(of)}::{memory.text(name)}"] = found
    return fields
