// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Acquisitions and holds of mutexes, rwsems and semaphores (mode `all`).
 *
 * With trampolines (BY_FENTRY) the return of a function that takes a lock shows that the lock was taken. With
 * kprobes this would need kretprobes, which miss returns of functions that sleep (kprobe.bpf.h). Instead the
 * thread is noted at the entry as asking for the lock. A later event shows whether it got the lock: the
 * end of a wait for the lock, or the release. In the second case it has held the lock since it asked for it,
 * or since it stopped spinning for it. Only functions that try to take a lock and never sleep have
 * kretprobes.
 *
 * With TRACE (`lockd trace klock`) holds are counted by the stack that took the lock and by period instead of
 * by slot, and only those of the traced threads. */

struct kernel_hold_key {
    u64 lock;
    u32 tid; /* the thread that took the lock, whoever released it */
    u8 type; /* enum lock_type */
    u8 slot; /* slot of the hold; SLOT_NONE: only acquisitions */
    u16 pad;
#ifdef TRACE
    u64 stack; /* number of the stack that took the lock, see trace.bpf.h */
    u64 period; /* number of the period, of PERIOD_NS, in which the event was counted */
#endif
};

struct kernel_hold_value {
    u64 acquisitions;
    u64 holds; /* number of holds that ended */
    u64 hold_ns;
    u64 max_hold_ns;
    u64 is_mmap_lock; /* 1: the lock is mmap_lock of the holder's own address space */
    struct who who; /* without names if another thread made this entry, at a release */
};

#define NESTED 4 /* a thread may hold a read lock or a counting semaphore several times */
#define WAITS_FOR_SEMAPHORE 2 /* `asked` once the thread is seen to wait; for other locks it stays 1 */

struct kernel_holding_key {
    u64 lock;
    u32 tid;
    u32 pad;
};

/* A lock that a thread holds or asks for. */
struct kernel_holding {
    u64 since[NESTED]; /* begin of each hold; `depth` elements are valid, and one more if `asked` */
    u32 tgid;
    u8 depth;
    u8 type; /* enum lock_type */
    u8 asked; /* not 0: asked for once more, and not yet known to be held */
    u8 untimed; /* 1: the lock was waited for, and the end of the wait is not known */
#ifdef TRACE
    u64 stacks[NESTED]; /* stacks that took the lock or asked for it, as in `since` */
    char comm[COMM_LEN]; /* of the thread */
#endif
};

#ifdef TRACE
#define STACK_AT(holding, level) ((holding)->stacks[(level) & (NESTED - 1)])
#else
#define STACK_AT(holding, level) 0
#endif

BPF_TABLE("hash", struct kernel_hold_key, struct kernel_hold_value, kernel_holds_0, ENTRIES);
BPF_TABLE("hash", struct kernel_hold_key, struct kernel_hold_value, kernel_holds_1, ENTRIES);
BPF_ARRAY_OF_MAPS(kernel_holds, "kernel_holds_0", 2);
BPF_TABLE("hash", struct kernel_hold_key, struct kernel_hold_value, kernel_holds_over_0, OVER_KERNEL_ENTRIES);
BPF_TABLE("hash", struct kernel_hold_key, struct kernel_hold_value, kernel_holds_over_1, OVER_KERNEL_ENTRIES);
BPF_ARRAY_OF_MAPS(kernel_holds_over, "kernel_holds_over_0", 2);
BPF_TABLE("hash", struct kernel_holding_key, struct kernel_holding, kernel_holding, HOLDING_ENTRIES);

/* Time at which everything was attached; 0: nothing is counted yet. */
BPF_ARRAY(armed, u64, 1);

/* For this time after all programs were attached (`armed`), releases of locks that no thread was seen to take
 * are not counted as lost: the locks may have been taken before. */
#define OLD_HOLDS_NS 10000000000ULL

static __always_inline u64 armed_at(void)
{
    u32 zero = 0;
    u64 *at = armed.lookup(&zero);
    return at ? *at : 0;
}

#define TAKERS 8

/* The ids of the threads that hold a semaphore; 0: a free element. They are recorded because any thread may
 * release a semaphore. */

struct takers {
    u32 tids[TAKERS];
};

/* Semaphores come and go without an event, those of XFS' buffers by the thousand. So only those that are held
 * or asked for have an entry. One that goes away meanwhile leaves its entry behind, and the map drops old
 * entries. It should drop no other: if another thread then released the semaphore, the entry in
 * `kernel_holding` would stay for ever. */
