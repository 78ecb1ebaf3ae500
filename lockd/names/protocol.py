"""What the sampler asks the namer, and what it is answered: one message each, JSON and then plain bytes."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from lockd.advice import ADVICE
from lockd.names.shares import Turn
from lockd.names.unwind.capture import Capture
from lockd.printable import masked

ANON = "anon"
"""A lock of which nothing is known that has a name: on a heap, a stack or in shared memory, and no stack."""
UNKNOWN = "unknown"
"""A place in the kernel of which nothing is known."""
NOT_AS_AGREED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading JSON of another shape than expected raises."""
STACKS = 8192
"""That the locks of a busy host are waited for in; further ones are kept for each lock."""


HOTSPOT_BITS = (63, *[32] * 9, *[8] * 4)
"""That the members of struct hotspot have; the first is an address in user space."""


@dataclass(frozen=True)
class HotSpotPlaces:
    """Where the memory of a thread of Java says what it waits for: struct hotspot of the programs."""

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
    """Waits have other numbers when more names have come to be known: what they are for is named anew."""

    def __post_init__(self) -> None:
        """ValueError if a number does not fit into its member: it is from the memory of a process."""
        for number, bits in zip(vars(self).values(), HOTSPOT_BITS, strict=True):
            _number(number, 0, 1 << bits)


@dataclass(frozen=True)
class LockAnswer:
    """The name of the lock that was asked for under `key`."""

    key: int
    is_user: bool
    lock: str
    site: str
    stack: tuple[str, ...] = ()
    kind: str = ""
    """Of a lock in user space: lock, pi, cond, other."""
    family: str = ""
    """Of a lock in user space: what its code is, such as mutex or rwlock; empty if that is not known."""
    is_provisional: bool = False
    """Whether the next answer about it may tell more."""
    is_reused: bool = False
    """Of a lock in user space: whether its memory is soon that of another, as with all locks of CPython."""
    is_many: bool = False
    """Whether `key` stands for a class of Java whose objects are to be told apart."""
    hotspot: tuple[int, ...] = ()
    """Of a Java machine, HotSpotPlaces as a tuple; empty if that is not known."""
    advice: str = ""
    """Of lockd.advice, for who looks at this process; empty if there is none."""


@dataclass(frozen=True)
class OwnersAnswer:
    """Who holds the locks that were asked for, in their order; 0 where that is not known."""

    token: int
    tids: tuple[int, ...]


@dataclass(frozen=True)
class GoWaitsAnswer:
    """What the runtimes of these processes have counted that goroutines waited for mutexes, in nanoseconds.

    -1 where that cannot be read.
    """

    tgids: tuple[int, ...]
    waited_ns: tuple[int, ...]


Answer = LockAnswer | OwnersAnswer | GoWaitsAnswer


@dataclass(frozen=True)
class UserLockSeen:
    """What is the lock at `address` of process `tgid`, for which a thread blocked?"""

    wants_answer: ClassVar[bool] = True
    key: int
    tgid: int
    tid: int
    address: int
    guess: str
    """Its kind by the arguments of the call."""
    capture: Capture | None = None
    sleeper: int = 0
    """Without a capture, the thread pointer of `tid`, which still sleeps there; 0: it is not looked at."""

    def encode(self) -> bytes:
        capture = self.capture
        head = {"q": "user", **_fields(self, "capture"), "capture": capture and _fields(capture, "stack")}
        return _message(head, capture.stack if capture else b"")

    def fallback(self) -> Answer:
        return LockAnswer(self.key, True, ANON, "", kind=self.guess, is_provisional=True)

    @property
    def words(self) -> str:
        return f"the lock {self.address:#x} of process {self.tgid}"


@dataclass(frozen=True)
class KernelLock:
    """What is the kernel's lock at `address`, for which a thread waited in `stack`?"""

    wants_answer: ClassVar[bool] = True
    key: int
    address: int
    lock_type: str
    stack: tuple[int, ...] = ()
    """Return addresses, innermost first."""
    is_mmap_lock: bool = False
    """Of the waiter's own address space."""

    def encode(self) -> bytes:
        return _message({"q": "kernel", **vars(self)})

    def fallback(self) -> Answer:
        return LockAnswer(self.key, False, ANON, UNKNOWN)

    @property
    def words(self) -> str:
        return f"the kernel's lock {self.address:#x}"


@dataclass(frozen=True)
class OwnedLock:
    """A lock in user space of which the owner is wanted."""

    tgid: int
    address: int
    kind: str
    family: str


@dataclass(frozen=True)
class Owners:
    """Who holds these locks now?"""

    wants_answer: ClassVar[bool] = True
    token: int
    locks: tuple[OwnedLock, ...]

    def encode(self) -> bytes:
        locks = [(lock.tgid, lock.address, lock.kind, lock.family) for lock in self.locks]
        return _message({"q": "owners", "token": self.token, "locks": locks})

    def fallback(self) -> Answer:
        return OwnersAnswer(self.token, (0,) * len(self.locks))

    @property
    def words(self) -> str:
        return f"the owners of {len(self.locks)} locks"


