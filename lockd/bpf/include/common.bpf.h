/* What all programs share: maps that come in pairs, identities, slots, and what was lost.
 *
 * An aggregate lives in two hash maps, `NAME_0` and `NAME_1`, behind an array of maps
 * `NAME`. Programs write the one that `control.window` names; the sampler drains the
 * other. Keys contain the thread id, so that an entry has one writer and needs no atomics
 * (but under restraint, see OF_PROCESS).
 * When a map is full, the event goes to the pair `NAME_over`, whose keys leave out
 * everything of many values (atomics there: many writers); what finds no place there
 * either is counted in `losses`. */

#include <linux/types.h>
#include <uapi/linux/ptrace.h>

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif

#define COMM_LEN 16
#define NS_PER_US 1000

/* What could not be counted (LOSS), and what was counted without its names (OVER). A return
 * is missed by a kretprobe, which has room for few calls at a time.
 * Python reads the names: map and reason for LOSS_<map>__<reason>, map for OVER_<map>. */
enum loss {
    LOSS_FUTEX__THREADS_FULL,
    LOSS_FUTEX__FULL,
    LOSS_FUTEX__RETURN_MISSED,
    LOSS_OFFCPU__THREADS_FULL,
    LOSS_OFFCPU__FULL,
    LOSS_KERNEL_LOCKS__WAITS_FULL,
    LOSS_KERNEL_LOCKS__FULL,
    LOSS_KERNEL_LOCKS__RETURN_MISSED,
    LOSS_KERNEL_HOLDS__HOLDING_FULL,
    LOSS_KERNEL_HOLDS__FULL,
    LOSS_KERNEL_HOLDS__RETURN_MISSED, /* of a try, or of a wait: a taking, or only its hold */
    LOSS_KERNEL_HOLDS__RELEASE_MISSED, /* the thread takes again what it holds */
    LOSS_KERNEL_HOLDS__TAKEN_UNSEEN, /* released, and nobody is known to hold it */
    LOSS_KERNEL_HOLDS__TOO_NESTED,
    LOSS_STACKS__FULL,
    LOSS_STACKS__UNREADABLE,
    LOSS_STACKS__CAPTURES_FULL,
    LOSS_TRACE__FULL, /* of a one-shot tool */
    LOSS_TRACE__THREADS_FULL,
    LOSS_TRACE__END_UNSEEN, /* it begins again */
    OVER_FUTEX,
    OVER_OFFCPU,
    OVER_KERNEL_LOCKS,
    OVER_KERNEL_HOLDS,
    UNSEEN_SWITCH, /* counted, but not for how long it was on the run queue */
    LOSSES
};

/* What a program is given when it is loaded (load/programs.py), as it may serve many functions of
 * the kernel: loads of the context from so far behind its end become loads of what comes
 * after the function's arguments, which is what it returns, or constants. */
#define GIVEN_BASE 2048
#define GIVEN(ctx, which) (((volatile u64 *)(ctx))[GIVEN_BASE + (which)]) /* as wide as it says */
#define GIVEN_RETURNED(ctx) GIVEN(ctx, 0)
#define GIVEN_LOCK_TYPE(ctx) ((u32)GIVEN(ctx, 1)) /* enum lock_type */
#define GIVEN_SUCCESS(ctx) ((u32)GIVEN(ctx, 2))
/* Of kprobes: where a kretprobe lets a function return to. Given, and not in the text, since it changes
 * with every boot, and what was compiled is kept. */
#define GIVEN_RETURN_TRAMPOLINE(ctx) (GIVEN(ctx, 3) << 32 | (u32)GIVEN(ctx, 4))

/* What a function returns if it has done what it was called for. */
enum success { SUCCESS_ALWAYS, SUCCESS_0, SUCCESS_1, SUCCESS_POINTER };

#define MAX_ERRNO 4095
#define SUCCEEDED(ctx)                                                                                       \
    (GIVEN_SUCCESS(ctx) == SUCCESS_0         ? !(s32)RETURNED(ctx)                                           \
     : GIVEN_SUCCESS(ctx) == SUCCESS_1       ? (s32)RETURNED(ctx) == 1                                       \
     : GIVEN_SUCCESS(ctx) == SUCCESS_POINTER ? (u64)RETURNED(ctx) < (u64) - MAX_ERRNO                        \
                                             : true)

/* Who an entry is about, noted when the entry is created. */
struct who {
    u64 cgroup; /* id in the unified hierarchy */
    char comm[COMM_LEN]; /* of the thread-group leader */
    char thread_comm[COMM_LEN];
    u32 tgid;
    u32 kernel_thread;
};