BPF_TABLE("lru_hash", u64, struct takers, semaphore_takers, SEMAPHORE_TAKERS_ENTRIES);

/* Replace the first `from` among the takers of a semaphore by `to`. With 0 as `from` a taker is added, and
 * with 0 as `to` one is removed. The entry goes with the last taker. */
static __always_inline void replace_taker(u64 lock, u32 from, u32 to)
{
    struct takers *takers = semaphore_takers.lookup(&lock);
    bool is_replaced = false;
    u32 any = 0;

    if (!takers) {
        struct takers fresh = {.tids = {to}};
        if (to && semaphore_takers.update(&lock, &fresh))
            lose(LOSS_KERNEL_HOLDS__HOLDING_FULL);
        return;
    }
#pragma unroll
    for (int i = 0; i < TAKERS; i++) {
        if (!is_replaced && takers->tids[i] == from) {
            takers->tids[i] = to;
            is_replaced = true;
        }
        any |= takers->tids[i];
    }
    if (!any)
        semaphore_takers.delete(&lock);
}

static __always_inline u32 any_taker(u64 lock)
{
    struct takers *takers = semaphore_takers.lookup(&lock);

    if (!takers)
        return 0;
#pragma unroll
    for (int i = 0; i < TAKERS; i++) {
        if (takers->tids[i])
            return takers->tids[i];
    }
    return 0;
}

#ifdef TRACE
/* A trace shows who takes locks where. An entry without thread and stack would not show that, so an event for
 * which there is no room is lost. */
static __always_inline void kernel_hold_overflow(int window, struct kernel_hold_key *key, u64 taken, u64 held,
                                                 bool is_hold)
{
    lose(LOSS_KERNEL_HOLDS__FULL);
}
#else
static __always_inline void kernel_hold_overflow(int window, struct kernel_hold_key *key, u64 taken, u64 held,
                                                 bool is_hold)
{
    struct kernel_hold_key rest = {.type = key->type, .slot = key->slot};
    void *map = kernel_holds_over.lookup(&window);

    if (!map)
        return;
    struct kernel_hold_value *v = bpf_map_lookup_elem(map, &rest);
    if (!v) {
        struct kernel_hold_value fresh = {};
        add_entry(WRITTEN_KERNEL_HOLDS_OVER, window, map, &rest, &fresh, true);
        v = bpf_map_lookup_elem(map, &rest);
    }
    if (!v) {
        lose(LOSS_KERNEL_HOLDS__FULL);
        return;
    }
    lose(OVER_KERNEL_HOLDS);
    add_to(&v->acquisitions, taken);
    if (is_hold) {
        add_to(&v->holds, 1);
        add_to(&v->hold_ns, held);
        raise_to(&v->max_hold_ns, held);
    }
}
#endif

/* Add to the aggregate for `at`, which is the key of `holding`: `taken` acquisitions (0 or 1) and, if
 * `is_hold`, a hold of `held` ns. They belong to the element `level` of `holding`. */
static __always_inline void count_hold(struct kernel_holding_key *at, struct kernel_holding *holding,
                                       u32 level, u64 taken, u64 held, bool is_hold)
{
    int window = current_window();
    void *map = kernel_holds.lookup(&window);
    struct kernel_hold_key key = {.lock = at->lock, .tid = at->tid, .type = holding->type};
    bool is_own = at->tid == (u32)bpf_get_current_pid_tgid();

#ifdef TRACE
    key.stack = STACK_AT(holding, level);
    key.period = bpf_ktime_get_ns() / PERIOD_NS;
#else
    key.slot = is_hold ? slot_of(held) : SLOT_NONE;
#endif
    if (!map)
        return;
    u32 step = restraint();
    if (step >= RESTRAINT_DETAIL) {
        key.lock = 0;
        key.tid = OF_PROCESS | holding->tgid;
    }
    struct kernel_hold_value *v = NULL;
    if (step < RESTRAINT_PROCESSES) {
        v = bpf_map_lookup_elem(map, &key);
        if (!v) {
            struct kernel_hold_value fresh = {};
            if (is_own) {
                identify(bpf_get_current_task(), &fresh.who);
                fresh.is_mmap_lock = key.lock == own_mmap_lock();
            } else {
                fresh.who.tgid = holding->tgid;
#ifdef TRACE
                __builtin_memcpy(fresh.who.thread_comm, holding->comm, COMM_LEN);
#endif
            }
            bool of_process = is_of_process(bpf_get_current_pid_tgid() >> 32, false);
            add_entry(WRITTEN_KERNEL_HOLDS, window, map, &key, &fresh, of_process);
            v = bpf_map_lookup_elem(map, &key);
        }
    }
    if (!v) {
        kernel_hold_overflow(window, &key, taken, held, is_hold);
        return;
    }
    /* The thread that took the lock and a thread that releases it may count at the same time. */
    add_to(&v->acquisitions, taken);
    if (is_hold) {
        add_to(&v->holds, 1);
        add_to(&v->hold_ns, held);
        raise_to(&v->max_hold_ns, held);
    }
}

