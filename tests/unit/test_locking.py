"""Families, kinds and sites by the names of functions: stacks as they were seen in real programs."""

from __future__ import annotations

import pytest

from lockd.names.locking import KINDS, Frame, family_of, is_end, is_pool, judge
from lockd.names.locking_functions import FAMILIES

THREAD = "libc.so.6:start_thread libc.so.6:clone3"
WAIT = "libc.so.6:__futex_abstimed_wait_common libc.so.6:"


def frames(text: str) -> list[Frame]:
    """`object:function` or, for one without a name, `object+0x1`; spaces inside are written as ~."""
    made = []
    for word in text.replace("THREAD", THREAD).replace("WAIT ", WAIT).split():
        label = word.replace("~", " ")
        object_name, _, function = label.partition(":")
        made.append(Frame(object_name.partition("+")[0], function, label))
    return made


CASES = """
mutex lock app:take: libc.so.6:__lll_lock_wait libc.so.6:pthread_mutex_lock app:take THREAD
rwlock lock app:get: WAIT pthread_rwlock_rdlock libstdc++.so.6:std::shared_mutex::lock_shared app:get
cond cond app:pop: WAIT pthread_cond_wait app:std::unique_lock<std::mutex>::lock app:pop
mutex lock app:pop: libc.so.6:__lll_lock_wait libc.so.6:__pthread_mutex_cond_lock
    libc.so.6:pthread_cond_wait app:pop
internal lock libc.so.6:malloc: libc.so.6:__lll_lock_wait_private libc.so.6:malloc app:make
mutex lock app:take: libc.so.6+0x1 libc.so.6:pthread_mutex_lock app:take
- - app:take: libc.so.6+0x1 app:take
gil lock _ssl.so:read: WAIT pthread_cond_timedwait python3.11:take_gil python3.11:PyEval_RestoreThread
    _ssl.so:read
gil lock python3.11:PyEval_RestoreThread: WAIT pthread_cond_timedwait python3.11+0x1
    python3.11:PyEval_RestoreThread python3.11:_PyEval_EvalFrameDefault python3.11:Py_BytesMain
    libc.so.6:__libc_start_call_main
thread_lock lock python3.11:PyThread_acquire_lock_timed: WAIT sem_clockwait
    python3.11:PyThread_acquire_lock_timed python3.11:_PyEval_EvalFrameDefault
runtime lock app:main.worker: app:runtime.futex app:runtime.futexsleep app:runtime.lock2
    app:runtime.mallocgc app:main.worker
park cond app:runtime.stopm: app:runtime.futex app:runtime.futexsleep app:runtime.notesleep
    app:runtime.stopm app:runtime.findRunnable
monitor lock libjvm.so:InterpreterRuntime::monitorenter: WAIT pthread_cond_wait
    libjvm.so:os::PlatformEvent::park libjvm.so:ObjectMonitor::EnterI libjvm.so:ObjectMonitor::enter
    libjvm.so:InterpreterRuntime::monitorenter [jit] libjvm.so:JavaCalls::call_helper
cond cond [jit]:LShop;::wait: WAIT pthread_cond_wait libjvm.so:ObjectMonitor::wait
    libjvm.so:JVM_MonitorWait [jit]:Interpreter [jit]:LShop;::wait
mutex lock app:shop::add: libc.so.6:syscall app:std::sys::sync::mutex::futex::Mutex::lock_contended
    app:shop::add
mutex lock app:shop::add: libc.so.6:syscall app:std::sys::unix::locks::futex::Mutex::lock_contended
    app:shop::add
mutex lock app:shop::add: libc.so.6:syscall
    app:<parking_lot_core::thread_parker::imp::ThreadParker~as~X>::park
    app:parking_lot::raw_mutex::RawMutex::lock_slow app:shop::add
cond cond app:shop::wait: libc.so.6:syscall app:parking_lot_core::parking_lot::park
    app:parking_lot::condvar::Condvar::wait_until_internal app:shop::wait
mutex lock app:serve: app:absl::lts_20230802::synchronization_internal::FutexWaiter::Wait
    app:AbslInternalPerThreadSemWait_lts_20230802 app:absl::lts_20230802::Mutex::Block
    app:absl::lts_20230802::Mutex::LockSlow app:serve
lwlock lock postgres:ReadBuffer: libc.so.6:do_futex_wait postgres:PGSemaphoreLock postgres:LWLockAcquire
    postgres:ReadBuffer
- - app+0x1: app+0x1 app+0x2
mutex lock libc.so.6:pthread_mutex_lock: libc.so.6:pthread_mutex_lock THREAD
"""
"""Family, kind and site, then the stack: `-` for what is not told."""


def cases() -> list[list[str]]:
    return [line.split() for line in CASES.replace("\n    ", " ").strip().split("\n")]


@pytest.mark.parametrize("case", cases(), ids=" ".join)
def test_judgements(case: list[str]) -> None:
    family, kind, site, *stack = case
    found = judge(frames(" ".join(stack)))
    assert (found.family or "-", found.kind or "-", found.site + ":") == (family, kind, site)


def test_an_empty_stack() -> None:
    assert (judge([]).family, judge([]).kind, judge([]).site) == ("", "", "")


def test_the_implementation_is_told_for_the_place_of_the_word_in_the_lock() -> None:
    assert judge(frames("WAIT pthread_rwlock_rdlock app:get")).implementation == "glibc rwlock"
    assert judge(frames("app:__timedwait app:pthread_mutex_timedlock app:get")).implementation == "musl mutex"
    assert (
        judge(frames("libc.so.6:syscall app:std::sys::sync::rwlock::futex::RwLock::read")).implementation
        == ""
    )


@pytest.mark.parametrize(
    "name", ["main", "lock_the_door", "shop::Mutexes", "my_function", "std::sort", "Registry::add"]
)
def test_what_is_not_locking(name: str) -> None:
    assert family_of(name) == ""
    assert judge([Frame("app", name, f"app:{name}")]).site == f"app:{name}"


def test_every_family_has_a_kind() -> None:
    assert FAMILIES.keys() == KINDS.keys()


def test_what_is_shared_or_left() -> None:
    assert is_pool("std::__detail::__waiter_pool_base::_S_for(void const*)::__w")
    assert not is_pool("registry_mutex")
    assert is_end("runtime.mcall")
    assert not is_end("runtime.schedule")
