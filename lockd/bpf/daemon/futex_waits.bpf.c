// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Mode blocked of the futex program: futex waits, from the time at which the thread leaves its CPU to the
 * time at which it runs again. No program is attached to a system call. At a switch-out, the saved user
 * registers show in which call the thread is. Its state shows whether it waits for the futex: only this sleep
 * is interruptible. A page fault or a kernel lock in the call makes it sleep uninterruptibly, and a stopped
 * thread has a state of its own. The result of the call is not known. */

/* The current thread, whose user registers are `registers`, leaves its CPU to sleep interruptibly in the
 * system call `nr`, which is a futex call, or NR_COMPAT for any call of a 32-bit program. */
static __always_inline void futex_wait_began(void *ctx, u64 task, struct pt_regs *registers, struct thread *t,
                                             u32 tid, s16 nr, u64 now)
{
    struct call call = {.since = now, .tid = tid};
    bool is_compat = nr == NR_COMPAT;
    u64 arguments[4] = {};

    read_arguments(registers, is_compat, 4, arguments);
    describe_call(&call, is_compat ? number_of_compat(call_of(registers, 2).nr) : nr, arguments);
    if (call.guess >= KIND_WAKE)
        return;
    if (t->call.uaddr == call.uaddr && t->call.guess == call.guess)
        call.kind = t->call.kind;
    else
        t->looked_up = 0;
    t->call = call;
    if (!is_own(t->tgid))
        mark_written(WRITTEN_WAIT, current_window());
    if (!is_compat) /* the namer cannot unwind the stack of a 32-bit program */
        capture_waiter(ctx, task, t, now);
}

/* The wait of a thread that runs again has ended; `t` is its entry. */
static __always_inline void futex_wait_ended(u64 task, struct thread *t, u64 now)
{
    u64 blocked = now - t->off_since;
    struct futex_key key = {.tid = t->call.tid, .kind = t->call.kind, .uaddr = t->call.uaddr};
    struct ended ended = {.calls = 1, .blocked_ns = blocked, .max_blocked_ns = blocked};

    t->call.since = 0;
    if (!is_wanted(blocked))
        return;
    key.slot = slot_of(blocked);
    count_calls(task, t->tgid, &key, &ended);
}
