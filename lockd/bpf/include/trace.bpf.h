// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Additions for one-shot tools: whole call stacks of events, and the selection of threads. */

/* A stack is stored once, under a number that is a hash of its addresses. Unlike in the kernel's stack
 * maps, two stacks never compete for one place. A stack does not fit on a program's own stack: each CPU
 * has a scratch area for one, and a new stack is written directly into the map. */
#define CALL_FRAMES 128
#define CALL_STACK_NONE 0 /* not asked for, or the user stack of a kernel thread or of an interrupt */
#define CALL_STACK_LOST 1 /* there was no room for it, or the scratch area was in use */

struct call_stack {
    u64 frames[CALL_FRAMES]; /* innermost first, up to a 0 */
};

BPF_TABLE("hash", u64, struct call_stack, kernel_stacks_0, STACKS_ENTRIES);
BPF_TABLE("hash", u64, struct call_stack, kernel_stacks_1, STACKS_ENTRIES);
BPF_ARRAY_OF_MAPS(kernel_stacks, "kernel_stacks_0", 2);
BPF_ARRAY(no_call_stack, struct call_stack, 1);
BPF_TABLE("hash", u64, struct capture, user_stacks_0, STACKS_ENTRIES);
BPF_TABLE("hash", u64, struct capture, user_stacks_1, STACKS_ENTRIES);
BPF_ARRAY_OF_MAPS(user_stacks, "user_stacks_0", 2);
/* The scratch area of a CPU. If an interrupt needs it while it is in use, the interrupt's stack is lost. */
struct stack_scratch {
    u64 words[CALL_FRAMES];
    u64 is_used;
};

BPF_PERCPU_ARRAY(stack_scratch, struct stack_scratch, 1);
BPF_TABLE("lru_hash", u64, u8, kept_stacks,
          KEPT_STACKS_ENTRIES); /* numbers of the stacks that were stored, in any window. The tool deletes
                                 * those that it had no room for, so that they are stored again */

static __always_inline u64 mixed(u64 hash, u64 word)
{
    hash = (hash ^ word) * 0x9ddfea08eb382d69ULL;
    return hash ^ (hash >> 29);
}

/* The range of kernel code by which interrupts of devices and timers enter the kernel. */
struct interrupt {
    u64 start; /* address */
    u64 bytes; /* 0: the range is not known */
    bool is_in; /* whether the stack goes through the range */
};

/* Return a number for the current stack as frame pointers show it: a hash of its addresses, whose initial
 * value is `number`. `flags` are those of bpf_get_stack(). If `in` is not NULL, the frames of code that an
 * interrupt interrupted do not count, and `in->is_in` becomes true if the stack is one of an interrupt. */
static __always_inline u64 stack_number(void *ctx, struct stack_scratch *scratch, u64 flags, u64 number,
                                        struct interrupt *in)
{
    s64 bytes = bpf_get_stack(ctx, scratch->words, sizeof(scratch->words), flags);

#pragma unroll
    for (int i = 0; i < CALL_FRAMES; i++) {
        if (i * (s64)sizeof(u64) >= bytes)
            break;
        number = mixed(number, scratch->words[i]);
        if (in && scratch->words[i] - in->start < in->bytes) {
            in->is_in = true;
            break;
        }
    }
    return number <= CALL_STACK_LOST ? number + 2 : number;
}

/* Whether nothing is to be stored for the stack `number`: it is stored already, or there is no room and
 * `number` becomes CALL_STACK_LOST. Otherwise a new entry is made, and `kept` points to it. */
static __always_inline bool is_kept(void *map, u64 *number, void *blank, void **kept)
{
    u8 known = 1;

    if (!map || !blank || kept_stacks.lookup(number))
        return true;
    if (!bpf_map_update_elem(map, number, blank, BPF_NOEXIST)) {
        *kept = bpf_map_lookup_elem(map, number);
        kept_stacks.update(number, &known);
        return false;
    }
    if (!bpf_map_lookup_elem(map, number)) { /* if there is an entry, another CPU was faster */
        lose(LOSS_STACKS__FULL);
        *number = CALL_STACK_LOST;
    }
    return true;
}

static __always_inline u64 keep_kernel_stack(void *ctx, struct stack_scratch *scratch, struct interrupt *in)
{
    u64 number = stack_number(ctx, scratch, 0, 0, in);
    int window = current_window();
    u32 zero = 0;
    void *kept = NULL;

    if (!is_kept(kernel_stacks.lookup(&window), &number, no_call_stack.lookup(&zero), &kept) && kept)
        bpf_get_stack(ctx, ((struct call_stack *)kept)->frames, CALL_FRAMES * sizeof(u64), 0);
    return number;
}

#ifdef UNWIND
/* Mix more of the user stack into its number. In code without frame pointers, bpf_get_stack() misses callers,
 * so that different stacks would have the same number. What is mixed in is the stack pointer, and those of
 * the topmost words that may be return addresses into the program or into the library that the thread is in.
 * Several numbers for one stack do no harm. */
#define SCANNED_WORDS 64
#define SCANNED_AT_ONCE 16
#define NEAR_CODE (2ULL << 20)

