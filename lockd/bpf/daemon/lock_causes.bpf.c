// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Why threads wait for a lock for so long: what the thread that holds it does meanwhile.
 *
 * The holder of a lock is looked for when a thread begins to wait, in the memory of the lock: many locks
 * store their owner. At a release, the thread that is woken becomes the holder, if others still wait. From
 * then on the holder is followed: each of its switches and wake-ups says what it has done since the last one,
 * and the queue of the lock says for how long threads have waited meanwhile. Which thread releases the lock
 * is known (lock_queues.bpf.c). If it is not the one that was followed, what the followed thread did is
 * thrown away.
 *
 * Many locks do not store their owner, and to follow a holder takes longer than many locks are held: if the
 * last hold of a lock was short, the next holder is not followed until it turns out to hold the lock for
 * longer. For a holder that was not followed, its entry in `threads` says at the release what it did since it
 * last left its CPU, and only the time in which threads waited counts. */

#define SHORT_HOLD_NS 50000

/* Return the key of the queue of a lock in user space. (The key for a lock of the kernel is its address.) It
 * is one word, because a look-up by a longer key takes twice as long. A program can choose where its locks
 * are. It cannot choose a place whose key is that of another process's lock, because it does not know the
 * secret. */
static __always_inline u64 queue_of(u64 address, u32 tgid)
{
    return address ^ tgid * CONTROL->queue_secret;
}

/* Return the time from `begin` to `end`, or 0 if another CPU has noted `begin` after `end` was read. */
static __always_inline u64 time_between(u64 begin, u64 end)
{
    return end > begin ? end - begin : 0;
}

#ifdef WITH_CAUSES

/* What the holder of a lock does from one of its switches or wake-ups to the next. */
enum holder_state { HOLDER_RUNNING, HOLDER_READY, HOLDER_BLOCKED, HOLDER_UNKNOWN };

/* An absence of a holder from its CPU. The members up to `detail` are as in struct thread. */
struct absence {
    s16 nr;
    u8 state;
    u8 iowait;
    u8 detail;
    u8 in_kernel; /* 1: it waited for a lock of the kernel */
    u16 pad;
    u64 lock; /* the address of the lock that it waited for; 0: it waited for something else */
};

/* How long threads have waited since the lock was last released: sums over all these threads, in ns. */
struct hold_times {
    u64 known; /* while it was known which thread held the lock */
    u64 ready; /* of `known`: while the holder had no CPU although it was ready to run */
    u64 blocked; /* of `known`: while the holder was blocked */
    struct absence absence; /* one of those in `blocked`, chosen at random in proportion to their times */
};

/* A hold of a lock while threads wait for the lock. */
struct hold {
    u32 tid; /* of the holder; 0: not followed */
    u32 is_short; /* 1: the last hold was shorter than SHORT_HOLD_NS */
    u64 since; /* time up to which `times` is known */
    u64 waited; /* waited_until() of the queue at `since` */
    u64 waiting; /* number of threads that waited at `since` */
    struct hold_times times;
};

/* Key of a thread by its id in its own pid namespace, which is the id that locks store. */
struct namespace_id {
    u32 tgid; /* as lockd sees it */
    u32 tid; /* as the thread sees it */
};

BPF_TABLE("lru_hash", struct namespace_id, u32, namespace_ids, NAMESPACE_IDS_ENTRIES);
/* By thread id of a followed holder, the key of the lock's queue. */
BPF_TABLE("lru_hash", u32, u64, held_locks, LOCK_QUEUES_ENTRIES);

#define UPID_BYTES 16 /* struct upid: nr, and a pointer to the namespace */

/* Return the id of the current thread in its own pid namespace, or 0 if that is the initial pid namespace,
 * whose ids lockd uses. */
static __always_inline u32 namespace_tid(u64 task)
{
    u64 pid = 0;
    u32 level = 0, tid = 0;

    READ_CURRENT(task, TASK_THREAD_PID, pid);
    READ_TASK(pid, PID_LEVEL, level);
    if (level)
        READ_TASK(pid, PID_NUMBERS + level * UPID_BYTES, tid);
    return tid;
}

