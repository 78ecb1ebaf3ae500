// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Who makes threads wait for a lock: the queue of each lock, and samples of what ends the waits.
 *
 * Between two releases of a lock one holder has it. All the time that threads wait meanwhile, however many
 * they are and however long they have waited before, is time that this holder makes them wait. At the
 * release the holder is the current thread, so that its stack can be read. A queue for each lock knows how
 * long its threads have waited since the last release.
 *
 * Releases are sampled in proportion to that time. A release after `wait_per_sample` or more of waiting is
 * always sampled, and weighs what was waited. Any other is sampled with the chance waited / wait_per_sample,
 * and weighs wait_per_sample. The sum of the weights is right on average, even if the sampler changes
 * `wait_per_sample` meanwhile.
 *
 * user_releases.bpf.c and kernel_releases.bpf.c tell what ends a wait, and take the stacks. */

#define RELEASES_PAGES 64

/* How the wait of a thread in a queue ended. Python reads the names. */
enum wait_end {
    END_RELEASE, /* the waker releases the lock */
    END_OWNER_ENDED, /* the waker is an ending thread of the process: the kernel releases its robust locks */
    END_NO_RELEASE, /* a timeout, a signal, or a release in a way that is not known here */
};

/* A sample of the end of a wait. */
struct release {
    u64 address; /* of the lock */
    u64 weight; /* ns */
#ifdef WITH_CAUSES
    u64 waited; /* ns that threads have waited since the previous release; `weight` may be more than that */
    struct hold_times times; /* what the holder has done since then, as far as it is known */
#endif
    u32 tgid; /* process of the thread that was woken */
    u8 kind; /* if `in_kernel`: enum lock_type; else: enum futex_kind, as in struct call */
    u8 end; /* enum wait_end */
    u8 in_kernel; /* 1: a lock of the kernel */
    u8 pad;
};

#ifndef TRACE /* a trace counts all releases, and samples none */
struct release_sample { /* each record of a sample begins with it */
    struct release release;
    struct who who; /* a thread of the process that waited */
};

BPF_RINGBUF_OUTPUT(releases, RELEASES_PAGES); /* the sampler looks at it with every tick */

enum refused { REFUSED_SAMPLES, REFUSED_NS };
BPF_PERCPU_ARRAY(refused_releases, u64, 2); /* by enum refused: number and ns of refused samples */
#endif

/* The threads that wait for a lock. They join and leave this queue on several CPUs at a time. Until the time
 * `now`, all threads together have waited `sum` + `waiting` * now. Here `sum` is the sum of the end times of
 * all waits that have ended, minus the begin times of all waits. */
struct lock_queue {
    u64 began; /* time at which the entry was made: the kernel drops entries when others need their place */
    u64 waiting; /* number of threads */
    u64 sum;
    u64 accounted; /* value of waited_until() up to which waiting has been attributed to ends of waits */
    u64 released; /* time of the last release; at first, time of the first wait */
    u64 busy; /* time since which threads wait without a break; see join_queue() */
#ifdef WITH_CAUSES
    struct hold hold;
#endif
};

BPF_TABLE("lru_hash", u64, struct lock_queue, lock_queues, LOCK_QUEUES_ENTRIES); /* keys: see queue_of() */

/* Return for how long all threads of a queue together have waited until `now`, in ns; only differences of two
 * such times mean something. */
static __always_inline u64 waited_until(struct lock_queue *queue, u64 waiting, u64 now)
{
    return queue->sum + waiting * now;
}

/* Return the time since which threads have waited for the holder: the last release or, if it is later, the
 * time at which the queue was last empty. */
static __always_inline u64 waited_since(struct lock_queue *queue)
{
    u64 since = queue->released;

    raise_own(&since, queue->busy);
    return since;
}

/* The current thread, whose entry is `t`, leaves its CPU at `now` to wait for the lock `key`; `queued` (enum
 * queued) is what to note in its entry. Return the queue of the lock, or NULL if the wait is not counted. */
static __always_inline struct lock_queue *join_queue(struct thread *t, u64 *key, u8 queued, u64 now)
{
    if (restraint() >= RESTRAINT_STACKS)
        return NULL;
    struct lock_queue *queue = lock_queues.lookup(key);
    if (!queue) {
        struct lock_queue fresh = {.began = now, .released = now};
        lock_queues.insert(key, &fresh);
        queue = lock_queues.lookup(key);
    }
    if (!queue || queue->began > now) /* another thread has made the queue after `now`; see leave_queue() */
        return NULL;
    /* Two threads that join at once may both be the first. A thread that joins just before the last other one
     * has left is not taken for the first: `busy` is then too early, until the queue is empty again. */
    if (!queue->waiting)
        queue->busy = now;
    __sync_fetch_and_add(&queue->sum, -now);
    __sync_fetch_and_add(&queue->waiting, 1);
    t->queued = queued;
    return queue;
}

#ifdef WITH_CAUSES
/* The thread `holder` holds the lock `key`, for which the current thread begins to wait at `now`. `tgid` is
 * the process whose lock it is; 0: a lock of the kernel. */
