// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* The owner of a kernel lock that a thread waits for. The program is attached to nothing: the sampler runs
 * it. */

/* Arguments: the address of the lock, and the id of a thread that waits for it. Returns the thread id of the
 * owner, or 0. The program reads the memory at the address only while the thread waits there, because then
 * the address is known to be that of a lock. */
int read_owner(struct bpf_raw_tracepoint_args *ctx)
{
    struct kernel_wait_key key = {.lock = ctx->args[0], .tid = ctx->args[1]};
    struct kernel_wait *wait = kernel_waits.lookup(&key);
    u32 tid = 0;

    if (!wait)
        return 0;
    u64 owner = owner_of(key.lock, wait->type);
    if (owner)
        READ_TASK(owner, TASK_PID, tid);
    return tid;
}