/* Note the id that the current thread, whose entry is `t`, has in its own pid namespace. */
static __always_inline void note_namespace_id(u64 task, u32 tid, struct thread *t)
{
    struct namespace_id id = {.tgid = t->tgid, .tid = namespace_tid(task)};

    if (id.tid)
        namespace_ids.update(&id, &tid);
    t->flags |= THREAD_ID_NOTED;
}

/* Return the id, in the initial pid namespace, of the thread of the current process that has the id `stored`
 * in its own pid namespace; 0 if it is not known. */
static __always_inline u32 thread_of(u64 task, u32 tgid, u32 stored)
{
    struct namespace_id id = {.tgid = tgid, .tid = stored};

    if (!namespace_tid(task))
        return stored;
    u32 *tid = namespace_ids.lookup(&id);
    return tid ? *tid : 0;
}

#ifdef WITH_KERNEL_HOLDERS
static __always_inline u64 lock_awaited_by(u32 tid);
#endif

static __always_inline bool is_futex_wait(s16 nr);

/* Note the last absence of the thread `tid`, whose entry is `t`. */
static __always_inline void note_absence(struct absence *absence, u32 tid, struct thread *t)
{
    absence->nr = t->nr;
    absence->state = t->state;
    absence->iowait = t->iowait;
    absence->detail = t->detail;
    absence->in_kernel = !!(t->awaits & SLEPT_FOR_LOCK);
    absence->lock = is_futex_wait(t->nr) && t->detail <= KIND_PI ? t->call.uaddr : 0;
#ifdef WITH_KERNEL_HOLDERS
    if (t->awaits) /* once a thread has got a lock of the kernel, the lock's address is not known any more */
        absence->lock = t->awaits & AWAITS_LOCK ? lock_awaited_by(tid) : 0;
#endif
}

/* The holder was in `state` (enum holder_state) until `now`: add to `hold` what threads have waited
 * meanwhile. At `now`, `waiting` threads wait, and waited_until() of the queue is `waited`. `t` is the
 * holder's entry, which is needed only if the holder was blocked. */
static __always_inline void add_to_hold(struct hold *hold, u8 state, struct thread *t, u64 waited,
                                        u64 waiting, u64 now)
{
    u64 most = (waiting > hold->waiting ? waiting : hold->waiting) * time_between(hold->since, now);
    u64 part = time_between(hold->waited, waited), before = hold->times.blocked;

    if (part > most) /* `sum` and `waiting` of the queue do not match; see leave_queue() */
        part = most;
    hold->since = now;
    hold->waited = waited;
    hold->waiting = waiting;
    if (state == HOLDER_UNKNOWN)
        return;
    hold->times.known += part;
    if (state == HOLDER_READY)
        hold->times.ready += part;
    if (state != HOLDER_BLOCKED)
        return;
    hold->times.blocked = before + part;
    /* `drawn` is a random number below `all`. Once all threads together have waited for 73 minutes, which
     * many threads soon have, random * all has more than 64 bits. So the product is made of two halves, which
     * have room for nine years. */
    u64 random = (u32)bpf_get_prandom_u32(), all = hold->times.blocked >> 10;
    u64 drawn = ((random >> 16) * all >> 16) + ((random & 0xffff) * all >> 32);
    if (before && drawn >= part >> 10)
        return;
    note_absence(&hold->times.absence, hold->tid, t);
}

/* The thread `tid`, whose entry is `t`, is followed from `now` on as the holder of the lock `key`. A thread
 * is followed for one lock at a time: for the first of its locks for which others wait. */
static __always_inline void begin_hold(struct hold *hold, u64 *key, u32 tid, struct thread *t, u64 waited,
                                       u64 waiting, u64 now)
{
    struct hold fresh = {
        .tid = tid, .is_short = hold->is_short, .since = now, .waited = waited, .waiting = waiting};

    if (t->flags & THREAD_HOLDS)
        return;
    u64 *last = held_locks.lookup(&tid);
    if (last) /* an update takes several times as long */
        *last = *key;
    else if (held_locks.update(&tid, key))
        return;
    *hold = fresh;
    t->flags |= THREAD_HOLDS;
}

/* The current thread releases the lock at `now`. If it was followed, return in `times` what it has done. If
 * `hold` has its id but its flag THREAD_HOLDS is not set, it was not followed: another CPU may have changed
 * the flags at the same time, or the id was that of another thread before. */