static __always_inline void note_holder(struct lock_queue *queue, u64 *key, u32 tgid, u32 holder, u64 now)
{
    u64 waiting = queue->waiting;

    follow_holder(&queue->hold, key, tgid, holder, waited_since(queue), waited_until(queue, waiting, now),
                  waiting, now);
}

/* The thread `tid`, whose entry is `t` and which holds a lock for which others wait, is switched in or out,
 * or is being woken. Until `now` it was in `state` (enum holder_state). */
static __always_inline void holder_changes(u32 tid, struct thread *t, u8 state, u64 now)
{
    u64 *key = held_locks.lookup(&tid);
    struct lock_queue *queue = key ? lock_queues.lookup(key) : NULL;

    /* It was not the holder after all, the queue was dropped, or nobody waits any more. */
    if (!queue || queue->hold.tid != tid || !queue->waiting) {
        if (queue && queue->hold.tid == tid)
            queue->hold.tid = 0;
        t->flags &= ~THREAD_HOLDS;
        return;
    }
    u64 waiting = queue->waiting;
    add_to_hold(&queue->hold, state, t, waited_until(queue, waiting, now), waiting, now);
}
#endif

/* The wait of the thread `tid`, whose entry is `t` and which is in the queue of the lock `key`, ends at `now`
 * by `end` (enum wait_end). Return the time in ns that is to be attributed to this end. If WITH_CAUSES is
 * defined and `end` is not END_NO_RELEASE, write to `release` what the holder has done, and to `since` the
 * time since which threads have waited for it. `is_next`: the woken thread becomes the holder. */
static __always_inline u64 leave_queue(u32 tid, struct thread *t, u64 *key, u8 end, u64 now,
                                       struct release *release, u64 *since, bool is_next)
{
    struct lock_queue *queue = lock_queues.lookup(key);
    u64 began = t->off_since ? t->off_since : now; /* the thread may still be leaving its CPU */
    u64 waited = time_between(began, now);

    t->queued = QUEUED_NOT;
    if (!queue || queue->began > began) /* the thread has joined another queue, which was dropped */
        return waited;
    if ((s64)queue->waiting < 1) {
        /* Fewer threads are counted than wait: two CPUs have let the same thread leave. The queue is made
         * anew for the next thread, so that holders are not charged by a wrong number of threads. */
        lock_queues.delete(key);
        return waited;
    }
    u64 waiting = queue->waiting, all = waited_until(queue, waiting, now);
    u64 released = queue->released;
    if (end == END_NO_RELEASE) {
        /* The holder has not released the lock. The wait of this thread is attributed to nobody. */
        waited = time_between(released > began ? released : began, now);
        add_to(&queue->accounted, waited);
    } else {
        u64 from = waited_since(queue), most = waiting * time_between(from, now);
        waited = all - queue->accounted;
        if (waited > most) /* a thread was about to join or leave it: `sum` and `waiting` do not match */
            waited = most;
        queue->accounted = all;
        queue->released = now;
#ifdef WITH_CAUSES
        *since = from;
        release->waited = waited;
        end_hold(&queue->hold, &release->times, all, waiting, now);
        queue->hold.is_short = time_between(released, now) < SHORT_HOLD_NS;
        if (is_next && waiting > 1 && !queue->hold.is_short)
            begin_hold(&queue->hold, key, tid, t, all, waiting - 1, now);
#endif
    }
    __sync_fetch_and_add(&queue->sum, now);
    __sync_fetch_and_add(&queue->waiting, -1);
    return waited;
}

#ifndef TRACE
/* Upper limit of a sample's weight in ns: 36 years of all threads together. */
#define MOST_SAMPLE (1ULL << 60)

/* Decide whether to sample the end of a wait at `now`, to which `waited` ns are attributed. Return the weight
 * of the sample, or 0 if there is to be none. */
static __always_inline u64 weight_of_sample(u64 waited, u64 now)
{
    u64 per_sample = CONTROL->wait_per_sample; /* below 2^32, so that nothing overflows here */

    if (!per_sample)
        return 0;
    if (waited >= per_sample << 10)
        return waited < MOST_SAMPLE ? waited : MOST_SAMPLE;
    return chosen_by(now) * per_sample < waited << 22 ? per_sample << 10 : 0;
}

/* Count a sample of this weight in ns for which the ring buffer has no room. */
static __always_inline void refuse_sample(u64 weight)
{
    u32 which = REFUSED_SAMPLES;
    u64 *refused = refused_releases.lookup(&which);

    if (refused)
        *refused += 1;
    which = REFUSED_NS;
    refused = refused_releases.lookup(&which);
    if (refused)
        *refused += weight;
}

/* Report a sample of a wait of `task` that needs no stack. */
static __always_inline void output_release(struct release *release, u64 task)
{
    struct release_sample *sample = releases.ringbuf_reserve(sizeof(struct release_sample));

    if (!sample) {
        refuse_sample(release->weight);
        return;
    }
    sample->release = *release;
    identify(task, &sample->who);
    releases.ringbuf_submit(sample, BPF_RB_NO_WAKEUP);
    wake_sampler();
}
#endif
