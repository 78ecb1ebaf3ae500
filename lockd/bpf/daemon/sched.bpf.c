// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Context switches and wake-ups: time off the CPU, time on the run queue, and blocked futex calls. */

/* Key of an absence from the CPU. It contains the slots of the blocked time and of the time on the run queue,
 * so that one map operation counts the whole absence. */
struct offcpu_key {
    u32 tid;
    u32 waker; /* thread group that ended the wait; 0: an interrupt on an idle CPU, or not known */
    s16 nr; /* number of the system call, or an NR_* value below 0 (arch.bpf.h) */
    u8 state; /* enum state */
    u8 iowait;
    u8 blocked_slot; /* SLOT_NONE: the thread was preempted and did not wait */
    u8 run_slot; /* SLOT_NONE: the wake-up was not seen */
    u8 detail; /* of the system call: enum futex_kind, file_kind, clone_kind or poll_kind */
    u8 pad;
#ifdef TRACE_OFFCPU /* `blocked_slot` and `run_slot` are 0 here, so that there are fewer keys */
    struct call_stack_ids stacks;
    char comm[COMM_LEN];
#ifdef WITH_WAKERS
    struct waker woken_by;
#endif
#endif
};

struct offcpu_value {
    u64 count;
    u64 blocked_ns;
    u64 max_blocked_ns; /* maximum of asked_time() */
    u64 run_ns; /* time on the run queue */
    struct who who;
};

#ifdef WITH_OFFCPU
BPF_TABLE("hash", struct offcpu_key, struct offcpu_value, offcpu_0, ENTRIES);
BPF_TABLE("hash", struct offcpu_key, struct offcpu_value, offcpu_1, ENTRIES);
BPF_ARRAY_OF_MAPS(offcpu, "offcpu_0", 2);
BPF_TABLE("hash", struct offcpu_key, struct offcpu_value, offcpu_over_0, OVER_ENTRIES);
BPF_TABLE("hash", struct offcpu_key, struct offcpu_value, offcpu_over_1, OVER_ENTRIES);
BPF_ARRAY_OF_MAPS(offcpu_over, "offcpu_over_0", 2);
#endif

static __always_inline u8 state_of(u64 task_state)
{
    if (task_state & TASK_INTERRUPTIBLE)
        return STATE_INTERRUPTIBLE;
    if ((task_state & (TASK_UNINTERRUPTIBLE | TASK_RTLOCK_WAIT)) && !(task_state & TASK_NOLOAD))
        return STATE_UNINTERRUPTIBLE;
    return STATE_OTHER;
}

/* Return the part of an absence whose maximum is kept, in ns: the wait, and where a tool asks for it the time
 * on the run queue as well. */
static __always_inline u64 asked_time(u64 blocked, u64 run)
{
#ifdef WITH_RUNQUEUE
    return blocked + run;
#else
    return blocked;
#endif
}

#ifdef TRACE_OFFCPU
/* These are too large for a program's own stack. */
BPF_ARRAY(no_thread, struct thread, 1);
BPF_PERCPU_ARRAY(absence, struct offcpu_key, 1);

/* Whether the user asked for absences such as the one that begins with this switch-out. */
static __always_inline bool is_asked_for(bool preempted, u64 task_state)
{
    bool waits = !preempted && task_state;

#ifdef STATE_MASK
    return STATE_MASK ? waits && task_state & STATE_MASK : !waits;
#elif defined(WITH_RUNQUEUE)
    return true;
#else
    return waits;
#endif
}

#ifdef WITH_WAKERS
BPF_ARRAY(interrupts, struct interrupt, 1); /* written by the tool */

/* Note the waker of `t`: the current thread, or an interrupt that came while it ran. */
static __always_inline void note_waker(void *ctx, struct thread *t)
{
    u64 id = bpf_get_current_pid_tgid();
    u32 zero = 0;
    struct interrupt *known = interrupts.lookup(&zero), in = {};

    if (known)
        in = *known;
    t->woken_by.stacks = keep_stacks(ctx, &in);
    t->woken_by.tid = in.is_in ? 0 : id;
    t->woken_by.tgid = in.is_in ? 0 : id >> 32;
    __builtin_memset(t->woken_by.comm, 0, COMM_LEN);
    if (!in.is_in)
        bpf_get_current_comm(t->woken_by.comm, COMM_LEN);
}
#endif

