"""Families, kinds and sites of locks, told by the names of functions in stacks of real programs."""

from __future__ import annotations

import time

import pytest

from lockd.names.locks.locking_code import (
    FAMILIES,
    KINDS,
    LONGEST_NAME,
    Frame,
    family_of,
    is_end,
    is_parked_on,
    is_pool,
    judge,
    releasing_site,
)
from lockd.names.objects.demangle import shorten_name

THREAD = "libc.so.6:start_thread libc.so.6:clone3"
PARK = "WAIT pthread_cond_wait libjvm.so:Parker::park libjvm.so:Unsafe_Park"
AQS = "[jit]:java.util.concurrent.locks.AbstractQueuedSynchronizer"
WAIT = "libc.so.6:__futex_abstimed_wait_common libc.so.6:"


def frames(text: str) -> list[Frame]:
    """Return the frames of a text with a word for each: `object:function` or, for a function without a name,
    `object+0x1`. A ~ stands for a space."""
    made = []
    for short, full in (("THREAD", THREAD), ("PARK", PARK), ("WAIT ", WAIT), ("AQS", AQS)):
        text = text.replace(short, full)
    for word in text.split():
        label = word.replace("~", " ")
        object_name, _, function = label.partition(":")
        made.append(Frame(object_name.partition("+")[0], function, label))
    return made