/* Python reads the names as the label kind. */
enum futex_kind { KIND_LOCK, KIND_PI, KIND_COND, KIND_OTHER, KIND_WAKE, KIND_NONE };

#ifdef TRACE
struct call_stack_ids { /* see trace.bpf.h */
    u64 user;
    u64 kernel;
};
#endif

/* A futex call in progress. */
struct call {
    u64 since; /* 0: none; of a call that is not timed, some time while it was in progress */
    u64 uaddr;
    u32 tid;
    u8 guess; /* enum futex_kind, by its arguments */
    u8 kind; /* the same, or what is known of the lock */
    u8 stands_for; /* so many calls, in sums of sys time; 0: is not timed */
    u8 pad;
#ifdef TRACE
    struct call_stack_ids stacks; /* where it blocked */
#endif
};

enum state { STATE_RUNNABLE, STATE_INTERRUPTIBLE, STATE_UNINTERRUPTIBLE, STATE_OTHER };

#ifdef TRACE_OFFCPU
/* Who ended a wait, and where it was as it did. */
struct waker {
    struct call_stack_ids stacks;
    u32 tid; /* 0: the idle task */
    u32 tgid;
    char comm[COMM_LEN]; /* of the thread; empty: was not seen */
};
#endif

/* A thread that was switched out at least once; written by the thread itself, but for
 * `woken_at` and `waker`, which its waker writes. */
struct thread {
    u64 off_since; /* switched out at; 0: on a CPU */
    u64 woken_at; /* 0: not yet */
    struct call call; /* moved here from the CPU's slot when it blocks in a call */
    u64 call_blocked; /* so far in this call */
    u64 looked_up; /* when the lock of `call` last was found among known_locks; 0: was not */
    u64 thread_pointer; /* of a thread that has waited for a lock */
    u32 tgid;
    u32 waker; /* thread group that woke it; 0: the idle task, that is an interrupt */
    s16 nr; /* system call it is in */
    u8 state; /* enum state; STATE_RUNNABLE: preempted */
    u8 iowait;
    u8 detail; /* of the system call: enum futex_kind or enum file_kind */
    u8 restart; /* its futex call is to go on as restart_syscall() */
    u8 pad[2];
#ifdef TRACE_OFFCPU
    struct call_stack_ids stacks; /* as it was switched out: later they can be had no more */
    char comm[COMM_LEN]; /* of the thread, then */
    struct waker woken_by; /* the last that did; its waker writes this */
#endif
};

/* What lockd does without when it costs too much, each step with those before it (sample/budget/restraint.py). */
enum restraint {
    RESTRAINT_NONE,
    RESTRAINT_STACKS, /* what is new gets no name */
    RESTRAINT_DETAIL, /* counted by process, not by thread and lock */
    RESTRAINT_PROCESSES, /* only the totals */
    RESTRAINTS
};

struct control { /* the sampler writes it */
    u32 window; /* which map of every pair the programs write: 0 or 1 */
    u32 restraint; /* enum restraint */
    u32 is_timed; /* whether run times of programs are taken in this window */
};

BPF_ARRAY(control, struct control, 1);
BPF_PERCPU_ARRAY(run_times, u64, 1); /* of one run in TIMED_RUNS, in ns */
BPF_PERCPU_ARRAY(losses, u64, LOSSES);
BPF_TABLE("hash", u32, struct thread, threads, THREADS_ENTRIES);

static __always_inline int current_window(void)
{
    u32 zero = 0;
    struct control *c = control.lookup(&zero);
    return c ? c->window & 1 : 0;
}

static __always_inline u32 restraint(void)
{
#ifdef TRACE
    return RESTRAINT_NONE; /* who looks for a moment wants to see it all */
#else
    u32 zero = 0;
    struct control *c = control.lookup(&zero);
    return c ? c->restraint : RESTRAINT_NONE;
#endif
}

/* In a key, with the id of a process in place of a thread's: of all its threads and locks. Has many writers.
 */
#define OF_PROCESS 0x80000000

/* The kernel takes the times of programs only for who has CAP_SYS_ADMIN, and lockd has given that up. So
 * programs take their own, of some runs in some windows: all others pay for a look at `control`. */
#define TIMED_RUNS 8

/* When the run began; 0: it is not timed. */
static __always_inline u64 run_begins(void)
{
#ifdef TRACE
    return 0;
#else
    u32 zero = 0;
    struct control *c = control.lookup(&zero);
    if (!c || !c->is_timed || bpf_get_prandom_u32() % TIMED_RUNS)
        return 0;
    return bpf_ktime_get_ns();
#endif
}

