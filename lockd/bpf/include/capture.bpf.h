// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Captures: registers and top of the user stack of the current thread, to be unwound in user space. */

/* Most code has no frame pointers. Its callers are found by .eh_frame, from the registers and the stack. */
#ifndef CAPTURE_BYTES
#define CAPTURE_BYTES 4096
#endif
#define CAPTURE_CHUNK 512
#ifndef USER_FRAMES
#define USER_FRAMES 24
#endif

struct capture {
    struct pt_regs registers;
    u64 thread_pointer;
    u64 frames[USER_FRAMES]; /* instruction pointer, then return addresses by frame pointers; 0 ends them */
    u32 tid;
    u32 tgid;
    u32 bytes; /* length of `stack` */
    u32 pad;
    u8 stack[CAPTURE_BYTES]; /* from the stack pointer upward */
};

BPF_ARRAY(no_capture, struct capture, 1);

#ifdef HAVE_RETURN_INSTANCES
#define RETURN_INSTANCES 4 /* how many return addresses are restored at most: the innermost ones */

/* Restore the return addresses in `kept`, whose part of the stack begins at the address `from`. A uretprobe
 * replaces the return address of its function on the stack, which would hide all callers of the function. The
 * kernel remembers the original. */
static __always_inline void restore_return_addresses(u64 task, struct capture *kept, u64 from)
{
    u64 utask = 0, one = 0, at = 0, address = 0;

    READ_TASK(task, TASK_UTASK, utask);
    if (!utask)
        return;
    READ_TASK(utask, UTASK_RETURN_INSTANCES, one);
#pragma unroll
    for (int i = 0; i < RETURN_INSTANCES && one; i++) {
        READ_TASK(one, RETURN_STACK, at);
        READ_TASK(one, RETURN_ADDRESS, address);
        READ_TASK(one, RETURN_NEXT, one);
        if (at - from < CAPTURE_BYTES)
            *(u64 *)(kept->stack + ((at - from) & (CAPTURE_BYTES - sizeof(u64)))) = address;
    }
}
#endif

/* Return the 8 bytes at an address of the current process, or 0 if they cannot be read. */
static __always_inline u64 user_word(u64 at)
{
    u64 word = 0;

    bpf_probe_read_user(&word, sizeof(word), (void *)at);
    return word;
}

/* Return the 4 bytes at an address of the current process, or 0 if they cannot be read. */
static __always_inline u32 user_half(u64 at)
{
    u32 half = 0;

    bpf_probe_read_user(&half, sizeof(half), (void *)at);
    return half;
}

/* Capture the current thread, whose task is `task`, into `kept`, in which `bytes` and `frames` are 0. */
static __always_inline void fill_capture(void *ctx, u64 task, struct capture *kept)
{
    u64 id = bpf_get_current_pid_tgid();

    kept->tid = id;
    kept->tgid = id >> 32;
    bpf_probe_read_kernel(&kept->registers, sizeof(kept->registers), user_regs());
    READ_TASK(task, TASK_THREAD_POINTER, kept->thread_pointer);
    bpf_get_stack(ctx, kept->frames, sizeof(kept->frames), BPF_F_USER_STACK);
    u64 from = user_stack_pointer(&kept->registers);
#pragma unroll
    for (int at = 0; at < CAPTURE_BYTES; at += CAPTURE_CHUNK) {
        if (bpf_probe_read_user(kept->stack + at, CAPTURE_CHUNK, (void *)(from + at)))
            break;
        kept->bytes = at + CAPTURE_CHUNK;
    }
#ifdef HAVE_RETURN_INSTANCES
    restore_return_addresses(task, kept, from);
#endif
}

/* Time after which a thread that waits for the same lock is captured again. By then other code may wait for
 * the lock, or the process may have mapped more files. */
#define CAPTURED_AGAIN_NS 10000000000

#if !defined(WITHOUT_RINGS) &&                                                                               \
    (defined(WITH_FUTEX) || defined(WITH_USER_STACKS) || defined(WITH_WAIT_SAMPLES))
#define TELLS_OF_PROCESSES
/* The namer learns of a process at once by a ring buffer: many processes end before the maps are drained. */
struct told_process {
    u64 mm; /* address of its struct mm_struct, which changes with exec */
    u64 told; /* time of the announcement in ns */
};

BPF_TABLE("lru_hash", u32, struct told_process, told_processes, TOLD_PROCESSES_ENTRIES);
BPF_RINGBUF_OUTPUT(blocked_processes, 1); /* thread group ids, u32 */
#endif

/* Announce the process of the current thread to the namer, unless it was announced in the last
 * CAPTURED_AGAIN_NS and has not called exec since. The current thread is being captured, so the namer will
 * need the mappings of its process. */
static __always_inline void tell_of_process(u64 task, u32 tgid, u64 now)
{
#ifdef TELLS_OF_PROCESSES
    struct told_process *known = told_processes.lookup(&tgid);
    struct told_process fresh = {.told = now};

    READ_TASK(task, TASK_MM, fresh.mm);
    if (known && known->mm == fresh.mm && now - known->told < CAPTURED_AGAIN_NS)
        return;
    if (!blocked_processes.ringbuf_output(&tgid, sizeof(tgid), 0))
        told_processes.update(&tgid, &fresh);
#endif
}
