"""Questions of the sampler to the namer, and the answers.

A question is one message: a line of JSON, and then the captured stack, if there is one. An answer is one
message of JSON. The attributes of most questions and answers are the keys of the JSON object.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from lockd.advice import ADVICE
from lockd.names.shares import Turn
from lockd.names.unwind.capture import Capture
from lockd.printable import masked

ANON = "anon"
"""The name of a lock on a heap, on a stack or in shared memory whose site is unknown."""
UNKNOWN = "unknown"
"""The value of `site` for a kernel lock whose site is unknown."""
UNKNOWN_HOLDER = "(unknown)"
"""The name of a holder whose release was seen, but whose stack shows no function."""
OWNER_ENDED = "(owner ended)"
"""The text in place of a holder if the thread that held the lock ended, and the kernel released its robust
lock."""
NO_RELEASE = "(no release)"
"""The text in place of a holder if no release was seen: for instance, a timeout or a signal ended the wait.
"""
NOT_READ = -1
"""What stands for the thread that holds a lock if the lock was not read: its process has used up its share of
the namer's time, or the namer was lost. The next answer may have the thread."""
NOT_AS_AGREED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions raised by reading JSON of an unexpected shape."""
STACKS = 8192
"""The most stacks that are remembered, so that equal stacks share memory. A busy host's locks have fewer."""
TEXTS, LONGEST_SHARED = 10_000, 1_000
"""The most names of functions and locks that are remembered, so that equal names share memory, and the length
of the longest of these in characters."""
MOST_FUNCTIONS = 64
"""The most functions in each of the stacks of a StackAnswer."""

Addresses = tuple[int, ...]
"""Addresses in memory. In an answer each of them must be a number from 0 to 2^64 - 1."""


HOTSPOT_BITS = (63, *[32] * 9, *[8] * 4)
"""Sizes in bits of the members of struct hotspot; the first member is an address in user space."""


@dataclass(frozen=True)
class HotSpotPlaces:
    """Where the memory of a process with HotSpot (a Java virtual machine) says what a Java thread waits for.

    The attributes are the members of struct hotspot of the BPF programs: offsets and shifts, an address, and
    flags. Raises ValueError if a number does not fit into its member: the numbers are from the memory of a
    process.
    """

    oop_base: int
    module: int
    current_thread: int
    thread_object: int
    current_object: int
    pending_monitor: int
    waiting_monitor: int
    eetop: int
    blocker: int
    klass: int
    oop_shift: int
    klass_shift: int
    is_wide: int
    generation: int = 0
    """Part of the number that stands for a wait in place of a futex word's address (runtimes/hotspot.py). It
    changes with the perf map, so that locks are named anew."""

    def __post_init__(self) -> None:
        for number, bits in zip(vars(self).values(), HOTSPOT_BITS, strict=True):
            _number(number, 0, 1 << bits)


CPYTHON_BITS = (63, *[32] * 6)
"""Sizes in bits of the members of struct cpython; the first member is an address in user space."""


@dataclass(frozen=True)
class CPythonPlaces:
    """Where the memory of a process with CPython says which Python functions a thread is in.

    The attributes are the members of struct cpython of the BPF programs: an address, offsets and a flag.
    Raises ValueError if a number does not fit into its member.
    """

    last_holder: int
    thread_id: int
    thread_frame: int
    has_cframe: int
    cframe_frame: int
    frame_previous: int
    frame_code: int

    def __post_init__(self) -> None:
        for number, bits in zip(vars(self).values(), CPYTHON_BITS, strict=True):
            _number(number, 0, 1 << bits)


