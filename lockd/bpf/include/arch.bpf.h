// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Differences between architectures: saved user registers, system call numbers and a struct of glibc. */

#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
#define NR_FUTEX 98
#define NR_RESTART_SYSCALL 128
#define NR_CLONE 220
#define NR_EPOLL_PWAIT 22
#define NR_EPOLL_WAIT NR_EPOLL_PWAIT /* this architecture has no epoll_wait() */
#define NR_RT_SIGQUEUEINFO 138
#define NR_RT_TGSIGQUEUEINFO 240

#define PTHREAD_MUTEX_BYTES 48 /* sizeof(pthread_mutex_t) */

#else
#define NR_FUTEX 202
#define NR_RESTART_SYSCALL 219
#define NR_CLONE 56
#define NR_EPOLL_WAIT 232
#define NR_EPOLL_PWAIT 281
#define NR_RT_SIGQUEUEINFO 129
#define NR_RT_TGSIGQUEUEINFO 297

#define PTHREAD_MUTEX_BYTES 40

#define USER64_CODE_SEGMENT 0x33
#define NR_COMPAT_FUTEX 240 /* futex() of 32-bit programs */
#define NR_COMPAT_FUTEX_TIME64 422 /* the same with a timeout of 64 bits (since 5.1) */
#endif

#define THREAD_BYTES 16384 /* size of a kernel stack (THREAD_SIZE) */

/* System calls that have the same number on every architecture. They exist since 5.1, 5.3 and 5.16, and the
 * last three since 6.7. */
#define NR_PIDFD_SEND_SIGNAL 424
#define NR_CLONE3 435
#define NR_FUTEX_WAITV 449
#define NR_FUTEX_WAKE 454
#define NR_FUTEX_WAIT 455
#define NR_FUTEX_REQUEUE 456

/* Values in place of a system call number. */
#define NR_NONE (-1) /* a user thread in no system call, but in a page fault or another trap */
#define NR_KERNEL (-2) /* a kernel thread, or a worker that the kernel made for a process */
#define NR_COMPAT (-3) /* a system call of a 32-bit program, whose numbers differ */
#define NR_EXITING (-4) /* a thread that ends, whichever call it was in */

/* Return the address of the saved user registers of a thread. Since 5.15 a helper finds them. In older
 * kernels they are at the very top of the kernel stack: the padding above them came only with 6.9 (FRED). */
static __always_inline struct pt_regs *user_regs_of(u64 task)
{
#ifdef HAVE_TYPED_CURRENT
    return (struct pt_regs *)bpf_task_pt_regs((struct task_struct *)task);
#else
    u64 stack = 0;
    bpf_probe_read_kernel(&stack, sizeof(stack), (void *)(task + TASK_STACK));
    return (struct pt_regs *)(stack + THREAD_BYTES - sizeof(struct pt_regs));
#endif
}

/* Return the address of the saved user registers of the current thread. */
static __always_inline struct pt_regs *user_regs(void)
{
#ifdef HAVE_TYPED_CURRENT
    return user_regs_of((u64)bpf_get_current_task_btf());
#else
    return user_regs_of(bpf_get_current_task());
#endif
}

#if !defined(__TARGET_ARCH_arm64) && !defined(__aarch64__)
struct saved_call { /* these registers follow one another in struct pt_regs, too */
    u64 orig_ax, ip, cs;
};

/* Return the saved registers that tell which system call a thread is in. */
static __always_inline struct saved_call saved_call(struct pt_regs *registers)
{
    struct saved_call call = {};
#ifdef HAVE_TYPED_CURRENT
    volatile struct pt_regs *saved = registers;
    call.orig_ax = saved->orig_ax;
    call.ip = saved->ip;
    call.cs = saved->cs;
#else
    bpf_probe_read_kernel(&call, sizeof(call), &registers->orig_ax);
#endif
    return call;
}
#endif

/* Return the number of the system call that a user thread is in, by its saved registers; or NR_NONE,
 * NR_KERNEL or NR_COMPAT. */
static __always_inline s16 syscall_of(struct pt_regs *registers)
{
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
    s32 nr = NR_NONE;
    bpf_probe_read_kernel(&nr, sizeof(nr), &registers->syscallno);
    return nr;
#else
    struct saved_call call = saved_call(registers);

    /* A worker that the kernel makes for a process (io_uring, vhost) is no kernel thread. It has a copy of
     * the user registers of the thread that created it, with the number of that thread's call, if any. Only
     * the stack pointer and the instruction pointer are 0, by copy_thread() (50b7b6f29de3, 5.13). */
    if (!call.ip)
        return NR_KERNEL;
    if ((s64)call.orig_ax < 0)
        return NR_NONE;
    return (u16)call.cs == USER64_CODE_SEGMENT ? (s16)call.orig_ax : NR_COMPAT;
#endif
}

