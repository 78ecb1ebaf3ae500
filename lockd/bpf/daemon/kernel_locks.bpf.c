// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Waits for contended kernel locks, from the request until the thread has the lock or gives up.
 *
 * With TRACE (`lockd trace klock`) waits are counted by stack and period instead of by slot, and only
 * those of the traced threads. */

struct kernel_lock_key {
    u64 lock;
    u32 tid;
    u8 type; /* enum lock_type */
    u8 slot;
    u16 pad;
#ifdef TRACE
    u64 stack; /* stack number of the waiter, see trace.bpf.h */
    u64 period; /* number of the period of PERIOD_NS in which the wait ended */
#endif
};

struct kernel_lock_value {
    u64 waits;
    u64 wait_ns;
    u64 max_wait_ns;
#ifdef TRACE
    u64 given_up; /* number of waits that ended without the lock */
#endif
    u64 is_mmap_lock; /* 1: the lock is mmap_lock of the waiter's own address space */
    struct who who;
};

/* Key of a wait in progress. Code that interrupts a spinning thread may wait for another lock, so the key
 * contains the lock as well. */
struct kernel_wait_key {
    u64 lock;
    u32 tid;
    u32 cpu; /* for spinlocks and rwlocks: number of the spinning CPU, plus 1; for other locks: 0 */
};

struct kernel_wait {
    u64 since;
    u32 tgid;
    u32 type; /* enum lock_type */
#ifdef TRACE
    u64 stack;
    u64 given_up; /* 1: the wait ended without the lock */
    char comm[COMM_LEN]; /* of the thread */
#endif
};

BPF_TABLE("hash", struct kernel_lock_key, struct kernel_lock_value, kernel_locks_0, ENTRIES);
BPF_TABLE("hash", struct kernel_lock_key, struct kernel_lock_value, kernel_locks_1, ENTRIES);
BPF_ARRAY_OF_MAPS(kernel_locks, "kernel_locks_0", 2);
BPF_TABLE("hash", struct kernel_lock_key, struct kernel_lock_value, kernel_locks_over_0, OVER_KERNEL_ENTRIES);
BPF_TABLE("hash", struct kernel_lock_key, struct kernel_lock_value, kernel_locks_over_1, OVER_KERNEL_ENTRIES);
BPF_ARRAY_OF_MAPS(kernel_locks_over, "kernel_locks_over_0", 2);
BPF_TABLE("hash", struct kernel_wait_key, struct kernel_wait, kernel_waits, WAITS_ENTRIES);

static __always_inline struct kernel_wait_key wait_key(u64 lock, bool spins)
{
    struct kernel_wait_key key = {.lock = lock};

    if (spins)
        key.cpu = bpf_get_smp_processor_id() + 1;
    else
        key.tid = bpf_get_current_pid_tgid();
    return key;
}

/* Whether the threads that wait for locks of this type are counted in queues (lock_queues.bpf.c): they sleep,
 * and the thread that releases the lock wakes the next one. (rt_mutexes have no queues here, see
 * docs/holders.md.) */
static __always_inline bool has_queue(u32 type)
{
    return type < LOCK_SPINLOCK && type != LOCK_RTMUTEX;
}

#ifdef WITH_ASKED_HOLDS
static __always_inline void hold_waits(u64 lock);
static __always_inline void hold_settled(u64 lock, u64 now, bool got_it);
static __always_inline void hold_untimed(u64 lock);
#endif

/* The current thread begins to wait for a lock. `may_repeat`: the same wait may call this several times. */
static __always_inline void wait_began(void *ctx, u64 lock, u32 type, bool may_repeat)
{
    struct kernel_wait_key key = wait_key(lock, type >= LOCK_SPINLOCK);
    struct kernel_wait wait = {
        .since = bpf_ktime_get_ns(),
        .tgid = bpf_get_current_pid_tgid() >> 32,
        .type = type,
    };

#ifdef TRACE
    if (!is_current_traced())
        return;
#endif

    /* Since dc1f7893a70f (5.19) a wait for a mutex calls contention_begin each time the thread starts or
     * stops spinning: the wait began with the first call. Any other wait calls it once. If there is an entry
     * for such a wait already, the entry is of an earlier wait whose end was not seen, and is overwritten. An
     * end is not seen if an interrupt or another thread has interrupted the same program on this CPU: then
     * the kernel skips the program. */
    if (may_repeat && kernel_waits.lookup(&key))
        return;
#ifdef TRACE
    bpf_get_current_comm(wait.comm, sizeof(wait.comm));
    wait.stack = keep_call_stacks(ctx).kernel;
    wait.since = bpf_ktime_get_ns(); /* the time for the stack is not part of the wait */
#endif
    if (kernel_waits.update(&key, &wait))
        lose(LOSS_KERNEL_LOCKS__WAITS_FULL);
#ifdef WITH_KERNEL_HOLDERS
    else if (has_queue(type))
        await_lock(lock, type);
#endif
    mark_written(WRITTEN_WAIT, current_window());
#ifdef WITH_ASKED_HOLDS
    if (type == LOCK_SEMAPHORE)
        hold_waits(lock);
#endif
}