@dataclass(frozen=True)
class LockAnswer:
    """The name of a lock: the answer to UserLockSeen and to KernelLock."""

    key: int
    """The key of the question."""
    is_user: bool
    """Whether the lock is in user space. The attributes from `kind` to `cpython` are for such locks only, but
    `is_provisional` is for all."""
    lock: str
    site: str
    """The function that waits for the lock."""
    stack: tuple[str, ...] = ()
    """Functions of a thread that waited for the lock, innermost first."""
    kind: str = ""
    """lock, pi, cond or other."""
    family: str = ""
    """The sort of code that locks, such as mutex or rwlock; empty if it is unknown."""
    is_provisional: bool = False
    """Whether another question about the lock may bring a better answer."""
    is_reused: bool = False
    """Whether another lock may soon have the same address: CPython makes a lock for each wait in a queue."""
    is_parked: bool = False
    """Whether the address is of a word on which one thread sleeps, whatever lock it waits for."""
    is_many: bool = False
    """Whether the key stands for a class of Java, and each object of the class is a lock of its own."""
    hotspot: tuple[int, ...] = ()
    """The members of HotSpotPlaces for a process with HotSpot; empty if they are unknown."""
    advice: str = ""
    """A key of lockd.advice.ADVICE about the waits of the process; empty if there is none."""
    cpython: tuple[int, ...] = ()
    """The members of CPythonPlaces for a process with CPython; empty if they are unknown."""
    span: Addresses = ()
    """The first and the last address of a range in which every kernel lock with the same type and the same
    stack has this name and site. For a static lock it is the lock's own address, for any other kernel lock
    the memory around it that contains no variables. Empty for a lock in user space and in a fallback()."""


@dataclass(frozen=True)
class OwnersAnswer:
    """The holders of locks: the answer to Owners."""

    token: int
    """The token of the question."""
    tids: tuple[int, ...]
    """The thread that holds each lock, in the order of the question; 0 where it is unknown, NOT_READ
    where the lock was not read."""


@dataclass(frozen=True)
class GoWaitsAnswer:
    """The times that goroutines have waited for mutexes: the answer to GoWaits."""

    tgids: tuple[int, ...]
    """The processes of the question."""
    waited_ns: tuple[int, ...]
    """For each process, the nanoseconds that its goroutines have waited, as Go's runtime counted them; -1
    where they cannot be read."""


@dataclass(frozen=True)
class HolderAnswer:
    """The code that released a lock: the answer to LockReleased and to KernelLockReleased."""

    token: int
    """The token of the question."""
    site: str
    """The function that released the lock; empty if unknown, NO_RELEASE if the stack shows no release."""
    stack: tuple[str, ...]
    """Functions of the thread that released the lock, innermost first."""


@dataclass(frozen=True)
class StackAnswer:
    """The functions of a thread's stack: the answer to ThreadCaptured."""

    token: int
    """The token of the question."""
    user: tuple[str, ...]
    """Functions in user space, innermost first; empty if there was no capture, or if they are unknown."""
    returns: Addresses
    """The addresses at which the thread will continue in its functions in C, innermost first. Some may be in
    functions that evaluate Python code; `user` has the Python functions instead of these."""
    kernel: tuple[str, ...]
    """Functions of the kernel, innermost first."""
    interrupts: Addresses
    """The return addresses in the kernel stack that are in functions by which interrupts enter the kernel. If
    there are any, the thread only happened to run when an interrupt came."""
    cpython: tuple[int, ...] = ()
    """The members of CPythonPlaces for a process with CPython; empty if they are unknown."""


Answer = LockAnswer | OwnersAnswer | GoWaitsAnswer | HolderAnswer | StackAnswer


@dataclass(frozen=True)
class UserLockSeen:
    """Asks for the name of the lock at `address` in process `tgid`, for which thread `tid` blocked."""

    key: int
    """The sampler's number for the lock. The answer repeats it."""
    tgid: int
    tid: int
    address: int
    guess: str
    """The kind of lock by the arguments of the futex call."""
    capture: Capture | None = None
    sleeper: int = 0
    """The thread pointer of `tid`, if there is no capture and the thread still sleeps at `address`; 0 to
    leave the thread's stack unread."""

    def encode(self) -> bytes:
        return _with_capture("user", self)

    def fallback(self) -> Answer:
        """The answer to use if the namer gives none."""
        return LockAnswer(self.key, True, ANON, "", kind=self.guess, is_provisional=True)

    @property
    def description(self) -> str:
        """What the question is about, for log lines."""
        return f"the lock {self.address:#x} of process {self.tgid}"


