// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Futex calls and futex waits: their kinds, the aggregate in which they are counted, and captures of the
 * threads that wait. What is counted depends on the mode: see futex_waits.bpf.c (mode blocked) and
 * futex_calls.bpf.c (mode calls). */

struct futex_key {
    u64 uaddr;
    u32 tid;
    u8 kind; /* enum futex_kind */
    u8 slot; /* slot of the blocked time; SLOT_NONE: the call did not block */
    u8 error; /* errno; 0: success, or not known */
    u8 pad;
#ifdef TRACE
    struct call_stack_ids stacks;
#endif
};

struct futex_value {
    u64 calls;
    u64 blocked_ns;
    u64 max_blocked_ns; /* the daemon leaves out waits in which the thread was killed */
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

/* Return the number that a futex call of a 32-bit program has in 64-bit programs. */
static __always_inline s16 number_of_compat(u32 nr)
{
#ifdef NR_COMPAT_FUTEX
    return nr == NR_COMPAT_FUTEX || nr == NR_COMPAT_FUTEX_TIME64 ? NR_FUTEX : nr;
#else
    return nr;
#endif
}

/* Return the kind of a wait by the value that it expects. glibc's low-level lock and Rust's mutex wait for
 * the value 2, and musl's for the owner with the top bit set. A parked thread of Rust waits for -1. */
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
        /* With FUTEX_WAIT_BITSET glibc waits for everything but low-level locks, and sets the flag
         * FUTEX_CLOCK_REALTIME even without a timeout. Rust's std waits for everything with it, and without
         * that flag. */
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

struct futex_waiter { /* struct futex_waitv (include/uapi/linux/futex.h) */
    u64 value, uaddr;
    u32 flags, reserved;
};

/* Describe a futex call by its number and its arguments: note the address and a guess of the kind. */
static __always_inline void describe_call(struct call *call, u32 nr, u64 *arguments)
{
    call->uaddr = arguments[0];
    if (nr == NR_FUTEX) {
        call->guess = kind_of_call(arguments[1], arguments[2], arguments[3]);
    } else if (nr == NR_FUTEX_WAIT) {
        call->guess = kind_of_value(arguments[1]);
    } else if (nr == NR_FUTEX_WAITV) {
        struct futex_waiter waiter = {};
        bpf_probe_read_user(&waiter, sizeof(waiter), (void *)arguments[0]);
        call->guess = KIND_OTHER; /* waits for any of several addresses, which is no lock */
        call->uaddr = waiter.uaddr;
    } else { /* a futex call that wakes threads, or no futex call */
        call->guess = KIND_WAKE;
    }
    call->kind = call->guess;
}

/* One or more calls of a thread, to be added to an aggregate. */
struct ended {
    u64 calls;
    u64 blocked_ns;
    u64 max_blocked_ns;
    u64 sys_ns;
    u64 max_sys_ns;
};

/* Whether `task` is being killed. Every thread of a dying process receives SIGKILL, which is pending until
 * the thread acts on it and exits. An exiting thread counts too: if the switch-in after a wait was not seen,
 * the end of the wait may be noticed only then. */
static __always_inline bool is_being_killed(u64 task)
{
    u64 at = STRUCT_AT(task, TASK_TYPE), pending = 0;
    u32 flags = 0;

    READ_MEMBER(at, TASK_PENDING_SIGNAL, pending);
    READ_MEMBER(at, TASK_FLAGS, flags);
    return pending & (1 << (9 - 1)) || flags & PF_EXITING;
}

/* Raise `max`, the longest wait of an entry, to `blocked`, a wait of `task`. If `task` is 0, the thread is
 * not known. A wait in which the thread is killed raises no maximum, because the thread did not get what it
 * waited for. In the one-shot tools it does raise the maximum, so that no maximum of a thread is below its
 * mean. */
static __always_inline void raise_blocked(u64 *max, u64 task, u64 blocked)
{
#ifndef TRACE
    if (blocked > *max && task && is_being_killed(task))
        return;
#endif
    raise_to(max, blocked);
}

/* Return the entry of the overflow map for calls with the key `key`, for which `futex` has no room; or NULL
 * if the overflow map has no room either. */
static __always_inline struct futex_value *futex_overflow(int window, struct futex_key *key)
{
    struct futex_key rest = {.kind = key->kind, .slot = key->slot, .error = key->error};
    struct futex_value fresh = {};
    void *map = futex_over.lookup(&window);

    if (!map)
        return NULL;
    if (!bpf_map_lookup_elem(map, &rest))
        add_entry(WRITTEN_FUTEX_OVER, window, map, &rest, &fresh, true);
    return bpf_map_lookup_elem(map, &rest);
}

/* Add calls to the aggregate of the thread `key->tid`. If only the id of the thread is known, `task` is 0,
 * and its thread group is unknown. */
static __always_inline void count_calls(u64 task, u32 tgid, struct futex_key *key, struct ended *ended)
{
    int window = current_window();
    void *map = futex.lookup(&window);
    u32 step = restraint();
    bool by_process = task && step >= RESTRAINT_DETAIL;

    if (!map)
        return;
    if (by_process) {
        key->uaddr = 0;
        key->tid = OF_PROCESS | tgid;
    }
    struct futex_value *v = NULL;
    if (step < RESTRAINT_PROCESSES) {
        v = bpf_map_lookup_elem(map, key);
        if (!v && task) {
            struct futex_value fresh = {
                .calls = ended->calls,
                .blocked_ns = ended->blocked_ns,
                .sys_ns = ended->sys_ns,
                .max_sys_ns = ended->max_sys_ns,
            };
            identify(task, &fresh.who);
            raise_blocked(&fresh.max_blocked_ns, task, ended->max_blocked_ns);
            if (!add_entry(WRITTEN_FUTEX, window, map, key, &fresh, is_of_process(tgid, false)))
                return;
            v = bpf_map_lookup_elem(map, key); /* another thread of the process may have added the entry */
        }
    }
    if (v && !by_process) {
        v->calls += ended->calls;
        v->blocked_ns += ended->blocked_ns;
        v->sys_ns += ended->sys_ns;
    } else { /* an entry with many writers */
        if (!v) {
            v = futex_overflow(window, key);
            lose_many(v ? OVER_FUTEX : LOSS_FUTEX__FULL, ended->calls);
            if (!v)
                return;
        }
        add_to(&v->calls, ended->calls);
        add_to(&v->blocked_ns, ended->blocked_ns);
        add_to(&v->sys_ns, ended->sys_ns);
    }
    raise_blocked(&v->max_blocked_ns, task, ended->max_blocked_ns);
    raise_to(&v->max_sys_ns, ended->max_sys_ns);
}

#define LOOKED_UP_AGAIN 10 /* times 2^20 ns: after some 10 ms the entry in known_locks may have changed */

/* The current thread, whose entry is `t`, waits for a lock: take the kind of the lock from known_locks, and
 * capture the thread unless the lock was captured in the last CAPTURED_AGAIN_NS. */
static __always_inline void capture_waiter(void *ctx, u64 task, struct thread *t, u64 now)
{
    u32 ms = now >> 20;

    if (ms - t->looked_up < LOOKED_UP_AGAIN)
        return;
    READ_TASK(task, TASK_THREAD_POINTER, t->thread_pointer);
#ifndef TRACE
    see_java_wait(t);
#endif
    struct lock_id id = {.uaddr = t->call.uaddr, .tgid = t->tgid, .guess = t->call.guess};
    struct known_lock fresh = {.captured = now, .kind = t->call.guess};
    t->call.kind = t->call.guess; /* in case the entry in known_locks was dropped */
    struct known_lock *known = known_locks.lookup(&id);
    if (known) {
        fresh.kind = t->call.kind = known->kind;
        fresh.is_many = known->is_many;
        t->looked_up = ms;
        if (now - known->captured < CAPTURED_AGAIN_NS)
            return;
    }
    if (restraint() >= RESTRAINT_STACKS)
        return;
    tell_of_process(task, t->tgid, now);
    if (keep_capture(ctx, task, &id))
        known_locks.update(&id, &fresh);
}