static __always_inline void describe_absence(struct offcpu_key *key, u32 tid, struct thread *t, bool woken)
{
    __builtin_memset(key, 0, sizeof(*key));
    key->tid = tid;
    key->nr = t->nr;
    key->state = t->state;
    key->iowait = t->iowait;
    key->detail = t->detail;
    key->stacks = t->stacks;
    __builtin_memcpy(key->comm, t->comm, COMM_LEN);
#ifdef WITH_WAKERS
    if (woken)
        key->woken_by = t->woken_by;
#endif
}
#endif

#ifdef WITH_OFFCPU
/* Count an absence from the CPU, for which `offcpu` has no room, in the entry `key` of the overflow map.
 * Return false if that has no room either. */
static __always_inline bool add_to_overflow(int window, struct offcpu_key *key, u64 blocked, u64 run)
{
    struct offcpu_value fresh = {};
    void *map = offcpu_over.lookup(&window);

    if (!map)
        return false;
    if (!bpf_map_lookup_elem(map, key))
        add_entry(WRITTEN_OFFCPU_OVER, window, map, key, &fresh, true);
    struct offcpu_value *v = bpf_map_lookup_elem(map, key);
    if (!v)
        return false;
    add_to(&v->count, 1);
    add_to(&v->blocked_ns, blocked);
    add_to(&v->run_ns, run);
    raise_to(&v->max_blocked_ns, asked_time(blocked, run));
    return true;
}

/* Count an absence, for which the map has no room, in the overflow map. Return whether it is counted. */
static __always_inline bool offcpu_overflow(int window, struct offcpu_key *key, u64 blocked, u64 run)
{
#ifdef TRACE_OFFCPU /* all such absences share one entry, so that the sums over all threads are right */
    struct offcpu_key nobody = {};

    return add_to_overflow(window, &nobody, blocked, run);
#else
    /* The wait and the time on the run queue have entries of their own. That takes far fewer keys than an
     * entry for each combination. */
    bool is_counted = true;

    if (key->blocked_slot != SLOT_NONE) {
        struct offcpu_key wait = *key;
        wait.tid = wait.waker = 0;
        wait.run_slot = SLOT_NONE;
        is_counted = add_to_overflow(window, &wait, blocked, 0);
    }
    if (key->run_slot != SLOT_NONE) {
        struct offcpu_key turn = {
            .state = STATE_RUNNABLE, .blocked_slot = SLOT_NONE, .run_slot = key->run_slot};
        is_counted = add_to_overflow(window, &turn, 0, run) && is_counted;
    }
    return is_counted;
#endif
}

/* Count an absence that has ended, of a thread that is about to run. If the switch-in was not `seen`, the
 * thread has been running for a while, and its time on the run queue is not known. */
static __always_inline void count_absence(u64 task, u32 tid, struct thread *t, u64 now, bool seen)
{
    bool waited = t->state != STATE_RUNNABLE;
    bool wakeup_seen = !waited || t->woken_at >= t->off_since;
    u64 ready = !waited ? t->off_since : wakeup_seen ? t->woken_at : now;
    u64 blocked = ready - t->off_since;
    u64 run = now > ready ? now - ready : 0;
    int window = current_window();
    void *map = offcpu.lookup(&window);
#ifdef TRACE_OFFCPU
    u32 zero = 0;
    struct offcpu_key *key = absence.lookup(&zero);

    if (!seen || !wakeup_seen)
        run = 0;
    if (!map || !key || !is_wanted(asked_time(blocked, run)))
        return;
    describe_absence(key, tid, t, waited && wakeup_seen);
#else
    struct offcpu_key described = {.tid = tid, .state = t->state, .blocked_slot = SLOT_NONE};
    struct offcpu_key *key = &described;

    key->run_slot = seen && wakeup_seen ? slot_of(run) : SLOT_NONE;
    if (key->run_slot == SLOT_NONE)
        run = 0;
    if (waited && is_wanted(blocked)) {
        key->nr = t->nr;
        key->iowait = t->iowait;
        key->detail = t->detail;
        key->waker = t->waker;
        key->blocked_slot = slot_of(blocked);
    } else {
        key->state = STATE_RUNNABLE;
        blocked = 0;
    }
    if (!map || (key->blocked_slot == SLOT_NONE && key->run_slot == SLOT_NONE))
        return;
#endif
    u64 longest = asked_time(blocked, run);
    u32 step = restraint();
    bool by_process = step >= RESTRAINT_DETAIL;
    if (by_process) {
        key->tid = OF_PROCESS | t->tgid;
        key->waker = 0;
    }
    struct offcpu_value *v = NULL;
    if (step < RESTRAINT_PROCESSES) {
        v = bpf_map_lookup_elem(map, key);
        if (!v) {
            struct offcpu_value fresh = {
                .count = 1,
                .blocked_ns = blocked,
                .max_blocked_ns = longest,
                .run_ns = run,
            };
            bool of_process = is_of_process(t->tgid, t->nr == NR_KERNEL);
            identify(task, &fresh.who);
            if (!add_entry(WRITTEN_OFFCPU, window, map, key, &fresh, of_process))
                return;
            v = bpf_map_lookup_elem(map, key); /* another thread of the process may have added it */
        }
    }
    if (!v) {
        lose(offcpu_overflow(window, key, blocked, run) ? OVER_OFFCPU : LOSS_OFFCPU__FULL);
        return;
    }
    if (by_process) {
        add_to(&v->count, 1);
        add_to(&v->blocked_ns, blocked);
        add_to(&v->run_ns, run);
        raise_to(&v->max_blocked_ns, longest);
    } else {
        v->count += 1;
        v->blocked_ns += blocked;
        v->run_ns += run;
        raise_own(&v->max_blocked_ns, longest);
    }
}
#endif

