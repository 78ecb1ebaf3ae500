/* Single steps of BPF programs, each so many times in a program that a run of it can be timed: steps.py. */
#include <linux/types.h>

#define TIMES 64
#define STEP(name) static __always_inline void step_##name(void)
#define MEASURED(name)                                                                                       \
    int name(void *ctx)                                                                                      \
    {                                                                                                        \
        _Pragma("unroll") for (int i = 0; i < TIMES; i++)                                                    \
        {                                                                                                    \
            step_##name();                                                                                   \
            asm volatile("" ::: "memory");                                                                   \
        }                                                                                                    \
        return 0;                                                                                            \
    }

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif

struct wide { /* as large as a key of an aggregate */
    u64 address;
    u32 tid, more;
    u64 rest[2];
};

BPF_ARRAY(plain, u64, 1);
BPF_PERCPU_ARRAY(slot, u64, 1);
BPF_HASH(narrow, u32, u64, 16384);
BPF_HASH(wide, struct wide, u64, 16384);

STEP(nothing)
{
}

STEP(clock_read)
{
    bpf_ktime_get_ns();
}

STEP(thread_id)
{
    bpf_get_current_pid_tgid();
}

STEP(current_task)
{
    bpf_get_current_task();
}

STEP(array)
{
    u32 zero = 0;
    u64 *found = plain.lookup(&zero);
    if (found)
        *found += 1;
}

STEP(per_cpu_array)
{
    u32 zero = 0;
    u64 *found = slot.lookup(&zero);
    if (found)
        *found += 1;
}

STEP(hash)
{
    u32 key = 7;
    u64 *found = narrow.lookup(&key);
    if (found)
        *found += 1;
}

STEP(wide_hash)
{
    struct wide key = {.tid = 7};
    u64 *found = wide.lookup(&key);
    if (found)
        *found += 1;
}

STEP(hash_overwrite)
{
    u32 key = 7;
    u64 one = 1;
    narrow.update(&key, &one);
}

STEP(hash_insert_delete)
{
    u32 key = 9;
    u64 one = 1;
    narrow.update(&key, &one);
    narrow.delete(&key);
}

MEASURED(nothing)
MEASURED(clock_read)
MEASURED(thread_id)
MEASURED(current_task)
MEASURED(array)
MEASURED(per_cpu_array)
MEASURED(hash)
MEASURED(wide_hash)
MEASURED(hash_overwrite)
MEASURED(hash_insert_delete)
