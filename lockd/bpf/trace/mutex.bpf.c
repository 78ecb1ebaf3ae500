// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Calls of the mutex functions of C libraries, by uprobes: the time that it takes to take a mutex or, with
 * MUTEX_HOLDS, the time for which it is held. */

#define EOWNERDEAD 130 /* the mutex is taken, but its last owner ended without releasing it */
#define ENOTRECOVERABLE 131
#define ETIMEDOUT 110
#define EBUSY 16
#define C11_BUSY 1 /* thrd_busy and thrd_timedout, in glibc and musl alike */
#define C11_TIMED_OUT 4

/* What is counted. Python reads the names. */
enum mutex_event {
    MUTEX_MEASURED, /* a mutex was taken or, with MUTEX_HOLDS, released */
    MUTEX_FAILED, /* a call that did not take the mutex */
    MUTEX_ABANDONED, /* the thread ended while it waited */
    MUTEX_RELEASE_UNSEEN, /* a thread took a mutex while another was known to hold it */
    MUTEX_TAKING_UNSEEN, /* a mutex was released although nobody was known to hold it */
};

struct mutex_key {
    u64 mutex;
    u64 stack; /* number of a user stack, see keep_call_stacks() */
    u32 tid; /* the thread that took it or asked for it; for MUTEX_TAKING_UNSEEN the one that released it */
    u16 error; /* errno, for MUTEX_FAILED */
    u8 slot; /* slot of the time, see histogram_slot() */
    u8 event; /* enum mutex_event */
};

struct mutex_value {
    u64 count;
    u64 sum; /* ns */
    u64 max;
    struct who who; /* only with `tgid` if another thread made the entry */
};

BPF_TABLE("hash", struct mutex_key, struct mutex_value, mutexes_0, ENTRIES);
BPF_TABLE("hash", struct mutex_key, struct mutex_value, mutexes_1, ENTRIES);
BPF_ARRAY_OF_MAPS(mutexes, "mutexes_0", 2);

/* A call in progress. Functions of a C library call each other. Of nested calls for one mutex the
 * outermost counts. Its return is recognised by the stack pointer, which has the same value as at its
 * entry. */
struct mutex_call {
    u64 sp; /* stack pointer at entry; 0: no call */
    u64 mutex;
    u64 since;
    u64 stack;
    u8 is_wait; /* 1: a wait for a condition */
    u8 was_held; /* 1: the thread was known to hold the mutex when the wait began */
    u8 pad[6];
};

/* The calls of one thread. */
struct mutex_calls {
    struct mutex_call call;
    struct mutex_call in_handler; /* a call in a signal handler that interrupted `call` */
    u32 tgid;
    u32 pad;
};

BPF_TABLE("hash", u32, struct mutex_calls, mutex_calls, THREADS_ENTRIES); /* key: thread id */

struct mutex_hold_key {
    u64 mutex;
    u32 tgid;
    u32 pad;
};

struct mutex_hold {
    u64 since;
    u64 stack;
    u64 freed_at; /* time of a release by another thread, which the next acquisition confirms; 0: none */
    u32 tid;
    u32 nested; /* how many more times the thread has taken it, as a recursive mutex */
};

/* The end of a thread. A mutex that the thread held counts as held until its end, if the next owner of the
 * mutex gets EOWNERDEAD. */
struct mutex_end {
    u64 at;
    char comm[COMM_LEN];
    u32 tgid;
    u32 pad;
};

#ifdef MUTEX_HOLDS
BPF_TABLE("hash", struct mutex_hold_key, struct mutex_hold, mutex_holds, HOLDS_ENTRIES);
BPF_TABLE("lru_hash", u32, struct mutex_end, mutex_ends, THREADS_ENTRIES); /* key: thread id */
#endif

#define CALL_LEVELS 2
#define CALL_AT(calls, level) ((level) == 0 ? &(calls)->call : &(calls)->in_handler)

static __always_inline bool is_mutex_traced(u64 id)
{
    return is_traced(id >> 32, id, false);
}

static __always_inline void count_mutex(u64 mutex, u32 tid, u64 stack, u8 event, u16 error, u64 ns)
{
    struct mutex_key key = {.mutex = mutex, .stack = stack, .tid = tid, .error = error, .event = event};
    u64 id = bpf_get_current_pid_tgid();
    int window = current_window();
    void *map = mutexes.lookup(&window);

    if (!map)
        return;
    key.slot = histogram_slot(ns, false);
    struct mutex_value *v = bpf_map_lookup_elem(map, &key);
    if (!v) {
        struct mutex_value fresh = {};
        if (tid == (u32)id)
            identify(bpf_get_current_task(), &fresh.who);
        else
            fresh.who.tgid = id >> 32;
        bpf_map_update_elem(map, &key, &fresh, BPF_NOEXIST);
        v = bpf_map_lookup_elem(map, &key);
    }
    if (!v) {
        lose(LOSS_TRACE__FULL);
        return;
    }
    add_to(&v->count, 1); /* another thread may count at the same time */
    add_to(&v->sum, ns);
    raise_to(&v->max, ns);
}

