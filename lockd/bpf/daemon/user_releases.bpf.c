// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Releases of locks in user space. The current thread releases a lock in a system call of its own. So its
 * saved registers show whether it releases the lock, and its user stack shows in which code. */

#ifdef TRACE
/* Key of releases for which threads had waited, and of anything else that ended waits. */
struct held_key {
    u64 address;
    u64 stack; /* number of the stack that released the lock, see trace.bpf.h */
    u32 tgid; /* process of the thread that was woken */
    u8 kind; /* enum futex_kind */
    u8 end; /* enum wait_end */
    u16 pad;
};

struct held_value {
    u64 releases;
    u64 waited_ns; /* time for which threads had waited since the previous release */
    u64 max_waited_ns;
};

BPF_TABLE("hash", struct held_key, struct held_value, held_0, ENTRIES);
BPF_TABLE("hash", struct held_key, struct held_value, held_1, ENTRIES);
BPF_ARRAY_OF_MAPS(held, "held_0", 2);

static __always_inline void count_release(void *ctx, struct release *release, u64 waited)
{
    struct held_key key = {
        .address = release->address, .tgid = release->tgid, .kind = release->kind, .end = release->end};
    struct held_value fresh = {};
    int window = current_window();
    void *map = held.lookup(&window);

    if (!map)
        return;
    if (key.end == END_RELEASE)
        key.stack = keep_call_stacks(ctx).user;
    bpf_map_update_elem(map, &key, &fresh, BPF_NOEXIST);
    struct held_value *v = bpf_map_lookup_elem(map, &key);
    if (!v) {
        lose(LOSS_TRACE__FULL);
        return;
    }
    add_to(&v->releases, 1);
    add_to(&v->waited_ns, waited);
    raise_to(&v->max_waited_ns, waited);
}
#define LAST_QUEUED_KIND KIND_COND /* until the trace ends, a rwlock looks like a condition variable */
#else
#define LAST_QUEUED_KIND KIND_PI

#define RELEASE_FUNCTIONS 8

struct captured_release { /* sample of a wait for a user-space lock that ended by END_RELEASE */
    struct release_sample sample;
    struct capture by; /* the thread that released the lock */
    u64 python[RELEASE_FUNCTIONS]; /* the code objects of its Python functions, innermost first, up to a 0 */
};

BPF_ARRAY(release_record, struct captured_release, 1); /* tells Python the layout of a record */
#endif

#ifdef WITH_CAUSES
#define OWNER_TID 0x3fffffff /* FUTEX_TID_MASK */
#define OWNER_WAITED_FOR 0x80000000 /* FUTEX_WAITERS */
#define MUSL_NORMAL 16 /* EBUSY: a locked mutex of musl that does not store its owner */

struct glibc_mutex { /* from glibc 2.31 to 2.42 */
    u32 word;
    u32 count;
    u32 owner;
    u32 users;
    u32 kind;
};
#define GLIBC_KINDS 0x3f3 /* the bits that `kind` may have */
#define GLIBC_TYPE 3
#define GLIBC_RECURSIVE 1

struct glibc_rwlock { /* since glibc 2.25 */
    u32 readers;
    u32 words[3];
    u64 unused;
    u32 writer;
    u32 shared;
};
#define RWLOCK_PHASE_AT 8 /* offset of the word on which threads wait for the phase to change */
#define RWLOCK_WRITERS_AT 12 /* offset of the word on which writers wait for another writer */
#define WRITE_LOCKED 3 /* both of these bits of `readers` are set while a writer has the lock */

/* Return the thread id that is stored in the lock for which `t` waits, or 0 if there is none. The rules are
 * those of lockd/names/locks/owners.py. */
