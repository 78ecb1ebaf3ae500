"""What is locking code, by the names of its functions: the family of a lock, its kind, and where it is used.

Three sorts of functions are no answer to where a thread waits: the locking itself and its wrappers; a
runtime's own scheduling, which is the answer only if the stack has nothing else; and what every
thread of a language has in its stack, which never is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from lockd.names.locks.locking_functions import (
    COMMON,
    ENDS,
    FAMILIES,
    LOCKING,
    PARKED,
    PARKERS,
    POOLS,
    PYTHON,
    RUNTIMES,
    SERVICES,
    WRAPPERS,
)

LOCK, COND = "lock", "cond"

KINDS = {
    "mutex": LOCK, "rwlock": LOCK, "once": LOCK, "gil": LOCK, "monitor": LOCK, "internal": LOCK,
    "innodb": LOCK, "thread_lock": LOCK, "runtime": LOCK, "lwlock": LOCK, "synchronizer": LOCK,
    "cond": COND, "sem": COND, "barrier": COND, "latch": COND, "join": COND, "park": COND,
}  # fmt: skip
"""Families by the kind of wait: for another's critical section, or for others to do something.

`internal` are the C library's own locks, `innodb` the latches of MariaDB's pages and indexes, `thread_lock`
is Python's threading.Lock, `monitor` is Java's, `synchronizer` are the locks of java.util.concurrent,
`runtime` a lock of Go's runtime, `lwlock` PostgreSQL's.
"""

_PYTHON_OBJECT = re.compile(r"(?:lib)?python[23](?:\.\d+)?[dt]?(?:\.so.*)?$|python$")
_MUSL_OBJECT = re.compile(r"libc\.so$|ld-musl|libc\.musl")
_MUSL = re.compile(r"__timedwait\w*|__wait|__syscall_cp\w*")
_INNODB_SERVER = "mariadbd"
LATCH = "ssux_lock"
"""What most of InnoDB's latches are in its source."""
_C_LIBRARY = re.compile(r"(?:libc|libpthread|ld-linux.*|ld-musl.*|libc\.musl.*|ld)[-.].*")


@dataclass(frozen=True)
class Frame:
    """A function of a stack. `function` is empty if it has no name; `label` says what is known of it."""

    object: str
    function: str
    label: str
    start: int = 0
    """Where it begins in memory, if it has a name in an object's file."""
    offset: int = 0
    """Where in it the stack goes on, if that is so."""


@dataclass(frozen=True)
class Judgement:
    """`family` and `kind` are empty if the stack does not tell; `implementation` is like `glibc rwlock`."""

    family: str
    kind: str
    site: str
    implementation: str
    object: str
    """What the function is in that tells the family."""
    is_parked: bool
    """Whether the thread sleeps on a word of its own, which is no part of the lock."""
    service: str = ""
    """The name of all locks of this sort, where they are the C library's own."""


def judge(stack: Sequence[Frame], value: int = 0) -> Judgement:
    """By the frames of a blocked thread, innermost first, and the value that it found in the lock's word.

    The outermost of the locking functions decides: a condition variable that a GIL is made of is a
    GIL. But a thread that has come back from a condition variable, and waits for the mutex, waits for a lock.
    """
    stack = _with_latch(stack, value)
    sorts = _sorts(stack)
    end = next((i for i, sort in enumerate(sorts) if sort not in ("locking", "stub")), len(stack))
    family = owner = implementation = ""
    is_musl = any(_MUSL_OBJECT.match(f.object) or _MUSL.fullmatch(f.function) for f in stack[:end])
    for frame in stack[:end]:
        found = family_of(frame.function)
        by_words = "" if found else _family_by_words(frame.function)
        if by_words and KINDS.get(family) != KINDS[by_words]:
            found = by_words  # a wrapper of a lock of the same kind knows no better than that
        if not implementation and found and frame.function.lstrip("_").startswith("pthread_"):
            implementation = ("musl " if is_musl else "glibc ") + found
        if found and _replaces(found, family):
            family, owner = found, frame.object
    is_parked = any(_matches(_PARKER, _plain(frame.function)) for frame in stack[:end])
    site = _site(stack, sorts, end)
    service = next((name for frame in stack[:end] if (name := _service(*_named(frame)))), "")
    family = family or ("internal" if service else "")
    return Judgement(family, KINDS.get(family, ""), site, implementation, owner, is_parked, service)


