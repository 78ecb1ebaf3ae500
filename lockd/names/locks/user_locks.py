"""User-space locks: what each is called, what kind it is, and where its threads wait for it."""

from __future__ import annotations

import itertools
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from weakref import WeakKeyDictionary

from lockd.advice import GO, JAVA, JAVA_UNKNOWN
from lockd.names.locks.locking import (
    COND,
    LOCK,
    Frame,
    family_of,
    is_end,
    is_of_c_library,
    is_pool,
    judge,
    parks,
)
from lockd.names.objects.address_space import STALE_SECONDS, AddressSpace
from lockd.names.objects.demangle import Demangler
from lockd.names.objects.jit import JIT_OBJECT as JIT
from lockd.names.objects.jit import JitNames
from lockd.names.objects.object_cache import MAX_BYTES, MAX_FILES, ObjectCache
from lockd.names.objects.object_file import DEBUG_DIRECTORY, EM_AARCH64, ObjectFile, tail_callers
from lockd.names.protocol import ANON
from lockd.names.runtimes.hotspot import ADDRESS, FLAG, GENERATIONS, LIBRARY, HotSpot, JavaWait, is_word
from lockd.names.runtimes.python_locks import (
    RUNTIME,
    PythonLock,
    PythonProcess,
    call_of,
    is_of_python,
    shown_stack,
)
from lockd.names.unwind.capture import Capture, read_capture
from lockd.names.unwind.unwinder import unwind, unwind_returns

SHOWN_FRAMES = 24
LOCK_SIZE = 64
"""A variable up to this size, in bytes, is the lock itself; in a larger one the offset tells which."""
MAX_PROCESSES = 4096
MAX_PROCESS_BYTES = 64 << 20
WEIGHED_EVERY = 64
"""New processes between two looks at how many bytes all of them take: there may be thousands."""
PI, GIL = "pi", "gil"
X86_REGISTERS = 17
"""So many are captured on x86-64."""
GO_SCHEDULER = "runtime.sched"
GO_WAITED = ("runtime", "runtime.schedt", "totalMutexWaitTime")
"""Compilation unit, struct and member, of that variable: nanoseconds."""
GO_WAITS = "runtime.futex"
"""The beginning of what every thread of Go waits in."""
JAVA_OBJECT = "[java]"
"""Instead of an object file's name, before the class of what threads of Java wait for."""
RENAMED_SECONDS, MOST_RENAMED_SECONDS = 1.0, 60.0
"""Between two times that all locks of a Java machine are named anew, as its perf map has changed: after each
twice as long, as one that is read while it is being written soon changes again."""
NAMELESS = Frame(JIT, "", JIT)
"""A function that was compiled as the program ran, and that no file names."""
_JAVA_SITE = re.compile(
    r"(?!libj(?:vm|li)\.so\b|libc\b|\[jit\](?!:.*\.)"
    r"|\[jit\]:(?:java\.util\.concurrent\.locks|jdk\.internal|sun\.misc|java\.lang\.Object)\.)."
)
"""Code that somebody may know, and not the machine, its launcher, or what all locks of Java are made of."""


@dataclass(frozen=True)
class UserLock:
    """`site` and `family` are empty if they are not known; `stack` is innermost first.

    `kind` is `lock`, `pi`, `cond` or `other`. `is_provisional`: another capture may tell more, as
    there was nothing that has a name, or the interpreter's frames could not be read. `is_reused`: its memory
    is soon that of another lock, as CPython makes one for each wait in a queue. The rest is as in LockAnswer.
    """

    lock: str
    kind: str
    site: str
    stack: tuple[str, ...]
    family: str
    is_provisional: bool = False
    is_reused: bool = False
    is_many: bool = False
    hotspot: tuple[int, ...] = ()
    advice: str = ""


@dataclass
class _Process:
    directory: Path
    space: AddressSpace
    jit: JitNames
    pythons: dict[int, PythonProcess] = field(default_factory=dict)
    hotspot: HotSpot | None = None
    generation: int = 0
    """How often all locks of a Java machine had to be named anew."""
    _names_read: int = 0
    _rename_at: float = 0.0
    _rename_wait: float = RENAMED_SECONDS

    def note_names(self, now: float) -> None:
        """Have all locks named anew if a perf map has come or changed, but not all the time."""
        if self.jit.reads != self._names_read and now >= self._rename_at:
            self._names_read, self._rename_at = self.jit.reads, now + self._rename_wait
            self._rename_wait = min(2 * self._rename_wait, MOST_RENAMED_SECONDS)
            self.generation += 1

    @property
    def memory(self) -> int:
        return self.space.memory + self.jit.memory + sum(p.memory for p in self.pythons.values())


