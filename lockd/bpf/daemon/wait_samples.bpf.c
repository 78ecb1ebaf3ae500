// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Samples of waits off the CPU, with the stacks of the thread that waits and of the thread that wakes it.
 *
 * The user stack of a thread can be read only while it leaves its CPU, but for how long it will wait is known
 * only at its wake-up. So there are two chances. A thread that leaves its CPU is captured with the chance
 *     captured = (usual + LEAST_WAIT) / wait_per_capture, at most 1
 * where `usual` is for how long this thread usually waits in this system call. At its wake-up the sample is
 * completed, with the stacks of its waker, with the chance
 *     completed = waited / (captured * wait_per_capture), at most 1
 * and weighs waited / (captured * completed). The sum of the weights is right on average, whatever `usual`
 * is, and even if the sampler changes `wait_per_capture` meanwhile. If `usual` is right, each sample weighs
 * `wait_per_capture`: the chance is in proportion to the time waited, so that short waits cost next to
 * nothing however many they are. Waits longer than `wait_per_capture`, of threads that usually wait for so
 * long, are all sampled, and weigh what was waited. All of these times are in units of 1024 ns. */

#define LEAST_WAIT 64 /* some 65 us: bounds the weight of a wait that is much longer than usual */
#define FIRST_WAIT 0x18000 /* some 100 ms: `usual` for the first wait of a thread in a system call */
#define USUAL_WAITS 16384 /* a power of two; waits that share an element have less even weights */
#define USUAL_WAITS_BITS 14
#define LONGEST_USUAL 0x7fffffff /* longer waits count as this when `usual` is learnt */
#define MOST_WEIGHT (1ULL << 50) /* upper limit of a sample's weight, in units of 1024 ns: 36 years */
#define CERTAIN 0xffffffff /* a chance of 1: chances are in units of 2^-32 */
#define WAIT_FRAMES 48
#define WAIT_FUNCTIONS 32
#define WAIT_SAMPLES_PAGES 128

/* What a record of the ring is about. Python reads the names. */
enum wait_record_kind {
    WAIT_BEGINS, /* the stacks are of the thread that waits */
    WAIT_ENDS, /* the stacks are of the waker; if it is not known or the idle thread, there are none */
};

struct wait_record {
    u64 began; /* time at which the thread left its CPU: with `tid` it identifies the wait */
    u64 weight; /* of WAIT_ENDS, in ns */
    struct who who; /* the thread that waits */
    u32 tid; /* of that thread */
    u32 waker; /* of WAIT_ENDS: thread group that wakes it; 0: an interrupt on an idle CPU */
    s16 nr; /* of WAIT_ENDS; this and the next three members are as in struct thread */
    u8 state;
    u8 iowait;
    u8 detail;
    u8 kind; /* enum wait_record_kind */
    u8 is_woken; /* 1: the wake-up was seen */
    u8 pad;
};

struct captured_wait {
    struct wait_record record;
    u64 kernel[WAIT_FRAMES]; /* return addresses, innermost first, up to a 0 */
    struct capture by; /* its `tid` is 0 for a kernel thread, which has no user stack */
    u64 python[WAIT_FUNCTIONS]; /* the code objects of its Python functions, innermost first, up to a 0 */
};

BPF_RINGBUF_OUTPUT(wait_samples, WAIT_SAMPLES_PAGES); /* the sampler looks at it with every tick */
BPF_ARRAY(wait_sample_record, struct captured_wait, 1); /* tells Python the layout of a record */
BPF_ARRAY(usual_waits, u32, USUAL_WAITS); /* by thread and system call, see usual_wait() */

enum refused_wait { REFUSED_WAITS, REFUSED_WAITS_NS };
BPF_PERCPU_ARRAY(refused_waits, u64, 2); /* by enum refused_wait: number and ns of refused samples */

/* Count a sample of this weight in ns for which the ring buffer has no room. */
static __always_inline void refuse_wait(u64 weight)
{
    u32 which = REFUSED_WAITS;
    u64 *refused = refused_waits.lookup(&which);

    if (refused)
        *refused += 1;
    which = REFUSED_WAITS_NS;
    refused = refused_waits.lookup(&which);
    if (refused)
        *refused += weight;
}

/* Return a pointer to the time for which the thread `tid` usually waits in the system call that it is in, in
 * units of 1024 ns. The time is 0 if the thread has not waited in this call yet. */
static __always_inline u32 *usual_wait(u32 tid, struct thread *t)
{
    u32 at = (tid * 0x9e3779b1 ^ (u32)t->nr * 0x85ebca6b) >> (32 - USUAL_WAITS_BITS);

    return usual_waits.lookup(&at);
}

/* Take the stacks of the current thread. */
static __always_inline void capture_stacks(void *ctx, struct captured_wait *kept)
{
    u64 task = bpf_get_current_task();
    u32 flags = 0;

    __builtin_memset(kept->kernel, 0, sizeof(kept->kernel));
    bpf_get_stack(ctx, kept->kernel, sizeof(kept->kernel), 0);
    kept->by.tid = 0;
    kept->by.bytes = 0;
    READ_TASK(task, TASK_FLAGS, flags);
    if (flags & PF_KTHREAD)
        return;
    __builtin_memset(kept->by.frames, 0, sizeof(kept->by.frames));
    fill_capture(ctx, task, &kept->by);
    read_python_functions(kept->by.thread_pointer, kept->python, WAIT_FUNCTIONS);
}

