"""Sampled waits off the CPU: read from the kernel's ring, and joined with the functions of their stacks.

The programs capture some threads as they leave their CPUs, and complete some of these samples at the
wake-up, with the stacks of the waker (lockd/bpf/daemon/wait_samples.bpf.c). Most threads wait in code in
which a thread was captured before. Such a capture is recognised here, so that the namer is asked only about
stacks that are new.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lockd.columns.structs import struct_dtype
from lockd.kernel.counters import PerCpuCounters
from lockd.kernel.manifest import Layout
from lockd.kernel.pairs import Control, Entries
from lockd.kernel.rings import Ring, RingReader
from lockd.names.client import Resolver
from lockd.names.labels.processes import Name
from lockd.names.labels.reasons import Reasons
from lockd.names.protocol import StackAnswer, ThreadCaptured
from lockd.names.unwind.capture import Capture, decode_captures
from lockd.process.clock import NS
from lockd.sample.aggregates.offcpu import INTERRUPT
from lockd.sample.aggregates.wait_stacks import CallStack, WaitSample
from lockd.sample.locks.releases import (
    ANSWER_SECONDS,
    MOST_WEIGHT_NS,
    WAIT_UNIT_NS,
    SampleCounts,
    SamplePace,
)
from lockd.sample.locks.runtimes import RuntimePlaces

UNKNOWN_STACK = ("[unknown]",)
"""The functions of a user stack that the namer could not read, for instance because the process had ended."""
REMEMBERED_SECONDS = 600.0
"""Seconds after which a stack is named anew: a JIT compiler may have put other code there, and modules of the
kernel may have come and gone. No namer is started for this: until one runs, the stack keeps its functions. It
is forgotten if it is not seen for as many seconds more."""
AGAIN_SECONDS = 60.0
"""Seconds from one question for the new functions of a stack to the next, if the first had no answer."""
MOST_REMEMBERED = 20_000
"""Most stacks that are remembered, of user space and of the kernel each."""
FEW_NEW = 5
"""Most new stacks within a minute that neither start a namer nor keep one running. On a quiet host most new
stacks are of commands that run for a moment, and are never seen again."""
MOST_OF_PLACE = 64
"""Most stacks that are remembered for one process, program counter and list of Python functions. A capture is
compared with them one by one."""
MOST_BEGUN = 20_000
"""Most captured threads that are remembered until their waits end. If there are more, the oldest are dropped,
and the samples of their waits are refused."""
MOST_WAITING = 1024
"""Most samples that are kept until the functions of their stacks are known. More are refused."""
THREADS_AT_FIRST = 1000
"""The number of threads that are assumed to wait all the time, for the pace of the first samples."""
LONGEST_UNCOUNTED = 15.0
"""Seconds without a counted wait after which a host counts as one without waits. The waits of a quiet host
are counted ten seconds late (LONGEST_UNFOLDED in lockd/sample/sampler.py)."""
BUSY_WAITS, QUIET_PART = 600, 10
"""The waits in a second with which as many threads are to be captured as configured. With fewer waits there
are fewer captures in proportion, but no fewer than 1/QUIET_PART."""


def captures_wanted(configured: int, waits_per_second: float) -> int:
    """How many threads are to be captured in a second; `configured` is the most."""
    busyness = min(waits_per_second / BUSY_WAITS, 1.0)
    return max(int(configured * busyness), configured // QUIET_PART, 1)


@dataclass
class NamedStack:
    """A captured stack, whose functions may not be known yet."""

    asked: float
    """When the namer was asked (monotonic clock in seconds). If the question could not be put, it is
    ANSWER_SECONDS earlier: no answer will come."""
    user: tuple[str, ...] | None = None
    """Functions in user space, innermost first; None while they are not known."""
    kernel: tuple[str, ...] | None = None
    """Functions of the kernel, innermost first; None while they are not known."""
    is_interrupt: bool = False
    """Whether the wake-up was made by an interrupt while the captured thread ran, and not by this thread."""

    def is_ready(self, now: float) -> bool:
        """Whether the stack's functions are known, or the namer has taken too long to name them."""
        is_known = self.user is not None and self.kernel is not None
        return is_known or now >= self.asked + ANSWER_SECONDS

    @property
    def functions(self) -> CallStack:
        return CallStack(UNKNOWN_STACK if self.user is None else self.user, self.kernel or ())


