"""HotSpot, the Java virtual machine: its structures tell what the threads of a Java program wait for.

Every Java thread sleeps on a word of its own, whatever it waits for. The memory of the thread says what it
waits for: the monitor that it enters or waits on, or the object that it passed to LockSupport.park(), as all
classes of java.util.concurrent do. HotSpot describes its structures for debuggers (`gHotSpotVMStructs`), so
that lockd needs no tables by version. At each wait the BPF programs read the thread's memory in the same way
(lockd/bpf/daemon/hotspot.bpf.c). In place of the word's address they give the wait a number, which says what
the thread waits for.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lockd.names.objects.jit import class_name
from lockd.names.objects.object_file import ObjectFile
from lockd.names.protocol import HotSpotPlaces

LIBRARY = "libjvm.so"
"""The object file of HotSpot."""
STRUCTURES = "gHotSpotVMStructs"
"""The variable that points to the description of HotSpot's structures, an array of STRUCTURE."""
STRUCTURE = struct.Struct("<QQQi4xQQ")
"""One field: pointers to the names of its structure, itself and its type; whether it is static; its offset;
its address."""
MOST_STRUCTURES = 20_000
"""The most fields of the description that are read."""
FIELDS = {
    "CompressedOops::_base", "CompressedOops::_shift",
    "CompressedOops::_narrow_oop._base", "CompressedOops::_narrow_oop._shift",
    "CompressedKlassPointers::_base", "CompressedKlassPointers::_shift",
    "CompressedKlassPointers::_narrow_klass._base", "CompressedKlassPointers::_narrow_klass._shift",
    "JavaThread::_threadObj", "JavaThread::_vthread",
    "JavaThread::_current_pending_monitor", "JavaThread::_current_waiting_monitor",
    "oopDesc::_metadata._compressed_klass", "ObjectMonitor::_object",
    "Klass::_name", "Symbol::_length", "Symbol::_body",
}  # fmt: skip
"""The fields of the description that are kept. Each version of HotSpot has only some of them."""
MOST_TEXT = 64
"""The most bytes of a name in the description that are read."""
MOST_MODULES = 64
"""HotSpot is looked for among the first MOST_MODULES - 1 object files that have thread-local memory."""
MODULE = 16
"""Bytes of a module's entry in the dynamic thread vector of glibc; musl has another size. The second word of
the thread control block points to this vector."""
MOST_BLOCK = 4096
"""The most bytes of one object file's thread-local memory that are searched for a JavaThread pointer."""
MOST_CLASSES = 4096
"""The most classes of a process whose names are remembered."""
MOST_CLASS_NAME = 512
"""The most bytes of a class's name that are read."""
CLASS_BYTES = 200
"""Bytes of memory that a remembered class takes without its name, about."""
USER_END = 1 << 47

FLAG = 1 << 63
"""The bit that is set in the number of every wait of a Java thread, and in no address of user space."""
OBJECT, WORD, MONITOR = 0b10, 0b110, 0b111
"""The highest two or three bits of a wait's number, which say what the other bits are: a class, and perhaps
an object of it; the word that the thread sleeps on, if HotSpot's memory says no more; the address of an
ObjectMonitor."""
ADDRESS = (1 << 48) - 1
"""The bits of a wait's number that can contain an address."""
CLASS_AT, CLASS_BITS = 32, 28
"""The lowest bit, and the number of bits, of the class in the number of a wait."""
GENERATIONS = 4
"""How many different numbers HotSpotPlaces.generation can have."""

_CLASS = re.compile(rb"[\w$/\[;\-+.<>\x80-\xff]+")
_LOCKS = re.compile(r"java\.util\.concurrent\.locks\.(?!.*Condition|LockSupport)\S+")
_LASTING = re.compile(r"java\.util\.concurrent\.(?:locks\.|Semaphore\b)\S*")
_INNER = re.compile(r"\$(?:NonfairSync|FairSync|Sync)$")
"""The end of the name of a class that implements a lock. Users of the lock only know the class around it."""


@dataclass(frozen=True)
class JavaWait:
    """What a Java thread waits for. All attributes are empty if nothing is known.

    If the thread waits for a monitor whose class cannot be read, only `name` is empty.
    """

    name: str = ""
    """The class of the object that the thread waits for."""
    kind: str = ""
    """lock or cond."""
    family: str = ""
    is_many: bool = False
    """Whether each object of the class is a lock of its own. Then a wait's number needs the object, too."""


def is_word(number: int) -> bool:
    """Whether the number of a wait has no more than the address of the word that the thread sleeps on."""
    return number >> 61 == WORD


class _Unknown(Exception):
    """Memory or a symbol is not there, or is not the structure that it was taken for."""


