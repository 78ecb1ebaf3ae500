"""Locking code, known by the names of its functions: a lock's family and kind, and the site that waits for
it.

The stack of a blocked thread begins with the code that locks and ends with what every thread runs. Three
sorts of functions are a bad answer to the question where a thread waits: locking code with its wrappers; the
scheduling of a language's runtime; and functions that every thread of a language has in its stack. One of
these is the site only if the stack has nothing better, see _site().

The tables of functions in the second half of this module are regular expressions, separated by white space.
Each expression matches a whole name: demangled, without parameters, template arguments and inline namespaces,
and with `Type::f` for a method of Rust that newer symbols call `<Type>::f`.
`%` stands for the beginning of a name in Rust's own libraries.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from lockd.names.objects.jit import JIT_OBJECT

UNKNOWN = "[unknown]"
"""A frame at an address in no known mapping, as in a process that ended before its mappings were read."""
LOCK, COND = "lock", "cond"
"""Kinds of waits: for another thread to leave a critical section, and for other threads to do something."""

KINDS = {
    "mutex": LOCK, "rwlock": LOCK, "once": LOCK, "gil": LOCK, "monitor": LOCK, "internal": LOCK,
    "innodb": LOCK, "thread_lock": LOCK, "runtime": LOCK, "lwlock": LOCK, "synchronizer": LOCK,
    "cond": COND, "sem": COND, "barrier": COND, "latch": COND, "join": COND, "park": COND,
}  # fmt: skip
"""The kind of each family of locks.

`internal` are the C library's own locks, `innodb` the latches of MariaDB's pages and indexes, `thread_lock`
is Python's threading.Lock, `monitor` is Java's, `synchronizer` are the locks of java.util.concurrent,
`runtime` a lock of Go's runtime, `lwlock` PostgreSQL's.
"""

LATCH = "ssux_lock"
"""The class of most latches in InnoDB's source. Latches of a server without symbols get this name."""

_PYTHON_OBJECT = re.compile(r"(?:lib)?python[23](?:\.\d+)?[dt]?(?:\.so.*)?$|python$")
_JVM = "libjvm.so"
_MUSL_OBJECT = re.compile(r"libc\.so$|ld-musl|libc\.musl")
_MUSL = re.compile(r"__timedwait\w*|__wait|__syscall_cp\w*")
_INNODB_SERVER = "mariadbd"
_C_LIBRARY = re.compile(r"(?:libc|libpthread|ld-linux.*|ld-musl.*|libc\.musl.*|ld)[-.].*")


@dataclass(frozen=True)
class Frame:
    """One function in the stack of a thread."""

    object: str
    """The object file's name without directory; `[jit]` for code compiled at run time; empty if unknown."""
    function: str
    """The function's demangled name; empty if it has none."""
    label: str
    """The text to show: `object:function`, or `object+0xoffset` for a function without a name."""
    start: int = 0
    """The address of the function's first instruction; 0 unless an object file's symbol names it."""
    offset: int = 0
    """Bytes from `start` to the instruction at which the function will continue; 0 where `start` is 0."""

    @property
    def name(self) -> str:
        """The function as profiles show it: its name without the object, or the label if it has no name.

        A function without a name and without an object is UNKNOWN.
        """
        return self.function or (self.label if self.object else UNKNOWN)


LONGEST_NAME = 256
"""Characters of the longest function name that is judged. Demangled names have at most half as many
(demangle.py).

Only symbols that were made up are longer. The time that patterns take grows with the square of the length.
"""


@dataclass(frozen=True)
class Judgement:
    """What the stack of a blocked thread says about the lock that it waits for."""

    family: str
    """A key of KINDS; empty if the stack does not show it."""
    kind: str
    """LOCK or COND; empty if the family is unknown."""
    site: str
    """The label of the frame that waits for the lock; empty if there is none."""
    implementation: str
    """C library and family, such as `glibc rwlock`; empty without a function of POSIX threads."""
    object: str
    """The object file of the function that shows the family."""
    is_parked: bool
    """Whether the thread sleeps on a word of its own, which is not part of the lock."""
    service: str = ""
    """The common name of the locks of a service of the C library, such as `libc.so.6:malloc`; or empty."""


