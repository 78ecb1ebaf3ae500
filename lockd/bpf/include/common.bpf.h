// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Definitions that all programs share: pairs of maps, identities, slots and losses.
 *
 * An aggregate is a pair: two hash maps, `NAME_0` and `NAME_1`, behind an array of maps `NAME`. The last bit
 * of `control.window` is the number of the map that the programs write, and the sampler drains the other.
 * Keys contain the thread id. An entry therefore has one writer and needs no atomic operations. Entries about
 * holds of kernel locks and entries under restraint (see OF_PROCESS) are exceptions. When a map is full, the
 * event is counted in the pair `NAME_over`. The keys of this pair leave out everything that has many values,
 * so its entries have many writers and need atomic operations. If this pair has no room for the event either,
 * `losses` counts it. */

#include <linux/types.h>
#include <uapi/linux/ptrace.h>

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif

#define COMM_LEN 16
#define NS_PER_US 1000

/* Events that could not be counted (LOSS), and events that were counted in an overflow map, without thread
 * and lock (OVER). RETURN_MISSED means that a kretprobe missed a return, because it has room for few calls at
 * a time. Python takes the map and the reason from the names: LOSS_<map>__<reason>, OVER_<map>. */
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
    LOSS_KERNEL_HOLDS__RETURN_MISSED, /* a hold is lost; of a successful trylock the acquisition too */
    LOSS_KERNEL_HOLDS__RELEASE_MISSED, /* the thread takes a lock that it seems to hold already */
    LOSS_KERNEL_HOLDS__TAKEN_UNSEEN, /* a lock is released although nobody is known to hold it */
    LOSS_KERNEL_HOLDS__TOO_NESTED,
    LOSS_STACKS__FULL,
    LOSS_STACKS__UNREADABLE,
    LOSS_STACKS__CAPTURES_FULL,
    LOSS_TRACE__FULL, /* a map of a one-shot tool */
    LOSS_TRACE__THREADS_FULL,
    LOSS_TRACE__END_UNSEEN, /* a call begins in a thread whose last call has not ended */
    OVER_FUTEX,
    OVER_OFFCPU,
    OVER_KERNEL_LOCKS,
    OVER_KERNEL_HOLDS,
    UNSEEN_SWITCH, /* an absence from the CPU is counted without its time on the run queue */
    LOSSES
};

/* Values that a program is given when it is loaded (load/programs.py), because one program may serve many
 * kernel functions. The program loads them from offsets far behind the end of its context. The loader
 * replaces these loads: index 0 becomes a load of the function's return value, which follows the
 * arguments, and the others become constants. */
#define GIVEN_BASE 2048
#define GIVEN(ctx, which) (((volatile u64 *)(ctx))[GIVEN_BASE + (which)]) /* volatile: 64 bits are loaded */
#define GIVEN_RETURNED(ctx) GIVEN(ctx, 0)
#define GIVEN_LOCK_TYPE(ctx) ((u32)GIVEN(ctx, 1)) /* enum lock_type */
#define GIVEN_SUCCESS(ctx) ((u32)GIVEN(ctx, 2))
/* For kprobes: the address to which a kretprobe makes a function return. It is given and not in the source
 * text, because it changes with every boot and compiled programs are cached. */
#define GIVEN_RETURN_TRAMPOLINE(ctx) (GIVEN(ctx, 3) << 32 | (u32)GIVEN(ctx, 4))

/* The return value by which a function reports success. */
enum success { SUCCESS_ALWAYS, SUCCESS_0, SUCCESS_1, SUCCESS_POINTER };

#define MAX_ERRNO 4095
#define SUCCEEDED(ctx)                                                                                       \
    (GIVEN_SUCCESS(ctx) == SUCCESS_0         ? !(s32)RETURNED(ctx)                                           \
     : GIVEN_SUCCESS(ctx) == SUCCESS_1       ? (s32)RETURNED(ctx) == 1                                       \
     : GIVEN_SUCCESS(ctx) == SUCCESS_POINTER ? (u64)RETURNED(ctx) < (u64) - MAX_ERRNO                        \
                                             : true)