#ifdef MUTEX_HOLDS
/* The current thread releases the mutex at `now`. Return whether the thread was known to hold the mutex. */
static __always_inline bool release_mutex(u64 mutex, u64 id, u64 now)
{
    struct mutex_hold_key key = {.mutex = mutex, .tgid = id >> 32};
    struct mutex_hold *hold = mutex_holds.lookup(&key);

    if (!hold) {
        count_mutex(mutex, id, CALL_STACK_NONE, MUTEX_TAKING_UNSEEN, 0, 0);
        return false;
    }
    if (hold->tid != (u32)id) {
        hold->freed_at = now;
        return false;
    }
    if (hold->nested) {
        hold->nested -= 1;
        return true;
    }
    u64 since = hold->since, stack = hold->stack;
    mutex_holds.delete(&key);
    count_mutex(mutex, id, stack, MUTEX_MEASURED, 0, now - since);
    return true;
}

/* The current thread has taken the mutex. If an earlier hold of the mutex is still noted, count that hold: up
 * to its release by another thread or the end of its owner, or else as MUTEX_RELEASE_UNSEEN. */
static __always_inline void hold_mutex(u64 mutex, u64 id, u64 stack, bool owner_ended)
{
    struct mutex_hold_key key = {.mutex = mutex, .tgid = id >> 32};
    struct mutex_hold fresh = {.stack = stack, .tid = id};
    struct mutex_hold *hold = mutex_holds.lookup(&key);

    if (hold && !hold->freed_at && hold->tid == fresh.tid) { /* a recursive mutex */
        hold->nested += 1;
        return;
    }
    if (hold) {
        u64 since = hold->since, freed_at = hold->freed_at;
        u32 holder = hold->tid;
        struct mutex_end *end = owner_ended ? mutex_ends.lookup(&holder) : NULL;
        if (end)
            freed_at = end->at;
        if (freed_at > since)
            count_mutex(mutex, holder, hold->stack, MUTEX_MEASURED, 0, freed_at - since);
        else
            count_mutex(mutex, holder, hold->stack, MUTEX_RELEASE_UNSEEN, 0, 0);
    }
    fresh.since = bpf_ktime_get_ns(); /* comes last, so that the work of this program is not included */
    if (mutex_holds.update(&key, &fresh))
        lose(LOSS_TRACE__FULL);
}
#endif

/* Return a new entry for a call that begins, or NULL if the call is part of another one or there is
 * no room. */
static __always_inline struct mutex_call *begin_mutex_call(struct pt_regs *ctx, u64 mutex, u64 id)
{
    u32 tid = id;
    u64 sp = ctx->sp;
    struct mutex_calls *calls = mutex_calls.lookup(&tid);
    struct mutex_call *call = NULL;

    if (!calls) {
        struct mutex_calls fresh = {.tgid = id >> 32};
        mutex_calls.update(&tid, &fresh);
        calls = mutex_calls.lookup(&tid);
        if (!calls) {
            lose(LOSS_TRACE__FULL);
            return NULL;
        }
    }
#pragma unroll
    for (int level = CALL_LEVELS - 1; level >= 0; level--) {
        struct mutex_call *one = CALL_AT(calls, level);
        /* A call whose stack pointer is below the current one was left by longjmp(). So was a call for
         * another mutex with the same stack pointer. */
        if (sp > one->sp || (sp == one->sp && mutex != one->mutex))
            one->sp = 0;
        if (one->sp && one->mutex == mutex)
            return NULL;
        if (!one->sp)
            call = one;
    }
    if (!call)
        return NULL;
    call->mutex = mutex;
    call->stack = keep_call_stacks(ctx).user;
    call->sp = sp;
    return call;
}

/* Whether the current thread is in a call for this mutex, so that what it does is part of that call. */
static __always_inline bool is_in_mutex_call(struct pt_regs *ctx, u64 mutex, u64 id)
{
    u32 tid = id;
    struct mutex_calls *calls = mutex_calls.lookup(&tid);

#pragma unroll
    for (int level = 0; calls && level < CALL_LEVELS; level++)
        if (CALL_AT(calls, level)->mutex == mutex && ctx->sp <= CALL_AT(calls, level)->sp)
            return true;
    return false;
}

