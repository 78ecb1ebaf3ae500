"""Harnesses for memory that anybody may have written: of CPython, HotSpot and locks, and captured stacks."""

from __future__ import annotations

import functools
import os
import random
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from lockd.names.locks.cpython_waits import judge_python, label
from lockd.names.locks.locking_code import FAMILIES
from lockd.names.locks.owners import UserOwners
from lockd.names.objects.address_space import AddressSpace
from lockd.names.objects.elfutils import Segment
from lockd.names.objects.object_cache import ObjectCache
from lockd.names.protocol import CPythonPlaces, UserLockSeen, decode_answer, encode_answer
from lockd.names.runtimes.cpython import (
    _SLOTS,
    CLASSIC,
    COOKIE,
    MOST_FRAMES,
    OFFSETS_SIZE,
    Interpreter,
    Layout,
    candidates,
)
from lockd.names.runtimes.hotspot import ADDRESS, FLAG, STRUCTURE, STRUCTURES, HotSpot
from lockd.names.server import MESSAGE_BYTES, Names
from lockd.names.shares import Shares
from lockd.names.unwind.capture import Capture
from tests.fuzz.harness import NUMBERS, Harness, mutated

HEAD = struct.Struct("<QQ")
PART = struct.Struct("<QH")
THREAD_POINTER = 0x7F0000001000
MOST_READS = 20_000


def written(first: int, second: int, parts: dict[int, bytes]) -> bytes:
    """Return memory as an input: two numbers, then each part with its address and size."""
    return HEAD.pack(first, second) + b"".join(PART.pack(at, len(one)) + one for at, one in parts.items())


def parts_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = HEAD.size
    while at + PART.size < len(data):
        address, size = PART.unpack_from(data, at)
        at += PART.size
        yield address, data[at : at + size]
        at += size


def mutate_memory(data: bytes, chance: random.Random) -> bytes:
    """Change words of the memory, whose parts keep their addresses."""
    places = []
    at = HEAD.size
    for _, part in parts_of(data):
        at += PART.size
        places += range(at, at + len(part) - 7, 8)
        at += len(part)
    if not places or chance.random() < 0.2:
        return mutated(data, chance)
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.choice(places)
        other = chance.choice(places)
        number = chance.choice((*NUMBERS, chance.getrandbits(47)))
        match chance.randrange(4):
            case 0:
                changed[at : at + 8] = changed[other : other + 8]
            case 1:
                changed[at : at + 8] = (number & 2**64 - 1).to_bytes(8, "little")
            case 2:
                changed[at + chance.randrange(8)] = chance.randrange(256)
            case 3:
                word = int.from_bytes(changed[at : at + 8], "little") + chance.choice((-8, -1, 1, 8, 64))
                changed[at : at + 8] = (word & 2**64 - 1).to_bytes(8, "little")
    return bytes(changed)


class Memory:
    """The memory that the parts of an input describe. It counts the reads."""

    def __init__(self, data: bytes) -> None:
        self._parts = list(parts_of(data))
        self.reads = 0

    def read(self, address: int, size: int) -> bytes:
        self.reads += 1
        return next(
            (part[address - at :][:size] for at, part in self._parts if at <= address < at + len(part)), b""
        )


def cpython(data: bytes) -> None:
    """Any memory gives some frames with names that can be shown, or none, after a bounded number of reads."""
    if len(data) < HEAD.size:
        return
    runtime, thread_pointer = HEAD.unpack_from(data)
    memory = Memory(data)
    interpreter = Interpreter(runtime)
    for _ in range(2):  # in the second round, the interpreter knows some of the memory
        frames = interpreter.frames(memory, thread_pointer)
        assert len(frames) <= MOST_FRAMES
        judge_python(frames)
        assert all(label(frame).isprintable() for frame in frames)
        interpreter.innermost(memory, thread_pointer)
        for address, _ in parts_of(data):
            interpreter.type_of(memory, address)
        if places := interpreter.places(memory, thread_pointer):
            CPythonPlaces(*places)
        judge_python(interpreter.functions(memory, [address for address, _ in parts_of(data)][:MOST_FRAMES]))
    assert memory.reads < MOST_READS and interpreter.memory < 1 << 24


