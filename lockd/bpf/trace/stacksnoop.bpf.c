// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* One record for each time that one of several functions or tracepoints is reached, with its stacks (lockd
 * trace stacksnoop). */

#define SNOOPED_PAGES 256

struct snooped {
    u64 at; /* ns on the monotonic clock */
    struct call_stack_ids stacks;
    u32 tgid;
    u32 tid;
    u32 cpu;
    u32 pad;
    char comm[COMM_LEN];
};

BPF_RINGBUF_OUTPUT(snooped, SNOOPED_PAGES);
BPF_ARRAY(snooped_record, struct snooped, 1); /* empty: tells user space the layout of a record */

/* Attached to whatever the user names: `ctx` may be of any type. */
int snoop_stack(void *ctx)
{
    u64 id = bpf_get_current_pid_tgid();
    struct snooped event = {.at = bpf_ktime_get_ns(), .tgid = id >> 32, .tid = id};

    if (!is_current_traced())
        return 0;
    event.cpu = bpf_get_smp_processor_id();
    bpf_get_current_comm(&event.comm, sizeof(event.comm));
    event.stacks = keep_call_stacks(ctx);
    if (snooped.ringbuf_output(&event, sizeof(event), BPF_RB_NO_WAKEUP))
        lose(LOSS_TRACE__FULL);
    return 0;
}