@dataclass(eq=False)
class _Known:
    """An answer of the namer. When it has expired, the namer is asked again."""

    expires: float
    """When the answer expires, by the monotonic clock in seconds."""

    def is_due(self, now: float) -> bool:
        """Whether the answer has expired, so that the namer is to be asked again now. If so, it is next due
        AGAIN_SECONDS later."""
        if now < self.expires:
            return False
        self.expires = now + AGAIN_SECONDS
        return True

    def is_forgotten(self, now: float) -> bool:
        """Whether the answer expired REMEMBERED_SECONDS ago, and nobody has called is_due() since."""
        return now >= self.expires + REMEMBERED_SECONDS


@dataclass(eq=False)
class _KernelStack(_Known):
    """A stack of the kernel whose functions are known."""

    functions: tuple[str, ...]


class Recognition(NamedTuple):
    """How a user-space stack is recognised after it was unwound once.

    A thread is in the same stack if it will continue at the same address, and the same return addresses are
    at the same places above its stack pointer. Then each step of unwinding leads to the same caller.
    """

    returns: tuple[tuple[int, int], ...]
    """The position of each return address, in 64-bit words from the stack pointer, and the address."""
    frames: tuple[int, ...]
    """Return addresses that the kernel found by frame pointers, if some of them are beyond what was captured
    of the stack; else empty."""

    def is_same(self, words: memoryview, frames: tuple[int, ...]) -> bool:
        """Whether a captured stack is the same one.

        `words` are its 64-bit words from the stack pointer on, and `frames` are the return addresses that the
        kernel found.
        """
        size = len(words)
        has_returns = all(at < size and words[at] == address for at, address in self.returns)
        return has_returns and (not self.frames or self.frames == frames)


@dataclass(eq=False)
class _UserStack(_Known):
    """A stack in user space whose functions are known."""

    recognition: Recognition
    functions: tuple[str, ...]


def find_returns(words: memoryview, frames: tuple[int, ...], returns: tuple[int, ...]) -> Recognition | None:
    """Find out how a stack is recognised; None if not all of its return addresses are found.

    `words` and `frames` are those of the stack's capture, as in Recognition.is_same(). `returns` are the
    addresses at which the functions of the stack will continue, the innermost one first.
    """
    places: list[tuple[int, int]] = []
    at = -1
    for number, address in enumerate(returns[1:]):
        at = next((i for i in range(at + 1, len(words)) if words[i] == address), -1)
        if at < 0:
            is_beyond = set(returns[1 + number :]) <= set(frames)
            return Recognition(tuple(places), frames) if is_beyond else None
        places.append((at, address))
    return Recognition(tuple(places), ())


_Place = tuple[int, tuple[int, ...]]
"""The address at which a thread will continue, and the code objects of its Python functions."""


_NewStack = tuple[tuple[int, int, tuple[int, ...]] | None, tuple[int, ...]]
"""The parts of a stack by which it is recognised while its functions are not known. The first part is for
user space: the process, the address at which the thread will continue, and the code objects of its Python
functions. The second part has the return addresses in the kernel. A part whose functions are known is None or
empty."""


@dataclass
class _Question:
    """A question to the namer about a stack, with what is needed to note the answer."""

    stack: NamedStack
    tgid: int
    capture: Capture | None
    python: tuple[int, ...]
    kernel: tuple[int, ...]
    known: _UserStack | None
    """The remembered stack in user space, if there is one. An answer about user space replaces it."""


