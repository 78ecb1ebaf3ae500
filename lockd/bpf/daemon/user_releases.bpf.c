// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Releases of locks in user space. The current thread releases a lock in a system call of its own, so that
 * its registers tell whether it does, and its user stack tells in which code. */

struct captured_release { /* END_RELEASE of a lock in user space */
    struct release release;
    struct capture by; /* the thread that released the lock */
};

BPF_ARRAY(release_record, struct captured_release, 1); /* describes the layout of a record */

/* The current thread, whose entry is `t`, leaves its CPU at `now` to wait for a lock in user space. */
static __always_inline void join_user_queue(struct thread *t, u64 now)
{
    struct queue_key key = {.address = t->call.uaddr, .tgid = t->tgid};

    if (t->call.kind <= KIND_PI)
        join_queue(t, &key, QUEUED_BY_USER, now);
}

/* Whether the current thread's futex call is one that may wake a thread at the address for which `t` waits.
 * If `t` belongs to another process, the lock is in shared memory. Its address may then differ, but not its
 * place within a page. */
static __always_inline bool is_at_lock(struct thread *t, u32 tgid, u64 uaddr)
{
    if (t->tgid == tgid) /* for a wait of Java the address is not known; see hotspot.bpf.c */
        return t->call.uaddr == uaddr || t->call.uaddr & JAVA_WAIT;
    return !((t->call.uaddr ^ uaddr) & (PAGE_SIZE - 1));
}

/* Whether the current thread is in a system call that releases the lock for which `t` waits. */
static __always_inline bool is_releasing(struct thread *t)
{
    struct pt_regs *registers = user_regs();
    struct system_call call = call_of(registers);
    u32 nr = call.is_compat ? number_of_compat(call.nr) : call.nr;
    u32 tgid = bpf_get_current_pid_tgid() >> 32;
    struct futex_waiter from = {};

    switch (nr) {
    case NR_FUTEX:
        if (t->tgid != tgid && call.args[1] & FUTEX_PRIVATE_FLAG)
            return false;
        switch (call.args[1] & ~(FUTEX_PRIVATE_FLAG | FUTEX_CLOCK_REALTIME)) {
        case FUTEX_WAKE_OP:
            return is_at_lock(t, tgid, call.args[0]) ||
                   is_at_lock(t, tgid, fifth_argument(registers, call.is_compat));
        case FUTEX_WAKE:
        case FUTEX_WAKE_BITSET:
        case FUTEX_UNLOCK_PI:
        case FUTEX_REQUEUE:
        case FUTEX_CMP_REQUEUE:
        case FUTEX_CMP_REQUEUE_PI:
            return is_at_lock(t, tgid, call.args[0]);
        }
        return false;
    case NR_FUTEX_WAKE:
        return is_at_lock(t, tgid, call.args[0]);
    case NR_FUTEX_REQUEUE:
        bpf_probe_read_user(&from, sizeof(from), (void *)call.args[0]);
        return is_at_lock(t, tgid, from.uaddr);
    }
    return false;
}

#define PF_EXITING 0x4
#define PF_KTHREAD 0x200000

/* Return what the current thread does as it ends the wait of `t`. An interrupt may do so on its behalf: then
 * its call, if it is in any, has nothing to do with the lock. */
static __always_inline u8 end_of_user_wait(struct thread *t)
{
    u64 task = CURRENT_TASK();
    u32 flags = 0;

    READ_CURRENT(task, TASK_FLAGS, flags);
    if (flags & PF_EXITING)
        return t->tgid == bpf_get_current_pid_tgid() >> 32 ? END_OWNER_ENDED : END_NO_RELEASE;
    return !(flags & PF_KTHREAD) && is_releasing(t) ? END_RELEASE : END_NO_RELEASE;
}

/* The wait of `t`, which is in the queue of a lock in user space, ends at `now`. It is not known how if it
 * is not being `woken`. */
static __always_inline void leave_user_queue(void *ctx, struct thread *t, bool woken, u64 now)
{
    struct queue_key key = {.address = t->call.uaddr, .tgid = t->tgid};
    u8 end = woken ? end_of_user_wait(t) : END_NO_RELEASE;
    struct release release = {
        .address = t->call.uaddr,
        .tgid = t->tgid,
        .kind = t->call.kind,
        .end = end,
    };

    release.weight = weight_of_sample(leave_queue(t, &key, end, now));
    if (!release.weight)
        return;
    if (end != END_RELEASE) {
        output_release(&release);
        return;
    }
    struct captured_release *record = releases.ringbuf_reserve(sizeof(struct captured_release));
    if (!record) {
        refuse_sample(release.weight);
        return;
    }
    record->release = release;
    record->by.bytes = 0;
    fill_capture(ctx, bpf_get_current_task(), &record->by);
    releases.ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}