#ifdef WITH_HOLDERS
/* The current thread, whose entry is `t`, leaves its CPU at `now`. If it waits for a lock, count it in the
 * queue of the lock. */
static __always_inline void join_its_queue(void *ctx, u64 task, u32 tid, struct thread *t, u64 now)
{
#ifdef WITH_USER_HOLDERS
    if (t->call.since && t->state == STATE_INTERRUPTIBLE) {
        join_user_queue(ctx, task, tid, t, now);
        return;
    }
#endif
#ifdef WITH_KERNEL_HOLDERS
    if (t->awaits & SLEPT_FOR_LOCK)
        join_kernel_queue(tid, t, now);
#endif
}

/* The wait of `task` for a lock ends at `now`; `t` is its entry. If it is `woken`, the current thread wakes
 * it. Otherwise it runs again after a wake-up that was not seen. */
static __always_inline void leave_its_queue(void *ctx, u64 task, u32 tid, struct thread *t, bool woken,
                                            u64 now)
{
#ifdef WITH_KERNEL_HOLDERS
    if (t->queued == QUEUED_IN_KERNEL) {
        leave_kernel_queue(ctx, task, tid, t, woken, now);
        return;
    }
#endif
#ifdef WITH_USER_HOLDERS
    leave_user_queue(ctx, task, tid, t, woken, now);
#endif
}
#endif

/* The absence of `task` from its CPU, which its entry `t` describes, ends at `now`. If the switch-in was not
 * `seen`, the absence ended earlier. */
static __always_inline void came_back(u64 task, u32 tid, struct thread *t, u64 now, bool seen)
{
#ifdef WITH_CAUSES
    if (t->flags & THREAD_HOLDS) {
        bool was_ready = seen && (t->state == STATE_RUNNABLE || t->woken_at >= t->off_since);
        holder_changes(tid, t, was_ready ? HOLDER_READY : HOLDER_UNKNOWN, now);
    }
#endif
#ifdef WITH_HOLDERS
    if (t->queued) /* its wake-up was not seen */
        leave_its_queue(NULL, task, tid, t, false, now);
#endif
#if defined(FUTEX_CALLS) || defined(FUTEX_WAITS)
    /* After a return that was not seen the thread has run for an unknown time, but not before its wake-up. */
    u64 until = !seen && t->woken_at ? t->woken_at : now;
#endif
#ifdef FUTEX_CALLS
    if (t->call.since && t->state != STATE_RUNNABLE) {
        t->call_blocked += until - t->off_since;
        count_step(STEP_RAN_AGAIN);
    }
#elif defined(FUTEX_WAITS)
    if (t->call.since)
        futex_wait_ended(task, t, until);
#endif
#ifdef WITH_WAIT_SAMPLES
    return_from_wait(task, tid, t, now);
#endif
#ifdef WITH_OFFCPU
    count_absence(task, tid, t, now, seen);
#endif
#ifdef WITH_CAUSES
    note_return(t, now, seen);
#endif
    t->off_since = 0;
}