def judge(stack: Sequence[Frame], value: int = 0) -> Judgement:
    """Judge the lock that a blocked thread waits for.

    `stack` is innermost first; `value` is what the thread found in the lock's word, 0 if unknown. The
    outermost locking function decides: a wait for the condition variable of a GIL is a wait for the GIL. But
    a thread that is in the function of a condition variable, and waits there for a mutex, waits for a lock.
    """
    stack = _name_latch(stack, value)
    sorts = _classify(stack)
    end = next((i for i, sort in enumerate(sorts) if sort not in ("locking", "stub")), len(stack))
    family = owner = implementation = ""
    is_musl = any(_MUSL_OBJECT.match(f.object) or _MUSL.fullmatch(f.function) for f in stack[:end])
    for frame in stack[:end]:
        known = family_of(frame.function, frame.object)
        wrapped = "" if known else _family_of_wrapper(frame.function)
        if wrapped and KINDS.get(family) != KINDS[wrapped]:
            known = wrapped  # otherwise the inner function, of the same kind, tells the family better
        if not implementation and known and frame.function.lstrip("_").startswith("pthread_"):
            implementation = ("musl " if is_musl else "glibc ") + known
        if known and _replaces(known, family):
            family, owner = known, frame.object
    is_parked = any(_matches(_PARKER, _plain(frame.function)) for frame in stack[:end])
    site = _site(stack, sorts, end)
    service = next((name for f in stack[:end] if (name := _service(f.object, f.function))), "")
    family = family or ("internal" if service else "")
    return Judgement(family, KINDS.get(family, ""), site, implementation, owner, is_parked, service)


def releasing_site(stack: Sequence[Frame]) -> str:
    """The label of the frame that releases a lock, given the stack of the thread that does, innermost first.

    It is the first frame outside the code that unlocks, as the site of a wait is the first one outside the
    code that locks. Empty if there is none.
    """
    sorts = _classify(stack)
    end = 0
    while end < len(stack) and (
        sorts[end] in ("locking", "stub") or _matches(_RELEASING, _plain(stack[end].function))
    ):
        end += 1
    return _site(stack, ["locking"] * end + sorts[end:], end)


def _name_latch(stack: Sequence[Frame], value: int) -> Sequence[Frame]:
    """The stack, with the name LATCH for MariaDB's function that waits for a latch and has no name.

    The server calls futex(2) itself, not through the C library's locks, for two things only: a latch, whose
    word is never 0 when a thread waits for it, and a semaphore, whose word is then always 0.
    """
    if len(stack) < 2 or not value or stack[0].function != "syscall":
        return stack
    caller = stack[1]
    if caller.function or caller.object != _INNODB_SERVER:
        return stack
    return [stack[0], replace(caller, function=LATCH), *stack[2:]]


def _replaces(outer: str, inner: str) -> bool:
    """Whether the family of an outer function replaces that of an inner one.

    A lock inside a condition variable stays a lock. Java's semaphores are built from the class of its locks.
    """
    is_semaphore = inner == "synchronizer" and outer in ("sem", "latch")
    return is_semaphore or not (KINDS.get(inner) == LOCK and KINDS[outer] == COND)