/* The thread that an entry is about, as it was when the entry was created. */
struct who {
    u64 cgroup; /* id of its cgroup in the unified hierarchy */
    char comm[COMM_LEN]; /* of the thread-group leader */
    char thread_comm[COMM_LEN];
    u32 tgid;
    u32 kernel_thread;
};

/* Python takes the values of the label `kind` from the names. Those before KIND_WAKE are kinds of waits. */
enum futex_kind { KIND_LOCK, KIND_PI, KIND_COND, KIND_OTHER, KIND_WAKE, KIND_NONE };

/* Python takes the values of the label `lock_type` from the names. */
enum lock_type {
    LOCK_MUTEX,
    LOCK_RWSEM_READ,
    LOCK_RWSEM_WRITE,
    LOCK_SEMAPHORE,
    LOCK_RTMUTEX,
    LOCK_PERCPU_RWSEM_READ,
    LOCK_PERCPU_RWSEM_WRITE,
    LOCK_SPINLOCK,
    LOCK_RWLOCK_READ,
    LOCK_RWLOCK_WRITE
};

#ifdef TRACE
struct call_stack_ids { /* numbers of stacks, see trace.bpf.h */
    u64 user;
    u64 kernel;
};
#endif

/* A futex call in progress. */
struct call {
    /* Time at which the call began; 0: no call. If it is not timed: NOT_TIMED or, in struct thread, the time
     * of its first switch-out. */
    u64 since;
    u64 uaddr;
    u32 tid;
    u8 guess; /* enum futex_kind as guessed from the arguments */
    u8 kind; /* enum futex_kind: the guess, or the kind of the lock in known_locks */
    u8 stands_for; /* number of calls that it counts for in sums of sys time; 0: not timed */
    u8 restart; /* 1: it was interrupted, and will continue as restart_syscall() */
#ifdef TRACE
    struct call_stack_ids stacks; /* where the thread blocked */
#endif
};

#define TASK_INTERRUPTIBLE 0x1
#define TASK_UNINTERRUPTIBLE 0x2
#define TASK_DEAD 0x80
#define TASK_WAKEKILL 0x100 /* with TASK_UNINTERRUPTIBLE it is TASK_KILLABLE */
#define TASK_WAKING 0x200
#define TASK_NOLOAD 0x400 /* with TASK_UNINTERRUPTIBLE it is TASK_IDLE: idle, not in the load average */
#define TASK_RTLOCK_WAIT 0x1000 /* waits for a sleeping spinlock of PREEMPT_RT (since 5.15) */

/* Flags of a task. */
#define PF_EXITING 0x4
#define PF_KTHREAD 0x200000

enum state { STATE_RUNNABLE, STATE_INTERRUPTIBLE, STATE_UNINTERRUPTIBLE, STATE_OTHER };

#ifdef TRACE_OFFCPU
/* The thread that ended a wait, and its stacks at the wake-up. */
struct waker {
    struct call_stack_ids stacks;
    u32 tid; /* 0: the idle task or an interrupt */
    u32 tgid;
    char comm[COMM_LEN]; /* of the thread; empty: the wake-up was not seen */
};
#endif

/* Whether a thread is counted as a waiter in the queue of a lock, of user space or of the kernel
 * (lock_queues.bpf.c). */
enum queued { QUEUED_NOT, QUEUED_BY_USER, QUEUED_IN_KERNEL };

/* Flags of a thread (lock_causes.bpf.c). */
#define THREAD_ID_NOTED 1 /* its id in its pid namespace is known */
#define THREAD_HOLDS 2 /* it is followed as the holder of a lock for which others wait */

