// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Waits for kernel locks, by the tracepoints lock:contention_begin and contention_end (since 5.19). */

/* Flags of contention_begin (include/trace/events/lock.h). */
#define LCB_F_SPIN 0x01
#define LCB_F_READ 0x02
#define LCB_F_WRITE 0x04
#define LCB_F_RT 0x08
#define LCB_F_PERCPU 0x10
#define LCB_F_MUTEX 0x20

static __always_inline u32 type_of(u32 flags)
{
    if (flags & LCB_F_MUTEX)
        return LOCK_MUTEX; /* also with LCB_F_SPIN: a thread spins while the owner runs, before it sleeps */
    if (flags & LCB_F_RT) /* with PREEMPT_RT also spinlocks and rwlocks, whose waiters then sleep */
        return flags & LCB_F_READ ? LOCK_RWSEM_READ : flags & LCB_F_WRITE ? LOCK_RWSEM_WRITE : LOCK_RTMUTEX;
    if (flags & LCB_F_PERCPU)
        return flags & LCB_F_WRITE ? LOCK_PERCPU_RWSEM_WRITE : LOCK_PERCPU_RWSEM_READ;
    if (flags & LCB_F_SPIN)
        return flags & LCB_F_READ    ? LOCK_RWLOCK_READ
               : flags & LCB_F_WRITE ? LOCK_RWLOCK_WRITE
                                     : LOCK_SPINLOCK;
    if (flags & LCB_F_READ)
        return LOCK_RWSEM_READ;
    return flags & LCB_F_WRITE ? LOCK_RWSEM_WRITE : LOCK_SEMAPHORE;
}

/* Raw tracepoint contention_begin. Arguments: lock, flags. */
int on_contention_begin(struct bpf_raw_tracepoint_args *ctx)
{
    u64 began = run_begins();

    u32 type = type_of(ctx->args[1]);
    wait_began(ctx, ctx->args[0], type, type == LOCK_MUTEX);
    run_ends(began);
    return 0;
}

static __always_inline void wait_ended(void *ctx, u64 lock, s32 result)
{
    struct kernel_wait_key at = wait_key(lock, false);
    struct kernel_wait *wait = kernel_waits.lookup(&at);
    u64 now = bpf_ktime_get_ns();

    /* A semaphore and an rt_mutex begin with a spinlock, which has the same address. A waiter takes this
     * spinlock again after each sleep, and may spin for it: of the two waits, the one that began last has
     * ended. */
    if (!wait || wait->type == LOCK_SEMAPHORE || wait->type == LOCK_RTMUTEX) {
        struct kernel_wait_key inner = wait_key(lock, true);
        struct kernel_wait *spin = kernel_waits.lookup(&inner);
        if (spin && (!wait || spin->since > wait->since)) {
            at = inner;
            wait = spin;
        }
    }
    if (!wait)
        return; /* the wait began before lockd did, or there was no room for it */
#ifdef WITH_ASKED_HOLDS
    if (!at.cpu)
        hold_settled(lock, now, !result);
#endif
#ifdef TRACE
    wait->given_up = !!result;
#endif
    count_wait(ctx, &at, wait, now);
}

/* Raw tracepoint contention_end. Arguments: lock, result. */
int on_contention_end(struct bpf_raw_tracepoint_args *ctx)
{
    u64 began = run_begins();

    wait_ended(ctx, ctx->args[0], ctx->args[1]);
    run_ends(began);
    return 0;
}