static __always_inline void switched_in(u64 task, u32 tid, u64 now)
{
    struct thread *t = entry_of(tid);

    if (t && t->off_since)
        came_back(task, tid, t, now, true);
}

/* The current thread is on a CPU but its entry says that it is not: no program was called when it was
 * switched in. Some kernels call no program when certain other threads leave the CPU. */
static __always_inline void came_back_unseen(u32 tid, struct thread *t, u64 now)
{
    lose(UNSEEN_SWITCH);
    came_back(bpf_get_current_task(), tid, t, now, false);
}

static __always_inline bool is_futex_wait(s16 nr)
{
    return nr == NR_FUTEX || nr == NR_FUTEX_WAIT || nr == NR_FUTEX_WAITV || nr == NR_RESTART_SYSCALL;
}

static __always_inline bool is_futex_call(s16 nr)
{
    return is_futex_wait(nr) || nr == NR_FUTEX_WAKE || nr == NR_FUTEX_REQUEUE;
}

enum file_kind { FILE_OTHER, FILE_REGULAR, FILE_PIPE, FILE_SOCKET, FILE_DEVICE, FILE_EVENT };

#define S_ANON_INODE (1 << 19) /* anonymous inodes: regular files since 6.16, before without a type */

/* Return the kind of the file whose descriptor is the first argument of the current thread's system call. */
static __always_inline u8 file_kind(u64 task, struct pt_regs *registers)
{
    u64 files = 0, table = 0, array = 0, place = 0, file = 0, inode = 0;
    u64 fd = (u32)first_argument(registers);
    u32 flags = 0, most = 0;
    u16 mode = 0;

    READ_CURRENT(task, TASK_FILES, files);
    READ_CURRENT(files, FILES_FDT, table);
    READ_CURRENT(table, FDTABLE_MAX_FDS, most);
    /* The argument need not be an open descriptor: a call may sleep before it checks its descriptor, and
     * 64-bit code can make a 32-bit call, which has other arguments in these registers. */
    if (fd >= most)
        return FILE_OTHER;
    READ_CURRENT(table, FDTABLE_FD, array);
    place = STRUCT_AT(array + fd * sizeof(u64), POINTER_TYPE);
    READ_MEMBER(place, 0, file);
    file = STRUCT_AT(file, FILE_TYPE);
    READ_MEMBER(file, FILE_INODE, inode);
    if (!inode)
        return FILE_OTHER;
    READ_MEMBER(inode, INODE_MODE, mode);
    switch (mode & 0170000) { /* S_IFMT */
    case 0:
        return FILE_EVENT;
    case 0100000:
        READ_MEMBER(inode, INODE_FLAGS, flags);
        return flags & S_ANON_INODE ? FILE_EVENT : FILE_REGULAR;
    case 0060000: /* block device */
        return FILE_REGULAR;
    case 0010000:
        return FILE_PIPE;
    case 0140000:
        return FILE_SOCKET;
    case 0020000:
        return FILE_DEVICE;
    default:
        return FILE_OTHER;
    }
}

enum poll_kind { POLL_ANY, POLL_FOR_LOCK };

#define COMM_POSTGRES 0x7365726774736f70ULL /* "postgres" */
#define SAYS_WAITING 0x676e697469617720ULL /* " waiting" */
#define TITLE_LEN 256
#define TITLE_ROOM 264 /* room for a read of eight bytes at any position */

struct title {
    char text[TITLE_ROOM];
};

BPF_PERCPU_ARRAY(titles, struct title, 1);

/* Return what the current thread polls for. A backend of PostgreSQL also polls while it waits for a lock
 * of a row, of a table or of another transaction. It then says so at the end of its title, which replaces
 * its arguments. */
static __always_inline u8 poll_kind(u64 task)
{
    u64 comm[COMM_LEN / sizeof(u64)] = {}, mm = 0, title_at = 0, end = 0;
    u32 zero = 0;

    bpf_get_current_comm(comm, sizeof(comm));
    if (comm[0] != COMM_POSTGRES || comm[1])
        return POLL_ANY;
    struct title *title = titles.lookup(&zero);
    READ_TASK(task, TASK_MM, mm);
    READ_TASK(mm, MM_ARG_START, title_at);
    if (!title)
        return POLL_ANY;
    int len = bpf_probe_read_user_str(title->text, TITLE_LEN, (void *)title_at);
    if (len <= (int)sizeof(end) || len > TITLE_LEN)
        return POLL_ANY;
    bpf_probe_read_kernel(&end, sizeof(end), title->text + ((len - 1 - sizeof(end)) & (TITLE_LEN - 1)));
    return end == SAYS_WAITING ? POLL_FOR_LOCK : POLL_ANY;
}