@dataclass(frozen=True)
class KernelLock:
    """Asks for the name of the kernel's lock at `address`, for which a thread waited in `stack`."""

    key: int
    """The sampler's number for the lock. The answer repeats it."""
    address: int
    lock_type: str
    """A value of the label `type`."""
    stack: tuple[int, ...] = ()
    """Return addresses, innermost first."""
    is_mmap_lock: bool = False
    """Whether the lock is the mmap_lock of the waiter's own address space."""

    def encode(self) -> bytes:
        return _message({"q": "kernel", **vars(self)})

    def fallback(self) -> Answer:
        return LockAnswer(self.key, False, ANON, UNKNOWN, is_provisional=True)

    @property
    def description(self) -> str:
        return f"the kernel's lock {self.address:#x}"


@dataclass(frozen=True)
class OwnedLock:
    """A lock in user space whose holder is asked for. `kind` and `family` are as in LockAnswer."""

    tgid: int
    address: int
    kind: str
    family: str


@dataclass(frozen=True)
class Owners:
    """Asks which threads hold these locks now."""

    token: int
    """The sampler's number for the question. The answer repeats it."""
    locks: tuple[OwnedLock, ...]

    def encode(self) -> bytes:
        locks = [(lock.tgid, lock.address, lock.kind, lock.family) for lock in self.locks]
        return _message({"q": "owners", "token": self.token, "locks": locks})

    def fallback(self) -> Answer:
        return OwnersAnswer(self.token, (NOT_READ,) * len(self.locks))

    @property
    def description(self) -> str:
        return f"the owners of {len(self.locks)} locks"


@dataclass(frozen=True)
class GoWaits:
    """Asks how long goroutines of these processes have waited for mutexes."""

    tgids: tuple[int, ...]

    def encode(self) -> bytes:
        return _message({"q": "go", "tgids": self.tgids})

    def fallback(self) -> Answer:
        return GoWaitsAnswer(self.tgids, (-1,) * len(self.tgids))

    @property
    def description(self) -> str:
        return f"the mutexes of {len(self.tgids)} programs in Go"


@dataclass(frozen=True)
class LockReleased:
    """Asks for the code in process `tgid` that released a lock, given the releasing thread's capture."""

    token: int
    """The sampler's number for the question. The answer repeats it."""
    tgid: int
    capture: Capture
    python: Addresses = ()
    """The code objects of the Python functions that the thread was in, innermost first."""

    def encode(self) -> bytes:
        return _with_capture("released", self)

    def fallback(self) -> Answer:
        return HolderAnswer(self.token, "", ())

    @property
    def description(self) -> str:
        return f"a thread of process {self.tgid} that released a lock"


@dataclass(frozen=True)
class KernelLockReleased:
    """Asks for the code that released a kernel lock, if `stack` shows that the thread released one."""

    token: int
    """The sampler's number for the question. The answer repeats it."""
    stack: tuple[int, ...]
    """Return addresses in the kernel, innermost first."""

    def encode(self) -> bytes:
        return _message({"q": "kernel released", **vars(self)})

    def fallback(self) -> Answer:
        return HolderAnswer(self.token, "", ())

    @property
    def description(self) -> str:
        return "a thread that released a lock of the kernel"


@dataclass(frozen=True)
class ThreadCaptured:
    """Asks for the functions of a thread's stack, in user space and in the kernel."""

    token: int
    """The sampler's number for the question. The answer repeats it."""
    tgid: int
    """The thread's process."""
    kernel: tuple[int, ...]
    """Return addresses in the kernel, innermost first; empty if their functions are not asked for."""
    capture: Capture | None = None
    """None for a kernel thread, or if the functions in user space are not asked for."""
    python: Addresses = ()
    """The code objects of the Python functions that the thread was in, innermost first."""

    def encode(self) -> bytes:
        return _with_capture("captured", self)

    def fallback(self) -> Answer:
        return StackAnswer(self.token, (), (), (), ())

    @property
    def description(self) -> str:
        return f"the stack of a thread of process {self.tgid}"


@dataclass(frozen=True)
class Watch:
    """Tells the namer to remember what the processes `tgids` have mapped, and to forget the processes `gone`.

    An id that is in both belonged to a process that has ended, and now belongs to a new one. Only what is
    known of the ended process is forgotten.
    """

    tgids: tuple[int, ...]
    gone: tuple[int, ...] = ()

    def encode(self) -> bytes:
        return _message({"q": "look", **vars(self)})

    @property
    def description(self) -> str:
        return f"the mappings of {len(self.tgids)} processes"