@dataclass(frozen=True)
class GoWaits:
    """How long have goroutines of these processes waited for mutexes?"""

    wants_answer: ClassVar[bool] = True
    tgids: tuple[int, ...]

    def encode(self) -> bytes:
        return _message({"q": "go", "tgids": self.tgids})

    def fallback(self) -> Answer:
        return GoWaitsAnswer(self.tgids, (-1,) * len(self.tgids))

    @property
    def words(self) -> str:
        return f"the mutexes of {len(self.tgids)} programs in Go"


@dataclass(frozen=True)
class Looks:
    """Remember the mappings of the processes `tgids`; forget all of those that are `gone`."""

    wants_answer: ClassVar[bool] = False
    tgids: tuple[int, ...]
    gone: tuple[int, ...] = ()

    def encode(self) -> bytes:
        return _message({"q": "look", **vars(self)})

    def fallback(self) -> Answer:
        raise AssertionError("is not answered")

    @property
    def words(self) -> str:
        return f"the mappings of {len(self.tgids)} processes"


@dataclass(frozen=True)
class Reload:
    """Go on with these, which are as in NamerSettings."""

    wants_answer: ClassVar[bool] = False
    log_level: int
    share: float

    def encode(self) -> bytes:
        return _message({"q": "reload", **vars(self)})

    def fallback(self) -> Answer:
        raise AssertionError("is not answered")

    @property
    def words(self) -> str:
        return "other settings"


Question = UserLockSeen | KernelLock | Owners | GoWaits | Looks | Reload


def is_answer_to(answer: Answer, question: Question) -> bool:
    """Whether it is of the right sort, and of what was asked for."""
    match question, answer:
        case ((UserLockSeen() | KernelLock()), LockAnswer()):
            return answer.key == question.key and answer.is_user == isinstance(question, UserLockSeen)
        case Owners(), OwnersAnswer():
            return answer.token == question.token and len(answer.tids) == len(question.locks)
        case GoWaits(), GoWaitsAnswer():
            return answer.tgids == question.tgids and len(answer.waited_ns) == len(question.tgids)
    return False


@dataclass(frozen=True)
class NamerSettings:
    """What a namer begins with; `bench`, `ring` and `socket` have numbers of descriptors."""

    procfs: str
    log_level: int
    parked: Sequence[str]
    share: float
    owing: Sequence[tuple[Turn, float]]
    """Both as in Shares."""
    ring: tuple[int, int] | None
    bench: int = -1
    socket: int = -1

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> NamerSettings:
        fields = json.loads(text)
        owing = [((tgid, user), seconds) for (tgid, user), seconds in fields["owing"]]
        return cls(**{**fields, "owing": owing})


def decode_question(message: bytes) -> Question:
    """Raises ValueError if it is none."""
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
        case "look":
            return Looks(tuple(fields["tgids"]), tuple(fields["gone"]))
        case "reload":
            return Reload(**fields)
        case other:
            raise ValueError(f"no question is called {other!r}")


def encode_answer(answer: Answer) -> bytes:
    kinds = {kind: name for name, kind in _ANSWERS.items()}
    return _message({"a": kinds[type(answer)], **vars(answer)})


def decode(message: bytes) -> Answer:
    """Raises ValueError if it is no answer with all that belongs to it, each of its type: a namer reads what
    anybody may have written, and may have been made to say anything.
    """
    try:
        given = json.loads(message)
        kind = _ANSWERS[given.pop("a")]
        answer: Answer = kind(**{name: read(given.pop(name)) for name, read in _READERS[kind]})
        if given:
            raise ValueError(f"it has {', '.join(given)} as well")
        if isinstance(answer, LockAnswer):
            if answer.hotspot:
                HotSpotPlaces(*answer.hotspot)
            if answer.advice and answer.advice not in ADVICE:
                raise ValueError(f"there is no advice {answer.advice!r:.40}")
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
    return tuple(_number(one, end=1 << 63) for one in value)


def _text(name: str) -> str:
    """Whoever took the namer over may send anything."""
    return sys.intern(masked(name))


def _texts(value: Any) -> tuple[str, ...]:
    return _one_of(tuple(map(_text, value)))


_ANSWERS: dict[str, type[Answer]] = {"lock": LockAnswer, "owners": OwnersAnswer, "go": GoWaitsAnswer}
# Thousands of locks are waited for in the same functions, and stacks: one of each is enough.
_BY_TYPE: dict[str, Callable[[Any], Any]] = {
    "int": _number, "bool": _flag, "str": _text, "tuple[int, ...]": _numbers, "tuple[str, ...]": _texts
}  # fmt: skip
_READERS = {
    kind: tuple((field.name, _BY_TYPE[str(field.type)]) for field in fields(kind))
    for kind in _ANSWERS.values()
}


@functools.lru_cache(STACKS)
def _one_of(stack: tuple[str, ...]) -> tuple[str, ...]:
    """The same for all that are equal."""
    return stack


def _capture(fields: dict[str, Any], stack: bytes) -> Capture:
    return Capture(tuple(fields["registers"]), stack, tuple(fields["frames"]), fields["thread_pointer"])


def _fields(what: Any, *without: str) -> dict[str, Any]:
    return {name: value for name, value in vars(what).items() if name not in without}


def _message(head: dict[str, Any], blob: bytes = b"") -> bytes:
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + blob