/* What a thread has to do with a lock of the kernel (kernel_releases.bpf.c). */
#define AWAITS_LOCK 1 /* it waits for a lock, whether it sleeps or not */
#define SLEPT_FOR_LOCK 2 /* it sleeps for a lock or, if it is on a CPU, its last absence was such a sleep */

/* A thread that was switched out at least once, or that has waited for a lock of the kernel. The CPU that
 * runs the thread, or switches to it, writes its entry. Exceptions: the waker of the thread writes `woken_at`
 * and `waker`, resets `queued`, may change `flags` and, before 5.18, writes `state`. Other threads that wait
 * for a lock or release one may change `flags` too.
 *
 * In mode blocked everything from `off_since` on is one cache line of 64 bytes: a wait mostly ends on another
 * CPU than it began on, and each line that both CPUs write costs some 100 ns. The kernel puts 56 bytes
 * (struct htab_elem, 48, and the key, 8) before each value of 72 bytes, and leaves no gap between elements.
 * So every element is two whole lines. */
struct thread {
    u64 thread_pointer; /* set once the thread has waited for a user-space lock */
    u64 off_since; /* time at which it was switched out; 0: it is on a CPU */
    u64 woken_at; /* time of the wake-up; 0: not woken yet. While it is on a CPU: since when it runs */
    /* Thread group that woke it; 0: the idle task, that is, an interrupt. Before it is woken: the chance with
     * which its wait was sampled, in units of 2^-32, or 0 (wait_samples.bpf.c). While it is on a CPU: for how
     * long it was off the CPU before, in units of 1024 ns. */
    u32 waker;
    u32 tgid;
    s16 nr; /* number of the system call it is in, or an NR_* value below 0 (arch.bpf.h) */
    u8 state; /* enum state; STATE_RUNNABLE: preempted */
    u8 iowait;
    u8 detail; /* of the system call: enum futex_kind, file_kind, clone_kind or poll_kind */
    u8 flags; /* THREAD_* */
    u8 queued; /* enum queued: the sort of lock in whose queue it is counted */
    u8 awaits; /* AWAITS_LOCK, SLEPT_FOR_LOCK */
    struct call call; /* its futex call; in mode calls `running` has it until the thread leaves the CPU */
    u32 looked_up; /* time at which the lock of `call` was last found in known_locks, in units of 1 << 20 ns
                    */
    u32 ready; /* for how long it waited for a CPU when it was last off the CPU, in units of 1024 ns */
#ifdef FUTEX_CALLS
    u64 call_blocked; /* ns for which it was blocked in `call` so far */
#endif
#ifdef TRACE_OFFCPU
    struct call_stack_ids stacks; /* taken at the switch-out, as they are not available later */
    char comm[COMM_LEN]; /* of the thread at the switch-out */
    struct waker woken_by; /* the last waker, which writes this member */
#endif
};

/* What lockd leaves out to keep to its CPU budget. Each level includes the levels before it
 * (sample/budget/restraint.py). */
enum restraint {
    RESTRAINT_NONE,
    RESTRAINT_STACKS, /* no stacks are taken, and no releases sampled: new locks get no name */
    RESTRAINT_DETAIL, /* events are counted by process, not by thread and lock */
    RESTRAINT_PROCESSES, /* only totals are counted */
};

struct control { /* the loader writes the first member, and then the sampler the others */
    u64 queue_secret; /* a random odd number that stays the same (lock_causes.bpf.c) */
    u32 window; /* number of the window; its last bit is the map of every pair that the programs write */
    u32 restraint; /* enum restraint */
    u32 is_timed; /* 1: the programs measure how long one run in TIMED_RUNS takes */
    u32 sampler, exporter; /* ids of their thread groups */
    /* Waited time per sampled release of a lock (lock_queues.bpf.c), and per captured wait off the CPU
     * (wait_samples.bpf.c), in units of 1024 ns; 0: no samples. */
    u32 wait_per_sample;
    u32 wait_per_capture;
    u32 is_tracing; /* for one-shot tools; 0: no event that begins now is traced (is_traced()) */
    u32 is_asleep; /* 1: the sampler sleeps for several periods unless a program wakes it (wake_sampler()) */
    u32 pad;
};