static __always_inline void describe_end(struct wait_record *record, u64 task, u32 tid, struct thread *t,
                                         u64 weight)
{
    __builtin_memset(record, 0, sizeof(*record));
    record->kind = WAIT_ENDS;
    record->began = t->off_since;
    record->weight = weight;
    record->tid = tid;
    record->nr = t->nr;
    record->state = t->state;
    record->iowait = t->iowait;
    record->detail = t->detail;
    identify(task, &record->who);
}

/* The current thread, whose entry is `t`, leaves its CPU at `now` to wait. Capture it with a chance; return
 * this chance, or 0 if it is not captured. */
static __always_inline u32 begin_wait_sample(void *ctx, u64 task, u32 tid, struct thread *t, u64 now)
{
    u64 per_capture = CONTROL->wait_per_capture;
    u32 *usual = usual_wait(tid, t);

    if (!per_capture || !usual)
        return 0;
    u64 expected = (*usual ? *usual : FIRST_WAIT) + LEAST_WAIT;
    u32 chosen = chosen_by(now);
    if (chosen * per_capture >= expected << 32 && expected < per_capture)
        return 0;
    if (restraint() >= RESTRAINT_STACKS)
        return 0;
    struct captured_wait *kept = wait_samples.ringbuf_reserve(sizeof(struct captured_wait));
    if (!kept) {
        refuse_wait(per_capture << 10);
        return 0;
    }
    __builtin_memset(&kept->record, 0, sizeof(kept->record));
    kept->record.kind = WAIT_BEGINS;
    kept->record.began = now;
    kept->record.tid = tid;
    identify(task, &kept->record.who);
    capture_stacks(ctx, kept);
    wait_samples.ringbuf_submit(kept, BPF_RB_NO_WAKEUP);
    wake_sampler();
    if (t->nr != NR_KERNEL)
        tell_of_process(task, t->tgid, now);
    return expected < per_capture ? (expected << 32) / per_capture : CERTAIN;
}

/* Return the weight of a sample of a wait that began at `began` and ends at `now`, and whose thread was
 * captured with a `chance`; or 0 if the wait is not wanted or the second chance decides against it. */
static __always_inline u64 weight_of_wait(u32 chance, u64 began, u64 now)
{
    u64 waited = now > began ? now - began : 0, units = waited >> 10;

    if (!is_wanted(waited))
        return 0;
    /* The sample of a wait as long as this, or longer, is sure to be completed. */
    u64 certain = (u64)chance * CONTROL->wait_per_capture >> 32;
    if (units < certain) {
        if (bpf_get_prandom_u32() * certain >= units << 32)
            return 0;
        units = certain;
    }
    u64 whole = units / chance, weight = (whole << 32) + ((units % chance << 32) / chance);
    return (whole < MOST_WEIGHT >> 32 ? weight : MOST_WEIGHT - 1) << 10;
}

/* The wait of `task`, which was captured with a `chance`, ends at `now`; `t` is its entry. If `task` is being
 * `woken`, the current thread is its waker. Stacks of the idle thread are not taken: they say nothing. */
static __always_inline void end_wait_sample(void *ctx, u64 task, u32 tid, struct thread *t, u32 chance,
                                            bool woken, u64 now)
{
    u64 began = t->off_since, weight = weight_of_wait(chance, began, now), id = bpf_get_current_pid_tgid();

    if (!weight)
        return;
    if (woken && (u32)id) {
        struct captured_wait *kept = wait_samples.ringbuf_reserve(sizeof(struct captured_wait));
        if (!kept) {
            refuse_wait(weight);
            return;
        }
        describe_end(&kept->record, task, tid, t, weight);
        kept->record.is_woken = 1;
        kept->record.waker = id >> 32;
        capture_stacks(ctx, kept);
        wait_samples.ringbuf_submit(kept, BPF_RB_NO_WAKEUP);
        wake_sampler();
        return;
    }
    struct wait_record *record = wait_samples.ringbuf_reserve(sizeof(struct wait_record));
    if (!record) {
        refuse_wait(weight);
        return;
    }
    describe_end(record, task, tid, t, weight);
    record->is_woken = woken;
    wait_samples.ringbuf_submit(record, BPF_RB_NO_WAKEUP);
    wake_sampler();
}

/* `task`, whose entry is `t`, is about to run again at `now`: learn for how long it usually waits. */
static __always_inline void return_from_wait(u64 task, u32 tid, struct thread *t, u64 now)
{
    if (t->state == STATE_RUNNABLE)
        return;
    if (t->woken_at < t->off_since) { /* its wake-up was not seen */
        u32 chance = t->waker;
        t->waker = 0;
        if (chance)
            end_wait_sample(NULL, task, tid, t, chance, false, now);
        return;
    }
    u32 *usual = usual_wait(tid, t);
    u64 units = (t->woken_at - t->off_since) >> 10;
    if (units > LONGEST_USUAL)
        units = LONGEST_USUAL;
    if (!usual)
        return;
    u32 learnt = *usual ? *usual + ((u32)units >> 2) - (*usual >> 2) : units;
    *usual = learnt ? learnt : 1; /* 0 means that the thread has not waited yet */
}
