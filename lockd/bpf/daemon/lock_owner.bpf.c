// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* The owner of a kernel lock that a thread waits for. The program is attached to nothing: the sampler runs
 * it. */

/* Bits of `owner` in struct mutex, rw_semaphore and rt_mutex_base that are not part of the task's address. */
#define OWNER_FLAGS 7
#define READERS_OWN 1 /* in an rwsem (RWSEM_READER_OWNED): the task is, or was, only its last reader */

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

/* Arguments: the lock, and a thread that waits for it. Returns the id of the owner, or 0. The program
 * reads only memory that a thread waits for, because such memory is known to be a lock. */
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