/* What programs note in `written`, so that the sampler need not look at maps to which nothing was added.
 * Python reads the names: WRITTEN_FUTEX_OVER is about the pair `futex_over`. */
enum written {
    WRITTEN_STACKS,
    WRITTEN_CAPTURES,
    WRITTEN_FUTEX,
    WRITTEN_FUTEX_OVER,
    WRITTEN_OFFCPU,
    WRITTEN_OFFCPU_OVER,
    WRITTEN_KERNEL_LOCKS,
    WRITTEN_KERNEL_LOCKS_OVER,
    WRITTEN_KERNEL_HOLDS,
    WRITTEN_KERNEL_HOLDS_OVER,
    WRITTEN_SOON, /* the window should end with the next tick */
    WRITTEN_PROCESSES, /* an entry of an overflow map, or about neither lockd nor a kernel thread */
    WRITTEN_WAIT, /* a thread began to wait for a lock */
    WRITTENS
};

/* The sampler has mapped `control` and `written` into its memory: it reads and writes them without system
 * calls (arrays can be mapped since fc9702273e2e, 5.5). */
#define MMAPABLE 0x400 /* BPF_F_MMAPABLE */
BPF_F_TABLE("array", u32, struct control, control, 1, MMAPABLE);
/* The only element of `control`. The programs have its address as a constant, so that they need no look-up.
 * The loader puts the true address in place of each constant with the upper half of an AT_<MAP>
 * (load/compiled.py). */
#define AT_CONTROL 0x6c6f636b00000000
#define CONTROL ((volatile struct control *)AT_CONTROL)
/* Element 2 * W + M, with W of enum written and M the map of every pair (0 or 1), is the number of the last
 * window in which W was noted. A window's number comes back only after years, so nothing has to be cleared.
 * A program does not write a number that the element has already. */
BPF_F_TABLE("array", u32, u32, written, 2 * WRITTENS, MMAPABLE);
BPF_PERCPU_ARRAY(run_times, u64, 1); /* how long the timed runs took together, in ns */
BPF_PERCPU_ARRAY(losses, u64, LOSSES);
/* By thread id. Keys have 8 bytes because the kernel compares such keys as one word, and shorter ones byte by
 * byte. */
BPF_TABLE("hash", u64, struct thread, threads, THREADS_ENTRIES);

/* Return the entry of a thread, or NULL. */
static __always_inline struct thread *entry_of(u32 tid)
{
    u64 key = tid;

    return threads.lookup(&key);
}

/* Make an entry for a thread that has none. Return 0, or an error if the thread has one or there
 * is no room. */
static __always_inline int add_thread(u32 tid, struct thread *fresh)
{
    u64 key = tid;

    return threads.insert(&key, fresh);
}

static __always_inline void remove_thread(u32 tid)
{
    u64 key = tid;

    threads.delete(&key);
}

/* Return the number of the map that programs write in every pair: 0 or 1. */
static __always_inline int current_window(void)
{
    return CONTROL->window & 1;
}

/* Note `what`, of enum written, in the current window; `window` is what current_window() returned. */
static __always_inline void mark_written(u32 what, int window)
{
    u32 at = 2 * what + window, number = CONTROL->window;
    u32 *last = written.lookup(&at);

    if (!last)
        return;
    number -= (number ^ window) & 1; /* one flip may have come after current_window(), never two */
    if (*last != number)
        *last = number;
}

/* With WITHOUT_RINGS no program writes to a ring buffer, because it could sleep there (load/host.py). */
#if !defined(WITHOUT_RINGS) && !defined(TRACE)
#define WAKES_SAMPLER
/* The sampler waits for a record here while it sleeps. What is in the record does not matter. */
BPF_RINGBUF_OUTPUT(wakeups, 1);
#endif

