"""Locks in user space: the name and kind of each lock, and the site at which a thread waits for it.

A lock in static memory has the name of its variable; any other lock has the name of the site. The site, the
family and the kind are judged by the functions in the stack of a blocked thread (locking_code.py). In CPython
and in HotSpot the stack is not enough: the runtime's own memory says what a thread waits for
(cpython_waits.py and ../runtimes/hotspot.py).
"""

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
from lockd.names.locks.cpython_waits import (
    EVALUATES,
    RUNTIME,
    CPythonProcess,
    PythonWait,
    called_by_python,
    is_of_python,
    shortened,
    shown_stack,
    system_call,
)
from lockd.names.locks.locking_code import (
    COND,
    LOCK,
    Frame,
    family_of,
    is_end,
    is_of_c_library,
    is_parked_on,
    is_pool,
    judge,
    releasing_site,
)
from lockd.names.objects.address_space import REREAD_SECONDS, STALE_SECONDS, AddressSpace
from lockd.names.objects.demangle import MAX_NAME, Demangler
from lockd.names.objects.jit import JIT_OBJECT, JitNames
from lockd.names.objects.object_cache import ObjectCache
from lockd.names.objects.object_file import DEBUG_DIRECTORY, EM_AARCH64, ObjectFile, tail_callers
from lockd.names.protocol import ANON
from lockd.names.runtimes.hotspot import ADDRESS, FLAG, GENERATIONS, LIBRARY, HotSpot, JavaWait, is_word
from lockd.names.unwind.capture import Capture, read_capture
from lockd.names.unwind.unwinder import unwind, unwind_returns

SHOWN_FRAMES = 24
"""Functions of a stack that an answer has, at most."""
LOCK_SIZE = 64
"""Bytes. A variable up to this size is the lock itself; in a larger one the offset shows which lock it is."""
MAX_PROCESSES = 4096
"""The largest number of processes that are remembered."""
MAX_PROCESS_BYTES = 64 << 20
"""Bytes of memory that the remembered processes may take."""
GROWN_BYTES = 4 << 20
"""When _Process.memory has grown by more than these bytes, the memory of all processes is checked without
delay."""
WEIGHED_EVERY = 64
"""New processes between two checks of how much memory all remembered processes, maybe thousands, take."""
PI = "pi"
"""The kind of a lock with priority inheritance."""
GLIBC_COND = "glibc cond"
"""What Judgement.implementation is for condition variables of glibc."""
SHORTER_COND = "glibc cond since 2.41"
"""The implementation of condition variables from glibc 2.41 on, which removed 8 bytes before the words that
threads wait for."""
SINCE_2_41 = "sched_setattr"
"""A function that glibc has since 2.41."""
GIL = "gil"
"""The family of CPython's global interpreter lock."""
X86_REGISTERS = 17
"""Registers in a capture on x86-64."""
GO_SCHEDULER = "runtime.sched"
"""The variable of Go's runtime that has GO_WAITED."""
GO_WAITED = ("runtime", "runtime.schedt", "totalMutexWaitTime")
"""Compilation unit, struct and member: the nanoseconds that goroutines have waited for mutexes."""
GO_WAITS = "runtime.futex"
"""The beginning of the name of the function in which every thread of Go waits."""
JAVA_OBJECT = "[java]"
"""Stands for the object file in the name of a lock that is named after its Java class."""
RENAMED_SECONDS, MOST_RENAMED_SECONDS = 1.0, 60.0
"""The least and the most seconds between two times at which all locks of a JVM are named anew.

They are named anew when the perf map has changed. The time doubles with each change: a perf map that is read
while it is being written soon changes again.
"""
NAMELESS = Frame(JIT_OBJECT, "", JIT_OBJECT)
"""The frame of a function that was compiled while the program ran, and whose name is in no file."""
_JAVA_SITE = re.compile(
    r"(?!libj(?:vm|li)\.so\b|libc\b|\[jit\](?!:.*\.)"
    r"|\[jit\]:(?:java\.util\.concurrent\.locks|jdk\.internal|sun\.misc|java\.lang\.Object)\.)."
)
"""Labels of code that can be a site: not code of the JVM, its launcher or libc, nor code without a name, nor
the classes that all Java locks use."""