def _site(stack: Sequence[Frame], sorts: Sequence[str], end: int) -> str:
    """The label of the first frame that does more than locking; else of the most telling frame that exists.

    `stack[:end]` is the locking code. If the site's function has no name, but its caller in the same object
    has one, the site is the place in the caller.
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
    index = next(i for i, frame in enumerate(stack) if frame is site)
    if site.function or index + 1 == len(stack) or sorts[index + 1]:
        return site.label
    caller = stack[index + 1]
    is_of_caller = caller.function and caller.offset and caller.object == site.object
    return f"{caller.label}+{caller.offset:#x}" if is_of_caller else site.label


def _classify(stack: Sequence[Frame]) -> list[str]:
    """The sort of each frame: locking, runtime, common, stub, or empty for a function that may be a site.

    A nameless function between locking functions of the same object is locking code, too. So is a nameless
    function of the C library on top of the stack. A nameless function of the C library further out is never
    a site, but the exported function around it is. Stubs exist only in HotSpot: Java code calls the functions
    of libjvm.so through them. Stubs and the interpreter do not end the locking code.
    """
    sorts: list[str] = []
    is_java = False
    is_hotspot = any(frame.object == _JVM for frame in stack)
    for i, frame in enumerate(stack):
        sort = _sort(frame.object, frame.function)
        is_java |= frame.object == JIT_OBJECT
        if is_hotspot and frame.object == JIT_OBJECT and not re.search(r"\.|::", frame.function):
            sort = "stub"
        elif is_java and frame.object == _JVM:
            sort = "common"  # libjvm.so calls Java code by this function: every Java thread has it
        if not frame.function and all(s == "locking" for s in sorts):
            outer = next((other for other in stack[i + 1 :] if other.function), None)
            is_same_object = outer is not None and outer.object == frame.object
            is_inside = outer and is_same_object and _sort(outer.object, outer.function) == "locking"
            sort = "locking" if is_inside or _C_LIBRARY.match(frame.object) else sort
        if not frame.function and not sort and _C_LIBRARY.match(frame.object):
            sort = "common"  # the function starts threads, or serves a function that has a name
        sorts.append(sort)
    return sorts


@functools.lru_cache(4096)
def _sort(object_name: str, function: str) -> str:
    name = _plain(function)
    if _matches(_LOCKING, name) or _family_of_wrapper(function) or _service(object_name, function):
        return "locking"
    if object_name == _JVM and _matches(_HOTSPOT, name):
        return "locking"
    if _PYTHON_OBJECT.match(object_name) and (not name or _PYTHON_COMMON.fullmatch(name)):
        return "common"
    if _matches(_COMMON_CODE, name) or (object_name in (JIT_OBJECT, "[vdso]", "") and not name):
        return "common"
    return "runtime" if _matches(_RUNTIME, name) or (object_name == _JVM and not name) else ""


@functools.lru_cache(4096)
def family_of(function: str, object_name: str = "") -> str:
    """The family of locks that a function belongs to by FAMILIES; empty if it belongs to none.

    `object_name` is the function's object file. `lock_acquire` is a lock of Python only in Python.
    """
    name = _plain(function)
    family = next((family for family, pattern in _BY_FAMILY.items() if name and pattern.fullmatch(name)), "")
    is_elsewhere = "PyThread" not in name and not _PYTHON_OBJECT.match(object_name)
    return "" if family == "thread_lock" and is_elsewhere else family


@functools.lru_cache(4096)
def _family_of_wrapper(function: str) -> str:
    """The family of locks that a function of a program wraps, judged by WRAPPERS; empty if it wraps none."""
    name = _plain(function)
    return next((family for family, pattern in _BY_WRAPPER.items() if pattern.fullmatch(name)), "")


def _service(object_name: str, function: str) -> str:
    """The name of the locks that a function of the C library takes for itself, such as `libc.so.6:malloc`."""
    if not function or not _C_LIBRARY.fullmatch(object_name):
        return ""
    names = (service for service, pattern in _SERVICES.items() if pattern.fullmatch(function))
    return next((f"{object_name}:{service}" for service in names), "")


def is_of_c_library(object_name: str) -> bool:
    """Whether an object file is the C library, its dynamic linker or its threads library."""
    return _C_LIBRARY.fullmatch(object_name) is not None


def is_pool(variable: str) -> bool:
    """Whether a variable serves many locks, so that its name names none of them."""
    return _POOL.fullmatch(variable) is not None


def is_parked_on(lock: str, patterns: Sequence[str]) -> bool:
    """Whether idle threads park on a lock: its name matches a shell pattern of PARKED or of `patterns`.

    A pattern that is equal to a name stands for that name: brackets are special in patterns, so that the
    pattern `[java]:com.shop.Gate` does not match itself. A pattern also matches a name that has an offset
    behind it, such as `+0x18`.
    """
    names = lock, re.sub(r"(:.*)\+0x[0-9a-f]+$", r"\1", lock)
    return any(
        name == pattern or fnmatchcase(name, pattern) for name in names for pattern in (*PARKED, *patterns)
    )


def is_end(function: str) -> bool:
    """Whether a stack ends with this function: the frames beyond it belong to other code."""
    return _END.fullmatch(function) is not None


def _plain(function: str) -> str:
    """A name without template arguments and inline namespaces; Rust's `<T as Trait>::f` is not changed.

    Rust's newer symbols have `<Type>::f` and `f::<T>` where older ones have `Type::f` and `f`. The result has
    the older form. It is empty for a name with more than LONGEST_NAME characters.
    """
    if len(function) > LONGEST_NAME:
        return ""
    name = re.sub(r"::(?:__1|__cxx11|_V2|__ndk1|lts_\w+|debian\d+)\b", "", function)
    has_type = name.startswith("<")
    plain = name[has_type:]
    while (shorter := re.sub(r"(?:::)?(?<!operator)<(?:->|[^<>])*>", "", plain)) != plain:
        plain = shorter
    if not has_type:
        return plain
    method, ends = re.subn(r"(?<!-)>", "", plain, count=1)
    is_of_trait_or_cut_off = " as " in plain or not ends
    return name if is_of_trait_or_cut_off else method


def _matches(pattern: re.Pattern[str], name: str) -> bool:
    return bool(name) and pattern.fullmatch(name) is not None


def _any(*tables: str) -> re.Pattern[str]:
    """One pattern for all expressions of these tables."""
    expressions = " ".join(tables).replace("%", "<*&*(?:std|core|alloc)::").split()
    return re.compile("|".join(f"(?:{expression})" for expression in expressions), re.S)


FAMILIES = {
    "mutex": r"""
        _*(?:GI__*)?(?:pthread_mutex|pthread_spin|mtx)_(?:\w*lock\w*)
        _*(?:py|g|apr_thread|uv|my|psi|safe)_mutex_\w+ inline_mysql_mutex_\w+
        __gthread_(?:recursive_)?mutex_\w+ g_(?:rec_)?mutex_lock\w*
        std::(?:__mutex_base|(?:recursive_)?(?:timed_)?mutex|__timed_mutex_impl\w*)::\w+
        %sync::(?:poison::)?(?:mutex|reentrant_lock|remutex)\b.*
        %sys(?:_common)?\b.*::(?:futex_mutex|futex::Mutex|mutex|remutex|reentrant_lock)\b.*
        std::(?:sys_common|sys)::mutex.* <*parking_lot::(?:raw_)?(?:fair_)?(?:re)?mutex\b.*
        <*lock_api::(?:re)?mutex\b.*
        absl::base_internal::SpinLock\b.* absl::SpinLockHolder.*
        absl::Mutex::(?:Lock|lock|TryLock|ReaderLock|LockSlow|UnlockSlow)\w*
        absl::(?:Reader|Writer)?MutexLock.* SpinLock::.* (?:je_)?malloc_mutex_lock\w*
        gomp_mutex_lock\w*
        folly::(?:\w*::)*(?:MicroLock|MicroSpinLock|DistributedMutex|Synchronized|LockedPtr)\w*::.*
        tbb::(?:\w+::)*\w*mutex\w*::.*
        boost::(?:\w+::)*(?:recursive_|timed_|try_|interprocess_)*mutex\w*::.*
        boost::(?:\w+::)*(?:unique_lock|lock_guard|scoped_lock)\w*::.*
        Q(?:Basic|Recursive)?Mutex(?:Private|Locker)?::.* CRYPTO_THREAD_(?:write_|read_)?lock\w*
        rb_native_mutex_lock (?:(?:os::)?Platform)?Mutex(?:Locker)?::(?:~?\w*[lL]ock\w*)
        v8::base::(?:Recursive)?Mutex\w*::.* PyMutex_\w+ _PyMutex_\w+ TTASEventMutex.* PolicyMutex.*
        srw_mutex\w*.* pthread_mutex_wrapper.* sync\.\(\*Mutex\)\..* internal/sync\..*
        ethr_mutex_lock\w* WTF::(?:Lock|WordLock|ParkingLot)\w*::.*
    """,
    "rwlock": r"""
        _*(?:GI__*)?pthread_rwlock_\w+ (?:g|uv|my|psi|apr_thread)_(?:rw_?lock)_\w+ psi_rwlock_\w+
        inline_mysql_\w*rwlock_\w+
        std::(?:__shared_\w*mutex\w*|shared_(?:timed_)?mutex|shared_lock)::~?\w+
        std::__glibcxx_rwlock_\w+ %sync::(?:poison::)?rwlock\b.*
        %sys(?:_common)?\b.*::(?:futex_rwlock|rwlock)\b.* <*parking_lot::(?:raw_)?rwlock\b.*
        <*lock_api::rwlock\b.* folly::(?:\w*::)*SharedMutex\w*::.*
        boost::(?:\w+::)*(?:shared_mutex|shared_lock|upgrade_\w+)\w*::.*
        Q(?:ReadWriteLock|ReadLocker|WriteLocker)\w*::.*
        rw_lock_\w+ sync\.\(\*RWMutex\)\..*
    """,
    "innodb": r"""
        (?:ssux_lock\w*|srw_lock\w*|rw_lock|sux_lock|index_lock|block_lock|page_hash_latch)\b.*
    """,
    "once": r"""
        _*(?:pthread_once|call_once)\w* __cxa_guard_acquire std::(?:__)?call_once\w* __gthread_once
        g_once_\w+ %sync::(?:poison::)?(?:once|once_lock|lazy_lock)\b.*
        %sys(?:_common)?\b.*::once\b.* <*parking_lot::once\b.* <*once_cell::.*
        absl::(?:base_internal::CallOnceImpl|call_once)\b.* boost::call_once.*
    """,
    "gil": r"""
        take_gil drop_gil PyEval_(?:RestoreThread|AcquireThread|AcquireLock)
        _PyEval_(?:AcquireLock|RestoreThread) PyGILState_Ensure _PyThreadState_Attach gvl_acquire\w*
        thread_sched_to_running\w* rb_thread_sched\w*
    """,
    "thread_lock": r"""
        (?:rlock|lock|thread_PyThread)\w*_acquire\w* lock_PyThread_\w+ acquire_timed
        PyThread_acquire_lock\w* _?PyThread_(?:acquire|allocate)\w*
    """,
    "monitor": r"""
        ObjectMonitor::(?:enter\w*|EnterI|ReenterI|TrySpin\w*|reenter\w*)
        ObjectSynchronizer::(?:\w*enter\w*|inflate\w*) SharedRuntime::\w*monitor\w*
        InterpreterRuntime::monitorenter\w* Runtime1::monitorenter\w*
        LightweightSynchronizer::.*enter.* JVM_MonitorEnter jni_MonitorEnter
    """,
    "internal": r"""
        _*lll_lock\w* _*lll_timedlock\w* __lock __lll_lock_wait\w* flockfile _IO_flockfile
        __lockfile __malloc_fork_lock\w*
    """,
    "runtime": r"""
        runtime\.(?:lock|lock2|lockWithRank|lockWithRankMayAcquire)
    """,
    "lwlock": r"""
        LWLockAcquire\w* LWLockWaitForVar LWLockConditionalAcquire
    """,
    "synchronizer": r"""
        L?java[./]util[./]concurrent[./]locks[./](?!LockSupport|\S*(?:Condition|acquireShared))\S*
        L?java[./]util[./]concurrent[./]locks[./]Reentrant\S*
    """,
    "cond": r"""
        L?java[./]util[./]concurrent[./](?:locks[./]\S*Condition\w+|\w*Queue|\w*Deque|Phaser)\b\S*
        L?java[./]lang[./]Object(?:;::|\.)wait\S*
        _*(?:GI__*)?(?:pthread_cond|cnd|__pthread_cond)_\w+ ___pthread_cond_\w+
        (?:g|uv|apr_thread|my|psi|safe)_cond_\w+ inline_mysql_cond_\w+ __gthread_cond_\w+
        std::(?:condition_variable|condition_variable_any|_V2::condition_variable_any|__condvar)::.*
        std::(?:__basic_future|future|shared_future|__future_base)\b.*
        std::(?:__atomic_futex_unsigned\w*|(?:__)?atomic_wait\w*|__atomic_base)\b.*
        std::(?:__detail::__\w*wait\w*|__cxx_atomic\w*wait\w*)\b.*
        %sync::(?:poison::)?(?:condvar|mpsc|mpmc|barrier)\b.*
        %sys(?:_common)?\b.*::(?:futex_condvar|futex::Condvar|condvar)\b.* <*parking_lot::condvar\b.*
        absl::CondVar::.* absl::Mutex::(?:Await|LockWhen|ReaderLockWhen)\w* absl::Notification::.*
        absl::BlockingCounter::.* boost::(?:\w+::)*condition_variable\w*::.* QWaitCondition\w*::.*
        rb_native_cond_\w*wait ObjectMonitor::wait ObjectSynchronizer::wait\w* JVM_MonitorWait
        (?:os::)?PlatformMonitor::wait\w* v8::base::ConditionVariable::.*
        os_event::wait\w*
        os_event_wait\w* <*crossbeam_channel::.* <*crossbeam::channel::.* <*flume::.*
    """,
    "sem": r"""
        _*(?:new_)?sem_(?:wait|timedwait|clockwait|trywait|wait_common)\w* __new_sem_\w+
        do_futex_wait\w* uv_sem_\w+
        std::(?:counting_semaphore|__semaphore_\w+|__(?:platform|atomic)_semaphore\w*)::.*
        QSemaphore::.* (?:Posix)?Semaphore::wait\w* PosixSemaphore::.* v8::base::Semaphore::.*
        PGSemaphoreLock _PySemaphore_\w+ L?java[./]util[./]concurrent[./]Semaphore\b\S*
        L?java[./]util[./]concurrent[./]locks[./]AbstractQueued\S*acquireShared\S*
        folly::(?:\w*::)*(?:Baton|LifoSem|SaturatingSemaphore)\w*::.*
        boost::(?:\w+::)*\w*semaphore\w*::.*
    """,
    "barrier": r"""
        _*pthread_barrier_\w+ uv_barrier_\w+ std::(?:barrier|__tree_barrier\w*|__barrier_\w+)::.*
        gomp_(?:team_)?barrier_\w+ absl::Barrier::.* __kmp_\w*barrier\w* %sync::barrier\b.*
    """,
    "latch": r"""
        std::latch::.* <*rayon_core::latch\b.* boost::latch::.*
        L?java[./]util[./]concurrent[./]CountDownLatch\b\S*
    """,
    "join": r"""
        _*(?:pthread_\w*join\w*|thrd_join) __gthread_join std::(?:thread|jthread)::join
        uv_thread_join %thread::(?:join_handle::)?JoinHandle\b.* %thread::(?:lifecycle::)?JoinInner\b.*
        %thread::(?:scoped::)?scope\b.* %sys\b.*thread\b.*::join
    """,
    "park": r"""
        (?:os::)?Platform(?:Event|Monitor)::.* Parker::park Unsafe_Park
        ParkEvent::.* os::park\w* %thread::(?:current::|functions::)?park\w*
        %sys(?:_common)?\b.*(?:thread_park\w*|::Parker)\b.* %thread::(?:thread::)?Thread>?::park.*
        <*parking_lot_core::.* absl::Mutex::(?:Block|DecrementSynchSem)
        absl::synchronization_internal::.* AbslInternalPerThreadSem\w+ _PyParkingLot_Park
        <*tokio::runtime::(?:\w+::)*park\b.* <*rayon_core::sleep\b.* <*crossbeam_utils::sync::.*
        folly::(?:detail::)?(?:Futex|futex|parkingLot|ParkingLot)\w*.*
        runtime\.(?:notesleep|notetsleep\w*|semasleep|mPark|futexsleep)
        L?java[./]util[./]concurrent[./]locks[./]LockSupport\b\S*
        L?jdk[./]internal[./]misc[./]Unsafe(?:;::|\.)park\S* L?sun[./]misc[./]Unsafe(?:;::|\.)park\S*
    """,
}
"""By family of locks, the functions that only locks of this family have."""

WRAPPERS = {
    "rwlock": r"""
        \w+_(?:wrlock|rdlock) \w*rw_?lock_(?!\w*unlock)\w*(?:lock|acquire|enter)\w*
        (?:\w+::)*\w*(?:[Rr][Ww]_?[Ll]ock|RWMutex|[Ss]hared_?[Mm]utex)\w*::(?!\w*[Uu]nlock)\w*[Ll]ock\w*
    """,
    "mutex": r"""
        \w*(?:mutex|mtx|spin_?lock|critical_?section)_(?!\w*unlock)(?:\w+_)?(?:lock|enter|acquire)\w*
        (?:\w+::)*\w*(?:[Mm]utex|[Ss]pin_?[Ll]ock)\w*::(?!\w*[Uu]nlock)\w*(?:[Ll]ock|[Ee]nter|[Aa]cquire)\w*
        (?:\w+::)*(?P<of>\w*[Mm]utex\w*)::(?P=of)
    """,
    "cond": r"""
        (?:\w*_)?cond(?:ition|var)?_(?:timed|clock|rel|abs)?_?wait\w*
        (?:\w+::)*(?:(?:\w*_)?c|\w*C)ond(?:ition)?(?:_?[Vv]ar(?:iable)?)?::(?:[Tt]imed_?)?[Ww]ait\w*
    """,
    "sem": r"""
        (?:\w*_)?sem(?:aphore)?_(?:timed|clock)?_?(?:wait|down|acquire)\w*
        (?:\w+::)*\w*Semaphore::(?:\w*[Ww]ait\w*|[Aa]cquire\w*|[Dd]own)
    """,
}
"""By family of locks, the wrappers of unknown programs, recognised by words in their names.