class UserNames:
    """`procfs` is the root of a proc file system, `debug_files` the directory of what was stripped from
    programs. What was used least recently makes room.

    `parked` are patterns of the names of locks that threads park on, besides those that are known.
    """

    def __init__(
        self,
        procfs: Path = Path("/proc"),
        max_file_bytes: int = MAX_BYTES,
        max_files: int = MAX_FILES,
        debug_files: bytes = DEBUG_DIRECTORY,
        parked: Sequence[str] = (),
    ) -> None:
        self._procfs = procfs
        self._parked = parked
        self._objects = ObjectCache(max_file_bytes, max_files, debug_files)
        self._tail_callers: WeakKeyDictionary[ObjectFile, dict[int, tuple[str, ...]]] = WeakKeyDictionary()
        self._demangler = Demangler()
        self._processes: OrderedDict[int, _Process] = OrderedDict()
        self._until_weighed = 0

    def look(self, tgid: int) -> None:
        """Remember what a process has mapped, for when it is gone."""
        self._process(tgid).space.refresh(STALE_SECONDS)

    def load(self, tgid: int) -> None:
        """The same, and read the files that it runs."""
        self.look(tgid)
        self._process(tgid).space.load()

    def rest(self) -> None:
        """Nobody asks at the moment: end what was started to answer."""
        self._demangler.close()

    def keep(self, alive: set[int]) -> None:
        """Forget all other processes."""
        for tgid in self._processes.keys() - alive:
            del self._processes[tgid]
        self._objects.make_room()

    def stack(self, tgid: int, capture: Capture, most: int) -> list[tuple[int, Frame]]:
        """The functions of a process's stack, innermost first and `most` of them, with the address of each
        where it goes on."""
        process = self._process(tgid)
        process.space.refresh(STALE_SECONDS)
        places = unwind_returns(process.space, capture, most)
        frames = self._frames(process, [place for place, _ in places])
        return [(address, frame) for (_, address), frame in zip(places, frames, strict=False)]

    def variable(self, tgid: int, address: int) -> str:
        """`object:symbol` and what else _static() gives; empty if no object has the address."""
        process = self._process(tgid)
        process.space.refresh(STALE_SECONDS)
        return self._static(process.space, address, "")

    def go_waited_ns(self, tgid: int) -> int:
        """What a program in Go has counted itself that its goroutines waited for mutexes.

        -1 if that cannot be read: before Go 1.20, or if it has no symbols or no debugging information.
        """
        space = self._process(tgid).space
        space.refresh(STALE_SECONDS)
        image = space.program_image()
        placed = space.file(image) if image else None
        scheduler = placed[0].variable_address(GO_SCHEDULER) if placed else None
        offset = placed[0].member_offset(*GO_WAITED) if placed and scheduler else None
        if not placed or not scheduler or offset is None:
            return -1
        data = space.read(scheduler + offset + placed[1], 8)
        return int.from_bytes(data, "little", signed=True) if len(data) == 8 else -1

    def name(self, tgid: int, tid: int, address: int, guessed: str, capture: Capture | None) -> UserLock:
        """The lock at `address` on which a thread blocked; `guessed` is the kind by its futex call.

        Of a thread of Java `address` may be the number of its wait, see lockd/names/runtimes/hotspot.py.
        """
        process = self._process(tgid)
        process.space.refresh(STALE_SECONDS)
        if process.hotspot:  # whose threads that are not of Java wait most regularly
            process.jit.refresh(process.space.jit_dumps())
        places = unwind(process.space, capture) if capture else ()
        frames = self._frames(process, places)
        hotspot = self._hotspot(process, places, frames)
        wait = hotspot.wait(address, guessed) if hotspot and address & FLAG else JavaWait()
        if wait.kind:
            lock = java_lock(wait, frames)
        else:
            word = address if not address & FLAG else address & ADDRESS if is_word(address) else 0
            stack = list(zip(places, frames, strict=False))
            lock = self._lock(process, tid, word, guessed, capture, stack)
        if lock.kind in (LOCK, PI) and parks(lock.lock, self._parked):
            lock = replace(lock, kind=COND, family="park")
        if not hotspot:
            is_go = any(frame.function.startswith(GO_WAITS) for frame in frames)
            return replace(lock, advice=GO) if is_go else lock
        found = hotspot.places(capture.thread_pointer if capture else 0)
        process.note_names(time.monotonic())
        generation = process.generation % GENERATIONS
        return replace(
            lock,
            hotspot=astuple(replace(found, generation=generation)) if found else (),
            advice="" if found and process.jit.has_names else JAVA if found else JAVA_UNKNOWN,
        )

    def _lock(
        self,
        process: _Process,
        tid: int,
        address: int,
        guessed: str,
        capture: Capture | None,
        stack: list[tuple[int, Frame]],
    ) -> UserLock:
        """What name() says of all but waits of Java; `stack` has the address of each frame."""
        frames = [frame for _, frame in stack]
        judgement = judge(frames, _expected_value(capture))
        name = judgement.service
        if not name and not judgement.is_parked:
            name = self._static(process.space, address, judgement.implementation)
            if not name and capture and capture.thread_pointer:
                name = self._thread_local(process.space, address, capture.thread_pointer)
        family, kind = judgement.family, judgement.kind
        symbol = name.partition(":")[2].partition("+")[0]
        if family == GIL or (kind in ("", COND) and symbol == RUNTIME):
            # It is made of several locks, at places that differ by version.
            owner = judgement.object if family == GIL else name.partition(":")[0]
            family, kind, name = GIL, LOCK, f"{owner}:GIL"
        if guessed == PI and kind in ("", LOCK):
            kind = PI
        site, labels = judgement.site, [frame.label for frame in frames]
        python = self._python(process, tid, address, capture, stack)
        if python:
            site, labels = python.site or site, shown_stack(frames, python.functions)
            if family != GIL:
                family, kind = python.family, python.kind
        is_provisional = not (name or site) or (python is not None and not python.site)
        shown = tuple(labels[:SHOWN_FRAMES])
        is_reused = python is not None and family != GIL
        return UserLock(name or site or ANON, kind or guessed, site, shown, family, is_provisional, is_reused)

    def name_of_sleeper(
        self, tgid: int, tid: int, address: int, guessed: str, thread_pointer: int
    ) -> UserLock:  # fmt: skip
        """The same, by what a thread is in that has slept there for some time.

        Of its registers too much is missed for an answer that is certain, but for an interpreter's frames.
        """
        capture = None
        if (call := call_of(self._procfs / str(tgid), tid)) and int(call[1], 16) == address:
            capture = read_capture(self._procfs, tgid, int(call[-2], 16), int(call[-1], 16), thread_pointer)
        found = self.name(tgid, tid, address, guessed, capture)
        return found if found.is_reused else replace(found, is_provisional=True)

    def _hotspot(self, process: _Process, places: Sequence[int], frames: Sequence[Frame]) -> HotSpot | None:
        """The Java machine of a process, once a stack has been in it."""
        if process.hotspot is None:
            for place, frame in zip(places, frames, strict=False):
                located = process.space.locate(place) if frame.object == LIBRARY else None
                if located:
                    process.hotspot = HotSpot(process.directory, located[0], place - located[1])
                    break
        return process.hotspot

    def _python(
        self,
        process: _Process,
        tid: int,
        address: int,
        capture: Capture | None,
        frames: Sequence[tuple[int, Frame]],
    ) -> PythonLock | None:
        """What a thread waits for in Python; none if it is not the interpreter that waits."""
        stack = [frame for _, frame in frames]
        if not capture or not capture.thread_pointer or not is_of_python(stack):
            return None
        for place, _ in frames:
            located = process.space.locate(place)
            runtime = located[0].variable_address(RUNTIME) if located else None
            if located and runtime is not None:
                runtime += place - located[1]
                if runtime not in process.pythons:
                    process.pythons = {runtime: PythonProcess(process.directory, runtime)}
                return process.pythons[runtime].lock(tid, address, capture, stack)
        return None

    def _process(self, tgid: int) -> _Process:
        process = self._processes.get(tgid)
        if process is None:
            directory = self._procfs / str(tgid)
            process = self._processes[tgid] = _Process(
                directory, AddressSpace(directory, self._objects), JitNames(directory)
            )
            self._make_room()
        self._processes.move_to_end(tgid)
        return process

    def _make_room(self) -> None:
        """For a new process, the last one."""
        while len(self._processes) > MAX_PROCESSES:
            self._processes.popitem(last=False)
        self._until_weighed -= 1
        if self._until_weighed > 0:
            return
        self._until_weighed = WEIGHED_EVERY
        total = sum(process.memory for process in self._processes.values())
        while total > MAX_PROCESS_BYTES and len(self._processes) > 1:
            _, oldest = self._processes.popitem(last=False)
            total -= oldest.memory

    def _frames(self, process: _Process, places: Sequence[int]) -> list[Frame]:
        frames: list[Frame] = []
        for address in places:
            frames.append(self._frame(process, address))
            if is_end(frames[-1].function):
                break
        return frames

    def _frame(self, process: _Process, address: int) -> Frame:
        """`object:function`; without a name `object+0xoffset`, of the function's start if that is known."""
        space = process.space
        mapping = space.mapping(address)
        image = space.image(address)
        if mapping is None or image is None:
            compiled = process.jit.function(address, space.jit_dumps()) if mapping else None
            if compiled:
                name = self._demangler.name(compiled[1])
                return Frame(JIT, name, f"{JIT}:{name}")
            return NAMELESS if mapping else Frame("", "", "?")
        placed = space.file(image)
        symbol = placed[0].function(address - placed[1]) if placed else None
        if placed and symbol:
            name = self._demangler.name(symbol.name)
            begin = placed[1] + symbol.address
            return Frame(image.name, name, f"{image.name}:{name}", begin, address + 1 - begin)
        start = space.function_start(address)
        label = f"{image.name}+{(start if start >= 0 else address) - image.base:#x}"
        if placed and is_of_c_library(image.name):
            names = self._names_in_c_library(placed[0]).get(start - placed[1], ())
            if names:
                return Frame(image.name, names[0], label if len(names) > 1 else f"{image.name}:{names[0]}")
        return Frame(image.name, "", label)

    def _names_in_c_library(self, file: ObjectFile) -> dict[int, tuple[str, ...]]:
        """Of its functions that only it knows, the locking functions of the same family that they end."""
        if file not in self._tail_callers:
            callers = tail_callers(file, lambda name: family_of(name) != "")
            self._tail_callers[file] = {
                start: names for start, names in callers.items() if len({*map(family_of, names)}) == 1
            }
        return self._tail_callers[file]

    def _static(self, space: AddressSpace, address: int, implementation: str) -> str:
        """`object:symbol`, `object:symbol+0xoffset` or `object+0xoffset`; empty if it is in no object."""
        image = space.image(address) if space.mapping(address) else None
        if image is None:
            return ""
        placed = space.file(image)
        if placed:
            symbol = placed[0].variable(address - placed[1])
            if symbol:
                if is_pool(self._demangler.name(symbol.name)):
                    return ""
                offset = _base(address, implementation) - placed[1] - symbol.address
                return self._variable(image.name, symbol.name, symbol.size, offset)
        return f"{image.name}+{_base(address, implementation) - image.base:#x}"

    def _thread_local(self, space: AddressSpace, address: int, thread_pointer: int) -> str:
        """A variable of the main program, whose block is at a fixed distance from the thread pointer."""
        image = space.program_image()
        placed = space.file(image) if image else None
        block = placed[0].thread_local_block if placed else None
        if not image or not placed or not block:
            return ""
        align = max(block.align, 1)
        if placed[0].machine == EM_AARCH64:
            start = thread_pointer + -(-16 // align) * align
        else:
            beside = block.address % align
            start = thread_pointer - (-(-(block.memory_size + beside) // align) * align - beside)
        offset = address - start
        symbol = placed[0].thread_local(offset) if 0 <= offset < block.memory_size else None
        return self._variable(image.name, symbol.name, symbol.size, offset - symbol.address) if symbol else ""

    def _variable(self, object_name: str, symbol: str, size: int, offset: int) -> str:
        name = f"{object_name}:{self._demangler.name(symbol)}"
        return f"{name}+{offset:#x}" if size > LOCK_SIZE and offset > 0 else name


def java_lock(wait: JavaWait, frames: Sequence[Frame]) -> UserLock:
    """Named by the code that waits, if a perf map tells it; else by the class of what is waited for.

    Code that was compiled after the map was written has no name: the site may be there, so none is known.
    """
    judgement = judge(frames)
    kind, family, is_many = wait.kind, wait.family, wait.is_many
    if judgement.kind == LOCK and not wait.name.startswith("java."):  # a program's own sort of lock
        kind, family, is_many = LOCK, judgement.family, True
    shown = tuple(frame.label for frame in frames[:SHOWN_FRAMES])
    site = judgement.site if _JAVA_SITE.match(judgement.site) else ""
    if any(frame == NAMELESS for frame in itertools.takewhile(lambda frame: frame.label != site, frames)):
        site = ""
    lock = site or f"{JAVA_OBJECT}:{wait.name or 'monitor'}"
    is_provisional = not frames or not (site or wait.name)
    return UserLock(lock, kind, site, shown, family, is_provisional, is_many=is_many)


def _expected_value(capture: Capture | None) -> int:
    """What the thread expects in the futex word, by the registers of its system call; 0 if that is not known.

    The kernel's futex(2) takes it third; %rdx has the number 1 in DWARF.
    """
    return capture.registers[1] & 0xFFFFFFFF if capture and len(capture.registers) == X86_REGISTERS else 0


def _base(address: int, implementation: str) -> int:
    """Where the lock begins of which the C library gives the kernel the word at `address`."""
    if implementation == "glibc rwlock":
        return address - (12 if address % 8 else 8)
    if implementation == "glibc cond":
        return (address & ~7) - 40
    return address - 4 if implementation in ("glibc barrier", "musl mutex") else address