/* Wake the sampler if it sleeps: something was written that it should look at with its next tick. A program
 * that runs just when the sampler goes to sleep may find it awake. Then the next call wakes the sampler, or
 * it wakes by itself after half a second. */
static __always_inline void wake_sampler(void)
{
#ifdef WAKES_SAMPLER
    u32 record = 0;

    if (!CONTROL->is_asleep)
        return;
    CONTROL->is_asleep = 0;
    wakeups.ringbuf_output(&record, sizeof(record), 0);
#endif
}

/* Have the current window end with the next tick, and that come soon; `window` is what current_window()
 * returned. */
static __always_inline void end_window_soon(int window)
{
    mark_written(WRITTEN_SOON, window);
    wake_sampler();
}

/* Whether this is the thread group of the sampler or the exporter, which run even if nothing else does. */
static __always_inline bool is_own(u32 tgid)
{
    return CONTROL->sampler == tgid || CONTROL->exporter == tgid;
}

/* Whether a thread of this thread group belongs to a process other than lockd's. Each tick runs the sampler,
 * and each drain runs threads of RCU: entries about those must be no reason for the next drain. */
static __always_inline bool is_of_process(u32 tgid, bool kernel_thread)
{
    return !kernel_thread && !is_own(tgid);
}

/* Add an entry to `map`, the one of the pair `pair` (enum written) that is written in `window`. `of_process`
 * is the answer of is_of_process(). The marks come first: there is never an entry without them. A window with
 * few entries may last for several ticks. One entry in FEW, chosen at random, makes it end with the next
 * tick, so that no map becomes full. Return 0, or an error if there is an entry with this key or no room. */
static __always_inline int add_entry(u32 pair, int window, void *map, void *key, void *fresh, bool of_process)
{
    mark_written(pair, window);
    if (of_process)
        mark_written(WRITTEN_PROCESSES, window);
    if (!(bpf_get_prandom_u32() % FEW))
        end_window_soon(window);
    return bpf_map_update_elem(map, key, fresh, BPF_NOEXIST);
}

static __always_inline u32 restraint(void)
{
#ifdef TRACE
    return RESTRAINT_NONE; /* a one-shot tool has to see everything */
#else
    return CONTROL->restraint;
#endif
}

/* Flag of a key's `tid`, which then is the id of a process. The entry is then about all threads and locks of
 * the process, and has many writers. */
#define OF_PROCESS 0x80000000

/* The kernel measures the run times of programs only on behalf of a process with CAP_SYS_ADMIN, which
 * lockd has given up. The programs therefore measure some runs in some windows themselves. */
#define TIMED_RUNS 8
/* A run that takes longer does not count: it was interrupted, or the virtual CPU itself did not run. */
#define LONGEST_RUN_NS 1000000