static __always_inline bool can_nest(u32 type)
{
    return type == LOCK_RWSEM_READ || type == LOCK_SEMAPHORE;
}

static __always_inline struct kernel_holding *holding_of(struct kernel_holding_key *at, u32 type)
{
    struct kernel_holding *holding = kernel_holding.lookup(at);

    if (holding) {
        holding->type = type;
        return holding;
    }
    struct kernel_holding fresh = {.tgid = bpf_get_current_pid_tgid() >> 32, .type = type};
#ifdef TRACE
    bpf_get_current_comm(fresh.comm, sizeof(fresh.comm));
#endif
    if (kernel_holding.update(at, &fresh)) {
        lose(LOSS_KERNEL_HOLDS__HOLDING_FULL);
        return NULL;
    }
    return kernel_holding.lookup(at);
}

/* Add a level to `holding`: the lock has been held since `since`, and was taken by the stack with the number
 * `stack`. */
static __always_inline void hold_began(struct kernel_holding_key *at, struct kernel_holding *holding,
                                       u64 since, u64 stack)
{
    u32 depth = holding->depth;

    if (depth && !can_nest(holding->type)) {
        lose(LOSS_KERNEL_HOLDS__RELEASE_MISSED);
        depth = 0;
    }
    if (depth >= NESTED) { /* the oldest level is dropped */
        lose(LOSS_KERNEL_HOLDS__TOO_NESTED);
        holding->since[0] = holding->since[1];
        holding->since[1] = holding->since[2];
        holding->since[2] = holding->since[3];
#ifdef TRACE
        holding->stacks[0] = holding->stacks[1];
        holding->stacks[1] = holding->stacks[2];
        holding->stacks[2] = holding->stacks[3];
#endif
        depth = NESTED - 1;
    }
    holding->since[depth & (NESTED - 1)] = since;
#ifdef TRACE
    STACK_AT(holding, depth) = stack;
#endif
    holding->depth = depth + 1;
    if (holding->type == LOCK_SEMAPHORE && !holding->asked)
        replace_taker(at->lock, 0, at->tid);
    holding->asked = 0;
}

/* The current thread has got the lock that it asked for. The hold counts from the time
 * that is noted in `holding`. */
static __always_inline void promote(struct kernel_holding_key *at, struct kernel_holding *holding)
{
    u64 since = holding->since[holding->depth & (NESTED - 1)];

    hold_began(at, holding, since, STACK_AT(holding, holding->depth));
    count_hold(at, holding, holding->depth - 1, 1, 0, false);
}

#ifdef TRACE
#ifndef EVERY_STACK
BPF_TABLE("lru_hash", struct kernel_holding_key, u64, first_stacks, ENTRIES);
#endif

/* Return the number of the stack by which the current thread takes a lock. To walk a stack costs more than
 * everything else here. Without EVERY_STACK the number is therefore that of the stack by which the thread
 * took this lock for the first time. */
static __always_inline u64 taking_stack(void *ctx, struct kernel_holding_key *at)
{
#ifdef EVERY_STACK
    return keep_call_stacks(ctx).kernel;
#else
    u64 *known = first_stacks.lookup(at);
    if (known)
        return *known;
    u64 stack = keep_call_stacks(ctx).kernel;
    first_stacks.update(at, &stack);
    return stack;
#endif
}

#define IS_ASKED_FOR() is_current_traced()
#else
#define taking_stack(ctx, at) 0
#define IS_ASKED_FOR() true
#endif

/* The current thread has just taken the lock. */
static __always_inline void took(void *ctx, u64 lock, u32 type)
{
    struct kernel_holding_key at = {.lock = lock, .tid = bpf_get_current_pid_tgid()};
    struct kernel_holding *holding = armed_at() && IS_ASKED_FOR() ? holding_of(&at, type) : NULL;

    if (!holding)
        return;
    if (holding->asked && can_nest(type))
        promote(&at, holding);
    u64 stack = taking_stack(ctx, &at); /* the time for the stack is not part of the hold */
    hold_began(&at, holding, bpf_ktime_get_ns(), stack);
    count_hold(&at, holding, holding->depth - 1, 1, 0, false);
}

