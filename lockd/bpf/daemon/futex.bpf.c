// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Futex calls: what each call asked for, how it ended, and how long it was blocked. */

struct futex_key {
    u64 uaddr;
    u32 tid;
    u8 kind; /* enum futex_kind */
    u8 slot; /* slot of the blocked time; SLOT_NONE: the call did not block */
    u8 error; /* errno; 0: success */
    u8 pad;
#ifdef TRACE
    struct call_stack_ids stacks;
#endif
};

struct futex_value {
    u64 calls;
    u64 blocked_ns;
    u64 max_blocked_ns; /* of calls that returned: the wait of a killed thread got nothing */
    u64 sys_ns;
    u64 max_sys_ns;
    struct who who;
};

BPF_TABLE("hash", struct futex_key, struct futex_value, futex_0, ENTRIES);
BPF_TABLE("hash", struct futex_key, struct futex_value, futex_1, ENTRIES);
BPF_ARRAY_OF_MAPS(futex, "futex_0", 2);
BPF_TABLE("hash", struct futex_key, struct futex_value, futex_over_0, OVER_ENTRIES);
BPF_TABLE("hash", struct futex_key, struct futex_value, futex_over_1, OVER_ENTRIES);
BPF_ARRAY_OF_MAPS(futex_over, "futex_over_0", 2);

/* Equal calls of one thread that did not block. */
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
 * in progress to the thread's own entry. Nothing in here survives a migration. */
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

/* Futex operations (include/uapi/linux/futex.h). */
#define FUTEX_WAIT 0
#define FUTEX_WAKE 1
#define FUTEX_REQUEUE 3
#define FUTEX_CMP_REQUEUE 4
#define FUTEX_WAKE_OP 5
#define FUTEX_LOCK_PI 6
#define FUTEX_UNLOCK_PI 7
#define FUTEX_WAIT_BITSET 9
#define FUTEX_WAKE_BITSET 10
#define FUTEX_WAIT_REQUEUE_PI 11
#define FUTEX_CMP_REQUEUE_PI 12
#define FUTEX_LOCK_PI2 13
#define FUTEX_PRIVATE_FLAG 128
#define FUTEX_CLOCK_REALTIME 256

/* Return the kind of a wait by the value that it expects. glibc's low-level lock and Rust's mutex wait for
 * the value 2, and musl's for the owner with the top bit set. The value -1 is a parked thread. */
static __always_inline u8 kind_of_value(u32 value)
{
    bool musl = (value & 0x80000000) && value != 0xffffffff;
    return value == 2 || musl ? KIND_LOCK : KIND_COND;
}

static __always_inline u8 kind_of_call(u32 op, u32 value, u64 timeout)
{
    switch (op & ~(FUTEX_PRIVATE_FLAG | FUTEX_CLOCK_REALTIME)) {
    case FUTEX_WAIT:
        return kind_of_value(value);
    case FUTEX_WAIT_BITSET:
        /* glibc waits in this way for everything but low-level locks, and names the realtime clock even
         * without a timeout. Rust's std waits in this way for everything, without that clock. */
        if (value == 2 && !timeout && !(op & FUTEX_CLOCK_REALTIME))
            return KIND_LOCK;
        return KIND_COND;
    case FUTEX_WAIT_REQUEUE_PI:
        return KIND_COND;
    case FUTEX_LOCK_PI:
    case FUTEX_LOCK_PI2:
        return KIND_PI;
    case FUTEX_WAKE:
    case FUTEX_REQUEUE:
    case FUTEX_CMP_REQUEUE:
    case FUTEX_WAKE_OP:
    case FUTEX_UNLOCK_PI:
    case FUTEX_WAKE_BITSET:
    case FUTEX_CMP_REQUEUE_PI:
        return KIND_WAKE;
    default:
        return KIND_NONE;
    }
}

#define EINTR 4
#define EDEADLK 35

/* Return the lock address for the key of a call. The daemon does not count calls that did not block by
 * lock: one entry for each thread is enough. The exception is a call that was refused as a deadlock. */
static __always_inline u64 address_of(struct call *call, bool did_block, u8 error)
{
#ifdef TRACE
    return call->uaddr;
#else
    return did_block || error == EDEADLK ? call->uaddr : 0;
#endif
}

/* One or more calls of a thread, to be added to an aggregate. */
struct ended {
    u64 calls;
    u64 blocked_ns;
    u64 max_blocked_ns;
    u64 sys_ns;
    u64 max_sys_ns;
};

static __always_inline void futex_overflow(int window, struct futex_key *key, struct ended *ended)
{
    struct futex_key rest = {.kind = key->kind, .slot = key->slot, .error = key->error};
    void *map = futex_over.lookup(&window);

    if (!map)
        return;
    struct futex_value *v = bpf_map_lookup_elem(map, &rest);
    if (!v) {
        struct futex_value fresh = {};
        add_entry(WRITTEN_FUTEX_OVER, window, map, &rest, &fresh, true);
        v = bpf_map_lookup_elem(map, &rest);
    }
    if (!v) {
        lose_many(LOSS_FUTEX__FULL, ended->calls);
        return;
    }
    lose_many(OVER_FUTEX, ended->calls);
    add_to(&v->calls, ended->calls);
    add_to(&v->blocked_ns, ended->blocked_ns);
    add_to(&v->sys_ns, ended->sys_ns);
    raise_to(&v->max_blocked_ns, ended->max_blocked_ns);
    raise_to(&v->max_sys_ns, ended->max_sys_ns);
}