static __always_inline void run_ends(u64 began)
{
    u32 zero = 0;
    u64 *total = began ? run_times.lookup(&zero) : NULL;

    if (!total)
        return;
    u64 took = bpf_ktime_get_ns() - began;
    u64 reading = bpf_ktime_get_ns() - began - took; /* with what came between, such as an interrupt */
    if (took > reading)
        *total += took - reading;
}

static __always_inline void lose_many(u32 what, u64 events)
{
    u64 *count = losses.lookup(&what);
    if (count)
        *count += events;
}

static __always_inline void lose(u32 what)
{
    lose_many(what, 1);
}

/* For sums of many writers. To add nothing, the compiler would rather or it with nothing,
 * which kernels before 5.12 do not know (981f94c3e921). */
static __always_inline void add_to(u64 *sum, u64 value)
{
    if (value)
        __sync_fetch_and_add(sum, value);
}

static __always_inline void raise_to(u64 *max, u64 value)
{
    if (value > *max)
        *max = value;
}

#define READ_TASK(task, offset, to) bpf_probe_read_kernel(&(to), sizeof(to), (void *)((u64)(task) + (offset)))

/* The same of the current thread's own task, which needs no helper where the kernel knows its type. */
#ifdef HAVE_TYPED_CURRENT
#define CURRENT_TASK() ((u64)bpf_get_current_task_btf())
#define READ_CURRENT(task, offset, to) ((to) = *(volatile typeof(to) *)((task) + (offset)))
#else
#define CURRENT_TASK() bpf_get_current_task()
#define READ_CURRENT(task, offset, to) READ_TASK(task, offset, to)
#endif

static __always_inline void identify(u64 task, struct who *who)
{
    u64 leader = 0, css_set = 0, cgroup = 0, node = 0;
    u32 flags = 0;

    READ_TASK(task, TASK_TGID, who->tgid);
    READ_TASK(task, TASK_COMM, who->thread_comm);
    READ_TASK(task, TASK_GROUP_LEADER, leader);
    READ_TASK(leader, TASK_COMM, who->comm);
    READ_TASK(task, TASK_FLAGS, flags);
    who->kernel_thread = !!(flags & 0x00200000); /* PF_KTHREAD */
    READ_TASK(task, TASK_CGROUPS, css_set);
    READ_TASK(css_set, CSS_SET_DFL_CGRP, cgroup);
    READ_TASK(cgroup, CGROUP_KN, node);
    READ_TASK(node, KERNFS_NODE_ID, who->cgroup);
}

/* Slot i of a histogram holds (2^(i-1), 2^i] us, slot 0 all up to 1 us and the last all
 * above: the upper edge is inclusive, as `le` is. */
#ifdef TRACE
#define SLOTS 64 /* as many as there can be */
#else
#define SLOTS 28
#endif
#define SLOT_NONE 255

static __always_inline u8 slot_of(u64 ns)
{
    u64 us = ns ? (ns - 1) / NS_PER_US : 0;
    u64 slot = us ? bpf_log2l(us) : 0; /* bcc's bpf_log2l(2^k) is k + 1 */
    return slot < SLOTS ? slot : SLOTS - 1;
}

/* Whether a wait is one that the configuration asks for (filter.min_block, max_block). */
static __always_inline bool is_wanted(u64 ns)
{
    return ns >= MIN_BLOCK_NS && ns <= MAX_BLOCK_NS;
}

/* The kernel's stacks: taken only when an aggregate entry is created, that is once per thread, lock
 * and window; a pair of their own, so that there are no ids to collide or to run out. Stacks of
 * user space are in captures.bpf.c. */
#define KERNEL_FRAMES 20

struct stack_key {
    u64 address;
    u32 tid;
    u32 pad;
};

struct stack {
    u64 kernel[KERNEL_FRAMES]; /* innermost first, 0 ends */
};

BPF_TABLE("hash", struct stack_key, struct stack, stacks_0, STACKS_ENTRIES);
BPF_TABLE("hash", struct stack_key, struct stack, stacks_1, STACKS_ENTRIES);
BPF_ARRAY_OF_MAPS(stacks, "stacks_0", 2);

static __always_inline void keep_stack(void *ctx, int window, u64 address, u32 tid)
{
    struct stack_key key = {.address = address, .tid = tid};
    struct stack taken = {};
    void *map = stacks.lookup(&window);

    if (!map || restraint() >= RESTRAINT_STACKS || bpf_map_lookup_elem(map, &key))
        return;
    if (bpf_get_stack(ctx, taken.kernel, sizeof(taken.kernel), 0) < 0)
        lose(LOSS_STACKS__UNREADABLE);
    else if (bpf_map_update_elem(map, &key, &taken, BPF_NOEXIST))
        lose(LOSS_STACKS__FULL);
}