/* Return the number of the system call that the current thread is in, or a negative NR_* value. */
static __always_inline s16 current_syscall(void)
{
    return syscall_of(user_regs());
}

/* Read the first `count` arguments, two to four, of the system call that a thread is in, by its saved user
 * registers. `arguments` has room for four. */
static __always_inline void read_arguments(struct pt_regs *saved, bool is_compat, int count, u64 *arguments)
{
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
    bpf_probe_read_kernel(arguments, 4 * sizeof(u64), &saved->regs[0]);
    bpf_probe_read_kernel(arguments, sizeof(u64), &saved->orig_x0);
#else
#ifdef HAVE_TYPED_CURRENT
    volatile struct pt_regs *regs = saved; /* read by load instructions, without a helper */
#else
    struct {
        u64 bx, r11, r10, r9, r8, ax, cx, dx, si, di;
    } all = {}, *regs = &all;

    bpf_probe_read_kernel(&all, sizeof(all), &saved->bx);
#endif
    if (count > 2)
        arguments[2] = regs->dx;
    if (is_compat) {
        arguments[0] = (u32)regs->bx;
        arguments[1] = (u32)regs->cx;
        if (count > 3)
            arguments[3] = (u32)regs->si;
    } else {
        arguments[0] = regs->di;
        arguments[1] = regs->si;
        if (count > 3)
            arguments[3] = regs->r10;
    }
#endif
}

struct system_call {
    u32 nr;
    bool is_compat; /* of a 32-bit program, which has its own numbers and its own order of registers */
    u64 args[4];
};

/* Return the system call that a thread is in, with its first `count` arguments, by its saved user registers.
 */
static __always_inline struct system_call call_of(struct pt_regs *saved, int count)
{
    struct system_call call = {};
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
    bpf_probe_read_kernel(&call.nr, sizeof(call.nr), &saved->syscallno);
#else
    struct saved_call kept = saved_call(saved);

    call.nr = kept.orig_ax;
    call.is_compat = (u16)kept.cs != USER64_CODE_SEGMENT;
#endif
    read_arguments(saved, call.is_compat, count, call.args);
    return call;
}

static __always_inline u64 user_stack_pointer(struct pt_regs *regs)
{
    return regs->sp; /* this member has the same name on x86-64 and arm64 */
}

/* Return the first argument of the system call that a thread is in, by its saved user registers. It is wrong
 * for 32-bit system calls on x86, which pass it in another register. */
static __always_inline u64 first_argument(struct pt_regs *saved)
{
    u64 argument = 0;
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
    bpf_probe_read_kernel(&argument, sizeof(argument), &saved->orig_x0);
#elif defined(HAVE_TYPED_CURRENT)
    argument = ((volatile struct pt_regs *)saved)->di;
#else
    bpf_probe_read_kernel(&argument, sizeof(argument), &saved->di);
#endif
    return argument;
}

/* Return the fifth argument of the system call that a thread is in, by its saved user registers. */
static __always_inline u64 fifth_argument(struct pt_regs *saved, bool is_compat)
{
    u64 argument = 0;
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
    bpf_probe_read_kernel(&argument, sizeof(argument), &saved->regs[4]);
#else
    bpf_probe_read_kernel(&argument, sizeof(argument), is_compat ? &saved->di : &saved->r8);
#endif
    return is_compat ? (u32)argument : argument;
}

/* Whether a system call reads or writes (read, write, their variants, sendfile, splice). What such a call
 * waits for depends on the file. */
static __always_inline bool is_read_or_write(s16 nr)
{
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
    return (nr >= 63 && nr <= 71) || nr == 76 || nr == 286 || nr == 287;
#else
    return nr == 0 || nr == 1 || (nr >= 17 && nr <= 20) || nr == 40 || nr == 275 || nr == 295 || nr == 296 ||
           nr == 327 || nr == 328;
#endif
}

/* Return the address to which a function will return. For a kprobe at the function's entry. */
static __always_inline u64 return_address(struct pt_regs *ctx)
{
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
    return ctx->regs[30];
#else
    u64 address = 0;
    bpf_probe_read_kernel(&address, sizeof(address), (void *)ctx->sp);
    return address;
#endif
}