/* Add calls to the aggregate of the thread `key->tid`. */
static __always_inline void count_calls(struct futex_key *key, struct ended *ended)
{
    int window = current_window();
    void *map = futex.lookup(&window);
    u64 id = bpf_get_current_pid_tgid();
    /* The calls may belong to another thread, whose switch-out was not seen. Only its id is known then. */
    bool is_own = key->tid == (u32)id;
    u32 step = restraint();
    bool by_process = is_own && step >= RESTRAINT_DETAIL;

    if (!map)
        return;
    if (by_process) {
        key->uaddr = 0;
        key->tid = OF_PROCESS | id >> 32;
    }
    struct futex_value *v = NULL;
    if (step < RESTRAINT_PROCESSES) {
        v = bpf_map_lookup_elem(map, key);
        if (!v && is_own) {
            struct futex_value fresh = {};
            identify(bpf_get_current_task(), &fresh.who);
            add_entry(WRITTEN_FUTEX, window, map, key, &fresh, is_for_soon(id >> 32, false));
            v = bpf_map_lookup_elem(map, key);
        }
    }
    if (!v) {
        futex_overflow(window, key, ended);
        return;
    }
    if (by_process) {
        add_to(&v->calls, ended->calls);
        add_to(&v->blocked_ns, ended->blocked_ns);
        add_to(&v->sys_ns, ended->sys_ns);
    } else {
        v->calls += ended->calls;
        v->blocked_ns += ended->blocked_ns;
        v->sys_ns += ended->sys_ns;
    }
    raise_to(&v->max_blocked_ns, ended->max_blocked_ns);
    raise_to(&v->max_sys_ns, ended->max_sys_ns);
}

/* Count a call that has ended and may have blocked. `killed` says that its thread died in the call. */
static __always_inline void count_call(struct call *call, u64 now, u64 blocked, u8 error, bool killed)
{
    u64 took = call->stands_for ? now - call->since : 0;
    u64 sys = took > blocked ? took - blocked : 0;
    bool did_block = blocked && call->kind < KIND_WAKE && is_wanted(blocked);
    u64 counted = did_block ? blocked : 0;
    struct ended ended = {1, counted, killed ? 0 : counted, sys * call->stands_for, sys};
    struct futex_key key = {.tid = call->tid, .kind = call->kind, .error = error};

    key.slot = did_block ? slot_of(blocked) : SLOT_NONE;
    key.uaddr = address_of(call, did_block, error);
#ifdef TRACE
    ended.max_blocked_ns = counted; /* so that no maximum of a thread is below its mean */
    key.stacks = call->stacks;
#endif
    count_calls(&key, &ended);
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
        count_calls(&key, &ended);
}

