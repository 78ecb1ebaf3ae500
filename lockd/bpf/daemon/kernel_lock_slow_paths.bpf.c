// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Waits for kernel locks, by probes on the functions that take a contended lock. */

#ifndef BY_FENTRY
/* By thread id, the address of the contended lock that the thread is about to take. At the return of the
 * function that takes it, a kprobe does not know the function's argument any more. */
BPF_TABLE("hash", u32, u64, slow_locks, WAITS_ENTRIES);
#endif

/* Attached to the entry of functions that take a contended lock. */
int slow_path_entered(probed *ctx)
{
    u64 began = run_begins(), lock = ARGUMENT(ctx);

#ifdef TRACE
    if (!is_current_traced()) /* a missed return is no loss then */
        return 0;
#endif
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
    wait_began(ctx, lock, GIVEN_LOCK_TYPE(ctx), false);
    run_ends(began);
    return 0;
}

/* Attached to the return of functions that take a contended lock. The thread has the lock, or gave up. */
int slow_path_left(probed *ctx)
{
    u64 began = run_begins(), now = bpf_ktime_get_ns();
#ifdef BY_FENTRY
    struct kernel_wait_key at = wait_key(ARGUMENT(ctx), false);
#else
    u32 tid = bpf_get_current_pid_tgid();
    u64 *lock = slow_locks.lookup(&tid);
    if (!lock)
        return 0; /* the wait began before lockd did, or there was no room for it */
    struct kernel_wait_key at = wait_key(*lock, false);
    slow_locks.delete(&tid);
#endif
    struct kernel_wait *wait = kernel_waits.lookup(&at);

    if (!wait)
        return 0;
#ifdef WITH_ASKED_HOLDS
    hold_settled(at.lock, now, SUCCEEDED(ctx));
#endif
#ifdef TRACE
    wait->given_up = !SUCCEEDED(ctx);
#endif
    count_wait(ctx, &at, wait, now);
    run_ends(began);
    return 0;
}