class HotSpot:
    """HotSpot in one process."""

    def __init__(self, process: Path, library: ObjectFile, bias: int) -> None:
        """`process` is the directory in procfs and `library` is libjvm.so.

        `bias` plus an address in the library's file is the address in the memory of the process.
        """
        self._process, self.library, self.bias = process, library, bias
        self._fields: dict[str, tuple[str, int]] | None = None
        self._places: HotSpotPlaces | None = None
        self._class_base = 0
        self._classes: dict[int, str] = {}
        self.memory = 0
        """Bytes that this object takes, about."""

    def places(self, thread_pointer: int) -> HotSpotPlaces | None:
        """The places in the memory of Java threads that say what the threads wait for. Never raises.

        The places are found once, with the help of a Java thread that has this thread pointer. The result is
        None until then, and if HotSpot's structures are not as expected.
        """
        if self._places is None and thread_pointer:
            # HotSpotPlaces raises ValueError for a number that cannot be an offset.
            with contextlib.suppress(_Unknown, OSError, ValueError), self._memory() as memory:
                self._places = self._find(memory, thread_pointer)
        return self._places

    def wait(self, number: int, guess: str) -> JavaWait:
        """What a thread waits for, by its wait's number; `guess` is the kind that the BPF programs guessed.

        The result is JavaWait() if nothing is known. Never raises.
        """
        with contextlib.suppress(_Unknown, OSError), self._memory() as memory:
            if number >> 61 == MONITOR:
                name = ""
                with contextlib.suppress(_Unknown):  # the monitor may have been freed
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
            table = memory.word(self._symbol(STRUCTURES))  # raises _Unknown if `library` was closed
            self._fields = {}  # not tried again: what fails here always fails
            self._fields = _structures(memory, table)
        # ZGC has other bits in pointers to objects; compact object headers have the class elsewhere.
        if any(self._is_on(memory, flag) for flag in ("UseZGC", "UseCompactObjectHeaders")):
            raise _Unknown
        if not self._is_on(memory, "UseCompressedClassPointers"):  # full pointers exceed CLASS_BITS
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
        """`places`, completed with the thread-local variable in which a thread keeps its JavaThread pointer.

        It is found without a symbol: only a JavaThread has a Java object that points back to it.
        """
        segment = self.library.thread_local_block
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
        """The name of the class of the object whose ObjectMonitor is at the address `monitor`."""
        target = memory.word(memory.word(monitor + self._field("ObjectMonitor::_object", "")))
        places = self._places
        if not places:
            raise _Unknown
        klass = memory.half(target + places.klass) << places.klass_shift
        return self._class(memory, self._class_base + klass)

    def _class(self, memory: _Memory, klass: int) -> str:
        """The name of a class, with dots as in Java's source."""
        if klass not in self._classes:
            symbol = memory.word(klass + self._field("Klass::_name", "Symbol*"))
            length = memory.half(symbol + self._field("Symbol::_length", "u2")) & 0xFFFF
            name = memory.read(symbol + self._field("Symbol::_body", ""), min(length, MOST_CLASS_NAME))
            if not _CLASS.fullmatch(name):
                raise _Unknown
            if len(self._classes) >= MOST_CLASSES:
                self._classes.clear()
                self.memory = 0
            text = class_name(name.decode("utf-8", "backslashreplace")).replace("/", ".")
            self._classes[klass] = text
            self.memory += CLASS_BYTES + sys.getsizeof(text)
        return self._classes[klass]

    def _field(self, name: str, kind: str) -> int:
        """The offset of one of FIELDS, or the address of a static one.

        Raises _Unknown if there is no such field, or if its type is not `kind`. An empty `kind` accepts any
        type.
        """
        actual, place = (self._fields or {}).get(name, ("", -1))
        if place < 0 or (kind and actual != kind):
            raise _Unknown
        return place

    def _is_on(self, memory: _Memory, flag: str) -> bool:
        """Whether a flag of HotSpot is set. A flag that this version lacks is not."""
        address = self.library.variable_address(flag)
        return address is not None and memory.read(address + self.bias, 1) == b"\1"

    def _symbol(self, name: str) -> int:
        """The address of an exported symbol in the process."""
        address = self.library.variable_address(name)
        if address is None:
            raise _Unknown
        return address + self.bias

    @contextlib.contextmanager
    def _memory(self) -> Iterator[_Memory]:
        fd = os.open(self._process / "mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield _Memory(fd)
        finally:
            os.close(fd)


class _Memory:
    """The present memory of a process. All methods raise _Unknown if it cannot be read."""

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
        """The 32-bit number at an address."""
        return int.from_bytes(self.read(address, 4), "little")

    def text(self, address: int) -> str:
        """The text up to a NUL, at most MOST_TEXT bytes; empty for a null pointer."""
        if not address:
            return ""
        size = min(MOST_TEXT, 4096 - address % 4096)  # the next page may not be mapped
        data = self.read(address, size)
        if b"\0" not in data and size < MOST_TEXT:
            data += self.read(address + size, MOST_TEXT - size)
        return data.partition(b"\0")[0].decode("latin-1")


def _structures(memory: _Memory, table: int) -> dict[str, tuple[str, int]]:
    """By `Type::field`, the type and the offset (or static address) of each of FIELDS in HotSpot's table."""
    fields: dict[str, tuple[str, int]] = {}
    for entry in range(table, table + STRUCTURE.size * MOST_STRUCTURES, STRUCTURE.size):
        owner, name, kind, is_static, offset, address = STRUCTURE.unpack(memory.read(entry, STRUCTURE.size))
        if not owner:
            break
        field = f"{memory.text(owner)}::{memory.text(name)}"
        if field in FIELDS:
            fields[field] = memory.text(kind), address if is_static else offset
    return fields