static __always_inline bool has_stacks_of(struct tally *tally, struct call *call)
{
#ifdef ALL_STACKS
    return tally->stacks.user == call->stacks.user && tally->stacks.kernel == call->stacks.kernel;
#else
    return true; /* there are none */
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
    /* The next window is to come even if nothing is added to a map: in it a call will count this tally. */
    if (!is_own(bpf_get_current_pid_tgid() >> 32))
        mark_written(WRITTEN_SOON, window);
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

struct futex_waiter { /* struct futex_waitv (include/uapi/linux/futex.h) */
    u64 value, uaddr;
    u32 flags, reserved;
};

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

/* The current thread begins a futex system call with these arguments. */
static __always_inline int futex_began(void *ctx, u32 nr, u64 first, u64 second, u64 third, u64 fourth)
{
    struct call call = {.uaddr = first, .tid = bpf_get_current_pid_tgid()};
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
    if (nr == NR_FUTEX) {
        call.kind = kind_of_call(second, third, fourth);
    } else if (nr == NR_FUTEX_WAIT) {
        call.kind = kind_of_value(second);
    } else if (nr == NR_FUTEX_WAITV) {
        struct futex_waiter waiter = {};
        bpf_probe_read_user(&waiter, sizeof(waiter), (void *)first);
        call.kind = KIND_OTHER; /* waits for any of several addresses, which is no lock */
        call.uaddr = waiter.uaddr;
    } else {
        call.kind = KIND_WAKE;
    }
    call.guess = call.kind;
    call.stands_for = stands_for(here);
    call.since = call.stands_for ? bpf_ktime_get_ns() : NOT_TIMED;
    here->call = call;
    return 0;
}

/* The current thread begins restart_syscall(). After SIGCONT the kernel continues a timed wait that a stop
 * interrupted, as a system call with this number. */
static __always_inline int futex_restarted(void)
{
    u32 zero = 0, tid = bpf_get_current_pid_tgid();
    struct running *here = running.lookup(&zero);
    struct thread *t = threads.lookup(&tid);

    if (!here || !t || !t->restart)
        return 0;
    count_step(STEP_RESTARTED);
    t->restart = 0;
    here->call = t->call;
    here->call.since = bpf_ktime_get_ns();
    t->call.since = 0;
    return 0;
}

#define ERESTARTSYS 512
#define ERESTART_RESTARTBLOCK 516

static __always_inline bool is_being_killed(void)
{
    u64 pending = 0;

    READ_TASK(bpf_get_current_task(), TASK_PENDING_SIGNAL, pending);
    return pending & (1 << (9 - 1)); /* SIGKILL, which every thread of a dying process receives */
}

static __always_inline void came_back_unseen(u32 tid, struct thread *t, u64 now);

/* A futex call, or restart_syscall(), of the current thread ends. */
static __always_inline int futex_ended(void *ctx, s64 ret)
{
    u32 zero = 0, tid = bpf_get_current_pid_tgid();
    struct running *here = running.lookup(&zero);
    u64 now = 0;
    /* Codes from 512 on do not leave the kernel. A signal interrupted the call, and the kernel decides
     * later whether the thread makes the call again. A call that is made again counts again. */
    u8 error = ret >= 0 ? 0 : ret <= -ERESTARTSYS ? EINTR : -ret;
    bool killed = false;

    if (ret <= -ERESTARTSYS && is_being_killed()) {
        error = 0; /* nobody will see the error */
        killed = true;
    }

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
    struct thread *t = threads.lookup(&tid);
    /* The call began before lockd did, or is counted as lost already, or it is another call that continues
     * (restart_syscall() after a sleep or a poll). */
    if (!t || !t->call.since || t->restart)
        return 0;
    if (t->off_since || t->call.stands_for)
        now = bpf_ktime_get_ns();
    if (t->off_since)
        came_back_unseen(tid, t, now);
#ifdef TRACE
    if (t->call_blocked && !t->call.stacks.user && t->call.guess < KIND_WAKE) /* it began before the trace */
        t->call.stacks = keep_call_stacks(ctx);
#endif
    struct call call = t->call;
    u64 blocked = t->call_blocked;
    t->call_blocked = 0;
    if (ret == -ERESTART_RESTARTBLOCK)
        t->restart = 1;
    else
        t->call.since = 0;
    count_step(STEP_ENDED);
    count_call(&call, now, blocked, error, killed);
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
        count_step(STEP_SWITCHED_OUT);
        if (t->call.uaddr == here->call.uaddr && t->call.guess == here->call.guess)
            here->call.kind = t->call.kind;
        else
            t->looked_up = 0;
        t->call = here->call;
        if (!t->call.stands_for)
            t->call.since = now;
        t->call_blocked = 0;
        t->restart = 0;
    } else if (dies) {
        count_step(STEP_KILLED);
        count_call(&here->call, now, 0, 0, true);
    } else {
        lose(LOSS_FUTEX__THREADS_FULL);
    }
    here->call.since = 0;
}

#define LOOKED_UP_AGAIN_NS 10000000 /* by then its kind may be corrected, or its entry dropped */

/* The current thread waits for a lock: capture it, unless the lock was captured a moment ago. */
static __always_inline void capture_waiter(void *ctx, u64 task, struct thread *t, u64 now)
{
    if (now - t->looked_up < LOOKED_UP_AGAIN_NS)
        return;
    READ_TASK(task, TASK_THREAD_POINTER, t->thread_pointer);
#ifndef TRACE
    see_java_wait(t);
#endif
    struct lock_id id = {.uaddr = t->call.uaddr, .tgid = t->tgid, .guess = t->call.guess};
    struct known_lock fresh = {.captured = now, .kind = t->call.guess};
    t->call.kind = t->call.guess; /* in case the entry was dropped */
    struct known_lock *known = known_locks.lookup(&id);
    if (known) {
        fresh.kind = t->call.kind = known->kind;
        fresh.is_many = known->is_many;
        t->looked_up = now;
        if (now - known->captured < CAPTURED_AGAIN_NS)
            return;
    }
    if (restraint() >= RESTRAINT_STACKS)
        return;
    tell_of_process(task, t->tgid, now);
    if (keep_capture(ctx, task, &id))
        known_locks.update(&id, &fresh);
}

/* Called at sched_switch: the current thread is leaving this CPU to wait in a futex call. */
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

/* Called at sched_switch: the thread is ending, or leaves the CPU in another system call. Its futex call
 * never reached its exit: the thread was killed in the call. */
static __always_inline void futex_abandoned(struct thread *t, u64 now)
{
    if (t->call.since && !t->restart) {
        count_step(STEP_KILLED);
        count_call(&t->call, now, t->call_blocked, 0, true);
    }
    t->call.since = 0;
    t->restart = 0;
}