def _with_latch(stack: Sequence[Frame], value: int) -> Sequence[Frame]:
    """With a name for InnoDB's latches, the locks of its pages and indexes, in a MariaDB without symbols.

    Such a server makes futex calls of its own, not by way of the C library's locks, for two things alone: a
    latch, whose word is never 0 when a thread waits for it, and a semaphore, whose word always is.
    """
    if len(stack) < 2 or not value or stack[0].function != "syscall":
        return stack
    maker = stack[1]
    if maker.function or maker.object != _INNODB_SERVER:
        return stack
    return [stack[0], replace(maker, function=LATCH), *stack[2:]]


def _replaces(outer: str, inner: str) -> bool:
    """Whether it is the family of the two. Java's semaphores wait as its locks do."""
    is_semaphore = inner == "synchronizer" and outer in ("sem", "latch")
    return is_semaphore or not (KINDS.get(inner) == LOCK and KINDS[outer] == COND)


def _site(stack: Sequence[Frame], sorts: Sequence[str], end: int) -> str:
    """The first function of none of the three sorts; else the least common of what there is.

    Instead of one without a name a place in the function of the same object that called it, if that has one.
    """
    inner, rest = zip(stack[:end], sorts, strict=False), list(zip(stack[end:], sorts[end:], strict=True))
    locking = [frame for frame, sort in inner if frame.function and sort == "locking"][::-1]
    candidates = [
        *(frame for frame, sort in rest if not sort),
        *(frame for frame, sort in rest if sort == "runtime"),
        *(frame for frame in locking if not _C_LIBRARY.match(frame.object)),
        *(frame for frame, _ in rest if frame.function and not _C_LIBRARY.match(frame.object)),
        *locking,
    ]
    if not candidates:
        return ""
    site = candidates[0]
    at = next(i for i, frame in enumerate(stack) if frame is site)
    if site.function or at + 1 == len(stack) or sorts[at + 1]:
        return site.label
    caller = stack[at + 1]
    is_of_caller = caller.function and caller.offset and caller.object == site.object
    return f"{caller.label}+{caller.offset:#x}" if is_of_caller else site.label


def _sorts(stack: Sequence[Frame]) -> list[str]:
    """locking, runtime, common or, for a function that may be a site, empty; of each frame.

    A nameless function between locking functions of one object is locking too, as is one of the C library,
    which further out is never a site: the exported function around it is.
    In HotSpot there are stubs as well, which Java is left by, and its interpreter: locking goes on beyond.
    """
    sorts: list[str] = []
    is_java = False
    is_hotspot = any(frame.object == "libjvm.so" for frame in stack)
    for i, frame in enumerate(stack):
        sort = _sort(frame.object, frame.function)
        is_java |= frame.object == "[jit]"
        if is_hotspot and frame.object == "[jit]" and not re.search(r"\.|::", frame.function):
            sort = "stub"
        elif is_java and frame.object == "libjvm.so":
            sort = "common"  # it has called what was compiled, and is in every thread
        if not frame.function and all(s == "locking" for s in sorts):
            outer = next((other for other in stack[i + 1 :] if other.function), None)
            is_inside = outer and outer.object == frame.object and _sort(*_named(outer)) == "locking"
            sort = "locking" if is_inside or _C_LIBRARY.match(frame.object) else sort
        if not frame.function and not sort and _C_LIBRARY.match(frame.object):
            sort = "common"  # it starts threads, or serves a function of the library that has a name
        sorts.append(sort)
    return sorts


