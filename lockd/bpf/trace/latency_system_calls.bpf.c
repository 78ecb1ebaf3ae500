// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Latency of system calls: the programs at their entry and exit, at signals, and at the end of a thread. */

#define SA_RESTART 0x10000000
#define SIG_IGN 1 /* SIG_DFL is 0 */

#ifdef ALL_CALLS
/* Raw tracepoint sys_enter. Arguments: registers, number. */
int on_enter(struct bpf_raw_tracepoint_args *ctx)
{
    s32 nr = ctx->args[1];

    /* exit() and exit_group() never return. The event sys_exit of rt_sigreturn() has the result of the call
     * that the signal handler interrupted. */
    if (nr != NR_EXIT && nr != NR_EXIT_GROUP && nr != NR_RT_SIGRETURN && current_syscall() != NR_COMPAT)
        call_began(ctx, nr);
    return 0;
}

/* Raw tracepoint sys_exit. Arguments: registers, result. */
int on_exit(struct bpf_raw_tracepoint_args *ctx)
{
    call_ended(ctx->args[1]);
    return 0;
}
#else
/* Attached to sys_enter_NAME, so that other system calls pay nothing. */
int on_enter(struct sys_enter *ctx)
{
    call_began(ctx, ctx->nr);
    return 0;
}

/* Attached to sys_exit_NAME. */
int on_exit(struct sys_exit *ctx)
{
    call_ended(ctx->ret);
    return 0;
}
#endif

/* The beginning of struct k_sigaction. */
struct action {
    u64 handler;
    u64 flags;
};

/* Raw tracepoint signal_deliver. Arguments: signal, information, action. If a handler will run, the call that
 * the signal interrupted counts as ended, even if it continues after the handler. */
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

/* Raw tracepoint sched_process_exec. Arguments: task, and the thread's id before. If a thread that is not the
 * leader calls exec, it becomes the leader, and has the leader's id from then on. */
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