static __always_inline u32 stored_owner(struct thread *t)
{
    struct glibc_rwlock rwlock = {};
    struct glibc_mutex mutex = {};
    u64 at = t->call.uaddr;

    if (at & JAVA_WAIT)
        return 0;
    if (t->call.guess == KIND_COND) { /* but known to be a lock: a rwlock, aligned to 8 bytes */
        at -= at % 8 ? RWLOCK_WRITERS_AT : RWLOCK_PHASE_AT;
        bpf_probe_read_user(&rwlock, sizeof(rwlock), (void *)at);
        bool is_rwlock = (rwlock.readers & WRITE_LOCKED) == WRITE_LOCKED && !rwlock.unused;
        return is_rwlock && rwlock.shared <= 1 ? rwlock.writer : 0;
    }
    bpf_probe_read_user(&mutex, sizeof(mutex), (void *)at);
    if (t->call.kind == KIND_PI)
        return mutex.word & OWNER_TID;
    if (mutex.word == 1 || mutex.word == 2) {
        bool is_recursive = (mutex.kind & GLIBC_TYPE) == GLIBC_RECURSIVE;
        bool is_mutex = !(mutex.kind & ~GLIBC_KINDS) && mutex.users && !mutex.count == !is_recursive;
        return is_mutex ? mutex.owner : 0;
    }
    u32 owner = mutex.word & OWNER_WAITED_FOR ? mutex.word & OWNER_TID : 0;
    return owner == MUSL_NORMAL ? 0 : owner;
}
#endif

/* Whether the current thread, of the process `tgid`, may wake `t` by a futex call that wakes threads at the
 * address `uaddr`. If `t` belongs to another process, the lock is in shared memory. Its address may then
 * differ between the processes, but not its place within a page. */
static __always_inline bool is_at_lock(struct thread *t, u32 tgid, u64 uaddr)
{
    if (t->tgid == tgid) /* for a wait of Java the address is not known; see hotspot.bpf.c */
        return t->call.uaddr == uaddr || t->call.uaddr & JAVA_WAIT;
    return !((t->call.uaddr ^ uaddr) & (PAGE_SIZE - 1));
}