/* The current thread asks for the lock. */
static __always_inline int asked(void *ctx, u64 lock, u32 type)
{
    struct kernel_holding_key at = {.lock = lock, .tid = bpf_get_current_pid_tgid()};
    struct kernel_holding *holding = armed_at() && IS_ASKED_FOR() ? holding_of(&at, type) : NULL;

    if (!holding)
        return 0;
    if (holding->asked && can_nest(type))
        promote(&at, holding);
    if (holding->depth && !can_nest(type)) {
        lose(LOSS_KERNEL_HOLDS__RELEASE_MISSED);
        holding->depth = 0;
    }
#ifdef TRACE
    STACK_AT(holding, holding->depth) = taking_stack(ctx, &at);
#endif
    holding->since[holding->depth & (NESTED - 1)] = bpf_ktime_get_ns();
    holding->asked = 1;
    holding->untimed = 0;
    if (type == LOCK_SEMAPHORE)
        replace_taker(lock, 0, at.tid);
    return 0;
}

/* Return the thread that holds a lock which the current thread releases without having taken it, or 0. */
static __always_inline u32 holder_of(u64 lock, u32 type)
{
    u64 owner = 0;
    u32 tid = 0;

    if (type == LOCK_SEMAPHORE)
        return any_taker(lock);
#ifdef MUTEX_OWNER
    bpf_probe_read_kernel(&owner, sizeof(owner),
                          (void *)(lock + (type == LOCK_MUTEX ? MUTEX_OWNER : RWSEM_OWNER)));
#endif
    owner &= ~7ULL; /* clear the flags; if readers hold an rwsem, this is the last one that took it */
    if (owner)
        READ_TASK(owner, TASK_PID, tid);
    return tid;
}

static __always_inline int released(u64 lock, u32 type)
{
    u64 now = bpf_ktime_get_ns();
    u32 tid = bpf_get_current_pid_tgid();
    struct kernel_holding_key at = {.lock = lock, .tid = tid};
    struct kernel_holding *holding = kernel_holding.lookup(&at);

    if (!holding) {
        at.tid = holder_of(lock, type);
        holding = kernel_holding.lookup(&at);
    }
    if (!holding) {
        u64 since = armed_at();
        if (since && now > since + OLD_HOLDS_NS && IS_ASKED_FOR())
            lose(LOSS_KERNEL_HOLDS__TAKEN_UNSEEN);
        return 0;
    }
    /* If another thread releases a semaphore for which its holder waits once more, what ends is a hold from
     * before the wait. (If the holder itself releases it, the end of its wait was not seen.) */
    bool waits = holding->asked == WAITS_FOR_SEMAPHORE && holding->depth && at.tid != tid;
    u32 was_asked = holding->asked && !waits;
    u32 depth = holding->depth + (was_asked ? 0 : -1);
    u64 since = holding->since[depth & (NESTED - 1)];
    bool is_timed = !(was_asked && holding->untimed);

    if (!is_timed)
        lose(LOSS_KERNEL_HOLDS__RETURN_MISSED);
    count_hold(&at, holding, depth, was_asked, now > since ? now - since : 0, is_timed);
    if (waits) {
        holding->depth = depth;
        holding->since[depth & (NESTED - 1)] = holding->since[(depth + 1) & (NESTED - 1)];
#ifdef TRACE
        STACK_AT(holding, depth) = STACK_AT(holding, depth + 1);
#endif
    } else if (depth) {
        holding->depth = depth;
        holding->asked = 0;
    } else {
        kernel_holding.delete(&at);
    }
    if (type == LOCK_SEMAPHORE)
        replace_taker(lock, at.tid, 0);
    return 0;
}

/* Attached to functions that release a lock. */
int lock_released(probed *ctx)
{
    u64 began = run_begins();

    released(ARGUMENT(ctx), GIVEN_LOCK_TYPE(ctx));
    run_ends(began);
    return 0;
}

/* Attached to the entry of functions that take a lock. With trampolines, only to mutex_lock_io(), see
 * lock_taken_if_asked(). */
int lock_asked(probed *ctx)
{
    u64 began = run_begins();

    asked(ctx, ARGUMENT(ctx), GIVEN_LOCK_TYPE(ctx));
    run_ends(began);
    return 0;
}

/* Attached to the return of functions that take a lock. With kprobes it is attached to downgrade_write()
 * alone, at the entry: this function cannot fail, and makes a writer a reader. */