#ifdef TRACE
/* A trace shows who waits where. An entry without thread and stack would not show that, so a wait for which
 * there is no room is lost. */
static __always_inline void kernel_lock_overflow(int window, struct kernel_lock_key *key, u64 waited)
{
    lose(LOSS_KERNEL_LOCKS__FULL);
}
#else
static __always_inline void kernel_lock_overflow(int window, struct kernel_lock_key *key, u64 waited)
{
    struct kernel_lock_key rest = {.type = key->type, .slot = key->slot};
    void *map = kernel_locks_over.lookup(&window);

    if (!map)
        return;
    struct kernel_lock_value *v = bpf_map_lookup_elem(map, &rest);
    if (!v) {
        struct kernel_lock_value fresh = {};
        add_entry(WRITTEN_KERNEL_LOCKS_OVER, window, map, &rest, &fresh, true);
        v = bpf_map_lookup_elem(map, &rest);
    }
    if (!v) {
        lose(LOSS_KERNEL_LOCKS__FULL);
        return;
    }
    lose(OVER_KERNEL_LOCKS);
    add_to(&v->waits, 1);
    add_to(&v->wait_ns, waited);
    raise_to(&v->max_wait_ns, waited);
}
#endif

static __always_inline u64 own_mmap_lock(void)
{
    u64 mm = 0;

    READ_TASK(bpf_get_current_task(), TASK_MM, mm);
    return mm ? mm + MM_MMAP_LOCK : 0;
}

/* Count the wait of the current thread that ended at `now`; `at` is its key in kernel_waits. */
static __always_inline void count_wait(void *ctx, struct kernel_wait_key *at, struct kernel_wait *wait,
                                       u64 now)
{
    u64 waited = now > wait->since ? now - wait->since : 0;
    int window = current_window();
    void *map = kernel_locks.lookup(&window);
    struct kernel_lock_key key = {
        .lock = at->lock,
        .tid = bpf_get_current_pid_tgid(),
        .type = wait->type,
#ifdef TRACE
        .stack = wait->stack,
        .period = now / PERIOD_NS,
#else
        .slot = slot_of(waited),
#endif
    };
#ifdef TRACE
    u64 given_up = wait->given_up;
#endif

    u32 step = restraint();
    bool by_process = step >= RESTRAINT_DETAIL;

    kernel_waits.delete(at);
#ifdef WITH_KERNEL_HOLDERS
    if (has_queue(key.type))
        await_no_lock();
#endif
    if (!map || !is_wanted(waited))
        return;
    if (by_process) {
        key.lock = 0;
        key.tid = OF_PROCESS | bpf_get_current_pid_tgid() >> 32;
    }
    struct kernel_lock_value *v = NULL;
    if (step < RESTRAINT_PROCESSES) {
        v = bpf_map_lookup_elem(map, &key);
        if (!v) {
            struct kernel_lock_value fresh = {};
            identify(bpf_get_current_task(), &fresh.who);
            fresh.is_mmap_lock = key.lock == own_mmap_lock();
            bool of_process = is_of_process(bpf_get_current_pid_tgid() >> 32, false);
            bool is_new = !add_entry(WRITTEN_KERNEL_LOCKS, window, map, &key, &fresh, of_process);
#ifndef TRACE
            struct stack_key stack = {
                .address = key.lock, .tid = key.tid, .type = key.type, .slot = key.slot};
            if (is_new)
                keep_stack(ctx, window, stack);
#endif
            v = bpf_map_lookup_elem(map, &key);
        }
    }
    if (!v) {
        kernel_lock_overflow(window, &key, waited);
        return;
    }
    if (by_process || !key.tid) { /* 0 is the idle thread of every CPU */
        add_to(&v->waits, 1);
        add_to(&v->wait_ns, waited);
    } else {
        v->waits += 1;
        v->wait_ns += waited;
    }
    raise_to(&v->max_wait_ns, waited);
#ifdef TRACE
    v->given_up += given_up;
#endif
}