@dataclass(frozen=True)
class UserLock:
    """What is known of a lock for which a thread blocked. The attributes are those of LockAnswer."""

    lock: str
    kind: str
    site: str
    """Empty if it is unknown."""
    stack: tuple[str, ...]
    family: str
    is_provisional: bool = False
    """Whether another capture may tell more: the thread's stack is unknown, nothing had a name, Python frames
    were unreadable, or so was the memory of HotSpot."""
    is_reused: bool = False
    is_parked: bool = False
    is_many: bool = False
    hotspot: tuple[int, ...] = ()
    advice: str = ""
    cpython: tuple[int, ...] = ()


@dataclass(frozen=True)
class UserStack:
    """The functions of a thread's stack in user space, innermost first."""

    frames: list[tuple[int, Frame]]
    """The functions in C. Each comes with the address at which the thread goes on in it."""
    python: tuple[str, ...] = ()
    """Labels of the thread's Python functions, innermost first."""
    cpython: tuple[int, ...] = ()
    """The members of protocol.CPythonPlaces for a process with CPython; empty if they are unknown."""

    @property
    def functions(self) -> tuple[str, ...]:
        """Names as profiles show them. Python functions replace the C functions that evaluate them, and all C
        functions further out."""
        frames = [frame for _, frame in self.frames]
        shown = called_by_python(frames) if self.python else frames
        return (*(frame.name for frame in shown), *self.python)


@dataclass
class _Process:
    """What is remembered of a process."""

    directory: Path
    """Its directory in procfs."""
    space: AddressSpace
    jit: JitNames
    pythons: dict[int, CPythonProcess] = field(default_factory=dict)
    """The interpreter last seen, by the address of its `_PyRuntime`; empty until one is seen."""
    hotspot: HotSpot | None = None
    weighed: int = 0
    """The value of `memory` when growth was last a reason to make room."""
    generation: int = 0
    """How often all locks of a JVM were named anew."""
    _names_read: int = 0
    _rename_at: float = 0.0
    _rename_wait: float = RENAMED_SECONDS

    def note_names(self, now: float) -> None:
        """Begin a new generation if a perf map has come or changed, but not too often.

        With a new generation all locks are named anew. `now` is a time of time.monotonic(), in seconds.
        """
        if self.jit.reads != self._names_read and now >= self._rename_at:
            self._names_read, self._rename_at = self.jit.reads, now + self._rename_wait
            self._rename_wait = min(2 * self._rename_wait, MOST_RENAMED_SECONDS)
            self.generation += 1

    @property
    def memory(self) -> int:
        """Bytes that this object takes, about."""
        runtimes = sum(python.memory for python in self.pythons.values())
        runtimes += self.hotspot.memory if self.hotspot else 0
        return self.space.memory + self.jit.memory + runtimes