def _python_memory(layout: Layout, head: bytes) -> bytes:
    """Return the memory of an interpreter of this layout, with one thread in two functions."""
    parts = {0x10000: bytearray(head)}

    def put(structure: int, offset: int, word: int) -> None:
        part = parts.setdefault(structure, bytearray())
        part += bytes(max(offset + 8 - len(part), 0))
        struct.pack_into("<Q", part, offset, word)

    runtime, interpreter, thread, cframe, code_type, text_type = (0x10000 * at for at in range(1, 7))
    frames, codes, texts = (
        (0x100000, 0x110000),
        (0x120000, 0x130000),
        (0x140000, 0x150000, 0x160000, 0x170000),
    )
    put(runtime, layout.interpreters, interpreter)
    put(interpreter, layout.interpreter_next, 0)
    put(interpreter, layout.interpreter_threads, thread)
    put(thread, layout.thread_previous, 0)
    put(thread, layout.thread_next, 0)
    put(thread, layout.thread_interpreter, interpreter)
    put(thread, layout.thread_id, THREAD_POINTER)
    put(thread, layout.thread_frame, frames[0] if layout.cframe_frame < 0 else cframe)
    put(cframe, max(layout.cframe_frame, 0), frames[0])
    for type_, name in ((code_type, b"code"), (text_type, b"str")):
        put(type_, layout.type_name, type_ + 0x8000)
        parts[type_ + 0x8000] = bytearray(name + bytes(60))
    for number, (frame, code) in enumerate(zip(frames, codes, strict=True)):
        put(frame, layout.frame_previous, (*frames, 0)[number + 1])
        put(frame, layout.frame_code, code)
        for offset, word in ((layout.frame_instruction, code + 200), (layout.frame_owner & -8, 0)):
            if offset >= 0:
                put(frame, offset, word)
        put(code, layout.object_type, code_type)
        put(code, layout.code_file, texts[2 * number])
        put(code, layout.code_name, texts[2 * number + 1])
    names = "/usr/lib/python3/threading.py", "Condition.wait", "/srv/dépôt.py", "put"
    for address, text in zip(texts, names, strict=True):
        put(address, 192, 0)
        put(address, layout.object_type, text_type)
        put(address, layout.text_length, len(text))
        is_ascii = text.isascii()
        struct.pack_into(
            "<I", parts[address], layout.text_state, (1 | 8 | 16 * is_ascii) << layout.state_kind
        )
        start = layout.text_ascii if is_ascii else layout.text_other
        parts[address][start : start + len(text)] = text.encode("latin-1")
    return written(runtime, THREAD_POINTER, {at: bytes(part) for at, part in parts.items()})


def pythons() -> list[bytes]:
    """Return the memory of interpreters of every known version, and of the interpreter that runs this."""
    older = [_python_memory(layout, bytes(64)) for layout in CLASSIC]
    return [*older, *pythons_with_tables({}), *_this_python()]


