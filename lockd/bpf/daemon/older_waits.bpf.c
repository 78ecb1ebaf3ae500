// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Waits that began before lockd did. The program is attached to no event: the loader runs it once for
 * every task of the host when everything else is attached. From then on the programs see who ends these
 * waits, and when. */

#ifndef TRACE /* a trace enters the waits of its processes itself, with their stacks */
BPF_ARRAY(looked_at, u64, 1); /* time at which everything was attached, written by the loader */
BPF_ARRAY(clock_offset, u64, 1); /* least measured ns from the scheduler's clock to the monotonic; 0: none */

/* State of a sleeping thread. If it is the same at two times, the thread has slept all the time between. */
struct sleep {
    u64 state;
    u64 switches; /* number of times that the thread has left its CPU so far */
};

/* Whether a thread sleeps: it is off the CPU and not on a run queue. `sleep` is filled in. */
static __always_inline bool is_asleep(u64 task, struct sleep *sleep)
{
    u64 voluntary = 0, involuntary = 0;
    u8 on_cpu = 0, on_rq = 0; /* on_rq is a byte in 7.2; in 6.18 the low byte of an int, which suffices */
    u8 dequeued_later = 0;

    sleep->state = 0;
    READ_TASK(task, TASK_STATE, sleep->state);
#if TASK_STATE_BYTES == 4
    sleep->state &= 0xffffffff;
#endif
    READ_TASK(task, TASK_NVCSW, voluntary);
    READ_TASK(task, TASK_NIVCSW, involuntary);
    sleep->switches = voluntary + involuntary;
#ifdef TASK_ON_CPU
    READ_TASK(task, TASK_ON_CPU, on_cpu);
#endif
    READ_TASK(task, TASK_ON_RQ, on_rq);
#ifdef TASK_SCHED_DELAYED /* a sleeping thread may stay on the run queue for a while (152e11f6df29, 6.12) */
    READ_TASK(task, TASK_SCHED_DELAYED, dequeued_later);
#endif
    return sleep->state && !on_cpu && (!on_rq || dequeued_later);
}

#ifdef HAVE_LAST_ARRIVAL
#define FIRST_FAIR_PRIORITY 100 /* MAX_RT_PRIO */

/* Measure the offset between the clocks. The scheduler's clock advances with the monotonic clock but has
 * another origin. The current thread was given its CPU shortly before `now`. The time since then is part of
 * the measured offset and makes older waits seem shorter, so the least offset is kept. */
static __always_inline void compare_clocks(u64 *offset, u64 now)
{
    u64 arrived = 0;

    READ_TASK(bpf_get_current_task(), TASK_LAST_ARRIVAL, arrived);
    if (arrived && (!*offset || (s64)(now - arrived - *offset) < 0))
        *offset = now - arrived;
}

/* Return the time at which a sleeping thread left its CPU by the monotonic clock, or 0 if it is not known.
 * It is the time at which the thread was given the CPU, plus the time that it ran then. The latter is
 * known for the fair class only. */
static __always_inline u64 left_cpu(u64 task, u64 offset, u64 now)
{
    u64 arrived = 0, total = 0, before = 0;
    s32 priority = 0;

    READ_TASK(task, TASK_LAST_ARRIVAL, arrived);
    READ_TASK(task, TASK_SUM_EXEC, total);
    READ_TASK(task, TASK_PREV_SUM_EXEC, before);
    READ_TASK(task, TASK_PRIO, priority);
    u64 left = arrived + (total - before) + offset;
    return arrived && offset && priority >= FIRST_FAIR_PRIORITY && left < now ? left : 0;
}
#endif

/* Describe in `t` what a thread waits for. Return whether the wait is of interest, and what it is for can be
 * read here. Of interest are futex waits and uninterruptible waits: in other waits threads wait for work. */