enum clone_kind { CLONE_OTHER, CLONE_AND_WAIT };

#define CLONE_VFORK 0x4000

/* Return whether the current thread's clone() or clone3() waits until the child calls exec or ends. */
static __always_inline u8 clone_kind(s16 nr, struct pt_regs *registers)
{
    u64 flags = first_argument(registers);

    if (nr == NR_CLONE3) {
        void *arguments = (void *)flags;
        flags = 0;
        bpf_probe_read_user(&flags, sizeof(flags), arguments);
    }
    return flags & CLONE_VFORK ? CLONE_AND_WAIT : CLONE_OTHER;
}

/* Return the state (enum state) of the current thread, which goes to sleep. A thread that is frozen with its
 * cgroup sleeps interruptibly, in whatever system call it is: its state is STATE_OTHER. The parent of a vfork
 * has the flag of frozen threads too, but sleeps uninterruptibly, and keeps its state. */
static __always_inline u8 state_of_sleeper(u64 task, u64 task_state)
{
    u8 frozen = 0, state = state_of(task_state);

    READ_CURRENT(task, TASK_FROZEN, frozen);
    return state == STATE_INTERRUPTIBLE && (frozen >> TASK_FROZEN_BIT) & 1 ? STATE_OTHER : state;
}

/* Whether to make an entry for the current thread, which leaves its CPU and has none. */
static __always_inline bool is_followed(u32 tid)
{
#ifdef ONLY_FUTEX_CALLS
    return is_in_call(tid);
#elif defined(ONLY_KERNEL_LOCKS)
    return false; /* await_lock() makes the entries that are needed */
#else
    return true;
#endif
}

