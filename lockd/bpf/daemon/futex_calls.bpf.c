// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Mode calls of the futex program: every futex call, from its beginning to its end, whether it blocks or
 * not. */

/* Calls of one thread that did not block and differ only in their times. */
struct tally {
    u64 uaddr;
    u32 tid;
    u8 kind; /* enum futex_kind */
    u8 error;
    u8 window; /* the window in which they ended */
    u8 pad;
    u64 calls; /* 0: none */
    u64 sys_ns;
    u64 max_sys_ns;
#ifdef TRACE
    struct call_stack_ids stacks;
#endif
};

/* The futex calls of the thread that runs on this CPU. A call that does not block touches no hash map: it
 * is added to the tally. The tally is added to the aggregate when a different call ends, or any call in
 * another window. When the thread leaves the CPU, sched_switch adds the tally as well, and moves the call
 * in progress to the thread's own entry. So a thread that moves to another CPU leaves nothing behind here. */
struct running {
    struct call call;
    struct tally tally;
    u32 window; /* window of the last call */
    u32 timed; /* number of calls in that window, up to ALL_TIMED */
    u32 random;
    u32 pad;
};

BPF_PERCPU_ARRAY(running, struct running, 1);

/* A preemptible kernel may preempt a program that a trampoline calls. The program at sched_switch then
 * counts what it finds in `running` at that moment. A program therefore removes calls from `running`
 * before it counts them. This barrier keeps the compiler from changing the order. */
#define IN_THIS_ORDER() asm volatile("" ::: "memory")

#ifndef WITH_STEPS
#define count_step(step)
#endif

#define EINTR 4
#define EDEADLK 35

/* Return the lock address for the key of a call; 0 if the call is not counted by lock. In the daemon, calls
 * that did not block have no address: one entry for each thread is enough. The exception is a call that the
 * kernel refused because it would deadlock. */
static __always_inline u64 address_of(struct call *call, bool did_block, u8 error)
{
#ifdef TRACE
    return call->uaddr;
#else
    return did_block || error == EDEADLK ? call->uaddr : 0;
#endif
}

/* Add calls of the thread `key->tid`, mostly the current thread. If it is another one, its switch-out was not
 * seen, and only its id is known. */
static __always_inline void count_here(struct futex_key *key, struct ended *ended)
{
    u64 id = bpf_get_current_pid_tgid();

    count_calls(key->tid == (u32)id ? bpf_get_current_task() : 0, id >> 32, key, ended);
}

/* Count a call that has ended and may have blocked. */
static __always_inline void count_call(struct call *call, u64 now, u64 blocked, u8 error)
{
    u64 took = call->stands_for ? now - call->since : 0;
    u64 sys = took > blocked ? took - blocked : 0;
    bool did_block = blocked && call->kind < KIND_WAKE && is_wanted(blocked);
    u64 counted = did_block ? blocked : 0;
    struct ended ended = {1, counted, counted, sys * call->stands_for, sys};
    struct futex_key key = {.tid = call->tid, .kind = call->kind, .error = error};

    key.slot = did_block ? slot_of(blocked) : SLOT_NONE;
    key.uaddr = address_of(call, did_block, error);
#ifdef TRACE
    key.stacks = call->stacks;
#endif
    count_here(&key, &ended);
}

static __always_inline void count_tally(struct tally *tally)
{
    struct futex_key key = {
        .uaddr = tally->uaddr,
        .tid = tally->tid,
        .kind = tally->kind,
        .slot = SLOT_NONE,
        .error = tally->error,
    };
    struct ended ended = {.calls = tally->calls, .sys_ns = tally->sys_ns, .max_sys_ns = tally->max_sys_ns};

    tally->calls = 0;
    IN_THIS_ORDER();
#ifdef TRACE
    key.stacks = tally->stacks;
#endif
    if (ended.calls)
        count_here(&key, &ended);
}

static __always_inline bool has_stacks_of(struct tally *tally, struct call *call)
{
#ifdef ALL_STACKS
    return tally->stacks.user == call->stacks.user && tally->stacks.kernel == call->stacks.kernel;
#else
    return true; /* without ALL_STACKS, only calls that block have stacks */
#endif
}