static __always_inline void end_hold(struct hold *hold, struct hold_times *times, u64 waited, u64 waiting,
                                     u64 now)
{
    u32 tid = bpf_get_current_pid_tgid();
    struct thread *t = hold->tid == tid ? entry_of(tid) : NULL;

    if (t && t->flags & THREAD_HOLDS) {
        add_to_hold(hold, HOLDER_RUNNING, NULL, waited, waiting, now);
        *times = hold->times;
        t->flags &= ~THREAD_HOLDS;
    }
    hold->tid = 0;
}

/* Whether to find out which thread holds the lock for which the current thread `tid` begins to wait at `now`:
 * the holder is not known, or it is thought to be this thread, which was woken but has found the lock taken.
 * If the last hold was short, the answer is no until SHORT_HOLD_NS after `released`, the last release. */
static __always_inline bool needs_holder(struct hold *hold, u32 tid, u64 released, u64 now)
{
    if (hold->tid == tid)
        hold->tid = 0;
    if (hold->is_short && time_between(released, now) < SHORT_HOLD_NS)
        return false;
    return !hold->tid;
}

/* The thread `tid` holds the lock `key`, for which the current thread waits from `now` on. Unless `tgid` is
 * 0, only a thread of the process `tgid` can hold the lock. The holder has not changed its state for some
 * time, and counts as having held the lock for that time. Time before `since` does not count, because nobody
 * waited for this holder then. Threads that wait besides the current one count as waiting all that time. */
static __always_inline void follow_holder(struct hold *hold, u64 *key, u32 tgid, u32 tid, u64 since,
                                          u64 waited, u64 waiting, u64 now)
{
    struct thread *t = entry_of(tid);

    if (!t || (tgid && t->tgid != tgid) || !waiting)
        return;
    u64 from = t->woken_at < t->off_since ? t->off_since : t->woken_at;
    u64 span = time_between(from > since ? from : since, now);
    begin_hold(hold, key, tid, t, waited - (waiting - 1) * span, waiting, now - span);
}

/* Return a time in units of 1024 ns. 32 bits of these are 73 minutes; a longer time counts as 73 minutes. */
static __always_inline u32 in_units(u64 ns)
{
    u64 units = ns >> 10;

    return units >> 32 ? ~0U : units;
}

/* A thread, whose entry is `t`, runs again at `now`. Note what describe_unfollowed() needs: since when it
 * runs, for how long it was away before, and for how long of that it was ready to run. If the switch-in was
 * not `seen`, the thread counts as running from `now` on, and nothing is known of the time before. */
static __always_inline void note_return(struct thread *t, u64 now, bool seen)
{
    u64 off_since = t->off_since, woken_at = t->woken_at;
    u64 ready_since = t->state == STATE_RUNNABLE ? off_since : woken_at < off_since ? now : woken_at;

    t->waker = seen ? in_units(now - off_since) : 0;
    t->ready = in_units(now - ready_since);
    t->woken_at = now;
}

/* The current thread, which was not followed, releases a lock at `now`. Threads have waited for the lock
 * since the time `since`, `waited` ns all together. Return in `times` what the current thread has done since
 * it last left its CPU, as its entry says. If `since` is less than SHORT_HOLD_NS ago, the thread counts as
 * running before it left its CPU. The number of waiters counts as constant. */
static __always_inline void describe_unfollowed(struct hold_times *times, u64 since, u64 waited, u64 now)
{
    u32 tid = bpf_get_current_pid_tgid();
    struct thread *t = entry_of(tid);
    u64 span = time_between(since, now);

    if (!t || t->off_since || !t->woken_at || !span)
        return;
    u64 away = (u64)t->waker << 10, ready = (u64)t->ready << 10, on_average = (waited << 8) / span;
    u64 left = time_between(away, t->woken_at);
    u64 gone = time_between(left > since ? left : since, t->woken_at);
    if (ready > gone)
        ready = gone;
    times->known = left <= since || span < SHORT_HOLD_NS ? waited : on_average * (now - left) >> 8;
    times->ready = on_average * ready >> 8;
    times->blocked = on_average * (gone - ready) >> 8;
    if (times->blocked)
        note_absence(&times->absence, tid, t);
}
#endif
