// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Releases of mutexes, rwsems, semaphores and percpu rwsems of the kernel. The thread that releases such a
 * lock wakes the next thread itself. At the wake-up, the kernel stack therefore shows which code releases the
 * lock.
 *
 * Anything else may wake a thread too: a timer, another thread that waits and gives up, and so on. The namer
 * recognises such a wake-up by its stack if it is sampled. Here a wake-up is taken for a release unless the
 * current thread is the idle one, or a signal ends the wait. */

#define RELEASE_FRAMES 28 /* some eight of them belong to the wake-up and to this program */

struct kernel_release { /* sample of a wait for a kernel lock that ended by END_RELEASE */
    struct release_sample sample;
    u64 frames[RELEASE_FRAMES]; /* stack of the thread that released the lock, innermost first, up to a 0 */
};

BPF_ARRAY(kernel_release_record, struct kernel_release, 1); /* tells Python the layout of a record */

struct awaited_lock {
    u64 address;
    u64 type; /* enum lock_type */
};

/* By thread id, the kernel lock that a thread waits for; valid while AWAITS_LOCK is set in the thread's
 * entry. */
BPF_TABLE("hash", u32, struct awaited_lock, awaited_locks, WAITS_ENTRIES);

/* Return the address of the lock of the kernel that a thread waits for, or 0. */
static __always_inline u64 lock_awaited_by(u32 tid)
{
    struct awaited_lock *awaited = awaited_locks.lookup(&tid);

    return awaited ? awaited->address : 0;
}

/* The current thread begins to wait for a lock of the kernel. */
static __always_inline void await_lock(u64 address, u32 type)
{
    u64 id = bpf_get_current_pid_tgid();
    u32 tid = id;
    struct awaited_lock awaited = {.address = address, .type = type};

    if (restraint() >= RESTRAINT_STACKS)
        return;
    struct thread *t = entry_of(tid);
    if (!t) { /* the thread has not left its CPU before */
        struct thread fresh = {.tgid = id >> 32};
        add_thread(tid, &fresh);
        t = entry_of(tid);
    }
    if (t && !awaited_locks.update(&tid, &awaited))
        t->awaits |= AWAITS_LOCK;
}

/* The current thread has got the lock that it waited for, or gives up. */
static __always_inline void await_no_lock(void)
{
    u32 tid = bpf_get_current_pid_tgid();
    struct thread *t = entry_of(tid);

    if (!t || !(t->awaits & AWAITS_LOCK))
        return;
    t->awaits &= ~AWAITS_LOCK;
    awaited_locks.delete(&tid);
}

/* The current thread, whose entry is `t`, leaves its CPU at `now` to wait for a lock of the kernel. */
static __always_inline void join_kernel_queue(u32 tid, struct thread *t, u64 now)
{
    struct awaited_lock *awaited = awaited_locks.lookup(&tid);

    if (!awaited)
        return;
    u64 key = awaited->address;
    struct lock_queue *queue = join_queue(t, &key, QUEUED_IN_KERNEL, now);
#ifdef WITH_CAUSES
    u32 holder = 0;

    if (!queue || !needs_holder(&queue->hold, tid, queue->released, now))
        return;
    u64 owner = owner_of(awaited->address, awaited->type);
    if (owner)
        READ_TASK(owner, TASK_PID, holder);
    if (holder)
        note_holder(queue, &key, 0, holder, now);
#endif
}

/* Whether a signal wakes the sleeping `task`: a signal is pending that can end its sleep. It cannot have come
 * before the sleep, because the thread would not have gone to sleep then. */
static __always_inline bool is_woken_by_signal(u64 task)
{
    u64 own = 0, shared = 0, blocked = 0, of_process = 0;
    u32 state = 0;

    READ_TASK(task, TASK_STATE, state);
    if (!(state & (TASK_INTERRUPTIBLE | TASK_WAKEKILL)))
        return false;
    READ_TASK(task, TASK_PENDING_SIGNAL, own);
    if (!(state & TASK_INTERRUPTIBLE))
        return own & (1 << (9 - 1)); /* SIGKILL, which each thread of the process receives */
    READ_TASK(task, TASK_SIGNAL, of_process);
    READ_TASK(of_process, SIGNAL_SHARED_PENDING, shared);
    READ_TASK(task, TASK_BLOCKED, blocked);
    return (own | shared) & ~blocked;
}

/* The wait of `task`, which is in the queue of a lock of the kernel, ends at `now`; `t` is its entry. If
 * the task is not being `woken`, it is not known how the wait ends. */
static __always_inline void leave_kernel_queue(void *ctx, u64 task, u32 tid, struct thread *t, bool woken,
                                               u64 now)
{
    struct awaited_lock *awaited = awaited_locks.lookup(&tid);
    bool is_release = woken && (u32)bpf_get_current_pid_tgid() && !is_woken_by_signal(task);
    u8 end = is_release ? END_RELEASE : END_NO_RELEASE;

    if (!awaited) {
        t->queued = QUEUED_NOT;
        return;
    }
    u64 key = awaited->address;
    struct release release = {
        .address = awaited->address,
        .tgid = t->tgid,
        .kind = awaited->type,
        .end = end,
        .in_kernel = 1,
    };
    /* A reader that is woken may be one of many holders, so it is not followed as the next holder. */
    bool is_next = awaited->type != LOCK_RWSEM_READ && awaited->type != LOCK_PERCPU_RWSEM_READ;
    u64 since = 0, waited = leave_queue(tid, t, &key, end, now, &release, &since, is_next);
    release.weight = weight_of_sample(waited, now);
    if (!release.weight)
        return;
    if (end != END_RELEASE) {
        output_release(&release, task);
        return;
    }
#ifdef WITH_CAUSES
    if (!release.times.known)
        describe_unfollowed(&release.times, since, release.waited, now);
#endif
    struct kernel_release *record = releases.ringbuf_reserve(sizeof(struct kernel_release));
    if (!record) {
        refuse_sample(release.weight);
        return;
    }
    record->sample.release = release;
    identify(task, &record->sample.who);
    __builtin_memset(record->frames, 0, sizeof(record->frames));
    bpf_get_stack(ctx, record->frames, sizeof(record->frames), 0);
    releases.ringbuf_submit(record, BPF_RB_NO_WAKEUP);
    wake_sampler();
}