/* Count a call that has ended and did not block. */
static __always_inline void tally_call(struct tally *tally, struct call *call, u64 now, u8 error)
{
    u64 uaddr = address_of(call, false, error);
    u64 longest = call->stands_for ? now - call->since : 0, sys = longest * call->stands_for;
    int window = current_window();

    if (tally->calls && tally->tid == call->tid && tally->uaddr == uaddr && tally->kind == call->kind &&
        tally->error == error && tally->window == window && has_stacks_of(tally, call)) {
        IN_THIS_ORDER();
        tally->calls += 1;
        tally->sys_ns += sys;
        raise_to(&tally->max_sys_ns, longest);
        return;
    }
    count_tally(tally);
    /* The next window must come even if nothing is added to a map: a call in it will count this tally. */
    if (!is_own(bpf_get_current_pid_tgid() >> 32))
        end_window_soon(window);
    *tally = (struct tally){
        .uaddr = uaddr,
        .tid = call->tid,
        .kind = call->kind,
        .error = error,
        .window = window,
        .calls = 1,
        .sys_ns = sys,
        .max_sys_ns = longest,
#ifdef TRACE
        .stacks = call->stacks,
#endif
    };
}

/* Reading the clock twice is most of the cost of a call that does not block. On each CPU ALL_TIMED calls
 * are timed in each window. Of the calls beyond that, one in eight is timed at random, and counts for
 * eight. */
#define ALL_TIMED 64
#define TIMED_SHIFT 3

/* Return the number of calls that the next call on this CPU counts for in sums of times; 0: it is not
 * timed. */
static __always_inline u8 stands_for(struct running *here)
{
#ifdef TRACE
    return 1;
#else
    u32 window = current_window();

    if (here->window != window) {
        here->window = window;
        here->timed = 0;
    }
    if (here->timed < ALL_TIMED) {
        here->timed += 1;
        return 1;
    }
    here->random = here->random * 1664525 + 1013904223; /* the upper bits are random enough */
    return here->random >> (32 - TIMED_SHIFT) ? 0 : 1 << TIMED_SHIFT;
#endif
}

#define NOT_TIMED 1 /* in place of the time at which the call began */

/* The current thread begins the futex system call `nr`. The first four elements of `arguments` are used. */
static __always_inline int futex_began(void *ctx, u32 nr, u64 *arguments)
{
    struct call call = {.tid = bpf_get_current_pid_tgid()};
    u32 zero = 0;
    struct running *here = running.lookup(&zero);

    if (!here)
        return 0;
#ifdef TRACE
    if (!is_current_traced())
        return 0;
#ifdef ALL_STACKS
    call.stacks = keep_call_stacks(ctx);
#endif
    count_step(STEP_BEGAN);
#endif
    describe_call(&call, nr, arguments);
    call.stands_for = stands_for(here);
    call.since = call.stands_for ? bpf_ktime_get_ns() : NOT_TIMED;
    here->call = call;
    return 0;
}

/* The current thread begins restart_syscall(). By this call the kernel continues, after SIGCONT, a timed wait
 * that a stop of the process interrupted. */
static __always_inline int futex_restarted(void)
{
    u32 zero = 0, tid = bpf_get_current_pid_tgid();
    struct running *here = running.lookup(&zero);
    struct thread *t = entry_of(tid);

    if (!here || !t || !t->call.restart)
        return 0;
    count_step(STEP_RESTARTED);
    t->call.restart = 0;
    here->call = t->call;
    here->call.since = bpf_ktime_get_ns();
    t->call.since = 0;
    return 0;
}

#define ERESTARTSYS 512
#define ERESTART_RESTARTBLOCK 516

static __always_inline void came_back_unseen(u32 tid, struct thread *t, u64 now);