@dataclass(frozen=True)
class Reload:
    """Tells the namer to go on with other settings; the attributes are those of NamerSettings."""

    log_level: int
    share: float
    held: tuple[Turn, ...] = ()

    def encode(self) -> bytes:
        return _message({"q": "reload", **vars(self)})

    @property
    def description(self) -> str:
        return "other settings"


Asked = UserLockSeen | KernelLock | Owners | GoWaits | LockReleased | KernelLockReleased | ThreadCaptured
"""The types of questions that get an answer."""
Question = Asked | Watch | Reload


def is_answer_to(answer: Answer, question: Asked) -> bool:
    """Whether an answer has the type, and is about the locks or processes, that a question asks for."""
    match question, answer:
        case ((UserLockSeen() | KernelLock()), LockAnswer()):
            return answer.key == question.key and answer.is_user == isinstance(question, UserLockSeen)
        case Owners(), OwnersAnswer():
            return answer.token == question.token and len(answer.tids) == len(question.locks)
        case GoWaits(), GoWaitsAnswer():
            return answer.tgids == question.tgids and len(answer.waited_ns) == len(question.tgids)
        case ((LockReleased() | KernelLockReleased()), HolderAnswer()):
            return answer.token == question.token
        case ThreadCaptured(), StackAnswer():
            is_whole = bool(answer.returns) == bool(answer.user)
            is_asked_for = question.capture is not None or not (answer.user or answer.cpython)
            return answer.token == question.token and is_whole and is_asked_for
    return False


@dataclass(frozen=True)
class NamerSettings:
    """Settings of a namer, handed over as JSON in a file in memory."""

    procfs: str
    """The root of a proc file system."""
    log_level: int
    parked: Sequence[str]
    """Shell patterns of the names of locks that idle threads park on."""
    share: float
    """The part of a CPU's time that the namer may spend on one process, and on one user, see Shares."""
    owing: Sequence[tuple[Turn, float]]
    """Processes and users whose turns made earlier namers end, and the seconds that each turn still owes, see
    Shares."""
    ring: tuple[int, int] | None
    """Descriptor and size in bytes of the ring of blocked processes; None if there is no ring."""
    bench: int = -1
    """The descriptor of the memory of a Bench."""
    socket: int = -1
    """The descriptor of the socket for questions and answers."""
    held: Sequence[Turn] = ()
    """Processes, with their users, on which earlier namers hang, which were killed and have not ended. See
    Shares.hold()."""

    def to_json(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> NamerSettings:
        fields = json.loads(text)
        owing = [((tgid, user), seconds) for (tgid, user), seconds in fields["owing"]]
        return cls(**{**fields, "owing": owing, "held": [(tgid, user) for tgid, user in fields["held"]]})


def decode_question(message: bytes) -> Question:
    """The question in a message. Raises ValueError if the message is not a question."""
    head, _, blob = message.partition(b"\n")
    try:
        return _question(json.loads(head), blob)
    except NOT_AS_AGREED as error:
        raise ValueError(f"no question: {error!r}") from None


def _question(fields: dict[str, Any], blob: bytes) -> Question:
    match fields.pop("q"):
        case "user":
            capture = fields.pop("capture")
            seen = UserLockSeen(**fields)
            return replace(seen, capture=_capture(capture, blob)) if capture else seen
        case "kernel":
            return KernelLock(**{**fields, "stack": tuple(fields["stack"])})
        case "owners":
            return Owners(fields["token"], tuple(OwnedLock(*lock) for lock in fields["locks"]))
        case "go":
            return GoWaits(tuple(fields["tgids"]))
        case "released":
            capture = _capture(fields["capture"], blob)
            return LockReleased(fields["token"], fields["tgid"], capture, tuple(fields["python"]))
        case "kernel released":
            return KernelLockReleased(fields["token"], tuple(fields["stack"]))
        case "captured":
            capture = fields["capture"]
            return ThreadCaptured(
                fields["token"],
                fields["tgid"],
                tuple(fields["kernel"]),
                _capture(capture, blob) if capture else None,
                tuple(fields["python"]),
            )
        case "look":
            return Watch(tuple(fields["tgids"]), tuple(fields["gone"]))
        case "reload":
            held = tuple((tgid, user) for tgid, user in fields["held"])
            return Reload(**{**fields, "held": held})
        case other:
            raise ValueError(f"no question is called {other!r}")


def encode_answer(answer: Answer) -> bytes:
    return _message({"a": _NAMES[type(answer)], **vars(answer)})


def decode_answer(message: bytes) -> Answer:
    """The answer in a message.

    Raises ValueError unless the message has every attribute of one type of answer, each of the right type,
    and no other. The namer reads files that anybody may have written, and may have been made to send
    anything.
    """
    try:
        values = json.loads(message)
        kind = _ANSWERS[values.pop("a")]
        answer: Answer = kind(**{name: read(values.pop(name)) for name, read in _READERS[kind]})
        if values:
            raise ValueError(f"it has {', '.join(values)} as well")
        if isinstance(answer, LockAnswer):
            if answer.hotspot:
                HotSpotPlaces(*answer.hotspot)
            if len(answer.span) not in (0, 2):
                raise ValueError(f"a span has {len(answer.span)} ends, and not 2")
            if answer.advice and answer.advice not in ADVICE:
                raise ValueError(f"there is no advice {answer.advice!r:.40}")
        if isinstance(answer, LockAnswer | StackAnswer) and answer.cpython:
            CPythonPlaces(*answer.cpython)
        if isinstance(answer, StackAnswer):
            longest = max(len(answer.user), len(answer.returns), len(answer.kernel))
            if longest > MOST_FUNCTIONS:
                raise ValueError(f"a stack has {longest} functions, and not {MOST_FUNCTIONS} at most")
        return answer
    except NOT_AS_AGREED as error:
        raise ValueError(f"no answer: {error!r}") from None


def _number(value: Any, low: int = -(1 << 63), end: int = 1 << 64) -> int:
    if type(value) is not int or not low <= value < end:
        raise ValueError(f"{value!r:.40} is no whole number from {low} to {end - 1}")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r:.40} is neither true nor false")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(_number(number, end=1 << 63) for number in value)