class RememberedStacks:
    """Finds the functions of captured stacks: of remembered stacks at once, of others by asking the namer.

    A namer takes memory and processor time, so two kinds of questions neither start a namer nor keep one
    running: those about stacks that have expired, as the answer is usually the same, and those about stacks
    that are seen for the first time, if there are few of these.
    """

    def __init__(self, resolver: Resolver, cpythons: RuntimePlaces | None = None) -> None:
        """`cpythons` takes what the namer finds out about processes with CPython."""
        self._resolver, self._cpythons = resolver, cpythons
        self._tokens = itertools.count(1)
        self._asked: dict[int, _Question] = {}
        """Questions that have no answer yet, by token, the oldest first."""
        self._user: dict[int, dict[_Place, list[_UserStack]]] = {}
        """Stacks in user space by process and place."""
        self._remembered = 0
        """The number of stacks in `_user`."""
        self._kernel: dict[tuple[int, ...], _KernelStack] = {}
        """Stacks of the kernel by their return addresses; those that were named last come last."""
        self._interrupts: dict[int, _Known] = {}
        """Return addresses in functions by which interrupts enter the kernel."""
        self._new: dict[_NewStack, float] = {}
        """When each stack without functions was first seen (monotonic clock in seconds), the oldest first."""

    def name(
        self, tgid: int, capture: Any, kernel: tuple[int, ...], now: float, python: tuple[int, ...] = ()
    ) -> NamedStack:
        """Return a captured stack with its functions if they are remembered; else note_answer() adds them.

        `capture` is an array of one `struct capture`, whose `tid` is 0 if there is no user stack.
        `kernel` are return addresses, and `python` the code objects of Python functions, innermost first.
        """
        if not self._interrupts.keys().isdisjoint(kernel):
            interrupted = NamedStack(now, (), (), is_interrupt=True)
            due = [at for at in kernel if at in self._interrupts and self._interrupts[at].is_due(now)]
            if due:
                self._ask(_Question(interrupted, tgid, None, (), kernel, None), is_needed=False)
            return interrupted
        # Known functions are used at once, even if the namer is asked for them again.
        in_kernel = self._kernel.get(kernel)
        known = self._recognise(tgid, capture, python) if capture["tid"][0] else None
        stack = NamedStack(now)
        if in_kernel or not kernel:
            stack.kernel = in_kernel.functions if in_kernel else ()
        if known or not capture["tid"][0]:
            stack.user = known.functions if known else ()
        is_known = stack.user is not None and stack.kernel is not None
        asks_kernel = in_kernel.is_due(now) if in_kernel else stack.kernel is None
        asks_user = known.is_due(now) if known else stack.user is None
        if asks_kernel or asks_user:
            user = decode_captures(capture)[0] if asks_user else None
            addresses = kernel if asks_kernel else ()
            question = _Question(stack, tgid, user, python if user else (), addresses, known)
            place = (tgid, _program_counter(capture), python) if stack.user is None else None
            is_needed = not is_known and not self._is_rare((place, addresses), now)
            if not self._ask(question, is_needed):
                stack.asked -= ANSWER_SECONDS  # so that is_ready() is true: no answer will come
        return stack

    def _ask(self, question: _Question, is_needed: bool) -> bool:
        token = next(self._tokens)
        asked = ThreadCaptured(token, question.tgid, question.kernel, question.capture, question.python)
        if not self._resolver.ask(asked, is_needed):
            return False
        self._asked[token] = question
        return True

    def _is_rare(self, new: _NewStack, now: float) -> bool:
        """Whether a stack without functions is seen for the first time, and is one of few such stacks."""
        if new in self._new:
            return False
        last = itertools.islice(reversed(self._new.values()), FEW_NEW)
        is_rare = sum(first > now - 60.0 for first in last) < FEW_NEW
        if len(self._new) == MOST_REMEMBERED:
            del self._new[next(iter(self._new))]
        self._new[new] = now
        return is_rare

    def _recognise(self, tgid: int, capture: Any, python: tuple[int, ...]) -> _UserStack | None:
        by_place = self._user.get(tgid)
        stacks = by_place.get((_program_counter(capture), python)) if by_place else None
        if not stacks:
            return None
        words = memoryview(capture["stack"][0].tobytes()[: int(capture["bytes"][0])]).cast("Q")
        frames = tuple(filter(None, capture["frames"][0].tolist()))
        # If several remembered stacks match, the one that was named last counts.
        return next((one for one in reversed(stacks) if one.recognition.is_same(words, frames)), None)

    def note_answer(self, answer: StackAnswer, now: float) -> None:
        """Note the functions of a stack, unless its question was forgotten."""
        question = self._asked.pop(answer.token, None)
        if question is None:
            return
        stack = question.stack
        if answer.cpython and self._cpythons:
            self._cpythons.write(question.tgid, answer.cpython)
        if stack.kernel is None:
            stack.kernel, stack.is_interrupt = answer.kernel, bool(answer.interrupts)
        if stack.user is None:
            stack.user = answer.user or UNKNOWN_STACK
        # An answer without functions changes nothing that is remembered: the namer had no time, or died.
        if question.kernel and answer.kernel:
            self._remember_kernel(question.kernel, answer, now)
        if question.capture and answer.user and not answer.interrupts:
            if question.known:
                self._forget(question.tgid, question.known)
            if set(answer.user) - set(UNKNOWN_STACK):
                self._remember(question.tgid, question.capture, question.python, answer, now)

    def _remember_kernel(self, addresses: tuple[int, ...], answer: StackAnswer, now: float) -> None:
        self._kernel.pop(addresses, None)
        for at in addresses:
            self._interrupts.pop(at, None)
        if answer.interrupts:
            interrupts = set(answer.interrupts).intersection(addresses)
            self._interrupts.update((at, _Known(now + REMEMBERED_SECONDS)) for at in interrupts)
            return
        if len(self._kernel) == MOST_REMEMBERED:
            del self._kernel[next(iter(self._kernel))]
        self._kernel[addresses] = _KernelStack(now + REMEMBERED_SECONDS, answer.kernel)

    def _remember(
        self, tgid: int, capture: Capture, python: tuple[int, ...], answer: StackAnswer, now: float
    ) -> None:
        found = find_returns(memoryview(capture.stack).cast("Q"), capture.frames, answer.returns)
        if found is None:
            return
        if self._remembered == MOST_REMEMBERED:
            self._user.clear()
            self._remembered = 0
        stacks = self._user.setdefault(tgid, {}).setdefault((answer.returns[0], python), [])
        stale = [one for one in stacks if one.recognition == found]
        for one in stale or stacks[: max(len(stacks) - MOST_OF_PLACE + 1, 0)]:
            stacks.remove(one)
            self._remembered -= 1
        self._remembered += 1
        stacks.append(_UserStack(now + REMEMBERED_SECONDS, found, answer.user))

    def _forget(self, tgid: int, known: _UserStack) -> None:
        for stacks in self._user.get(tgid, {}).values():
            if known in stacks:
                stacks.remove(known)
                self._remembered -= 1

    def forget_ended(self, alive: set[int], now: float) -> None:
        """Forget the stacks of all processes but those in `alive`, stacks that have not been seen for long,
        and questions that got no answer."""
        self._user = {
            tgid: seen
            for tgid, by_place in self._user.items()
            if tgid in alive and (seen := _without_forgotten(by_place, now))
        }
        self._remembered = sum(len(stacks) for by in self._user.values() for stacks in by.values())
        self._asked = {
            token: one for token, one in self._asked.items() if now < one.stack.asked + ANSWER_SECONDS
        }
        self._kernel = {at: one for at, one in self._kernel.items() if not one.is_forgotten(now)}
        self._interrupts = {at: one for at, one in self._interrupts.items() if not one.is_forgotten(now)}
        self._new = {new: first for new, first in self._new.items() if now < first + REMEMBERED_SECONDS}