CASES = """
mutex lock app:take: libc.so.6:__lll_lock_wait libc.so.6:pthread_mutex_lock app:take THREAD
mutex lock app:take: libc.so.6:__lll_lock_wait libc.so.6:pthread_mutex_lock app:lock_acquire app:take
thread_lock lock python3.11:rlock_acquire: libc.so.6:syscall python3.11:rlock_acquire python3.11:Py_BytesMain
cond cond libjvm.so:VMThread::run: WAIT pthread_cond_wait libjvm.so:PlatformMonitor::wait
    libjvm.so:Monitor::wait libjvm.so:VMThread::run
mutex lock ceph-mon:Monitor::handle_command: libc.so.6:pthread_mutex_lock ceph-mon:Monitor::handle_command
    ceph-mon:Monitor::dispatch
rwlock lock app:get: WAIT pthread_rwlock_rdlock libstdc++.so.6:std::shared_mutex::lock_shared app:get
cond cond app:pop: WAIT pthread_cond_wait app:std::unique_lock<std::mutex>::lock app:pop
mutex lock app:pop: libc.so.6:__lll_lock_wait libc.so.6:__pthread_mutex_cond_lock
    libc.so.6:pthread_cond_wait app:pop
internal lock app:make: libc.so.6:__lll_lock_wait_private libc.so.6:malloc app:make
internal lock app:make: libc.so.6+0x1 libc.so.6+0x2 libc.so.6:malloc libstdc++.so.6:operator~new app:make
internal lock app:say: libc.so.6+0x1 libc.so.6:_IO_puts app:say THREAD
mutex lock mariadbd:open_table: libc.so.6:__lll_lock_wait libc.so.6:pthread_mutex_lock
    mariadbd:psi_mutex_lock mariadbd:open_table
mutex lock mariadbd:MDL_map::find: libc.so.6:__lll_lock_wait libc.so.6:pthread_mutex_lock
    mariadbd:rw_pr_wrlock mariadbd:MDL_map::find
mutex lock rocks:DBImpl::Write: libc.so.6:pthread_mutex_lock rocks:rocksdb::port::Mutex::Lock
    rocks:rocksdb::MutexLock::MutexLock rocks:DBImpl::Write
rwlock lock app:find: libc.so.6+0x1 libc.so.6:pthread_rwlock_wrlock app:MyMutex::lock
    app:ScopedLock::ScopedLock app:find
cond cond rocks:WriteThread::Await: WAIT pthread_cond_wait rocks:rocksdb::port::CondVar::Wait
    rocks:WriteThread::Await
cond cond nginx:ngx_thread_pool_cycle: WAIT pthread_cond_wait nginx:ngx_thread_cond_wait
    nginx:ngx_thread_pool_cycle
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
monitor lock [jit]:Shop.add: WAIT pthread_cond_wait libjvm.so:os::PlatformEvent::park
    libjvm.so:ObjectMonitor::enter libjvm.so:SharedRuntime::complete_monitor_locking_C
    [jit]:_complete_monitor_locking_Java [jit]:Shop.add [jit]:Interpreter [jit]:StubRoutines~(1)
synchronizer lock [jit]:Shop.add: PARK [jit]:Interpreter [jit]:Interpreter
    [jit]:java.util.concurrent.locks.ReentrantLock$Sync.lock
    [jit]:java.util.concurrent.locks.ReentrantLock.lock [jit]:Shop.add
synchronizer lock [jit]:Shop.add: PARK [jit]:java.util.concurrent.locks.LockSupport.park AQS.acquire
    [jit]:Shop.add
synchronizer lock [jit]:Shop.add: PARK AQS.acquire AQS$ConditionObject.await
    [jit]:java.util.concurrent.LinkedBlockingQueue.take [jit]:Shop.add
synchronizer lock [jit]:Shop.get: PARK AQS.acquire AQS.acquireShared
    [jit]:java.util.concurrent.locks.ReentrantReadWriteLock$ReadLock.lock [jit]:Shop.get
cond cond [jit]:Shop.take: PARK AQS$ConditionNode.block
    [jit]:java.util.concurrent.ForkJoinPool.managedBlock AQS$ConditionObject.await
    [jit]:java.util.concurrent.LinkedBlockingQueue.take [jit]:Shop.take
sem cond [jit]:Shop.take: PARK AQS.acquire AQS.acquireSharedInterruptibly
    [jit]:java.util.concurrent.Semaphore.acquire [jit]:Shop.take
latch cond [jit]:Shop.open: PARK AQS.acquire AQS.acquireSharedInterruptibly
    [jit]:java.util.concurrent.CountDownLatch.await [jit]:Shop.open
park cond [jit]:java.util.concurrent.ThreadPoolExecutor$Worker.run: PARK
    [jit]:java.util.concurrent.locks.LockSupport.park
    [jit]:java.util.concurrent.ThreadPoolExecutor$Worker.run [jit]:java.lang.Thread.run
    [jit]:StubRoutines~(1) libjvm.so:JavaCalls::call_helper
park cond libjvm.so:Unsafe_Park: PARK [jit] [jit] [jit] libjvm.so:JavaCalls::call_helper
cond cond [jit]:Shop.take: WAIT pthread_cond_wait libjvm.so:ObjectMonitor::wait libjvm.so:JVM_MonitorWait
    [jit]:java.lang.Object.wait [jit]:java.lang.Object.wait [jit]:Shop.take
mutex lock app:shop::add: libc.so.6:syscall app:std::sys::sync::mutex::futex::Mutex::lock_contended
    app:shop::add
mutex lock app:shop::add: libc.so.6:syscall app:std::sys::unix::locks::futex::Mutex::lock_contended
    app:shop::add
mutex lock app:shop::add: libc.so.6:syscall
    app:<parking_lot_core::thread_parker::imp::ThreadParker~as~X>::park
    app:parking_lot::raw_mutex::RawMutex::lock_slow app:shop::add
rwlock lock app:shop::put: libc.so.6:syscall app:parking_lot_core::parking_lot::park::<X>
    app:<dashmap::lock::RawRwLock>::lock_exclusive_slow app:shop::put
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
"""Cases: family, kind and site, then the stack. `-` stands for what is not known."""


def cases() -> list[list[str]]:
    return [line.split() for line in CASES.replace("\n    ", " ").strip().split("\n")]


@pytest.mark.parametrize("case", cases(), ids=" ".join)
def test_judgements(case: list[str]) -> None:
    family, kind, site, *stack = case
    found = judge(frames(" ".join(stack)))
    assert (found.family or "-", found.kind or "-", found.site + ":") == (family, kind, site)


def test_a_function_without_a_name_is_a_place_in_the_named_one_that_called_it() -> None:
    wait = frames("libc.so.6:do_futex_wait postgres:PGSemaphoreLock")
    (static, other) = frames("postgres+0x45d8a0 libplugin.so+0x10")
    caller = Frame("postgres", "LockAcquireExtended", "postgres:LockAcquireExtended", 0x1000, 0x5A1)
    assert judge([*wait, static, caller]).site == "postgres:LockAcquireExtended+0x5a1"
    assert judge([*wait, static, static, caller]).site == static.label, "it may be anything in there"
    assert judge([*wait, other, caller]).site == other.label, "the caller is in another object"
    assert judge([*wait, caller, static]).site == caller.label
    assert judge([*wait, caller]).site == caller.label, "the outermost that is known"
    assert judge([*wait, static]).site == static.label


RUST = """
mutex std::sys::sync::mutex::futex::Mutex::lock_contended
    <std::sys::sync::mutex::futex::Mutex>::lock_contended