static __always_inline bool describe_wait(u64 task, u64 task_state, u32 tid, struct thread *t)
{
    u32 flags = 0;
    u8 bits = 0;

    READ_TASK(task, TASK_FLAGS, flags);
    struct pt_regs *saved = user_regs_of(task);
    t->state = state_of(task_state);
    t->nr = flags & PF_KTHREAD ? NR_KERNEL : flags & PF_EXITING ? NR_EXITING : syscall_of(saved);
    READ_TASK(task, TASK_FROZEN, bits);
    bool is_frozen = (bits >> TASK_FROZEN_BIT) & 1; /* the bit is also set in the parent of a vfork */
    bool is_compat = false;
#ifdef FUTEX_WAITS
    is_compat = t->nr == NR_COMPAT; /* any call of a 32-bit program; mode calls sees none of its calls */
#endif
    if (t->state == STATE_INTERRUPTIBLE && (is_futex_wait(t->nr) || is_compat) && !is_frozen) {
#if defined(FUTEX_CALLS) || defined(FUTEX_WAITS)
        struct system_call call = call_of(saved, 4);
        u32 nr = is_compat ? number_of_compat(call.nr) : t->nr;
        t->call.tid = tid;
        t->call.uaddr = call.args[0];
        if (nr == NR_FUTEX)
            t->call.guess = kind_of_call(call.args[1], call.args[2], call.args[3]);
        else if (nr == NR_FUTEX_WAIT)
            t->call.guess = kind_of_value(call.args[1]);
        else
            return false; /* futex_waitv() or restart_syscall(): no argument is the address of the futex */
        t->call.since = t->off_since;
        t->call.kind = t->detail = t->call.guess;
        return t->call.guess < KIND_WAKE;
#else
        t->detail = KIND_NONE;
        return true;
#endif
    }
#ifdef WITH_OFFCPU
    /* The flags of clone3() are in the memory of the task's process, which cannot be read here. */
    if (t->state != STATE_UNINTERRUPTIBLE || t->nr == NR_CLONE3)
        return false;
    if (t->nr == NR_CLONE)
        t->detail = call_of(saved, 2).args[0] & CLONE_VFORK ? CLONE_AND_WAIT : CLONE_OTHER;
#ifdef TASK_IN_IOWAIT
    bits = 0;
    READ_TASK(task, TASK_IN_IOWAIT, bits);
    t->iowait = (bits >> TASK_IN_IOWAIT_BIT) & 1;
#endif
    return true;
#else
    return false;
#endif
}

/* Called for every task by an iterator. Arguments: information about the iteration, and the task, which is
 * NULL after the last one. */
int enter_older_wait(struct bpf_raw_tracepoint_args *ctx)
{
    u64 task = ctx->args[1], now = bpf_ktime_get_ns();
    u32 zero = 0, tid = 0;
    u64 *looked = looked_at.lookup(&zero), *offset = clock_offset.lookup(&zero);
    struct thread fresh = {};
    struct sleep sleep = {}, then = {};

    if (!task || !looked || !offset)
        return 0;
    fresh.off_since = *looked;
#ifdef HAVE_LAST_ARRIVAL
    compare_clocks(offset, now);
#endif
    if (!is_asleep(task, &sleep))
        return 0;
#ifdef HAVE_LAST_ARRIVAL
    u64 left = left_cpu(task, *offset, now);
    if (left)
        fresh.off_since = left;
#endif
    READ_TASK(task, TASK_PID, tid);
    READ_TASK(task, TASK_TGID, fresh.tgid);
    if (!describe_wait(task, sleep.state, tid, &fresh) || add_thread(tid, &fresh))
        return 0;
    if (is_asleep(task, &then) && then.switches == sleep.switches)
        return 0;
    /* The thread has woken meanwhile. If it woke before its entry was made and still runs, it would be taken
     * for blocked, so the entry is deleted. If the entry was made while it slept, as it should be, the
     * programs have seen the wake-up and have changed the entry. */
    struct thread *entered = entry_of(tid);
    if (entered && entered->off_since == fresh.off_since && !entered->woken_at)
        remove_thread(tid);
    return 0;
}
#endif