def _without_forgotten(
    by_place: Mapping[_Place, list[_UserStack]], now: float
) -> dict[_Place, list[_UserStack]]:
    stacks = ((place, [one for one in of if not one.is_forgotten(now)]) for place, of in by_place.items())
    return {place: seen for place, seen in stacks if seen}


def _program_counter(capture: Any) -> int:
    registers = capture["registers"]
    return int(registers["ip" if "ip" in registers.dtype.names else "pc"][0])


@dataclass
class _Completed:
    """A sample whose stacks may have no functions yet."""

    process: Name
    reason: str
    weight_ns: int
    stack: NamedStack
    waker: str
    waker_stack: NamedStack
    tick: int
    """The number of the tick in which it was read."""

    def is_ready(self, now: float) -> bool:
        return self.stack.is_ready(now) and self.waker_stack.is_ready(now)

    def sample(self) -> WaitSample:
        waker, stack = self.waker, self.waker_stack.functions
        if self.waker_stack.is_interrupt:
            waker, stack = INTERRUPT, CallStack((), ())
        return WaitSample(self.process, self.reason, self.weight_ns, self.stack.functions, waker, stack)


@dataclass
class _Begun:
    """A wait whose thread was captured."""

    began_ns: int
    stack: NamedStack
    is_over: bool = False
    """Whether the last forget_ended_waits() did not find the thread in this wait."""