/* The current thread leaves its CPU at `now`. `task_state` is its state in struct task_struct. */
static __always_inline void switched_out(void *ctx, u64 task, u32 tid, bool preempted, u64 task_state,
                                         u64 now)
{
    struct thread *t = entry_of(tid);
    u32 tgid = 0;

#ifdef TRACE_OFFCPU
    if (!is_current_traced())
        return;
#endif
    if (!t) {
#ifdef TRACE_OFFCPU
        u32 zero = 0;
        struct thread *fresh = no_thread.lookup(&zero);
        if (fresh && !(task_state & TASK_DEAD)) {
            add_thread(tid, fresh);
#else
        READ_CURRENT(task, TASK_TGID, tgid);
        struct thread fresh = {.tgid = tgid};
        if (!(task_state & TASK_DEAD) && is_followed(tid)) {
            add_thread(tid, &fresh);
#endif
            t = entry_of(tid);
        }
        if (!t) { /* no room, no entry needed, or the thread ends and had never left its CPU */
#ifdef FUTEX_CALLS
            futex_switched_out(NULL, tid, task_state & TASK_DEAD, now);
#elif defined(FUTEX_WAITS)
            if (!preempted && task_state & TASK_INTERRUPTIBLE && is_futex_wait(current_syscall()))
                lose(LOSS_FUTEX__THREADS_FULL);
#endif
#ifdef WITH_OFFCPU
            if (!(task_state & TASK_DEAD) && is_followed(tid))
                lose(LOSS_OFFCPU__THREADS_FULL);
#endif
            return;
        }
    }
    if (t->off_since)
        came_back_unseen(tid, t, now);
#ifndef HAVE_PREV_STATE
    /* Since 5.8 a waker changes the state before the thread leaves its CPU. woken() noted the old state. */
    if (task_state & TASK_WAKING)
        task_state = t->state == STATE_UNINTERRUPTIBLE ? TASK_UNINTERRUPTIBLE : TASK_INTERRUPTIBLE;
#endif
#ifdef WITH_CAUSES
    /* One switch in 64 notes the id again: the map drops ids that nobody has asked for, and containers bring
     * new ones all the time. */
    if (!(t->flags & THREAD_ID_NOTED) || chosen_by(now) < 1ULL << 26)
        note_namespace_id(task, tid, t);
    if (t->flags & THREAD_HOLDS)
        holder_changes(tid, t, HOLDER_RUNNING, now);
#endif
#ifdef FUTEX_CALLS
    futex_switched_out(t, tid, task_state & TASK_DEAD, now);
#endif
    if (task_state & TASK_DEAD) {
#ifdef FUTEX_CALLS
        futex_abandoned(t, now);
#endif
#ifdef WITH_KERNEL_HOLDERS
        if (t->awaits & AWAITS_LOCK) /* the end of its wait was not seen */
            awaited_locks.delete(&tid);
#endif
        remove_thread(tid);
        return;
    }
#ifdef TRACE_OFFCPU
    if (!is_asked_for(preempted, task_state))
        return;
    READ_CURRENT(task, TASK_TGID, tgid);
    t->tgid = tgid;
    t->stacks = keep_call_stacks(ctx);
    bpf_get_current_comm(t->comm, COMM_LEN);
    now = bpf_ktime_get_ns(); /* the time for the stacks is not part of the wait */
#endif
#if !defined(TRACE) && !defined(FUTEX_CALLS)
    if (preempted || !task_state) { /* what the thread was doing does not matter: it waits for a CPU */
        t->state = STATE_RUNNABLE;
        t->off_since = now;
#ifdef WITH_KERNEL_HOLDERS
        t->awaits &= AWAITS_LOCK;
#endif
        return;
    }
#endif
    u32 flags = 0;
    READ_CURRENT(task, TASK_FLAGS, flags);
    struct pt_regs *registers = user_regs_of(task);
    /* The saved registers of a thread that was killed still show the system call that it was in. */
    s16 nr = flags & PF_KTHREAD ? NR_KERNEL : flags & PF_EXITING ? NR_EXITING : syscall_of(registers);
    /* restart_syscall() continues a timed wait after SIGCONT. The thread is still in the call that began
     * the wait. */
    if (nr != NR_RESTART_SYSCALL || t->nr <= 0)
        t->nr = nr;
    t->state = preempted || !task_state ? STATE_RUNNABLE : state_of_sleeper(task, task_state);
#ifdef FUTEX_CALLS
    if (t->call.since && !is_futex_call(t->nr))
        futex_abandoned(t, now);
    if (t->call.since && !preempted && task_state)
        futex_blocks(ctx, task, t, now);
#elif defined(FUTEX_WAITS)
    if (t->state == STATE_INTERRUPTIBLE && (is_futex_wait(t->nr) || t->nr == NR_COMPAT))
        futex_wait_began(ctx, task, registers, t, tid, t->nr, now);
#endif
    u32 state_now = 0;
#ifdef WITH_KERNEL_HOLDERS
    t->awaits &= AWAITS_LOCK;
    if (t->awaits && t->state != STATE_RUNNABLE)
        t->awaits |= SLEPT_FOR_LOCK;
#endif
#ifdef WITH_HOLDERS
    READ_CURRENT(task, TASK_STATE, state_now);
    if (state_now && !(state_now & TASK_WAKING)) /* else the thread was woken meanwhile */
        join_its_queue(ctx, task, tid, t, now);
#endif
#ifdef ONLY_FUTEX_CALLS
    if (!t->call.since)
        return;
#endif
#ifdef ONLY_KERNEL_LOCKS
    if (!t->queued)
        return;
#endif
    t->detail = 0;
#ifdef WITH_FUTEX
    if (t->call.since)
        t->detail = t->call.kind;
    else
#endif
        if (is_futex_wait(t->nr))
        t->detail = KIND_NONE; /* the kind is not known */
    else if (is_read_or_write(t->nr))
        t->detail = file_kind(task, registers);
    else if (t->nr == NR_CLONE || t->nr == NR_CLONE3)
        t->detail = clone_kind(t->nr, registers);
    else if (t->nr == NR_EPOLL_WAIT || t->nr == NR_EPOLL_PWAIT)
        t->detail = poll_kind(task);
    t->iowait = 0;
#ifdef TASK_IN_IOWAIT
    u8 bits = 0;
    READ_CURRENT(task, TASK_IN_IOWAIT, bits);
    t->iowait = (bits >> TASK_IN_IOWAIT_BIT) & 1;
#endif
    u32 chance = 0;
#ifdef WITH_WAIT_SAMPLES
    if (t->state != STATE_RUNNABLE)
        chance = begin_wait_sample(ctx, task, tid, t, now);
#endif
    t->waker = chance;
    t->woken_at = 0;
    t->off_since = now;
    /* on_sched_waking() ignores a wake-up that comes while the thread is still being switched out, because
     * off_since is 0. By now such a wake-up has changed the state. */
    READ_CURRENT(task, TASK_STATE, state_now);
    if (t->state != STATE_RUNNABLE && (!state_now || state_now & TASK_WAKING)) {
        if (t->waker == chance)
            t->waker = 0;
        t->woken_at = now;
    }
}

/* Raw tracepoint sched_switch. Arguments: preempt, prev, next and, since 5.18, the state of prev before a
 * waker could change it. */
int on_sched_switch(struct bpf_raw_tracepoint_args *ctx)
{
    u64 began = run_begins(), now = bpf_ktime_get_ns();
    u64 task = CURRENT_TASK(), next = STRUCT_AT(ctx->args[2], TASK_TYPE), task_state = 0;
    u32 tid = 0, next_tid = 0;

#ifdef HAVE_PREV_STATE
    task_state = (u32)ctx->args[3];
#else
    READ_TASK(ctx->args[1], TASK_STATE, task_state);
#if TASK_STATE_BYTES == 4 /* the state is an int since 5.14 */
    task_state &= 0xffffffff;
#endif
#endif
    READ_CURRENT(task, TASK_PID, tid);
    if (tid)
        switched_out(ctx, task, tid, ctx->args[0] & 1, task_state, now);
    READ_MEMBER(next, TASK_PID, next_tid);
    if (next_tid)
        switched_in(next, next_tid, now);
    run_ends(began);
    return 0;
}

/* The current thread, or an interrupt, wakes the thread with this task. */
static __always_inline void woken(void *ctx, u64 task)
{
    u64 at = STRUCT_AT(task, TASK_TYPE);
    u32 tid = 0;

    READ_MEMBER(at, TASK_PID, tid);
    struct thread *t = entry_of(tid);
#ifdef WITH_WAKERS
    /* The thread may still be leaving its CPU, see switched_out(). */
    if (t && !(t->off_since && t->woken_at))
        note_waker(ctx, t);
#endif
#ifndef HAVE_PREV_STATE
    if (t && !t->off_since) { /* it is leaving its CPU: switched_out() may not find this state any more */
        u32 state = 0;
        READ_TASK(task, TASK_STATE, state);
        t->state = state_of(state);
    }
#endif
    if (!t || !(t->queued || (t->off_since && !t->woken_at)))
        return;
    u64 now = bpf_ktime_get_ns();
#ifdef WITH_CAUSES
    if (t->flags & THREAD_HOLDS && t->off_since && !t->woken_at)
        holder_changes(tid, t, t->state == STATE_RUNNABLE ? HOLDER_READY : HOLDER_BLOCKED, now);
#endif
#ifdef WITH_HOLDERS
    if (t->queued)
        leave_its_queue(ctx, task, tid, t, true, now);
#endif
    if (!t->off_since || t->woken_at)
        return;
#ifdef WITH_WAIT_SAMPLES
    if (t->waker)
        end_wait_sample(ctx, task, tid, t, t->waker, true, now);
#endif
    t->waker = bpf_get_current_pid_tgid() >> 32;
    t->woken_at = now;
}

/* Raw tracepoint sched_waking, called on the waker's CPU. Argument: the task that is being woken. */
int on_sched_waking(struct bpf_raw_tracepoint_args *ctx)
{
    u64 began = run_begins();

    woken(ctx, ctx->args[0]);
    run_ends(began);
    return 0;
}

/* Raw tracepoint sched_process_exec. Arguments: task, old_pid. A thread that is not the leader takes over the
 * leader's id when it calls exec. Entries of the current window have the old name of the process. The window
 * therefore ends with the next tick, so that what happens from then on counts under the new name. */
int on_sched_process_exec(struct bpf_raw_tracepoint_args *ctx)
{
    u32 old_tid = ctx->args[1], tid = bpf_get_current_pid_tgid();

    end_window_soon(current_window());
    if (old_tid == tid)
        return 0;
    remove_thread(old_tid);
    return 0;
}