Programs wrap the locks of the C library in functions and classes of their own. A name with a word for the
sort of lock and a word for how it is taken is a wrapper. `lock_accounts` and `Registry::lock` are not: they
are places where a thread waits.
"""

RELEASING = r"""
        (?:\w*_)?(?:mutex|mtx|rw_?lock|spin_?lock|critical_?section)_(?:\w+_)?(?:unlock|release|leave|exit)\w*
        (?:\w+_)?(?:wr|rd)unlock
        (?:\w+::)*\w*(?:[Mm]utex|[Ss]pin_?[Ll]ock|[Rr][Ww]_?[Ll]ock)\w*::\w*(?:[Uu]nlock|[Rr]elease|[Ee]xit)\w*
        (?:\w+::)*\w*(?:[Ll]ock(?:er)?|[Gg]uard)::~\w+
        %ptr::drop_in_place\b.* %mem::drop\b.* __wake __unlock __unlockfile funlockfile
        PyEval_(?:SaveThread|ReleaseThread|ReleaseLock) _?PyThreadState_Detach\w* detach_thread
        PyGILState_Release gvl_release\w* thread_sched_to_waiting\w* InterpreterRuntime::monitorexit\w*
        LightweightSynchronizer::.*exit.* v8::base::\w*Mutex\w*::Unlock