def pythons_with_tables(others: Mapping[int, int]) -> list[bytes]:
    """Return the memory of interpreters of the versions that have a table of offsets. `others` are offsets to
    put into some of its last places.
    """
    found = []
    for (major, minor), slots in _SLOTS.items():
        words = [0] * (OFFSETS_SIZE // 8)
        words[1] = major << 24 | minor << 16
        for number, slot in enumerate(slots):
            words[slot] = 8 * number
        words[slots[0]] = OFFSETS_SIZE
        for at, value in ({-5: 8, -4: 24, -3: 16, -2: 32, -1: 40}).items():  # offsets of objects and of texts
            words[slots[at]] = value
        (layout,) = candidates(_head(words))
        for at, value in others.items():
            words[slots[at]] = value
        found.append(_python_memory(layout, _head(words)))
    return found


def _head(words: Sequence[int]) -> bytes:
    return COOKIE + struct.pack(f"<{len(words) - 1}Q", *words[1:])


class _Recorded:
    """The memory of this process. It notes what is read."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}

    def read(self, address: int, size: int) -> bytes:
        with open("/proc/self/mem", "rb", buffering=0) as file:
            try:
                found = os.pread(file.fileno(), size, address)
            except (OSError, OverflowError):
                return b""
        if len(found) > len(self.parts.get(address, b"")):
            self.parts[address] = found
        return found


def _this_python() -> list[bytes]:
    space = AddressSpace(Path("/proc/self"), ObjectCache())
    space.refresh()
    image = space.program_image()
    placed = space.file(image) if image else None
    runtime = placed[0].variable_address("_PyRuntime") if placed else None
    if not placed or runtime is None:
        return []
    recorded, end = _Recorded(), threading.Event()
    sleeper = threading.Thread(target=end.wait)
    sleeper.start()
    try:
        assert sleeper.ident
        Interpreter(runtime + placed[1]).frames(recorded, sleeper.ident)
    finally:
        end.set()
        sleeper.join()
    return [written(runtime + placed[1], sleeper.ident, recorded.parts)]


@functools.cache
def made_up_process() -> Path:
    """Return the directory of a process 7 in a small procfs, with a file for its memory."""
    directory = Path(tempfile.mkdtemp(prefix="lockd-fuzz-")) / "7"
    (directory / "task/7").mkdir(parents=True)
    (directory / "status").write_text("Name:\tx\nUid:\t0\t0\t0\t0\nNSpid:\t7\n")
    (directory / "task/7/status").write_text("NSpid:\t7\n")
    # `mem` is a file in memory: the addresses are so far apart that no other file may be large enough.
    (directory / "mem").symlink_to(f"/proc/{os.getpid()}/fd/{os.memfd_create('fuzz-process')}")
    return directory


def _fill(data: bytes) -> None:
    """Write the memory of the made-up process. Up to its last part, bytes that are in no part are zero."""
    with open(made_up_process() / "mem", "wb", buffering=0) as file:
        for address, part in parts_of(data):
            if address + len(part) < 1 << 47:
                os.pwrite(file.fileno(), part, address)


BIAS = 0x700000000000
FLAGS = ("UseZGC", "UseCompactObjectHeaders", "UseCompressedClassPointers", "UseCompressedOops")
OFFSETS = ("_ZN16java_lang_Thread13_eetop_offsetE", "_ZN16java_lang_Thread20_park_blocker_offsetE")
EXPORTED = {name: 0x100 + 8 * at for at, name in enumerate((STRUCTURES, *FLAGS, *OFFSETS))}
FIELDS = (
    ("CompressedOops", "_base", "address", 0x500), ("CompressedOops", "_shift", "int", 0x508),
    ("CompressedKlassPointers", "_base", "address", 0x510), ("CompressedKlassPointers", "_shift", "int",
    0x518),
    ("JavaThread", "_threadObj", "OopHandle", -16), ("JavaThread", "_vthread", "OopHandle", -24),
    ("JavaThread", "_current_pending_monitor", "ObjectMonitor*", -32),
    ("JavaThread", "_current_waiting_monitor", "ObjectMonitor*", -40),
    ("oopDesc", "_metadata._compressed_klass", "narrowKlass", -8), ("ObjectMonitor", "_object",
    "WeakHandle", -8),
    ("Klass", "_name", "Symbol*", -8), ("Symbol", "_length", "u2", -4), ("Symbol", "_body", "u1", -8),
)  # fmt: skip
"""For each field: its structure, its name, its type, and its place. A positive place is the address, counted
from the address of the library; a negative one is the offset in the structure, negated.
"""


class _Library:
    """The parts of libjvm.so that its reader needs."""

    thread_local_block = Segment(7, 4, 0, 0, 64, 64, 8)

    def variable_address(self, name: str) -> int | None:
        return EXPORTED.get(name)


def machine_of(data: bytes) -> HotSpot:
    """Return a reader of the Java machine whose memory the input describes."""
    _fill(data)
    library: Any = _Library()
    return HotSpot(made_up_process(), library, BIAS)


def hotspot(data: bytes) -> None:
    """Any memory of a Java machine gives possible places and waits, or none."""
    if len(data) < HEAD.size:
        return
    thread_pointer, number = HEAD.unpack_from(data)
    machine = machine_of(data)
    for _ in range(2):
        places = machine.places(thread_pointer)
        assert places is None or all(type(one) is int and 0 <= one < 2**63 for one in astuple(places))
        for wait in (number, FLAG | number, 0b111 << 61 | number & ADDRESS):
            found = machine.wait(wait, "lock")
            assert found.kind in ("", "lock", "cond", "pi", "other") and len(found.name) <= 4 * 512


def java_machines() -> list[bytes]:
    table, texts, thread, vector, block = (
        BIAS + 0x1000,
        BIAS + 0x3000,
        0x7F0000010000,
        0x7F0000020000,
        0x7F0000030000,
    )
    parts = {BIAS + 0x100: bytearray(0x40), BIAS + 0x500: bytearray(0x20)}
    struct.pack_into("<Q", parts[BIAS + 0x100], 0, table)
    for name, value in ((FLAGS[2], 1), (FLAGS[3], 1), (OFFSETS[0], 0x20), (OFFSETS[1], 0x28)):
        struct.pack_into("<I", parts[BIAS + 0x100], EXPORTED[name] - 0x100, value)
    struct.pack_into("<Q", parts[BIAS + 0x500], 0x10, 0x7F0000040000)
    said, structures = bytearray(), bytearray()
    for of, name, kind, place in FIELDS:
        where = []
        for text in (of, name, kind):
            where.append(texts + len(said))
            said += text.encode() + b"\0"
        structures += STRUCTURE.pack(*where, place >= 0, max(-place, 0), BIAS + place if place >= 0 else 0)
    structures += bytes(STRUCTURE.size)
    java_thread = 0x7F0000050000
    return [
        written(THREAD_POINTER, FLAG | 1 << 32, {
            **{at: bytes(part) for at, part in parts.items()},
            table: bytes(structures), texts: bytes(said),
            THREAD_POINTER: struct.pack("<2Q", 0, vector), vector: struct.pack("<4Q", 0, 0, block, 0),
            block: struct.pack("<8Q", 0, thread, *[0] * 6),
            thread: struct.pack("<8Q", 0, 0, thread + 0x100, thread + 0x100, 0, 0, 0, 0),
            thread + 0x100: struct.pack("<Q", java_thread),
            java_thread: struct.pack("<8Q", 0, 1, 0, 0, thread, 0, 0, 0),
            0x7F0000040008: struct.pack("<2Q", 0x7F0000060000, 0x7F0000060000),
            0x7F0000060004: struct.pack("<I", 12) + b"com/Shop$Sku",
        })
    ]  # fmt: skip


def owners(data: bytes) -> None:
    """Any memory of a lock gives a thread that exists as the owner, or none."""
    if len(data) < HEAD.size:
        return
    address, which = HEAD.unpack_from(data)
    _fill(data)
    family = (*sorted(FAMILIES), "")[which % (len(FAMILIES) + 1)]
    kind = ("lock", "pi", "cond", "other")[which >> 8 & 3]
    assert UserOwners(made_up_process().parent).owner(7, address, kind, family) in (0, 7)


def locks() -> list[bytes]:
    mutex = struct.pack("=iIiIi", 2, 0, 7, 1, 0)
    families = sorted(FAMILIES)
    return [
        written(0x5000, families.index("mutex"), {0x5000: mutex + bytes(20)}),
        written(0x5008, families.index("rwlock"), {0x5000: struct.pack("=I12xqii", 3, 0, 7, 0) + bytes(24)}),
        written(0x5000, 1 << 8, {0x5000: struct.pack("=I", 0x80000007) + bytes(36)}),
        written(0x5000, families.index("join"), {0x5000: struct.pack("=I", 7) + bytes(36)}),
    ]


WORD_OF_IMAGE, WORD_OF_STACK = 0xA0, 0xC0
"""The lowest value of the highest byte of a word that stands for a place in one of the objects, and its value
for a place on the stack. Their addresses are different in each process."""
STACK = 0x7FFF00000000


@functools.cache
def _this_process() -> tuple[Names, list[int]]:
    """Return a Names, and the addresses at which the objects that this process runs begin."""
    space = AddressSpace(Path("/proc/self"), ObjectCache())
    space.refresh()
    names = Names(Path("/proc"), Shares(Path("/proc"), 1e9))
    return names, [image.base for image in space._maps.images_with_code()][: WORD_OF_STACK - WORD_OF_IMAGE]


def _placed(word: int, bases: list[int]) -> int:
    high = word >> 56
    if WORD_OF_IMAGE <= high < WORD_OF_IMAGE + len(bases):
        return bases[high - WORD_OF_IMAGE] + (word & 0xFFFFFFFF)
    return STACK + (word & 0xFFF) if high == WORD_OF_STACK else word


def stacks(data: bytes) -> None:
    """Any registers and stack, of a process with real objects, give an answer that can be sent."""
    names, bases = _this_process()
    words = [_placed(word, bases) for (word,) in struct.iter_unpack("<Q", data[: len(data) // 8 * 8])]
    registers, stack = [*words[:17], *[0] * (17 - len(words))], words[17:]
    registers[7] = STACK
    capture = Capture(
        tuple(registers), struct.pack(f"<{len(stack)}Q", *stack), tuple(stack[:4]), registers[0]
    )
    question = UserLockSeen(1, os.getpid(), os.getpid(), registers[5], "lock", capture)
    answer = names.answer(question)
    assert answer
    message = encode_answer(answer)
    assert len(message) <= MESSAGE_BYTES and decode_answer(message) == answer


def captured_stacks() -> list[bytes]:
    """Return stacks with addresses behind calls in the code of this process, as on real stacks."""
    _, bases = _this_process()
    chance = random.Random(1)
    space = AddressSpace(Path("/proc/self"), ObjectCache())
    space.refresh()
    found = []
    for _ in range(8):
        words = []
        while len(words) < 100:
            number = chance.randrange(len(bases))
            start = chance.randrange(1 << 20)
            at = space.code(bases[number] + start, 512).find(b"\xe8")
            if at >= 0 and space.is_executable(bases[number] + start):
                words.append((WORD_OF_IMAGE + number) << 56 | start + at + 5)
            else:
                words.append(chance.choice((0, WORD_OF_STACK << 56 | chance.randrange(0, 4096, 8))))
        found.append(struct.pack(f"<{len(words)}Q", *words))
    return found


HARNESSES = (
    Harness("cpython", cpython, pythons, mutate_memory, longest=1 << 14),
    Harness("hotspot", hotspot, java_machines, mutate_memory, seconds=3.0),
    Harness("owners", owners, locks, mutate_memory, longest=256),
    Harness("stacks", stacks, captured_stacks, mutated, seconds=5.0),
)