class UserNames:
    """Names the locks of processes, and the functions and variables in their memory.

    `procfs` is the root of a proc file system, `debug_files` the directory of debugging information that was
    stripped from programs. `parked` are shell patterns of further names of locks that idle threads park on,
    see locking_code.PARKED. The process that was used least recently is forgotten first.
    """

    def __init__(
        self,
        procfs: Path = Path("/proc"),
        debug_files: bytes = DEBUG_DIRECTORY,
        parked: Sequence[str] = (),
    ) -> None:
        self._procfs = procfs
        self._parked = parked
        self._objects = ObjectCache(debug_files)
        self._tail_callers: WeakKeyDictionary[ObjectFile, dict[int, tuple[str, ...]]] = WeakKeyDictionary()
        self._demangler = Demangler()
        self._processes: OrderedDict[int, _Process] = OrderedDict()
        self._until_weighed = 0

    def read_mappings(self, tgid: int) -> None:
        """Remember what a process has mapped, so that its locks can be named after it has ended."""
        self._read_process(tgid)

    def load_files(self, tgid: int) -> None:
        """Remember what a process has mapped, and read the object files that it runs."""
        self._read_process(tgid).space.load()

    def end_children(self) -> None:
        """End the child process that demangles names. The next name starts it again."""
        self._demangler.close()

    def keep(self, alive: set[int]) -> None:
        """Forget all processes but those in `alive`."""
        for tgid in self._processes.keys() - alive:
            del self._processes[tgid]
        self._objects.make_room()

    def stack(self, tgid: int, capture: Capture, most: int, codes: Sequence[int] = ()) -> UserStack:
        """The stack of a thread of a process, with `most` functions in C at most.

        `codes` are the addresses of the code objects of its Python functions, innermost first.
        """
        process = self._read_code(tgid, STALE_SECONDS)
        returns = unwind_returns(process.space, capture, most)
        places = [place for place, _ in returns]
        frames = self._frames(process, places)
        self._hotspot(process, places, frames)  # from the next stack on, _read_code() reads new perf maps
        stack = [(address, frame) for (_, address), frame in zip(returns, frames, strict=False)]
        if not any(frame.function.startswith(EVALUATES) for frame in frames):
            return UserStack(stack)
        python = self._interpreter(process, places)
        if not python:
            return UserStack(stack)
        python.find_places(capture.thread_pointer)
        functions = python.place(codes).functions if codes else ()
        return UserStack(stack, tuple(shortened(text, MAX_NAME) for text in functions), python.places)

    def variable(self, tgid: int, address: int) -> str:
        """The name of a variable: `object:symbol`, `object:symbol+0xoffset` or `object+0xoffset`.

        Empty if the address is in no object file, or in a variable that serves many locks.
        """
        return self._static(self._read_process(tgid).space, address, "")

    def go_waited_ns(self, tgid: int) -> int:
        """Nanoseconds that goroutines of a Go program have waited for mutexes, as Go's runtime counted them.

        -1 if the number cannot be read: before Go 1.20, or without symbols or debugging information.
        """
        space = self._read_process(tgid).space
        image = space.program_image()
        placed = space.file(image) if image else None
        scheduler = placed[0].variable_address(GO_SCHEDULER) if placed else None
        offset = placed[0].member_offset(*GO_WAITED) if placed and scheduler else None
        if not placed or not scheduler or offset is None:
            return -1
        data = space.read(scheduler + offset + placed[1], 8)
        return int.from_bytes(data, "little", signed=True) if len(data) == 8 else -1

    def name_lock(self, tgid: int, tid: int, address: int, guessed: str, capture: Capture | None) -> UserLock:
        """Name the lock at `address` for which a thread blocked; `guessed` is the kind by its futex call.

        For a thread of Java, `address` may be the number of the wait instead, see runtimes/hotspot.py.
        Without a capture, only locks in static memory and waits of Java have names.
        """
        process = self._read_code(tgid)
        places = unwind(process.space, capture) if capture else ()
        frames = self._frames(process, places)
        hotspot = self._hotspot(process, places, frames)
        # A new namer has yet to find the places, without which HotSpot.wait() knows no classes.
        layout = hotspot.places(capture.thread_pointer if capture else 0) if hotspot else None
        wait = hotspot.wait(address, guessed) if hotspot and address & FLAG else JavaWait()
        if wait.kind:
            lock = java_lock(wait, frames)
        else:
            is_number = bool(address & FLAG)
            word = address if not is_number else address & ADDRESS if is_word(address) else 0
            stack = list(zip(places, frames, strict=False))
            lock = self._lock(process, tid, word, guessed, capture, stack)
            if is_number and not word:  # the stack alone hardly tells what a thread of Java waits for
                lock = replace(lock, is_provisional=True)
        if lock.kind in (LOCK, PI) and is_parked_on(lock.lock, self._parked):
            lock = replace(lock, kind=COND, family="park")
        if not hotspot:
            is_go = any(frame.function.startswith(GO_WAITS) for frame in frames)
            return replace(lock, advice=GO) if is_go else lock
        process.note_names(time.monotonic())
        generation = process.generation % GENERATIONS
        return replace(
            lock,
            hotspot=astuple(replace(layout, generation=generation)) if layout else (),
            advice="" if layout and process.jit.has_names else JAVA if layout else JAVA_UNKNOWN,
        )

    def name_holder(
        self, tgid: int, capture: Capture, codes: Sequence[int] = ()
    ) -> tuple[str, tuple[str, ...]]:
        """The site and the stack of a thread that was captured while it released a lock.

        `codes` are the addresses of the code objects of its Python functions, innermost first. The site is
        empty if it is unknown. The stack has at most SHOWN_FRAMES functions, innermost first.
        """
        process = self._read_code(tgid)
        places = unwind(process.space, capture)
        frames = self._frames(process, places)
        site, labels = releasing_site(frames), [frame.label for frame in frames]
        if self._hotspot(process, places, frames) and not _JAVA_SITE.match(site):
            site = ""
        elif codes and is_of_python(frames):
            python = self._interpreter(process, places)
            place = python.place(codes) if python else None
            if place and place.site:
                site, labels = place.site, shown_stack(frames, place.functions)
        return site, tuple(labels[:SHOWN_FRAMES])

    def _lock(
        self,
        process: _Process,
        tid: int,
        address: int,
        guessed: str,
        capture: Capture | None,
        stack: list[tuple[int, Frame]],
    ) -> UserLock:
        """Name the lock for any wait but those of Java; `stack` has each frame with its address."""
        frames = [frame for _, frame in stack]
        judgement = judge(frames, _expected_value(capture))
        # Without debug symbols, a thread that is back from a condition variable and waits for its mutex looks
        # as if it still waited for the condition. Only the futex calls differ: `guessed` is never a lock for
        # the calls of glibc's condition variables.
        is_back = judgement.implementation == GLIBC_COND and guessed in (LOCK, PI)
        name = judgement.service
        if not name and not judgement.is_parked:
            implementation = "glibc mutex" if is_back else judgement.implementation
            if implementation == GLIBC_COND and _has_shorter_cond(process.space, stack):
                implementation = SHORTER_COND
            name = self._static(process.space, address, implementation)
            if not name and capture and capture.thread_pointer:
                name = self._thread_local(process.space, address, capture.thread_pointer)
        family, kind = judgement.family, judgement.kind
        symbol = name.partition(":")[2].partition("+")[0]
        if family == GIL or (kind in ("", COND) and symbol == RUNTIME):
            # The GIL consists of several locks, at places that differ by version.
            owner = judgement.object if family == GIL else name.partition(":")[0]
            family, kind, name = GIL, LOCK, f"{owner}:GIL"
        elif is_back and kind == COND:
            family, kind = "mutex", LOCK
        if guessed == PI and kind in ("", LOCK):
            kind = PI
        site, labels = judgement.site, [frame.label for frame in frames]
        python = self._python(process, tid, address, capture, stack)
        if python:
            site, labels = python.site or site, shown_stack(frames, python.functions)
            if family != GIL:
                family, kind = python.family, python.kind
        is_provisional = not frames or not (name or site) or (python is not None and not python.site)
        shown = tuple(labels[:SHOWN_FRAMES])
        is_reused = python is not None and family != GIL
        interpreter = next(iter(process.pythons.values()), None) if python else None
        return UserLock(
            name or site or ANON, kind or guessed, site, shown, family, is_provisional, is_reused,
            judgement.is_parked, cpython=interpreter.places if interpreter else (),
        )  # fmt: skip

    def name_lock_of_sleeper(
        self, tgid: int, tid: int, address: int, guessed: str, thread_pointer: int
    ) -> UserLock:  # fmt: skip
        """Name the lock at `address` by the stack of a thread that sleeps there, read from procfs.

        Too few registers are known to be sure of the stack. So the answer is provisional, unless it follows
        from the frames of a CPython interpreter.
        """
        capture = None
        if (call := system_call(self._procfs / str(tgid), tid)) and int(call[1], 16) == address:
            capture = read_capture(self._procfs, tgid, int(call[-2], 16), int(call[-1], 16), thread_pointer)
        lock = self.name_lock(tgid, tid, address, guessed, capture)
        return lock if lock.is_reused else replace(lock, is_provisional=True)

    def _hotspot(self, process: _Process, places: Sequence[int], frames: Sequence[Frame]) -> HotSpot | None:
        """The JVM of a process; None until a stack with one of its functions was seen."""
        for place, frame in zip(places, frames, strict=False):
            located = process.space.locate(place) if frame.object == LIBRARY else None
            if located:
                library, bias = located[0], place - located[1]
                if process.hotspot is None or process.hotspot.bias != bias:
                    # After an exec the numbers of the process's waits stand for other classes.
                    process.generation += process.hotspot is not None
                    process.hotspot = HotSpot(process.directory, library, bias)
                process.hotspot.library = library  # ObjectCache may have closed the former one
                break
        return process.hotspot

    def _python(
        self,
        process: _Process,
        tid: int,
        address: int,
        capture: Capture | None,
        frames: Sequence[tuple[int, Frame]],
    ) -> PythonWait | None:
        """What a thread waits for in Python; None if not the interpreter waits, or too little is known."""
        stack = [frame for _, frame in frames]
        if not capture or not capture.thread_pointer or not is_of_python(stack):
            return None
        interpreter = self._interpreter(process, [place for place, _ in frames])
        return interpreter.wait(tid, address, capture, stack) if interpreter else None

    @staticmethod
    def _interpreter(process: _Process, places: Sequence[int]) -> CPythonProcess | None:
        """The interpreter in whose code one of the places is; None if there is none."""
        for place in places:
            located = process.space.locate(place)
            runtime = located[0].variable_address(RUNTIME) if located else None
            if located and runtime is not None:
                runtime += place - located[1]
                if runtime not in process.pythons:
                    process.pythons = {runtime: CPythonProcess(process.directory, process.space, runtime)}
                return process.pythons[runtime]
        return None

    def _read_process(self, tgid: int, max_age: float = REREAD_SECONDS) -> _Process:
        """What is remembered of a process, with the mappings that it had `max_age` seconds ago or later.

        The name of a lock is kept, so it is found by mappings that are at most REREAD_SECONDS old. Sampled
        stacks are many, and one wrong stack hardly matters: for them mappings may be STALE_SECONDS old.
        """
        process = self._process(tgid)
        process.space.refresh(max_age)
        self._note_growth(process)
        return process

    def _read_code(self, tgid: int, max_age: float = REREAD_SECONDS) -> _Process:
        """What is remembered of a process, with the present names of JIT-compiled code if it has a JVM."""
        process = self._read_process(tgid, max_age)
        if process.hotspot:  # called often enough, as the JVM's own threads wait regularly
            process.jit.refresh(process.space.jit_dumps)
        return process

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

    def _note_growth(self, process: _Process) -> None:
        """Make room if what is remembered of a process, such as a perf map, has grown by GROWN_BYTES."""
        if process.memory > process.weighed + GROWN_BYTES:
            process.weighed, self._until_weighed = process.memory, 0
            self._make_room()

    def _make_room(self) -> None:
        """Forget the least recently used processes if there are too many, or if they take too much memory."""
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
        self._note_growth(process)
        return frames

    def _frame(self, process: _Process, address: int) -> Frame:
        """The function that contains `address`.

        Without a name, the label has the offset of the function's start if that is known, else of the
        address.
        """
        space = process.space
        mapping = space.mapping(address)
        image = space.image(address)
        if mapping is None or image is None:
            compiled = process.jit.function(address, space.jit_dumps) if mapping else None
            if compiled:
                name = self._demangler.name(compiled[1], may_be_clone=False)
                return Frame(JIT_OBJECT, name, f"{JIT_OBJECT}:{name}")
            return NAMELESS if mapping else Frame("", "", "?")
        placed = space.file(image)
        symbol = placed[0].function(address - placed[1]) if placed else None
        if placed and symbol:
            name = self._demangler.name(symbol.name, not placed[0].is_go(address - placed[1]))
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
        """Names for functions of the C library without a symbol, by the address at which each begins.

        The names are those of the locking functions that end with a jump to the nameless function, if all of
        them are of one family.
        """
        if file not in self._tail_callers:
            callers = tail_callers(file, lambda name: family_of(name) != "")
            self._tail_callers[file] = {
                start: names for start, names in callers.items() if len({*map(family_of, names)}) == 1
            }
        return self._tail_callers[file]

    def _static(self, space: AddressSpace, address: int, implementation: str) -> str:
        """The name of static memory, as variable() returns it; empty if `address` is in no object file.

        `implementation` is that of the Judgement. In some implementations a lock begins before `address`, the
        futex word; the name is that of its beginning.
        """
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
        """The name of a thread-local variable of the main program; empty if `address` is in none.

        The main program's thread-local block is at a fixed distance from the thread pointer.
        """
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
    """Name a lock of Java by the code that waits if a perf map names it, else by the class of the object.

    Code that was compiled after the perf map was written has no name. The site is unknown if it could be in
    such code.
    """
    judgement = judge(frames)
    kind, family, is_many = wait.kind, wait.family, wait.is_many
    if judgement.kind == LOCK and not wait.name.startswith("java."):  # the program's own class of locks
        kind, family, is_many = LOCK, judgement.family, True
    shown = tuple(frame.label for frame in frames[:SHOWN_FRAMES])
    site = judgement.site if _JAVA_SITE.match(judgement.site) else ""
    if any(frame == NAMELESS for frame in itertools.takewhile(lambda frame: frame.label != site, frames)):
        site = ""
    lock = site or f"{JAVA_OBJECT}:{wait.name or 'monitor'}"
    is_provisional = not frames or not (site or wait.name)
    return UserLock(lock, kind, site, shown, family, is_provisional, is_many=is_many)