"""
"""Functions that release locks, besides those that lock and unlock (FAMILIES, LOCKING).

Wrappers of unknown programs are recognised by words in their names, as in WRAPPERS.
"""

SERVICES = {
    "malloc": r"""
        (?:__libc_|__)?(?:malloc|calloc|realloc|free|cfree|memalign|posix_memalign|aligned_alloc|valloc|pvalloc)
        reallocarray mallinfo2? mallopt malloc_(?:trim|stats|info|consolidate) sysmalloc systrim
        _int_(?:malloc|free|realloc|memalign)\S* _mid_memalign\S* arena_get\S* tcache_\w+ ptmalloc_init\S*
    """,
    "stdio": r"""
        (?:_IO_)?v?f?w?(?:printf|scanf) (?:__)?v?f?(?:printf|scanf)_chk __isoc\d\d_\w*scanf
        (?:_IO_)?f?(?:put|get)w?(?:c|s|char) (?:_IO_)?(?:getw|putw|getdelim|getline|ungetw?c|perror)
        (?:_IO_)?f(?:read|write|close|flush|seeko?|tello?|getpos|setpos)(?:64)? rewind
        fflush_all freopen(?:64)? setv?buf setbuffer setlinebuf clearerr feof ferror fileno
        _IO_\w+ _*f?lockfile _*flockfile
    """,
}
"""By service of the C library, the functions that take the library's own locks.