class WaitSamples(SampleCounts):
    """Reads `ring`, whose records have the layout `record`, and has their stacks named.

    `enums` and `constants` are those of the manifest. `refused` counts samples for which the ring had no
    room. `cpythons` takes what the namer finds out about processes with CPython; None if the programs do not
    read Python functions. `identify` is Identities.identify_thread(), and `comm(tgid)` returns the comm of a
    process.
    """

    def __init__(
        self,
        ring: Ring,
        record: Layout | str,
        enums: Mapping[str, tuple[str, ...]],
        constants: Mapping[str, int],
        refused: PerCpuCounters,
        control: Control,
        resolver: Resolver,
        cpythons: RuntimePlaces | None,
        identify: Callable[[Any], tuple[Name, bool]],
        comm: Callable[[int], str],
        per_second: int,
        now: float,
    ) -> None:
        super().__init__(refused, SamplePace(per_second, now))
        self._reader = RingReader(ring)
        self._captured = struct_dtype(record)
        self._record = self._captured["record"]
        self._reasons = Reasons(enums, constants)
        self._begins = enums["wait_record_kind"].index("begins")
        self._ends = enums["wait_record_kind"].index("ends")
        self._control, self._identify, self._comm = control, identify, comm
        self._stacks = RememberedStacks(resolver, cpythons)
        self._per_second, self._since, self._waits_then = per_second, now, 0
        self._pace.wait_ns = THREADS_AT_FIRST * NS // per_second
        self._begun: dict[int, _Begun] = {}
        """Waits whose threads were captured, by thread; the oldest first."""
        self._waiting: list[_Completed] = []
        self._set_pace()

    def read(self, now: float, tick: int, waits: int) -> None:
        """Read new samples, in the tick with the number `tick`, and ask for the functions of their stacks.

        `waits` is the number of waits off the CPU that were counted so far. Makes no system call if there are
        no samples.
        """
        captures = 0
        for record in self._reader.records():
            seen: Any = np.frombuffer(record, self._record, 1)[0]
            if seen["kind"] == self._begins:
                captures += 1
                self._note_begin(seen, record, now)
            elif seen["kind"] == self._ends:
                self._note_end(seen, record, now, tick)
        if now >= self._since + (1.0 if waits != self._waits_then else LONGEST_UNCOUNTED):
            waits_per_second = (waits - self._waits_then) / (now - self._since)
            self._pace.set_rate(captures_wanted(self._per_second, waits_per_second))
            self._since, self._waits_then = now, waits
        self._pace.note(captures, now)
        self._set_pace()

    def _set_pace(self) -> None:
        self._control.set_wait_per_capture(self._pace.wait_ns // WAIT_UNIT_NS)

    def _note_begin(self, seen: Any, record: memoryview, now: float) -> None:
        tid = int(seen["tid"])
        self._begun.pop(tid, None)
        if not self._identify(seen["who"])[1]:
            return
        if len(self._begun) == MOST_BEGUN:
            del self._begun[next(iter(self._begun))]
        stack = self._stack(int(seen["who"]["tgid"]), record, now)
        self._begun[tid] = _Begun(int(seen["began"]), stack)

    def _note_end(self, seen: Any, record: memoryview, now: float, tick: int) -> None:
        tid, waker, weight_ns = int(seen["tid"]), int(seen["waker"]), int(seen["weight"])
        begun = self._begun.get(tid)
        process, is_wanted = self._identify(seen["who"])
        # The record may have the content of an older one (see RingReader), whose weight may be impossible, or
        # which may be of an older wait. Then the thread still is in the wait that has begun.
        if not is_wanted or not 0 < weight_ns <= MOST_WEIGHT_NS:
            return
        if begun is None or begun.began_ns != int(seen["began"]) or len(self._waiting) >= MOST_WAITING:
            self._refuse(weight_ns)
            return
        del self._begun[tid]
        of_waker, stack = "", NamedStack(now, (), ())
        if seen["is_woken"]:
            of_waker = self._comm(waker) if waker else INTERRUPT
            if len(record) == self._captured.itemsize:
                stack = self._stack(waker, record, now)
        facts = int(seen["nr"]), int(seen["state"]), bool(seen["iowait"]), int(seen["detail"])
        reason = self._reasons.reason(*facts)
        self._waiting.append(_Completed(process, reason, weight_ns, begun.stack, of_waker, stack, tick))
        self.taken += 1

    def _stack(self, tgid: int, record: memoryview, now: float) -> NamedStack:
        captured = np.frombuffer(record, self._captured, 1)
        kernel = tuple(filter(None, captured["kernel"][0].tolist()))
        codes = captured["python"][0].tolist() if captured["by"]["tid"][0] else ()
        python = tuple(itertools.takewhile(bool, codes))
        return self._stacks.name(tgid, captured["by"], kernel, now, python)

    def note_answer(self, answer: StackAnswer, now: float) -> None:
        """Note the functions of a stack."""
        self._stacks.note_answer(answer, now)

    @property
    def has_waiting(self) -> bool:
        """Whether take() may return something."""
        return bool(self._waiting)

    def has_counted(self, tick: int) -> bool:
        """Whether no sample that was read up to that tick waits for the functions of its stacks."""
        return all(one.tick > tick for one in self._waiting)

    def take(self, now: float) -> list[WaitSample]:
        """Return the samples whose functions are known, or were asked for ANSWER_SECONDS ago."""
        ready = [one.sample() for one in self._waiting if one.is_ready(now)]
        self._waiting = [one for one in self._waiting if not one.is_ready(now)]
        return ready

    def refuse_waiting(self) -> None:
        """Count the samples that take() has still to return as refused: nothing is counted any more."""
        for one in self._waiting:
            self._refuse(one.weight_ns)
        self._waiting.clear()

    def forget_ended_waits(self, threads: Entries) -> None:
        """Forget captured waits that have ended without a sample. `threads` are those of Collector.threads().

        The sample of a wait may be in the ring and not read yet. So a wait is forgotten when two calls in a
        row have not found its thread in it.
        """
        if not self._begun:
            return
        tids, entries = threads
        rows = np.flatnonzero(np.isin(tids, list(self._begun)))
        since = dict(zip(tids[rows].tolist(), entries["off_since"][rows].tolist(), strict=True))
        for tid, begun in list(self._begun.items()):
            is_over = since.get(tid) != begun.began_ns
            if is_over and begun.is_over:
                del self._begun[tid]
            begun.is_over = is_over

    def forget_ended(self, alive: set[int], now: float) -> None:
        """Forget the stacks of all processes but those in `alive`."""
        self._stacks.forget_ended(alive, now)