int lock_taken(probed *ctx)
{
    u64 began = run_begins();

    if (SUCCEEDED(ctx))
        took(ctx, ARGUMENT(ctx), GIVEN_LOCK_TYPE(ctx));
    run_ends(began);
    return 0;
}

#ifdef BY_FENTRY

/* Attached to the return of mutex_lock_io(), which calls mutex_lock(). If the compiler has inlined that
 * call, lock_taken() was not called and the lock is still only asked for. */
int lock_taken_if_asked(probed *ctx)
{
    struct kernel_holding_key at = {.lock = ARGUMENT(ctx), .tid = bpf_get_current_pid_tgid()};
    struct kernel_holding *holding = kernel_holding.lookup(&at);

    if (holding && holding->asked)
        took(ctx, at.lock, GIVEN_LOCK_TYPE(ctx));
    return 0;
}

#else

/* A wait for `lock` has ended: the current thread has the lock (`got_it`), or gave up. */
static __always_inline void hold_settled(u64 lock, u64 now, bool got_it)
{
    struct kernel_holding_key at = {.lock = lock, .tid = bpf_get_current_pid_tgid()};
    struct kernel_holding *holding = kernel_holding.lookup(&at);

    if (!holding || !holding->asked)
        return;
    holding->asked = 0;
    if (got_it) {
        hold_began(&at, holding, now, STACK_AT(holding, holding->depth));
        count_hold(&at, holding, holding->depth - 1, 1, 0, false);
    } else if (!holding->depth) {
        kernel_holding.delete(&at);
    }
}

/* The current thread has to wait for the semaphore that it asked for: remove it from the takers. */
static __always_inline void hold_waits(u64 lock)
{
    struct kernel_holding_key at = {.lock = lock, .tid = bpf_get_current_pid_tgid()};
    struct kernel_holding *holding = kernel_holding.lookup(&at);

    if (holding && holding->asked)
        holding->asked = WAITS_FOR_SEMAPHORE;
    replace_taker(lock, at.tid, 0);
}

/* The current thread waits for the lock, and the end of the wait will not be seen. */
static __always_inline void hold_untimed(u64 lock)
{
    struct kernel_holding_key at = {.lock = lock, .tid = bpf_get_current_pid_tgid()};
    struct kernel_holding *holding = kernel_holding.lookup(&at);

    if (holding)
        holding->untimed = 1;
}

/* Attached to osq_unlock(), with which a thread ends spinning for an rwsem. No tracepoint shows this
 * spinning. If the thread got the lock by spinning, its hold begins now. Otherwise it goes on to wait. In a
 * kernel whose threads do not spin for rwsems, only mutexes call osq_unlock(), and nothing is done here. */
int lock_spun_for(probed *ctx)
{
#ifdef RWSEM_OSQ
    struct kernel_holding_key at = {
        .lock = ARGUMENT(ctx) - RWSEM_OSQ,
        .tid = bpf_get_current_pid_tgid(),
    };
    struct kernel_holding *holding = kernel_holding.lookup(&at);

    if (holding && holding->asked)
        holding->since[holding->depth & (NESTED - 1)] = bpf_ktime_get_ns();
#endif
    return 0;
}

/* Key of the lock that a thread tries to take. It has the type of the lock, because an interrupt may try to
 * take a lock of another type meanwhile. */
struct trying_key {
    u32 tid;
    u32 type; /* enum lock_type */
};

BPF_TABLE("hash", struct trying_key, u64, trying, WAITS_ENTRIES);

/* Attached to the entry of functions that try to take a lock and never sleep. */
int lock_tried_for(probed *ctx)
{
    struct trying_key key = {.tid = bpf_get_current_pid_tgid(), .type = GIVEN_LOCK_TYPE(ctx)};
    u64 lock = ARGUMENT(ctx);

    if (!IS_ASKED_FOR())
        return 0;
    if (!RETURN_WILL_BE_SEEN(ctx))
        lose(LOSS_KERNEL_HOLDS__RETURN_MISSED);
    else if (trying.update(&key, &lock))
        lose(LOSS_KERNEL_HOLDS__HOLDING_FULL);
    return 0;
}

/* Attached to the return of functions that try to take a lock and never sleep. */
int lock_tried(probed *ctx)
{
    struct trying_key key = {.tid = bpf_get_current_pid_tgid(), .type = GIVEN_LOCK_TYPE(ctx)};
    u64 *lock = trying.lookup(&key);

    if (!lock)
        return 0;
    u64 tried = *lock;
    trying.delete(&key);
    if (SUCCEEDED(ctx))
        took(ctx, tried, key.type);
    return 0;
}

#endif