All locks of a service share one name. Otherwise a lock would be named after the function, the arena or the
file of the thread that happened to block first.
"""

PARKERS = r"""
        (?:os::)?PlatformEvent::park\w* (?:\w+::)*Parker::park %thread::(?:current::|functions::)?park\w*
        %sys(?:_common)?\b.*(?:thread_park\w*|::Parker)\b.* %thread::(?:thread::)?Thread>?::park.*
        <*parking_lot(?:_core)?::.* absl::synchronization_internal::.* AbslInternalPerThreadSem\w+
        absl::(?:Mutex|CondVar)::.* folly::(?:detail::)?(?:parkingLot|ParkingLot)\w*.*
        WTF::(?:Lock|WordLock|ParkingLot)\w*::.*
        runtime\.(?:notesleep|notetsleep\w*|mPark) _PyParkingLot_Park
"""
"""Functions in which a thread sleeps on a word of its own, whatever lock it waits for."""

LOCKING = r"""
        std::(?:lock_guard|unique_lock|scoped_lock)::~?\w+
        std::(?:lock|__detail::__lock_impl|__lock_first)
        (?:\w+::)*(?P<by>(?:[Ss]coped|[Aa]uto|[Uu]nique)_?[Ll]ock(?:er)?|[Ll]ock_?[Gg]uard)::(?P=by)
        operator.(?:new|delete)\S*
        syscall _*(?:GI_)?_*futex_\w+ __futex\w* __timedwait\w* __wait __syscall_cp\w* __syscall\w*
        __cp_begin __cp_end sccp __internal_syscall_cancel __syscall_cancel\w* lll_\w+ __lll_\w+
        __pthread_\w* __nptl_\w+ __tls_get_addr\w* std::__(?:invoke|atomic)\w*
        std::_Function_handler::_M_invoke std::function::operator\(\) __gthread_\w+
        __gnu_cxx::__\w+lock.* %(?:sys|sync|ops|cell|result|option|sys_common|time)\b.*
        <*lock_api::.* <*parking_lot::.* <*linux_futex::.* runtime\.(?:futex|futexsleep1)
        sync\.runtime_\w+ sync\.\(\*\w+\)\..* _?PyThread_\w+ _?PyParkingLot_\w+ PyCOND_\w+
        os::(?:Linux|Posix)::.* ThreadBlockInVM\w*::.* ThreadLockBlockInVM\w*::.*
        absl::base_internal::.* absl::Mutex::.* AbslInternal\w+ <*atomic_wait::.* <*psm::.*
        Mutex::.* MutexLocker::.* ObjectMonitor::.*
        ObjectSynchronizer::.* JavaThreadBlock\w*.* L?java[./]util[./]concurrent[./]\S*