mutex std::sync::poison::mutex::Mutex<T>::lock <std::sync::poison::mutex::Mutex<alloc::vec::Vec<u8>>>::lock
mutex std::sync::reentrant_lock::ReentrantLock<T>::lock <std::sync::reentrant_lock::ReentrantLock<u8>>::lock
mutex parking_lot::raw_mutex::RawMutex::lock_slow <parking_lot::raw_mutex::RawMutex>::lock_slow
mutex lock_api::mutex::Mutex<R,T>::lock <lock_api::mutex::Mutex<parking_lot::raw_mutex::RawMutex,~u8>>::lock
mutex app::SpinLock<T>::lock <app::SpinLock<fn(u8)~->~u8>>::lock
mutex app::SpinLock<T>::lock_with <app::SpinLock<u8>>::lock_with::<app::sell::{closure#0}>
rwlock std::sys::sync::rwlock::futex::RwLock::read_contended
    <std::sys::sync::rwlock::futex::RwLock>::read_contended
rwlock lock_api::rwlock::RwLock<R,T>::write
    <lock_api::rwlock::RwLock<parking_lot::raw_rwlock::RawRwLock,~u8>>::write
rwlock parking_lot::raw_rwlock::RawRwLock::lock_shared_slow
    <parking_lot::raw_rwlock::RawRwLock>::lock_shared_slow
rwlock dashmap::lock::RawRwLock::lock_exclusive_slow <dashmap::lock::RawRwLock>::lock_exclusive_slow
once std::sync::once::Once::call_once <std::sync::once::Once>::call_once::<app::prepare>
once std::sys::sync::once::futex::Once::call <std::sys::sync::once::futex::Once>::call
once std::sync::lazy_lock::LazyLock<T,F>::force <std::sync::lazy_lock::LazyLock<u8,~fn()~->~u8>>::force
once parking_lot::once::Once::call_once_slow <parking_lot::once::Once>::call_once_slow
once once_cell::imp::OnceCell<T>::initialize
    <once_cell::imp::OnceCell<u8>>::initialize::<app::make,~app::Error>
cond std::sys::sync::condvar::futex::Condvar::wait <std::sys::sync::condvar::futex::Condvar>::wait
cond parking_lot::condvar::Condvar::wait_until_internal <parking_lot::condvar::Condvar>::wait_until_internal
cond std::sync::mpmc::list::Channel<T>::recv <std::sync::mpmc::list::Channel<app::Job>>::recv
cond std::sync::barrier::Barrier::wait <std::sync::barrier::Barrier>::wait
cond crossbeam_channel::channel::Receiver<T>::recv <crossbeam_channel::channel::Receiver<app::Job>>::recv
cond flume::Receiver<T>::recv <flume::Receiver<app::Job>>::recv
latch rayon_core::latch::LockLatch::wait_and_reset <rayon_core::latch::LockLatch>::wait_and_reset
join std::thread::JoinHandle<T>::join <std::thread::join_handle::JoinHandle<()>>::join
join std::thread::scoped::scope std::thread::scoped::scope::<app::run::{closure#0},~()>
park std::sys::sync::thread_parking::futex::Parker::park <std::sys::sync::thread_parking::futex::Parker>::park
park std::thread::thread::Thread::park <std::thread::thread::Thread>::park
park tokio::runtime::park::CachedParkThread::park <tokio::runtime::park::CachedParkThread>::park
park rayon_core::sleep::Sleep::sleep <rayon_core::sleep::Sleep>::sleep::<app::run>
park crossbeam_utils::sync::parker::Parker::park <crossbeam_utils::sync::parker::Parker>::park
"""
"""Cases: family, and a function as Rust's older and newer symbols name it. A ~ stands for a space."""


@pytest.mark.parametrize("case", RUST.strip().replace("\n    ", " ").split("\n"))
def test_older_and_newer_symbols_of_rust_are_alike(case: str) -> None:
    family, *spellings = case.split(" ")
    wait, caller = frames("libc.so.6:syscall"), frames("app:shop::put THREAD")
    older, newer = ([*wait, Frame("app", name.replace("~", " "), name), *caller] for name in spellings)
    assert (judge(older).family, judge(older).site) == (family, "app:shop::put")
    assert judge(newer) == judge(older)
    assert releasing_site(newer) == releasing_site(older)


RUST_RELEASES = """
core::ptr::drop_in_place<std::sync::mutex::MutexGuard<u64>>
    core::ptr::drop_in_place::<std::sync::poison::mutex::MutexGuard<u64>>
core::mem::drop core::mem::drop::<lock_api::mutex::MutexGuard<parking_lot::raw_mutex::RawMutex,~u64>>
parking_lot::raw_mutex::RawMutex::unlock_slow <parking_lot::raw_mutex::RawMutex>::unlock_slow
dashmap::lock::RawRwLock::unlock_shared_slow <dashmap::lock::RawRwLock>::unlock_shared_slow
app::SpinLock<T>::unlock <app::SpinLock<u64>>::unlock
"""


@pytest.mark.parametrize("case", RUST_RELEASES.strip().replace("\n    ", " ").split("\n"))
def test_older_and_newer_symbols_of_rust_release_alike(case: str) -> None:
    for name in case.split(" "):
        release = Frame("app", name.replace("~", " "), name)
        stack = [*frames("libc.so.6:syscall"), release, *frames("app:shop::sell THREAD")]
        assert releasing_site(stack) == "app:shop::sell"


def test_a_method_of_a_trait_is_not_one_of_its_type() -> None:
    """Nor is one whose name was cut off before it is known."""
    for name in (
        "<app::Mutex as app::Store>::lock",
        "<app::Mutex<u8>::lock",
        "<<app::Mutex as app::A>::lock",
    ):
        assert judge([Frame("app", name, "")]).family == ""


def test_a_long_name_of_locking_code_is_no_site() -> None:
    job = "alloc::boxed::Box<dyn core::ops::function::FnOnce<(), Output = ()> + core::marker::Send>"
    receiving = shorten_name(f"<std::sync::mpmc::list::Channel<{job}>>::recv::{{closure#1}}")
    wait, worker = frames("libc.so.6:syscall"), frames("app:app::worker THREAD")
    found = judge([*wait, Frame("app", receiving, f"app:{receiving}"), *worker])
    assert (found.family, found.site) == ("cond", "app:app::worker")


def test_locks_of_the_c_library_have_one_name_whoever_waits_for_them() -> None:
    for stack in (
        "libc.so.6:__lll_lock_wait_private libc.so.6:_int_free libc.so.6:cfree app:drop",
        "libc.so.6+0x1 libc.so.6+0x2 libc.so.6:free app:drop",
        "libc.so.6+0x1 libc.so.6:calloc app:make",
    ):
        assert judge(frames(stack)).service == "libc.so.6:malloc"
    assert judge(frames("libc.so.6+0x1 libc.so.6:_IO_puts app:say")).service == "libc.so.6:stdio"
    assert judge(frames("libc.so.6:__lll_lock_wait libc.so.6:pthread_mutex_lock app:malloc")).service == ""
    inside = "libc.so.6:__lll_lock_wait libc.so.6:pthread_mutex_lock app:write libc.so.6:fwrite app:say"
    assert judge(frames(inside)).service == "", "a lock of the program's own"


@pytest.mark.parametrize(
    ("stack", "value", "kind"),
    [
        ("libc.so.6:syscall mariadbd+0xde2920 mariadbd+0xd7b2a0", 3, "lock"),
        ("libc.so.6:syscall mariadbd+0xde29d0 mariadbd+0xd7b2a0", 0x80000001, "lock"),
        ("libc.so.6:syscall mariadbd+0xd6e1e0 mariadbd+0xd7b2a0", 0, ""),
        ("libc.so.6:syscall ha_rocksdb.so+0xde2920 mariadbd+0xd7b2a0", 3, ""),
        ("libc.so.6:syscall mariadbd:my_wait mariadbd+0xd7b2a0", 3, ""),
    ],
)
def test_latches_of_a_server_without_symbols(stack: str, value: int, kind: str) -> None:
    """MariaDB's semaphore of group commits waits while the word is 0. What other code does is not known."""
    found = judge(frames(stack), value)
    assert found.kind == kind
    assert found.site == ("mariadbd+0xd7b2a0" if kind else frames(stack)[1].label)


RELEASES = """
app:give: libc.so.6:__lll_lock_wake libc.so.6:__pthread_mutex_unlock_usercnt app:give THREAD
app:give: libc.so.6:pthread_rwlock_unlock app:give
app:give: libc.so.6:__lll_lock_wake libc.so.6:pthread_mutex_unlock app:std::mutex::unlock app:give
app:shop::Cache::flush: libc.so.6:pthread_rwlock_unlock app:std::shared_mutex::unlock app:shop::Cache::flush
app:pop: libc.so.6:__pthread_mutex_unlock_usercnt libc.so.6:pthread_cond_wait app:pop
app:shop::sell: libc.so.6:syscall app:std::sys::unix::locks::futex_mutex::Mutex::wake
    app:core::ptr::drop_in_place<std::sync::mutex::MutexGuard<u64>> app:shop::sell
app:shop::sell: libc.so.6:syscall app:parking_lot::raw_mutex::RawMutex::unlock_slow app:shop::sell
qemu:cpu_exec: libc.so.6:__lll_lock_wake libc.so.6:pthread_mutex_unlock qemu:qemu_mutex_unlock_impl
    qemu:cpu_exec
rocks:DBImpl::Write: libc.so.6:pthread_mutex_unlock rocks:rocksdb::port::Mutex::Unlock rocks:DBImpl::Write
app:make: libc.so.6:__lll_lock_wake_private libc.so.6:free app:make
shop:Unlocker::run: libc.so.6:pthread_mutex_unlock shop:Unlocker::run
shop:unlock_the_door: libc.so.6:pthread_mutex_unlock shop:unlock_the_door
libc.so.6:pthread_mutex_unlock: libc.so.6:pthread_mutex_unlock
"""
"""Cases: the site that releases a lock, and the stack of the thread that does it."""


def test_what_releases_a_lock() -> None:
    for case in RELEASES.replace("\n    ", " ").strip().split("\n"):
        site, _, stack = case.partition(": ")
        assert releasing_site(frames(stack)) == site
    assert releasing_site([]) == ""


@pytest.mark.parametrize(
    "destructor",
    [
        "std::lock_guard<std::mutex>::~lock_guard",
        "std::unique_lock<std::shared_mutex>::~unique_lock",
        "rocksdb::MutexLock::~MutexLock",
        "shop::ScopedLocker::~ScopedLocker",
    ],
)
def test_what_releases_a_lock_at_the_end_of_a_block(destructor: str) -> None:
    inner, outer = frames("libc.so.6:pthread_mutex_unlock"), frames("shop:sell")
    assert releasing_site([*inner, Frame("shop", destructor, f"shop:{destructor}"), *outer]) == "shop:sell"


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
    "name",
    [
        "main",
        "lock_the_door",
        "shop::Mutexes",
        "my_function",
        "std::sort",
        "Registry::add",
        "Registry::lock",
        "lock_static_mutex",
        "registry_lock",
        "read_lock",
        "SecondThing::wait",
        "wait_for_cond",
        "ngx_thread_mutex_unlock",
    ],
)
def test_what_is_not_locking(name: str) -> None:
    assert family_of(name) == ""
    assert judge([Frame("app", name, f"app:{name}")]).site == f"app:{name}"


@pytest.mark.parametrize(
    "name", ["a" + "<" * 2000 + ">" * 2000, "boost::" + "mutex" * 800, "std::sys" + "::" * 2000]
)
def test_names_that_were_made_to_take_long_are_not_judged(name: str) -> None:
    """A library can have a million such names."""
    began = time.process_time()
    for number in range(1000):
        assert family_of(f"{number}{name}") == ""
        assert releasing_site([Frame("app", f"{number}{name}", "app+0x1")]) == "app+0x1"
    assert time.process_time() - began < 1


@pytest.mark.parametrize("name", ["pthread_mutex_lock", "std::mutex::lock<" + "<" * 100 + ">" * 100 + ">"])
def test_names_of_usual_lengths_are(name: str) -> None:
    assert family_of(name) == "mutex"
    assert family_of(name + LONGEST_NAME * "_") == ""


def test_every_family_has_a_kind() -> None:
    assert FAMILIES.keys() == KINDS.keys()


@pytest.mark.parametrize(
    ("stack", "is_parked"),
    [
        ("app:parking_lot_core::parking_lot::park app:parking_lot::raw_mutex::RawMutex::lock_slow", True),
        ("libc.so.6:syscall app:parking_lot::raw_mutex::RawMutex::lock_slow", True),  # the rest is inlined
        ("WAIT pthread_cond_wait libjvm.so:os::PlatformEvent::park libjvm.so:ObjectMonitor::EnterI", True),
        ("PARK", True),
        ("app:runtime.futex app:runtime.futexsleep app:runtime.notesleep app:runtime.mPark", True),
        ("app:<std::sys::sync::thread_parking::futex::Parker>::park app:std::thread::park", True),
        ("app:AbslInternalPerThreadSemWait_lts_20230802 app:absl::lts_20230802::Mutex::Block", True),
        ("python3.14:_PyParkingLot_Park python3.14:_PyMutex_LockTimed", True),
        ("app:runtime.futex app:runtime.futexsleep app:runtime.lock2", False),
        ("libc.so.6:syscall app:std::sys::sync::mutex::futex::Mutex::lock_contended", False),
        ("WAIT pthread_cond_wait libjvm.so:os::PlatformMonitor::wait libjvm.so:Monitor::wait", False),
        ("libc.so.6:__lll_lock_wait app:take app:parking_lot_core::parking_lot::park", False),
    ],
)
def test_whose_word_it_is(stack: str, is_parked: bool) -> None:
    assert judge(frames(stack)).is_parked == is_parked


def test_what_is_shared_or_left() -> None:
    assert is_pool("std::__detail::__waiter_pool_base::_S_for(void const*)::__w")
    assert not is_pool("registry_mutex")
    assert is_end("runtime.mcall")
    assert not is_end("runtime.schedule")


def test_locks_that_threads_park_on() -> None:
    """The name of an array of locks stands for all locks in it."""
    assert is_parked_on("redis-check-rdb:io_threads_mutex+0x28", ()) and is_parked_on(
        "valkey-server:io_threads_mutex", ()
    )
    assert not is_parked_on("app:gate", ()) and not is_parked_on("app:io_threads_mutex_of_another", ())
    assert is_parked_on("app:gate+0x40", ("app:gate",)) and is_parked_on("app:gate+0x40", ("*+0x40",))
    assert not is_parked_on("app+0x40", ("app",)), "it is not part of a variable that is so called"


def test_brackets_in_the_name_of_a_parked_lock_are_not_only_a_pattern() -> None:
    gate = "[java]:com.shop.Gate"
    assert is_parked_on(gate, (gate,)) and is_parked_on(gate, ("[[]java]:com.shop.*",))
    assert not is_parked_on(f"{gate}2", (gate,))