/* A futex call, or restart_syscall(), of the current thread ends. */
static __always_inline int futex_ended(void *ctx, s64 ret)
{
    u32 zero = 0, tid = bpf_get_current_pid_tgid();
    struct running *here = running.lookup(&zero);
    u64 now = 0;
    /* Error codes from 512 on do not leave the kernel. They mean that a signal interrupted the call, and that
     * the kernel decides later whether the thread makes it again. A call that is made again counts again. */
    u8 error = ret >= 0 ? 0 : ret <= -ERESTARTSYS ? EINTR : -ret;

    if (ret <= -ERESTARTSYS && is_being_killed(bpf_get_current_task()))
        error = 0; /* nobody will see the error */

    if (here && here->call.tid == tid && here->call.since) {
        struct call call = here->call;

        here->call.since = 0;
        IN_THIS_ORDER();
        count_step(STEP_ENDED);
        if (call.stands_for)
            now = bpf_ktime_get_ns();
        tally_call(&here->tally, &call, now, error);
        return 0;
    }
    struct thread *t = entry_of(tid);
    /* The call began before lockd did, or is counted as lost already, or it is another call that continues
     * (restart_syscall() after a sleep or a poll). */
    if (!t || !t->call.since || t->call.restart)
        return 0;
    if (t->off_since || t->call.stands_for)
        now = bpf_ktime_get_ns();
    if (t->off_since)
        came_back_unseen(tid, t, now);
#ifdef TRACE
    /* A call that began before the trace has no stacks yet. */
    if (t->call_blocked && !t->call.stacks.user && t->call.guess < KIND_WAKE)
        t->call.stacks = keep_call_stacks(ctx);
#endif
    struct call call = t->call;
    u64 blocked = t->call_blocked;
    t->call_blocked = 0;
    if (ret == -ERESTART_RESTARTBLOCK)
        t->call.restart = 1;
    else
        t->call.since = 0;
    count_step(STEP_ENDED);
    count_call(&call, now, blocked, error);
    return 0;
}

#ifdef ONLY_FUTEX_CALLS
static __always_inline bool is_in_call(u32 tid)
{
    u32 zero = 0;
    struct running *here = running.lookup(&zero);

    return here && here->call.tid == tid && here->call.since;
}
#endif

/* Called at sched_switch: the current thread, whose entry is `t`, is not in the futex call of this entry any
 * more, if there is one, but the exit from the call was not seen. Mostly the call began before lockd did: a
 * trampoline or a kretprobe sees no return from a call whose beginning it has not seen. Or there was no exit,
 * because the thread was killed. The call counts without sys time, because it is not known when it ended. */
static __always_inline void futex_abandoned(struct thread *t, u64 now)
{
    if (t->call.since && !t->call.restart) {
        count_step(STEP_KILLED);
        t->call.stands_for = 0;
        count_call(&t->call, now, t->call_blocked, 0);
    }
    t->call.since = 0;
    t->call.restart = 0;
}

/* Called at sched_switch: the current thread is leaving this CPU, and may be ending. `t` is its entry or
 * NULL. */
static __always_inline void futex_switched_out(struct thread *t, u32 tid, bool dies, u64 now)
{
    u32 zero = 0;
    struct running *here = running.lookup(&zero);

    if (!here)
        return;
    count_tally(&here->tally);
    if (here->call.tid != tid || !here->call.since)
        return;
    if (t) {
        futex_abandoned(t, now); /* another call, which began earlier */
        count_step(STEP_SWITCHED_OUT);
        if (t->call.uaddr == here->call.uaddr && t->call.guess == here->call.guess)
            here->call.kind = t->call.kind;
        else
            t->looked_up = 0;
        t->call = here->call;
        if (!t->call.stands_for)
            t->call.since = now;
        t->call_blocked = 0;
    } else if (dies) {
        count_step(STEP_KILLED);
        count_call(&here->call, now, 0, 0);
    } else {
        lose(LOSS_FUTEX__THREADS_FULL);
    }
    here->call.since = 0;
}

/* Called at sched_switch: the current thread, whose entry is `t`, is leaving this CPU to sleep in a futex
 * call. Nothing is done for a call that only wakes others. */
static __always_inline void futex_blocks(void *ctx, u64 task, struct thread *t, u64 now)
{
    if (t->call.guess >= KIND_WAKE)
        return;
    if (!is_own(t->tgid))
        mark_written(WRITTEN_WAIT, current_window());
    count_step(STEP_BLOCKED);
#ifdef TRACE
    if (!t->call.stacks.user)
        t->call.stacks = keep_call_stacks(ctx);
#endif
#ifndef WITHOUT_LOCK_NAMES
    capture_waiter(ctx, task, t, now);
#endif
}