"""
"""Locking code that several families have in common."""

HOTSPOT = r"""
        Monitor::.* MonitorLocker::.*
"""
"""Locking code only if in libjvm.so: other programs, such as ceph-mon, use these class names for anything."""

RUNTIMES = r"""
        runtime\.\w.* runtime/internal/.* internal/runtime/.* WaitEventSetWait\w* ProcSleep
        ProcWaitForSignal
"""
"""Functions by which Go's runtime and PostgreSQL schedule. One of them is the site only if no other function
of the stack can be."""

COMMON = r"""
        start_thread clone3? __clone3? __clone_internal _*libc_start_(?:main|call_main)\w* _start
        __thread_start execute_native_thread_routine std::thread::_(?:State_impl|Invoker).*
        std::__invoke\w* std::__thread_proxy std::(?:__)?(?:invoke|apply)\w* std::rt::.* %panic.*
        std::thread::Builder.* std::sys(?:_common)?::backtrace::.* %sys\b.*::thread_start __rust_\w+
        %boxed\b.* %panicking.*
        runtime\.(?:mcall|systemstack|goexit|mstart\d?|rt0_go|asmcgocall|morestack)
        _rt0_.* JavaCalls::.* JavaThread::.* Thread::call_run thread_entry thread_native_entry
        java_start call_stub Interpreter StubRoutines.* java_main ThreadJavaMain \[jit\]
        L?java[./]lang[./]Thread(?:;::|\.)run\S*