/* Return the time in ns at which this run of a program begins, or 0 if the run is not timed. */
static __always_inline u64 run_begins(void)
{
#ifdef TRACE
    return 0;
#else
    if (!CONTROL->is_timed || bpf_get_prandom_u32() % TIMED_RUNS)
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
    u64 reading = bpf_ktime_get_ns() - began - took; /* how long it takes to read the clock */
    if (took > reading && took < LONGEST_RUN_NS)
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

/* Add to a sum that has many writers. The compiler would turn an atomic addition of 0 into an atomic OR
 * with 0, which kernels before 5.12 do not know (981f94c3e921). */
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

/* Return 1 if a > b, else 0; both are below 2^63. There is no branch, because each branch doubles what the
 * kernel's verifier has to examine behind it. The empty assembly keeps the compiler from making one: the
 * compiler of Debian 13 did, and the verifier then refused the programs of mode `calls` together with mode
 * `all` as too large. */
static __always_inline u64 is_above(u64 a, u64 b)
{
    u64 difference = b - a;

    asm volatile("" : "+r"(difference));
    return difference >> 63;
}

/* 2^64 divided by the golden ratio. */
#define GOLDEN_RATIO 0x9e3779b97f4a7c15ULL

/* Return a number of 32 bits, made from a time in ns, that is as good as a random one: no thread leaves its
 * CPU or releases a lock at a chosen nanosecond. The helper for random numbers takes some 45 instructions. */
static __always_inline u64 chosen_by(u64 now)
{
    return (u32)(now * GOLDEN_RATIO >> 32);
}

/* Raise a maximum that has one writer. */
static __always_inline void raise_own(u64 *max, u64 value)
{
    *max += (value - *max) * is_above(value, *max);
}

#define READ_TASK(task, offset, to) bpf_probe_read_kernel(&(to), sizeof(to), (void *)((u64)(task) + (offset)))

/* Address of the current task, and a read of one of its members, or of a member of a struct to which such a
 * member points. The read needs no call of a helper where the verifier knows the task's type. */
#ifdef HAVE_TYPED_CURRENT
#define CURRENT_TASK() ((u64)bpf_get_current_task_btf())
#define READ_CURRENT(task, offset, to) ((to) = *(volatile typeof(to) *)((task) + (offset)))
#else
#define CURRENT_TASK() bpf_get_current_task()
#define READ_CURRENT(task, offset, to) READ_TASK(task, offset, to)
#endif

/* The struct of the kernel at an address, and a read of one of its members, or of a member of a struct to
 * which such a member points. Neither needs a call of a helper where the verifier accepts the type that the
 * program states (bpf_rdonly_cast(), a35b9af4ec2c, 6.2), by its number in the kernel's BTF. A read at an
 * address that is not mapped gives 0, as with the helper. The result of STRUCT_AT() has to be stored in a
 * variable: bcc turns a read at an address that comes from the context into a call of the helper. */
#ifdef RDONLY_CAST
/* The loader turns a call of the helper with the number KERNEL_FUNCTION + n into a call of the kernel's
 * function with the BTF id n (load/compiled.py). */
#define KERNEL_FUNCTION 0x10000000
static u64 (*const rdonly_cast)(u64 address, u32 type) = (void *)(KERNEL_FUNCTION + RDONLY_CAST);
#define STRUCT_AT(address, type) rdonly_cast(address, type)
#define READ_MEMBER(at, offset, to) ((to) = *(volatile typeof(to) *)((at) + (offset)))
#else
#define STRUCT_AT(address, type) ((u64)(address))
#define READ_MEMBER(at, offset, to) READ_TASK(at, offset, to)
#endif

/* Bits of `owner` in struct mutex, rw_semaphore and rt_mutex_base that are not part of the task's address. */
#define OWNER_FLAGS 7
#define READERS_OWN 1 /* in an rwsem (RWSEM_READER_OWNED): the task is or was one of its readers */

/* Return the address of the task that owns the kernel lock at the address `lock`, or 0 if the lock stores
 * none, or only a reader. `type` is of enum lock_type. */
static __always_inline u64 owner_of(u64 lock, u32 type)
{
    u64 owner = 0;

#ifdef MUTEX_OWNER
    if (type == LOCK_MUTEX)
        READ_TASK(lock, MUTEX_OWNER, owner);
    if (type == LOCK_RWSEM_READ || type == LOCK_RWSEM_WRITE) {
        READ_TASK(lock, RWSEM_OWNER, owner);
        if (owner & READERS_OWN)
            return 0;
    }
#endif
#ifdef RTMUTEX_OWNER
    if (type == LOCK_RTMUTEX)
        READ_TASK(lock, RTMUTEX_OWNER, owner);
#endif
    return owner & ~(u64)OWNER_FLAGS;
}

/* Fill in `who` for the task at the address `task`. The helper reads the members, because reads by
 * instructions would double what the verifier examines of on_sched_switch(). */
static __always_inline void identify(u64 task, struct who *who)
{
    u64 leader = 0, css_set = 0, cgroup = 0, node = 0;
    u32 flags = 0;

    READ_TASK(task, TASK_TGID, who->tgid);
    READ_TASK(task, TASK_COMM, who->thread_comm);
    READ_TASK(task, TASK_GROUP_LEADER, leader);
    READ_TASK(leader, TASK_COMM, who->comm);
    READ_TASK(task, TASK_FLAGS, flags);
    who->kernel_thread = !!(flags & PF_KTHREAD);
    READ_TASK(task, TASK_CGROUPS, css_set);
    READ_TASK(css_set, CSS_SET_DFL_CGRP, cgroup);
    READ_TASK(cgroup, CGROUP_KN, node);
    READ_TASK(node, KERNFS_NODE_ID, who->cgroup);
}

/* Slot i of a histogram counts (2^(i-1), 2^i] us, slot 0 everything up to 1 us, and the last slot
 * everything above. The upper edge is inclusive, as it is with the label `le`. */
#ifdef TRACE
#define SLOTS 64 /* every power of two has its slot */
#else
#define SLOTS 28
#endif
#define SLOT_NONE 255

static __always_inline u8 slot_of(u64 ns)
{
    u64 above = 0, rest = ns >> 9;

    if (ns <= NS_PER_US)
        return 0;
    /* After the loop, 2^(9 + above) <= ns < 2^(10 + above); and 1000 * 2^i lies between 2^(9 + i) and
     * 2^(10 + i). A division would take longer than this whole function. With up to 32 slots, five bits of
     * `above` are enough: a larger value becomes 31, which is not below the last slot. */
#pragma unroll
    for (int power = SLOTS > 32 ? 5 : 4; power >= 0; power--) {
        u64 shift = is_above(rest, (1ULL << (1 << power)) - 1) << power;
        rest >>= shift;
        above += shift;
    }
    u64 slot = above + is_above(ns, (u64)NS_PER_US << above);
    return slot < SLOTS ? slot : SLOTS - 1;
}

/* Whether the configuration asks for waits of this length (filter.min_block, max_block). */
static __always_inline bool is_wanted(u64 ns)
{
    return ns >= MIN_BLOCK_NS && ns <= MAX_BLOCK_NS;
}

/* Kernel stacks. A stack is taken only when an entry of an aggregate is created, that is once per window and
 * thread for waits of one length for a lock. Stacks are a pair of their own, so that there are no stack ids
 * that could collide or run out. Captures of user stacks: include/capture.bpf.h. */
#define KERNEL_FRAMES 20

struct stack_key {
    u64 address; /* of a lock */
    u32 tid;
    u16 type; /* enum lock_type */
    u16 slot; /* of the length of the wait */
};

struct stack {
    u64 kernel[KERNEL_FRAMES]; /* innermost first, up to a 0 */
};

BPF_TABLE("hash", struct stack_key, struct stack, stacks_0, STACKS_ENTRIES);
BPF_TABLE("hash", struct stack_key, struct stack, stacks_1, STACKS_ENTRIES);
BPF_ARRAY_OF_MAPS(stacks, "stacks_0", 2);

/* Keep the kernel stack of the current thread, which has waited for a lock. Do nothing if the window has a
 * stack with this key already, or from RESTRAINT_STACKS on. */
static __always_inline void keep_stack(void *ctx, int window, struct stack_key key)
{
    struct stack taken = {};
    void *map = stacks.lookup(&window);

    if (!map || restraint() >= RESTRAINT_STACKS || bpf_map_lookup_elem(map, &key))
        return;
    if (bpf_get_stack(ctx, taken.kernel, sizeof(taken.kernel), 0) < 0)
        lose(LOSS_STACKS__UNREADABLE);
    else if (add_entry(WRITTEN_STACKS, window, map, &key, &taken, false))
        lose(LOSS_STACKS__FULL);
}
