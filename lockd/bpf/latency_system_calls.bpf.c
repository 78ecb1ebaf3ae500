/* Where system calls begin and end, and where threads do. */

/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */

#define SA_RESTART 0x10000000
#define SIG_IGN 1 /* 0: SIG_DFL */

/* Which calls are asked for: a bit for each number, in eight words that the tool defines. */
static __always_inline bool is_asked(u32 nr)
{
    u64 bits = 0;

    switch (nr >> 6) {
    case 0:
        bits = CALLS_0;
        break;
    case 1:
        bits = CALLS_1;
        break;
    case 2:
        bits = CALLS_2;
        break;
    case 3:
        bits = CALLS_3;
        break;
    case 4:
        bits = CALLS_4;
        break;
    case 5:
        bits = CALLS_5;
        break;
    case 6:
        bits = CALLS_6;
        break;
    case 7:
        bits = CALLS_7;
        break;
    }
    return bits >> (nr & 63) & 1;
}

/* Raw tracepoint sys_enter: registers, number. Unlike the tracepoint of one call it is not left out while the
 * CPU's last task is in the middle of changing a map. */
int on_enter(struct bpf_raw_tracepoint_args *ctx)
{
    s32 nr = ctx->args[1];

    if (is_asked(nr) && current_syscall() != NR_COMPAT)
        call_began(ctx, nr);
    return 0;
}

/* Raw tracepoint sys_exit: registers, result. */
int on_exit(struct bpf_raw_tracepoint_args *ctx)
{
    call_ended(ctx->args[1]);
    return 0;
}

/* The beginning of struct k_sigaction. */
struct action {
    u64 handler;
    u64 flags;
};

/* Raw tracepoint signal_deliver: signal, information, action. If a handler is to run, the call that was
 * interrupted is over. */
int on_signal_deliver(struct bpf_raw_tracepoint_args *ctx)
{
    u64 id = current_id();
    struct latency_call *call = latency_calls.lookup(&id);
    struct action action = {};

    if (!call || !call->left)
        return 0;
    bpf_probe_read_kernel(&action, sizeof(action), (void *)ctx->args[2]);
    if (action.handler <= SIG_IGN)
        return 0;
    bool goes_on =
        call->result == -ERESTARTNOINTR || (call->result == -ERESTARTSYS && action.flags & SA_RESTART);
    count_call(id, call, goes_on ? call->result : -EINTR, call->left);
    return 0;
}

/* Raw tracepoint sched_process_exit. */
int on_thread_exit(struct bpf_raw_tracepoint_args *ctx)
{
    u64 id = current_id();
    struct latency_call *call = latency_calls.lookup(&id);

    if (call && call->left)
        count_call(id, call, call->result, call->left);
    else if (call && call->since)
        count_call(id, call, RESULT_DIED, bpf_ktime_get_ns());
    if (call)
        latency_calls.delete(&id);
    return 0;
}

/* A thread that is not the leader becomes it, and has its id from then on. Raw tracepoint sched_process_exec:
 * task, id before. */
int on_thread_renamed(struct bpf_raw_tracepoint_args *ctx)
{
    u64 id = current_id(), before = id >> 32 << 32 | (u32)ctx->args[1];
    struct latency_call *call = latency_calls.lookup(&before);

    if (call && before != id) {
        struct latency_call moved = *call;
        latency_calls.update(&id, &moved);
        latency_calls.delete(&before);
    }
    return 0;
}