static __always_inline void end_mutex_call(struct pt_regs *ctx, u64 sp, u16 error)
{
    u64 now = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid();
    u32 tid = id;
    struct mutex_calls *calls;
    struct mutex_call *call = NULL;

    if (!is_mutex_traced(id))
        return;
    calls = mutex_calls.lookup(&tid);
    if (!calls)
        return;
#pragma unroll
    for (int level = 0; level < CALL_LEVELS; level++)
        if (CALL_AT(calls, level)->sp == sp)
            call = CALL_AT(calls, level);
    if (!call) /* the call that ends is part of another one, or began before the trace */
        return;
    call->sp = 0;
    bool is_taken = !error || error == EOWNERDEAD;
#ifdef MUTEX_HOLDS
    /* A wait for a condition that fails at once has not released the mutex. One that times out has taken the
     * mutex again. */
    if (call->is_wait && error != ENOTRECOVERABLE)
        is_taken = is_taken || error == ETIMEDOUT || call->was_held;
    if (is_taken)
        hold_mutex(call->mutex, id, call->stack, error == EOWNERDEAD);
    else
        count_mutex(call->mutex, tid, call->stack, MUTEX_FAILED, error, now - call->since);
#else
    count_mutex(call->mutex, tid, call->stack, is_taken ? MUTEX_MEASURED : MUTEX_FAILED, is_taken ? 0 : error,
                now - call->since);
#endif
}

/* The stack pointer at the function's entry. On x86-64 a function that has returned has popped its return
 * address. */
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
#define RETURNED_SP(ctx) ((ctx)->sp)
#else
#define RETURNED_SP(ctx) ((ctx)->sp - sizeof(u64))
#endif

/* Attached to the entry of functions that take a mutex. */
int mutex_asked(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid();
    struct mutex_call *call = is_mutex_traced(id) ? begin_mutex_call(ctx, PT_REGS_PARM1(ctx), id) : NULL;

    if (call) {
        call->is_wait = 0;
        call->since = bpf_ktime_get_ns(); /* comes last, so that the work of this program is not included */
    }
    return 0;
}

/* Attached to the return of functions that take a mutex. Also of functions that wait for a condition, if
 * their return instructions are not known. */
int mutex_returned(struct pt_regs *ctx)
{
    end_mutex_call(ctx, RETURNED_SP(ctx), PT_REGS_RC(ctx));
    return 0;
}

/* Attached to the return of mtx_lock() and C11's other functions that take a mutex: they return thrd_success,
 * thrd_busy and so on, and no errno. */
int mutex_returned_c11(struct pt_regs *ctx)
{
    u32 result = PT_REGS_RC(ctx);

    result = result == C11_BUSY ? EBUSY : result == C11_TIMED_OUT ? ETIMEDOUT : result;
    end_mutex_call(ctx, RETURNED_SP(ctx), result);
    return 0;
}

#ifdef MUTEX_HOLDS
/* Attached to the entry of functions that release a mutex. */
int mutex_released(struct pt_regs *ctx)
{
    u64 now = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid(), mutex = PT_REGS_PARM1(ctx);

    if (is_mutex_traced(id) && !is_in_mutex_call(ctx, mutex, id))
        release_mutex(mutex, id, now);
    return 0;
}

/* Attached to the entry of functions that wait for a condition. They release the mutex and take it again. */
int condition_wait_entered(struct pt_regs *ctx)
{
    u64 now = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid(), mutex = PT_REGS_PARM2(ctx);
    struct mutex_call *call = is_mutex_traced(id) ? begin_mutex_call(ctx, mutex, id) : NULL;

    if (call) {
        call->is_wait = 1;
        call->since = now;
        call->was_held = release_mutex(mutex, id, now);
    }
    return 0;
}

/* Attached to the return instructions of functions that wait for a condition. A uretprobe would keep the
 * stack from being unwound if the thread is cancelled there. */
int condition_wait_returns(struct pt_regs *ctx)
{
    end_mutex_call(ctx, ctx->sp, PT_REGS_RC(ctx));
    return 0;
}
#endif

/* Raw tracepoint sched_process_exit: the current thread ends. */
int mutex_thread_ended(void *ctx)
{
    u64 now = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid();
    u32 tid = id;

    if (!is_mutex_traced(id))
        return 0;
#ifdef MUTEX_HOLDS
    struct mutex_end end = {.at = now, .tgid = id >> 32};
    bpf_get_current_comm(end.comm, sizeof(end.comm));
    mutex_ends.update(&tid, &end);
#else
    struct mutex_calls *calls = mutex_calls.lookup(&tid);
#pragma unroll
    for (int level = 0; calls && level < CALL_LEVELS; level++)
        if (CALL_AT(calls, level)->sp)
            count_mutex(CALL_AT(calls, level)->mutex, tid, CALL_AT(calls, level)->stack, MUTEX_ABANDONED, 0,
                        now - CALL_AT(calls, level)->since);
#endif
    mutex_calls.delete(&tid);
    return 0;
}