/* Whether the current thread is in a system call that releases the lock for which `t` waits. */
static __always_inline bool is_releasing(u64 task, struct thread *t)
{
    struct pt_regs *registers = user_regs_of(task);
    struct system_call call = call_of(registers, 2);
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

/* Return by what the current thread ends the wait of `t` (enum wait_end). The waker may also be an interrupt,
 * such as a timer: then the system call of the current thread, if any, has nothing to do with the lock. */
static __always_inline u8 end_of_user_wait(struct thread *t)
{
    u64 task = CURRENT_TASK();
    u32 flags = 0;

    READ_CURRENT(task, TASK_FLAGS, flags);
    if (flags & PF_EXITING)
        return t->tgid == bpf_get_current_pid_tgid() >> 32 ? END_OWNER_ENDED : END_NO_RELEASE;
    return !(flags & PF_KTHREAD) && is_releasing(task, t) ? END_RELEASE : END_NO_RELEASE;
}

#ifndef TRACE
/* The struct of the GIL begins with four words, the second of which is the pointer at `last_holder`. Then
 * come two pairs of a condition variable and a mutex of glibc. Threads that want the GIL wait on the first
 * pair, and a thread that has given up the GIL waits on the second. The numbers are offsets in bytes from the
 * beginning of the struct: of the words on which threads sleep, in the condition variables of any version of
 * glibc. GIL_END is the size of the struct or more. */
#define GIL_WANTED 64
#define GIL_WANTED_END 80
#define GIL_SWITCHES (112 + PTHREAD_MUTEX_BYTES)
#define GIL_SWITCHES_END (128 + PTHREAD_MUTEX_BYTES)
#define GIL_END 224

/* A thread that has waited for the GIL for some milliseconds asks the holder to give it up, and waits again.
 * Until the GIL is given up, no thread is charged with such waits. They are added up here, by process. */
struct gil_waits {
    u64 waited; /* ns */
    u64 last; /* time at which the last of the waits ended */
    u32 tid; /* the thread whose wait ended at `last` */
    u32 pad;
};

#define GIL_ASKED_NS 100000 /* within this time after a thread has asked, the holder gives up the GIL */
#define GIL_WAITS_NS 1000000000 /* if `last` is longer ago than this, the GIL was given up unseen */

BPF_TABLE("lru_hash", u32, struct gil_waits, gil_waits, CPYTHONS_ENTRIES);

/* Return the offset in bytes, in the struct of the GIL, of the word on which `t` waits; GIL_END if it waits
 * for anything else. By their arguments, waits for the GIL are waits for a condition variable. Waits for the
 * mutexes in the struct are not recognised: they look like waits for any lock, each of which would then need
 * a look-up, and mostly the wait that follows shows the same. */
static __always_inline u64 place_in_gil(struct thread *t)
{
    u32 tgid = t->tgid;

    if (t->call.guess != KIND_COND)
        return GIL_END;
    struct cpython *vm = cpythons.lookup(&tgid);
    u64 at = vm ? t->call.uaddr - (vm->last_holder - sizeof(u64)) : GIL_END;
    return at < GIL_END ? at : GIL_END;
}

/* Add up a wait of the thread `tid`, whose entry is `t`, for the GIL. The wait has ended at `now` after
 * `waited` ns, but not because the GIL was given up. */
static __always_inline void add_gil_wait(u32 tid, struct thread *t, u64 waited, u64 now)
{
    u32 tgid = t->tgid;
    struct gil_waits none = {}, *sum = gil_waits.lookup_or_try_init(&tgid, &none);

    if (!sum)
        return;
    add_to(&sum->waited, waited);
    sum->last = now;
    sum->tid = tid;
}

/* The current thread `tid` gives up the GIL at `now`. `sum` says for how long threads have waited for the
 * GIL. Reset it, and return for how many ns they have waited because of this thread. */
static __always_inline u64 take_gil_waits(u32 tid, struct gil_waits *sum, u64 now)
{
    s64 waited = sum->waited;

    if (waited <= 0) /* below 0 for a short time if two CPUs have reset it at once */
        return 0;
    add_to(&sum->waited, -waited);
    /* If the last wait is too old, or was one of this thread, another thread has given up the GIL unseen. */
    return now - sum->last < GIL_WAITS_NS && sum->tid != tid ? waited : 0;
}

/* Report a sample of a release by the current thread, with a capture of this thread. `task` is of the process
 * that has waited. */
static __always_inline void output_user_release(void *ctx, struct release *release, u64 task)
{
    struct captured_release *record = releases.ringbuf_reserve(sizeof(struct captured_release));

    if (!record) {
        refuse_sample(release->weight);
        return;
    }
    record->sample.release = *release;
    identify(task, &record->sample.who);
    record->by.bytes = 0;
    __builtin_memset(record->by.frames, 0, sizeof(record->by.frames));
    fill_capture(ctx, bpf_get_current_task(), &record->by);
    read_python_functions(record->by.thread_pointer, record->python, RELEASE_FUNCTIONS);
    releases.ringbuf_submit(record, BPF_RB_NO_WAKEUP);
    wake_sampler();
}

/* The current thread `tid`, whose entry is `t`, begins to wait at `now`, on the word at the offset `place` in
 * the struct of the GIL. If this shows that it gives up the GIL, charge it with the waits of the threads that
 * have asked for the GIL. A thread that has the GIL, and is asked for it, gives it up, waits until another
 * thread has got it, and waits for the GIL. Perhaps only one of these waits is seen: a thread that has asked
 * may find the GIL free before it sleeps again. */
static __always_inline void give_up_gil(void *ctx, u32 tid, struct thread *t, u64 place, u64 now)
{
    bool has_given_up = place >= GIL_SWITCHES && place < GIL_SWITCHES_END;
    u32 tgid = t->tgid;
    struct cpython *vm = cpythons.lookup(&tgid);
    struct gil_waits *sum = gil_waits.lookup(&tgid);
    u64 state = vm ? python_state(vm, t->thread_pointer) : 0;

    if (!vm || !sum)
        return;
    if (place >= GIL_WANTED && place < GIL_WANTED_END) /* has it run since before it was asked? */
        has_given_up = t->woken_at && t->woken_at < sum->last && now - sum->last < GIL_ASKED_NS;
    if (!has_given_up && (!state || user_word(vm->last_holder) != state))
        return;
    u64 waited = take_gil_waits(tid, sum, now);
    struct release release = {
        .address = t->call.uaddr,
        .weight = weight_of_sample(waited, now),
        .tgid = t->tgid,
        .kind = t->call.kind,
        .end = END_RELEASE,
    };

    if (!release.weight)
        return;
#ifdef WITH_CAUSES
    release.waited = waited;
    describe_unfollowed(&release.times, now - waited, waited, now);
    /* `t` already describes the wait that begins now: why the thread was blocked before is not known. */
    release.times.known -= release.times.blocked;
    release.times.blocked = 0;
    __builtin_memset(&release.times.absence, 0, sizeof(release.times.absence));
#endif
    output_user_release(ctx, &release, bpf_get_current_task()); /* all these threads are of one process */
}
#endif

/* The current thread `tid`, whose entry is `t`, leaves its CPU at `now` to wait for a lock in user space. */
static __always_inline void join_user_queue(void *ctx, u64 task, u32 tid, struct thread *t, u64 now)
{
    u64 key = queue_of(t->call.uaddr, t->tgid);

    if (t->call.kind > LAST_QUEUED_KIND)
        return;
    struct lock_queue *queue = join_queue(t, &key, QUEUED_BY_USER, now);
#ifndef TRACE
    u64 place = queue ? place_in_gil(t) : GIL_END;
    if (place < GIL_END)
        give_up_gil(ctx, tid, t, place, now);
#endif
#ifdef WITH_CAUSES
    if (!queue || !needs_holder(&queue->hold, tid, queue->released, now))
        return;
    u32 stored = stored_owner(t);
    if (stored)
        note_holder(queue, &key, t->tgid, thread_of(task, t->tgid, stored), now);
#endif
}

/* The wait of `task`, which is in the queue of a lock in user space, ends at `now`; `t` is its entry. If the
 * thread is not being `woken`, it is not known how the wait ends. */
static __always_inline void leave_user_queue(void *ctx, u64 task, u32 tid, struct thread *t, bool woken,
                                             u64 now)
{
    u64 key = queue_of(t->call.uaddr, t->tgid);
    u8 end = woken ? end_of_user_wait(t) : END_NO_RELEASE;
#ifndef TRACE
    u64 place = place_in_gil(t);
    if (place >= GIL_SWITCHES && place < GIL_SWITCHES_END)
        end = END_NO_RELEASE; /* the waker of a thread that has given up the GIL has just got the GIL */
#endif
    struct release release = {
        .address = t->call.uaddr,
        .tgid = t->tgid,
        .kind = t->call.kind,
        .end = end,
    };

    u64 since = 0, waited = leave_queue(tid, t, &key, end, now, &release, &since, true);
#ifdef TRACE
    count_release(ctx, &release, waited);
#else
    if (place >= GIL_WANTED && place < GIL_WANTED_END) {
        u32 tgid = t->tgid;
        if (end != END_RELEASE) {
            add_gil_wait(tid, t, waited, now);
            return;
        }
        struct gil_waits *sum = gil_waits.lookup(&tgid);
        if (sum)
            waited += take_gil_waits(bpf_get_current_pid_tgid(), sum, now);
    }
    release.weight = weight_of_sample(waited, now);
    if (!release.weight)
        return;
    if (end != END_RELEASE) {
        output_release(&release, task);
        return;
    }
#ifdef WITH_CAUSES
    if (!release.times.known)
        describe_unfollowed(&release.times, since, release.waited, now);
#endif
    output_user_release(ctx, &release, task);
#endif
}