def _named(frame: Frame) -> tuple[str, str]:
    return frame.object, frame.function


@functools.lru_cache(4096)
def _sort(object_name: str, function: str) -> str:
    name = _plain(function)
    if _matches(_LOCKING, name) or _family_by_words(function) or _service(object_name, function):
        return "locking"
    if _PYTHON_OBJECT.match(object_name) and (not name or _PYTHON_COMMON.fullmatch(name)):
        return "common"
    if _matches(_COMMON_CODE, name) or (object_name in ("[jit]", "[vdso]", "") and not name):
        return "common"
    return "runtime" if _matches(_RUNTIME, name) or (object_name == "libjvm.so" and not name) else ""


@functools.lru_cache(4096)
def family_of(function: str) -> str:
    """Empty if the name says nothing of one."""
    name = _plain(function)
    return next((family for family, pattern in _BY_FAMILY.items() if name and pattern.fullmatch(name)), "")


@functools.lru_cache(4096)
def _family_by_words(function: str) -> str:
    """The same for a function that is known only by what it is called."""
    name = _plain(function)
    return next((family for family, pattern in _BY_WORDS.items() if pattern.fullmatch(name)), "")


def _service(object_name: str, function: str) -> str:
    """The name of the locks that a function of the C library takes for itself, as malloc() does."""
    if not function or not _C_LIBRARY.fullmatch(object_name):
        return ""
    found = (service for service, pattern in _SERVICES.items() if pattern.fullmatch(function))
    return next((f"{object_name}:{service}" for service in found), "")


def is_of_c_library(object_name: str) -> bool:
    """Its dynamic linker and its threads included."""
    return _C_LIBRARY.fullmatch(object_name) is not None


def is_pool(variable: str) -> bool:
    """Whether a variable serves many locks."""
    return _POOL.fullmatch(variable) is not None


def parks(lock: str, patterns: Sequence[str]) -> bool:
    """Whether threads park on the lock of this name; `patterns` are those of locks besides the known.

    Of a lock that is a part of a variable, they may leave out which.
    """
    names = lock, re.sub(r"(:.*)\+0x[0-9a-f]+$", r"\1", lock)
    return any(fnmatchcase(name, pattern) for name in names for pattern in (*PARKED, *patterns))


def is_end(function: str) -> bool:
    """Whether what a stack has beyond a function is not part of it."""
    return _END.fullmatch(function) is not None


def _plain(function: str) -> str:
    """Without templates' arguments and inline namespaces, but for Rust's `<T as Trait>::f`."""
    name = re.sub(r"::(?:__1|__cxx11|_V2|__ndk1|lts_\w+|debian\d+)\b", "", function)
    if name.startswith("<"):
        return name
    while (shorter := re.sub(r"(?<!operator)<[^<>]*>", "", name)) != name:
        name = shorter
    return name


def _matches(pattern: re.Pattern[str], name: str) -> bool:
    return bool(name) and pattern.fullmatch(name) is not None


def _any(*texts: str) -> re.Pattern[str]:
    words = " ".join(texts).replace("%", "<*&*(?:std|core|alloc)::").split()
    return re.compile("|".join(f"(?:{word})" for word in words), re.S)


_BY_FAMILY = {family: _any(text) for family, text in FAMILIES.items()}
_BY_WORDS = {family: _any(text) for family, text in WRAPPERS.items()}
_LOCKING = _any(LOCKING, *FAMILIES.values())
_SERVICES = {service: _any(text) for service, text in SERVICES.items()}
_RUNTIME = _any(RUNTIMES)
_COMMON_CODE = _any(COMMON)
_PARKER = _any(PARKERS)
_POOL = _any(POOLS)
_END = _any(ENDS)
_PYTHON_COMMON = _any(PYTHON)
"""In the interpreter's own object."""
