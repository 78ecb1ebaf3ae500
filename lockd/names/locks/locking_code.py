"""The functions of locks and of what surrounds them, in the languages and libraries that are known.

Each word is a regular expression that matches the whole of a name, which is demangled, without parameters,
template arguments and inline namespaces. `%` stands for the beginning of a name in Rust's own libraries.
"""

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
        (?:(?:os::)?Platform)?Monitor(?:Locker)?::wait\w* v8::base::ConditionVariable::.*
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
"""Of each family, the functions that only it has."""

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
"""The same for names that nobody knows but that say by their words what they do: programs wrap the locks of
the C library in functions and classes of their own. What has both words, the lock and how it is taken, is a
wrapper; `lock_accounts` or `Registry::lock` is not, but a place where a thread waits."""

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
"""Functions of the C library that take locks of its own: one name for each sort, whoever waits for it where.

Which function that is, and of which arena or file, is chance: the first that blocks would give its name."""

PARKERS = r"""
        (?:os::)?PlatformEvent::park\w* (?:\w+::)*Parker::park %thread::(?:current::|functions::)?park\w*
        %sys(?:_common)?\b.*(?:thread_park\w*|::Parker)\b.* %thread::(?:thread::)?Thread>?::park.*
        <*parking_lot(?:_core)?::.* absl::synchronization_internal::.* AbslInternalPerThreadSem\w+
        absl::(?:Mutex|CondVar)::.* folly::(?:detail::)?(?:parkingLot|ParkingLot)\w*.*
        WTF::(?:Lock|WordLock|ParkingLot)\w*::.*
        runtime\.(?:notesleep|notetsleep\w*|mPark)
"""
"""Of these, where the word that a thread sleeps on is its own, whatever lock it waits for."""

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
        Mutex::.* Monitor::.* MonitorLocker::.* MutexLocker::.* ObjectMonitor::.*
        ObjectSynchronizer::.* JavaThreadBlock\w*.* L?java[./]util[./]concurrent[./]\S*
"""
"""Locking that several families have in common."""

RUNTIMES = r"""
        runtime\.\w.* runtime/internal/.* internal/runtime/.* WaitEventSetWait\w* ProcSleep
        ProcWaitForSignal
"""
"""A runtime's scheduling: the place only where the stack has no other."""

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
"""What is in the stack of every thread."""

PYTHON = r"""
        _?Py(?:Eval|Object|Vectorcall|Function|Run|Import|Module|Gen|Iter|Obj|Bytes|_|Cell|CFunction)\w*
        _?Py(?:Interpreter|Method|Sequence|Context)\w* \w*vectorcall\w* cfunction_\w+ method_\w+ run_mod
        run_eval_code_obj pymain_\w+ slot_\w+ type_call main thread_run pythread_wrapper \w*bootstrap\w*
        builtin_exec gen_\w+
"""
"""The same for CPython's interpreter, in its own object."""

POOLS = r"""
        std::__detail::__waiter_pool_base::_S_for.* std::__libcpp_atomic_wait.*contention.*
"""
"""Variables that many locks share by a hash of their addresses: they are not the name of any."""

ENDS = r"""
        runtime\.(?:mcall|goschedImpl|gopreempt_m|preemptPark)
"""
"""What lies beyond is not the caller: the stack of a goroutine that the thread has left."""

PARKED = {
    "*:io_threads_mutex": "Redis 6 and 7, Valkey and other forks, with `io-threads`",
}
"""Locks that threads park on, by shell patterns of their names, and whose they are.

Who has work for a thread holds the lock until there is some; a thread that waits for it is idle.
"""
