// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Who makes threads wait for a lock in user space: samples of the code that releases locks.
 *
 * Between two releases of a lock one holder has it. All the time that threads wait meanwhile, however many
 * they are and however long they have waited before, is time that this holder makes them wait. At the
 * release the holder is the current thread, in its own system call, so that its stack is at hand. A queue
 * for each lock knows how long its threads have waited since the last release.
 *
 * Releases are sampled in proportion to that time. One after which `wait_per_sample` or more was waited is
 * always sampled, and weighs what was waited. Any other is sampled with the chance waited / wait_per_sample,
 * and weighs wait_per_sample. The sum of the weights is right on average, whatever the sampler makes of
 * `wait_per_sample` meanwhile. */

#define RELEASES_PAGES 64

/* How the wait of a thread in a queue ended. Python reads the names. */
enum wait_end {
    END_RELEASE, /* the current thread is in a futex call that releases the lock */
    END_OWNER_ENDED, /* a thread of the process ends, and the kernel releases its robust locks */
    END_NO_RELEASE, /* by a timeout, a signal, or a release in a way that is not known here */
};

struct release {
    u64 uaddr;
    u64 weight; /* ns */
    u32 tgid; /* of the thread that was woken */
    u8 kind; /* enum futex_kind, as in struct call */
    u8 end; /* enum wait_end */
    u8 pad[2];
};

struct captured_release { /* END_RELEASE */
    struct release release;
    struct capture by; /* the thread that released the lock */
};

BPF_RINGBUF_OUTPUT(releases, RELEASES_PAGES); /* the sampler looks at it with every tick */
BPF_ARRAY(release_record, struct captured_release, 1); /* describes the layout of a record */

enum refused { REFUSED_SAMPLES, REFUSED_NS };
BPF_PERCPU_ARRAY(refused_releases, u64, 2); /* by enum refused: samples for which the ring had no room */

struct queue_key {
    u64 uaddr;
    u32 tgid;
    u32 pad;
};

/* The threads that wait for a lock. They join and leave it on several CPUs at a time. All threads together
 * have waited `sum` + `waiting` * now: `sum` has the end of every wait that has ended, less the begin of
 * every wait. */
struct lock_queue {
    u64 began; /* time at which the entry was made: the kernel drops entries when others need their place */
    u64 waiting; /* number of threads */
    u64 sum;
    u64 accounted; /* the part of the waited time that has been attributed */
    u64 released; /* time up to which it has been, for threads that still wait */
};

BPF_TABLE("lru_hash", struct queue_key, struct lock_queue, lock_queues, LOCK_QUEUES_ENTRIES);

/* The current thread, whose entry is `t`, leaves its CPU at `now` to wait for a lock. */
static __always_inline void join_queue(struct thread *t, u64 now)
{
    struct queue_key key = {.uaddr = t->call.uaddr, .tgid = t->tgid};

    if (t->call.kind > KIND_PI || restraint() >= RESTRAINT_STACKS)
        return;
    struct lock_queue *queue = lock_queues.lookup(&key);
    if (!queue) {
        struct lock_queue fresh = {.began = now, .released = now};
        lock_queues.insert(&key, &fresh);
        queue = lock_queues.lookup(&key);
    }
    if (!queue || queue->began > now) /* another thread has made it since; see leave_queue() */
        return;
    __sync_fetch_and_add(&queue->sum, -now);
    __sync_fetch_and_add(&queue->waiting, 1);
    t->queued = 1;
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
static __always_inline u8 end_of_wait(struct thread *t)
{
    u64 task = CURRENT_TASK();
    u32 flags = 0;

    READ_CURRENT(task, TASK_FLAGS, flags);
    if (flags & PF_EXITING)
        return t->tgid == bpf_get_current_pid_tgid() >> 32 ? END_OWNER_ENDED : END_NO_RELEASE;
    return !(flags & PF_KTHREAD) && is_releasing(t) ? END_RELEASE : END_NO_RELEASE;
}

/* Sample the end of a wait, after which `waited` ns are attributed. */
static __always_inline void sample_release(void *ctx, struct thread *t, u8 end, u64 waited)
{
    u32 zero = 0;
    struct control *c = control.lookup(&zero);
    struct release release = {
        .uaddr = t->call.uaddr,
        .weight = waited,
        .tgid = t->tgid,
        .kind = t->call.kind,
        .end = end,
    };

    if (!c || !c->wait_per_sample)
        return;
    u64 per_sample = c->wait_per_sample; /* below 2^32, so that nothing overflows here */
    if (waited < per_sample << 10) {
        if (bpf_get_prandom_u32() * per_sample >= waited << 22)
            return;
        release.weight = per_sample << 10;
    }
    if (end != END_RELEASE) {
        if (!releases.ringbuf_output(&release, sizeof(release), BPF_RB_NO_WAKEUP))
            return;
    } else {
        struct captured_release *record = releases.ringbuf_reserve(sizeof(struct captured_release));
        if (record) {
            record->release = release;
            record->by.bytes = 0;
            fill_capture(ctx, bpf_get_current_task(), &record->by);
            releases.ringbuf_submit(record, BPF_RB_NO_WAKEUP);
            return;
        }
    }
    u32 which = REFUSED_SAMPLES;
    u64 *refused = refused_releases.lookup(&which);
    if (refused)
        *refused += 1;
    which = REFUSED_NS;
    refused = refused_releases.lookup(&which);
    if (refused)
        *refused += release.weight;
}

/* Return the time from `begin` to `end`, or 0 if another CPU has noted `begin` after `end` was read. */
static __always_inline u64 time_between(u64 begin, u64 end)
{
    return end > begin ? end - begin : 0;
}

/* The wait of `t`, which is in the queue of its lock, ends at `now`. */
static __always_inline void leave_queue(void *ctx, struct thread *t, u8 end, u64 now)
{
    struct queue_key key = {.uaddr = t->call.uaddr, .tgid = t->tgid};
    struct lock_queue *queue = lock_queues.lookup(&key);
    u64 began = t->off_since ? t->off_since : now; /* it may be on its way out still */
    u64 waited = time_between(began, now);

    t->queued = 0;
    if (queue && queue->began <= began) { /* else it is not the entry that the thread has joined */
        u64 waiting = queue->waiting, all = queue->sum + waiting * now;
        u64 released = queue->released;
        if (end == END_NO_RELEASE) {
            /* Whoever made it wait has not let go. What this thread waited for it blames nobody. */
            waited = time_between(released > began ? released : began, now);
            add_to(&queue->accounted, waited);
        } else {
            u64 most = waiting * time_between(released, now);
            waited = all - queue->accounted;
            if (waited > most) /* a thread was about to join or leave it: `sum` and `waiting` do not match */
                waited = most;
            queue->accounted = all;
            queue->released = now;
        }
        __sync_fetch_and_add(&queue->sum, now);
        __sync_fetch_and_add(&queue->waiting, -1);
    }
    sample_release(ctx, t, end, waited);
}