"""
"""Functions that every thread of a language has in its stack."""

PYTHON = r"""
        _?Py(?:Eval|Object|Vectorcall|Function|Run|Import|Module|Gen|Iter|Obj|Bytes|_|Cell|CFunction)\w*
        _?Py(?:Interpreter|Method|Sequence|Context)\w* \w*vectorcall\w* cfunction_\w+ method_\w+ run_mod
        run_eval_code_obj pymain_\w+ slot_\w+ type_call main thread_run pythread_wrapper \w*bootstrap\w*
        builtin_exec gen_\w+
"""
"""Functions in the stack of every thread of CPython, within the interpreter's own object file."""

POOLS = r"""
        std::__detail::__waiter_pool_base::_S_for.* std::__libcpp_atomic_wait.*contention.*
"""
"""Variables that many locks share by a hash of their addresses: such a variable names none of them."""

ENDS = r"""
        runtime\.(?:mcall|goschedImpl|gopreempt_m|preemptPark)
"""
"""Functions that end a stack: beyond them lies the stack of a goroutine that the thread has left."""

PARKED = {
    "*:io_threads_mutex": "Redis 6 and 7, Valkey and other forks, with `io-threads`",
}
"""Locks that idle threads park on, by shell patterns of their names, and the programs that have them.

The thread that hands out work holds such a lock until there is some. A thread that waits for the lock is
idle.
"""

_BY_FAMILY = {family: _any(table) for family, table in FAMILIES.items()}
_BY_WRAPPER = {family: _any(table) for family, table in WRAPPERS.items()}
_LOCKING = _any(LOCKING, *FAMILIES.values())
_SERVICES = {service: _any(table) for service, table in SERVICES.items()}
_RELEASING = _any(RELEASING)
_HOTSPOT = _any(HOTSPOT)
_RUNTIME = _any(RUNTIMES)
_COMMON_CODE = _any(COMMON)
_PARKER = _any(PARKERS)
_POOL = _any(POOLS)
_END = _any(ENDS)
_PYTHON_COMMON = _any(PYTHON)