static __always_inline u64 mixed_with_callers(struct stack_scratch *scratch, u64 number, u64 task,
                                              struct pt_regs *regs)
{
    u64 mm = 0, start = 0, end = 0, ip = 0, sp = 0;

    READ_TASK(task, TASK_MM, mm);
    READ_TASK(mm, MM_START_CODE, start);
    READ_TASK(mm, MM_END_CODE, end);
    bpf_probe_read_kernel(&ip, sizeof(ip), &PT_REGS_IP(regs));
    bpf_probe_read_kernel(&sp, sizeof(sp), &regs->sp);
    number = mixed(number, sp);
#pragma unroll
    for (int at = 0; at < SCANNED_WORDS; at += SCANNED_AT_ONCE) { /* the stack may have fewer words */
        u64 *words = scratch->words + at;
        if (bpf_probe_read_user(words, SCANNED_AT_ONCE * sizeof(u64), (void *)(sp + at * sizeof(u64))))
            break;
#pragma unroll
        for (int i = 0; i < SCANNED_AT_ONCE; i++) {
            bool is_code = words[i] - start < end - start || words[i] - ip + NEAR_CODE < 2 * NEAR_CODE;
            number = is_code ? mixed(number, words[i]) : number;
        }
    }
    return number <= CALL_STACK_LOST ? number + 2 : number;
}
#endif

static __always_inline u64 keep_user_stack(void *ctx, struct stack_scratch *scratch)
{
    u64 task = bpf_get_current_task(), mm = 0;
    int window = current_window();
    u32 zero = 0;
    void *kept = NULL;

    READ_TASK(task, TASK_MM, mm);
    if (!mm)
        return CALL_STACK_NONE;
    u64 number = stack_number(ctx, scratch, BPF_F_USER_STACK, bpf_get_current_pid_tgid() >> 32, NULL);
#ifdef UNWIND
    number = mixed_with_callers(scratch, number, task, user_regs());
#endif
    if (!is_kept(user_stacks.lookup(&window), &number, no_capture.lookup(&zero), &kept) && kept) {
        fill_capture(ctx, task, kept);
        tell_of_process(task, bpf_get_current_pid_tgid() >> 32, bpf_ktime_get_ns());
    }
    return number;
}

/* Store the stacks of the current thread and return their numbers. If `in` is not NULL and an interrupt
 * came, only the interrupt's kernel stack is stored. */
static __always_inline struct call_stack_ids keep_stacks(void *ctx, struct interrupt *in)
{
    struct call_stack_ids ids = {};

#if defined(WITH_USER_STACKS) || defined(WITH_KERNEL_STACKS)
    u32 zero = 0;
    struct stack_scratch *scratch = stack_scratch.lookup(&zero);
    if (!scratch || scratch->is_used) {
        lose(LOSS_STACKS__UNREADABLE);
        return (struct call_stack_ids){CALL_STACK_LOST, CALL_STACK_LOST};
    }
    scratch->is_used = 1;
#ifdef WITH_KERNEL_STACKS
    ids.kernel = keep_kernel_stack(ctx, scratch, in);
#endif
#ifdef WITH_USER_STACKS
    if (!in || !in->is_in)
        ids.user = keep_user_stack(ctx, scratch);
#endif
    scratch->is_used = 0;
#endif
    return ids;
}

static __always_inline struct call_stack_ids keep_call_stacks(void *ctx)
{
    return keep_stacks(ctx, NULL);
}

/* The processes and threads that the user asked for. The tool fills the tables when everything is
 * attached; until then nothing is traced. */
#ifdef ONLY_LISTED
BPF_TABLE("hash", u32, u8, traced_processes, TRACED_ENTRIES);
BPF_TABLE("hash", u32, u8, traced_threads, TRACED_ENTRIES);
#endif

/* Whether a thread with these ids is traced; `kernel_thread` as in struct who. No thread is traced while
 * hooks are attached or detached one after another, so that all programs begin and stop counting at the same
 * time. */
static __always_inline bool is_traced(u32 tgid, u32 tid, bool kernel_thread)
{
    if (!CONTROL->is_tracing)
        return false;
#ifdef ONLY_USER_THREADS
    if (kernel_thread)
        return false;
#endif
#ifdef ONLY_KERNEL_THREADS
    if (!kernel_thread)
        return false;
#endif
#ifdef ONLY_LISTED
    if (!traced_processes.lookup(&tgid) && !traced_threads.lookup(&tid))
        return false;
#endif
    return true;
}

static __always_inline bool is_kernel_thread(u64 task)
{
    u32 flags = 0;

    READ_TASK(task, TASK_FLAGS, flags);
    return flags & PF_KTHREAD;
}

/* Whether events of the current thread are traced now. */
static __always_inline bool is_current_traced(void)
{
    u64 id = bpf_get_current_pid_tgid();
    bool kernel_thread = false;

#ifdef ONLY_CPU
    if (bpf_get_smp_processor_id() != ONLY_CPU)
        return false;
#endif
#if defined(ONLY_USER_THREADS) || defined(ONLY_KERNEL_THREADS)
    kernel_thread = is_kernel_thread(bpf_get_current_task());
#endif
    return is_traced(id >> 32, id, kernel_thread);
}