def _expected_value(capture: Capture | None) -> int:
    """The value that a thread expects in the futex word, by the registers of its system call; 0 if unknown.

    It is the third argument of futex(2), on x86-64 in %rdx, which has the number 1 in DWARF. On arm64 it is
    unknown.
    """
    return capture.registers[1] & 0xFFFFFFFF if capture and len(capture.registers) == X86_REGISTERS else 0


def _has_shorter_cond(space: AddressSpace, stack: Sequence[tuple[int, Frame]]) -> bool:
    """Whether the condition variable in which a thread waits is one of glibc 2.41 or later.

    `stack` has each frame with its address. False may be wrong for a program into which glibc was linked
    statically, as such a program has only those functions of glibc that it uses.
    """
    place = next((place for place, frame in stack if "pthread_cond" in frame.function), 0)
    located = space.locate(place)
    return located is not None and located[0].variable_address(SINCE_2_41) is not None


def _base(address: int, implementation: str) -> int:
    """The address of a lock, given the address of the futex word that the C library passes to the kernel."""
    if implementation == "glibc rwlock":
        return address - (12 if address % 8 else 8)
    if implementation == GLIBC_COND:
        return (address & ~7) - 40
    if implementation == SHORTER_COND:
        return (address & ~7) - 32
    return address - 4 if implementation in ("glibc barrier", "musl mutex") else address