def _addresses(value: Any) -> Addresses:
    return tuple(_number(address, 0) for address in value)


def _text(value: str) -> str:
    """A printable string: a namer that an attacker controls may send any characters."""
    text = masked(value)
    return _shared_text(text) if len(text) <= LONGEST_SHARED else text


def _texts(value: Any) -> tuple[str, ...]:
    return _shared(tuple(map(_text, value)))


_ANSWERS: dict[str, type[Answer]] = {
    "lock": LockAnswer, "owners": OwnersAnswer, "go": GoWaitsAnswer, "holder": HolderAnswer,
    "stack": StackAnswer,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _ANSWERS.items()}
# Thousands of locks have the same functions and stacks: _text() and _texts() return one object for all that
# are equal.
_BY_TYPE: dict[str, Callable[[Any], Any]] = {
    "int": _number, "bool": _flag, "str": _text, "tuple[int, ...]": _numbers, "tuple[str, ...]": _texts,
    "Addresses": _addresses,
}  # fmt: skip
_READERS = {
    kind: tuple((field.name, _BY_TYPE[str(field.type)]) for field in fields(kind))
    for kind in _ANSWERS.values()
}


@functools.lru_cache(TEXTS)
def _shared_text(text: str) -> str:
    """One object for all texts that are equal.

    Interned strings would do the same, but Python 3.12.0 to 3.12.6 (Ubuntu 24.04) never frees them.
    """
    return text


@functools.lru_cache(STACKS)
def _shared(stack: tuple[str, ...]) -> tuple[str, ...]:
    """One tuple for all stacks that are equal."""
    return stack


def _capture(fields: dict[str, Any], stack: bytes) -> Capture:
    return Capture(tuple(fields["registers"]), stack, tuple(fields["frames"]), fields["thread_pointer"])


def _fields(instance: Any, *without: str) -> dict[str, Any]:
    return {name: value for name, value in vars(instance).items() if name not in without}


def _with_capture(kind: str, question: UserLockSeen | LockReleased | ThreadCaptured) -> bytes:
    """The message for a question that may have a capture. The captured stack follows the line of JSON."""
    capture = question.capture
    head = {"q": kind, **_fields(question, "capture"), "capture": capture and _fields(capture, "stack")}
    return _message(head, capture.stack if capture else b"")


def _message(head: dict[str, Any], blob: bytes = b"") -> bytes:
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + blob
