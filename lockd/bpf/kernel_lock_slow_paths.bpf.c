/* Waits for kernel locks by probes on the functions that a contended lock is taken with. */

/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */

#ifndef BY_FENTRY
/* The lock that a thread is in the slow path of: at the return, the argument is gone. */
BPF_TABLE("hash", u32, u64, slow_locks, WAITS_ENTRIES);
#endif

static __always_inline int slow_path_entered(probed *ctx, u32 type)
{
    u64 lock = ARGUMENT(ctx);

    if (!RETURN_WILL_BE_SEEN(ctx)) {
        lose(LOSS_KERNEL_LOCKS__RETURN_MISSED);
#ifdef WITH_ASKED_HOLDS
        hold_untimed(lock);
#endif
        return 0;
    }
#ifndef BY_FENTRY
    u32 tid = bpf_get_current_pid_tgid();
    if (slow_locks.update(&tid, &lock)) {
        lose(LOSS_KERNEL_LOCKS__WAITS_FULL);
        return 0;
    }
#endif
    wait_began(lock, type);
    return 0;
}

/* `result` is negative if the thread gave up. */
static __always_inline int slow_path_left(probed *ctx, s64 result)
{
    u64 now = bpf_ktime_get_ns();
#ifdef BY_FENTRY
    struct kernel_wait_key at = wait_key(ARGUMENT(ctx), false);
#else
    u32 tid = bpf_get_current_pid_tgid();
    u64 *lock = slow_locks.lookup(&tid);
    if (!lock)
        return 0; /* was entered before lockd started, or found no place */
    struct kernel_wait_key at = wait_key(*lock, false);
    slow_locks.delete(&tid);
#endif
    struct kernel_wait *wait = kernel_waits.lookup(&at);

    if (!wait)
        return 0;
#ifdef WITH_ASKED_HOLDS
    hold_settled(at.lock, now, result);
#endif
    count_wait(ctx, &at, wait, now);
    return 0;
}

int mutex_slow_path(probed *ctx)
{
    return slow_path_entered(ctx, LOCK_MUTEX);
}

int rwsem_read_slow_path(probed *ctx)
{
    return slow_path_entered(ctx, LOCK_RWSEM_READ);
}

int rwsem_write_slow_path(probed *ctx)
{
    return slow_path_entered(ctx, LOCK_RWSEM_WRITE);
}

int semaphore_slow_path(probed *ctx)
{
    return slow_path_entered(ctx, LOCK_SEMAPHORE);
}

/* Of functions that cannot give up. */
int slow_path_left_with_lock(probed *ctx)
{
    return slow_path_left(ctx, 0);
}

/* Of functions that return 0 or an error. */
int slow_path_left_with_status(probed *ctx)
{
    return slow_path_left(ctx, (s32)RETURNED(ctx));
}

/* Of functions that return a pointer or an error in its place. */
int slow_path_left_with_pointer(probed *ctx)
{
    s64 result = RETURNED(ctx);
    return slow_path_left(ctx, result < 0 && result >= -4095 /* MAX_ERRNO */ ? result : 0);
}
