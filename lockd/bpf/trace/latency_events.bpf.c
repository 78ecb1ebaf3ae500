// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Latency between any two tracepoints: the programs at both tracepoints, and at the end of a thread. */

int on_begin(void *ctx)
{
    call_began(ctx, 0);
    return 0;
}

int on_end(void *ctx)
{
    call_ended(0);
    return 0;
}

/* Raw tracepoint sched_process_exit. */
int on_thread_exit(struct bpf_raw_tracepoint_args *ctx)
{
    u64 id = current_id();

    latency_calls.delete(&id);
    return 0;
}
